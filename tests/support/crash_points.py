"""A service that dies at a given point.

    python -m tests.support.crash_points ledger|dedup|dispatcher

runs the real service with its ports wrapped. Each call through a port passes two points,
`<verb>.before` and `<verb>.after`; the ledger also passes `receipts.before` and `receipts.after`,
around the writing of receipts to a stream. An Order in the file that SEQGATE_TEST_ORDER names is
executed once, exactly at its point: it sends a signal to this process or to others.
"""

import json
import os
import resource
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from seqgate.services.dedup import app as dedup_app
from seqgate.services.dedup.adapters.connect import connect_redis
from seqgate.services.dedup.adapters.redis import RedisStateStore
from seqgate.services.dedup.config import DedupConfig
from seqgate.services.dispatcher import app as dispatcher_app
from seqgate.services.dispatcher.adapters.cursors import SubscriptionCursors
from seqgate.services.dispatcher.adapters.filters import GrpcFilters
from seqgate.services.dispatcher.adapters.ledger import GrpcLog
from seqgate.services.dispatcher.adapters.letters import GrpcDeadLetters
from seqgate.services.dispatcher.config import DispatcherConfig
from seqgate.services.ledger import app as ledger_app
from seqgate.services.ledger.adapters.dedup import GrpcDeduplicator
from seqgate.services.ledger.adapters.sqlite import open_sqlite_store
from seqgate.services.ledger.config import LedgerConfig
from seqgate.services.ledger.core import writer
from seqgate.services.ledger.live import News, Session
from seqgate.services.runtime.channels import following_channel, peer_channel
from seqgate.services.runtime.process import run_service

ORDER = "SEQGATE_TEST_ORDER"
"""The variable that names the order's file."""

FILE_BYTES_MAX = "SEQGATE_TEST_FILE_BYTES_MAX"
"""The variable that limits the size of files this process writes, to simulate a full disk."""

REPLAY_PAGE = "SEQGATE_TEST_REPLAY_PAGE"
"""The variable that sets the entries in a page of a replay."""


@dataclass(frozen=True)
class Order:
    """Send a signal at a point, after it was passed `passes` times."""

    point: str
    passes: int = 0
    pids: Sequence[int] = ()
    """The receivers of the signal; empty for this process."""
    number: int = signal.SIGKILL
    """The signal."""

    def give(self, file: Path) -> None:
        """Write the order to a file for its process to find."""
        scratch = file.with_suffix(".new")
        scratch.write_text(json.dumps(asdict(self)))
        scratch.replace(file)


class Points:
    """Executes orders. The wrappers below report points to it."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._order: Order | None = None
        self._passes = 0

    def reach(self, point: str) -> None:
        """Report that a point was reached."""
        if self._order is None:
            if not self._file.exists():
                return
            self._order = Order(**json.loads(self._file.read_text()))
            self._passes = 0
        if point != self._order.point:
            return
        if self._passes < self._order.passes:
            self._passes += 1
            return
        pids, number = self._order.pids or [os.getpid()], self._order.number
        self._order = None
        self._file.unlink()
        for pid in pids:
            os.kill(pid, number)


class Pointed:
    """A port whose calls pass points."""

    def __init__(self, inner: object, points: Points, verbs: Sequence[str]) -> None:
        self._inner = inner
        for verb in verbs:
            setattr(self, verb, _passing(getattr(inner, verb), points, verb))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def _passing(
    call: Callable[..., Awaitable[Any]], points: Points, verb: str
) -> Callable[..., Awaitable[Any]]:
    async def passing(*arguments: Any, **named: Any) -> Any:
        points.reach(f"{verb}.before")
        answer = await call(*arguments, **named)
        points.reach(f"{verb}.after")
        return answer

    return passing


def _point_receipts(points: Points) -> None:
    news = Session.news
    written: set[int] = set()

    async def pointed(session: Session) -> News | None:
        if session.number in written:
            written.discard(session.number)
            points.reach("receipts.after")
        told = await news(session)
        if told is not None and told.receipts:
            written.add(session.number)
            points.reach("receipts.before")
        return told

    Session.news = pointed  # type: ignore[method-assign,assignment]


STORE_VERBS = ("take", "append", "replay", "find", "highest")
DEDUP_VERBS = ("admit", "confirm", "rollback")
SNAPSHOT_VERBS = ("freeze", "mark_delete", "record_snapshot")
RECOVERY_VERBS = ("get", "load")


async def run_ledger(config: LedgerConfig) -> None:
    points = Points(Path(os.environ[ORDER]))
    _point_receipts(points)
    async with AsyncExitStack() as stack:
        store = await stack.enter_async_context(
            open_sqlite_store(config.store_path, size_max_bytes=config.store_bytes_max)
        )
        channel = await stack.enter_async_context(
            peer_channel(config.dedup_target, keepalive_s=config.keepalive_s)
        )
        dedup = GrpcDeduplicator(channel, timeout_s=config.dedup_timeout_s)
        stack.callback(dedup.close)
        cursors = await stack.enter_async_context(ledger_app.connect_cursors(config))
        await ledger_app.serve(
            config,
            Pointed(store, points, STORE_VERBS),
            Pointed(dedup, points, DEDUP_VERBS),
            cursors,
        )


async def run_dedup(config: DedupConfig) -> None:
    points = Points(Path(os.environ[ORDER]))
    async with (
        connect_redis(
            config.redis_url,
            timeout_s=config.redis_timeout_s,
            connections_max=config.redis_connections_max,
        ) as redis,
        dedup_app.connect_cursors(config) as cursors,
    ):
        store = Pointed(
            RedisStateStore(redis), points, (*DEDUP_VERBS, "freeze", "record_snapshot", "load")
        )
        pointed = Pointed(cursors, points, ("get", "mark_delete"))
        await dedup_app.serve(config, store, pointed)


CURSOR_VERBS = ("persist", "record", "set_properties", "acquire", "release")


async def run_dispatcher(config: DispatcherConfig) -> None:
    points = Points(Path(os.environ[ORDER]))
    timeout_s = config.call_timeout_s
    async with (
        following_channel(config.ledger_target, keepalive_s=config.keepalive_s) as ledger,
        following_channel(config.cursor_target, keepalive_s=config.keepalive_s) as cursor,
        peer_channel(config.filter_target, keepalive_s=config.keepalive_s) as filter_,
    ):
        cursors = Pointed(SubscriptionCursors(cursor, timeout_s=timeout_s), points, CURSOR_VERBS)
        letters = Pointed(GrpcDeadLetters(ledger, timeout_s=timeout_s), points, ("put", "add"))
        await dispatcher_app.serve(
            config,
            GrpcLog(ledger, timeout_s=timeout_s),
            cursors,
            letters,
            GrpcFilters(filter_, timeout_s=timeout_s),
        )


def main() -> int:
    writer.REPLAY_PAGE_ENTRIES = int(os.environ.get(REPLAY_PAGE, "5000"))  # type: ignore[misc]
    if limit := os.environ.get(FILE_BYTES_MAX):
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(limit), int(limit)))
    if sys.argv[1] == "ledger":
        return run_service(LedgerConfig, run_ledger)
    if sys.argv[1] == "dispatcher":
        return run_service(DispatcherConfig, run_dispatcher)
    return run_service(DedupConfig, run_dedup)


if __name__ == "__main__":
    sys.exit(main())

"""An exception that nobody expects, at any line of the producer: no future stays open, no room is
lost, and later calls work or raise.

A trace function raises it, at a line that the same calls run without it. The functions that catch
it (CATCHERS) are left out.
"""

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from pathlib import Path
from types import CodeType, FrameType, SimpleNamespace
from typing import Any, Final, cast

import pytest

from seqgate.client import Batching, Chunking, Client, Outgoing, Producer, blocking, connect
from seqgate.client import _producer as of_producer
from seqgate.errors import InternalError, SeqgateError
from tests.support.depth import some_of
from tests.support.recording import storing_ledger
from tests.support.waiting import WITHIN_S, eventually

CLIENT: Final = Path(of_producer.__file__).parent
FILES: Final = frozenset(
    str(CLIENT / name)
    for name in (
        "_producer.py",
        "_outbox.py",
        "_batcher.py",
        "_codec.py",
        "_chunking.py",
        "_group.py",
        "_streams.py",
        "_tracing.py",
        "blocking/_producer.py",
    )
)
CATCHERS: Final = frozenset({"_contain", "_contained", "_fail", "_end", "_stop", "_unexpected"})

Line = tuple[str, int]

EVERY: Final = 12
"""Everyday runs plant at one of so many lines."""

HOW: Final[dict[str, dict[str, Any]]] = {
    "alone": {},
    "batched": {"batching": Batching(messages_max=3, delay_s=0.001)},
    "by key": {"batching": Batching(messages_max=4, delay_s=0.001, by_key=True)},
    "in chunks": {"chunking": Chunking(chunk_bytes=2)},
}


class Planted(Exception):
    """An exception that no code raises."""


class Tracer:
    """Notes the lines that run, and raises at one of them, once."""

    def __init__(self, at: Line | None = None) -> None:
        self.seen: dict[Line, None] = {}
        self.has_raised = False
        self._at = at

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        code: CodeType = frame.f_code
        is_ours = code.co_filename in FILES and code.co_name not in CATCHERS
        return self._note if is_ours else None

    def _note(self, frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            line = frame.f_code.co_filename, frame.f_lineno
            self.seen[line] = None
            if line == self._at and not self.has_raised:
                self.has_raised = True
                raise Planted
        return self._note

    @contextmanager
    def tracing(self) -> Iterator[None]:
        before = sys.gettrace()
        sys.settrace(self)
        try:
            yield
        finally:
            sys.settrace(before)


class Calls:
    """What an application does with a producer, and what came of it."""

    def __init__(self, producer: Producer) -> None:
        self.producer = producer
        self.tasks: list[asyncio.Future[Any]] = []

    async def make(self) -> None:
        producer = self.producer
        with suppress(Planted, SeqgateError):
            await producer.open()
        for each in range(4):
            with suppress(Planted, SeqgateError):
                key, properties = f"k{each % 2}", {"a": "b"}
                self.tasks.append(
                    producer.send_nowait(b"now", key=key, properties=properties, event_time_ms=1)
                )
        with suppress(Planted, SeqgateError):
            await producer.flush()
        for each in range(3):
            self.tasks.append(asyncio.create_task(producer.send(b"sent", key=f"k{each % 2}")))
        many: list[bytes | Outgoing] = [b"one", Outgoing(b"two", key="k1"), b"three", b"four"]
        self.tasks.append(asyncio.create_task(producer.send_many(many)))

    async def settle(self, where: object) -> None:
        """Every call has an outcome, and gives its room back."""
        if self.tasks:
            _, open_ = await asyncio.wait(self.tasks, timeout=WITHIN_S)
            assert not open_, f"{len(open_)} calls have no outcome: {where}"
        for each in self.tasks:
            each.exception()
        # Of send_many, when it raised before its messages had an outcome.
        what = f"no message is pending: {where}"
        await eventually(lambda: not self.producer.pending_messages, what)
        assert self.producer.pending_bytes == 0, where

    async def end(self) -> None:
        with suppress(Planted, SeqgateError):
            async with asyncio.timeout(WITHIN_S):
                await self.producer.send(b"later")
        for _ in range(2):  # the first may be interrupted
            with suppress(Planted, SeqgateError):
                async with asyncio.timeout(WITHIN_S):
                    await self.producer.close()

    def check_closed(self, where: object) -> None:
        with pytest.raises(SeqgateError):
            self.producer.send_nowait(b"too late")
        assert (self.producer.pending_messages, self.producer.pending_bytes) == (0, 0), where


@asynccontextmanager
async def nothing_left() -> AsyncIterator[None]:
    before = asyncio.all_tasks()
    yield
    async with asyncio.timeout(WITHIN_S):
        while not asyncio.all_tasks() <= before:
            await asyncio.sleep(0)


async def _surprised(client: Client, how: dict[str, Any], tracer: Tracer, where: object) -> None:
    async with nothing_left():
        calls = Calls(client.producer("t", max_pending_messages=12, **how))
        with tracer.tracing():
            await calls.make()
            if calls.tasks:
                await asyncio.wait(calls.tasks, timeout=WITHIN_S)
        await calls.settle(where)
        with tracer.tracing():
            await calls.end()
        calls.check_closed(where)


@pytest.mark.parametrize("how", HOW)
async def test_an_exception_at_any_line_leaves_nothing_open(how: str) -> None:
    with storing_ledger() as (_, address):
        async with connect(address) as client:
            dry = Tracer()
            await _surprised(client, HOW[how], dry, "without")
            raised = 0
            for line in some_of([*dry.seen], every=EVERY):
                tracer = Tracer(line)
                await _surprised(client, HOW[how], tracer, line)
                raised += tracer.has_raised
            assert len(dry.seen) > 200
            assert raised


class Late:
    """A call that raises after its nth write, read or end of writing, which had its effect."""

    def __init__(self, call: Any, at: str, left: int) -> None:
        self._call, self._at, self._left = call, at, left

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._call, name)
        return partial(self._then_raise, found) if name == self._at else found

    async def _then_raise(self, found: Callable[..., Awaitable[Any]], *args: Any) -> Any:
        done = await found(*args)
        self._left -= 1
        if not self._left:
            raise Planted
        return done


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize(
    ("at", "nth"),
    [("write", 1), ("write", 2), ("write", 3), ("read", 1), ("read", 2), ("done_writing", 1)],
)
async def test_an_exception_after_any_wait_for_the_stream_leaves_nothing_open(
    how: str, at: str, nth: int
) -> None:
    with storing_ledger() as (_, address):
        async with connect(address) as client, nothing_left():
            calls = Calls(client.producer("t", max_pending_messages=12, **HOW[how]))
            stub = calls.producer._stub
            calls.producer._stub = cast(
                "Any", SimpleNamespace(Publish=lambda: Late(stub.Publish(), at, nth))
            )
            await calls.make()
            await calls.settle((at, nth))
            await calls.end()
            calls.check_closed((at, nth))


@pytest.mark.parametrize("of", ["_wake", "_room"])
async def test_an_exception_after_any_wait_for_an_event_leaves_nothing_open(of: str) -> None:
    with storing_ledger() as (_, address):
        async with connect(address) as client, nothing_left():
            calls = Calls(client.producer("t", max_pending_messages=2, **HOW["batched"]))
            event = Late(getattr(calls.producer, of), "wait", 2)
            setattr(calls.producer, of, event)
            await calls.make()
            await calls.settle(of)
            await calls.end()
            calls.check_closed(of)


@pytest.mark.parametrize("how", HOW)
async def test_a_message_that_cannot_be_encoded_fails_alone(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing that a caller may pass does that; the encoder refuses it here."""

    def refusing(encode: Callable[..., Any]) -> Callable[..., Any]:
        def encoded(name: str, some: Any, **rest: Any) -> Any:
            messages = some if isinstance(some, list) else [some]
            if any(each.payload == b"bad" for each in messages):
                raise Planted
            return encode(name, some, **rest)

        return encoded

    for each in ("encode_single", "encode_batch", "seal_message"):
        monkeypatch.setattr(of_producer, each, refusing(getattr(of_producer, each)))
    told: list[Any] = []
    with storing_ledger() as (_, address):
        async with (
            connect(address) as client,
            client.producer("t", max_pending_messages=3, **HOW[how]) as producer,
        ):
            for payload in (b"1", b"bad", b"2"):
                try:
                    told.append(producer.send_nowait(payload, key="k"))
                except Planted as planted:
                    told.append(planted)
            await producer.flush()
            assert (producer.pending_messages, producer.pending_bytes) == (0, 0)
            assert await producer.send(b"3")
            first, bad, second = told
            assert first.result().sequence_id < second.result().sequence_id
            if isinstance(bad, asyncio.Future):
                assert isinstance(bad.exception(), InternalError)
                assert isinstance(cast("InternalError", bad.exception()).__cause__, Planted)


def test_an_exception_where_threads_hand_over_fails_what_they_handed_over() -> None:
    with (
        storing_ledger() as (_, address),
        blocking.connect(address) as client,
        client.producer("t") as producer,
    ):
        assert producer.send(b"x").sequence_id == 0
        left = [1]

        def must_wait(_: object) -> bool:
            if left:
                left.pop()
                raise Planted
            return False

        producer._held._must_wait = must_wait  # type: ignore[method-assign, assignment]
        done = producer.send_nowait(b"y")
        assert isinstance(done.exception(WITHIN_S), InternalError)
        with pytest.raises(InternalError):
            producer.send(b"z")
        assert (producer.pending_messages, producer.pending_bytes) == (0, 0)


async def test_a_tracing_that_fails_loses_no_message_and_no_room() -> None:
    def begin(message: Any, *_: object) -> None:
        message.span = "a span"
        if message.payload == b"bad":
            raise Planted

    def end(*_: object) -> None:
        raise Planted

    with storing_ledger() as (it, address):
        async with connect(address) as client, client.producer("t") as producer:
            producer._spans.begin = begin  # type: ignore[method-assign, assignment]
            producer._spans.end = end  # type: ignore[method-assign, assignment]
            with pytest.raises(Planted):
                await producer.send(b"bad")
            assert (await producer.send(b"good")).sequence_id == 0
            assert (producer.pending_messages, producer.pending_bytes) == (0, 0)
    assert [each.payload for each in it.entries] == [b"good"]

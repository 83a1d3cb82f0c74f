"""A running stack with a stub for each of its services, and helpers for tests."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from google.protobuf.message import Message
from grpc import StatusCode, aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from redis.asyncio import Redis

from seqgate.api.common.v1 import common_pb2
from seqgate.api.dedup.v1 import dedup_pb2
from seqgate.api.dispatcher.v1.dispatcher_pb2_grpc import DispatcherServiceStub
from seqgate.api.filter.v1.filter_pb2_grpc import FilterServiceStub
from seqgate.api.ledger.v1 import ledger_pb2
from seqgate.api.ledger.v1.ledger_pb2_grpc import LedgerServiceStub
from seqgate.dev.child import tell
from seqgate.dev.ports import free_ports
from seqgate.dev.stack import SERVICES, Stack
from tests.support.stubs import cursor_stub, dedup_stub
from tests.support.waiting import eventually

MESSAGE_BYTES_MAX = 64 * 1024 * 1024
"""The largest message that a test sends or accepts, above the limits of the services."""


@dataclass(frozen=True, slots=True)
class Services:
    stack: Stack
    ledger: Any
    dedup: Any
    cursor: Any
    dispatcher: Any
    filter: Any

    async def read(self, topic: str, **request: Any) -> list[ledger_pb2.StoredEntry]:
        """The entries of a topic; all of them by default."""
        request.setdefault("start", common_pb2.Start(earliest=common_pb2.Earliest()))
        found: list[ledger_pb2.StoredEntry] = []
        async for response in self.ledger.Read(ledger_pb2.ReadRequest(topic=topic, **request)):
            found.extend(response.entries.entries)
        return found

    async def ids(self, topic: str, producer: str | None = None) -> list[int]:
        """The sequence ids of the entries of a topic, in the order of the log."""
        return [
            each.metadata.sequence_id
            for each in await self.read(topic, metadata_only=True)
            if producer in (None, each.metadata.producer_name)
        ]

    async def status(self, topic: str) -> dedup_pb2.GetTopicStatusResponse:
        answer: dedup_pb2.GetTopicStatusResponse = await self.dedup.GetTopicStatus(
            dedup_pb2.GetTopicStatusRequest(topic=topic)
        )
        return answer

    async def producers(self, topic: str) -> dict[str, dedup_pb2.Producer]:
        found: dict[str, dedup_pb2.Producer] = {}
        token = ""
        while True:
            page = await self.dedup.ListProducers(
                dedup_pb2.ListProducersRequest(topic=topic, page_token=token),
                wait_for_ready=True,  # a job that runs in this process delays connections
            )
            found.update((each.name, each) for each in page.producers)
            token = page.next_page_token
            if not token:
                return found

    async def settled(self, topic: str) -> dedup_pb2.GetTopicStatusResponse:
        """Wait until all of a topic's log is confirmed; its status then."""

        async def level() -> bool:
            tail = await self.ledger.GetLastMessageId(
                ledger_pb2.GetLastMessageIdRequest(topic=topic)
            )
            status = await self.status(topic)
            return bool(status.confirmed == tail.last)

        await eventually(level, f"everything of {topic} is confirmed")
        return await self.status(topic)

    async def state(self, topic: str) -> dict[str, object]:
        """Everything that a refusal must not change: the list of topics, the topic's log and its
        deduplication state."""
        names = [each.name for each in await self.topics()]
        if topic not in names:
            return {"topics": names}
        status = await self.settled(topic)
        for field in ("snapshot", "snapshot_taken", "entries_since_snapshot"):
            status.ClearField(field)  # snapshots are taken by time
        return {
            "topics": names,
            "log": [_bytes(each) for each in await self.read(topic)],
            "status": _bytes(status),
            "producers": {
                name: _bytes(each) for name, each in (await self.producers(topic)).items()
            },
        }

    async def topics(self, prefix: str = "") -> list[ledger_pb2.Topic]:
        answer = await self.ledger.ListTopics(
            ledger_pb2.ListTopicsRequest(prefix=prefix, page_size=10_000)
        )
        return list(answer.topics)

    def log(self, service: str) -> list[dict[str, Any]]:
        """The log of a service so far. Fails on a line that is not a JSON object."""
        return log_lines(self.stack, service)


def log_lines(stack: Stack, service: str) -> list[dict[str, Any]]:
    """See Services.log."""
    written = (stack.folder / "logs" / f"{service}.log").read_text()
    found = []
    for line in written.rpartition("\n")[0].splitlines():  # the last line may be incomplete
        try:
            found.append(json.loads(line))
        except ValueError:
            raise AssertionError(f"{service} wrote what is not JSON: {line!r}") from None
    return found


def surprises(stack: Stack) -> list[dict[str, Any]]:
    """Errors in the services' logs; no test provokes any."""
    return [
        line for service in stack.services for line in log_lines(stack, service) if is_bad(line)
    ]


def is_bad(line: dict[str, Any]) -> bool:
    """Whether a log line reports an error."""
    return line["level"] in ("error", "critical")


@asynccontextmanager
async def running(
    folder: Path,
    *,
    services: Sequence[str] = SERVICES,
    policies: str = "",
    store: str = "sqlite",
    **environment: str,
) -> AsyncIterator[Services]:
    """A stack of a test's own.

    Args:
        folder: its data.
        services: its services; the stubs of others fail.
        policies: the deduplication policies, as TOML.
        store: of logs and cursors: sqlite or postgres.
        environment: settings, by their full name.
    """
    stack = Stack(
        folder, services=services, environment=environment, on_postgres=store == "postgres"
    )
    stack.folder.mkdir(parents=True, exist_ok=True)
    if policies:
        stack.policy_file.write_text(policies)
    async with stack, connected(stack) as clients:
        yield clients


@asynccontextmanager
async def connected(stack: Stack) -> AsyncIterator[Services]:
    """Stubs for a running stack. At the end, checks that no service has logged an error."""
    async with (
        channel_to(stack.address("ledger")) as ledger,
        channel_to(stack.address("dedup")) as dedup,
        channel_to(stack.address("cursor")) as cursor,
        channel_to(stack.address("dispatcher")) as dispatcher,
        channel_to(stack.address("filter")) as filter_,
    ):
        yield Services(
            stack,
            LedgerServiceStub(ledger),
            dedup_stub(dedup),
            cursor_stub(cursor),
            DispatcherServiceStub(dispatcher),
            FilterServiceStub(filter_),
        )
    assert surprises(stack) == []


@asynccontextmanager
async def second_ledger(services: Services, **environment: str) -> AsyncIterator[Any]:
    """Another ledger process over the same store; yields a stub for it."""
    async with _another(services, "ledger", environment) as channel:
        yield LedgerServiceStub(channel)


@asynccontextmanager
async def second_dedup(services: Services, **environment: str) -> AsyncIterator[Any]:
    """Another replica of the dedup service; yields a stub for it."""
    async with _another(services, "dedup", environment) as channel:
        yield dedup_stub(channel)


@asynccontextmanager
async def _another(
    services: Services, service: str, environment: Mapping[str, str]
) -> AsyncIterator[aio.Channel]:
    """Another process of a service, started as the stack would; yields a channel to it."""
    (port,) = free_ports(1)
    address = f"127.0.0.1:{port}"
    stack = services.stack
    with (stack.folder / "logs" / f"{service}-{port}.log").open("ab") as log:
        process = await stack.start_process(
            [sys.executable, "-m", f"seqgate.services.{service}"],
            log.fileno(),
            {
                **os.environ,
                **stack.settings,
                f"SEQGATE_{service.upper()}_LISTEN": address,
                **environment,
            },
        )
    try:
        await serving(address)
        async with channel_to(address) as channel:
            yield channel
        tell(process, signal.SIGTERM)
        assert await process.wait() == 0
    finally:
        tell(process, signal.SIGKILL)
        await process.wait()
    assert [each for each in log_lines(stack, f"{service}-{port}") if is_bad(each)] == []


async def stopping(services: Services, process: str) -> "asyncio.Task[int | None]":
    """Stop a process gracefully, and return when it drains. The task returns its exit status."""

    def drains() -> int:
        return sum(line["event"] == "draining" for line in services.log(process))

    before = drains()
    task = asyncio.create_task(services.stack.terminate(process))
    await eventually(lambda: drains() > before, f"{process} drains")
    return task


@contextmanager
def paused(stack: Stack, process: str) -> Iterator[None]:
    """Stop a process while the block runs, as if its machine had stopped."""
    pid = pids_of(stack)[process]
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@asynccontextmanager
async def writes_held_up(stack: Stack) -> AsyncIterator[Callable[[], Awaitable[bool]]]:
    """Redis accepts writes and answers none of them while the block runs. Yields a function that
    tells whether a client is waiting for one."""
    async with Redis.from_url(stack.redis_url) as redis:

        async def waiting() -> bool:
            return int((await redis.info("clients"))["blocked_clients"]) > 0

        await redis.client_pause(60_000, all=False)
        try:
            yield waiting
        finally:
            await redis.client_unpause()


async def health(address: str, service: str = "") -> str:
    """The readiness that a process reports; "" if it does not answer."""
    async with channel_to(address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        try:
            answer = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=5)
        except aio.AioRpcError as error:
            # gRPC answers CANCELLED to a call that came while the server was closing.
            if error.code() not in (StatusCode.UNAVAILABLE, StatusCode.CANCELLED):
                raise
            return ""
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))


async def serving(address: str, service: str = "") -> None:
    """Wait until a process reports that it is ready."""
    await eventually(lambda: _says(address, service, "SERVING"), f"{address} is ready")


async def not_serving(address: str, service: str = "") -> None:
    """Wait until a process reports that it is not ready."""
    await eventually(lambda: _says(address, service, "NOT_SERVING"), f"{address} is not ready")


async def _says(address: str, service: str, what: str) -> bool:
    return await health(address, service) == what


def pids_of(stack: Stack) -> dict[str, int]:
    """The ids of the running processes, by name."""
    pids: Any = stack.endpoints["pids"]
    return dict(pids)


def channel_to(address: str) -> aio.Channel:
    """A channel that reconnects quickly."""
    return aio.insecure_channel(
        address,
        options=[
            ("grpc.initial_reconnect_backoff_ms", 50),
            ("grpc.min_reconnect_backoff_ms", 2_000),  # an attempt's deadline, not a wait
            ("grpc.max_reconnect_backoff_ms", 100),
            ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
            ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
            ("grpc.use_local_subchannel_pool", 1),
        ],
    )


def _bytes(message: Message) -> bytes:
    return message.SerializeToString(deterministic=True)

"""A service answers any input with an error of its own, changes nothing when it refuses, and stays
healthy."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import apsw
import pytest
import pytest_asyncio
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message_factory import GetMessageClass
from grpc import StatusCode, aio
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from redis.asyncio import Redis

from tests.integration.refusals import check, status_of_call
from tests.integration.services import Services, channel_to, health, running
from tests.support.depth import times
from tests.support.malformed import messages
from tests.support.publisher import publishing, single
from tests.support.rpcs import TABLES, rpcs

EXAMPLES = times(quick=8, full=40)
"""Requests, or streams of requests, per method."""

STREAMED_MAX = 3
"""Requests per stream."""

ANSWERS_MAX = 20
"""Responses after which an open stream is left."""

SILENCE_S = 0.05
"""Seconds without a response after which an open stream is left."""

CALL_S = 10.0
"""Limit of a call that ends by itself, in seconds."""

WITNESS = "public/default/witness"
"""A topic that no request names."""

TRIES = 5
"""Attempts to see a refused request during which nothing else changes."""

NEVER = {StatusCode.UNKNOWN, StatusCode.INTERNAL, StatusCode.DEADLINE_EXCEEDED}
"""Codes that no caller should get."""


def methods() -> Iterator[MethodDescriptor]:
    for rpc in rpcs():
        assert rpc.path in TABLES[rpc.service]
        yield rpc.descriptor


def service_of(method: MethodDescriptor) -> str:
    name: str = method.containing_service.full_name.removeprefix("seqgate.api.")
    return name.removeprefix("internal.").split(".")[0]


@asynccontextmanager
async def witnessed(folder: Path, **options: Any) -> AsyncIterator[Services]:
    """A stack that already has a topic with messages."""
    async with running(folder, **options) as services:
        async with publishing(services.ledger, WITNESS, "p") as publisher:
            for number in range(3):
                await publisher.store(single(number, number))
        yield services


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def services(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Services]:
    async with witnessed(tmp_path_factory.mktemp("malformed") / "stack") as services:
        yield services


def by_name(method: MethodDescriptor) -> str:
    name: str = method.full_name.split(".", 2)[2]
    return name


@pytest.mark.parametrize("method", list(methods()), ids=by_name)
async def test_a_service_answers_malformed_requests(
    services: Services, method: MethodDescriptor, seed: int
) -> None:
    """A refused request changes nothing, and the service stays healthy."""
    before = await services.state(WITNESS)
    streams = st.lists(messages(method.input_type), min_size=1, max_size=STREAMED_MAX)
    examples: list[list[Any]] = []

    @settings(
        max_examples=EXAMPLES,
        database=None,
        derandomize=seed == 0,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
        deadline=None,
    )
    @given(streams)
    def collect(some: list[Any]) -> None:
        examples.append(some)

    collect()
    service = service_of(method)
    async with channel_to(services.stack.address(service)) as channel, stored(services) as kept:
        for some in examples:
            for _ in range(TRIES):  # effects of earlier requests may still arrive
                marks = await kept.marks()
                is_refused = await answered(channel, method, some)
                if not is_refused or method.client_streaming or await kept.marks() == marks:
                    break
            else:
                pytest.fail(f"{some} is refused, and changes something")
        await answered_bytes(channel, method, b"\xff\xff\xff")
    assert await health(services.stack.address(service)) == "SERVING"
    assert await services.state(WITNESS) | {"topics": []} == before | {"topics": []}


class Stored(NamedTuple):
    """The places where the services store state."""

    databases: Sequence[apsw.Connection]
    redis: Redis

    async def marks(self) -> tuple[object, ...]:
        """A value that changes with every write."""
        written = (await self.redis.info("persistence"))["rdb_changes_since_last_save"]
        return (written, *(each.pragma("data_version") for each in self.databases))


@asynccontextmanager
async def stored(services: Services) -> AsyncIterator[Stored]:
    stack = services.stack
    files = [
        file for name in ("ledger", "cursor") for file in stack.folder.glob(f"{name}*/{name}.db")
    ]
    databases = [apsw.Connection(str(each), flags=apsw.SQLITE_OPEN_READONLY) for each in files]
    try:
        async with Redis.from_url(stack.redis_url) as redis:
            yield Stored(databases, redis)
    finally:
        for each in databases:
            each.close()


class Called(NamedTuple):
    """A method, called with bytes or with messages."""

    method: MethodDescriptor
    call: Any

    @classmethod
    def on(cls, channel: aio.Channel, method: MethodDescriptor, write: Any, read: Any) -> "Called":
        sent = "stream" if method.client_streaming else "unary"
        received = "stream" if method.server_streaming else "unary"
        path = f"/{method.containing_service.full_name}/{method.name}"
        return cls(method, getattr(channel, f"{sent}_{received}")(path, write, read))

    async def refusal(
        self, requests: Sequence[Any], *, silence_s: float = SILENCE_S
    ) -> aio.AioRpcError | None:
        """The error of a refused call; None if it is answered or still open."""
        many = self.method.client_streaming
        call = self.call(timeout=CALL_S) if many else self.call(requests[0], timeout=CALL_S)
        try:
            if many:
                await self._send(call, requests)
            if not self.method.server_streaming:
                await call
                return None
            for _ in range(ANSWERS_MAX):
                async with asyncio.timeout(silence_s):
                    if await call.read() is aio.EOF:
                        return None
        except TimeoutError:
            pass
        except aio.AioRpcError as error:
            return error
        call.cancel()
        return None

    async def _send(self, call: Any, requests: Sequence[Any]) -> None:
        """Send as much as the other side accepts; it may have ended the call."""
        try:
            for each in requests:
                await call.write(each)
            await call.done_writing()
        except (aio.AioRpcError, asyncio.InvalidStateError):
            assert call.done()


async def answered(channel: aio.Channel, method: MethodDescriptor, requests: list[Any]) -> bool:
    """Call a method, and check that it answers or refuses properly. Returns whether it refused the
    request as invalid."""
    read = GetMessageClass(method.output_type).FromString
    write = GetMessageClass(method.input_type).SerializeToString
    called = Called.on(channel, method, write, read)
    refusal: aio.AioRpcError | None = None
    for _ in range(TRIES):
        refusal = await called.refusal(requests)
        if refusal is None or not is_ours(refusal):
            break
    if refusal is None or is_ours(refusal):
        return False
    assert refusal.code() not in NEVER, (requests, refusal)
    status = status_of_call(refusal)
    assert any(each.TypeName() == "google.rpc.ErrorInfo" for each in status.details), status
    return refusal.code() is StatusCode.INVALID_ARGUMENT


def is_ours(error: aio.AioRpcError) -> bool:
    """Whether the client wrote when the call had just ended, and lost the service's status."""
    return "execute_batch" in (error.debug_error_string() or "")


async def answered_bytes(channel: aio.Channel, method: MethodDescriptor, sent: bytes) -> None:
    """Call a method with bytes that are no message, and check the refusal."""
    called = Called.on(channel, method, bytes, bytes)
    refusal = await called.refusal([sent], silence_s=CALL_S)
    assert refusal is not None
    check(status_of_call(refusal), StatusCode.INVALID_ARGUMENT, "MALFORMED_REQUEST")

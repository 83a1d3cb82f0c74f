"""The lifecycle of processes: readiness, draining, deadlines, logs, settings, and the stack that
runs them all."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import apsw
import grpc
import pytest
from grpc import StatusCode, aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from redis.asyncio import Redis

from seqgate.api.common.v1 import common_pb2
from seqgate.api.dedup.v1 import dedup_pb2
from seqgate.api.internal.dedup.v1 import writer_pb2
from seqgate.api.ledger.v1 import ledger_pb2 as pb
from seqgate.dev.child import tell
from seqgate.dev.stack import SERVICES, Stack
from seqgate.services.dedup.adapters.keys import topic_key
from seqgate.services.runtime.channels import UNARY_TIMEOUT_S
from seqgate.types import TopicName
from tests.integration.refusals import check, refused, status_of_call
from tests.integration.services import (
    Services,
    channel_to,
    health,
    log_lines,
    not_serving,
    paused,
    pids_of,
    running,
    second_ledger,
    serving,
    writes_held_up,
)
from tests.support.publisher import Publisher, publishing, single
from tests.support.raw_channel import RawChannel
from tests.support.waiting import WITHIN_S, eventually

STORED, DUPLICATE = pb.RECEIPT_STATUS_STORED, pb.RECEIPT_STATUS_DUPLICATE
FAILED = pb.RECEIPT_STATUS_FAILED

LEDGER = "seqgate.api.ledger.v1.LedgerService"
DEDUP = "seqgate.api.dedup.v1.DedupService"
DEDUP_WRITER = "seqgate.api.internal.dedup.v1.DedupWriterService"


@pytest.fixture(scope="module")
async def frail(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Services]:
    """A stack whose parts are stopped, paused and restarted; all run again when a test ends. It has
    short time-outs and few retries."""
    async with running(
        tmp_path_factory.mktemp("frail"),
        SEQGATE_DEDUP_REDIS_TIMEOUT_S="0.3",
        SEQGATE_LEDGER_DEDUP_TIMEOUT_S="1",
        SEQGATE_LEDGER_OPEN_TIMEOUT_S="0.5",
        SEQGATE_LEDGER_FAILURES_MAX="2",
        SEQGATE_DEDUP_LOG_LEVEL="debug",
        SEQGATE_DEDUP_REFLECTION="true",
    ) as services:
        yield services


def claim(topic: str, sequence_id: int = 1) -> writer_pb2.AdmitRequest:
    return writer_pb2.AdmitRequest(
        topic=topic,
        writer=writer_pb2.Writer(incarnation=1, epoch=1),
        claims=[writer_pb2.Claims(producer_name="p", sequence_ids=[sequence_id])],
    )


# ---- readiness


async def test_a_service_is_ready_while_redis_answers(frail: Services) -> None:
    stack = frail.stack
    dedup, ledger = stack.address("dedup"), stack.address("ledger")
    seen: list[str] = []

    async def watch() -> None:
        async with channel_to(dedup) as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            call = stub.Watch(health_pb2.HealthCheckRequest(service=DEDUP))
            while (answer := await call.read()) is not aio.EOF:
                seen.append(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))

    watching = asyncio.create_task(watch())
    await eventually(lambda: seen, "the watcher is told at once")
    await stack.kill("redis")
    for address, service in ((dedup, DEDUP), (dedup, ""), (ledger, LEDGER), (ledger, "")):
        await not_serving(address, service)
    for address in (dedup, ledger):
        assert await health(address, "liveness") == "SERVING"
    await stack.run("redis")
    for address, service in ((dedup, DEDUP), (dedup, ""), (ledger, LEDGER), (ledger, "")):
        await serving(address, service)
    await eventually(lambda: seen == ["SERVING", "NOT_SERVING", "SERVING"], f"all is told: {seen}")
    watching.cancel()
    await asyncio.wait([watching])


async def test_a_hanging_redis_counts_as_unreachable(frail: Services) -> None:
    address = frail.stack.address("dedup")
    with paused(frail.stack, "redis"):
        await not_serving(address)
        assert await health(address, "liveness") == "SERVING"
    await serving(address)
    await serving(frail.stack.address("ledger"))


async def test_the_ledger_is_ready_while_dedup_is(frail: Services) -> None:
    address = frail.stack.address("ledger")
    assert await frail.stack.terminate("dedup") == 0
    await not_serving(address)
    assert await health(address, "liveness") == "SERVING"
    await frail.stack.run("dedup")
    await serving(address)
    events = [(each["event"], each.get("missing")) for each in frail.log("ledger")]
    assert ("not ready", ["dedup"]) in events
    assert events[-1] == ("ready", [])


async def test_the_health_of_an_unknown_service_is_unknown(services: Services) -> None:
    async with channel_to(services.stack.address("ledger")) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        with pytest.raises(aio.AioRpcError) as caught:
            await stub.Check(health_pb2.HealthCheckRequest(service="nobody"))
    assert caught.value.code() is StatusCode.NOT_FOUND


# ---- reflection


async def reflected(address: str) -> list[str]:
    async with channel_to(address) as channel:
        stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)  # type: ignore[arg-type]
        call = stub.ServerReflectionInfo()
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        await call.done_writing()
        answers = [each async for each in _each(call)]
    return [each.name for answer in answers for each in answer.list_services_response.service]


async def _each(call: Any) -> AsyncIterator[Any]:
    while (answer := await call.read()) is not aio.EOF:
        yield answer


async def test_reflection_is_served_only_when_enabled(services: Services, frail: Services) -> None:
    for service in SERVICES:
        async with channel_to(services.stack.address(service)) as channel:
            stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)  # type: ignore[arg-type]
            assert await stub.ServerReflectionInfo().code() is StatusCode.UNIMPLEMENTED
    names = await reflected(frail.stack.address("dedup"))
    assert {DEDUP, "grpc.health.v1.Health"} <= set(names)


# ---- draining


async def test_a_drain_notifies_open_streams_and_refuses_new_calls(
    stoppable: Services, topic: str
) -> None:
    stack, ledger = stoppable.stack, stoppable.ledger
    async with publishing(ledger, topic, "p") as publisher:
        assert (await publisher.store(single(1, 1))).status == STORED
        reading = ledger.Read(
            pb.ReadRequest(
                topic=topic, start=common_pb2.Start(earliest=common_pb2.Earliest()), follow=True
            )
        )
        assert (await reading.read()).HasField("started")
        assert len((await reading.read()).entries.entries) == 1

        ending = asyncio.create_task(stack.terminate("ledger"))
        async with asyncio.timeout(WITHIN_S):
            await publisher.draining.wait()
        assert (await reading.read()).HasField("draining")
        assert await reading.read() is aio.EOF
        assert await reading.code() is StatusCode.OK

        await not_serving(stack.address("ledger"))
        assert await health(stack.address("ledger"), "liveness") == "SERVING"
        with refused(StatusCode.UNAVAILABLE, "DRAINING"):
            await ledger.GetTopic(pb.GetTopicRequest(topic=topic))
        with refused(StatusCode.UNAVAILABLE, "DRAINING"):
            async with publishing(ledger, topic, "q"):
                pass
        # Publications on an open stream are answered until the producer closes it.
        assert (await publisher.store(single(2, 2))).status == STORED
        assert not ending.done()
        await publisher.finish()
        assert await ending == 0
    assert log_lines(stack, "ledger")[-1]["event"] == "stopped"

    await stack.run("ledger")
    async with publishing(ledger, topic, "p") as publisher:
        assert publisher.opened.last_sequence_id == 2


async def test_requests_sent_before_the_drain_are_answered_and_confirmed(
    stoppable: Services, topic: str
) -> None:
    async with publishing(stoppable.ledger, topic, "p") as publisher:
        async with writes_held_up(stoppable.stack) as waiting:
            await publisher.send(*(single(each, each) for each in range(50)))
            await eventually(waiting, "the claims wait")
            ending = asyncio.create_task(stoppable.stack.terminate("ledger"))
            async with asyncio.timeout(WITHIN_S):
                await publisher.draining.wait()
        for each in range(50):
            assert (await publisher.receipt(each)).status == STORED
        await publisher.finish()
    assert await ending == 0
    await stoppable.stack.run("ledger")
    # A clean stop leaves nothing to replay.
    await stoppable.settled(topic)
    assert (await stoppable.status(topic)).counts.confirmed_entries == 50
    assert not any(
        each["event"] == "replaying" and each["topic"] == topic for each in stoppable.log("ledger")
    )


async def test_a_stream_that_ignores_the_drain_is_cut(private: Any, topic: str) -> None:
    async with private(SEQGATE_LEDGER_DRAIN_TIMEOUT_S="0.1") as services:
        async with publishing(services.ledger, topic, "p") as publisher:
            ending = asyncio.create_task(services.stack.terminate("ledger"))
            error = await publisher.ended()
            assert error is not None
            check(status_of_call(error), StatusCode.UNAVAILABLE, "DRAINING")
            assert publisher.draining.is_set()
        assert await ending == 0
        events = [each["event"] for each in services.log("ledger")]
        assert "streams cut at the end of drain_timeout_s" in events
        assert events[-1] == "stopped"


async def test_a_pending_call_is_finished(stoppable: Services, topic: str) -> None:
    async with writes_held_up(stoppable.stack) as waiting:
        asking = asyncio.create_task(_await(stoppable.dedup.Admit(claim(topic))))
        await eventually(waiting, "the script waits")
        ending = asyncio.create_task(stoppable.stack.terminate("dedup"))
        await not_gone_but_closed(stoppable)
        assert not asking.done()
    answer = await asking
    assert list(answer.verdicts.producers[0].verdicts) == [dedup_pb2.CLAIM_VERDICT_NEW]
    assert await ending == 0


async def not_gone_but_closed(services: Services) -> None:
    """Wait until dedup accepts no more calls."""

    async def closed() -> bool:
        return await health(services.stack.address("dedup")) in ("", "NOT_SERVING")

    await eventually(closed, "dedup takes no more calls")


async def _await(call: Any) -> Any:
    return await call


@pytest.mark.parametrize("service", SERVICES)
async def test_an_interrupt_stops_a_service_cleanly(stoppable: Services, service: str) -> None:
    os.kill(pids_of(stoppable.stack)[service], signal.SIGINT)
    assert await stoppable.stack.ended(service) == 0


async def test_a_service_that_calls_redis_continuously_stops_on_request(private: Any) -> None:
    """The Redis client uses Python 3.11's wait_for, which occasionally loses a cancellation."""
    async with private(
        SEQGATE_DEDUP_HEALTH_INTERVAL_S="0.0001", SEQGATE_DEDUP_PURGE_INTERVAL_S="0.0001"
    ) as services:
        stack = services.stack
        for _ in range(4):
            os.kill(pids_of(stack)["dedup"], signal.SIGTERM)
            async with asyncio.timeout(END_S):
                assert await stack.ended("dedup") == 0
            await stack.run("dedup")


# ---- deadlines, and dependencies that do not answer


async def test_a_call_ends_by_its_deadline_while_redis_hangs(frail: Services, topic: str) -> None:
    with paused(frail.stack, "redis"):
        for make in (
            partial(frail.dedup.Admit, claim(topic)),
            partial(frail.dedup.GetTopicStatus, dedup_pb2.GetTopicStatusRequest(topic=topic)),
        ):
            async with asyncio.timeout(10):
                with pytest.raises(aio.AioRpcError) as caught:
                    await make(timeout=0.1)
                assert caught.value.code() is StatusCode.DEADLINE_EXCEEDED
                with refused(StatusCode.UNAVAILABLE, "STATE_UNAVAILABLE"):
                    await make()
    await serving(frail.stack.address("dedup"))
    await serving(frail.stack.address("ledger"))
    # The outcome of the lost calls is resolved, and nothing is admitted twice.
    answer = await frail.dedup.Admit(claim(topic))
    assert answer.verdicts.producers[0].verdicts[0] in (
        dedup_pb2.CLAIM_VERDICT_NEW,
        dedup_pb2.CLAIM_VERDICT_IN_FLIGHT,
    )


async def test_a_producer_gets_an_error_when_its_topic_cannot_be_opened(
    frail: Services, topic: str
) -> None:
    assert await frail.stack.terminate("dedup") == 0
    with refused(StatusCode.UNAVAILABLE, "DEDUP_UNAVAILABLE"):
        async with publishing(frail.ledger, topic, "p"):
            pass
    await frail.stack.run("dedup")

    async def opens() -> bool:
        try:
            async with publishing(frail.ledger, topic, "p") as publisher:
                return (await publisher.store(single(1, 1))).status == STORED
        except aio.AioRpcError as error:
            if error.code() is not StatusCode.UNAVAILABLE:
                raise
            return False

    await eventually(opens, "the topic opens")


async def test_a_producer_gets_an_error_when_its_messages_cannot_be_judged(
    frail: Services, topic: str
) -> None:
    async with publishing(frail.ledger, topic, "p") as publisher:
        assert (await publisher.store(single(1, 1))).status == STORED
        await frail.settled(topic)
        assert await frail.stack.terminate("dedup") == 0
        await publisher.send(single(2, 2), single(3, 3))
        for request_id in (2, 3):
            receipt = await publisher.receipt(request_id)
            assert receipt.status == FAILED
            check(receipt.error, StatusCode.UNAVAILABLE, "DEDUP_UNAVAILABLE")
        assert (await publisher.store(single(4, 4))).status == pb.RECEIPT_STATUS_SKIPPED
        await frail.stack.run("dedup")
        for sequence_id in (2, 3, 4):
            await stored_in_the_end(publisher, sequence_id)
    assert await frail.ids(topic) == [1, 2, 3, 4]


async def stored_in_the_end(publisher: Publisher, sequence_id: int) -> None:
    """Send a message again, as its receipts demand, until it is stored."""

    async def stored() -> bool:
        receipt = await publisher.store(single(sequence_id, sequence_id, resume=True))
        assert receipt.status in (STORED, DUPLICATE, FAILED)
        return receipt.status != FAILED

    await eventually(stored, f"{sequence_id} is stored")


class Relay:
    """A gRPC server in front of another, which records the deadline of each call."""

    def __init__(self, target: RawChannel) -> None:
        self.target = target
        self.remaining_s: dict[str, list[float | None]] = {}

    async def __call__(self, method: str, request: bytes, context: Any) -> bytes:
        self.remaining_s.setdefault(method, []).append(context.time_remaining())
        answer: bytes = await self.target.unary_unary(method)(request, timeout=5)
        return answer


class _Every(grpc.GenericRpcHandler):
    """Serves every method as a unary one."""

    def __init__(self, relay: Relay) -> None:
        self._relay = relay

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        method = handler_call_details.method

        async def handle(request: bytes, context: Any) -> bytes:
            return await self._relay(method, request, context)

        return grpc.unary_unary_rpc_method_handler(handle)


@asynccontextmanager
async def relay_to(address: str) -> AsyncIterator[tuple[Relay, str]]:
    server = aio.server()
    async with channel_to(address) as channel:
        relay = Relay(channel)
        server.add_generic_rpc_handlers((_Every(relay),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            yield relay, f"127.0.0.1:{port}"
        finally:
            await server.stop(None)


async def test_a_callers_deadline_is_propagated(services: Services, topic: str) -> None:
    """ForgetTopic is called on behalf of DeleteTopic, and has the same deadline."""
    async with (
        relay_to(services.stack.address("dedup")) as (relay, address),
        second_ledger(services, SEQGATE_LEDGER_DEDUP_TARGET=address) as ledger,
    ):
        for deadline_s in (3.0, None, 1000.0):
            await ledger.CreateTopic(pb.CreateTopicRequest(topic=topic))
            await ledger.DeleteTopic(pb.DeleteTopicRequest(topic=topic), timeout=deadline_s)
        first, second, third = relay.remaining_s[f"/{DEDUP_WRITER}/ForgetTopic"]
    assert first is not None
    assert 0 < first < 3.5  # on the wire a deadline has two or three digits
    for without in (second, third):  # but never more than its own
        assert without is not None
        assert 3.5 < without < UNARY_TIMEOUT_S + 0.5


# ---- logs


async def test_a_refused_call_is_logged_with_its_reason(frail: Services, topic: str) -> None:
    """By services that no other test calls like this: a second refusal would be suppressed."""
    with refused(StatusCode.INVALID_ARGUMENT, "INVALID_TOPIC_NAME"):
        await frail.ledger.CreateTopic(pb.CreateTopicRequest(topic="no topic"))
    with refused(StatusCode.INVALID_ARGUMENT, "INVALID_PAGE"):
        await frail.dedup.ListProducers(dedup_pb2.ListProducersRequest(topic=topic, page_size=-1))
    for service, method, reason in (
        ("ledger", f"/{LEDGER}/CreateTopic", "INVALID_TOPIC_NAME"),
        ("dedup", f"/{DEDUP}/ListProducers", "INVALID_PAGE"),
    ):
        found = await logged_call(frail, service, method, "refused", reason=reason)
        assert (found["service"], found["level"]) == (service, "warning")
        assert (found["code"], found["suppressed"]) == ("INVALID_ARGUMENT", 0)
        assert found["detail"]
        assert found["seconds"] >= 0


async def logged_call(
    services: Services, service: str, method: str, event: str = "call", **fields: str
) -> dict[str, Any]:
    """The line about a call, once it is written: that is after the answer."""
    wanted = {"event": event, "method": method, **fields}
    found: list[dict[str, Any]] = []

    def written() -> bool:
        found[:] = [each for each in services.log(service) if wanted.items() <= each.items()]
        return bool(found)

    await eventually(written, f"{service} logs {wanted}")
    return found[-1]


async def test_every_call_is_logged_at_debug_level(frail: Services, topic: str) -> None:
    await frail.status(topic)
    found = await logged_call(frail, "dedup", f"/{DEDUP}/GetTopicStatus", code="OK")
    assert found["level"] == "debug"


async def test_every_log_line_is_json(tmp_path: Path, topic: str) -> None:
    """With gRPC's default verbosity."""
    async with running(tmp_path / "stack", GRPC_VERBOSITY="") as services:
        stack = services.stack
        async with publishing(services.ledger, topic, "p") as publisher:
            assert (await publisher.store(single(1, 1))).status == STORED
            await stack.kill("redis")
            await not_serving(stack.address("dedup"))
            await publisher.send(single(2, 2))
            await stack.run("redis")
            await publisher.receipt(2)
            await stored_in_the_end(publisher, 2)
            await stack.kill("dedup")
            await not_serving(stack.address("ledger"))
            await stack.run("dedup")
            await stored_in_the_end(publisher, 3)
            await publisher.cut()
        for service in reversed(SERVICES):
            assert await stack.terminate(service) == 0
        for service in SERVICES:
            lines = log_lines(stack, service)
            seen = {each["event"] for each in lines}
            assert {"listening", "ready", "stopped"} <= seen
            needs_either = service not in ("cursor", "filter")
            assert ("not ready" in seen) == needs_either
            for line in lines:
                assert line["service"] == service
                assert {"event", "level", "timestamp"} <= line.keys()


async def test_a_defect_is_reported_as_internal_without_details(tmp_path: Path, topic: str) -> None:
    async with (
        Stack(tmp_path / "stack") as stack,
        channel_to(stack.address("dedup")) as channel,
        Redis.from_url(stack.redis_url) as redis,
    ):
        await redis.set(topic_key(TopicName.parse(topic)), "no hash")
        ask: aio.UnaryUnaryMultiCallable[dedup_pb2.GetProducerRequest, bytes] = channel.unary_unary(
            f"/{DEDUP}/GetProducer",
            request_serializer=dedup_pb2.GetProducerRequest.SerializeToString,
        )
        with pytest.raises(aio.AioRpcError) as caught:
            await ask(dedup_pb2.GetProducerRequest(topic=topic, producer_name="p"))
        assert caught.value.code() is StatusCode.INTERNAL
        assert caught.value.details() == "internal error"
        lines = log_lines(stack, "dedup")
        (found,) = (each for each in lines if each["event"] == "unexpected")
        assert found["level"] == "error"
        assert "WRONGTYPE" in found["exception"]


# ---- settings


END_S = 60.0
"""Limit for a process that ends by itself, in seconds, on a busy machine."""


class Ended(NamedTuple):
    """A process that has ended."""

    status: int
    out: str
    error: str


@asynccontextmanager
async def process(
    *arguments: str, environment: Mapping[str, str] | None = None, cwd: Path | None = None
) -> AsyncIterator[asyncio.subprocess.Process]:
    """A Python process, killed at the end of the test."""
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        *arguments,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), **(environment or {})},
        cwd=cwd,
    )
    try:
        yield child
    finally:
        if child.returncode is None:
            child.kill()
        await child.communicate()


async def end_of(*arguments: str, cwd: Path, **environment: str) -> Ended:
    """The exit of a process that ends by itself."""
    async with process(*arguments, environment=environment, cwd=cwd) as child:
        try:
            async with asyncio.timeout(END_S):
                out, error = await child.communicate()
        except TimeoutError:
            raise AssertionError("the process does not end") from None
        assert child.returncode is not None
        return Ended(child.returncode, out.decode(), error.decode())


async def end_of_service(service: str, folder: Path, **environment: str) -> Ended:
    """The exit of a service that ends by itself. Its settings make it keep its state in a
    folder."""
    file = folder / f"{service}.log"
    if service in ("ledger", "cursor"):
        environment.setdefault(f"SEQGATE_{service.upper()}_STORE_PATH", str(folder / "begun.db"))
    with file.open("wb") as log:
        command = [sys.executable, "-m", f"seqgate.services.{service}"]
        child = await Stack.start_process(command, log.fileno(), {**os.environ, **environment})
    try:
        async with asyncio.timeout(END_S):
            status = await child.wait()
    except TimeoutError:
        raise AssertionError("the service does not end") from None
    finally:
        tell(child, signal.SIGKILL)
    return Ended(status, "", file.read_text())


def refusal(service: str, ended: Ended) -> str:
    """The sentence with which a service did not start: the only line that it wrote."""
    assert ended.status == 2, ended
    (line,) = ended.error.splitlines()
    assert line.startswith(f"{service}: ")
    return line


SETTINGS: dict[str, tuple[str, dict[str, str], str]] = {
    "no number": ("ledger", {"WINDOW_MESSAGES": "many"}, "window_messages"),
    "a number too small": ("ledger", {"WINDOW_MESSAGES": "0"}, "window_messages"),
    "a number too large": ("ledger", {"MAX_MESSAGE_BYTES": str(2**40)}, "max_message_bytes"),
    "entries that no message holds": (
        "ledger",
        {"MAX_MESSAGE_BYTES": str(128 * 2**20)},
        "max_message_bytes",
    ),
    "messages that hold no entry": (
        "ledger",
        {"MESSAGE_BYTES_MAX": "65536"},
        "max_message_bytes",
    ),
    "a time of 0": ("dedup", {"REDIS_TIMEOUT_S": "0"}, "redis_timeout_s"),
    "an address without a port": ("dedup", {"LISTEN": "localhost"}, "listen"),
    "an impossible port": ("ledger", {"LISTEN": "127.0.0.1:65536"}, "listen"),
    "an unknown word": ("dedup", {"LOG_LEVEL": "loud"}, "log_level"),
    "no list": ("ledger", {"AUTO_CREATE": "everywhere"}, "auto_create"),
    "an unknown name in the file": ("ledger", {"CONFIG_FILE": "windows = 3"}, "windows"),
    "a wrong value in the file": (
        "ledger",
        {"CONFIG_FILE": "window_messages = -1"},
        "window_messages",
    ),
    "another service's value in the file": (
        "dedup",
        {"CONFIG_FILE": 'store_path = "x"'},
        "store_path",
    ),
    "no readers": ("cursor", {"STORE_READERS": "0"}, "store_readers"),
    "a negative size": ("cursor", {"STORE_BYTES_MAX": "-1"}, "store_bytes_max"),
    "two stores": ("ledger", {"POSTGRES_URL": "postgresql://seqgate@127.0.0.1/logs"}, "store_path"),
    "a file that is no TOML": (
        "dedup",
        {"CONFIG_FILE": "listen = "},
        "SEQGATE_DEDUP_CONFIG_FILE: ",
    ),
    "a missing file": ("dedup", {"CONFIG_FILE": ""}, "SEQGATE_DEDUP_CONFIG_FILE: "),
    "a misspelt setting": (
        "ledger",
        {"LISTNE": "127.0.0.1:0"},
        "unknown setting SEQGATE_LEDGER_LISTNE; did you mean SEQGATE_LEDGER_LISTEN?",
    ),
    "a scheme that is not Redis's": (
        "dedup",
        {"REDIS_URL": "http://127.0.0.1"},
        "SEQGATE_DEDUP_REDIS_URL: ",
    ),
    "a target without a port": (
        "dispatcher",
        {"CURSOR_TARGET": "localhost"},
        "SEQGATE_DISPATCHER_CURSOR_TARGET: must be host:port",
    ),
    "metrics without a port": (
        "filter",
        {"METRICS_LISTEN": "localhost"},
        "SEQGATE_FILTER_METRICS_LISTEN: must be host:port",
    ),
    "an address of another machine": (
        "cursor",
        {"LISTEN": "192.0.2.1:7703", "ALLOW_INSECURE": "true"},
        "SEQGATE_CURSOR_LISTEN: cannot listen on 192.0.2.1:7703",
    ),
    "a certificate that is missing": (
        "filter",
        {"TLS_CERTIFICATE_FILE": "/nowhere/tls.crt", "TLS_KEY_FILE": "/nowhere/tls.key"},
        "SEQGATE_FILTER_TLS_CERTIFICATE_FILE: /nowhere/tls.crt: No such file",
    ),
}


@pytest.mark.parametrize("what", SETTINGS)
async def test_a_service_does_not_start_with(tmp_path: Path, what: str) -> None:
    service, given, named = SETTINGS[what]
    environment = {f"SEQGATE_{service.upper()}_LISTEN": "127.0.0.1:0"}
    for name, value in given.items():
        if name == "CONFIG_FILE":
            file = tmp_path / "settings.toml"
            if value:
                file.write_text(value)
            value = str(file)
        environment[f"SEQGATE_{service.upper()}_{name}"] = value
    ended = await end_of_service(service, tmp_path, **environment)
    assert named.lower() in refusal(service, ended).lower()
    assert not list(tmp_path.glob("*.db")), "nothing was begun"


async def test_a_service_does_not_start_without_its_assertions(tmp_path: Path) -> None:
    ended = await end_of("-O", "-m", "seqgate.services.dedup", cwd=tmp_path)
    assert ended.status == 2
    assert "-O" in ended.error


async def test_the_environment_comes_before_the_file(
    services: Services, tmp_path: Path, topic: str
) -> None:
    file = tmp_path / "ledger.toml"
    file.write_text("window_messages = 5\nwindow_bytes = 4096\nmax_message_bytes = 2048\n")
    async with (
        second_ledger(
            services,
            SEQGATE_LEDGER_CONFIG_FILE=str(file),
            SEQGATE_LEDGER_WINDOW_MESSAGES="7",
        ) as ledger,
        publishing(ledger, topic, "p") as publisher,
    ):
        opened = publisher.opened
        assert (opened.window_messages, opened.window_bytes) == (7, 4096)
        assert opened.max_message_bytes == 2048


@pytest.mark.parametrize(
    ("service", "setting", "more"),
    [
        *((service, "LISTEN", {}) for service in SERVICES),
        *((service, "METRICS_LISTEN", {}) for service in SERVICES),
        ("ledger", "HEALTH_LISTEN", {}),
        *(("filter", f"{port}LISTEN", {"WORKERS": "2"}) for port in ("", "METRICS_", "HEALTH_")),
        ("dedup", "LISTEN", {"WORKERS": "2"}),
    ],
)
async def test_a_port_belongs_to_one_process(
    services: Services, tmp_path: Path, service: str, setting: str, more: dict[str, str]
) -> None:
    """Otherwise the two would silently share the callers."""
    address = services.stack.address(service)
    host, _, port = address.rpartition(":")
    given = {"LISTEN": "127.0.0.1:0", "ADVERTISE": address, setting: address, **more}
    if service not in ("ledger", "dispatcher"):
        del given["ADVERTISE"]
    environment = {f"SEQGATE_{service.upper()}_{name}": value for name, value in given.items()}
    ended = await end_of_service(service, tmp_path, GRPC_VERBOSITY="", **environment)
    variable = f"SEQGATE_{service.upper()}_{setting}"
    assert refusal(service, ended) == f"{service}: {variable}: port {port} of {host} is in use"
    assert not list(tmp_path.glob("*.db")), "nothing was begun"
    await serving(address)


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("nowhere/store.db", "the folder {}/nowhere does not exist"),
        ("file/store.db", "the folder {}/file is not a folder"),
        ("folder", "{}/folder is a folder, not a database"),
        ("/proc/store.db", "the folder /proc is not writable"),
    ],
)
@pytest.mark.parametrize("service", ["ledger", "cursor"])
async def test_a_service_does_not_start_when_its_folder_is_unusable(
    tmp_path: Path, service: str, path: str, why: str
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    environment = {
        f"SEQGATE_{service.upper()}_LISTEN": "127.0.0.1:0",
        f"SEQGATE_{service.upper()}_STORE_PATH": str(tmp_path / path),
    }
    said = refusal(service, await end_of_service(service, tmp_path, **environment))
    wanted = f"{service}: SEQGATE_{service.upper()}_STORE_PATH: {why.format(tmp_path)}"
    assert said.startswith(wanted)


def another_file(file: Path) -> None:
    file.rmdir()
    file.write_text("not a database, but long enough to be taken for one " * 20)


def another_layout(file: Path) -> None:
    file.rmdir()
    with apsw.Connection(str(file)) as database:
        database.execute("PRAGMA user_version = 99")
    database.close()


@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(another_file, id="another file"),
        pytest.param(another_layout, id="another layout"),
    ],
)
@pytest.mark.parametrize("service", ["ledger", "cursor"])
async def test_a_service_does_not_start_when_its_database_is(
    tmp_path: Path, service: str, spoil: Any
) -> None:
    file = tmp_path / "data" / f"{service}.db"
    file.mkdir(parents=True)
    spoil(file)
    ended = await end_of_service(
        service,
        tmp_path,
        **{
            f"SEQGATE_{service.upper()}_LISTEN": "127.0.0.1:0",
            f"SEQGATE_{service.upper()}_STORE_PATH": str(file),
        },
    )
    assert ended.status == 1
    assert [json.loads(line)["event"] for line in ended.error.splitlines()] == ["failed"]


@pytest.mark.parametrize("workers", ["1", "2"])
@pytest.mark.parametrize("policies", ["[cluster]\nenable = true\n", None], ids=["wrong", "gone"])
async def test_dedup_does_not_start_with_invalid_policies(
    tmp_path: Path, policies: str | None, workers: str
) -> None:
    """There are no earlier policies to keep, and the built-in ones may be wrong."""
    file = tmp_path / "policies.toml"
    if policies is not None:
        file.write_text(policies)
    ended = await end_of_service(
        "dedup",
        tmp_path,
        SEQGATE_DEDUP_LISTEN="127.0.0.1:0",
        SEQGATE_DEDUP_POLICY_FILE=str(file),
        SEQGATE_DEDUP_WORKERS=workers,
    )
    assert f"SEQGATE_DEDUP_POLICY_FILE: {file}: " in refusal("dedup", ended)

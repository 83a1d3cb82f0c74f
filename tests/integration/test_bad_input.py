"""Invalid input to every method: the refusal, and that it changes nothing.

The limits are the constants of the servicers. Each is tested at its boundary: the last value
accepted, and the first refused.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any

import google_crc32c
import pytest
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from google.protobuf.timestamp_pb2 import Timestamp
from google.rpc import status_pb2
from grpc import StatusCode, aio

from seqgate.api.common.v1 import common_pb2
from seqgate.api.dedup.v1 import dedup_pb2
from seqgate.api.dispatcher.v1 import dispatcher_pb2 as pb_dispatcher
from seqgate.api.entry.v1 import entry_pb2
from seqgate.api.internal.dedup.v1 import writer_pb2
from seqgate.api.ledger.v1 import ledger_pb2 as pb
from seqgate.services.dedup import servicer as dedup_limits
from seqgate.services.ledger import servicer as ledger_limits
from seqgate.services.ledger.config import LedgerConfig
from seqgate.services.ledger.core.entry import METADATA_BYTES_MAX
from seqgate.services.runtime import deduplication as dedup_wire
from seqgate.times import MS_NS, TIME_MAX_MS, timestamp
from seqgate.types import (
    CHUNK_UUID_BYTES_MAX,
    LARGE_MESSAGE_BYTES_MAX,
    NACK_REASON_BYTES_MAX,
    PRODUCER_NAME_BYTES_MAX,
    SEQUENCE_ID_MAX,
    TOPIC_NAME_BYTES_MAX,
)
from tests.integration.refusals import check, refused, status_of_call
from tests.integration.services import Services, channel_to, paused, running
from tests.support.publisher import batch, batch_entry, entry, publishing, single
from tests.support.raw_channel import raw
from tests.support.raw_consumer import EARLIEST, consuming, subscribe

INVALID = StatusCode.INVALID_ARGUMENT
TOO_LARGE = SEQUENCE_ID_MAX + 1
NEGATIVE = 2**64 - 1  # -1, as a client with signed integers encodes it

UINT64_WRONG = (TOO_LARGE, NEGATIVE)

Methods = dict[str, Callable[..., Message]]


def longest_topic(excess: int = 0) -> str:
    """A topic name of the greatest length, plus `excess` bytes."""
    return "a/b/".ljust(TOPIC_NAME_BYTES_MAX + excess, "c")


BAD_TOPICS = [
    "",
    "name",
    "tenant/name",
    "tenant/namespace/",
    "tenant//name",
    "/namespace/name",
    "tenant/namespace/name/more",
    "persistent://tenant/namespace/name",
    "tenant/namespace/na me",
    "tenant/namespace/naïve",
    "tenant/namespace/-name",
    "tenant/.namespace/name",
    "tenant/namespace/name\n",
    "tenant/namespace/na\x00me",
    "tenant/namespace/..",
    "tenant/namespace/name{tag}",
    longest_topic(1),
]

BAD_PRODUCERS = [
    "",
    "p\x00",
    "p\nq",
    "\x1f",
    "p\x7f",
    "p\x85q",
    "p" * (PRODUCER_NAME_BYTES_MAX + 1),
    "é" * (PRODUCER_NAME_BYTES_MAX // 2 + 1),  # its bytes are counted
]

BAD_UUIDS = [
    "",
    "u\x00",
    "u\nv",
    "u\x7f",
    "u\x85v",
    "u" * (CHUNK_UUID_BYTES_MAX + 1),
    "é" * (CHUNK_UUID_BYTES_MAX // 2) + "u",  # its bytes are counted
]

GOOD_UUIDS = ["u" * CHUNK_UUID_BYTES_MAX, "é" * (CHUNK_UUID_BYTES_MAX // 2), " ", "a/b %20\u2028"]

GOOD_PRODUCERS = ["p" * PRODUCER_NAME_BYTES_MAX, "é" * (PRODUCER_NAME_BYTES_MAX // 2), " ", "名/:"]


# ---- valid requests, which each test changes in one place


def position(ledger_id: int, entry_id: int) -> common_pb2.Position:
    return common_pb2.Position(ledger_id=ledger_id, entry_id=entry_id)


def writer(**changes: Any) -> writer_pb2.Writer:
    return writer_pb2.Writer(
        **{"incarnation": 1, "epoch": 1, "position": position(1, 5), **changes}
    )


def listed(producer: str = "p", *ids: int, time: int = 1) -> writer_pb2.ProducerEntries:
    seconds, rest_ms = divmod(time, 1000)
    return writer_pb2.ProducerEntries(
        producer_name=producer,
        highest_sequence_ids=ids or [5],
        last_append_time=Timestamp(seconds=seconds, nanos=rest_ms * MS_NS),
    )


def confirmation(**changes: Any) -> writer_pb2.Confirmation:
    right = {"through": position(1, 5), "producers": [listed()], "entry_count": 6}
    return writer_pb2.Confirmation(**{**right, **changes})


def claims(producer: str = "p", *ids: int, highest: Iterable[int] = ()) -> writer_pb2.Claims:
    return writer_pb2.Claims(
        producer_name=producer, sequence_ids=ids or [6], highest_sequence_ids=highest
    )


def admit(topic: str, **changes: Any) -> writer_pb2.AdmitRequest:
    return writer_pb2.AdmitRequest(
        **{"topic": topic, "writer": writer(), "claims": [claims()], **changes}
    )


def confirm(topic: str, **changes: Any) -> writer_pb2.ConfirmRequest:
    right = {"topic": topic, "writer": writer(), "confirmation": confirmation()}
    return writer_pb2.ConfirmRequest(**{**right, **changes})


def rollback(topic: str, **changes: Any) -> writer_pb2.RollbackRequest:
    return writer_pb2.RollbackRequest(**{"topic": topic, "writer": writer(), **changes})


LEDGER: Methods = {
    "Read": lambda topic, **more: pb.ReadRequest(topic=topic, **({"start": EARLIEST} | more)),
    "ReadEntries": lambda topic, **more: pb.ReadEntriesRequest(
        topic=topic, **({"positions": [position(1, 0)]} | more)
    ),
    "ReadColumns": lambda topic, **more: pb.ReadColumnsRequest(topic=topic, **more),
    "ListLedgers": lambda topic, **more: pb.ListLedgersRequest(topic=topic, **more),
    "ListTrimmedProducers": lambda topic, **more: pb.ListTrimmedProducersRequest(
        topic=topic, **more
    ),
    "CreateTopic": lambda topic: pb.CreateTopicRequest(topic=topic),
    "GetTopic": lambda topic: pb.GetTopicRequest(topic=topic),
    "GetLastMessageId": lambda topic: pb.GetLastMessageIdRequest(topic=topic),
    "FindMessage": lambda topic, producer_name="p", sequence_id=0: pb.FindMessageRequest(
        topic=topic, producer_name=producer_name, sequence_id=sequence_id
    ),
    "FindPosition": lambda topic, **more: pb.FindPositionRequest(
        topic=topic, **({"append_time": timestamp(0)} | more)
    ),
    "TrimTopic": lambda topic, **more: pb.TrimTopicRequest(
        topic=topic, **({"before": position(1, 0)} | more)
    ),
    "RenewTopic": lambda topic, **more: pb.RenewTopicRequest(topic=topic, **({"above": 0} | more)),
    "DeleteTopic": lambda topic: pb.DeleteTopicRequest(topic=topic),
}
"""A valid request to each method of the ledger that names a topic, by method."""

DEDUP: Methods = {
    "Admit": admit,
    "Confirm": confirm,
    "Rollback": rollback,
    "KeepProducersAlive": lambda topic, producer_name="p": writer_pb2.KeepProducersAliveRequest(
        topic=topic, producer_names=[producer_name]
    ),
    "GetProducer": lambda topic, producer_name="p": dedup_pb2.GetProducerRequest(
        topic=topic, producer_name=producer_name
    ),
    "ListProducers": lambda topic, **more: dedup_pb2.ListProducersRequest(topic=topic, **more),
    "GetTopicStatus": lambda topic: dedup_pb2.GetTopicStatusRequest(topic=topic),
    "ForgetTopic": lambda topic, incarnation=1: writer_pb2.ForgetTopicRequest(
        topic=topic, incarnation=incarnation
    ),
    "TakeSnapshot": lambda topic: dedup_pb2.TakeSnapshotRequest(topic=topic),
    "SetPolicy": lambda topic: dedup_pb2.SetPolicyRequest(topic=topic),
    "GetPolicy": lambda topic: dedup_pb2.GetPolicyRequest(topic=topic),
    "Explain": lambda topic, producer_name="p", sequence_id=0: dedup_pb2.ExplainRequest(
        topic=topic, producer_name=producer_name, sequence_id=sequence_id
    ),
}
"""The same for the dedup service."""

LEDGER_SERVICE = pb.DESCRIPTOR.services_by_name["LedgerService"]
DEDUP_SERVICE = dedup_pb2.DESCRIPTOR.services_by_name["DedupService"]
DEDUP_WRITER_SERVICE = writer_pb2.DESCRIPTOR.services_by_name["DedupWriterService"]


async def call(stub: Any, method: str, request: Message) -> list[Any]:
    """All responses of a method to one request."""
    answer = getattr(stub, method)(request)
    if isinstance(answer, aio.UnaryStreamCall):
        return [each async for each in answer]
    return [await answer]


@asynccontextmanager
async def unchanged(services: Services, topic: str) -> AsyncIterator[None]:
    """Check that the block leaves all state unchanged."""
    before = await services.state(topic)
    yield
    assert await services.state(topic) == before


@pytest.fixture(scope="module")
async def narrow(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Services]:
    """A stack with the smallest limits."""
    async with running(
        tmp_path_factory.mktemp("narrow"),
        SEQGATE_LEDGER_WINDOW_MESSAGES="10",
        SEQGATE_LEDGER_WINDOW_BYTES="4096",
        SEQGATE_LEDGER_MAX_MESSAGE_BYTES="1024",
        SEQGATE_LEDGER_MAX_LARGE_MESSAGE_BYTES="2048",
        SEQGATE_LEDGER_MAX_CHUNKS="4",
        SEQGATE_LEDGER_MESSAGE_BYTES_MAX="65536",
        SEQGATE_LEDGER_METADATA_BYTES_MAX="2048",
        SEQGATE_DEDUP_MESSAGE_BYTES_MAX="65536",
        SEQGATE_DEDUP_METADATA_BYTES_MAX="2048",
    ) as services:
        yield services


@pytest.fixture
async def stored(services: Services, topic: str) -> str:
    """A topic in which p has stored 0 and 5."""
    async with publishing(services.ledger, topic, "p") as publisher:
        await publisher.send(single(1, 0), single(2, 5))
        assert (await publisher.receipt(2)).status == pb.RECEIPT_STATUS_STORED
    await services.settled(topic)
    return topic


# ---- names


def test_every_method_that_names_a_topic_is_in_the_tables() -> None:
    for services, table, others in (
        ([LEDGER_SERVICE], LEDGER, {"Publish", "ListTopics"}),
        ([DEDUP_SERVICE, DEDUP_WRITER_SERVICE], DEDUP, {"Exchange", "LoadState"}),
    ):
        methods = {method.name for service in services for method in service.methods}
        assert methods == table.keys() | others


@pytest.mark.parametrize("method", LEDGER)
async def test_the_ledger_refuses_invalid_topic_names(services: Services, method: str) -> None:
    async with unchanged(services, ""):
        for name in BAD_TOPICS:
            with refused(INVALID, "INVALID_TOPIC_NAME"):
                await call(services.ledger, method, LEDGER[method](name))


@pytest.mark.parametrize("method", DEDUP)
async def test_dedup_refuses_invalid_topic_names(services: Services, method: str) -> None:
    for name in BAD_TOPICS:
        with refused(INVALID, "INVALID_TOPIC_NAME"):
            await call(services.dedup, method, DEDUP[method](name))


MAY_LACK_TOPIC = ("CreateTopic", "RenewTopic")
"""The methods that succeed for a topic that does not exist."""


@pytest.mark.parametrize("method", [each for each in LEDGER if each not in MAY_LACK_TOPIC])
async def test_the_ledger_does_not_find_a_missing_topic(
    services: Services, method: str, topic: str
) -> None:
    async with unchanged(services, topic):
        with refused(StatusCode.NOT_FOUND, "TOPIC_NOT_FOUND"):
            await call(services.ledger, method, LEDGER[method](topic))


async def test_the_longest_topic_name_is_accepted(services: Services) -> None:
    name = longest_topic()
    async with publishing(services.ledger, name, "p") as publisher:
        assert (await publisher.store(single(1, 0))).status == pb.RECEIPT_STATUS_STORED
    assert await services.ids(name) == [0]
    assert list(await services.producers(name)) == ["p"]


@pytest.mark.parametrize(
    ("service", "method"),
    [
        ("ledger", "FindMessage"),
        ("dedup", "KeepProducersAlive"),
        ("dedup", "GetProducer"),
        ("dedup", "Explain"),
    ],
)
async def test_methods_refuse_invalid_producer_names(
    services: Services, stored: str, service: str, method: str
) -> None:
    make = {"ledger": LEDGER, "dedup": DEDUP}[service][method]
    async with unchanged(services, stored):
        for name in BAD_PRODUCERS:
            with refused(INVALID, "INVALID_PRODUCER_NAME"):
                await call(getattr(services, service), method, make(stored, producer_name=name))


@pytest.mark.parametrize("name", GOOD_PRODUCERS)
async def test_valid_producer_names_are_accepted(services: Services, topic: str, name: str) -> None:
    async with publishing(services.ledger, topic, name) as publisher:
        assert publisher.opened.producer_name == name
        assert (await publisher.store(single(1, 7))).status == pb.RECEIPT_STATUS_STORED
    await services.settled(topic)
    assert (await services.producers(topic))[name].persisted_sequence_id == 7
    request = dedup_pb2.GetProducerRequest(topic=topic, producer_name=name)
    assert (await services.dedup.GetProducer(request)).producer.name == name


async def test_a_stream_refuses_invalid_topic_names(services: Services) -> None:
    async with unchanged(services, ""):
        for name in BAD_TOPICS:
            with refused(INVALID, "INVALID_TOPIC_NAME"):
                async with publishing(services.ledger, name, "p"):
                    pass


async def test_a_stream_refuses_invalid_producer_names(services: Services, stored: str) -> None:
    """Except the empty name, which requests a generated one."""
    async with unchanged(services, stored):
        for name in BAD_PRODUCERS[1:]:
            with refused(INVALID, "INVALID_PRODUCER_NAME"):
                async with publishing(services.ledger, stored, name):
                    pass


# ---- empty requests, and bytes that are no request


FIRST_MISSING = {
    "TrimTopic": "INVALID_RANGE",
    "FindPosition": "INVALID_RANGE",
    "Admit": "INVALID_WRITER",
    "Confirm": "INVALID_WRITER",
    "Rollback": "INVALID_WRITER",
    "GetProducer": "INVALID_PRODUCER_NAME",
    "SetPolicy": "INVALID_POLICY",
    "GetPolicy": "INVALID_POLICY",
}
"""The reasons for refusing an empty request; INVALID_TOPIC_NAME if not listed."""


@pytest.mark.parametrize("method", LEDGER)
async def test_the_ledger_refuses_an_empty_request(services: Services, method: str) -> None:
    async with unchanged(services, ""):
        with refused(INVALID, FIRST_MISSING.get(method, "INVALID_TOPIC_NAME")):
            await call(services.ledger, method, empty(LEDGER_SERVICE, method))


@pytest.mark.parametrize("method", DEDUP)
async def test_dedup_refuses_an_empty_request(services: Services, method: str) -> None:
    with refused(INVALID, FIRST_MISSING.get(method, "INVALID_TOPIC_NAME")):
        service = DEDUP_SERVICE if method in DEDUP_SERVICE.methods_by_name else DEDUP_WRITER_SERVICE
        await call(services.dedup, method, empty(service, method))


async def test_an_exchange_answers_an_empty_request_with_an_error_in_order(
    services: Services,
) -> None:
    ((status, answer),) = await exchange(services, writer_pb2.ExchangeRequest(request_id=9))
    assert answer.request_id == 9
    assert status is not None
    check(status, INVALID, "INVALID_CLAIM")


async def test_an_empty_list_request_returns_the_first_page(services: Services, topic: str) -> None:
    await services.ledger.CreateTopic(pb.CreateTopicRequest(topic=topic))
    assert (await services.ledger.ListTopics(pb.ListTopicsRequest())).topics


def empty(service: Any, method: str) -> Message:
    return GetMessageClass(service.methods_by_name[method].input_type)()


GARBAGE = [b"\xff\xff", b"\x0a\x05a", b"\x0a\x02\xff\xfe"]
"""Bytes that are no protobuf message; a truncated message; text that is not UTF-8."""


@pytest.mark.parametrize("garbage", GARBAGE)
@pytest.mark.parametrize("service", ["ledger", "dedup"])
async def test_malformed_requests_are_refused_without_internals(
    services: Services, service: str, garbage: bytes
) -> None:
    described = {"ledger": LEDGER_SERVICE, "dedup": DEDUP_WRITER_SERVICE}[service]
    method = {"ledger": "GetTopic", "dedup": "Admit"}[service]
    async with raw(channel_to(services.stack.address(service))) as channel:
        ask = channel.unary_unary(f"/{described.full_name}/{method}")
        with refused(INVALID, "MALFORMED_REQUEST"):
            await ask(garbage)


@pytest.mark.parametrize(
    ("service", "method", "right"),
    [
        ("ledger", "Publish", []),
        ("ledger", "Publish", [pb.PublishRequest(open=pb.Open(topic="a/b/malformed"))]),
        ("dedup", "Exchange", []),
        ("dedup", "Exchange", [writer_pb2.ExchangeRequest(request_id=1)]),
    ],
)
async def test_a_malformed_request_ends_its_stream(
    services: Services, service: str, method: str, right: list[Message]
) -> None:
    described = {"ledger": LEDGER_SERVICE, "dedup": DEDUP_WRITER_SERVICE}[service]
    async with raw(channel_to(services.stack.address(service))) as channel:
        stream = channel.stream_stream(f"/{described.full_name}/{method}")()
        for request in right:
            await stream.write(request.SerializeToString())
            assert await stream.read() is not aio.EOF
        await stream.write(GARBAGE[0])
        with refused(INVALID, "MALFORMED_REQUEST"):
            await stream.read()


async def test_a_refusals_reason_is_short_text_or_nothing_is_refused(
    services: Services, topic: str
) -> None:
    async with publishing(services.ledger, topic, "p") as publisher:
        await publisher.store(single(1, 1))
    async with consuming(services.dispatcher, topic, permits=1) as consumer:
        (delivery,) = await consumer.received(1)
        too_long = "é" * (NACK_REASON_BYTES_MAX // 2) + "e"  # its bytes are counted
        settled = await consumer.negative_acknowledge(delivery, reason=too_long)
        check(settled.error, INVALID, "INVALID_SETTLEMENT")
        longest = too_long.removesuffix("e")
        settled = await consumer.negative_acknowledge(delivery, reason=longest)
        assert settled == pb_dispatcher.Settled(request_id=settled.request_id)  # it was in flight
    refusal = pb_dispatcher.NegativeAcknowledgement(delivery=1, reason="??")
    request = pb_dispatcher.ConsumeRequest(
        negative_acknowledge=pb_dispatcher.NegativeAcknowledge(
            request_id=1, epoch=1, negative_acknowledgements=[refusal]
        )
    )
    described = pb_dispatcher.DESCRIPTOR.services_by_name["DispatcherService"]
    async with raw(channel_to(services.stack.address("dispatcher"))) as channel:
        stream = channel.stream_stream(f"/{described.full_name}/Consume")()
        opening = pb_dispatcher.ConsumeRequest(subscribe=subscribe(topic, "other"))
        await stream.write(opening.SerializeToString())
        assert await stream.read() is not aio.EOF
        await stream.write(request.SerializeToString().replace(b"??", b"\xff\xfe"))
        with refused(INVALID, "MALFORMED_REQUEST"):
            while await stream.read() is not aio.EOF:
                pass


async def test_an_unknown_method_is_unimplemented(services: Services) -> None:
    async with raw(channel_to(services.stack.address("ledger"))) as channel:
        ask = channel.unary_unary(f"/{LEDGER_SERVICE.full_name}/PublishTwice")
        with pytest.raises(aio.AioRpcError) as caught:
            await ask(b"")
    assert caught.value.code() is StatusCode.UNIMPLEMENTED


# ---- numbers, ranges and pages of the ledger


@pytest.mark.parametrize("number", UINT64_WRONG)
async def test_sequence_ids_have_pulsars_upper_bound(
    services: Services, stored: str, number: int
) -> None:
    async with unchanged(services, stored):
        for service, method in (("ledger", "FindMessage"), ("dedup", "Explain")):
            make = {"ledger": LEDGER, "dedup": DEDUP}[service][method]
            await call(
                getattr(services, service), method, make(stored, sequence_id=SEQUENCE_ID_MAX)
            )
            with refused(INVALID, "INVALID_SEQUENCE_ID"):
                await call(getattr(services, service), method, make(stored, sequence_id=number))


BAD_POSITIONS = [position(TOO_LARGE, 0), position(0, TOO_LARGE), position(NEGATIVE, NEGATIVE)]
LAST_POSITION = position(SEQUENCE_ID_MAX, SEQUENCE_ID_MAX)


@pytest.mark.parametrize("field", ["at", "after", "through"])
async def test_a_read_refuses_invalid_positions(
    services: Services, stored: str, field: str
) -> None:
    def read(at: common_pb2.Position) -> Message:
        if field == "through":
            return LEDGER["Read"](stored, through=at)
        return LEDGER["Read"](stored, start=common_pb2.Start(**{field: at}))  # type: ignore[arg-type]

    async with unchanged(services, stored):
        for bad in BAD_POSITIONS:
            with refused(INVALID, "INVALID_RANGE"):
                await call(services.ledger, "Read", read(bad))
        if field == "through":
            await call(services.ledger, "Read", read(LAST_POSITION))
        else:
            with refused(INVALID, "INVALID_RANGE"):  # beyond the end
                await call(services.ledger, "Read", read(LAST_POSITION))


@pytest.mark.parametrize("seconds", [-1, 2**60])
async def test_an_invalid_time_is_refused(services: Services, stored: str, seconds: int) -> None:
    time = Timestamp(seconds=seconds)
    for method, wrong in (
        ("Read", {"start": common_pb2.Start(time=time)}),
        ("FindPosition", {"append_time": time}),
    ):
        with refused(INVALID, "INVALID_RANGE"):
            await call(services.ledger, method, LEDGER[method](stored, **wrong))


@pytest.mark.parametrize("field", ["after", "through"])
async def test_columns_refuse_invalid_positions(
    services: Services, stored: str, field: str
) -> None:
    async with unchanged(services, stored):
        for bad in BAD_POSITIONS:
            with refused(INVALID, "INVALID_RANGE"):
                request = LEDGER["ReadColumns"](stored, **{field: bad})
                await call(services.ledger, "ReadColumns", request)
        request = LEDGER["ReadColumns"](stored, **{field: LAST_POSITION})
        await call(services.ledger, "ReadColumns", request)


async def test_reads_of_entries_refuse_invalid_positions(services: Services, stored: str) -> None:
    async with unchanged(services, stored):
        for bad in BAD_POSITIONS:
            with refused(INVALID, "INVALID_RANGE"):
                request = LEDGER["ReadEntries"](stored, positions=[position(1, 0), bad])
                await call(services.ledger, "ReadEntries", request)
        request = LEDGER["ReadEntries"](stored, positions=[LAST_POSITION])
        assert await call(services.ledger, "ReadEntries", request) == []


async def test_a_read_requires_a_start(services: Services, stored: str) -> None:
    with refused(INVALID, "INVALID_RANGE"):
        await call(services.ledger, "Read", pb.ReadRequest(topic=stored))


async def test_a_trim_refuses_invalid_positions(services: Services, stored: str) -> None:
    async with unchanged(services, stored):
        for bad in BAD_POSITIONS:
            with refused(INVALID, "INVALID_RANGE"):
                await call(services.ledger, "TrimTopic", LEDGER["TrimTopic"](stored, before=bad))
        with refused(INVALID, "INVALID_RANGE"):
            await call(services.ledger, "TrimTopic", pb.TrimTopicRequest(topic=stored))


@pytest.mark.parametrize("above", [-1, -(2**63), 2**63 - 1])
async def test_a_renewal_refuses_invalid_ledger_ids(
    services: Services, stored: str, above: int
) -> None:
    async with unchanged(services, stored):
        with refused(INVALID, "INVALID_RANGE"):
            await call(services.ledger, "RenewTopic", LEDGER["RenewTopic"](stored, above=above))


@pytest.mark.parametrize("page_size", [-1, -(2**31), ledger_limits.PAGE_MAX + 1, 2**31 - 1])
async def test_page_sizes_of_topics_are_bounded(services: Services, page_size: int) -> None:
    await services.ledger.ListTopics(pb.ListTopicsRequest(page_size=ledger_limits.PAGE_MAX))
    await services.ledger.ListTopics(pb.ListTopicsRequest(page_size=1))
    with refused(INVALID, "INVALID_PAGE"):
        await services.ledger.ListTopics(pb.ListTopicsRequest(page_size=page_size))


@pytest.mark.parametrize("token", ["no page", "a/b", "a/b/c/d", "a/b/\x00", longest_topic(1)])
async def test_invalid_page_tokens_of_topics_are_refused(services: Services, token: str) -> None:
    with refused(INVALID, "INVALID_PAGE"):
        await services.ledger.ListTopics(pb.ListTopicsRequest(page_token=token))


@pytest.mark.parametrize("method", ["ListLedgers", "ListTrimmedProducers"])
async def test_page_sizes_of_ledgers_and_producers_are_bounded(
    services: Services, stored: str, method: str
) -> None:
    for page_size in (0, 1, ledger_limits.PAGE_MAX):
        await call(services.ledger, method, LEDGER[method](stored, page_size=page_size))
    for page_size in (-1, -(2**31), ledger_limits.PAGE_MAX + 1, 2**31 - 1):
        with refused(INVALID, "INVALID_PAGE"):
            await call(services.ledger, method, LEDGER[method](stored, page_size=page_size))


BAD_LEDGERS = ["no ledger", "-1", "+1", " 1", "1_0", "1.0", "٣", "0x1", str(TOO_LARGE), "1" * 4_000]


@pytest.mark.parametrize(
    ("method", "good", "bad"),
    [
        ("ListLedgers", ["0", "1", str(SEQUENCE_ID_MAX)], BAD_LEDGERS),
        ("ListTrimmedProducers", GOOD_PRODUCERS, BAD_PRODUCERS[1:]),
    ],
)
async def test_invalid_page_tokens_of_ledgers_and_producers_are_refused(
    services: Services, stored: str, method: str, good: list[str], bad: list[str]
) -> None:
    for token in good:
        await call(services.ledger, method, LEDGER[method](stored, page_token=token))
    for token in bad:
        with refused(INVALID, "INVALID_PAGE"):
            await call(services.ledger, method, LEDGER[method](stored, page_token=token))


# ---- numbers, claims and confirmations of the dedup service


@pytest.mark.parametrize("page_size", [-1, dedup_limits.PAGE_MAX + 1, 2**31 - 1])
async def test_page_sizes_of_tracked_producers_are_bounded(
    services: Services, stored: str, page_size: int
) -> None:
    make = DEDUP["ListProducers"]
    await call(services.dedup, "ListProducers", make(stored, page_size=dedup_limits.PAGE_MAX))
    await call(services.dedup, "ListProducers", make(stored, page_size=1))
    with refused(INVALID, "INVALID_PAGE"):
        await call(services.dedup, "ListProducers", make(stored, page_size=page_size))


@pytest.mark.parametrize("token", ["x", "-1", "1.5", " 1", "2a", str(2**64), "9" * 5000])
async def test_invalid_page_tokens_of_tracked_producers_are_refused(
    services: Services, stored: str, token: str
) -> None:
    with refused(INVALID, "INVALID_PAGE"):
        await call(
            services.dedup, "ListProducers", DEDUP["ListProducers"](stored, page_token=token)
        )


@pytest.mark.parametrize("number", UINT64_WRONG)
async def test_incarnations_have_the_bounds_of_positions(
    services: Services, stored: str, number: int
) -> None:
    async with unchanged(services, stored):
        with refused(INVALID, "INVALID_STATE"):
            await call(
                services.dedup, "ForgetTopic", DEDUP["ForgetTopic"](stored, incarnation=number)
            )


def many_claims(count: int) -> list[writer_pb2.Claims]:
    return [claims("q", *range(count // 2)), claims("r", *range(count - count // 2))]


def many_entries(count: int) -> list[writer_pb2.ProducerEntries]:
    return [listed("q", *range(count // 2)), listed("r", *range(count - count // 2))]


BAD_WRITERS: dict[str, dict[str, Any]] = {
    "no writer": {"writer": None},
    "an incarnation too large": {"writer": writer(incarnation=TOO_LARGE)},
    "an epoch too large": {"writer": writer(epoch=NEGATIVE)},
    **{f"a position too large: {bad}": {"writer": writer(position=bad)} for bad in BAD_POSITIONS},
}

BAD_CONFIRMATIONS: dict[str, dict[str, Any]] = {
    "a confirmation without an end": {"confirmation": confirmation(through=None)},
    "a confirmation that ends before it starts": {
        "confirmation": confirmation(after=position(1, 6))
    },
    "a confirmation beyond the log": {"confirmation": confirmation(through=position(1, 6))},
    "a confirmation of an empty log": {
        "writer": writer(position=None),
        "confirmation": confirmation(),
    },
    "a confirmation from too large a position": {
        "confirmation": confirmation(after=position(0, TOO_LARGE))
    },
    "a confirmation to too large a position": {
        "confirmation": confirmation(through=position(TOO_LARGE, 0))
    },
    "a producer without entries": {
        "confirmation": confirmation(producers=[writer_pb2.ProducerEntries(producer_name="p")])
    },
    "too many entries": {
        "confirmation": confirmation(producers=many_entries(dedup_wire.ENTRIES_MAX + 1))
    },
    "an entry count too large": {"confirmation": confirmation(entry_count=TOO_LARGE)},
    "an entry count that no log has": {
        "confirmation": confirmation(entry_count=dedup_wire.ENTRY_COUNT_MAX + 1)
    },
    "too many entries remaining": {"confirmation": confirmation(entries_remaining=TOO_LARGE)},
    "more entries remaining than a log has": {
        "confirmation": confirmation(entries_remaining=dedup_wire.ENTRIES_REMAINING_MAX + 1)
    },
    "an append time too large": {
        "confirmation": confirmation(producers=[listed(time=10 * TIME_MAX_MS)])
    },
    "an append time after the last year": {
        "confirmation": confirmation(producers=[listed(time=TIME_MAX_MS + 1)])
    },
}

CHUNK = common_pb2.Chunk(uuid="u", chunk_id=0, num_chunks=2, total_bytes=2)

BAD_CHUNKS: dict[str, dict[str, Any]] = {
    **{f"of {uuid[:5]!r} of {len(uuid)}": {"uuid": uuid} for uuid in BAD_UUIDS},
    "after the last": {"chunk_id": 2},
    "as the only chunk": {"num_chunks": 1},
    "of no chunks": {"num_chunks": 0},
    "of more chunks than bytes": {"num_chunks": 3},
    "of an empty message": {"total_bytes": 0},
    "of a message too large": {"total_bytes": LARGE_MESSAGE_BYTES_MAX + 1},
    "of the largest encodable message": {"total_bytes": 2**32 - 1},
}


def chunks(place: int = 0, **changes: Any) -> dict[int, common_pb2.Chunk]:
    """A valid chunk, with changes, at its index."""
    chunk = common_pb2.Chunk()
    chunk.CopyFrom(CHUNK)
    for name, value in changes.items():
        setattr(chunk, name, value)
    return {place: chunk}


def claimed_with(chunks: dict[int, common_pb2.Chunk], *highest: int) -> dict[str, Any]:
    """A claim of p's 6, which is a chunk."""
    claim = claims("p", 6, highest=highest)
    for place, chunk in chunks.items():
        claim.chunks[place].CopyFrom(chunk)
    return {"claims": [claim]}


def stored_with(chunks: dict[int, common_pb2.Chunk]) -> dict[str, Any]:
    """A confirmation of p's 5, which is a chunk."""
    entries = listed("p", 5)
    for place, chunk in chunks.items():
        entries.chunks[place].CopyFrom(chunk)
    return {"confirmation": confirmation(producers=[entries])}


WRONG: dict[str, tuple[Callable[..., Message], dict[str, Any], str]] = {
    **{
        f"{verb.__name__}: {what}": (verb, changes, reason)
        for bad, reason in (
            (BAD_WRITERS, "INVALID_WRITER"),
            (BAD_CONFIRMATIONS, "INVALID_CONFIRMATION"),
        )
        for what, changes in bad.items()
        for verb in (admit, confirm, rollback)
    },
    "confirm: no confirmation": (confirm, {"confirmation": None}, "INVALID_CONFIRMATION"),
    **{
        f"{verb.__name__}: an entry's id of {number}": (
            verb,
            {"confirmation": confirmation(producers=[listed("p", 5, number)])},
            "INVALID_SEQUENCE_ID",
        )
        for number in UINT64_WRONG
        for verb in (admit, confirm, rollback)
    },
    **{
        f"{verb.__name__}: a producer confirmed twice": (
            verb,
            {"confirmation": confirmation(producers=[listed("q"), listed("p"), listed("q")])},
            "INVALID_CONFIRMATION",
        )
        for verb in (admit, confirm, rollback)
    },
    **{
        f"{what} by {name[:5]!r} of {len(name)}": (verb, changes, "INVALID_PRODUCER_NAME")
        for name in BAD_PRODUCERS
        for what, verb, changes in (
            ("claimed", admit, {"claims": [claims(), claims(name)]}),
            (
                "confirmed",
                confirm,
                {"confirmation": confirmation(producers=[listed(), listed(name)])},
            ),
            (
                "withdrawn",
                rollback,
                {"withdrawals": [writer_pb2.Withdrawal(producer_name=name)]},
            ),
        )
    },
    **{
        f"admit: a claim from {number}": (
            admit,
            {"claims": [claims("q", 1, number)]},
            "INVALID_SEQUENCE_ID",
        )
        for number in UINT64_WRONG
    },
    **{
        f"admit: a claim up to {number}": (
            admit,
            {"claims": [claims("q", 1, 2, highest=[1, number])]},
            "INVALID_SEQUENCE_ID",
        )
        for number in UINT64_WRONG
    },
    "admit: a range that ends before it starts": (
        admit,
        {"claims": [claims("p", 6, 8, highest=[7, 7])]},
        "INVALID_CLAIM",
    ),
    "admit: no ids": (
        admit,
        {"claims": [writer_pb2.Claims(producer_name="p")]},
        "INVALID_CLAIM",
    ),
    "admit: a highest id too few": (
        admit,
        {"claims": [claims("p", 6, 7, highest=[6])]},
        "INVALID_CLAIM",
    ),
    "admit: a highest id too many": (
        admit,
        {"claims": [claims("p", 6, highest=[6, 7])]},
        "INVALID_CLAIM",
    ),
    "admit: a producer twice": (
        admit,
        {"claims": [claims("p", 6), claims("q", 6), claims("p", 7)]},
        "INVALID_CLAIM",
    ),
    "admit: too many claims": (
        admit,
        {"claims": many_claims(dedup_wire.CLAIMS_MAX + 1)},
        "INVALID_CLAIM",
    ),
    **{
        f"admit: a chunk {what}": (admit, claimed_with(chunks(**changes)), "INVALID_CLAIM")
        for what, changes in BAD_CHUNKS.items()
    },
    "admit: a chunk in no place": (admit, claimed_with(chunks(place=1)), "INVALID_CLAIM"),
    "admit: a chunk of many ids": (admit, claimed_with(chunks(), 7), "INVALID_CLAIM"),
    **{
        f"{verb.__name__}: a stored chunk {what}": (
            verb,
            stored_with(chunks(**changes)),
            "INVALID_CONFIRMATION",
        )
        for what, changes in {**BAD_CHUNKS, "in no place": {"place": 1}}.items()
        for verb in (admit, confirm, rollback)
    },
    "rollback: too many withdrawals": (
        rollback,
        {
            "withdrawals": [writer_pb2.Withdrawal(producer_name="p")]
            * (dedup_wire.PRODUCERS_MAX + 1)
        },
        "INVALID_CLAIM",
    ),
    **{
        f"rollback: keep through {number}": (
            rollback,
            {
                "withdrawals": [
                    writer_pb2.Withdrawal(producer_name="p", keep_through_sequence_id=number)
                ]
            },
            "INVALID_SEQUENCE_ID",
        )
        for number in UINT64_WRONG
    },
}


@pytest.fixture
async def claimed(services: Services, topic: str) -> str:
    """A topic of dedup's own, where p has stored 5 and 6 is admitted."""
    await services.dedup.Confirm(confirm(topic))
    answer = await services.dedup.Admit(admit(topic))
    assert list(answer.verdicts.producers[0].verdicts) == [dedup_pb2.CLAIM_VERDICT_NEW]
    return topic


@asynccontextmanager
async def remembered(services: Services, topic: str) -> AsyncIterator[None]:
    """Check that the block leaves deduplication state unchanged."""
    before = await services.status(topic), await services.producers(topic)
    yield
    assert (await services.status(topic), await services.producers(topic)) == before


@pytest.mark.parametrize("what", WRONG)
async def test_invalid_writer_calls_are_refused_and_change_nothing(
    services: Services, claimed: str, what: str
) -> None:
    """Both as a unary call and, in order, on an Exchange stream, which continues."""
    make, changes, reason = WRONG[what]
    request = make(claimed, **changes)
    async with remembered(services, claimed):
        with refused(INVALID, reason):
            await call(services.dedup, make.__name__.capitalize(), request)
        asked: dict[str, Any] = {make.__name__: request}
        wrong = writer_pb2.ExchangeRequest(request_id=1, **asked)
        right = writer_pb2.ExchangeRequest(request_id=2, confirm=confirm(claimed))
        (status, first), (none, second) = await exchange(services, wrong, right)
        assert (first.request_id, second.request_id) == (1, 2)
        check(status, INVALID, reason)
        assert none is None
        assert second.confirm.confirmed.deduplicated


async def exchange(
    services: Services, *requests: writer_pb2.ExchangeRequest
) -> list[tuple[status_pb2.Status | None, writer_pb2.ExchangeResponse]]:
    """The answers of an Exchange stream to these requests; an error as its status."""
    stream = services.dedup.Exchange()
    answers = []
    for request in requests:
        await stream.write(request)
        response = await stream.read()
        answers.append((response.error if response.HasField("error") else None, response))
    await stream.done_writing()
    assert await stream.read() is aio.EOF
    return answers


async def test_claims_are_judged_up_to_the_limit(services: Services, topic: str) -> None:
    count = dedup_wire.CLAIMS_MAX
    request = admit(topic, writer=writer(position=None), claims=many_claims(count))
    answer = await services.dedup.Admit(request)
    verdicts = [each for some in answer.verdicts.producers for each in some.verdicts]
    assert verdicts == [dedup_pb2.CLAIM_VERDICT_NEW] * count


async def test_entries_are_confirmed_up_to_the_limit(services: Services, topic: str) -> None:
    entries = many_entries(dedup_wire.ENTRIES_MAX)
    await services.dedup.Confirm(confirm(topic, confirmation=confirmation(producers=entries)))
    half = dedup_wire.ENTRIES_MAX // 2
    marks = {
        name: each.persisted_sequence_id for name, each in (await services.producers(topic)).items()
    }
    assert marks == {"q": half - 1, "r": half - 1}


async def test_withdrawals_are_made_up_to_the_limit(services: Services, claimed: str) -> None:
    count = dedup_wire.PRODUCERS_MAX
    withdrawals = [writer_pb2.Withdrawal(producer_name=f"p{each}") for each in range(count)]
    answer = await services.dedup.Rollback(rollback(claimed, withdrawals=withdrawals))
    assert answer.rolled_back.deduplicated


async def test_producers_are_kept_alive_up_to_the_limit(services: Services, claimed: str) -> None:
    names = [f"p{each}" for each in range(dedup_wire.PRODUCERS_MAX)]
    keep = services.dedup.KeepProducersAlive
    await keep(writer_pb2.KeepProducersAliveRequest(topic=claimed, producer_names=names))
    with refused(INVALID, "INVALID_PRODUCER_NAME"):
        await keep(
            writer_pb2.KeepProducersAliveRequest(topic=claimed, producer_names=[*names, "q"])
        )
    assert (await services.producers(claimed)).keys() == {"p"}


async def test_the_largest_numbers_are_accepted(services: Services, topic: str) -> None:
    last = SEQUENCE_ID_MAX
    latest_ms = TIME_MAX_MS
    just_before = position(last, last - 1)
    everything = confirmation(
        through=just_before,
        producers=[listed("p", last, time=latest_ms)],
        entry_count=dedup_wire.ENTRY_COUNT_MAX,
        entries_remaining=dedup_wire.ENTRIES_REMAINING_MAX,
    )
    largest = writer(incarnation=last, epoch=last, position=LAST_POSITION)
    await services.dedup.Confirm(confirm(topic, writer=largest, confirmation=everything))
    status = await services.status(topic)
    assert (status.confirmed, status.epoch) == (just_before, last)
    assert status.counts.confirmed_entries == dedup_wire.ENTRY_COUNT_MAX
    assert status.entries_remaining == dedup_wire.ENTRIES_REMAINING_MAX
    known = (await services.producers(topic))["p"]
    assert known.persisted_sequence_id == last
    assert known.last_active.ToMilliseconds() == latest_ms

    there = writer(incarnation=last, epoch=last, position=just_before)
    answer = await services.dedup.Admit(admit(topic, writer=there, claims=[claims("p", last)]))
    assert list(answer.verdicts.producers[0].verdicts) == [dedup_pb2.CLAIM_VERDICT_DUPLICATE]
    changed = writer(incarnation=last, epoch=last, position=just_before, revision=NEGATIVE)
    answer = await services.dedup.Admit(admit(topic, writer=changed))
    assert answer.HasField("changed")


@pytest.mark.parametrize("uuid", GOOD_UUIDS)
async def test_the_largest_chunk_is_accepted(services: Services, topic: str, uuid: str) -> None:
    most = LARGE_MESSAGE_BYTES_MAX
    largest = chunks(uuid=uuid, num_chunks=most, total_bytes=most)
    await services.dedup.Confirm(confirm(topic, **stored_with(largest)))
    known = (await services.producers(topic))["p"]
    assert known.unfinished.last_chunk == largest[0]
    assert (known.unfinished.sequence_id, known.persisted_sequence_id) == (5, 4)
    (answer,) = (await services.dedup.Admit(admit(topic))).verdicts.producers
    assert list(answer.verdicts) == [dedup_pb2.CLAIM_VERDICT_NEW]
    assert dict(answer.aborts) == {0: uuid}


async def test_descending_ids_are_accepted_and_none_is_admitted_twice(
    services: Services, claimed: str
) -> None:
    """Claims come in the order of sending, and a producer may repeat ids in flight."""
    request = admit(claimed, claims=[claims("q", 5, 3, 5)])
    (answer,) = (await services.dedup.Admit(request)).verdicts.producers
    assert list(answer.verdicts) == [
        dedup_pb2.CLAIM_VERDICT_NEW,
        dedup_pb2.CLAIM_VERDICT_IN_FLIGHT,
        dedup_pb2.CLAIM_VERDICT_HELD,
    ]


# ---- the opening of a stream

BAD_OPENINGS: dict[str, tuple[dict[str, Any], str]] = {
    "an instance too long": (
        {"instance": b"i" * (ledger_limits.INSTANCE_BYTES_MAX + 1)},
        "INVALID_PRODUCER_NAME",
    ),
    "an initial id without a successor": (
        {"initial_sequence_id": SEQUENCE_ID_MAX},
        "INVALID_SEQUENCE_ID",
    ),
    "an initial id too large": ({"initial_sequence_id": TOO_LARGE}, "INVALID_SEQUENCE_ID"),
    "a negative initial id": ({"initial_sequence_id": NEGATIVE}, "INVALID_SEQUENCE_ID"),
}


@pytest.mark.parametrize("what", BAD_OPENINGS)
async def test_a_stream_does_not_open_with(services: Services, stored: str, what: str) -> None:
    fields, reason = BAD_OPENINGS[what]
    async with unchanged(services, stored):
        with refused(INVALID, reason):
            async with publishing(services.ledger, stored, "p", **fields):
                pass


async def test_a_stream_opens_at_the_limits(services: Services, topic: str) -> None:
    instance = b"i" * ledger_limits.INSTANCE_BYTES_MAX
    initial = SEQUENCE_ID_MAX - 1
    async with publishing(
        services.ledger, topic, "p", instance=instance, initial_sequence_id=initial
    ) as publisher:
        assert publisher.opened.last_sequence_id == initial
        receipt = await publisher.store(single(1, SEQUENCE_ID_MAX))
        assert receipt.status == pb.RECEIPT_STATUS_STORED
    assert await services.ids(topic) == [SEQUENCE_ID_MAX]


@pytest.mark.parametrize(
    "first",
    [
        None,
        pb.PublishRequest(),
        pb.PublishRequest(publications=pb.Publications(publications=[single(1, 0)])),
    ],
    ids=["nothing", "an empty request", "a publication"],
)
async def test_a_stream_must_start_with_open(
    services: Services, stored: str, first: pb.PublishRequest | None
) -> None:
    async with unchanged(services, stored):
        stream = services.ledger.Publish()
        if first is not None:
            await stream.write(first)
        await stream.done_writing()
        with refused(INVALID, "NOT_OPENED"):
            await stream.read()


# ---- errors that end a stream

ENDINGS: dict[str, tuple[Callable[[str], pb.PublishRequest], str]] = {
    "a second opening": (
        lambda topic: pb.PublishRequest(open=pb.Open(topic=topic, producer_name="p")),
        "NOT_OPENED",
    ),
    "an empty request": (lambda _: pb.PublishRequest(), "NOT_OPENED"),
    "no publications": (
        lambda _: pb.PublishRequest(publications=pb.Publications()),
        "INVALID_PUBLICATION",
    ),
    "a request id twice in one request": (
        lambda _: pb.PublishRequest(
            publications=pb.Publications(
                publications=[
                    single(1, 6, producer_name="p"),
                    single(2, 7, producer_name="p"),
                    single(1, 8, producer_name="p"),
                ]
            )
        ),
        "INVALID_PUBLICATION",
    ),
}


@pytest.mark.parametrize("what", ENDINGS)
async def test_a_stream_ends_with(services: Services, stored: str, what: str) -> None:
    make, reason = ENDINGS[what]
    async with unchanged(services, stored):
        async with publishing(services.ledger, stored, "p") as publisher:
            await publisher.write(make(stored))
            error = await publisher.ended()
        assert error is not None
        check(status_of_call(error), INVALID, reason)
    async with publishing(services.ledger, stored, "p") as publisher:
        assert publisher.opened.last_sequence_id == 5
        assert (await publisher.store(single(1, 6))).status == pb.RECEIPT_STATUS_STORED


async def test_a_request_id_is_not_reused_before_its_receipt(narrow: Services, topic: str) -> None:
    async with publishing(narrow.ledger, topic, "p") as publisher:
        await publisher.store(single(1, 1))
        with paused(narrow.stack, "redis"):
            await publisher.send(single(2, 2))
            await publisher.send(single(2, 3))
            error = await publisher.ended()
    assert error is not None
    details = check(status_of_call(error), INVALID, "INVALID_PUBLICATION")
    assert details == {"request_id": "2"}
    async with publishing(narrow.ledger, topic, "p") as publisher:
        await publisher.send(single(1, 2), single(2, 3))
        assert (await publisher.receipt(1)).status in (
            pb.RECEIPT_STATUS_STORED,
            pb.RECEIPT_STATUS_DUPLICATE,  # appends that were requested go on without their stream
        )
        assert (await publisher.receipt(2)).status == pb.RECEIPT_STATUS_STORED
    assert await narrow.ids(topic) == [1, 2, 3]


async def test_a_request_id_may_be_reused_after_its_receipt(services: Services, topic: str) -> None:
    async with publishing(services.ledger, topic, "p") as publisher:
        for sequence_id in range(3):
            receipt = await publisher.store(single(1, sequence_id))
            assert receipt.status == pb.RECEIPT_STATUS_STORED
        for request_id in (0, 2**64 - 1):
            await publisher.send(single(request_id, request_id % 7 + 3))
            assert (await publisher.receipt(request_id)).request_id == request_id


# ---- publications that are refused alone


def properties(count: int) -> dict[str, str]:
    return {f"name {each}": "value" for each in range(count)}


def padded(metadata_bytes: int) -> pb.Publication:
    """A publication of p's id 9 with metadata of this size."""

    def of(padding: int) -> pb.Publication:
        return single(9, 9, producer_name="p", properties={"p": "x" * padding})

    guess = metadata_bytes - 100
    missing = metadata_bytes - len(of(guess).entries[0].metadata.SerializeToString())
    publication = of(guess + missing)
    assert len(publication.entries[0].metadata.SerializeToString()) == metadata_bytes
    return publication


def together(*entries: pb.Entry) -> pb.Publication:
    return pb.Publication(request_id=9, entries=entries)


def spread(entries: int, messages: int) -> pb.Publication:
    """This many batches with this many messages in total, from id 9 on."""
    ids = list(range(9, 9 + messages))
    each = -(-messages // entries)
    return together(*(batch_entry(ids[i : i + each]) for i in range(0, messages, each)))


def piece(payload: bytes = b"x", **changes: Any) -> pb.Publication:
    """A publication of the first of two chunks of p's message 9, with changes; None removes a
    field."""
    right = {"uuid": "u", "num_chunks_from_msg": 2, "total_chunk_msg_size": 2, "chunk_id": 0}
    metadata: dict[str, Any] = {
        name: value for name, value in (right | changes).items() if value is not None
    }
    return single(9, 9, payload, **metadata)


def piece_without(field: str) -> pb.Publication:
    changes: dict[str, Any] = {field: None}
    return piece(**changes)


MAX_LARGE_BYTES = LedgerConfig.model_fields["max_large_message_bytes"].default
MAX_CHUNKS = LedgerConfig.model_fields["max_chunks"].default
MAX_MESSAGE_BYTES = LedgerConfig.model_fields["max_message_bytes"].default
DAMAGED = google_crc32c.value(b"what was sent") ^ 1

REFUSED: dict[str, tuple[pb.Publication, str]] = {
    # Each refused publication has id 9, which a valid publication stores afterwards.
    "no entries": (together(), "INVALID_PUBLICATION"),
    "too many entries": (
        together(*(entry(9 + each) for each in range(ledger_limits.PUBLICATION_ENTRIES_MAX + 1))),
        "INVALID_PUBLICATION",
    ),
    "entries in the wrong order": (together(entry(10), entry(9)), "INVALID_PUBLICATION"),
    "entries with the same id": (together(entry(9), entry(9)), "INVALID_PUBLICATION"),
    "batches that share an id": (
        together(batch_entry([9, 11]), batch_entry([10, 11, 12])),
        "INVALID_PUBLICATION",
    ),
    "a marker among others": (together(entry(9), entry(10, marker_type=1)), "INVALID_PUBLICATION"),
    "too many messages in total": (
        spread(2, ledger_limits.BATCH_MESSAGES_MAX + 1),
        "INVALID_PUBLICATION",
    ),
    "an entry without metadata": (
        pb.Publication(request_id=9, entries=[pb.Entry(payload=b"x")]),
        "INVALID_SEQUENCE_ID",
    ),
    "no sequence id": (
        together(pb.Entry(metadata=entry_pb2.EntryMetadata(producer_name="p"))),
        "INVALID_SEQUENCE_ID",
    ),
    "a sequence id too large": (single(9, TOO_LARGE), "INVALID_SEQUENCE_ID"),
    "a negative sequence id": (single(9, NEGATIVE), "INVALID_SEQUENCE_ID"),
    "a highest id too large": (
        single(9, 9, highest_sequence_id=TOO_LARGE, num_messages_in_batch=2),
        "INVALID_SEQUENCE_ID",
    ),
    "a highest id below the lowest": (single(9, 9, highest_sequence_id=8), "INVALID_ENTRY"),
    "a batch whose highest id is below its lowest": (
        single(9, 9, highest_sequence_id=7, num_messages_in_batch=2),
        "INVALID_ENTRY",
    ),
    "a range that is no batch": (single(9, 9, highest_sequence_id=12), "INVALID_ENTRY"),
    "fewer ids than messages": (
        single(9, 9, highest_sequence_id=10, num_messages_in_batch=3),
        "INVALID_ENTRY",
    ),
    "a batch without its highest id": (single(9, 9, num_messages_in_batch=2), "INVALID_ENTRY"),
    "a batch of 0": (single(9, 9, num_messages_in_batch=0), "INVALID_ENTRY"),
    "a batch of -1": (single(9, 9, num_messages_in_batch=-1), "INVALID_ENTRY"),
    "a batch of too many": (
        batch(9, range(9, 10 + ledger_limits.BATCH_MESSAGES_MAX)),
        "INVALID_ENTRY",
    ),
    "steps without a batch": (single(9, 9, sequence_id_steps=[1]), "INVALID_ENTRY"),
    "too few steps": (
        single(9, 9, highest_sequence_id=12, num_messages_in_batch=4, sequence_id_steps=[1, 2]),
        "INVALID_ENTRY",
    ),
    "steps that miss the highest id": (
        single(9, 9, highest_sequence_id=12, num_messages_in_batch=3, sequence_id_steps=[1, 1]),
        "INVALID_ENTRY",
    ),
    "a step of 0": (
        single(9, 9, highest_sequence_id=11, num_messages_in_batch=3, sequence_id_steps=[0, 2]),
        "INVALID_ENTRY",
    ),
    "steps that wrap around": (
        single(
            9,
            9,
            highest_sequence_id=10,
            num_messages_in_batch=3,
            sequence_id_steps=[2**64 - 1, 2],
        ),
        "INVALID_ENTRY",
    ),
    "another producer's entry": (single(9, 9, producer_name="q"), "INVALID_ENTRY"),
    "an entry without a producer": (single(9, 9, producer_name=""), "INVALID_ENTRY"),
    "too many properties": (
        single(9, 9, properties=properties(ledger_limits.PROPERTIES_MAX + 1)),
        "INVALID_ENTRY",
    ),
    "metadata too large": (padded(METADATA_BYTES_MAX + 1), "ENTRY_TOO_LARGE"),
    "a property too large": (
        single(9, 9, properties={"x" * METADATA_BYTES_MAX: ""}),
        "ENTRY_TOO_LARGE",
    ),
    "a key too large": (
        single(9, 9, partition_key="k" * METADATA_BYTES_MAX),
        "ENTRY_TOO_LARGE",
    ),
    "a payload too large": (single(9, 9, b"x" * (MAX_MESSAGE_BYTES + 1)), "ENTRY_TOO_LARGE"),
    "a key of bytes that is no base64": (
        single(9, 9, partition_key="no base64", partition_key_b64_encoded=True),
        "INVALID_ENTRY",
    ),
    "a negative delivery time": (single(9, 9, deliver_at_time=-1), "INVALID_ENTRY"),
    "the lowest delivery time": (single(9, 9, deliver_at_time=-(2**63)), "INVALID_ENTRY"),
    "a compressed payload without its size": (
        single(9, 9, compression=entry_pb2.COMPRESSION_TYPE_ZSTD),
        "INVALID_ENTRY",
    ),
    "a damaged payload": (
        single(9, 9, b"what was sent", payload_crc32c=DAMAGED),
        "CHECKSUM_MISMATCH",
    ),
    "a checksum of no bytes": (single(9, 9, payload_crc32c=0), "CHECKSUM_MISMATCH"),
    "one damaged entry among others": (
        together(entry(9), entry(10, payload_crc32c=DAMAGED), entry(11)),
        "CHECKSUM_MISMATCH",
    ),
    **{
        f"a chunk without its {field}": (piece_without(field), "INVALID_ENTRY")
        for field in ("uuid", "num_chunks_from_msg", "total_chunk_msg_size", "chunk_id")
    },
    **{
        f"a chunk of {uuid[:5]!r} of {len(uuid)}": (piece(uuid=uuid), "INVALID_ENTRY")
        for uuid in BAD_UUIDS
    },
    **{
        f"chunk {chunk_id} of {chunks}": (
            piece(chunk_id=chunk_id, num_chunks_from_msg=chunks),
            "INVALID_ENTRY",
        )
        for chunk_id, chunks in ((2, 2), (-1, 2), (0, 0), (0, -2), (1, 1), (2**31 - 1, 2))
    },
    "a chunk without payload": (piece(b""), "INVALID_ENTRY"),
    "a chunk that leaves no byte for the next": (piece(b"xy"), "INVALID_ENTRY"),
    "a chunk larger than its message": (piece(b"xyz"), "INVALID_ENTRY"),
    "a chunk of an empty message": (piece(total_chunk_msg_size=0), "INVALID_ENTRY"),
    "a chunk of a message of -1 bytes": (piece(total_chunk_msg_size=-1), "INVALID_ENTRY"),
    "more chunks than bytes": (piece(num_chunks_from_msg=3), "INVALID_ENTRY"),
    "an only chunk smaller than its message": (piece(num_chunks_from_msg=1), "INVALID_ENTRY"),
    "a message too large": (piece(total_chunk_msg_size=MAX_LARGE_BYTES + 1), "ENTRY_TOO_LARGE"),
    "a message of too many chunks": (
        piece(num_chunks_from_msg=MAX_CHUNKS + 1, total_chunk_msg_size=MAX_CHUNKS + 1),
        "ENTRY_TOO_LARGE",
    ),
    "a chunk too large": (
        piece(b"x" * (MAX_MESSAGE_BYTES + 1), total_chunk_msg_size=MAX_LARGE_BYTES),
        "ENTRY_TOO_LARGE",
    ),
    "a chunk that is a batch": (
        piece(num_messages_in_batch=1, highest_sequence_id=9),
        "INVALID_ENTRY",
    ),
    "a chunk that is a marker": (piece(marker_type=1), "INVALID_ENTRY"),
    "a chunk of many ids": (piece(highest_sequence_id=10), "INVALID_ENTRY"),
    "a chunk before another entry": (
        together(*piece().entries, entry(10)),
        "INVALID_PUBLICATION",
    ),
    "a chunk after another entry": (
        together(entry(8), *piece().entries),
        "INVALID_PUBLICATION",
    ),
    "a damaged chunk": (piece(payload_crc32c=DAMAGED), "CHECKSUM_MISMATCH"),
}


@pytest.mark.parametrize("what", REFUSED)
async def test_a_publication_is_refused_for(services: Services, stored: str, what: str) -> None:
    """The refusal moves no watermark and starts no hold."""
    given, reason = REFUSED[what]
    wrong = pb.Publication()
    wrong.CopyFrom(given)
    async with publishing(services.ledger, stored, "p") as publisher:
        async with unchanged(services, stored):
            receipt = await publisher.store(wrong)
            assert receipt.status == pb.RECEIPT_STATUS_REFUSED
            assert not receipt.HasField("position")
            assert not receipt.fates
            check(receipt.error, INVALID, reason)
        assert (await publisher.store(single(9, 9))).status == pb.RECEIPT_STATUS_STORED
        assert (await publisher.store(single(10, 10))).status == pb.RECEIPT_STATUS_STORED
    assert await services.ids(stored) == [0, 5, 9, 10]


async def test_an_invalid_publication_does_not_affect_others(
    services: Services, topic: str
) -> None:
    async with publishing(services.ledger, topic, "p") as publisher:
        await publisher.send(single(1, 1), single(2, TOO_LARGE), single(3, 3))
        statuses = [(await publisher.receipt(each)).status for each in (1, 2, 3)]
    assert statuses == [
        pb.RECEIPT_STATUS_STORED,
        pb.RECEIPT_STATUS_REFUSED,
        pb.RECEIPT_STATUS_STORED,
    ]
    assert await services.ids(topic) == [1, 3]


@pytest.mark.parametrize("difference", [-1, 1, 2**64 - 1])
async def test_a_publication_for_another_epoch_is_refused(
    services: Services, topic: str, difference: int
) -> None:
    async with publishing(services.ledger, topic, "p") as publisher:
        ours = publisher.opened.ledger_id
        await publisher.store(single(1, 1))
        theirs = (ours + difference) % 2**64 or 2**63
        async with unchanged(services, topic):
            await publisher.send(single(2, 2), single(3, 3), ledger_id=theirs)
            for request_id in (2, 3):
                receipt = await publisher.receipt(request_id)
                assert receipt.status == pb.RECEIPT_STATUS_REFUSED
                check(receipt.error, StatusCode.ABORTED, "FENCED")
        await publisher.send(single(4, 2), single(5, 3), ledger_id=ours)
        for request_id in (4, 5):
            assert (await publisher.receipt(request_id)).status == pb.RECEIPT_STATUS_STORED


ACCEPTED: dict[str, pb.Publication] = {
    "the most entries": together(
        *(entry(9 + each) for each in range(ledger_limits.PUBLICATION_ENTRIES_MAX))
    ),
    "the most messages, in two batches": spread(2, ledger_limits.BATCH_MESSAGES_MAX),
    "the most messages, in one batch": batch(9, range(9, 9 + ledger_limits.BATCH_MESSAGES_MAX)),
    "the most messages, with gaps": batch(9, range(9, 9 + 2 * ledger_limits.BATCH_MESSAGES_MAX, 2)),
    "the highest id": single(9, SEQUENCE_ID_MAX),
    "a batch up to the highest id": batch(9, [SEQUENCE_ID_MAX - 1, SEQUENCE_ID_MAX]),
    "a step over nearly all ids": batch(9, [9, SEQUENCE_ID_MAX]),
    "the most properties": single(9, 9, properties=properties(ledger_limits.PROPERTIES_MAX)),
    "the largest metadata": padded(METADATA_BYTES_MAX),
    "the largest payload": single(9, 9, b"x" * MAX_MESSAGE_BYTES),
    "no payload": single(9, 9, b""),
    "a key of bytes": single(9, 9, partition_key="AP8=", partition_key_b64_encoded=True),
    "a key of no bytes": single(9, 9, partition_key="", partition_key_b64_encoded=True),
    "a key of text that is no base64": single(
        9, 9, partition_key="%", partition_key_b64_encoded=False
    ),
    "a key of bytes without a key": single(9, 9, partition_key_b64_encoded=True),
    "the earliest delivery time": single(9, 9, deliver_at_time=0),
    "the latest delivery time": single(9, 9, deliver_at_time=2**63 - 1),
    "a batch with a delivery time": batch(9, [9, 10], deliver_at_time=7),
    "a payload with its checksum": single(
        9, 9, b"what was sent", payload_crc32c=google_crc32c.value(b"what was sent")
    ),
    "a batch of one": batch(9, [9]),
    "the most chunks": piece(num_chunks_from_msg=MAX_CHUNKS, total_chunk_msg_size=MAX_CHUNKS),
    "the largest message": piece(total_chunk_msg_size=MAX_LARGE_BYTES),
    "a chunk that leaves a byte for each other one": piece(b"x" * 7, total_chunk_msg_size=8),
    "a message of one chunk": piece(b"xy", num_chunks_from_msg=1),
    **{f"a chunk of {uuid[:5]!r}": piece(uuid=uuid) for uuid in GOOD_UUIDS},
}


@pytest.mark.parametrize("what", ACCEPTED)
async def test_at_a_limit_a_publication_is_stored(
    services: Services, topic: str, what: str
) -> None:
    publication = pb.Publication()
    publication.CopyFrom(ACCEPTED[what])
    async with publishing(services.ledger, topic, "p") as publisher:
        receipt = await publisher.store(publication)
        assert receipt.status == pb.RECEIPT_STATUS_STORED, receipt
        again = await publisher.store(publication)
        assert again.status == pb.RECEIPT_STATUS_DUPLICATE
    stored = await services.read(topic)
    assert [each.metadata for each in stored] == [each.metadata for each in publication.entries]
    assert [each.payload for each in stored] == [each.payload for each in publication.entries]


# ---- the window, and gRPC's own limits


async def test_a_stream_announces_its_window(narrow: Services, topic: str) -> None:
    async with publishing(narrow.ledger, topic, "p") as publisher:
        opened = publisher.opened
        assert (opened.window_messages, opened.window_bytes) == (10, 4096)
        assert opened.max_message_bytes == 1024
        assert (opened.max_large_message_bytes, opened.max_chunks) == (2048, 4)


@pytest.mark.parametrize(
    "full",
    [
        pytest.param([single(each, each) for each in range(10)], id="messages"),
        pytest.param([batch(0, range(4)), batch(1, range(4, 10))], id="messages in batches"),
    ],
)
async def test_the_window_bounds_messages(
    narrow: Services, topic: str, full: list[pb.Publication]
) -> None:
    async with publishing(narrow.ledger, topic, "p") as publisher:
        await publisher.send(*full)
        for each in full:
            receipt = await publisher.receipt(each.request_id)
            assert receipt.status == pb.RECEIPT_STATUS_STORED
        before = await narrow.state(topic)
        again = [pb.Publication.FromString(each.SerializeToString()) for each in full]
        await publisher.send(*again, single(99, 99))
        error = await publisher.ended()
    assert error is not None
    details = check(status_of_call(error), StatusCode.RESOURCE_EXHAUSTED, "WINDOW_EXCEEDED")
    assert details == {"window_messages": "10", "window_bytes": "4096"}
    assert await narrow.state(topic) == before
    async with publishing(narrow.ledger, topic, "p") as publisher:
        assert (await publisher.store(single(99, 99))).status == pb.RECEIPT_STATUS_STORED


async def test_the_window_bounds_bytes(narrow: Services, topic: str) -> None:
    def of(size_bytes: int, request_id: int) -> pb.Publication:
        """A publication that counts as this many bytes, metadata included."""
        empty = single(request_id, request_id, b"", producer_name="p")
        rest = size_bytes - len(empty.entries[0].metadata.SerializeToString())
        return single(request_id, request_id, b"x" * rest, producer_name="p")

    async with publishing(narrow.ledger, topic, "p") as publisher:
        await publisher.send(*(of(1024, each) for each in range(4)))
        for request_id in range(4):
            assert (await publisher.receipt(request_id)).status == pb.RECEIPT_STATUS_STORED
        await publisher.send(*(of(1024, each) for each in range(4, 7)), of(1025, 7))
        error = await publisher.ended()
    assert error is not None
    check(status_of_call(error), StatusCode.RESOURCE_EXHAUSTED, "WINDOW_EXCEEDED")
    assert await narrow.ids(topic) == [0, 1, 2, 3]


async def test_a_publication_above_the_window_is_admitted_alone(
    narrow: Services, topic: str
) -> None:
    """Otherwise it could never be stored."""
    larger = [entry(each, b"x" * 1024) for each in range(20)]
    async with publishing(narrow.ledger, topic, "p") as publisher:
        receipt = await publisher.store(pb.Publication(request_id=1, entries=larger))
        assert receipt.status == pb.RECEIPT_STATUS_STORED
    assert await narrow.ids(topic) == list(range(20))


@pytest.mark.parametrize(("payload_bytes", "right"), [(1024, True), (1025, False)])
async def test_the_payload_limit_is_a_setting(
    narrow: Services, topic: str, payload_bytes: int, right: bool
) -> None:
    async with publishing(narrow.ledger, topic, "p") as publisher:
        receipt = await publisher.store(single(1, 1, b"x" * payload_bytes))
        if right:
            assert receipt.status == pb.RECEIPT_STATUS_STORED
        else:
            details = check(receipt.error, INVALID, "ENTRY_TOO_LARGE")
            assert details == {"payload_bytes": "1025", "max_message_bytes": "1024"}


@pytest.mark.parametrize(("total_bytes", "chunks"), [(2048, 4), (2049, 4), (2048, 5)])
async def test_the_message_limit_is_a_setting(
    narrow: Services, topic: str, total_bytes: int, chunks: int
) -> None:
    async with publishing(narrow.ledger, topic, "p") as publisher:
        first = piece(num_chunks_from_msg=chunks, total_chunk_msg_size=total_bytes)
        receipt = await publisher.store(first)
        if (total_bytes, chunks) == (2048, 4):
            assert receipt.status == pb.RECEIPT_STATUS_STORED
        else:
            assert check(receipt.error, INVALID, "ENTRY_TOO_LARGE") == {
                "total_chunk_msg_size": str(total_bytes),
                "max_large_message_bytes": "2048",
                "num_chunks_from_msg": str(chunks),
                "max_chunks": "4",
            }


async def test_the_grpc_message_limit_is_a_setting(narrow: Services, topic: str) -> None:
    def of(size_bytes: int) -> pb.ListTopicsRequest:
        request = pb.ListTopicsRequest(prefix="x" * (size_bytes - 4))
        assert request.ByteSize() == size_bytes
        return request

    await narrow.ledger.ListTopics(of(65536))
    async with unchanged(narrow, topic):
        with pytest.raises(aio.AioRpcError) as caught:
            await narrow.ledger.ListTopics(of(65537))
    assert caught.value.code() is StatusCode.RESOURCE_EXHAUSTED


async def test_a_grpc_message_above_the_limit_ends_its_stream(narrow: Services, topic: str) -> None:
    async with publishing(narrow.ledger, topic, "p") as publisher:
        await publisher.store(single(1, 1))
        before = await narrow.state(topic)
        await publisher.send(single(2, 2, b"x" * 65536))
        error = await publisher.ended()
        assert error is not None
        assert error.code() is StatusCode.RESOURCE_EXHAUSTED
    assert await narrow.state(topic) == before
    async with publishing(narrow.ledger, topic, "p") as publisher:
        assert publisher.opened.last_sequence_id == 1
        assert (await publisher.store(single(2, 2))).status == pb.RECEIPT_STATUS_STORED


@pytest.mark.parametrize("service", ["ledger", "dedup"])
async def test_the_header_limit_is_a_setting(narrow: Services, service: str) -> None:
    """gRPC counts 32 bytes per header, and its own headers as well: they use up the rest."""
    asks: dict[str, Callable[..., Awaitable[object]]] = {
        "ledger": lambda **more: narrow.ledger.ListTopics(pb.ListTopicsRequest(), **more),
        "dedup": lambda **more: narrow.dedup.GetTopicStatus(
            dedup_pb2.GetTopicStatusRequest(topic="a/b/c"), **more
        ),
    }
    ask = asks[service]
    await ask(metadata=[("x", "v" * 1024)])
    for value in ("v" * 2016, "v" * 2048, "v" * 60_000):
        with pytest.raises(aio.AioRpcError) as caught:
            await ask(metadata=[("x", value)])
        assert caught.value.code() is StatusCode.RESOURCE_EXHAUSTED
    with pytest.raises(aio.AioRpcError) as caught:
        await ask(metadata=[(f"x{each}", "v") for each in range(70)])
    assert caught.value.code() is StatusCode.RESOURCE_EXHAUSTED
    await asyncio.gather(*(ask(metadata=[("x", "v" * 1024)]) for _ in range(10)))

"""Arguments of the client's public functions: a wrong one is refused before it has an effect.

KIND names the kind of each argument of each function, WRONG the values that a kind refuses, and
SAME those that work as a plain one does. A test fails if an argument has no kind.
"""

import asyncio
import inspect
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import fields
from datetime import UTC, date, datetime, timedelta, tzinfo
from decimal import Decimal
from enum import Enum, IntEnum, StrEnum
from fractions import Fraction
from types import MappingProxyType
from typing import Any, Final, cast

import numpy
import pytest

from seqgate.client import (
    Admin,
    AssemblyLimits,
    Batching,
    Breaker,
    Chunking,
    Client,
    Compression,
    Consumer,
    Incomplete,
    MessageId,
    Outgoing,
    PolicyValues,
    Producer,
    Reader,
    Received,
    RetryPolicy,
    SubscriptionOptions,
    SubscriptionType,
    blocking,
    connect,
    process_by_key,
)
from seqgate.errors import ConsumerClosedError, InvalidRequestError, SeqgateError
from tests.support.fake_dispatcher import serving_fake
from tests.support.recording import Recorder, recorder, storing_ledger
from tests.support.waiting import WITHIN_S

REFUSED: Final = (ValueError, TypeError)
"""InvalidRequestError and InvalidNameError are ValueErrors."""

NOBODY: Final = "127.0.0.1:1"


class Two(IntEnum):
    TWO = 2


class Word(StrEnum):
    K = "k"


class Label(str, Enum):  # noqa: UP042  # its str() is not its value
    K = "k"


class Text(str):
    def __str__(self) -> str:
        return "something else"


class Octets(bytes):
    def __bytes__(self) -> bytes:
        return b"something else"


class Count(int):
    def __index__(self) -> int:
        return 77


class Broken:
    """Raises whatever is asked of it."""

    def __index__(self) -> int:
        raise OSError

    __float__ = __len__ = __iter__ = __index__


class Nowhere(tzinfo):
    def utcoffset(self, _: Any) -> timedelta | None:
        raise OSError

    dst = tzname = utcoffset  # type: ignore[assignment]


def numbered(*numbers: Any) -> MessageId:
    """An id with numbers of any type."""
    return MessageId(*numbers)


async def coroutine_function(_: object) -> None: ...


MESSAGE: Final = Received("t", MessageId(1, 2), b"x", "p", 0, 0, 0)
NAN, INF = math.nan, math.inf
NO_NUMBER: Final = ["1", b"1", True, [1], None, Broken(), 1j, numpy.bool_(True), {1: 1}, NAN]
NO_WHOLE: Final = [*NO_NUMBER, 1.5, 2.0, Decimal(1), Fraction(1), INF, numpy.float64(2.5)]
NO_TEXT: Final = [7, b"k", bytearray(b"k"), ["k"], "\ud800", Broken(), 1.5]
NO_BYTES: Final = ["text", 7, [1, 2], Broken(), numpy.array([1, 2])]
NO_MESSAGE_ID: Final = [
    "1:2", (1, 2), 7, MESSAGE, numbered("1", 2), numbered(1, 2.5), MessageId(True, 2),
    MessageId(2**63, 0), MessageId(1, 2, 0, 2**31), [1], Broken(),
]  # fmt: skip
NO_PLACE: Final = [
    *NO_MESSAGE_ID, "Earliest", "", ["earliest"], {"latest": 1}, 5.0, date(2026, 1, 1),
    datetime(1969, 12, 31, tzinfo=UTC), datetime(2026, 1, 1, tzinfo=Nowhere()),
]  # fmt: skip
NO_PROPERTIES: Final = [
    {"ab"}, ["ab"], [("a", "b")], "ab", b"ab", 0, False, (), {"a": 1}, {1: "a"}, {"a": None},
    {b"a": "b"}, {"a": "\ud800"}, Broken(),
]  # fmt: skip
NO_LIST: Final = ["ab", b"ab", 7, {"a": "b"}, None]

WRONG: Final[Mapping[str, list[Any]]] = {
    "address": [*NO_TEXT, ""],
    "topic": [*NO_TEXT, None, "", "a/b"],
    "name": [*NO_TEXT, ""],
    "text": [*NO_TEXT, None],
    "number": [*NO_WHOLE, -1, 2**64],
    "id": [each for each in [*NO_WHOLE, -1, 2**63] if each is not None],
    "event time": [each for each in [*NO_WHOLE, -1, 2**64] if each is not None],
    "count": [*NO_WHOLE, 0, -1, 2**63],
    "time-out": [each for each in [*NO_NUMBER, -1, -0.001, 1e12, Decimal("NaN"), -INF, -(10**400)]
                 if each is not None],
    "open time-out": [*NO_NUMBER, -1, 0, 1e12, INF, Decimal("sNaN"), 10**400],
    "delay": [each for each in [*NO_NUMBER, -1, 86_401, INF, 10**400] if each is not None],
    "long delay": [each for each in [*NO_NUMBER, -1, 4e9, INF, 10**400] if each is not None],
    "flag": [0, 1, "no", "", None, [], 1.0],
    "bytes": [*NO_BYTES, None],
    "optional bytes": NO_BYTES,
    "key": [7, 1.5, ["k"], "\ud800", Broken(), numpy.array([1])],
    "properties": NO_PROPERTIES,
    "names": [each for each in NO_LIST if each is not None] + [[7], ["\ud800"], [b"a"]],
    "place": [*NO_PLACE, None],
    "start of a subscription": NO_PLACE,
    "time": ["2026-01-01", 5, date(2026, 1, 1), datetime(2026, 1, 1, tzinfo=Nowhere())],
    "future time": [
        "2026-01-01", 5, date(2026, 1, 1), datetime(2026, 1, 1),  # noqa: DTZ001
        datetime(2026, 1, 1, tzinfo=Nowhere()), datetime(1969, 1, 1, tzinfo=UTC),
    ],
    "message id": [*NO_MESSAGE_ID, None],
    "stored message id": [*NO_MESSAGE_ID, MessageId(-1, -1), MessageId(1, -1)],
    "message ids": [*NO_LIST, MessageId(1, 2), ["1:2"], [MessageId(-1, 0)], [None]],
    "message": [None, "m", 7, MessageId(1, 2), (0, 0, -1), Broken()],
    "messages": [*NO_LIST, MESSAGE, [MESSAGE, None], [MessageId(1, 2)]],
    "outgoing": [None, 7, "ab", b"ab", {b"a": 1}, Outgoing(b"x"), [b"x", "y"], [None], [Broken()],
                 [b"x", Outgoing("y")], [b"x", Outgoing(b"y", event_time_ms=1.5)],  # type: ignore[arg-type]
                 [b"x", Outgoing(b"y", sequence_id=-1)], [Outgoing(b"y", key=7)]],  # type: ignore[arg-type]
    "reason": [7, None, b"why", ["why"], "\ud800", "x" * 257, ValueError],
    "callback": [5, "f", coroutine_function],
    "ranges": [*NO_LIST, [1], [(1,)], [(1, 2, 3)], [(1.5, 2)], [("1", 2)], [(True, 2)], [(-1, 2)]],
    "weight": [*NO_WHOLE, -1, 2**32],
    "policy": [None, {}, PolicyValues(enabled=1), PolicyValues(max_producers=1.5),  # type: ignore[arg-type]
               PolicyValues(snapshot_interval_s=-1), PolicyValues(evicts_when_full=[]),  # type: ignore[arg-type]
               PolicyValues(refuses_conflicts="refuse")],  # type: ignore[arg-type]
    "compression": ["lz4", None, 1, Incomplete.REFUSE],
    "reaction": ["REFUSE", "", b"refuse", None, True, Incomplete.REFUSE],
    "type": ["SHARED", None, 1, Compression.LZ4],
    "incomplete": ["refuse", None, True],
    "options": [{}, "x", 0, *(SubscriptionOptions(**each) for each in ({"max_unacked": 1.5},
                {"placement": "STICKY"}, {"classic_join": 1}, {"drain_deadline_s": NAN},
                {"dead_letter_topic": 5}, {"max_redeliveries": True}))],
    "batching": [{}, True, 5, Chunking()],
    "chunking": [{}, True, 5, Batching()],
    "assembly": [{}, True, 5, Batching()],
    "retry": [{}, True, 5, Breaker()],
    "breaker": [{}, True, 5, RetryPolicy()],
    "TLS": [{}, True, "ca.pem"],
    "token": [5, b"token", [], "", coroutine_function],
}  # fmt: skip

FIELDS: Final[Mapping[type, Mapping[str, list[Any]]]] = {
    Batching: {
        "messages_max": [*NO_WHOLE, 0, 10_001],
        "bytes_max": [*NO_WHOLE, 0, 2**63],
        "delay_s": [*NO_NUMBER, -0.1, INF, 86_401],
        "by_key": WRONG["flag"],
        "filter_properties": [
            None, 7, "ab", b"ab", [7], {"a": "b"}, {"a": 7}, {"a": [7]}, {"": []},
        ],
    },
    Chunking: {"chunk_bytes": [*NO_WHOLE, -1, 2**31]},
    AssemblyLimits: {
        "messages_max": [*NO_WHOLE, 0, 1_001],
        "bytes_max": [*NO_WHOLE, 0],
        "chunks_max": [*NO_WHOLE, 0, 2**31],
        "message_bytes_max": [*NO_WHOLE, 0, 2**40],
        "expiry_ms": [*NO_WHOLE, -1],
    },
    Breaker: {
        "outcomes": [*NO_WHOLE, 0, 10_001],
        "ratio": [*NO_NUMBER, 0, 1.1, INF],
        "pause_min_s": [*NO_NUMBER, 0, INF, 61],
        "pause_max_s": [*NO_NUMBER, 0, INF, 86_401],
    },
    RetryPolicy: {
        "min_s": [*NO_NUMBER, -1, 61, INF],
        "max_s": [*NO_NUMBER, -1, 86_401, INF],
        "multiplier": [*NO_NUMBER, 0.5, INF],
    },
}  # fmt: skip
"""The values that options refuse when they are made."""

SAME: Final[Mapping[str, tuple[Any, list[Any]]]] = {
    "topic": ("k", [Word.K, Label.K, "persistent://public/default/k"]),
    "text": ("k", [Word.K, Label.K]),
    "number": (2, [Two.TWO, numpy.int64(2), numpy.uint8(2)]),
    "id": (2, [Two.TWO, numpy.int64(2), Count(2)]),
    "key": (b"k", ["k", Word.K, Label.K, bytearray(b"k"), memoryview(b"k"), Octets(b"k")]),
    "optional bytes": (b"x", [bytearray(b"x"), memoryview(b"x"), Octets(b"x")]),
    "properties": ({"k": "v"}, [OrderedDict(k="v"), MappingProxyType({Word.K: "v"})]),
    "names": (["k"], [("k",), {"k"}, {"k": 0}.keys(), [Label.K]]),
    "place": (MessageId(1, 2), [numbered(numpy.int64(1), Two.TWO)]),
    "stored message id": (MessageId(1, 2), [numbered(numpy.int64(1), Two.TWO)]),
    "message ids": (
        [MessageId(1, 2)],
        [(MessageId(1, 2),), {numbered(1, numpy.int64(2)): 0}.keys()],
    ),
}

KIND: Final[Mapping[str, str]] = {
    "topic": "topic", "dead_letter_topic": "optional topic", "subscription": "text",
    "cursor": "text", "producer": "text or none", "prefix": "text",
    "level": "text", "request_id": "text", "expression": "text", "trace_id": "text or none",
    "payload": "bytes", "key": "key",
    "ordering_key": "optional bytes", "properties": "properties", "put": "properties",
    "remove": "names", "sequence_id": "id", "initial_sequence_id": "id",
    "event_time_ms": "event time", "deliver_at": "future time", "deliver_after_s": "long delay",
    "messages_max": "count", "timeout_s": "time-out", "send_timeout_s": "time-out",
    "open_timeout_s": "open time-out", "stop_timeout_s": "time-out", "ack_timeout_s": "delay",
    "max_pending_messages": "count", "max_pending_bytes": "count", "receiver_queue": "count",
    "receiver_queue_bytes": "count", "concurrency": "count", "weight": "weight",
    "ranges": "ranges", "letters_per_s": "number", "entries_max": "number", "number": "number",
    "takeover": "flag", "inclusive": "flag", "follow": "flag", "force": "flag", "create": "flag",
    "dry_run": "flag", "batching": "batching", "chunking": "chunking", "assembly": "assembly",
    "compression": "compression", "on_conflict": "reaction",
    "type": "type", "options": "options", "retry": "retry",
    "breaker": "breaker", "incomplete": "incomplete", "on_dropped": "callback",
    "on_missed": "callback", "name": "name", "start": "place", "end": "place", "to": "place",
    "place": "place", "since": "time", "message_id": "stored message id", "letter":
    "stored message id", "before": "stored message id", "letters": "message ids",
    "message": "message", "delay_s": "delay", "reason": "reason", "values": "policy",
    "ledger": "address", "dispatcher": "address", "dedup": "address",
    "token": "token",
    "tls": "TLS",
}  # fmt: skip

OWN: Final[Mapping[tuple[str, str], str]] = {
    ("Client.consumer", "start"): "start of a subscription",
    ("Consumer.ack_many", "messages"): "messages",
    ("Producer.send_many", "messages"): "outgoing",
    ("Consumer.unlock", "key"): "bytes",
    ("Consumer.ack_id", "message_id"): "message id",
    ("Admin.cursors", "topic"): "optional topic",
    ("Admin.discard", "reason"): "text",
    ("Admin.mend", "payload"): "optional bytes",
    ("Admin.explain_publication", "producer"): "text",
    ("connect", "cursor"): "address",
}

ELSEWHERE: Final = {
    ("process_by_key", "consumer"),  # its own tests
    ("process_by_key", "handler"),
    ("process_by_key", "on_failure"),
}

WRONG_TOO: Final[Mapping[str, list[Any]]] = {
    **WRONG,
    "text or none": NO_TEXT,
    "optional topic": [*NO_TEXT, 0, [], False, "a/b"],
}

VALID: Final[Mapping[str, Any]] = {
    "topic": "t", "subscription": "s", "cursor": "c", "level": "a/b", "request_id": "r",
    "letters": [MessageId(1, 2)], "letter": MessageId(1, 2), "before": MessageId(1, 2),
    "message_id": MessageId(1, 2), "to": MessageId(1, 2), "start": MessageId(1, 2),
    "place": "earliest", "key": b"k", "number": 2, "producer": "p", "sequence_id": 2,
    "values": PolicyValues(enabled=True), "message": MESSAGE, "payload": b"x", "delay_s": 1.0,
    "messages": [],
}  # fmt: skip

ONE_OF: Final[Mapping[str, str]] = {
    "Admin.explain_delivery": "key message_id",
    "Admin.message_life": "message_id trace_id",
}
"""Functions that take one of these."""


def functions(kind: type, *names: str) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Public functions of a class that take arguments."""
    for name, function in inspect.getmembers(kind, callable):
        if name.startswith("_") or (names and name not in names):
            continue
        if len(inspect.signature(function).parameters) > 1:
            yield f"{kind.__name__}.{name}", function


def arguments(function: Callable[..., Any]) -> list[str]:
    return [each for each in inspect.signature(function).parameters if each != "self"]


def kind_of(name: str, argument: str) -> str:
    return OWN.get((name, argument)) or KIND[argument]


def given(name: str, function: Callable[..., Any], argument: str, value: Any) -> dict[str, Any]:
    """Arguments of a call: what it must have, and this one."""
    parameters = inspect.signature(function).parameters
    must = [
        each
        for each, parameter in parameters.items()
        if each != "self" and parameter.default is parameter.empty
    ]
    others = ONE_OF.get(name, "").split()
    if others and argument not in others and argument not in ("producer", "sequence_id"):
        must.append(others[0])
    if name == "Admin.message_life" and argument in ("producer", "sequence_id"):
        must += ["producer", "sequence_id"]
    return {each: VALID[each] for each in must} | {argument: value}


def test_every_argument_of_every_function_has_a_kind() -> None:
    missing = []
    every: list[tuple[str, Any]] = [("connect", connect), ("process_by_key", process_by_key)]
    for kind in (Client, Producer, Consumer, Reader, Admin):
        every += functions(kind)
    for name, function in every:
        for argument in arguments(function):
            if (name, argument) not in ELSEWHERE:
                with suppress(KeyError):
                    assert WRONG_TOO[kind_of(name, argument)]
                    continue
                missing.append((name, argument))
    assert missing == []


@pytest.mark.parametrize("kind", FIELDS, ids=lambda kind: kind.__name__)
def test_options_refuse_wrong_values(kind: type) -> None:
    assert {each.name for each in fields(kind)} == FIELDS[kind].keys()
    accepted = []
    for name, values in FIELDS[kind].items():
        for value in values:
            with suppress(InvalidRequestError):
                accepted.append((name, value, kind(**{name: value})))
    assert accepted == []


def test_options_take_what_stands_for_a_number() -> None:
    assert Batching(numpy.int64(2), Two.TWO, Decimal("0.5")) == Batching(2, 2, 0.5)  # type: ignore[arg-type]
    assert type(Batching(Two.TWO).messages_max) is int
    assert RetryPolicy(Fraction(1, 2), numpy.float32(2)) == RetryPolicy(0.5, 2.0)  # type: ignore[arg-type]
    assert Breaker(outcomes=numpy.uint8(3)).outcomes == 3  # type: ignore[arg-type]


async def test_constructors_refuse_wrong_values() -> None:
    accepted = []
    async with connect(NOBODY, NOBODY) as client:
        for name, function in [("connect", connect), *functions(Client)]:
            bound = connect if name == "connect" else getattr(client, name.partition(".")[2])
            for argument in arguments(function):
                if (name, argument) in ELSEWHERE:
                    continue
                for value in WRONG_TOO[kind_of(name, argument)]:
                    if value is None and name == "connect" and argument != "ledger":
                        continue
                    how = {"ledger": NOBODY} if name == "connect" else {"topic": "t"}
                    how |= {"subscription": "s"} if name == "Client.consumer" else {}
                    with suppress(*REFUSED):
                        accepted.append((name, argument, value, bound(**how | {argument: value})))
    assert accepted == []


async def _refused(call: Callable[[], Any]) -> bool:
    try:
        made = call()
        if inspect.isasyncgen(made):
            await anext(made)
        elif inspect.isawaitable(made):
            await made
    except REFUSED as error:
        return not isinstance(error, SeqgateError) or isinstance(error, InvalidRequestError)
    except (SeqgateError, StopAsyncIteration):
        return False
    return False


async def _all_refused(kind: type, made: object, *names: str) -> list[Any]:
    accepted = []
    for name, function in functions(kind, *names):
        method = getattr(made, name.partition(".")[2])
        for argument in arguments(function):
            for value in WRONG_TOO[kind_of(name, argument)]:
                how = given(name, function, argument, value)
                if not await _refused(lambda: method(**how)):  # noqa: B023
                    accepted.append((name, argument, value))
    return accepted


async def test_the_admin_client_refuses_wrong_values_and_sends_nothing() -> None:
    with recorder() as (it, address):
        async with connect(address, address, dedup=address, cursor=address) as client:
            assert await _all_refused(Admin, client.admin()) == []
        assert it.requests == []


async def _sent(it: Recorder, method: Callable[..., Any], how: Mapping[str, Any]) -> Any:
    with suppress(SeqgateError, StopAsyncIteration):
        made = method(**how)
        await (anext(made) if inspect.isasyncgen(made) else made)
    return sorted(it.taken())


async def test_the_admin_client_sends_the_same_for_what_stands_for_the_same() -> None:
    other = []
    with recorder() as (it, address):
        async with connect(address, address, dedup=address, cursor=address) as client:
            admin = client.admin()
            for name, function in functions(Admin):
                method = getattr(admin, name.partition(".")[2])
                for argument in arguments(function):
                    plain, values = SAME.get(kind_of(name, argument), (None, []))
                    expected = await _sent(it, method, given(name, function, argument, plain))
                    for value in values:
                        how = given(name, function, argument, value)
                        seen = await _sent(it, method, how)
                        if not seen or seen != expected:
                            other.append((name, argument, value, seen, expected))
    assert other == []


def test_the_blocking_admin_client_refuses_wrong_values_and_sends_nothing() -> None:
    accepted = []
    with recorder() as (it, address):
        with blocking.connect(address, address, dedup=address, cursor=address) as client:
            admin = client.admin()
            for name, function in functions(Admin):
                method = getattr(admin, name.partition(".")[2])
                for argument in arguments(function):
                    for value in WRONG_TOO[kind_of(name, argument)][:3]:
                        with suppress(*REFUSED):
                            method(**given(name, function, argument, value))
                            accepted.append((name, argument, value))
        assert it.requests == []
    assert accepted == []


# ---- consumers and readers


async def test_a_consumer_refuses_wrong_values_before_it_looks_whether_it_is_open() -> None:
    async with connect(NOBODY, NOBODY) as client:
        kind = SubscriptionType.EXCLUSIVE
        consumer = client.consumer("t", "s", type=kind)
        names = [
            name.partition(".")[2] for name, _ in functions(Consumer) if "ack_many" not in name
        ]
        assert await _all_refused(Consumer, consumer, *names) == []
        with pytest.raises(ConsumerClosedError):
            await consumer.receive(timeout_s=numpy.float64(0.01))
        for wrong in WRONG["count"]:
            with pytest.raises(InvalidRequestError):
                await process_by_key(consumer, coroutine_function, concurrency=wrong)
        for wrong in WRONG["time-out"]:
            with pytest.raises(InvalidRequestError):
                await process_by_key(consumer, coroutine_function, stop_timeout_s=wrong)


def test_a_blocking_consumer_refuses_wrong_values() -> None:
    accepted = []
    with blocking.connect(NOBODY, NOBODY) as client:
        consumer = client.consumer("t", "s", type=SubscriptionType.EXCLUSIVE)
        for name, function in functions(Consumer):
            method = getattr(consumer, name.partition(".")[2])
            for argument in arguments(function):
                for value in WRONG_TOO[kind_of(name, argument)]:
                    if name == "Consumer.ack_many" and isinstance(value, list):
                        continue  # whether it is open comes first
                    try:
                        with suppress(*REFUSED):
                            method(**given(name, function, argument, value))
                            accepted.append((name, argument, value))
                    except SeqgateError:
                        accepted.append((name, argument, value))
    assert accepted == []


async def test_a_wrong_count_or_a_wrong_list_takes_no_message() -> None:
    async with serving_fake() as fake, connect(NOBODY, fake.address) as client:
        for at in range(3):
            fake.publish(b"%d" % at)
        async with client.consumer("t", "s") as consumer:
            for wrong in WRONG["count"]:
                with pytest.raises(InvalidRequestError):
                    await consumer.receive_many(wrong)
            for wrong in WRONG["time-out"]:
                with pytest.raises(InvalidRequestError):
                    await consumer.receive_many(timeout_s=wrong)
            async with asyncio.timeout(WITHIN_S):
                got = [await consumer.receive() for _ in range(3)]
            assert [each.payload for each in got] == [b"0", b"1", b"2"]
            for wrong in [*WRONG["messages"], [*got, None]]:
                with pytest.raises(InvalidRequestError):
                    await consumer.ack_many(wrong)
            await consumer.flush()
            assert not fake.done
            await consumer.ack_many(iter(got))
            assert len(fake.done) == 3


async def test_a_reader_refuses_wrong_values_and_stays_where_it_is() -> None:
    with recorder() as (it, address):
        async with connect(address) as client:
            reader = client.reader("t", start=MessageId(1, 2))
            before = reader._request(follow=True)
            assert await _all_refused(Reader, reader) == []
            assert reader._request(follow=True) == before
            await reader.seek(numbered(numpy.int64(1), Two.TWO))
            assert reader._request(follow=True) == before
        assert it.requests == []


# ---- producers

SENT: Final[list[tuple[str, list[Any]]]] = [
    ("payload", [bytearray(b"x"), memoryview(b"x"), memoryview(b"yx")[1:], Octets(b"x")]),
    ("key", [Word.K, Label.K, Text("k")]),
    ("ordering_key", [bytearray(b"o"), memoryview(b"o"), Octets(b"o")]),
    ("properties", [OrderedDict(k="v"), MappingProxyType({"k": "v"}), {Text("k"): Text("v")}]),
    ("event_time_ms", [Two.TWO, numpy.int64(2), numpy.uint64(2), Count(2)]),
]
PLAIN: Final[Mapping[str, Any]] = {
    "payload": b"x", "key": "k", "ordering_key": b"o", "properties": {"k": "v"}, "event_time_ms": 2
}  # fmt: skip

BATCHINGS: Final = [None, Batching(delay_s=60.0), Batching(delay_s=60.0, by_key=True)]


@pytest.mark.parametrize("batching", BATCHINGS, ids=["alone", "batched", "by key"])
async def test_a_message_with_a_wrong_argument_is_refused_alone(batching: Batching | None) -> None:
    """With `max_pending_messages` of what is sent, a slot that leaks would stop the producer."""
    with storing_ledger() as (it, address):
        async with (
            connect(address) as client,
            client.producer("t", batching=batching, max_pending_messages=2) as producer,
        ):
            first = producer.send_nowait(b"first", sequence_id=2)
            accepted = await _all_refused(Producer, producer, "send", "send_nowait", "send_many")
            assert accepted == []
            assert producer.pending_messages <= 1
            number: Any = numpy.int64(3)
            second = producer.send_nowait(b"second", sequence_id=number)
            await producer.flush()
            async with asyncio.timeout(WITHIN_S):
                assert [(await each).sequence_id for each in (first, second)] == [2, 3]
            assert (producer.pending_messages, producer.pending_bytes) == (0, 0)
    assert sum(each.metadata.num_messages_in_batch or 1 for each in it.entries) == 2


async def test_what_stands_for_a_plain_argument_is_sent_as_it() -> None:
    with storing_ledger() as (it, address):
        async with connect(address) as client, client.producer("t") as producer:
            for name, values in SENT:
                for value in values:
                    await producer.send(**{**PLAIN, name: value})
                    await producer.send_many([Outgoing(**{**PLAIN, name: value})])
    for each in it.entries:
        metadata = each.metadata
        assert each.payload == b"x"
        assert (metadata.partition_key, metadata.ordering_key) == ("k", b"o")
        assert (dict(metadata.properties), metadata.event_time) == ({"k": "v"}, 2)


@pytest.mark.parametrize("batching", BATCHINGS, ids=["alone", "batched", "by key"])
async def test_what_changes_after_the_call_is_sent_as_it_was(batching: Batching | None) -> None:
    payload: Any = bytearray(b"payload")
    order: Any = bytearray(b"o")
    properties = {"k": "v"}
    with storing_ledger() as (it, address):
        async with connect(address) as client, client.producer("t", batching=batching) as producer:
            done = [
                producer.send_nowait(
                    each,
                    ordering_key=order,
                    properties=properties,
                )
                for each in (payload, cast("Any", memoryview(payload)))
            ]
            payload[:] = b"changed"
            order[:] = b"p"
            properties["more"] = "x"
            await producer.flush()
            assert all(each.done() for each in done)
    assert b"changed" not in b"".join(each.payload for each in it.entries)
    assert b"more" not in b"".join(each.SerializeToString() for each in it.entries)


def test_a_blocking_producer_refuses_wrong_values_and_sends_the_others() -> None:
    accepted = []
    with (
        storing_ledger() as (it, address),
        blocking.connect(address) as client,
        client.producer("t", max_pending_messages=1) as producer,
    ):
        for name, function in functions(Producer, "send", "send_nowait", "send_many"):
            method = getattr(producer, name.partition(".")[2])
            for argument in arguments(function):
                for value in WRONG_TOO[kind_of(name, argument)]:
                    with suppress(*REFUSED):
                        method(**given(name, function, argument, value))
                        accepted.append((name, argument, value))
        assert accepted == []
        payload: Any = bytearray(b"x")
        number: Any = numpy.int64(7)
        assert producer.send(payload, sequence_id=number).sequence_id == 7
        assert producer.pending_messages == 0
    assert len(it.entries) == 1


@pytest.mark.parametrize("send_timeout_s", [None, 0, 0.0, INF, Decimal("Infinity")])
async def test_no_send_time_out_is_none(send_timeout_s: Any) -> None:
    with storing_ledger() as (_, address):
        async with (
            connect(address) as client,
            client.producer("t", send_timeout_s=send_timeout_s) as producer,
        ):
            turns = asyncio.create_task(asyncio.sleep(0.01))
            async with asyncio.timeout(WITHIN_S):
                await producer.send(b"x")
                await turns


async def test_an_error_about_a_sequence_id_has_it_if_it_is_a_number() -> None:
    with storing_ledger() as (_, address):
        async with connect(address) as client, client.producer("t") as producer:
            for wrong, told in ((-1, -1), (2**63, 2**63), (1.5, None), ("1", None)):
                with pytest.raises(InvalidRequestError) as error:
                    await producer.send(b"x", sequence_id=wrong)  # type: ignore[arg-type]
                assert error.value.sequence_id == told
                assert error.value.reason == "INVALID_SEQUENCE_ID"


def test_the_blocking_client_has_every_function_of_the_other() -> None:
    """So the tables above are about both."""
    for kind, other in (
        (Producer, blocking.Producer),
        (Consumer, blocking.Consumer),
        (Reader, blocking.Reader),
        (Admin, blocking.Admin),
    ):
        for name, function in functions(kind):
            same = getattr(other, name.partition(".")[2])
            assert arguments(same) == arguments(function), name

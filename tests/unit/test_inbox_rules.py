"""The consumer's inbox, rule by rule."""

from collections.abc import Sequence
from datetime import UTC, datetime

import google_crc32c
import pytest

from seqgate.api.common.v1 import common_pb2
from seqgate.api.dispatcher.v1 import dispatcher_pb2 as pb
from seqgate.api.entry.v1 import entry_pb2
from seqgate.client._assembler import AssemblyLimits, DropReason
from seqgate.client._breaker import Breaker, BreakerState
from seqgate.client._codec import Compression, OutgoingMessage, encode_batch, encode_single
from seqgate.client._inbox import Inbox, ReceiverLimits
from seqgate.client._message import Received
from seqgate.client._requests import ITEMS_MAX, UNANSWERED_MAX
from seqgate.client._subscribing import (
    Incomplete,
    Place,
    RetryPolicy,
    SubscriptionOptions,
    SubscriptionType,
    options_to_wire,
    ranges_to_wire,
    start_to_wire,
)
from seqgate.errors import CorruptMessageError, InvalidRequestError, StaleTokenError
from seqgate.message_id import EARLIEST_ID, LATEST_ID, ChunkMessageId, MessageId
from seqgate.times import timestamp
from seqgate.types import Position
from tests.support.delivery_runs import each_settlement

NOW_MS = 1_000
EPOCH = 3


def connected(
    messages: int = 100,
    size_bytes: int = 1 << 30,
    *,
    ack_timeout_ms: int = 0,
    incomplete: Incomplete = Incomplete.REFUSE,
    breaker: Breaker | None = None,
) -> Inbox:
    """An inbox with a stream, after its first grant of permits."""
    inbox = Inbox(
        "t/n/topic",
        is_ordered=True,
        is_one_key=False,
        limits=ReceiverLimits(messages, size_bytes, ack_timeout_ms),
        assembly=AssemblyLimits(),
        incomplete=incomplete,
        retry=None,
        breaker=breaker,
    )
    inbox.subscribed(EPOCH)
    inbox.requests()
    return inbox


def plain(number: int, key: str = "k", payload: bytes = b"x") -> pb.Delivery:
    entry = encode_single(
        "p",
        OutgoingMessage(number, payload, key),
        compression=Compression.NONE,
        publish_time_ms=NOW_MS,
    )
    return _delivery(number, entry.metadata, entry.payload)


def batch(number: int, count: int, acknowledged: Sequence[int] = ()) -> pb.Delivery:
    messages = [OutgoingMessage(100 * number + at, b"%d" % at, "k") for at in range(count)]
    entry = encode_batch("p", messages, compression=Compression.NONE, publish_time_ms=NOW_MS)
    entry.metadata.partition_key = "k"
    delivery = _delivery(number, entry.metadata, entry.payload)
    delivery.acknowledged.extend(acknowledged)
    return delivery


def chunk(number: int, chunk_id: int, num_chunks: int = 3, body: bytes = b"aabbc") -> pb.Delivery:
    payload = body[chunk_id * 2 :][:2]
    metadata = entry_pb2.EntryMetadata(
        producer_name="p",
        sequence_id=7,
        partition_key="k",
        uuid="u",
        chunk_id=chunk_id,
        num_chunks_from_msg=num_chunks,
        total_chunk_msg_size=len(body),
        message_crc32c=google_crc32c.value(body),
    )
    return _delivery(number, metadata, payload)


def _delivery(number: int, metadata: entry_pb2.EntryMetadata, payload: bytes) -> pb.Delivery:
    position = common_pb2.Position(ledger_id=1, entry_id=number)
    return pb.Delivery(delivery=number, position=position, metadata=metadata, payload=payload)


def deliver(inbox: Inbox, *deliveries: pb.Delivery) -> None:
    inbox.receive(pb.ConsumeResponse(deliveries=pb.Deliveries(deliveries=deliveries)), NOW_MS)


def revoke(inbox: Inbox, *numbers: int) -> None:
    inbox.receive(pb.ConsumeResponse(revoked=pb.Revoked(deliveries=numbers)), NOW_MS)


def settle(inbox: Inbox, request_id: int, *outcomes: pb.SettleOutcome.ValueType) -> None:
    settled = pb.Settled(request_id=request_id, outcomes=outcomes)
    inbox.receive(pb.ConsumeResponse(settled=settled), NOW_MS)


def taken(inbox: Inbox) -> list[Received]:
    messages = []
    while (message := inbox.take(NOW_MS)) is not None:
        messages.append(message)
    return messages


def sent(inbox: Inbox, what: str) -> list[pb.ConsumeRequest]:
    inbox.flush()
    return [each for each in inbox.requests() if each.WhichOneof("request") == what]


def permits(inbox: Inbox) -> int:
    return sum(request.permit.messages for request in sent(inbox, "permit"))


# ---- permits


def test_permits_are_granted_again_when_half_of_the_queue_is_free() -> None:
    inbox = connected(10)
    deliver(inbox, *(plain(number) for number in range(10)))
    granted = []
    for _ in range(10):
        inbox.take(NOW_MS)
        granted.append(permits(inbox))
    assert granted == [0, 0, 0, 0, 5, 0, 0, 0, 0, 5]


def test_a_batch_that_begins_within_the_queue_arrives_whole() -> None:
    inbox = connected(10)
    deliver(inbox, batch(1, 30))
    assert (inbox.buffered, inbox.outstanding) == (30, -20)
    assert permits(inbox) == 0
    for _ in range(25):
        inbox.take(NOW_MS)
    assert permits(inbox) == 25
    assert inbox.buffered + inbox.outstanding == 10


def test_acknowledged_messages_of_a_batch_use_no_permits() -> None:
    inbox = connected(10)
    deliver(inbox, batch(1, 4, acknowledged=[0, 2]))
    assert inbox.outstanding == 8
    assert [message.payload for message in taken(inbox)] == [b"1", b"3"]


def test_no_permits_are_granted_while_the_queue_has_its_bytes() -> None:
    inbox = connected(10, 1_000)
    deliver(inbox, plain(1, payload=bytes(1_001)))
    while inbox.outstanding > 0:
        deliver(inbox, plain(2 + inbox.outstanding))
    assert permits(inbox) == 0
    taken(inbox)
    assert permits(inbox) > 0


def test_chunks_of_an_incomplete_message_take_no_room_in_the_queue() -> None:
    inbox = connected(2)
    deliver(inbox, chunk(1, 0))
    assert inbox.buffered == 0
    assert permits(inbox) == 1
    deliver(inbox, chunk(2, 1), chunk(3, 2))
    assert inbox.buffered == 1


def test_a_paused_consumer_grants_no_permits() -> None:
    inbox = connected(2)
    inbox.is_paused = True
    deliver(inbox, plain(1), plain(2))
    assert len(taken(inbox)) == 2
    assert permits(inbox) == 0
    inbox.is_paused = False
    assert permits(inbox) == 2


# ---- acknowledgements


def test_messages_of_a_batch_are_acknowledged_in_one_settlement() -> None:
    inbox = connected()
    deliver(inbox, batch(1, 4))
    messages = taken(inbox)
    for at in (0, 2):
        inbox.acknowledge(messages[at].token, at)
    (request,) = sent(inbox, "acknowledge")
    (settlement,) = request.acknowledge.settlements
    assert [*settlement.indexes] == [0, 2]
    for at in (1, 3):
        inbox.acknowledge(messages[at].token, at)
    settle(inbox, request.acknowledge.request_id)
    (request,) = sent(inbox, "acknowledge")
    assert not each_settlement(request.acknowledge)[0].indexes  # all remaining messages
    settle(inbox, request.acknowledge.request_id)
    assert inbox.take_resolved() == [(0, None), (2, None), (1, None), (3, None)]
    assert inbox.unacked == 0


def test_a_repeated_acknowledgement_waits_for_the_same_answer() -> None:
    inbox = connected()
    deliver(inbox, plain(1))
    (message,) = taken(inbox)
    inbox.acknowledge(message.token, "first")
    inbox.acknowledge(message.token, "second")
    (request,) = sent(inbox, "acknowledge")
    assert inbox.take_resolved() == []
    settle(inbox, request.acknowledge.request_id)
    assert inbox.take_resolved() == [("first", None), ("second", None)]
    inbox.acknowledge(message.token, "third")
    ((_, error),) = inbox.take_resolved()
    assert isinstance(error, StaleTokenError)


def test_messages_are_acknowledged_by_id_before_they_are_handed_out() -> None:
    inbox = connected()
    deliver(inbox, batch(1, 3))
    inbox.acknowledge_id(MessageId(1, 1, batch_index=1), "one")
    assert [message.payload for message in taken(inbox)] == [b"0", b"2"]
    inbox.acknowledge_id(MessageId(1, 1), "all")
    inbox.acknowledge_id(MessageId(1, 1, batch_index=3), "no such")
    inbox.acknowledge_id(MessageId(1, 2), "unknown")
    errors = {waiter: type(error) for waiter, error in inbox.take_resolved()}
    assert errors == {"no such": InvalidRequestError, "unknown": StaleTokenError}


def test_only_the_item_with_a_stale_token_fails() -> None:
    inbox = connected()
    deliver(inbox, plain(1, "a"), plain(2, "b"))
    for message in taken(inbox):
        inbox.acknowledge(message.token, message.key)
    (request,) = sent(inbox, "acknowledge")
    settle(inbox, request.acknowledge.request_id, pb.SETTLE_OUTCOME_STALE, pb.SETTLE_OUTCOME_DONE)
    errors = {waiter: type(error) for waiter, error in inbox.take_resolved()}
    assert errors == {"a": StaleTokenError, "b": type(None)}


def test_a_stale_token_ends_its_batch() -> None:
    inbox = connected()
    deliver(inbox, batch(1, 3))
    message = inbox.take(NOW_MS)
    assert message is not None
    inbox.acknowledge(message.token, "ack")
    (request,) = sent(inbox, "acknowledge")
    settle(inbox, request.acknowledge.request_id, pb.SETTLE_OUTCOME_STALE)
    assert inbox.take(NOW_MS) is None
    assert (inbox.buffered, inbox.unacked) == (0, 0)


def test_items_of_a_request_and_unanswered_requests_are_bounded() -> None:
    inbox = connected(1_000_000)
    deliver(inbox, *(plain(number, str(number)) for number in range(ITEMS_MAX + 1)))
    for message in taken(inbox):
        inbox.acknowledge(message.token, None)
    first, second = sent(inbox, "acknowledge")
    assert len(each_settlement(first.acknowledge)) == ITEMS_MAX
    assert len(each_settlement(second.acknowledge)) == 1
    answered = second.acknowledge.request_id
    for number in range(UNANSWERED_MAX):
        deliver(inbox, plain(20_000 + number, str(number)))
        (message,) = taken(inbox)
        inbox.acknowledge(message.token, None)
        assert len(sent(inbox, "acknowledge")) == (number < UNANSWERED_MAX - 2)
    settle(inbox, answered)
    (request,) = sent(inbox, "acknowledge")
    assert len(each_settlement(request.acknowledge)) == 2


# ---- refusals, and later messages of the key


def test_later_messages_of_a_refused_key_wait_for_the_answer() -> None:
    inbox = connected()
    deliver(inbox, plain(1, "a"), plain(2, "a"), plain(3, "b"))
    message = inbox.take(NOW_MS)
    assert message is not None
    inbox.negative_acknowledge(message.token, 0, NOW_MS, "nack")
    (request,) = sent(inbox, "negative_acknowledge")
    deliver(inbox, plain(4, "a"))
    assert [each.id.entry_id for each in taken(inbox)] == [3]
    revoke(inbox, 2)
    settle(inbox, request.negative_acknowledge.request_id)
    # The message is handed out, since the service did not revoke it.
    assert [each.id.entry_id for each in taken(inbox)] == [4]


def test_refusing_a_message_of_a_batch_ends_the_delivery() -> None:
    inbox = connected()
    deliver(inbox, batch(1, 3))
    message = inbox.take(NOW_MS)
    assert message is not None
    inbox.negative_acknowledge(message.token, None, NOW_MS, "nack")
    assert inbox.take(NOW_MS) is None
    assert inbox.buffered == 0
    (request,) = sent(inbox, "negative_acknowledge")
    (refusal,) = request.negative_acknowledge.negative_acknowledgements
    assert not refusal.HasField("delay")


def test_an_acknowledged_message_cannot_be_refused() -> None:
    inbox = connected()
    deliver(inbox, plain(1))
    (message,) = taken(inbox)
    inbox.acknowledge(message.token, "ack")
    inbox.negative_acknowledge(message.token, 0, NOW_MS, "nack")
    ((waiter, error),) = inbox.take_resolved()
    assert waiter == "nack"
    assert isinstance(error, StaleTokenError)
    assert sent(inbox, "negative_acknowledge") == []


# ---- large messages


def test_a_large_message_that_is_revoked_in_part_is_given_back() -> None:
    inbox = connected()
    deliver(inbox, chunk(1, 0), chunk(2, 1), chunk(3, 2))
    revoke(inbox, 2)
    assert inbox.take(NOW_MS) is None
    (request,) = sent(inbox, "give_back")
    assert [*request.give_back.deliveries] == [1, 3]


def test_an_incomplete_message_that_is_revoked_in_part_is_given_back() -> None:
    inbox = connected()
    deliver(inbox, chunk(1, 0), chunk(2, 1))
    revoke(inbox, 2)
    (request,) = sent(inbox, "give_back")
    assert [*request.give_back.deliveries] == [1]
    deliver(inbox, chunk(3, 2))  # sent before the service received the request
    (again,) = sent(inbox, "give_back")
    assert [*again.give_back.deliveries] == [3]
    settle(inbox, request.give_back.request_id)
    settle(inbox, again.give_back.request_id)
    deliver(inbox, *(chunk(4 + at, at) for at in range(3)))
    assert [each.payload for each in taken(inbox)] == [b"aabbc"]
    assert not inbox.dropped


@pytest.mark.parametrize(
    ("incomplete", "what"),
    [(Incomplete.REFUSE, "negative_acknowledge"), (Incomplete.ACKNOWLEDGE, "acknowledge")],
)
def test_incomplete_messages_are_refused_or_acknowledged_as_configured(
    incomplete: Incomplete, what: str
) -> None:
    inbox = connected(incomplete=incomplete)
    deliver(inbox, chunk(2, 1), chunk(3, 2))
    requests = sent(inbox, what)
    assert len(requests) == 1
    assert [each.reason for each in inbox.take_dropped()] == [DropReason.HEADLESS] * 2
    assert inbox.dropped == {DropReason.HEADLESS: 2}


def test_chunks_of_a_corrupt_message_are_acknowledged() -> None:
    inbox = connected()
    broken = chunk(3, 2)
    broken.payload = b"?"
    deliver(inbox, chunk(1, 0), chunk(2, 1), broken)
    (request,) = sent(inbox, "acknowledge")
    assert [each.delivery for each in each_settlement(request.acknowledge)] == [1, 2, 3]
    assert inbox.dropped == {DropReason.CORRUPT: 3}


# ---- time


def test_buffered_messages_are_renewed_and_handed_out_ones_are_not() -> None:
    inbox = connected(ack_timeout_ms=300)
    deliver(inbox, plain(1, "a"), plain(2, "b"), chunk(3, 0))
    inbox.take(NOW_MS)
    inbox.renew_waiting(NOW_MS)
    (request,) = sent(inbox, "renew")
    assert sorted(request.renew.deliveries) == [2, 3]


def test_a_batch_is_renewed_when_its_next_message_is_taken() -> None:
    inbox = connected(ack_timeout_ms=300)
    deliver(inbox, batch(1, 3))
    for later_ms in (0, 50, 100):
        inbox.take(NOW_MS + later_ms)
    (request,) = sent(inbox, "renew")
    assert [*request.renew.deliveries] == [1]


# ---- the breaker


ONE_FAILURE = Breaker(outcomes=1, pause_min_s=1, pause_max_s=60)


def braked(inbox: Inbox, delivery: pb.Delivery) -> None:
    """A message fails and opens the breaker."""
    deliver(inbox, delivery)
    message = inbox.take(NOW_MS)
    assert message is not None
    inbox.negative_acknowledge(message.token, 0, NOW_MS, "nack")
    assert inbox.breaker_state is BreakerState.OPEN
    assert inbox.due_ms == NOW_MS + 1_000


def test_an_open_breaker_stops_all_keys() -> None:
    inbox = connected(breaker=ONE_FAILURE)
    braked(inbox, plain(1, "a"))
    deliver(inbox, plain(2, "b"), plain(3, "c"))
    assert inbox.take(NOW_MS + 999) is None
    probe = inbox.take(NOW_MS + 1_000)
    assert probe is not None
    assert inbox.take(NOW_MS + 1_000) is None
    inbox.acknowledge(probe.token, "ack")
    assert len(taken(inbox)) == 1


def test_handed_out_messages_are_settled_while_the_breaker_is_open() -> None:
    inbox = connected(breaker=ONE_FAILURE)
    deliver(inbox, plain(2, "b"))
    (message,) = taken(inbox)
    braked(inbox, plain(1, "a"))
    inbox.acknowledge(message.token, "ack")
    (request,) = sent(inbox, "acknowledge")
    settle(inbox, request.acknowledge.request_id)
    assert inbox.take_resolved() == [("ack", None)]
    assert inbox.breaker_state is BreakerState.OPEN


def test_no_permits_are_granted_while_the_breaker_is_open() -> None:
    inbox = connected(2, breaker=ONE_FAILURE)
    braked(inbox, plain(1, "a"))
    deliver(inbox, plain(2, "a"))
    revoke(inbox, 2)
    assert inbox.outstanding == 0
    assert permits(inbox) == 0
    inbox.advance(NOW_MS + 1_000)
    assert permits(inbox) == 2


@pytest.mark.parametrize("how", ["revoked", "the stream ends", "the subscription moves"])
def test_a_revoked_probe_is_replaced_by_another_one(how: str) -> None:
    inbox = connected(breaker=ONE_FAILURE)
    braked(inbox, plain(1, "a"))
    later_ms = NOW_MS + 1_000
    deliver(inbox, plain(2, "b"), plain(3, "c"))
    probe = inbox.take(later_ms)
    assert probe is not None
    match how:
        case "revoked":
            revoke(inbox, probe.token.delivery)
        case "the stream ends":
            inbox.disconnected()
            inbox.subscribed(EPOCH + 1)
            deliver(inbox, plain(2, "b"), plain(3, "c"))
        case "the subscription moves":
            inbox.receive(pb.ConsumeResponse(sought=pb.Sought()), later_ms)
            deliver(inbox, plain(4, "b"), plain(5, "c"))
    inbox.acknowledge(probe.token, "late")
    assert inbox.breaker_state is BreakerState.HALF_OPEN
    assert inbox.take(later_ms) is not None
    assert inbox.take(later_ms) is None


@pytest.mark.parametrize("how", ["by its id", "with all before"])
def test_every_kind_of_acknowledgement_of_a_probe_closes_the_breaker(how: str) -> None:
    inbox = connected(breaker=ONE_FAILURE)
    braked(inbox, plain(1, "a"))
    deliver(inbox, plain(2, "b"))
    probe = inbox.take(NOW_MS + 1_000)
    assert probe is not None
    if how == "by its id":
        inbox.acknowledge_id(probe.id, "ack")
    else:
        inbox.acknowledge_cumulative(probe.token, "ack")
    assert inbox.breaker_state is BreakerState.CLOSED


def test_a_repeated_acknowledgement_is_one_outcome() -> None:
    inbox = connected(breaker=Breaker(outcomes=3, ratio=0.6))
    deliver(inbox, *(plain(number, str(number)) for number in range(3)))
    first, second, third = taken(inbox)
    inbox.negative_acknowledge(first.token, 0, NOW_MS, "nack")
    inbox.acknowledge(second.token, "ack")
    inbox.acknowledge(second.token, "again")
    inbox.negative_acknowledge(third.token, 0, NOW_MS, "nack")
    assert inbox.breaker_state is BreakerState.OPEN


def test_revoked_and_damaged_messages_are_no_outcomes() -> None:
    inbox = connected(breaker=ONE_FAILURE)
    deliver(inbox, plain(1, "a"), plain(2, "b"))
    first, second = taken(inbox)
    revoke(inbox, first.token.delivery)
    inbox.negative_acknowledge(first.token, 0, NOW_MS, "late")
    inbox.acknowledge(second.token, "ack")
    inbox.negative_acknowledge(second.token, 0, NOW_MS, "nack")
    broken = plain(3, "c")
    broken.payload = b"?"
    deliver(inbox, broken)
    with pytest.raises(CorruptMessageError):
        inbox.take(NOW_MS)
    assert inbox.breaker_state is BreakerState.CLOSED


def test_a_batch_that_waits_for_the_breaker_is_renewed() -> None:
    inbox = connected(ack_timeout_ms=300, breaker=ONE_FAILURE)
    deliver(inbox, plain(3, "z"), batch(1, 3), batch(2, 3))
    failing, of_first = inbox.take(NOW_MS), inbox.take(NOW_MS)
    assert failing is not None
    assert of_first is not None
    inbox.negative_acknowledge(failing.token, 0, NOW_MS, "nack")
    assert inbox.take(NOW_MS) is None
    inbox.renew_waiting(NOW_MS)
    (request,) = sent(inbox, "renew")
    assert [*request.renew.deliveries] == [2]  # the application processes the other one
    inbox.acknowledge(of_first.token, "ack")
    inbox.renew_waiting(NOW_MS)
    (request,) = sent(inbox, "renew")
    assert sorted(request.renew.deliveries) == [1, 2]


# ---- subscribing


@pytest.mark.parametrize(
    ("place", "expected"),
    [
        ("earliest", common_pb2.Start(earliest=common_pb2.Earliest())),
        ("latest", common_pb2.Start(latest=common_pb2.Latest())),
        (EARLIEST_ID, common_pb2.Start(earliest=common_pb2.Earliest())),
        (LATEST_ID, common_pb2.Start(latest=common_pb2.Latest())),
        (MessageId(2, 5), (2, 5)),
        (MessageId(2, -1), (2, 0)),
        (MessageId(2, 5, batch_index=3), (2, 5)),
        (ChunkMessageId(MessageId(1, 4), MessageId(2, 5)), (1, 4)),
        (datetime(1970, 1, 1, 0, 0, 1, 1500, tzinfo=UTC), common_pb2.Start(time=timestamp(1_002))),
    ],
)
def test_positions_are_encoded_as_starts(
    place: Place, expected: common_pb2.Start | tuple[int, int]
) -> None:
    wire = start_to_wire(place)
    if isinstance(expected, tuple):
        assert (wire.at.ledger_id, wire.at.entry_id) == expected
    else:
        assert wire == expected


@pytest.mark.parametrize("place", ["first", datetime(1969, 1, 1, tzinfo=UTC), 3, None])
def test_an_invalid_position_is_refused(place: Place) -> None:
    with pytest.raises(InvalidRequestError):
        start_to_wire(place)


def test_unset_options_are_left_to_the_service() -> None:
    wire = options_to_wire(SubscriptionType.SHARED, SubscriptionOptions())
    assert wire.type == pb.SUBSCRIPTION_TYPE_SHARED
    assert not wire.HasField("max_redeliveries")
    assert not wire.HasField("max_unacked")


@pytest.mark.parametrize(
    "options",
    [
        SubscriptionOptions(max_in_flight_per_key=-1),
        SubscriptionOptions(max_redeliveries=2**40),
        SubscriptionOptions(drain_deadline_s=-1),
    ],
)
def test_options_that_cannot_be_sent_are_refused(options: SubscriptionOptions) -> None:
    with pytest.raises(InvalidRequestError):
        options_to_wire(SubscriptionType.SHARED, options)


def test_a_range_that_cannot_be_sent_is_refused() -> None:
    assert ranges_to_wire([(0, 5)]) == [pb.KeyRange(first=0, last=5)]
    with pytest.raises(InvalidRequestError):
        ranges_to_wire([(-1, 5)])


@pytest.mark.parametrize(
    ("attempts", "delay_s"), [(0, 1.0), (1, 3.0), (2, 9.0), (3, 10.0), (10_000, 10.0)]
)
def test_retry_delays_grow_up_to_the_longest(attempts: int, delay_s: float) -> None:
    assert RetryPolicy(min_s=1, max_s=10, multiplier=3).delay_s(attempts) == delay_s


@pytest.mark.parametrize(
    ("min_s", "max_s", "multiplier"), [(-1, 1, 2), (2, 1, 2), (1, 86_401, 2), (1, 2, 0.5)]
)
def test_a_retry_policy_has_bounds(min_s: float, max_s: float, multiplier: float) -> None:
    with pytest.raises(ValueError):
        RetryPolicy(min_s, max_s, multiplier)


@pytest.mark.parametrize(
    ("messages", "size_bytes", "ack_timeout_ms"),
    [(0, 1, 0), (1_000_001, 1, 0), (1, 0, 0), (1, 1, 99), (1, 1, 86_400_001)],
)
def test_a_queue_has_bounds(messages: int, size_bytes: int, ack_timeout_ms: int) -> None:
    with pytest.raises(ValueError):
        ReceiverLimits(messages, size_bytes, ack_timeout_ms)


def test_a_gap_has_its_position_and_attempts() -> None:
    inbox = connected()
    delivery = plain(2)
    delivery.gap.position.ledger_id, delivery.gap.position.entry_id = 1, 1
    delivery.gap.attempts = 4
    deliver(inbox, delivery)
    (message,) = taken(inbox)
    assert message.gap == (Position(1, 1), 4)


def test_a_seek_is_not_answered_by_another_consumers_seek() -> None:
    inbox = connected()
    inbox.seek(common_pb2.Start(earliest=common_pb2.Earliest()), "seek")
    (request,) = sent(inbox, "seek")
    for _ in range(3):  # the last one is the answer
        inbox.receive(pb.ConsumeResponse(sought=pb.Sought()), NOW_MS)
        assert inbox.take_resolved() == []
        deliver(inbox, plain(1, "a"))
        assert inbox.take(NOW_MS) is None
    settle(inbox, request.seek.request_id)
    assert inbox.take_resolved() == [("seek", None)]
    assert inbox.take(NOW_MS) is not None

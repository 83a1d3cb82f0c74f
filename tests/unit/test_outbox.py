"""Sending, resending and outcomes: the client's side of a Publish stream.

The state machine at the end plays an unreliable service, by the protocol of ledger.proto.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2, status_pb2
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from seqgate.api.common.v1 import common_pb2
from seqgate.api.ledger.v1 import ledger_pb2 as pb
from seqgate.client._codec import Compression, OutgoingMessage, encode_batch, encode_single
from seqgate.client._outbox import Outbox, Receipt, Resolved
from seqgate.errors import (
    LimitExceededError,
    MessageTooLargeError,
    SendTimeoutError,
    SeqgateError,
    SequenceIdTrimmedError,
    StaleSequenceIdError,
)
from seqgate.message_id import MessageId
from tests.support.depth import times

PLENTY = 1_000_000
STORED, DUPLICATE = pb.RECEIPT_STATUS_STORED, pb.RECEIPT_STATUS_DUPLICATE
STALE, PARTIAL = pb.RECEIPT_STATUS_STALE, pb.RECEIPT_STATUS_PARTIAL
REFUSED, FAILED, SKIPPED = (
    pb.RECEIPT_STATUS_REFUSED,
    pb.RECEIPT_STATUS_FAILED,
    pb.RECEIPT_STATUS_SKIPPED,
)


def encode(messages: Sequence[OutgoingMessage]) -> list[pb.Entry]:
    """Encode as a producer without batching by key does."""
    if len(messages) == 1:
        return [_single(messages[0])]
    return [_batch(messages)]


def encode_by_key(messages: Sequence[OutgoingMessage]) -> list[pb.Entry]:
    """Encode as a producer with batching by key does: an entry per key, ordered by their highest
    ids."""
    groups: dict[str | bytes | None, list[OutgoingMessage]] = {}
    for each in messages:
        groups.setdefault(each.key, []).append(each)
    ordered = sorted(groups.values(), key=lambda group: group[-1].sequence_id)
    return [_single(group[0]) if len(group) == 1 else _batch(group) for group in ordered]


def _single(message: OutgoingMessage) -> pb.Entry:
    return encode_single("p", message, compression=Compression.NONE, publish_time_ms=0)


def _batch(messages: Sequence[OutgoingMessage]) -> pb.Entry:
    return encode_batch("p", messages, compression=Compression.NONE, publish_time_ms=0)


def message(sequence_id: int, key: str | None = None, size_bytes: int = 1) -> OutgoingMessage:
    return OutgoingMessage(sequence_id, b"x" * size_bytes, key)


def outbox_with(*parcels: Sequence[int], window: int = PLENTY, size: int = PLENTY) -> Outbox:
    """An outbox with an open stream, and these parcels to send."""
    outbox = Outbox(encode)
    outbox.opened(window, size)
    for parcel in parcels:
        add(outbox, [message(each) for each in parcel])
    return outbox


def add(outbox: Outbox, messages: list[OutgoingMessage], now: float = 0.0) -> None:
    outbox.add(messages, outbox.encode(messages), now)


def sent(outbox: Outbox, bytes_max: int = PLENTY) -> list[pb.Publication]:
    """All publications that are sent now, in order."""
    found: list[pb.Publication] = []
    while (publications := outbox.to_send(bytes_max)) is not None:
        found += publications.publications
    return found


def ids(publications: Sequence[pb.Publication]) -> list[list[int]]:
    """The sequence ids of each publication's entries."""
    return [
        sorted(each for entry in one.entries for each in entry_ids(entry)) for one in publications
    ]


def entry_ids(entry: pb.Entry) -> list[int]:
    found = [entry.metadata.sequence_id]
    count = max(1, entry.metadata.num_messages_in_batch)
    for step in entry.metadata.sequence_id_steps or [1] * (count - 1):
        found.append(found[-1] + step)
    return found


def receipt(request_id: int, status: pb.ReceiptStatus.ValueType, **fields: Any) -> pb.Receipt:
    return pb.Receipt(request_id=request_id, status=status, **fields)


def resume_after_s(outbox: Outbox) -> float | None:
    """The current wait. A call, because mypy would keep the type narrowed by an earlier
    assertion."""
    return outbox.resume_after_s


def stored_at(request_id: int, ledger_id: int, entry_id: int) -> pb.Receipt:
    return receipt(request_id, STORED, position=position(ledger_id, entry_id))


def position(ledger_id: int, entry_id: int) -> common_pb2.Position:
    return common_pb2.Position(ledger_id=ledger_id, entry_id=entry_id)


def fate_stored(entry_id: int, batch_index: int | None = None) -> pb.MessageFate:
    return pb.MessageFate(
        fate=pb.FATE_STORED, position=position(1, entry_id), batch_index=batch_index
    )


FATE_STALE = pb.MessageFate(fate=pb.FATE_STALE)
FATE_TRIMMED = pb.MessageFate(fate=pb.FATE_TRIMMED)


def failed(request_id: int, reason: str, retry_after_s: float | None = None) -> pb.Receipt:
    return receipt(request_id, FAILED, error=status(reason, retry_after_s))


def status(reason: str, retry_after_s: float | None = None) -> status_pb2.Status:
    made = status_pb2.Status(code=8, message="no")
    details: list[error_details_pb2.ErrorInfo | error_details_pb2.RetryInfo] = [
        error_details_pb2.ErrorInfo(domain="seqgate", reason=reason)
    ]
    if retry_after_s is not None:
        delay = Duration()
        delay.FromMicroseconds(int(retry_after_s * 1e6))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    for each in details:
        packed = AnyMessage()
        packed.Pack(each)
        made.details.append(packed)
    return made


def outcomes(resolved: Sequence[Resolved]) -> dict[int, Receipt | SeqgateError]:
    return {each.message.sequence_id: each.outcome for each in resolved}


# ---- the window


@pytest.mark.parametrize(
    ("window", "first", "after_one_receipt"),
    [
        (6, [[0, 1], [2, 3], [4, 5]], []),
        (5, [[0, 1], [2, 3]], [[4, 5]]),
        (4, [[0, 1], [2, 3]], [[4, 5]]),
        (3, [[0, 1]], [[2, 3]]),
        (2, [[0, 1]], [[2, 3]]),
        (1, [[0, 1]], [[2, 3]]),  # one parcel is always sent
        (0, [[0, 1]], [[2, 3]]),
    ],
)
def test_messages_in_flight_stay_within_the_window(
    window: int, first: list[list[int]], after_one_receipt: list[list[int]]
) -> None:
    outbox = outbox_with([0, 1], [2, 3], [4, 5], window=window)
    publications = sent(outbox)
    assert ids(publications) == first
    outbox.receive(stored_at(publications[0].request_id, 1, 0))
    assert ids(sent(outbox)) == after_one_receipt


@pytest.mark.parametrize(
    ("parcels_in_window", "first"),
    [(3.0, [[0], [1], [2]]), (2.9, [[0], [1]]), (2.0, [[0], [1]]), (1.9, [[0]]), (0.5, [[0]])],
)
def test_bytes_in_flight_stay_within_the_window(
    parcels_in_window: float, first: list[list[int]]
) -> None:
    (entry,) = encode([message(0)])
    outbox = outbox_with([0], [1], [2], size=0)
    outbox.opened(PLENTY, int(parcels_in_window * entry.ByteSize()))
    assert ids(sent(outbox)) == first


def test_every_receipt_frees_the_window() -> None:
    for said in (
        stored_at(1, 1, 0),
        receipt(1, STALE, fates=[FATE_STALE]),
        receipt(1, REFUSED, error=status("INVALID_ENTRY")),
    ):
        outbox = outbox_with([0], [1], window=1)
        assert ids(sent(outbox)) == [[0]]
        outbox.receive(said)
        assert ids(sent(outbox)) == [[1]]


def test_the_bytes_of_a_request_are_bounded_and_a_larger_parcel_is_sent_alone() -> None:
    outbox = outbox_with()
    for sequence_id, size_bytes in enumerate([100, 100, 900, 100, 100, 100]):
        add(outbox, [message(sequence_id, size_bytes=size_bytes)])

    requests = []
    while (publications := outbox.to_send(450)) is not None:
        requests.append([each for found in ids(publications.publications) for each in found])
    assert requests == [[0, 1], [2], [3, 4, 5]]


# ---- answers


def test_receipts_may_overtake_each_other() -> None:
    outbox = outbox_with([0], [1], [2])
    first, second, third = sent(outbox)
    for publication, entry_id in ((third, 2), (first, 0), (second, 1)):
        (resolved,) = outbox.receive(stored_at(publication.request_id, 1, entry_id))
        assert resolved.outcome == Receipt(MessageId(1, entry_id), entry_id, duplicate=False)
    assert (outbox.pending, outbox.outstanding) == (0, 0)


def test_unexpected_receipts_are_ignored() -> None:
    """Receipts for publications already answered, not sent yet, or unknown."""
    outbox = outbox_with([0], [1], [2], window=2)
    first, second = sent(outbox)
    assert len(outbox.receive(stored_at(first.request_id, 1, 0))) == 1

    assert outbox.receive(stored_at(first.request_id, 1, 0)) == []  # repeated
    assert outbox.receive(stored_at(second.request_id + 1, 1, 1)) == []  # not sent yet
    assert outbox.receive(failed(second.request_id + 1, "STORE_FULL")) == []
    assert outbox.receive(stored_at(99, 1, 7)) == []
    assert (outbox.pending, outbox.outstanding) == (2, 1)
    assert outbox.resume_after_s is None
    assert ids(sent(outbox)) == [[2]]


def test_messages_of_a_stored_batch_share_a_position_by_index() -> None:
    outbox = outbox_with([3, 5, 9])
    (publication,) = sent(outbox)
    assert [each.outcome for each in outbox.receive(stored_at(publication.request_id, 2, 7))] == [
        Receipt(MessageId(2, 7, batch_index=index), sequence_id, duplicate=False)
        for index, sequence_id in enumerate([3, 5, 9])
    ]


@pytest.mark.parametrize("duplicate", [False, True])
def test_a_batch_by_key_is_answered_in_the_order_of_its_entries(duplicate: bool) -> None:
    """A{0,3,4} and B{1,2}, and C{5}, lie side by side: B, A, C."""
    outbox = Outbox(encode_by_key)
    outbox.opened(PLENTY, PLENTY)
    add(outbox, [message(each, key) for each, key in enumerate("ABBAAC")])
    (publication,) = sent(outbox)
    assert [entry_ids(entry) for entry in publication.entries] == [[1, 2], [0, 3, 4], [5]]

    told = stored_at(publication.request_id, 1, 10)
    if duplicate:  # then the fates have the positions
        places = [(10, 0), (10, 1), (11, 0), (11, 1), (11, 2), (12, None)]
        told = receipt(1, DUPLICATE, fates=[fate_stored(*place) for place in places])
    assert outcomes(outbox.receive(told)) == {
        1: Receipt(MessageId(1, 10, batch_index=0), 1, duplicate),
        2: Receipt(MessageId(1, 10, batch_index=1), 2, duplicate),
        0: Receipt(MessageId(1, 11, batch_index=0), 0, duplicate),
        3: Receipt(MessageId(1, 11, batch_index=1), 3, duplicate),
        4: Receipt(MessageId(1, 11, batch_index=2), 4, duplicate),
        5: Receipt(MessageId(1, 12), 5, duplicate),
    }


def test_each_message_of_a_publication_has_its_own_fate() -> None:
    outbox = outbox_with([4, 5, 6, 7])
    sent(outbox)
    told = outcomes(
        outbox.receive(
            receipt(1, STALE, fates=[fate_stored(2), fate_stored(3, 0), FATE_STALE, FATE_TRIMMED])
        )
    )
    assert told[4] == Receipt(MessageId(1, 2), 4, duplicate=True)
    assert told[5] == Receipt(MessageId(1, 3, batch_index=0), 5, duplicate=True)
    assert type(told[6]) is StaleSequenceIdError
    assert type(told[7]) is SequenceIdTrimmedError
    assert (told[6].reason, told[6].details) == ("STALE", {"sequence_id": "6"})
    assert (told[7].reason, told[7].details) == ("TRIMMED", {"sequence_id": "7"})
    assert (told[6].sequence_id, told[7].sequence_id) == (6, 7)
    assert not isinstance(told[7], StaleSequenceIdError), "it may be in the log"


def test_a_refusal_fails_all_messages_and_does_not_hold_the_stream() -> None:
    outbox = outbox_with([0, 1], [2])
    sent(outbox)
    told = outcomes(outbox.receive(receipt(1, REFUSED, error=status("ENTRY_TOO_LARGE"))))
    assert [type(each) for each in told.values()] == [MessageTooLargeError, MessageTooLargeError]
    assert len(outbox.receive(stored_at(2, 1, 0))) == 1
    assert outbox.resume_after_s is None


@pytest.mark.parametrize("number", [0, 99])
def test_an_unknown_status_is_no_success(number: int) -> None:
    """A service newer than the client may have more kinds of refusals."""
    outbox = outbox_with([0])
    sent(outbox)
    told = outbox.receive(receipt(1, number))  # type: ignore[arg-type]
    assert not any(isinstance(each.outcome, Receipt) for each in told)


# ---- sending again


def test_after_a_disconnection_everything_unanswered_is_sent_again_in_order() -> None:
    outbox = outbox_with([0], [1], [2], [3], [4], window=4)
    before = sent(outbox)
    outbox.receive(stored_at(before[1].request_id, 1, 1))
    add(outbox, [message(5)])

    outbox.opened(PLENTY, PLENTY)
    again = sent(outbox)
    assert ids(again) == [[0], [2], [3], [4], [5]]
    assert [each.entries for each in again[:3]] == [before[i].entries for i in (0, 2, 3)]
    assert not any(each.resume for each in again)


def test_a_new_stream_has_its_own_window() -> None:
    outbox = outbox_with([0], [1], [2], window=3)
    assert len(sent(outbox)) == 3
    outbox.opened(2, PLENTY)
    assert ids(sent(outbox)) == [[0], [1]]


def test_a_failure_holds_the_stream_until_everything_is_answered() -> None:
    outbox = outbox_with([0], [1], [2], window=3)
    sent(outbox)
    add(outbox, [message(3)])
    assert outbox.receive(failed(1, "STORE_FULL", retry_after_s=0.25)) == []

    assert sent(outbox) == []  # neither the failed message nor new ones
    assert resume_after_s(outbox) is None  # two are unanswered
    assert outbox.receive(receipt(2, SKIPPED)) == []
    assert resume_after_s(outbox) is None
    assert outbox.receive(receipt(3, SKIPPED)) == []
    assert resume_after_s(outbox) == 0.25

    outbox.resume()
    again = sent(outbox)
    assert ids(again) == [[0], [1], [2]]  # the window is unchanged
    assert [each.resume for each in again] == [True, False, False]
    assert resume_after_s(outbox) is None


def test_a_message_stored_after_a_failure_stays_stored() -> None:
    outbox = outbox_with([0], [1], [2])
    sent(outbox)
    outbox.receive(stored_at(1, 1, 0))
    outbox.receive(failed(2, "STORE_UNAVAILABLE"))
    (resolved,) = outbox.receive(receipt(3, DUPLICATE, position=position(1, 5)))
    assert resolved.outcome == Receipt(MessageId(1, 5), 2, duplicate=True)
    outbox.resume()
    assert ids(sent(outbox)) == [[1]]


def test_the_longest_requested_delay_applies() -> None:
    outbox = outbox_with([0], [1], [2])
    sent(outbox)
    outbox.receive(failed(1, "STORE_FULL", retry_after_s=0.5))
    outbox.receive(failed(2, "STORE_FULL", retry_after_s=2))
    outbox.receive(receipt(3, SKIPPED))
    assert outbox.resume_after_s == 2
    outbox.resume()
    sent(outbox)
    outbox.receive(failed(1, "STORE_FULL", retry_after_s=0.25))
    outbox.receive(receipt(2, SKIPPED))
    outbox.receive(receipt(3, SKIPPED))
    assert outbox.resume_after_s == 0.25  # the first hold is over, and its delay with it


def test_a_skipped_parcel_holds_the_stream_too() -> None:
    """Receipts may overtake each other: the failure that caused the skip is still to come."""
    outbox = outbox_with([0], [1], [2], window=2)
    sent(outbox)
    outbox.receive(receipt(2, SKIPPED))
    assert sent(outbox) == []
    assert resume_after_s(outbox) is None
    outbox.receive(failed(1, "STORE_FULL", retry_after_s=0.25))
    assert resume_after_s(outbox) == 0.25
    outbox.resume()
    assert ids(sent(outbox)) == [[0], [1]]


def test_a_hold_keeps_messages_sent_only_on_an_earlier_stream() -> None:
    outbox = outbox_with([0], [1], [2])
    assert ids(sent(outbox)) == [[0], [1], [2]]
    outbox.opened(1, PLENTY)
    assert ids(sent(outbox)) == [[0]]
    outbox.receive(failed(1, "STORE_FULL"))
    outbox.resume()
    assert ids(sent(outbox)) == [[0]]
    outbox.receive(stored_at(1, 1, 0))
    assert ids(sent(outbox)) == [[1]]


def test_a_failure_without_a_delay_is_not_retried_at_once() -> None:
    outbox = outbox_with([0])
    sent(outbox)
    outbox.receive(failed(1, "DEDUP_UNAVAILABLE"))
    waits_s = outbox.resume_after_s
    assert waits_s is not None
    assert waits_s > 0


def test_a_disconnection_ends_a_hold() -> None:
    outbox = outbox_with([0], [1])
    sent(outbox)
    outbox.receive(failed(1, "STORE_FULL", retry_after_s=9))
    outbox.opened(PLENTY, PLENTY)
    assert outbox.resume_after_s is None
    again = sent(outbox)
    assert ids(again) == [[0], [1]]
    assert not any(each.resume for each in again)


@pytest.mark.parametrize("by_key", [False, True])
def test_a_batch_is_split_when_the_limit_is_lowered(by_key: bool) -> None:
    """The service restarted with a lower limit while the batch waited. A single message above the
    limit is sent unchanged: the service refuses it with a reason."""
    outbox = Outbox(encode_by_key if by_key else encode)
    outbox.opened(PLENTY, PLENTY)
    add(outbox, [message(0)])
    sizes = [100, 100, 100, 2_000, 100, 100, 100]
    batch = [message(1 + i, "k", size) for i, size in enumerate(sizes)]
    add(outbox, batch, now=7.0)
    add(outbox, [message(8)])
    sent(outbox)
    outbox.opened(PLENTY, PLENTY, 0, 5_000)
    assert ids(sent(outbox)) == [[0], [1, 2, 3, 4, 5, 6, 7], [8]]
    outbox.opened(PLENTY, PLENTY, 0, 400)
    publications = sent(outbox)
    assert ids(publications) == [[0], [1, 2, 3], [4], [5], [6, 7], [8]]
    told = [outbox.receive(stored_at(each.request_id, 2, i)) for i, each in enumerate(publications)]
    assert [each.message.sequence_id for some in told for each in some] == [*range(9)]


def test_the_new_part_of_a_batch_becomes_a_batch_in_the_same_place() -> None:
    """[4..8], where 5 is the last stored id."""
    outbox = outbox_with([4, 5, 6, 7, 8], [9])
    sent(outbox)
    told = outbox.receive(
        receipt(1, PARTIAL, fates=[FATE_STALE, fate_stored(0)], first_new_sequence_id=6)
    )
    assert [type(outcome) for outcome in outcomes(told).values()] == [StaleSequenceIdError, Receipt]
    assert list(outcomes(told)) == [4, 5]
    assert sent(outbox) == []
    outbox.receive(receipt(2, SKIPPED))

    assert outbox.resume_after_s == 0
    outbox.resume()
    again = sent(outbox)
    assert ids(again) == [[6, 7, 8], [9]]
    assert [each.resume for each in again] == [True, False]
    assert again[0].entries[0].metadata.num_messages_in_batch == 3
    assert outcomes(outbox.receive(stored_at(again[0].request_id, 1, 1))) == {
        each: Receipt(MessageId(1, 1, batch_index=each - 6), each, duplicate=False)
        for each in (6, 7, 8)
    }


def test_a_new_part_of_one_message_is_no_batch() -> None:
    outbox = outbox_with([4, 5])
    sent(outbox)
    outbox.receive(receipt(1, PARTIAL, fates=[fate_stored(0)], first_new_sequence_id=5))
    outbox.resume()
    (again,) = sent(outbox)
    assert not again.entries[0].metadata.HasField("num_messages_in_batch")
    (resolved,) = outbox.receive(stored_at(1, 1, 1))
    assert resolved.outcome == Receipt(MessageId(1, 1), 5, duplicate=False)


def test_the_new_part_of_a_batch_by_key_keeps_its_keys() -> None:
    outbox = Outbox(encode_by_key)
    outbox.opened(PLENTY, PLENTY)
    add(outbox, [message(each, key) for each, key in enumerate("ABBAAC")])
    sent(outbox)
    fates = [fate_stored(0), fate_stored(1), FATE_STALE]
    told = outcomes(outbox.receive(receipt(1, PARTIAL, fates=fates, first_new_sequence_id=3)))
    assert list(told) == [0, 1, 2]
    assert isinstance(told[2], StaleSequenceIdError)
    outbox.resume()
    (again,) = sent(outbox)
    assert [entry_ids(entry) for entry in again.entries] == [[3, 4], [5]]


@pytest.mark.parametrize(("window", "size"), [(5, PLENTY), (PLENTY, 160)])
def test_the_smaller_part_takes_less_of_the_window(window: int, size: int) -> None:
    outbox = outbox_with([4, 5, 6, 7, 8], [9, 10], window=window, size=size)
    assert ids(sent(outbox)) == [[4, 5, 6, 7, 8]]
    outbox.receive(
        receipt(1, PARTIAL, fates=[fate_stored(0), fate_stored(1)], first_new_sequence_id=6)
    )
    outbox.resume()
    assert ids(sent(outbox)) == [[6, 7, 8], [9, 10]]


# ---- giving up, and inspection


def test_giving_up_fails_all_messages_in_order_and_ignores_late_receipts() -> None:
    outbox = outbox_with([0, 1], [2], [3], window=3)
    sent(outbox)
    error = SendTimeoutError("no receipt came in time")
    assert [(each.message.sequence_id, each.outcome) for each in outbox.fail_all(error)] == [
        (0, error),
        (1, error),
        (2, error),
        (3, error),
    ]
    assert outbox.pending == 0
    assert outbox.receive(stored_at(1, 1, 0)) == []
    assert sent(outbox) == []
    assert outbox.fail_all(error) == []

    outbox.opened(PLENTY, PLENTY)
    add(outbox, [message(4)])
    (publication,) = sent(outbox)
    assert publication.request_id > 3  # a late receipt must not match it


def test_an_outbox_reports_its_contents() -> None:
    outbox = outbox_with()
    assert (outbox.pending, outbox.outstanding, outbox.oldest_added_at) == (0, 0, None)
    add(outbox, [message(3), message(4)], now=1.5)
    add(outbox, [message(7)], now=2.5)
    assert (outbox.pending, outbox.outstanding, outbox.oldest_added_at) == (2, 0, 1.5)
    assert [each.sequence_id for each in outbox.unresolved] == [3, 4, 7]
    assert outbox.highest_sent == -1
    sent(outbox)
    assert (outbox.outstanding, outbox.highest_sent) == (2, 7)
    outbox.receive(stored_at(1, 1, 0))
    assert (outbox.pending, outbox.oldest_added_at) == (1, 2.5)


def test_a_failure_maps_to_its_error_class() -> None:
    outbox = outbox_with([0])
    sent(outbox)
    (resolved,) = outbox.receive(receipt(1, REFUSED, error=status("TOO_MANY_STREAMS")))
    assert isinstance(resolved.outcome, LimitExceededError)


# ---- against a service that does anything that the protocol allows


@dataclass
class Service:
    """The log, and one stream to it. Publications arrive and are decided in order; each decision is
    durable, and its receipt may get lost."""

    log: dict[int, MessageId] = field(default_factory=dict)
    highest: int = -1
    entry_id: int = 0
    arriving: list[pb.Publication] = field(default_factory=list)
    receipts: list[pb.Receipt] = field(default_factory=list)
    on_hold: bool = False

    def connect(self) -> None:
        self.arriving, self.receipts, self.on_hold = [], [], False

    def decide(self, *, fail: bool = False) -> None:
        """Answer the next publication."""
        publication = self.arriving.pop(0)
        if publication.resume:
            self.on_hold = False
        told = self._skip(publication) if self.on_hold else self._judge(publication, fail=fail)
        self.receipts.append(told)

    def _skip(self, publication: pb.Publication) -> pb.Receipt:
        return receipt(publication.request_id, SKIPPED)

    def _judge(self, publication: pb.Publication, *, fail: bool) -> pb.Receipt:
        request_id = publication.request_id
        if fail:
            self.on_hold = True
            return failed(request_id, "STORE_UNAVAILABLE", 0.5)
        wanted = [each for entry in publication.entries for each in entry_ids(entry)]
        old = [each for each in wanted if each <= self.highest]
        if not old:
            return self._store(publication)
        if len(old) < len(wanted):
            self.on_hold = True
            fates = [self._fate(each) for each in sorted(old)]
            return receipt(request_id, PARTIAL, fates=fates, first_new_sequence_id=self.highest + 1)
        missing = any(each not in self.log for each in wanted)
        fates = [self._fate(each) for each in wanted]
        return receipt(request_id, STALE if missing else DUPLICATE, fates=fates)

    def _store(self, publication: pb.Publication) -> pb.Receipt:
        first = self.entry_id
        for entry in publication.entries:
            batch = entry.metadata.HasField("num_messages_in_batch")
            for index, sequence_id in enumerate(entry_ids(entry)):
                assert sequence_id not in self.log
                self.log[sequence_id] = MessageId(1, self.entry_id, -1, index if batch else -1)
                self.highest = max(self.highest, sequence_id)
            self.entry_id += 1
        return stored_at(publication.request_id, 1, first)

    def _fate(self, sequence_id: int) -> pb.MessageFate:
        where = self.log.get(sequence_id)
        if where is None:
            return FATE_STALE
        return fate_stored(where.entry_id, None if where.batch_index < 0 else where.batch_index)


PARCELS = st.tuples(
    st.one_of(st.just(0), st.just(0), st.just(2), st.integers(-6, -1)),  # distance from the last id
    st.lists(st.integers(1, 3), max_size=3),  # steps between its ids
    st.text("AB", min_size=4, max_size=4),  # their keys
)


WINDOWS = st.sampled_from([(1, 10_000), (4, 100), (10_000, 10_000)])


class Publishing(RuleBasedStateMachine):
    """Whatever the service does, every message gets one outcome, and it is correct."""

    def __init__(self) -> None:
        super().__init__()
        self.outbox = Outbox(encode_by_key)
        self.service = Service()
        self.connected = False
        self.handed_over: list[OutgoingMessage] = []
        self.fresh: set[int] = set()  # numbers of messages whose id was above every earlier one
        self.told: dict[int, Receipt | SeqgateError] = {}  # by number
        self.window = (0, 0)
        # The parcels of this stream, since it opened or was resumed, in the order of sending.
        self.phase: list[list[int]] = []
        self.held = self.must_resume = False
        self.answered: list[pb.Receipt] = []
        self.out: dict[int, tuple[int, int]] = {}

    # ---- the application

    @rule(parcels=st.lists(PARCELS, min_size=1, max_size=4))
    def hand_over(self, parcels: list[tuple[int, list[int], str]]) -> None:
        """Parcels that continue after the last one; or, as after a restart of the application, that
        do not."""
        for start, steps, keys in parcels:
            highest = max((each.sequence_id for each in self.handed_over), default=-1)
            sequence_ids = [max(0, highest + 1 + start)]
            for step in steps:
                sequence_ids.append(sequence_ids[-1] + step)
            parcel = []
            for sequence_id, key in zip(sequence_ids, keys, strict=False):
                made = OutgoingMessage(sequence_id, b"x", key, done=len(self.handed_over))
                if sequence_id > highest:
                    self.fresh.add(made.done)
                self.handed_over.append(made)
                parcel.append(made)
            add(self.outbox, parcel)

    # ---- the producer

    @initialize(window=WINDOWS)
    def connect_first(self, window: tuple[int, int]) -> None:
        self._connect(window)

    @precondition(lambda self: not self.connected)
    @rule(window=WINDOWS)
    def connect(self, window: tuple[int, int]) -> None:
        self._connect(window)

    @precondition(lambda self: self.connected)
    @rule(
        bytes_max=st.sampled_from([1, 100, 10_000]),
        failures=st.lists(st.sampled_from([False, False, True]), max_size=4),
        which=st.lists(st.integers(0, 9), max_size=2),
    )
    def exchange(self, bytes_max: int, failures: list[bool], which: list[int]) -> None:
        """Send a request, decide some publications, and deliver some receipts in any order."""
        self._send(bytes_max)
        for fail in failures[: len(self.service.arriving)]:
            self.service.decide(fail=fail)
        for each in which[: len(self.service.receipts)]:
            self._receive(each % len(self.service.receipts))

    @precondition(lambda self: self.connected and self.outbox.resume_after_s is not None)
    @rule()
    def resume(self) -> None:
        assert self.held
        assert not self.out
        self.outbox.resume()
        self.phase, self.held, self.must_resume = [], False, True

    # ---- the wire

    @precondition(lambda self: self.answered)
    @rule(which=st.integers(0, 30))
    def receive_again(self, which: int) -> None:
        """A receipt of an earlier stream, or a repeated one: it has no effect unless its
        publication is in flight again."""
        told = self.answered[which % len(self.answered)]
        if told.request_id not in self.out:
            assert self.outbox.receive(told) == []

    @precondition(lambda self: self.connected and self.out)
    @rule(decided=st.integers(0, 5), gives_up=st.sampled_from([False, False, True]))
    def disconnect(self, decided: int, gives_up: bool) -> None:
        """Some arrived publications are still decided, and their receipts lost. Or the producer
        timed out, fails all messages and drops its stream."""
        for _ in range(min(decided, len(self.service.arriving))):
            self.service.decide()
        if gives_up:
            self._note(self.outbox.fail_all(SendTimeoutError("no receipt came in time")))
            assert self.outbox.pending == 0
        self.connected = False

    # ---- invariants

    @invariant()
    def what_is_known_is_known_once(self) -> None:
        waiting = [each.done for each in self.outbox.unresolved]
        assert len(waiting) == len(set(waiting))
        assert not set(waiting) & self.told.keys()
        assert len(waiting) + len(self.told) == len(self.handed_over)

    @invariant()
    def what_waits_keeps_its_order(self) -> None:
        waiting = [each.done for each in self.outbox.unresolved]
        assert waiting == sorted(waiting)

    def teardown(self) -> None:
        """From here on nothing fails."""
        for _ in range(10 * len(self.handed_over) + 10):
            if not self.outbox.pending:
                break
            if not self.connected:
                self._connect((100, 10_000))
            if self.outbox.resume_after_s is not None:
                self.resume()
            self._send(10_000)
            while self.service.arriving:
                self.service.decide()
            while self.service.receipts:
                self._receive(0)
        assert self.outbox.pending == 0
        assert len(self.told) == len(self.handed_over)

    # ---- internals

    def _connect(self, window: tuple[int, int]) -> None:
        self.service.connect()
        self.outbox.opened(*window)
        self.connected, self.window, self.phase, self.out = True, window, [], {}
        self.held = self.must_resume = False

    def _send(self, bytes_max: int) -> None:
        unresolved = [each.done for each in self.outbox.unresolved]
        publications = self.outbox.to_send(bytes_max)
        if publications is None:
            return
        assert not self.held
        for publication in publications.publications:
            sequence_ids = [each for entry in publication.entries for each in entry_ids(entry)]
            share = (len(sequence_ids), sum(entry.ByteSize() for entry in publication.entries))
            self.out[publication.request_id] = share
            self._check_window()
            assert publication.resume == self.must_resume
            self.must_resume = False
            # Publications are sent in order, without leaving out an unresolved message.
            before = sum(len(each) for each in self.phase)
            resolved_since = sum(
                1 for parcel in self.phase for each in parcel if each not in unresolved
            )
            at = before - resolved_since
            parcel = unresolved[at : at + len(sequence_ids)]
            assert sorted(sequence_ids) == sorted(
                self.handed_over[each].sequence_id for each in parcel
            )
            self.phase.append(parcel)
            self.service.arriving.append(publication)

    def _receive(self, which: int) -> None:
        told = self.service.receipts.pop(which)
        del self.out[told.request_id]
        self.held = self.held or told.status in (FAILED, SKIPPED, PARTIAL)
        self._note(self.outbox.receive(told))
        self.answered.append(told)

    def _check_window(self) -> None:
        messages = sum(count for count, _ in self.out.values())
        size_bytes = sum(size for _, size in self.out.values())
        assert len(self.out) == 1 or (messages <= self.window[0] and size_bytes <= self.window[1])

    def _note(self, resolved: Sequence[Resolved]) -> None:
        for each in resolved:
            number, sequence_id = each.message.done, each.message.sequence_id
            assert number not in self.told
            self.told[number] = each.outcome
            if isinstance(each.outcome, Receipt):
                assert each.outcome.message_id == self.service.log[sequence_id]
                assert each.outcome.sequence_id == sequence_id
            elif isinstance(each.outcome, StaleSequenceIdError):
                assert sequence_id not in self.service.log
                assert sequence_id < self.service.highest
                assert number not in self.fresh, "overtaken by what was handed over after it"


TestPublishing = Publishing.TestCase
TestPublishing.settings = settings(max_examples=times(quick=50, full=150), stateful_step_count=25)

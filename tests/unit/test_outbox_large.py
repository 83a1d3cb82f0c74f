"""Large messages in the outbox: every chunk is a parcel, and the message has one outcome.

The state machine at the end plays an unreliable service that judges as deduplication does; other
writers of the same producer interfere, and unfinished messages lose chunks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from seqgate.api.ledger.v1 import ledger_pb2 as pb
from seqgate.client._chunking import LargeMessage
from seqgate.client._codec import Compression, OutgoingMessage, seal_message
from seqgate.client._outbox import Outbox, Receipt, Resolved
from seqgate.errors import (
    InternalError,
    LimitExceededError,
    SendTimeoutError,
    SeqgateError,
    SequenceIdTrimmedError,
    StaleSequenceIdError,
)
from seqgate.message_id import ChunkMessageId, MessageId
from seqgate.services.dedup.core.sequence import Marks, admit, advance
from seqgate.services.deduplication import Claim, Verdict
from seqgate.types import Chunk
from tests.unit.test_outbox import (
    DUPLICATE,
    FAILED,
    FATE_STALE,
    FATE_TRIMMED,
    PLENTY,
    REFUSED,
    SKIPPED,
    STALE,
    STORED,
    add,
    encode,
    failed,
    fate_stored,
    message,
    position,
    receipt,
    resume_after_s,
    sent,
    status,
    stored_at,
)

GAP, CONFLICT = pb.RECEIPT_STATUS_CHUNK_GAP, pb.RECEIPT_STATUS_LAYOUT_CONFLICT
UNKNOWN: pb.ReceiptStatus.ValueType = 99  # type: ignore[assignment]  # of a newer service

Place = tuple[int, int | None]


def large(sequence_id: int, size_bytes: int = 10, chunk_bytes: int = 4) -> LargeMessage:
    made = OutgoingMessage(sequence_id, bytes(range(size_bytes)))
    return cut(made, chunk_bytes)


def cut(made: OutgoingMessage, chunk_bytes: int) -> LargeMessage:
    """Cut as a producer does."""
    sealed = seal_message("p", made, compression=Compression.NONE, publish_time_ms=0)
    return LargeMessage(made, *sealed, chunk_bytes)


def outbox_with(
    *what: int | LargeMessage, window: int = PLENTY, size: int = PLENTY, chunk: int = 0
) -> Outbox:
    """An outbox with an open stream, and messages to send: small ones by their ids, and large
    ones."""
    outbox = Outbox(encode)
    outbox.opened(window, size, chunk)
    for now, each in enumerate(what):
        if isinstance(each, LargeMessage):
            outbox.add_large(each, now)
        else:
            add(outbox, [message(each)], now)
    return outbox


def places(publications: Sequence[pb.Publication]) -> list[Place]:
    """The sequence id and chunk id of each publication."""
    return [place(each) for each in publications]


def place(publication: pb.Publication) -> Place:
    (entry,) = publication.entries
    metadata = entry.metadata
    return metadata.sequence_id, metadata.chunk_id if metadata.HasField("chunk_id") else None


def uuid(publication: pb.Publication) -> str:
    return publication.entries[0].metadata.uuid


def stored(publication: pb.Publication, entry_id: int) -> pb.Receipt:
    return stored_at(publication.request_id, 1, entry_id)


def duplicate(publication: pb.Publication, entry_id: int) -> pb.Receipt:
    return receipt(publication.request_id, DUPLICATE, position=position(1, entry_id))


def elsewhere(publication: pb.Publication, first: int = 7, last: int = 9) -> pb.Receipt:
    """The message is stored by another attempt."""
    fate = fate_stored(last)
    fate.first_chunk_position.CopyFrom(position(1, first))
    return receipt(publication.request_id, DUPLICATE, fates=[fate])


def overtaken(publication: pb.Publication) -> pb.Receipt:
    return receipt(publication.request_id, STALE, fates=[FATE_STALE])


def of(publication: pb.Publication, what: pb.ReceiptStatus.ValueType) -> pb.Receipt:
    """A receipt without further fields."""
    if what == FAILED:
        return failed(publication.request_id, "STORE_FULL", 0.25)
    return receipt(publication.request_id, what)


def chunk_id(first: int, last: int) -> ChunkMessageId:
    return ChunkMessageId(MessageId(1, first), MessageId(1, last))


def exact(told: Receipt | SeqgateError) -> tuple[str, int, bool]:
    """A receipt with the first chunk, which equality ignores."""
    assert isinstance(told, Receipt)
    return str(told.message_id), told.sequence_id, told.duplicate


# ---- sending


def test_all_chunks_are_sent_in_a_row_in_their_messages_place() -> None:
    outbox = outbox_with(0, large(3), 4, large(8, 5), 9)
    expected = [(0, None), (3, 0), (3, 1), (3, 2), (4, None), (8, 0), (8, 1), (9, None)]
    publications = sent(outbox)
    assert places(publications) == expected
    assert len({each.request_id for each in publications}) == len(expected)
    assert outbox.highest_sent == 9
    payloads = [each.entries[0].payload for each in publications[1:4]]
    assert b"".join(payloads) == bytes(range(10))


@pytest.mark.parametrize("window", [1, 2, 3, 4])
def test_a_chunk_is_one_message_of_the_window(window: int) -> None:
    outbox = outbox_with(large(0), 1, window=window)
    publications = sent(outbox)
    assert places(publications) == [(0, 0), (0, 1), (0, 2), (1, None)][:window]
    outbox.receive(stored(publications[0], 0))
    assert len(sent(outbox)) == (1 if window < 4 else 0)


@pytest.mark.parametrize(("chunks_in_window", "count"), [(0.5, 1), (1.0, 1), (2.0, 2), (2.5, 2)])
def test_bytes_of_chunks_in_flight_stay_within_the_window(
    chunks_in_window: float, count: int
) -> None:
    big = large(0, 12)
    outbox = outbox_with(big)
    outbox.opened(PLENTY, int(chunks_in_window * big.size_bytes(0)))
    publications = sent(outbox)
    assert len(publications) == count
    outbox.receive(stored(publications[0], 0))
    assert len(sent(outbox)) == 1


def test_the_bytes_of_chunks_in_a_request_are_bounded() -> None:
    big = large(0, 12)
    outbox = outbox_with(big)
    requests = []
    while (publications := outbox.to_send(2 * big.size_bytes(0))) is not None:
        requests.append(places(publications.publications))
    assert requests == [[(0, 0), (0, 1)], [(0, 2)]]


# ---- one outcome


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0), (2, 0, 1)])
def test_a_large_message_is_stored_when_all_its_chunks_are(order: Sequence[int]) -> None:
    outbox = outbox_with(large(3))
    publications = sent(outbox)
    told: list[Resolved] = []
    for each in order:
        assert told == []
        told = outbox.receive(stored(publications[each], each + 5))
    (resolved,) = told
    assert exact(resolved.outcome) == ("1:5:-1;1:7:-1", 3, False)
    assert (outbox.pending, outbox.outstanding) == (0, 0)


@pytest.mark.parametrize("stored_count", [0, 1, 2, 3])
def test_after_a_reconnection_the_chunks_without_a_receipt_are_sent_again(
    stored_count: int,
) -> None:
    """Some of them are duplicates then; the last chunk decides whether the message is one."""
    outbox = outbox_with(large(3), 4)
    before = sent(outbox)
    outbox.receive(stored(before[1], 6))  # receipts may overtake each other
    outbox.opened(PLENTY, PLENTY, 4)
    again = sent(outbox)
    assert places(again) == [(3, 0), (3, 2), (4, None)]
    assert {uuid(each) for each in again[:2]} == {uuid(before[0])}
    assert not any(each.resume for each in again)
    answers = [duplicate(again[0], 5), duplicate(again[1], 7)]
    if stored_count < 3:
        answers[1] = stored(again[1], 7)
    assert outbox.receive(answers[0]) == []
    (resolved,) = outbox.receive(answers[1])
    assert exact(resolved.outcome) == ("1:5:-1;1:7:-1", 3, stored_count == 3)


def test_a_repeated_receipt_counts_once() -> None:
    outbox = outbox_with(large(3))
    first, second, third = sent(outbox)
    for _ in range(3):
        assert outbox.receive(stored(first, 5)) == []
    assert outbox.receive(stored(third, 7)) == []
    assert len(outbox.receive(stored(second, 6))) == 1
    assert outbox.receive(stored(second, 6)) == []


@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        (elsewhere, Receipt),
        (overtaken, StaleSequenceIdError),
        (
            lambda each: receipt(each.request_id, STALE, fates=[FATE_TRIMMED]),
            SequenceIdTrimmedError,
        ),
        (
            lambda each: receipt(each.request_id, REFUSED, error=status("MESSAGE_TOO_LARGE")),
            LimitExceededError,
        ),
        (lambda each: of(each, UNKNOWN), InternalError),
        (lambda each: of(each, STORED), InternalError),  # without a position
        (lambda each: of(each, DUPLICATE), InternalError),
    ],
    ids=["elsewhere", "stale", "trimmed", "refused", "unknown", "stored nowhere", "nowhere"],
)
def test_a_receipt_that_settles_the_message_drops_its_other_chunks(
    which: int, answer: Callable[[pb.Publication], pb.Receipt], outcome: type
) -> None:
    outbox = outbox_with(0, large(3, 20), 4, window=4)
    small, *chunks = sent(outbox)
    assert places(chunks) == [(3, 0), (3, 1), (3, 2)]  # two are not sent yet
    outbox.receive(stored(small, 0))
    (resolved,) = outbox.receive(answer(chunks.pop(which)))
    assert isinstance(resolved.outcome, outcome)
    assert [each.sequence_id for each in outbox.unresolved] == [4]
    (after,) = sent(outbox)
    assert place(after) == (4, None)
    for each in chunks:
        assert outbox.receive(stored(each, 5)) == []
    assert len(outbox.receive(stored(after, 9))) == 1
    assert (outbox.pending, outbox.outstanding) == (0, 0)


def test_a_message_stored_by_another_attempt_has_its_position() -> None:
    outbox = outbox_with(large(3))
    first, *_ = sent(outbox)
    (resolved,) = outbox.receive(elsewhere(first, 7, 9))
    assert exact(resolved.outcome) == ("1:7:-1;1:9:-1", 3, True)


@pytest.mark.parametrize("late", [STORED, SKIPPED, FAILED, GAP, CONFLICT, REFUSED, UNKNOWN])
def test_receipts_after_the_outcome_are_absorbed(late: pb.ReceiptStatus.ValueType) -> None:
    outbox = outbox_with(large(3), 4, window=3)
    first, second, third = sent(outbox)
    assert len(outbox.receive(overtaken(first))) == 1
    for each in (second, third):
        assert outbox.receive(of(each, late)) == []
    assert outbox.outstanding == 0
    if outbox.resume_after_s is not None:
        outbox.resume()
    assert places(sent(outbox)) == [(4, None)]
    assert outbox.pending == 1


def test_an_outcome_while_the_stream_is_held_leaves_no_chunk_behind() -> None:
    outbox = outbox_with(large(3), 4)
    first, second, third, small = sent(outbox)
    outbox.receive(of(first, FAILED))
    assert len(outbox.receive(overtaken(second))) == 1
    outbox.receive(of(third, SKIPPED))
    outbox.receive(of(small, SKIPPED))
    assert outbox.resume_after_s == 0.25
    outbox.resume()
    assert places(sent(outbox)) == [(4, None)]
    assert outbox.pending == 1


def test_a_broken_attempt_of_a_settled_message_is_not_restarted() -> None:
    outbox = outbox_with(large(3), 4)
    first, second, third, small = sent(outbox)
    outbox.receive(of(first, GAP))
    outbox.receive(of(small, SKIPPED))
    outbox.receive(of(third, GAP))
    assert len(outbox.receive(elsewhere(second))) == 1
    outbox.resume()
    assert places(sent(outbox)) == [(4, None)]


def test_an_outcome_leaves_no_chunk_for_the_next_stream() -> None:
    outbox = outbox_with(large(3), 4)
    first, *_ = sent(outbox)
    assert len(outbox.receive(elsewhere(first))) == 1
    outbox.opened(PLENTY, PLENTY, 2)
    assert places(sent(outbox)) == [(4, None)]
    assert outbox.pending == 1


# ---- starting again


@pytest.mark.parametrize("said", [GAP, CONFLICT])
@pytest.mark.parametrize("where", [0, 1, 2])
def test_a_broken_attempt_restarts_in_the_same_place(
    said: pb.ReceiptStatus.ValueType, where: int
) -> None:
    outbox = outbox_with(0, large(3), 4)
    small, *chunks, after = sent(outbox)
    old = uuid(chunks[0])
    outbox.receive(stored(small, 0))
    for index, each in enumerate(chunks):
        answer = stored(each, index) if index < where else of(each, said)
        assert outbox.receive(answer) == []
        assert sent(outbox) == []
    assert resume_after_s(outbox) is None  # one is unanswered
    outbox.receive(of(after, SKIPPED))
    assert resume_after_s(outbox) == 0
    outbox.resume()

    again = sent(outbox)
    assert places(again) == [(3, 0), (3, 1), (3, 2), (4, None)]
    assert [each.resume for each in again] == [True, False, False, False]
    assert {uuid(each) for each in again[:3]} != {old}
    assert len({uuid(each) for each in again[:3]}) == 1
    told = [outbox.receive(stored(each, 5 + index)) for index, each in enumerate(again)]
    assert [len(each) for each in told] == [0, 0, 1, 1]
    assert exact(told[2][0].outcome) == ("1:5:-1;1:7:-1", 3, False)


def test_receipts_of_an_earlier_attempt_do_not_affect_the_new_one() -> None:
    outbox = outbox_with(large(3))
    old = sent(outbox)
    for each in old:
        outbox.receive(of(each, GAP))
    outbox.resume()
    new = sent(outbox)
    assert not {each.request_id for each in old} & {each.request_id for each in new}
    for each in old:
        assert outbox.receive(stored(each, 1)) == []
    assert outbox.outstanding == 3


def test_a_failure_midway_continues_the_same_attempt() -> None:
    outbox = outbox_with(0, large(3), 4)
    small, first, second, third, after = sent(outbox)
    for each, said in ((small, STORED), (first, STORED), (second, FAILED), (third, SKIPPED)):
        assert bool(outbox.receive(stored(each, 0) if said == STORED else of(each, said))) == (
            each is small
        )
    outbox.receive(of(after, SKIPPED))
    assert outbox.resume_after_s == 0.25
    outbox.resume()
    again = sent(outbox)
    assert places(again) == [(3, 1), (3, 2), (4, None)]
    assert [each.resume for each in again] == [True, False, False]
    assert {uuid(each) for each in again[:2]} == {uuid(first)}
    outbox.receive(stored(again[0], 1))
    (resolved,) = outbox.receive(stored(again[1], 2))
    assert exact(resolved.outcome) == ("1:0:-1;1:2:-1", 3, False)


def test_a_broken_attempt_is_remembered_across_a_disconnection() -> None:
    outbox = outbox_with(large(3), 4)
    publications = sent(outbox)
    outbox.receive(of(publications[0], GAP))
    outbox.opened(PLENTY, PLENTY, 4)
    again = sent(outbox)
    assert places(again) == [(3, 0), (3, 1), (3, 2), (4, None)]
    assert uuid(again[0]) != uuid(publications[0])
    assert not any(each.resume for each in again)


@pytest.mark.parametrize(
    ("chunk_bytes", "expected", "same"),
    [
        (0, [(3, 1), (3, 2)], True),  # no limit given
        (5, [(3, 1), (3, 2)], True),  # a begun attempt keeps its smaller chunks
        (4, [(3, 1), (3, 2)], True),
        (3, [(3, 0), (3, 1), (3, 2), (3, 3)], False),
        (1, [(3, each) for each in range(10)], False),
    ],
)
def test_smaller_chunks_make_a_new_attempt(
    chunk_bytes: int, expected: list[Place], same: bool
) -> None:
    outbox = outbox_with(2, large(3), 4)
    small, first, *_ = sent(outbox)
    outbox.receive(stored(small, 0))
    outbox.receive(stored(first, 1))
    outbox.opened(PLENTY, PLENTY, chunk_bytes)
    *chunks, after = sent(outbox)
    assert places(chunks) == expected
    assert place(after) == (4, None)
    assert {uuid(each) == uuid(first) for each in chunks} == {same}
    told = [each for index, one in enumerate(chunks) for each in outbox.receive(stored(one, index))]
    assert len(told) == 1


@pytest.mark.parametrize("was_sent", [False, True])
def test_a_single_entry_is_chunked_when_the_limit_is_lowered(was_sent: bool) -> None:
    """The service restarted with a lower limit while the message waited."""
    outbox = outbox_with(2)
    whole = OutgoingMessage(3, bytes(range(10)))
    whole.sealed = seal_message("p", whole, compression=Compression.NONE, publish_time_ms=0)
    whole.sealed.metadata.sequence_id = 3
    add(outbox, [whole], now=7.0)
    add(outbox, [message(4)], now=8.0)
    if was_sent:
        sent(outbox)
    outbox.opened(PLENTY, PLENTY, 10, 10)
    assert places(sent(outbox)) == [(2, None), (3, None), (4, None)]
    outbox.opened(PLENTY, PLENTY, 4, 4)
    before, *chunks, after = sent(outbox)
    assert places([before, *chunks, after]) == [(2, None), (3, 0), (3, 1), (3, 2), (4, None)]
    assert b"".join(each.entries[0].payload for each in chunks) == whole.payload
    outbox.receive(stored(before, 0))
    assert outbox.oldest_added_at == 7.0
    told = [each for index, one in enumerate(chunks) for each in outbox.receive(stored(one, index))]
    assert [exact(each.outcome) for each in told] == [("1:0:-1;1:2:-1", 3, False)]


def test_a_stored_entry_sent_again_in_chunks_is_a_duplicate() -> None:
    outbox = outbox_with()
    whole = OutgoingMessage(3, bytes(range(10)))
    whole.sealed = seal_message("p", whole, compression=Compression.NONE, publish_time_ms=0)
    add(outbox, [whole], now=7.0)
    sent(outbox)
    outbox.opened(PLENTY, PLENTY, 4, 4)
    first, *_ = sent(outbox)
    (told,) = outbox.receive(receipt(first.request_id, DUPLICATE, fates=[fate_stored(7)]))
    assert told.outcome == Receipt(MessageId(1, 7), 3, duplicate=True)
    assert outbox.unresolved == []


def test_several_large_messages_restart_in_their_places() -> None:
    outbox = outbox_with(large(1), large(3), 4, large(6))
    before = sent(outbox)
    for each in before:
        outbox.receive(of(each, GAP if place(each)[0] in (1, 6) else SKIPPED))
    outbox.resume()
    again = sent(outbox)
    assert places(again) == places(before)
    changed = [uuid(old) != uuid(new) for old, new in zip(before, again, strict=True)]
    assert changed == [True] * 3 + [False] * 4 + [True] * 3


def test_a_small_message_has_no_attempt_to_restart() -> None:
    """A chunk's status is no success for a message that is not chunked."""
    for said in (GAP, CONFLICT, UNKNOWN):
        outbox = outbox_with(3)
        (publication,) = sent(outbox)
        (resolved,) = outbox.receive(of(publication, said))
        assert isinstance(resolved.outcome, InternalError)


# ---- giving up, and inspection


def test_giving_up_fails_a_large_message_once() -> None:
    outbox = outbox_with(0, large(3), 4, window=3)
    publications = sent(outbox)
    outbox.receive(stored(publications[1], 1))
    error = SendTimeoutError("no receipt came in time")
    assert [each.message.sequence_id for each in outbox.fail_all(error)] == [0, 3, 4]
    assert (outbox.pending, outbox.unresolved, outbox.oldest_added_at) == (0, [], None)
    assert outbox.receive(stored(publications[2], 2)) == []
    assert sent(outbox) == []
    assert outbox.fail_all(error) == []


def test_an_outbox_reports_a_large_message_until_its_outcome() -> None:
    outbox = outbox_with(large(3), 4)
    assert (outbox.pending, outbox.oldest_added_at) == (4, 0)
    publications = sent(outbox)
    for each in publications[:2]:
        outbox.receive(stored(each, 0))
        assert [each.sequence_id for each in outbox.unresolved] == [3, 4]
        assert outbox.oldest_added_at == 0
    outbox.receive(elsewhere(publications[2]))
    assert ([each.sequence_id for each in outbox.unresolved], outbox.oldest_added_at) == ([4], 1)


def test_absorbed_receipts_are_not_overdue() -> None:
    outbox = outbox_with(large(3))
    first, *_ = sent(outbox)
    outbox.receive(overtaken(first))
    assert (outbox.outstanding, outbox.oldest_added_at, outbox.unresolved) == (2, None, [])
    assert outbox.fail_all(SendTimeoutError("late")) == []


def test_a_new_attempt_is_as_old_as_its_message() -> None:
    outbox = outbox_with()
    outbox.add_large(large(3), 7.5)
    for each in sent(outbox):
        outbox.receive(of(each, GAP))
    outbox.resume()
    assert outbox.oldest_added_at == 7.5


# ---- against a service that does anything that the protocol allows


class Logged(NamedTuple):
    """An entry of the log, at its position."""

    sequence_id: int
    chunk: Chunk | None
    payload: bytes


def payload_of(sequence_id: int) -> bytes:
    """The payload of a message, derived from its id."""
    size_bytes = (1, 4, 9, 23, 40)[sequence_id % 5]
    return bytes((sequence_id + each) % 256 for each in range(size_bytes))


@dataclass
class Service:
    """The log, and one stream to it. Each verdict is durable, and its receipt may get lost."""

    log: list[Logged | None] = field(default_factory=list)  # None: trimmed
    marks: Marks = field(default_factory=Marks)
    arriving: list[pb.Publication] = field(default_factory=list)
    receipts: list[pb.Receipt] = field(default_factory=list)
    on_hold: bool = False

    def connect(self) -> None:
        self.arriving, self.receipts, self.on_hold = [], [], False

    def decide(self, *, fail: bool = False) -> None:
        """Answer the next publication."""
        publication = self.arriving.pop(0)
        self.on_hold = self.on_hold and not publication.resume
        if self.on_hold:
            self.receipts.append(of(publication, SKIPPED))
            return
        said = of(publication, FAILED) if fail else self._judge(publication)
        self.on_hold = said.status in (FAILED, GAP, CONFLICT)
        self.receipts.append(said)

    def store(self, entry: Logged) -> Verdict:
        """Append an entry, if deduplication admits it."""
        claim = Claim(entry.sequence_id, entry.sequence_id, entry.chunk)
        (verdict,) = admit(self.marks, [claim]).verdicts
        if verdict is Verdict.NEW:
            self.log.append(entry)
            self.marks = advance(self.marks, entry.sequence_id, entry.chunk)
        return verdict

    def trim_unfinished(self) -> None:
        """Trim the first chunk of the unfinished message, and with it the attempt."""
        attempt = self.marks.persisted_chunk
        if attempt is None:
            return
        self.log = [
            None if each and each.chunk and each.chunk.uuid == attempt.uuid else each
            for each in self.log
        ]
        self.marks = Marks()
        for each in self.log:
            if each is not None:
                self.marks = advance(self.marks, each.sequence_id, each.chunk)

    def complete(self) -> dict[int, list[list[int]]]:
        """The indexes of the entries of each complete message, by its id, as a reader finds
        them."""
        found: dict[int, list[list[int]]] = {}
        open_attempts: dict[str, list[int]] = {}
        for index, entry in enumerate(self.log):
            if entry is None:
                continue
            chunk = entry.chunk
            indexes = [index]
            if chunk is not None:
                if chunk.chunk_id == 0:
                    open_attempts[chunk.uuid] = []  # starts over, after another attempt replaced it
                indexes = open_attempts.setdefault(chunk.uuid, [])
                assert len(indexes) == chunk.chunk_id, "a chunk twice, or out of order"
                indexes.append(index)
            if chunk is None or chunk.is_last:
                found.setdefault(entry.sequence_id, []).append(indexes)
        return found

    def body(self, indexes: Sequence[int]) -> bytes:
        return b"".join(each.payload for each in map(self.log.__getitem__, indexes) if each)

    def _judge(self, publication: pb.Publication) -> pb.Receipt:
        entry = _logged(publication)
        verdict = self.store(entry)
        match verdict:
            case Verdict.NEW:
                return stored(publication, len(self.log) - 1)
            case Verdict.CHUNK_GAP:
                return of(publication, GAP)
            case Verdict.LAYOUT_CONFLICT:
                return of(publication, CONFLICT)
        assert verdict is Verdict.DUPLICATE, "nothing is in flight"
        return self._fate(publication, entry)

    def _fate(self, publication: pb.Publication, entry: Logged) -> pb.Receipt:
        chunk = entry.chunk
        where = self.complete().get(entry.sequence_id)
        if chunk is not None:
            reached = self.marks.persisted_chunk
            same = [
                index
                for index, each in enumerate(self.log)
                if each is not None and each.chunk == chunk
            ]
            if same and (where is not None or (reached and reached.uuid == chunk.uuid)):
                return duplicate(publication, same[-1])
        if where is None:
            return overtaken(publication)
        (indexes,) = where
        if len(indexes) > 1:
            return elsewhere(publication, indexes[0], indexes[-1])
        if chunk is None:
            return duplicate(publication, indexes[0])
        return receipt(publication.request_id, DUPLICATE, fates=[fate_stored(indexes[0])])


def _logged(publication: pb.Publication) -> Logged:
    (entry,) = publication.entries
    metadata = entry.metadata
    chunk = None
    if metadata.num_chunks_from_msg:
        total = metadata.total_chunk_msg_size
        chunk = Chunk(metadata.uuid, metadata.chunk_id, metadata.num_chunks_from_msg, total)
    return Logged(metadata.sequence_id, chunk, entry.payload)


def _rival(sequence_id: int, uuid: str, chunk_bytes: int) -> list[Logged]:
    """The chunks of another attempt at a message."""
    body = payload_of(sequence_id)
    parts = [body[each : each + chunk_bytes] for each in range(0, len(body), chunk_bytes)]
    if len(parts) == 1:
        return [Logged(sequence_id, None, body)]
    return [
        Logged(sequence_id, Chunk(uuid, index, len(parts), len(body)), part)
        for index, part in enumerate(parts)
    ]


WINDOWS = st.sampled_from([(1, 10_000), (3, 700), (10_000, 10_000)])
CHUNK_BYTES = st.sampled_from([8, 8, 8, 3, 5, 30])
RARELY = [False, False, False, False, False, True]
MESSAGES = st.lists(st.sampled_from([1, 1, 1, 2, 0, -1, -4]), min_size=1, max_size=4)


class PublishingLarge(RuleBasedStateMachine):
    """Whatever the service does, every message gets one outcome, and it is correct."""

    def __init__(self) -> None:
        super().__init__()
        self.outbox = Outbox(encode)
        self.service = Service()
        self.connected = False
        self.chunk_bytes = 8
        self.window = (0, 0)
        self.handed_over: list[OutgoingMessage] = []
        self.fresh: set[int] = set()  # numbers of messages whose id was above every earlier one
        self.told: dict[int, Receipt | SeqgateError] = {}  # by number
        self.out: dict[int, pb.Publication] = {}
        self.phase: list[pb.Publication] = []  # since the stream opened or was resumed
        self.answered: list[pb.Receipt] = []
        self.held = self.must_resume = False
        self.rivals = 0

    # ---- the application

    @rule(steps=MESSAGES)
    def hand_over(self, steps: list[int]) -> None:
        for step in steps:
            highest = max((each.sequence_id for each in self.handed_over), default=-1)
            sequence_id = max(0, highest + step)
            number = len(self.handed_over)
            made = OutgoingMessage(sequence_id, payload_of(sequence_id), done=number)
            if sequence_id > highest:
                self.fresh.add(number)
            self.handed_over.append(made)
            if len(made.payload) > self.chunk_bytes:
                self.outbox.add_large(cut(made, self.chunk_bytes), number)
            else:
                add(self.outbox, [made], number)

    # ---- the producer

    @initialize(window=WINDOWS, chunk_bytes=CHUNK_BYTES)
    def connect_first(self, window: tuple[int, int], chunk_bytes: int) -> None:
        self._connect(window, chunk_bytes)

    @precondition(lambda self: not self.connected)
    @rule(window=WINDOWS, chunk_bytes=CHUNK_BYTES)
    def connect(self, window: tuple[int, int], chunk_bytes: int) -> None:
        self._connect(window, chunk_bytes)

    @precondition(lambda self: self.connected)
    @rule(
        bytes_max=st.sampled_from([1, 300, 10_000]),
        failures=st.lists(st.sampled_from([False, False, False, True]), max_size=8),
        which=st.lists(st.integers(0, 9), max_size=6),
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

    # ---- the wire, and the service's side

    @precondition(lambda self: self.answered)
    @rule(which=st.integers(0, 30))
    def receive_again(self, which: int) -> None:
        """A receipt of an earlier stream, or a repeated one: it has no effect unless its
        publication is in flight again."""
        told = self.answered[which % len(self.answered)]
        if told.request_id not in self.out:
            assert self.outbox.receive(told) == []

    @precondition(lambda self: self.connected and self.out)
    @rule(
        decided=st.integers(0, 8),
        trims=st.booleans(),
        gives_up=st.sampled_from([False] * 5 + [True]),
    )
    def disconnect(self, decided: int, trims: bool, gives_up: bool) -> None:
        """Some arrived publications are still decided, and their receipts lost."""
        for _ in range(min(decided, len(self.service.arriving))):
            self.service.decide()
        if trims:
            self.service.trim_unfinished()
        if gives_up:
            self._note(self.outbox.fail_all(SendTimeoutError("no receipt came in time")))
            assert self.outbox.pending == 0
        self.connected = False

    @precondition(lambda self: self.connected and self.outbox.resume_after_s is None)
    @rule(count=st.integers(1, 4), trims=st.booleans())
    def break_off(self, count: int, trims: bool) -> None:
        """Disconnect right after the next few are answered."""
        for _ in range(count):
            self._send(1)
            while self.service.arriving:
                self.service.decide()
            while self.service.receipts:
                self._receive(0)
        if trims:
            self.service.trim_unfinished()
        self.connected = False

    @precondition(lambda self: not self.connected and self.outbox.unresolved)
    @rule(chunk_bytes=CHUNK_BYTES, count=st.integers(1, 9))
    def publish_elsewhere(self, chunk_bytes: int, count: int) -> None:
        """An earlier run of the application still publishes the first message, and stores part of
        it."""
        self.rivals += 1
        sequence_id = self.outbox.unresolved[0].sequence_id
        for entry in _rival(sequence_id, f"rival {self.rivals}", chunk_bytes)[:count]:
            if self.service.store(entry) is not Verdict.NEW:
                return

    # ---- invariants

    @invariant()
    def what_is_known_is_known_once(self) -> None:
        waiting = [each.done for each in self.outbox.unresolved]
        assert waiting == sorted(set(waiting))
        assert not set(waiting) & self.told.keys()
        assert len(waiting) + len(self.told) == len(self.handed_over)
        oldest = self.outbox.oldest_added_at
        assert oldest == (waiting[0] if waiting else None)

    @invariant()
    def the_log_has_each_message_once(self) -> None:
        for sequence_id, copies in self.service.complete().items():
            (indexes,) = copies
            assert self.service.body(indexes) == payload_of(sequence_id)

    def teardown(self) -> None:
        """From here on nothing fails."""
        for _ in range(100 * len(self.handed_over) + 10):
            if not self.outbox.pending:
                break
            if not self.connected:
                self._connect((100, 10_000), 8)
            if self.outbox.resume_after_s is not None:
                self.resume()
            self._send(10_000)
            while self.service.arriving:
                self.service.decide()
            while self.service.receipts:
                self._receive(0)
        assert (self.outbox.pending, len(self.told)) == (0, len(self.handed_over))
        assert not self.connected or self.outbox.outstanding == 0
        self.the_log_has_each_message_once()

    # ---- internals

    def _connect(self, window: tuple[int, int], chunk_bytes: int) -> None:
        self.service.connect()
        self.outbox.opened(*window, chunk_bytes)
        self.connected, self.window, self.chunk_bytes = True, window, chunk_bytes
        self.out, self.phase = {}, []
        self.held = self.must_resume = False

    def _send(self, bytes_max: int) -> None:
        waiting = {each.sequence_id for each in self.outbox.unresolved}
        publications = self.outbox.to_send(bytes_max)
        if publications is None:
            return
        assert not self.held
        for publication in publications.publications:
            assert publication.request_id not in self.out
            assert publication.entries[0].metadata.sequence_id in waiting
            assert publication.resume == self.must_resume
            self.must_resume = False
            self.out[publication.request_id] = publication
            self._check_window()
            if self.phase:
                self._check_order(self.phase[-1], publication)
            self.phase.append(publication)
            self.service.arriving.append(publication)

    def _check_order(self, before: pb.Publication, publication: pb.Publication) -> None:
        """Chunks are sent in a row; the rest of a message is left out only once it has an
        outcome."""
        last, now = _logged(before).chunk, _logged(publication).chunk
        if now is None or (last is not None and last.uuid == now.uuid):
            return
        known = {uuid(each) for each in self.phase}
        assert uuid(publication) not in known, "something lies between two chunks"

    def _receive(self, which: int) -> None:
        told = self.service.receipts.pop(which)
        del self.out[told.request_id]
        self.held = self.held or told.status in (FAILED, SKIPPED, GAP, CONFLICT)
        self._note(self.outbox.receive(told))
        self.answered.append(told)

    def _check_window(self) -> None:
        """Measured as the service counts."""
        size_bytes = sum(
            each.metadata.ByteSize() + len(each.payload)
            for publication in self.out.values()
            for each in publication.entries
        )
        messages_max, bytes_max = self.window
        assert len(self.out) == 1 or (len(self.out) <= messages_max and size_bytes <= bytes_max)

    def _note(self, resolved: Sequence[Resolved]) -> None:
        for each in resolved:
            number, sequence_id = each.message.done, each.message.sequence_id
            assert number not in self.told
            self.told[number] = each.outcome
            if isinstance(each.outcome, Receipt):
                (indexes,) = self.service.complete()[sequence_id]
                where: MessageId = MessageId(1, indexes[-1])
                if len(indexes) > 1:
                    where = chunk_id(indexes[0], indexes[-1])
                assert (str(each.outcome.message_id), each.outcome.sequence_id) == (
                    str(where),
                    sequence_id,
                )
            elif isinstance(each.outcome, StaleSequenceIdError):
                assert sequence_id not in self.service.complete()
                assert sequence_id < self.service.marks.persisted
                assert number not in self.fresh, "overtaken by what was handed over after it"
            else:
                assert isinstance(each.outcome, SendTimeoutError)


TestPublishingLarge = PublishingLarge.TestCase
TestPublishingLarge.settings = settings(max_examples=150, stateful_step_count=25)

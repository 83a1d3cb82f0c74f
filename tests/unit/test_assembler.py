"""The messages that chunks form."""

import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import count

import google_crc32c
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seqgate.client._assembler import (
    Added,
    Assembled,
    Assembler,
    AssemblyLimits,
    Dropped,
    DropReason,
    Headless,
    Piece,
)
from seqgate.types import Position
from tests.support.depth import times

NOW_MS = 1_000_000


@dataclass(frozen=True)
class Attempt:
    """An attempt to publish a message, and the fields of its chunks."""

    uuid: str
    body: bytes = b"aabbccd"
    chunk_bytes: int = 2
    producer: str = "p"
    sequence_id: int = 7
    crc32c: int | None = None
    total_bytes: int | None = None  # a false size in the chunks

    @property
    def num_chunks(self) -> int:
        return -(-len(self.body) // self.chunk_bytes)

    def piece(self, chunk_id: int, position: Position) -> Piece:
        return Piece(
            position=position,
            producer=self.producer,
            sequence_id=self.sequence_id,
            uuid=self.uuid,
            chunk_id=chunk_id,
            num_chunks=self.num_chunks,
            total_bytes=len(self.body) if self.total_bytes is None else self.total_bytes,
            crc32c=self.crc32c,
            payload=self.body[chunk_id * self.chunk_bytes :][: self.chunk_bytes],
        )


Step = tuple[Attempt, int, int] | str
"""A chunk of an attempt and its entry id; or the uuid of an attempt of p to abort."""

A = Attempt("a")  # four chunks: aa bb cc d
B = Attempt("b", producer="q", body=b"xyz")  # two chunks: xy z
RETRY = Attempt("b")  # of the same message as A
NAMESAKE = replace(A, producer="q")
RECUT = replace(A, chunk_bytes=3)
LONGER = replace(A, total_bytes=8)
SHORTER = replace(A, total_bytes=5)
CHECKED = replace(A, crc32c=google_crc32c.value(A.body))
DAMAGED = replace(A, crc32c=google_crc32c.value(b"aabbccD"))


def places(positions: Iterable[Position]) -> str:
    return " ".join(str(position.entry_id) for position in positions)


def told(dropped: Dropped) -> str:
    return f"{dropped.reason.name} {dropped.uuid}: {places(dropped.positions)}"


def outcome(added: Added) -> list[str]:
    match added.outcome:
        case Assembled(_, _, uuid, body, positions):
            return [f"{uuid} = {body.decode()}: {places(positions)}"]
        case Headless(piece):
            return [f"{piece.uuid} ? {places([piece.position])}"]
        case None:
            return []


def take(assembler: Assembler, step: Step, now_ms: int = NOW_MS) -> list[str]:
    """The outcome of a step, in words."""
    if isinstance(step, str):
        aborted = assembler.abort("p", step)
        return [] if aborted is None else [told(aborted)]
    attempt, chunk_id, entry_id = step
    added = assembler.add(attempt.piece(chunk_id, Position(1, entry_id)), now_ms)
    return [*map(told, added.dropped), *outcome(added)]


def feed(assembler: Assembler, *steps: Step) -> list[str]:
    return [words for step in steps for words in take(assembler, step)]


def held(assembler: Assembler) -> list[Position]:
    return [each for context in assembler._contexts.values() for each in context.positions]


RULES: dict[str, tuple[list[Step], list[str], str]] = {
    "a message is complete with its last chunk": (
        [(A, 0, 1), (A, 1, 2), (A, 2, 4), (A, 3, 9)],
        ["a = aabbccd: 1 2 4 9"],
        "",
    ),
    "a message of one chunk is complete at once": (
        [(replace(A, chunk_bytes=7), 0, 1)],
        ["a = aabbccd: 1"],
        "",
    ),
    "interleaved messages complete in the order of their last chunks": (
        [(A, 0, 1), (A, 1, 2), (B, 0, 3), (B, 1, 4), (A, 2, 5), (A, 3, 6)],
        ["b = xyz: 3 4", "a = aabbccd: 1 2 5 6"],
        "",
    ),
    "two messages of one producer interleave": (
        [(A, 0, 1), (Attempt("c", sequence_id=8), 0, 2), (A, 1, 3)],
        [],
        "1 3 2",
    ),
    "a uuid belongs to its producer": (
        [(A, 0, 1), (NAMESAKE, 0, 2), (A, 1, 3), (NAMESAKE, 1, 4)],
        [],
        "1 3 2 4",
    ),
    "an abort drops the held chunks": (
        [(A, 0, 1), (A, 1, 2), (B, 0, 3), "a"],
        ["ABORTED a: 1 2"],
        "3",
    ),
    "an abort of an unknown attempt has no effect": (
        [(NAMESAKE, 0, 1), "a", "c"],
        [],
        "1",
    ),
    "another attempt at the message ends the previous one": (
        [(A, 0, 1), (A, 1, 2), (RETRY, 0, 3), (RETRY, 1, 4)],
        ["ABORTED a: 1 2"],
        "3 4",
    ),
    "a redelivered ended attempt does not end its successor": (
        [(A, 0, 1), (A, 1, 2), (RETRY, 0, 3), (A, 0, 1), (A, 1, 2), (RETRY, 1, 4)],
        ["ABORTED a: 1 2", "ABORTED a: 1", "HEADLESS a: 2"],
        "3 4",
    ),
    "a redelivered chunk 0 restarts silently": (
        [(A, 0, 1), (A, 1, 2), (A, 2, 3), (A, 0, 1), (A, 1, 2), (A, 2, 3), (A, 3, 4)],
        ["a = aabbccd: 1 2 3 4"],
        "",
    ),
    "chunk 0 at another position restarts the message": (
        [(A, 0, 1), (A, 1, 2), (A, 0, 3), (A, 1, 4), (A, 2, 5), (A, 3, 6)],
        ["RESTARTED a: 1 2", "a = aabbccd: 3 4 5 6"],
        "",
    ),
    "a restarted attempt may have another layout": (
        [(A, 0, 1), (A, 1, 2), (RECUT, 0, 3), (RECUT, 1, 4), (RECUT, 2, 5)],
        ["RESTARTED a: 1 2", "a = aabbccd: 3 4 5"],
        "",
    ),
    "a uuid reused for another message ends that message's attempt": (
        [(A, 0, 1), (Attempt("c", sequence_id=8), 0, 2), (replace(A, sequence_id=8), 0, 3)],
        ["RESTARTED a: 1", "ABORTED c: 2"],
        "3",
    ),
    "a replaced attempt ends no other one": (
        [(A, 0, 1), (Attempt("c", sequence_id=8), 0, 3), (replace(A, sequence_id=8), 0, 2)],
        ["ABORTED a: 2"],
        "1 3",
    ),
    "redelivered chunks from before a restart do not undo it": (
        [(A, 0, 1), (A, 1, 2), (RECUT, 0, 3), (A, 0, 1), (A, 1, 2), (RECUT, 1, 4), (RECUT, 2, 5)],
        ["RESTARTED a: 1 2", "RESTARTED a: 1", "RESTARTED a: 2", "a = aabbccd: 3 4 5"],
        "",
    ),
    "a held chunk at another position is a duplicate": (
        [(A, 0, 1), (A, 1, 2), (A, 2, 3), (A, 1, 4), (A, 2, 5), (A, 3, 6)],
        ["DUPLICATE a: 4", "DUPLICATE a: 5", "a = aabbccd: 1 2 3 6"],
        "",
    ),
    "a held chunk at its own position is a redelivery": (
        [(A, 0, 1), (A, 1, 2), (A, 2, 3), (A, 1, 2), (A, 2, 3), (A, 3, 6)],
        ["a = aabbccd: 1 2 3 6"],
        "",
    ),
    "after a gap all chunks are dropped, and the rest is headless": (
        [(A, 0, 1), (B, 0, 2), (A, 2, 3), (A, 2, 4), (A, 3, 5)],
        ["GAP a: 1 3", "HEADLESS a: 4", "a ? 5"],
        "2",
    ),
    "a last chunk after a gap is dropped with the others": (
        [(A, 0, 1), (A, 1, 2), (A, 3, 3)],
        ["GAP a: 1 2 3"],
        "",
    ),
    "another number of chunks is a gap": (
        [(A, 0, 1), (A, 1, 2), (replace(RECUT, total_bytes=7), 2, 3)],
        ["GAP a: 1 2 3"],
        "",
    ),
    "another total is a gap, even for a held chunk": (
        [(A, 0, 1), (A, 1, 2), (LONGER, 1, 3)],
        ["GAP a: 1 2 3"],
        "",
    ),
    "another checksum is a gap": ([(A, 0, 1), (CHECKED, 1, 2)], ["GAP a: 1 2"], ""),
    "another sequence id is a gap": (
        [(A, 0, 1), (replace(A, sequence_id=8), 1, 2), (RETRY, 0, 3)],
        ["GAP a: 1 2"],
        "3",
    ),
    "without a head only the last chunk causes a fetch": (
        [(A, 1, 1), (A, 2, 2), (A, 3, 3)],
        ["HEADLESS a: 1", "HEADLESS a: 2", "a ? 3"],
        "",
    ),
    "a body that matches its checksum is a message": (
        [(CHECKED, 0, 1), (CHECKED, 1, 2), (CHECKED, 2, 3), (CHECKED, 3, 4)],
        ["a = aabbccd: 1 2 3 4"],
        "",
    ),
    "a body that does not match its checksum is corrupt": (
        [(DAMAGED, 0, 1), (DAMAGED, 1, 2), (DAMAGED, 2, 3), (DAMAGED, 3, 4)],
        ["CORRUPT a: 1 2 3 4"],
        "",
    ),
    "a body shorter than declared is corrupt": (
        [(LONGER, 0, 1), (LONGER, 1, 2), (LONGER, 2, 3), (LONGER, 3, 4)],
        ["CORRUPT a: 1 2 3 4"],
        "",
    ),
    "a body is corrupt once it is longer than declared": (
        [(SHORTER, 0, 1), (SHORTER, 1, 2), (SHORTER, 2, 3), (SHORTER, 3, 4)],
        ["CORRUPT a: 1 2 3", "a ? 4"],
        "",
    ),
}


@pytest.mark.parametrize(("steps", "words", "left"), RULES.values(), ids=RULES)
def test_chunks_are_assembled_by_the_rules(steps: list[Step], words: list[str], left: str) -> None:
    assembler = Assembler(AssemblyLimits())
    assert feed(assembler, *steps) == words
    assert places(held(assembler)) == left


def test_dropped_messages_name_their_producer_and_count_chunks() -> None:
    assembler = Assembler(AssemblyLimits())
    feed(assembler, (A, 0, 1), (A, 1, 2), (A, 1, 3), (A, 1, 4))
    assert assembler.abort("p", "a") == Dropped(
        DropReason.ABORTED, "p", 7, "a", (Position(1, 1), Position(1, 2))
    )
    assert assembler.counts == {DropReason.ABORTED: 2, DropReason.DUPLICATE: 2}


def test_an_entry_that_comes_late_does_not_end_what_began_after_it() -> None:
    """A consumer gets the entries of other keys late, and any entry again."""
    assembler = Assembler(AssemblyLimits())
    feed(assembler, (A, 0, 5))
    assert assembler.abort("p", "a", Position(1, 4)) is None
    assert places(held(assembler)) != ""
    assert assembler.abort("p", "a", Position(1, 6)) is not None
    assert places(held(assembler)) == ""


def test_a_message_names_its_producer() -> None:
    assembler = Assembler(AssemblyLimits())
    feed(assembler, (B, 0, 1))
    added = assembler.add(B.piece(1, Position(2, 0)), NOW_MS)
    assert added == Added((), Assembled("q", 7, "b", b"xyz", (Position(1, 1), Position(2, 0))))


def test_a_last_chunk_without_a_head_is_returned_and_not_counted() -> None:
    assembler = Assembler(AssemblyLimits())
    piece = A.piece(3, Position(1, 1))
    added = assembler.add(piece, NOW_MS)
    assert added == Added((), Headless(piece))
    assert not assembler.counts


def test_messages_and_bytes_held_are_counted() -> None:
    assembler = Assembler(AssemblyLimits())
    assert (assembler.messages, assembler.bytes_held) == (0, 0)
    feed(assembler, (A, 0, 3), (B, 0, 4), (A, 1, 5))
    assert (assembler.messages, assembler.bytes_held) == (2, 6)
    feed(assembler, "a")
    assert (assembler.messages, assembler.bytes_held) == (1, 2)


def test_clearing_drops_everything_uncounted() -> None:
    assembler = Assembler(AssemblyLimits())
    feed(assembler, (A, 0, 1), (B, 0, 2))
    assembler.clear()
    assert (assembler.messages, assembler.bytes_held) == (0, 0)
    assert not assembler.counts
    assert feed(assembler, (RETRY, 0, 3), (A, 1, 2)) == ["HEADLESS a: 2"]


# Limits.


def message(name: int, body: bytes = b"aabb") -> Attempt:
    return Attempt(str(name), body, sequence_id=name)


def test_the_oldest_message_is_evicted_beyond_the_message_limit() -> None:
    assembler = Assembler(AssemblyLimits(messages_max=2))
    assert feed(assembler, (message(0), 0, 1), (message(1), 0, 2)) == []
    assert feed(assembler, (message(2), 0, 3)) == ["EVICTED 0: 1"]
    assert feed(assembler, (message(0), 1, 4)) == ["0 ? 4"]


def test_a_restarted_message_is_the_newest() -> None:
    assembler = Assembler(AssemblyLimits(messages_max=2))
    feed(assembler, (message(0), 0, 1), (message(1), 0, 2), (message(0), 0, 3))
    assert feed(assembler, (message(2), 0, 4)) == ["EVICTED 1: 2"]


def test_every_end_of_a_message_frees_its_memory() -> None:
    """Pulsar's count of incomplete messages drifts, and messages are dropped too early."""
    assembler = Assembler(AssemblyLimits(messages_max=2))
    feed(assembler, (B, 0, 0))
    for at in range(1, 100, 10):
        feed(assembler, (A, 0, at), (A, 2, at + 1))
        feed(assembler, (A, 0, at + 2), (A, 0, at + 3), (RETRY, 0, at + 4), "b")
        feed(assembler, (SHORTER, 0, at + 5), (SHORTER, 1, at + 6), (SHORTER, 2, at + 7))
        feed(assembler, (message(0), 0, at + 8), (message(0), 1, at + 9))
    ends = {DropReason.GAP, DropReason.RESTARTED, DropReason.ABORTED, DropReason.CORRUPT}
    assert assembler.counts.keys() == ends
    assert feed(assembler, (B, 1, 101)) == ["b = xyz: 0 101"]


def test_a_message_that_is_not_held_evicts_none() -> None:
    assembler = Assembler(AssemblyLimits(messages_max=1, bytes_max=4, message_bytes_max=4))
    feed(assembler, (message(0), 0, 1))
    assert feed(assembler, (message(1, b"x" * 5), 0, 2)) == ["TOO_LARGE 1: 2"]
    assert feed(assembler, (replace(message(2), chunk_bytes=4), 0, 3)) == ["2 = aabb: 3"]
    assert feed(assembler, (replace(message(3), total_bytes=1), 0, 4)) == ["CORRUPT 3: 4"]
    assert feed(assembler, (message(0), 1, 5)) == ["0 = aabb: 1 5"]


def test_the_oldest_messages_are_evicted_until_the_bytes_fit() -> None:
    assembler = Assembler(AssemblyLimits(bytes_max=8, message_bytes_max=8))
    wide = replace(message(3, b"x" * 8), chunk_bytes=5)
    feed(assembler, (message(0), 0, 1), (message(1), 0, 2), (message(2), 0, 3))
    assert assembler.bytes_held == 6
    assert feed(assembler, (wide, 0, 4)) == ["EVICTED 0: 1", "EVICTED 1: 2"]
    assert assembler.bytes_held == 7


def test_bytes_up_to_the_limit_are_held() -> None:
    assembler = Assembler(AssemblyLimits(bytes_max=6, message_bytes_max=6))
    six = [message(name, b"aabbcc") for name in range(2)]
    assert feed(assembler, (six[0], 0, 1), (six[1], 0, 2), (six[0], 1, 3)) == []
    assert feed(assembler, (six[1], 1, 4)) == ["EVICTED 0: 1 3"]


def test_the_oldest_is_evicted_even_while_it_grows() -> None:
    assembler = Assembler(AssemblyLimits(bytes_max=6, message_bytes_max=6))
    six = [message(name, b"aabbcc") for name in range(2)]
    feed(assembler, (six[0], 0, 1), (six[1], 0, 2), (six[1], 1, 3))
    assert feed(assembler, (six[0], 1, 4)) == ["EVICTED 0: 1 4"]
    assert feed(assembler, (six[1], 2, 5)) == ["1 = aabbcc: 2 3 5"]


def test_a_last_chunk_evicts_none() -> None:
    assembler = Assembler(AssemblyLimits(bytes_max=4, message_bytes_max=4))
    feed(assembler, (message(0), 0, 1), (message(1), 0, 2))
    assert feed(assembler, (message(1), 1, 3)) == ["1 = aabb: 2 3"]
    assert feed(assembler, (message(0), 1, 4)) == ["0 = aabb: 1 4"]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"aabb", ["a = aabb: 0 1"]),
        (b"aabbc", ["TOO_LARGE a: 0", "TOO_LARGE a: 1", "TOO_LARGE a: 2"]),
    ],
)
@pytest.mark.parametrize("limit", [{"message_bytes_max": 4}, {"chunks_max": 2}])
def test_every_chunk_of_a_message_above_the_limit_is_refused(
    body: bytes, words: list[str], limit: dict[str, int]
) -> None:
    assembler = Assembler(AssemblyLimits(**limit))
    attempt = replace(A, body=body)
    chunks: list[Step] = [(attempt, each, each) for each in range(attempt.num_chunks)]
    assert feed(assembler, *chunks) == words
    assert assembler.messages == 0
    assert not assembler._by_message


def test_an_attempt_above_the_limit_still_ends_its_predecessor() -> None:
    assembler = Assembler(AssemblyLimits(message_bytes_max=7))
    feed(assembler, (A, 0, 1))
    huge = replace(RETRY, total_bytes=2**31 - 1)
    assert feed(assembler, (huge, 0, 2)) == ["ABORTED a: 1", "TOO_LARGE b: 2"]


@pytest.mark.parametrize(
    ("limit", "least", "most"),
    [
        ("messages_max", 1, 1_000),
        ("bytes_max", 512 * 1024 * 1024, None),  # at least the largest size of one message
        ("chunks_max", 1, 2**31 - 1),
        ("message_bytes_max", 1, 512 * 1024 * 1024),
        ("expiry_ms", 0, None),
    ],
)
def test_limits_have_bounds(limit: str, least: int, most: int | None) -> None:
    AssemblyLimits(**{limit: least})
    with pytest.raises(ValueError, match=r"_max must be|expiry_ms must be"):
        AssemblyLimits(**{limit: least - 1})
    if most is not None:
        AssemblyLimits(**{limit: most})
        with pytest.raises(ValueError, match=limit):
            AssemblyLimits(**{limit: most + 1})


def test_the_byte_limit_is_at_least_one() -> None:
    with pytest.raises(ValueError, match="bytes_max must be at least 1"):
        AssemblyLimits(bytes_max=0, message_bytes_max=0)


# Expiry.


def test_a_message_expires_with_the_age_of_its_chunk_0() -> None:
    assembler = Assembler(AssemblyLimits(expiry_ms=10))
    take(assembler, (A, 0, 1), now_ms=100)
    take(assembler, (B, 0, 2), now_ms=105)
    take(assembler, (A, 1, 3), now_ms=110)
    assert assembler.expire(110) == ()
    assert [*map(told, assembler.expire(111))] == ["EXPIRED a: 1 3"]
    assert [*map(told, assembler.expire(1_000))] == ["EXPIRED b: 2"]
    assert assembler.counts == {DropReason.EXPIRED: 3}


def test_adding_expires_old_messages_first() -> None:
    assembler = Assembler(AssemblyLimits(expiry_ms=10))
    take(assembler, (A, 0, 1), now_ms=100)
    take(assembler, (B, 0, 2), now_ms=105)
    assert take(assembler, (B, 1, 3), now_ms=115) == ["EXPIRED a: 1", "b = xyz: 2 3"]
    take(assembler, (B, 0, 4), now_ms=200)
    assert take(assembler, (B, 1, 5), now_ms=211) == ["EXPIRED b: 4", "b ? 5"]


@pytest.mark.parametrize("entry_id", [1, 4])
def test_a_restarted_message_has_its_full_time(entry_id: int) -> None:
    assembler = Assembler(AssemblyLimits(expiry_ms=10))
    take(assembler, (A, 0, 1), now_ms=100)
    take(assembler, (B, 0, 2), now_ms=101)
    take(assembler, (A, 0, entry_id), now_ms=109)
    assert [*map(told, assembler.expire(115))] == ["EXPIRED b: 2"]


def test_without_expiry_messages_are_held_forever() -> None:
    assembler = Assembler(AssemblyLimits(expiry_ms=0))
    take(assembler, (A, 0, 1), now_ms=0)
    assert assembler.expire(2**62) == ()


def test_messages_still_expire_after_100_000_others_and_nothing_grows() -> None:
    """In Pulsar's Java client expiry ends with the first completed message, and the queue of
    expiring messages grows forever."""
    assembler = Assembler(AssemblyLimits(expiry_ms=10))
    first, last = (A.piece(each, Position(1, each)) for each in (0, 3))
    pieces = [replace(A, body=b"aab").piece(each, Position(1, each)) for each in (0, 1)]
    sizes = set[int]()
    for name in range(100_000):
        for piece in pieces:
            assembler.add(piece._replace(uuid=str(name), sequence_id=name), now_ms=name)
        if name % 1_000 == 999:
            assembler.add(first._replace(uuid="lost", sequence_id=-1), now_ms=name)
            sizes.add(sys.getsizeof(assembler._contexts) + sys.getsizeof(assembler._by_message))
    assert len(assembler.expire(200_000)) == 1
    assert assembler.counts == {DropReason.EXPIRED: 100}
    assert (assembler.messages, len(assembler._by_message)) == (0, 0)
    assert max(sizes) < 2_000
    assert isinstance(assembler.add(last, now_ms=200_000).outcome, Headless)


# Any log.


@dataclass(frozen=True)
class Start:
    """One start of an attempt; a restart has the same uuid and its own chunks."""

    attempt: Attempt
    number: int


@dataclass(frozen=True)
class Chunk:
    """An entry; the same value again is a redelivery. A copy is an entry of its own."""

    start: Start
    chunk_id: int
    copy: int = 0


@dataclass(frozen=True)
class Abort:
    attempt: Attempt


Story = list[Chunk | Abort]


@dataclass(frozen=True)
class Log:
    """Entries, and the messages that they form, in order, if no limit is reached."""

    entries: Story
    messages: list[Attempt]


@st.composite
def attempts(draw: st.DrawFn, sequence_id: int, number: int, body: bytes) -> Attempt:
    return Attempt(
        f"{sequence_id}-{number}",
        body,
        draw(st.integers(1, len(body) - 1)),
        "pq"[sequence_id % 2],
        sequence_id,
        draw(st.sampled_from([None, google_crc32c.value(body)])),
    )


@st.composite
def told_again(draw: st.DrawFn, story: Story, start: Start, chunk_id: int) -> Story:
    """Entries between two chunks that do not affect the message."""
    stored = [each for each in story if isinstance(each, Chunk) and not each.copy]
    own = [each for each in stored if each.start == start and each.chunk_id]
    earlier = [each for each in stored if each.start != start]
    again: Story = []
    match draw(st.sampled_from(["", "", "", "duplicate", "redelivery", "restart", "late"])):
        case "duplicate" if own:
            again = [replace(draw(st.sampled_from(own)), copy=len(story))]
        case "redelivery" if own:
            again = [draw(st.sampled_from(own))]
        case "restart":
            again = [Chunk(start, each) for each in range(chunk_id + 1)]
        case "late" if earlier:
            again = [draw(st.sampled_from(earlier))]
    return again


@st.composite
def stories(draw: st.DrawFn, sequence_id: int) -> Story:
    """The entries of one message: some failed starts, and one that may be completed."""
    body = draw(st.binary(min_size=2, max_size=6))
    story: Story = []
    attempt = draw(attempts(sequence_id, 0, body))
    for number, failure in enumerate(
        draw(st.lists(st.sampled_from(["overtaken", "aborted", "restarted"]), max_size=2))
    ):
        start = Start(attempt, number)
        for chunk_id in range(draw(st.integers(1, attempt.num_chunks - 1))):
            story.append(Chunk(start, chunk_id))
            story += draw(told_again(story, start, chunk_id))
        if failure == "aborted":
            story.append(Abort(attempt))
        successor = draw(attempts(sequence_id, number + 1, body))
        attempt = replace(successor, uuid=attempt.uuid) if failure == "restarted" else successor
    return story + draw(last_starts(story, Start(attempt, -1)))


@st.composite
def last_starts(draw: st.DrawFn, before: Story, start: Start) -> Story:
    chunks = range(start.attempt.num_chunks)
    lost = draw(st.one_of(st.none(), st.integers(1, chunks[-1])))
    if lost is not None:
        return [Chunk(start, each) for each in chunks if each != lost]
    story: Story = []
    for chunk_id in chunks[:-1]:
        story.append(Chunk(start, chunk_id))
        story += draw(told_again(before + story, start, chunk_id))
    return [*story, Chunk(start, chunks[-1])]


@st.composite
def logs(draw: st.DrawFn) -> Log:
    """Several messages, their stories interleaved arbitrarily."""
    parts = [draw(stories(sequence_id)) for sequence_id in range(draw(st.integers(1, 5)))]
    turns = draw(st.permutations([turn for turn, part in enumerate(parts) for _ in part]))
    remaining = [iter(part) for part in parts]
    entries = [next(remaining[turn]) for turn in turns]
    messages = [
        entry.start.attempt
        for entry in entries
        if isinstance(entry, Chunk)
        and entry.chunk_id == entry.start.attempt.num_chunks - 1
        and all(Chunk(entry.start, each) in entries for each in range(entry.chunk_id))
    ]
    return Log(entries, messages)


class Auditor:
    """Feeds a log to an assembler, and accounts for each position after each step."""

    def __init__(self, limits: AssemblyLimits) -> None:
        self.limits = limits
        self.assembler = Assembler(limits)
        self.messages: list[Assembled] = []
        self._entry_ids = count()
        self._positions: dict[Chunk, Position] = {}
        self._sizes: dict[Position, int] = {}
        self._inside: set[Position] = set()  # added and not returned
        self._dropped = Counter[DropReason]()

    def step(self, entry: Chunk | Abort, now_ms: int) -> None:
        self._account_drops(*self.assembler.expire(now_ms))
        if isinstance(entry, Abort):
            aborted = self.assembler.abort(entry.attempt.producer, entry.attempt.uuid)
            self._account_drops(*[aborted] if aborted else [])
        else:
            self._add(entry, now_ms)
        self._check()

    def _add(self, entry: Chunk, now_ms: int) -> None:
        position = self._position_of(entry)
        piece = entry.start.attempt.piece(entry.chunk_id, position)
        self._sizes[position] = len(piece.payload)
        context = self.assembler._contexts.get(piece.attempt)
        if context is not None and context.first.position == position:
            self._inside -= {*context.positions}  # it starts over: all are delivered again
        self._inside.add(position)

        added = self.assembler.add(piece, now_ms)
        self._account_drops(*added.dropped)
        if isinstance(added.outcome, Assembled):
            self.messages.append(added.outcome)
            self._account(added.outcome.positions)
        if isinstance(added.outcome, Headless):
            self._account([added.outcome.piece.position])

    def _position_of(self, entry: Chunk) -> Position:
        if entry not in self._positions:
            self._positions[entry] = Position(1, next(self._entry_ids))
        return self._positions[entry]

    def _account_drops(self, *drops: Dropped) -> None:
        for dropped in drops:
            self._account(dropped.positions)
            self._dropped[dropped.reason] += len(dropped.positions)
        evicted = [each for each in drops if each.reason is DropReason.EVICTED]
        if evicted:
            spared_bytes = sum(self._sizes[each] for each in evicted[-1].positions)
            assert (
                self.assembler.messages == self.limits.messages_max
                or self.assembler.bytes_held + spared_bytes > self.limits.bytes_max
            )

    def _account(self, positions: Iterable[Position]) -> None:
        for position in positions:
            self._inside.remove(position)  # fails if it is returned twice

    def _check(self) -> None:
        assembler = self.assembler
        assert sorted(held(assembler)) == sorted(self._inside)
        assert assembler.bytes_held == sum(self._sizes[each] for each in self._inside)
        assert assembler.bytes_held <= self.limits.bytes_max
        assert assembler.messages == len(assembler._by_message) <= self.limits.messages_max
        assert assembler.counts == self._dropped


@given(logs())
@settings(deadline=None, max_examples=times(quick=50, full=150))
def test_every_message_is_returned_once_in_the_order_of_completion(log: Log) -> None:
    auditor = Auditor(AssemblyLimits())
    for entry in log.entries:
        auditor.step(entry, NOW_MS)
    assert [(each.uuid, each.body) for each in auditor.messages] == [
        (attempt.uuid, attempt.body) for attempt in log.messages
    ]
    final = {DropReason.ABORTED, DropReason.RESTARTED, DropReason.DUPLICATE}
    assert auditor.assembler.counts.keys() <= final | {DropReason.HEADLESS, DropReason.GAP}


@given(logs(), st.data())
@settings(deadline=None, max_examples=times(quick=50, full=150))
def test_every_chunk_is_accounted_for_under_the_smallest_limits(
    log: Log, data: st.DataObject
) -> None:
    bytes_max = data.draw(st.integers(1, 10))
    auditor = Auditor(
        AssemblyLimits(
            messages_max=data.draw(st.integers(1, 4)),
            bytes_max=bytes_max,
            chunks_max=data.draw(st.integers(2, 6)),
            message_bytes_max=data.draw(st.integers(1, bytes_max)),
            expiry_ms=data.draw(st.sampled_from([0, 5, 20])),
        )
    )
    now_ms = NOW_MS
    for entry in log.entries:
        now_ms += data.draw(st.integers(0, 2))
        auditor.step(entry, now_ms)
    whole = {(attempt.uuid, attempt.body) for attempt in log.messages}
    messages = [(each.uuid, each.body) for each in auditor.messages]
    assert len(messages) == len({*messages})
    assert {*messages} <= whole

"""The state of a subscription's dead letters: services/dispatcher/letters/graveyard.py."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from seqgate.api.common.v1 import common_pb2
from seqgate.api.entry.v1 import entry_pb2
from seqgate.api.ledger.v1 import ledger_pb2
from seqgate.services.dispatcher.adapters.letters import published
from seqgate.services.dispatcher.adapters.memory import MemoryCursors
from seqgate.services.dispatcher.core.effects import (
    AfterDeadLetter,
    Because,
    DeadLetter,
    FailedDelivery,
    How,
    LargeLetter,
    Options,
    Why,
)
from seqgate.services.dispatcher.core.positions import Acknowledged, runs_of
from seqgate.services.dispatcher.core.settling import Gaps, remembered
from seqgate.services.dispatcher.cursor.tenure import Tenure
from seqgate.services.dispatcher.letters.graveyard import (
    BURIED_MAX,
    GENERATIONS_MAX,
    REFUSALS_MIN,
    Graveyard,
)
from seqgate.services.dispatcher.ports import GENERATION, LedgerUnavailable, Letter, LetterRefused
from seqgate.services.errors import DomainError
from seqgate.types import Position, TopicName

TOPIC = TopicName.parse("test/dead/topic")
DLQ = TopicName.parse("test/dead/topic-s-DLQ")


class Everything:
    """A log with every entry, and a dead letter topic that accepts every letter except those in
    `fails`; None: a higher sequence id was published under its name."""

    now_ms = 0
    messages = 0  # in each entry

    def __init__(self) -> None:
        self.put_: list[Position] = []
        self.letters: list[Letter] = []
        self.properties: dict[str, str] = {}
        self.fails: dict[Position, DomainError | None] = {}

    async def fetch(
        self, topic: TopicName, positions: Iterable[Position]
    ) -> Sequence[ledger_pb2.StoredEntry]:
        return [
            ledger_pb2.StoredEntry(
                position=common_pb2.Position(ledger_id=each[0], entry_id=each[1]),
                metadata=entry_pb2.EntryMetadata(
                    properties=self.properties, num_messages_in_batch=self.messages
                ),
            )
            for each in positions
        ]

    async def put(self, letter: Letter) -> bool:
        at = letter.entry.position
        position = Position(at.ledger_id, at.entry_id)
        if position in self.fails:
            error = self.fails[position]
            if error is None:
                return False
            raise error
        self.letters.append(letter)
        self.put_.append(Position(at.ledger_id, at.entry_id))
        return True


async def opened(
    cursors: MemoryCursors, everything: Any, left: Mapping[Position, int] = {}
) -> Graveyard:
    """The graveyard of the current owner."""
    lease = await cursors.acquire(TOPIC, "s", "me", 60_000)
    tenure = Tenure(cursors, TOPIC, "s", "me", lease.epoch, 60_000)
    graveyard = Graveyard(
        tenure, everything, everything, lambda: everything.now_ms, refused_max_s=60
    )
    await graveyard.load(await cursors.get(TOPIC, "s"), Acknowledged(None), left=left)
    return graveyard


async def bury(graveyard: Graveyard, count: int) -> list[Position]:
    """Dead-letter this many entries, one after the other."""
    positions = [Position(1, entry_id) for entry_id in range(count)]
    for position in positions:
        await graveyard.bury(DeadLetter(position, b"k", 1, AfterDeadLetter.CONTINUE))
        graveyard.acknowledged(runs_of([position]))
        await graveyard.tidy()
    return positions


async def test_the_places_of_the_latest_dead_letters_are_remembered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert BURIED_MAX == 10_000
    monkeypatch.setattr("seqgate.services.dispatcher.letters.graveyard.BURIED_MAX", 3)
    cursors, everything = MemoryCursors(), Everything()
    await cursors.create(TOPIC, "s", None, {})
    graveyard = await opened(cursors, everything)
    positions = await bury(graveyard, 5)
    assert everything.put_ == positions
    assert graveyard.buried == dict.fromkeys(positions[-3:], DLQ)


async def test_a_takeover_forgets_the_places_of_dead_letters() -> None:
    cursors, everything = MemoryCursors(), Everything()
    await cursors.create(TOPIC, "s", None, {})
    before = await opened(cursors, everything)
    positions = await bury(before, 2)
    assert list(before.buried) == positions
    assert not (await opened(cursors, everything)).buried


FIRST, SECOND, THIRD = Position(1, 0), Position(1, 1), Position(1, 2)
REFUSED = LetterRefused("no", retry_after_s=30)
AWAY = LedgerUnavailable("away", retry_after_s=1)


def letter(position: Position, key: bytes = b"k") -> DeadLetter:
    return DeadLetter(position, key, 1, AfterDeadLetter.HOLD)


@pytest.mark.parametrize("error", [REFUSED, AWAY])
async def test_a_takeover_does_not_wait_for_the_dead_letter_topic(
    error: DomainError,
) -> None:
    cursors, everything = MemoryCursors(), Everything()
    await cursors.create(TOPIC, "s", None, {})
    everything.fails = {FIRST: error}
    before = await opened(cursors, everything)
    with pytest.raises(type(error)):
        await before.bury(letter(FIRST))
    after = await opened(cursors, everything)
    assert after.begun == {FIRST}
    assert everything.put_ == []
    everything.fails = {}
    assert await after.bury(letter(FIRST)) is None
    assert [each.number for each in everything.letters] == [1_000_000]


@pytest.mark.parametrize("error", [REFUSED, AWAY])
async def test_a_failing_dead_letter_does_not_block_others(error: DomainError) -> None:
    cursors, everything = MemoryCursors(), Everything()
    await cursors.create(TOPIC, "s", None, {})
    graveyard = await opened(cursors, everything)
    everything.fails = {FIRST: error}
    for _ in range(2):
        with pytest.raises(type(error)):
            await graveyard.bury(letter(FIRST))
    assert await graveyard.bury(letter(SECOND)) is None
    assert everything.put_ == [SECOND]
    everything.fails = {}
    assert await graveyard.bury(letter(FIRST)) is None


async def test_a_dead_letter_refused_for_too_long_is_abandoned() -> None:
    cursors, everything = MemoryCursors(), Everything()
    await cursors.create(TOPIC, "s", None, {})
    everything.fails = {FIRST: REFUSED}
    graveyard = await opened(cursors, everything)
    with pytest.raises(LetterRefused):
        await graveyard.bury(letter(FIRST))
    graveyard = await opened(cursors, everything)  # the time of the first refusal is remembered
    everything.now_ms = 60_000
    for _ in range(REFUSALS_MIN - 1):
        with pytest.raises(LetterRefused):
            await graveyard.bury(letter(FIRST))
    assert await graveyard.bury(letter(FIRST)) is Because.LETTER_REFUSED


async def test_a_new_owner_completes_a_dead_letter_with_all_that_is_known_of_it() -> None:
    """It publishes the letters that another instance numbered along with its own."""
    cursors, everything = MemoryCursors(), Everything()
    await cursors.create(TOPIC, "s", None, {})
    failed = FailedDelivery(How.TIMED_OUT, 5, "c" * 400)
    dead = letter(FIRST)
    before = await opened(cursors, everything)
    everything.fails = {FIRST: AWAY}
    with pytest.raises(LedgerUnavailable):
        await before.bury(replace(dead, why=Why.GIVEN_UP, failures=(failed,) * 10))
    everything.fails, everything.messages = {}, 3
    after = await opened(cursors, everything, left={FIRST: 0b101})
    await after.bury(letter(SECOND, b"other"))
    first, second = everything.letters
    assert (first.why, first.acknowledged) == (Why.GIVEN_UP, 0b010)
    assert set(first.failures) == {failed}
    assert 1 < len(first.failures) < 10  # as many as fit into a property
    assert second.acknowledged == 0
    after.acknowledged(runs_of([FIRST, SECOND]))
    await after.tidy()
    kept = (await cursors.get(TOPIC, "s")).properties
    assert not [each for each in kept if "about" in each or "dead.letter" in each]


def chunk(position: Position, *, is_last: bool = False) -> DeadLetter:
    """A chunk of the large message that begins at FIRST."""
    return replace(letter(position), large=LargeLetter("attempt", FIRST, is_last))


async def large_records(cursors: MemoryCursors) -> list[str]:
    kept = (await cursors.get(TOPIC, "s")).properties
    return [each for each in kept if "dead.large" in each]


async def test_the_next_owner_completes_a_large_letter_where_it_began() -> None:
    """With another dead letter topic and producer name since, and although a reset moved the
    subscription into the message."""
    cursors, everything = MemoryCursors(), Everything()
    await cursors.create(TOPIC, "s", None, {})
    before = await opened(cursors, everything)
    everything.fails = {FIRST: None}  # another publisher uses the name
    with pytest.raises(LedgerUnavailable):
        await before.bury(chunk(FIRST))
    everything.fails = {}
    await before.bury(chunk(FIRST))
    before.acknowledged(runs_of([FIRST]))
    await before.tidy()
    lease = await cursors.acquire(TOPIC, "s", "me", 60_000)
    await cursors.reset(TOPIC, "s", FIRST, lease.epoch)
    after = await opened(cursors, everything)
    await after.start_over()
    assert after.large == {"attempt": FIRST}
    after.dead_letter_topic = TopicName.parse("test/dead/other")
    await after.bury(chunk(SECOND))
    await after.bury(letter(Position(1, 7), b"other"))
    await after.bury(chunk(THIRD, is_last=True))
    first, second, other, third = everything.letters
    assert {(each.topic, each.line, each.round) for each in (second, third)} == {
        (first.topic, first.line, first.round)
    }
    assert first.line
    assert (other.topic, other.line) == (after.dead_letter_topic, "")
    assert await large_records(cursors)
    after.acknowledged(runs_of([SECOND, THIRD]))
    await after.tidy()
    assert not await large_records(cursors)
    assert not after.large


async def test_a_large_letter_whose_producer_name_is_taken_gets_another_name() -> None:
    cursors, everything = MemoryCursors(), Everything()
    await cursors.create(TOPIC, "s", None, {})
    await (await opened(cursors, everything)).bury(chunk(FIRST))
    graveyard = await opened(cursors, everything)
    everything.fails = {SECOND: None}
    with pytest.raises(LedgerUnavailable):
        await graveyard.bury(chunk(SECOND))
    everything.fails = {}
    await graveyard.bury(chunk(SECOND))
    assert everything.letters[-1].line


async def test_a_reset_before_a_large_message_forgets_its_letter_unless_a_chunk_is_on_its_way() -> (
    None
):
    cursors, everything = MemoryCursors(), Everything()
    await cursors.create(TOPIC, "s", None, {})
    graveyard = await opened(cursors, everything)
    await graveyard.bury(chunk(FIRST))
    await graveyard.start_over()
    assert await large_records(cursors)
    graveyard.acknowledged(runs_of([FIRST]))
    await graveyard.tidy()
    await graveyard.start_over()
    assert not await large_records(cursors)


async def test_the_large_letters_that_wait_longest_for_their_next_chunk_are_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("seqgate.services.dispatcher.letters.graveyard.LARGE_MAX", 2)
    cursors, everything = MemoryCursors(), Everything()
    await cursors.create(TOPIC, "s", None, {})
    graveyard = await opened(cursors, everything)
    for number in (0, 10, 0, 20):
        first = Position(1, number)
        large = LargeLetter(f"{number}", first, is_last=False)
        position = Position(1, len(everything.letters))
        await graveyard.bury(replace(letter(position), large=large))
    assert set(graveyard.large) == {"0", "20"}
    assert set((await opened(cursors, everything)).large) == {"0", "20"}


async def test_a_dead_letter_is_never_abandoned_during_an_outage() -> None:
    cursors, everything = MemoryCursors(), Everything()
    await cursors.create(TOPIC, "s", None, {})
    everything.fails = {FIRST: AWAY}
    graveyard = await opened(cursors, everything)
    for _ in range(2 * REFUSALS_MIN):
        everything.now_ms += 100_000
        with pytest.raises(LedgerUnavailable):
            await graveyard.bury(letter(FIRST))


async def test_publishing_under_the_dead_letter_name_does_not_stop_dead_letters() -> None:
    cursors, everything = MemoryCursors(), Everything()
    await cursors.create(TOPIC, "s", None, {})
    graveyard = await opened(cursors, everything)
    everything.fails = {FIRST: None}  # the other publisher's sequence id is higher
    with pytest.raises(LedgerUnavailable):
        await graveyard.bury(letter(FIRST))
    everything.fails = {}
    assert await graveyard.bury(letter(FIRST)) is None
    assert await graveyard.bury(letter(SECOND)) is None
    lines = {each.line for each in everything.letters}
    assert len(lines) == 1
    assert lines != {""}


async def test_a_long_held_key_stays_held_after_a_takeover() -> None:
    cursors, everything = MemoryCursors(), Everything()
    await cursors.create(TOPIC, "s", None, {})
    graveyard, key = await opened(cursors, everything), b"k" * 5_000
    await graveyard.bury(letter(FIRST, key))
    lease = await cursors.acquire(TOPIC, "s", "me", 60_000)
    tenure = Tenure(cursors, TOPIC, "s", "me", lease.epoch, 60_000)
    log: Any = everything  # the part of a log that a graveyard needs
    again = Graveyard(tenure, log, everything)
    cursor = await cursors.get(TOPIC, "s")
    keys = await again.load(cursor, Acknowledged(None))
    gaps = Gaps(Options(), keys)
    assert gaps.is_beyond(key, SECOND, AfterDeadLetter.HOLD)
    assert len(remembered(key)) < 100
    assert gaps.forget(key) is not None
    await again.forgetting(key)()
    assert not await again.load(await cursors.get(TOPIC, "s"), Acknowledged(None))


@pytest.mark.parametrize(
    ("said", "generation"), [(None, 1), ("1", 2), ("99", 100), ("-1", 1), ("²", 1), ("9" * 40, 1)]
)
async def test_a_dead_letter_counts_the_dead_letter_topics_it_passed(
    said: str | None, generation: int
) -> None:
    cursors, everything = MemoryCursors(), Everything()
    await cursors.create(TOPIC, "s", None, {})
    everything.properties = {} if said is None else {GENERATION: said}
    graveyard = await opened(cursors, everything)
    assert await graveyard.bury(letter(FIRST)) is None
    (put,) = everything.letters
    assert put.generation == generation
    entry = published(put)
    assert entry.metadata.properties[GENERATION] == str(generation)


async def test_a_cycle_of_dead_letter_topics_ends() -> None:
    cursors, everything = MemoryCursors(), Everything()
    await cursors.create(TOPIC, "s", None, {})
    everything.properties = {GENERATION: str(GENERATIONS_MAX)}
    graveyard = await opened(cursors, everything)
    assert await graveyard.bury(letter(FIRST)) is Because.CYCLE
    assert everything.letters == []
    everything.properties = {}
    assert await graveyard.bury(letter(SECOND)) is None


async def test_a_large_message_that_dies_again_has_a_new_dead_letter() -> None:
    """Its chunks have the message's own id; those that die before and after a takeover are one
    letter."""
    cursors, everything = MemoryCursors(), Everything()
    await cursors.create(TOPIC, "s", None, {})
    graveyard = await opened(cursors, everything)
    await graveyard.bury(chunk(FIRST))
    graveyard = await opened(cursors, everything)
    await graveyard.bury(chunk(SECOND, is_last=True))
    graveyard.acknowledged(runs_of([FIRST, SECOND]))
    await graveyard.tidy()
    await graveyard.bury(chunk(FIRST))
    await graveyard.bury(chunk(SECOND, is_last=True))
    places: dict[str, list[Position]] = {}
    for each in everything.letters:
        each.entry.metadata.num_chunks_from_msg = 2
        at = each.entry.position
        of_letter = places.setdefault(published(each).metadata.producer_name, [])
        of_letter.append(Position(at.ledger_id, at.entry_id))
    assert [sorted(set(each)) for each in places.values()] == [[FIRST, SECOND]] * 2


async def test_a_large_letter_begins_anew_with_the_first_chunk() -> None:
    """Even while the record of one whose last chunk did not come is there: the chunks of both would
    be duplicates of each other."""
    cursors, everything = MemoryCursors(), Everything()
    await cursors.create(TOPIC, "s", None, {})
    graveyard = await opened(cursors, everything)
    for _ in range(2):
        await graveyard.bury(chunk(FIRST))
        graveyard.acknowledged(runs_of([FIRST]))
        await graveyard.tidy()
    first, again = (each.round for each in everything.letters)
    assert first != again


async def test_a_reset_forgets_the_places_of_redelivered_dead_letters() -> None:
    cursors, everything = MemoryCursors(), Everything()
    await cursors.create(TOPIC, "s", None, {})
    graveyard = await opened(cursors, everything)
    await bury(graveyard, 2)
    await graveyard.load(await cursors.get(TOPIC, "s"), Acknowledged(FIRST))
    assert graveyard.buried == {FIRST: DLQ}


async def test_a_reset_releases_keys_held_by_redelivered_entries() -> None:
    cursors, everything = MemoryCursors(), Everything()
    await cursors.create(TOPIC, "s", None, {})
    graveyard = await opened(cursors, everything)
    for position, key in ((FIRST, b"before"), (SECOND, b"again"), (THIRD, b"on its way")):
        await graveyard.bury(letter(position, key))
    graveyard.acknowledged(runs_of([FIRST, SECOND]))
    await graveyard.tidy()
    lease = await cursors.acquire(TOPIC, "s", "me", 60_000)
    await cursors.reset(TOPIC, "s", FIRST, lease.epoch)
    await graveyard.start_over()
    keys = await graveyard.load(await cursors.get(TOPIC, "s"), Acknowledged(FIRST))
    assert set(keys) == {b"before", b"on its way"}
    assert len(graveyard._last_of) == 2


async def test_a_key_forgotten_at_a_reset_is_held_by_a_letter_that_is_still_on_its_way() -> None:
    cursors, everything = MemoryCursors(), Everything()
    await cursors.create(TOPIC, "s", None, {})
    graveyard = await opened(cursors, everything)
    await graveyard.bury(letter(FIRST))
    await graveyard.bury(letter(SECOND))  # now the key's gap
    graveyard.acknowledged(runs_of([SECOND]))
    await graveyard.tidy()
    await graveyard.start_over()
    assert not await held_keys(cursors, graveyard)
    await graveyard.bury(letter(FIRST))
    assert await held_keys(cursors, graveyard) == {b"k"}


@pytest.mark.parametrize("is_late", [False, True])
async def test_a_key_released_before_a_new_owner_completes_its_letter_is_held_by_that(
    is_late: bool,
) -> None:
    cursors, everything = MemoryCursors(), Everything()
    await cursors.create(TOPIC, "s", None, {})
    before = await opened(cursors, everything)
    everything.fails = {FIRST: AWAY}
    with pytest.raises(LedgerUnavailable):
        await before.bury(letter(FIRST))
    after = await opened(cursors, everything)
    forget = after.forgetting(b"k")
    if not is_late:
        await forget()
    everything.fails = {}
    await after.bury(letter(FIRST))
    await forget()
    assert await held_keys(cursors, after) == {b"k"}


@pytest.mark.parametrize("is_late", [False, True])
async def test_a_key_held_by_another_dead_letter_is_not_forgotten(is_late: bool) -> None:
    cursors, everything = MemoryCursors(), Everything()
    await cursors.create(TOPIC, "s", None, {})
    graveyard = await opened(cursors, everything)
    await graveyard.bury(letter(FIRST))
    forget = graveyard.forgetting(b"k")  # the key is released
    if not is_late:
        await forget()
        assert not await held_keys(cursors, graveyard)
    await graveyard.bury(letter(SECOND))
    await forget()
    assert await held_keys(cursors, graveyard) == {b"k"}
    await graveyard.forgetting(b"k")()
    assert not await held_keys(cursors, graveyard)


async def held_keys(cursors: MemoryCursors, graveyard: Graveyard) -> set[bytes]:
    return set(await graveyard.load(await cursors.get(TOPIC, "s"), Acknowledged(None)))

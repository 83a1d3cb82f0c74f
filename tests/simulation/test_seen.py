"""The states in which a history may end."""

import pytest

from seqgate.types import Chunk, Position
from tests.simulation.system.seen import Appended, Origin, Seen

LETTERS, ORIGINALS = "t/n/letters", "t/n/originals"
CHUNKS = 3


def stored(seen: Seen, topic: str, producer: str, chunks: int, *, is_letter: bool) -> None:
    """Store the first chunks of a message of CHUNKS in a topic."""
    log = seen.log(topic)
    for number in range(chunks):
        position = Position(1, number)
        origin = Origin(ORIGINALS, "s", position) if is_letter else None
        chunk = Chunk("one", number, CHUNKS, CHUNKS)
        entry = Appended(position, producer, (0,), (1,), chunk, 0, 0.0, origin)
        log.entries.append(entry)
        log.at[position] = log.last[producer] = entry
        log.attempts.setdefault((producer, chunk.uuid), []).append(position)


@pytest.mark.parametrize(
    ("letters", "waiting", "is_forsaken"),
    [
        (2, (), True),  # the subscription that would send the last chunk was moved or deleted
        (2, (2,), False),  # the last chunk is still waiting
        (3, (), False),  # the letter is whole
    ],
)
def test_a_dead_letter_stays_unfinished_when_its_rest_is_gone(
    letters: int, waiting: tuple[int, ...], is_forsaken: bool
) -> None:
    seen = Seen(lambda: 0.0)
    stored(seen, ORIGINALS, "p", CHUNKS, is_letter=False)
    stored(seen, LETTERS, "seqgate.dead", letters, is_letter=True)
    subscription = seen.subscription(ORIGINALS, "s")
    subscription.waiting = {Position(1, each): None for each in waiting}
    assert seen.is_forsaken(LETTERS, Position(1, 0)) == is_forsaken
    assert not seen.is_forsaken(ORIGINALS, Position(1, 0))


def test_a_dead_letter_stays_unfinished_when_its_source_topic_is_deleted() -> None:
    seen = Seen(lambda: 0.0)
    stored(seen, LETTERS, "seqgate.dead", CHUNKS - 1, is_letter=True)
    seen.log(ORIGINALS).deleted_ledger = 1
    assert seen.is_forsaken(LETTERS, Position(1, 0))

"""The torture's checker of logs finds every violation, and nothing else."""

from collections.abc import Callable

import pytest

from seqgate.types import Position
from tools.stack.journal import Line
from tools.torture.evidence import Entry, Log, Place, Stored, place_of, with_trimmed
from tools.torture.log_checker import check_log, check_reader
from tools.torture.roles import ProducerRole

TOPIC = "torture/all/t"
ROLE = ProducerRole("p", TOPIC)
COUNT = 6


class History:
    """A producer that sent six messages, each stored at its receipt's position."""

    def __init__(self) -> None:
        self.log = Log(TOPIC)
        self.told: list[Line] = []
        self.read: list[Line] = []
        for number in range(COUNT):
            place = Place(Position(1, number), 0)
            self.log.entries.append(Entry(place.position, "p", 10 + number, 1_000 + number))
            stored = Stored(place, "p", 10 + number, f"p.{number}", f"k{number % 2}")
            self.log.messages.append(stored)
            self.told.append({"t": 2 * number, "e": "sent", "n": number, "s": 10 + number})
            self.told.append(receipt(number, f"1:{number}:-1"))
            self.read.append({"t": number, "e": "read", "id": f"1:{number}:-1", "u": f"p.{number}"})

    @property
    def kinds(self) -> set[str]:
        """The kinds of violations found."""
        found = check_log(self.log, {"p": ROLE}, {"p": self.told})
        return {each.kind for each in [*found, *check_reader(self.log, self.read)]}


def receipt(number: int, told: str, *, duplicate: bool = False) -> Line:
    at_ns = 2 * number + 1
    line = {"t": at_ns, "e": "receipt", "n": number, "s": 10 + number, "id": told}
    return {**line, "dup": duplicate}


def lose_one(history: History) -> None:
    del history.log.messages[2], history.log.entries[2], history.read[2]


def move_one(history: History) -> None:
    history.told[5] = receipt(2, "1:3:-1")


def call_another_a_duplicate(history: History) -> None:
    history.told[5] = receipt(2, "1:3:-1", duplicate=True)


def take_one_for_another(history: History) -> None:
    history.told[5] = receipt(2, "1:2:-1", duplicate=True) | {"differs": True}


def store_one_twice(history: History) -> None:
    again = history.log.messages[2]._replace(place=Place(Position(1, COUNT), 0))
    history.log.messages.append(again)
    history.read.append({"t": 99, "e": "read", "id": f"1:{COUNT}:-1", "u": "p.2"})


def store_two_of_one_id(history: History) -> None:
    history.log.messages[3] = history.log.messages[3]._replace(sequence_id=12)


def store_a_chunk_twice(history: History) -> None:
    chunk = history.log.entries[0]._replace(uuid="u", chunk_id=0)
    history.log.entries[:1] = [chunk, chunk._replace(position=Position(0, 7))]


def swap_two_of_a_key(history: History) -> None:
    one, other = history.log.messages[1], history.log.messages[3]
    history.log.messages[1] = one._replace(sequence_id=13)
    history.log.messages[3] = other._replace(sequence_id=11)


def invent_one(history: History) -> None:
    del history.told[4:6]


def damage_one(history: History) -> None:
    history.log.damaged.append("1:2: p.2 is damaged")


def refuse_one(history: History) -> None:
    history.told[5] = {"t": 5, "e": "refused", "n": 2, "why": "STALE"}


def go_back_in_time(history: History) -> None:
    history.log.entries[3] = history.log.entries[3]._replace(append_ms=1)


def skip_one(history: History) -> None:
    del history.read[3]


def read_one_again(history: History) -> None:
    history.read.insert(4, history.read[2])


def read_another_one(history: History) -> None:
    history.read[2] = {**history.read[2], "u": "p.9"}


@pytest.mark.parametrize(
    ("plant", "kind"),
    [
        (lose_one, "LOST"),
        (move_one, "MISPLACED"),
        (call_another_a_duplicate, "MISPLACED"),
        (take_one_for_another, "CONFLICT"),
        (store_one_twice, "TWICE"),
        (store_two_of_one_id, "TWICE"),
        (store_a_chunk_twice, "TWICE"),
        (swap_two_of_a_key, "REORDERED"),
        (invent_one, "INVENTED"),
        (damage_one, "DAMAGED"),
        (refuse_one, "NOT_STALE"),
        (go_back_in_time, "APPEND_TIME"),
        (skip_one, "SKIPPED"),
        (read_one_again, "READ_AGAIN"),
        (read_another_one, "DAMAGED"),
    ],
)
def test_planted_violations_are_found(plant: Callable[[History], None], kind: str) -> None:
    history = History()
    plant(history)
    assert kind in history.kinds


def test_a_correct_log_has_no_violations() -> None:
    assert History().kinds == set()


def test_a_flush_by_key_may_interleave_its_ids() -> None:
    history = History()
    places = {0: (0, 0), 2: (0, 1), 1: (1, 0), 3: (1, 1)}
    stored = [
        Stored(Place(Position(1, entry), at), "p", 10 + number, f"p.{number}", f"k{number % 2}")
        for number, (entry, at) in places.items()
    ]
    history.log.messages[:4] = stored
    for number, (entry, at) in places.items():
        history.told[2 * number + 1] = receipt(number, f"1:{entry}:-1:{at}")
    history.read[:4] = [
        {"t": 0, "e": "read", "id": f"1:{each.place.position.entry_id}:-1:{each.place.at}"}
        | {"u": each.uid}
        for each in stored
    ]
    assert history.kinds == set()


def test_trimmed_entries_count_as_their_reader_saw_them() -> None:
    history = History()
    read = [
        {**line, "p": "p", "s": 10 + at, "key": f"k{at % 2}"}
        for at, line in enumerate(history.read)
    ]
    del history.log.messages[:3], history.log.entries[:3]
    assert history.kinds == {"LOST", "DAMAGED"}
    with_trimmed(history.log, read)
    assert history.kinds == set()


def test_a_refusal_of_a_trimmed_id_is_no_reordering() -> None:
    history = History()
    history.told[5] = {"t": 5, "e": "refused", "n": 2, "why": "TRIMMED"}
    assert history.kinds == set()


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("3:4:-1", Place(Position(3, 4), 0)),
        ("3:4:-1:2", Place(Position(3, 4), 2)),
        ("3:4:-1;3:9:-1", Place(Position(3, 9), 0)),
    ],
)
def test_a_large_message_is_at_its_last_entry(text: str, place: Place) -> None:
    assert place_of(text) == place

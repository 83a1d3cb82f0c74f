"""Rows read ahead and written together answer as a dictionary does."""

from random import Random

import apsw
import pytest

from seqgate.services.cursor.adapters.places import (
    FIRST_PLACE,
    LAST_PLACE,
    Place,
    Places,
    Table,
    next_place,
)
from seqgate.services.runtime.sqlite import SqliteTransaction
from seqgate.types import SEQUENCE_ID_MAX

CURSOR = 1
TABLE = Table.of("attempt", ("ledger_id", "entry_id"), ("count",), ahead=2, page=3, held_max=4)


class World:
    """A table with rows of two cursors, and what it should hold."""

    def __init__(self, random: Random, table: Table) -> None:
        self.random = random
        db = apsw.Connection(":memory:")
        db.execute(
            """CREATE TABLE attempt (cursor INTEGER, ledger_id INTEGER, entry_id INTEGER,
                count INTEGER, PRIMARY KEY (cursor, ledger_id, entry_id))"""
        )
        self.db = db
        self.table = table
        self.model = {self.place(): random.randint(1, 9) for _ in range(random.randint(0, 12))}
        for place, value in self.model.items():
            for cursor in (CURSOR, CURSOR + 1):
                db.execute("INSERT INTO attempt VALUES (?, ?, ?, ?)", (cursor, *place, value))
        self.others = self.rows(CURSOR + 1)

    def place(self) -> Place:
        return self.random.choice((1, 1, 2)), self.random.randint(0, 9)

    def range(self) -> tuple[Place, Place]:
        ends = sorted((self.place(), self.place()))
        return (
            self.random.choice((FIRST_PLACE, ends[0], ends[0])),
            self.random.choice((LAST_PLACE, ends[1], ends[1])),
        )

    def rows(self, cursor: int) -> dict[Place, int]:
        found = self.db.execute(
            "SELECT ledger_id, entry_id, count FROM attempt WHERE cursor = ?", (cursor,)
        )
        return {(ledger_id, entry_id): count for ledger_id, entry_id, count in found}

    def open(self) -> Places[int]:
        def columns(value: int) -> tuple[int]:
            return (value,)

        return Places[int](SqliteTransaction(self.db), CURSOR, self.table, columns, int)

    def act(self, places: Places[int]) -> None:
        """Do something, and compare its answer."""
        random, model, place = self.random, self.model, self.place()
        match random.choice(("get", "get", "put", "put", "remove", "after", "drop", "write")):
            case "get":
                assert places.get(place) == model.get(place)
            case "put":
                model[place] = random.randint(1, 9)
                places.put(place, model[place])
            case "remove":
                model.pop(place, None)
                places.put(place, None)
            case "after":
                start, _ = self.range()
                found = []
                for each, value in places.after(start):
                    found.append((each, value))
                    if random.random() < 0.2:
                        del model[each]
                        places.put(each, None)
                        model[each] = value + 1
                        places.put(each, value + 1)
                known = sorted(each for each in model if each >= start)
                assert [each for each, _ in found] == known
            case "drop":
                first, last = self.range()
                gone = [each for each in model if first <= each <= last]
                assert places.drop(first, last) == len(gone)
                for each in gone:
                    del model[each]
            case _:
                places.write()


@pytest.mark.parametrize("held_max", [4, 1_000])
@pytest.mark.parametrize("history", range(50))
def test_places_answer_as_a_dictionary_does(seed: int, history: int, held_max: int) -> None:
    world = World(Random(seed + history), TABLE._replace(held_max=held_max))
    for _ in range(6):
        places = world.open()
        if world.random.random() < 0.5:
            first = sorted(world.rows(CURSOR).items())[:3]
            places.learn(FIRST_PLACE, [(*place, value) for place, value in first], 3)
        for _ in range(world.random.randint(0, 20)):
            world.act(places)
        places.write()
        assert world.rows(CURSOR) == world.model
        assert world.rows(CURSOR + 1) == world.others


def test_the_place_after_the_last_number_is_in_the_next_ledger() -> None:
    assert next_place((1, 7)) == (1, 8)
    assert next_place((1, SEQUENCE_ID_MAX)) == (2, -1)


def test_values_that_nobody_asks_for_are_not_read() -> None:
    world = World(Random(1), TABLE)
    world.db.execute("DELETE FROM attempt")
    world.db.execute("INSERT INTO attempt VALUES (1, 1, 1, 5), (1, 1, 2, -1)")

    def value(count: int) -> int:
        assert count > 0, "damaged"
        return count

    places = Places[int](SqliteTransaction(world.db), CURSOR, TABLE, lambda each: (each,), value)
    assert places.get((1, 1)) == 5
    assert places.drop(FIRST_PLACE, LAST_PLACE) == 2
    places.write()
    assert world.rows(CURSOR) == {}

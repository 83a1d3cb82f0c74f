"""The checkers find every kind of anomaly: each is planted here."""

from collections.abc import Callable

import pytest

from seqgate.message_id import MessageId
from tests.support.checkers import (
    Acknowledgement,
    Anomaly,
    Content,
    History,
    Identity,
    Kind,
    Marks,
    Stored,
    log_anomalies,
    report,
    state_anomalies,
)


def at(entry: int, index: int = -1) -> MessageId:
    return MessageId(1, entry, -1, index)


def content(sequence_id: int, key: str | None = None) -> Content:
    return Content(f"message {sequence_id}".encode(), key)


class World:
    """A correct history: p's 0, 3 and 4 in three entries, q's 5, 7, 6, 8 batched by key in two, and
    a copy and an overtaken id answered as such."""

    def __init__(self) -> None:
        self.history = History()
        self.log: list[Stored] = []
        for entry, sequence_id in enumerate((0, 3, 4)):
            self.store("p", sequence_id, at(entry))
        for index, sequence_id in enumerate((5, 7)):
            self.store("q", sequence_id, at(3, index), "odd")
        for index, sequence_id in enumerate((6, 8)):
            self.store("q", sequence_id, at(4, index), "even")
        self.acknowledge("p", 3, at(1), duplicate=True)
        overtaken = Identity("p", 2)
        self.history.send(overtaken, content(2))
        self.history.stale.append(overtaken)

    def store(
        self, producer: str, sequence_id: int, where: MessageId, key: str | None = None
    ) -> None:
        identity = Identity(producer, sequence_id)
        self.history.send(identity, content(sequence_id, key))
        self.log.append(Stored(where, identity, content(sequence_id, key)))
        self.acknowledge(producer, sequence_id, where)

    def acknowledge(
        self, producer: str, sequence_id: int, where: MessageId, *, duplicate: bool = False
    ) -> None:
        identity = Identity(producer, sequence_id)
        self.history.acknowledged.append(Acknowledgement(identity, where, duplicate))

    def replace(self, index: int, **fields: object) -> None:
        self.log[index] = self.log[index]._replace(**fields)  # type: ignore[arg-type]

    def swap(self, index: int, other: int) -> None:
        """Exchange two messages, with their producers' receipts."""
        first, second = self.log[index], self.log[other]
        self.log[index] = second._replace(id=first.id)
        self.log[other] = first._replace(id=second.id)
        places = {each.identity: each.id for each in self.log}
        self.history.acknowledged = [
            each._replace(id=places[each.identity]) for each in self.history.acknowledged
        ]


def test_a_correct_history_has_no_anomaly() -> None:
    world = World()
    assert log_anomalies(world.history, world.log) == []


def test_a_failed_message_may_be_stored_or_not() -> None:
    world = World()
    for sequence_id in (9, 11):
        identity = Identity("q", sequence_id)
        world.history.send(identity, content(sequence_id))
        world.history.failed.append((identity, "no receipt came in time"))
    world.log.append(Stored(at(5), Identity("q", 9), content(9)))
    assert log_anomalies(world.history, world.log) == []


WRONGS: dict[str, tuple[Kind, Callable[[World], object], str]] = {
    "an acknowledged message is missing": (
        Kind.LOST,
        lambda world: world.log.pop(2),
        "p#4 was told to be stored at 1:2:-1",
    ),
    "a copy's original is missing": (
        Kind.LOST,
        lambda world: world.acknowledge("p", 2, at(9), duplicate=True),
        "p#2 was told to be a duplicate of what is at 1:9:-1",
    ),
    "a receipt has another position": (
        Kind.MISPLACED,
        lambda world: world.acknowledge("p", 4, at(1)),
        "p#4 was told to be stored at 1:1:-1: it is at 1:2:-1",
    ),
    "a copy's receipt has no original's position": (
        Kind.MISPLACED,
        lambda world: world.acknowledge("q", 7, at(3, 0), duplicate=True),
        "q#7 was told to be a duplicate of what is at 1:3:-1:0: it is at 1:3:-1:1",
    ),
    "a batch's message has no index in its receipt": (
        Kind.MISPLACED,
        lambda world: world.acknowledge("q", 5, at(3)),
        "q#5 was told to be stored at 1:3:-1: it is at 1:3:-1:0",
    ),
    "a payload changed": (
        Kind.ALTERED,
        lambda world: world.replace(1, content=Content(b"message 4")),
        "p#3 at 1:1:-1: sent ",
    ),
    "a key changed": (
        Kind.ALTERED,
        lambda world: world.replace(3, content=content(5, "even")),
        "q#5 at 1:3:-1:0: sent ",
    ),
    "a message is stored again": (
        Kind.TWICE,
        lambda world: world.log.append(world.log[2]._replace(id=at(5))),
        "p#4 at 1:2:-1, and the same at 1:5:-1",
    ),
    "an id is stored again with another message": (
        Kind.TWICE,
        lambda world: world.log.append(Stored(at(5), Identity("p", 4), content(5))),
        "p#4 at 1:2:-1, and another message at 1:5:-1",
    ),
    "a producer's entries are exchanged": (
        Kind.REORDERED,
        lambda world: world.swap(0, 1),
        "p#0 at 1:1:-1 is behind p#3 at 1:0:-1 of its producer",
    ),
    "the messages of a batch are exchanged": (
        Kind.REORDERED,
        lambda world: world.swap(3, 4),
        "q#5 at 1:3:-1:1 is behind q#7 at 1:3:-1:0 in its entry",
    ),
    "a key's messages are exchanged": (
        Kind.REORDERED,
        lambda world: world.replace(5, content=content(6, "odd")),
        "q#6 at 1:4:-1:0 is behind q#7 at 1:3:-1:1 of key odd",
    ),
    "a message was never sent": (
        Kind.INVENTED,
        lambda world: world.log.append(Stored(at(5), Identity("p", 12), content(12))),
        "p#12 at 1:5:-1: ",
    ),
    "a stored message is reported as stale": (
        Kind.NOT_STALE,
        lambda world: world.history.stale.append(Identity("p", 3)),
        "p#3 is at 1:1:-1",
    ),
    "a message is reported as stale without being overtaken": (
        Kind.NOT_STALE,
        lambda world: world.history.stale.append(Identity("p", 5)),
        "p#5: nothing of its producer is above it",
    ),
}


@pytest.mark.parametrize("wrong", WRONGS)
def test_anomalies_are_found_and_named(wrong: str) -> None:
    kind, make, what = WRONGS[wrong]
    world = World()
    make(world)
    found = log_anomalies(world.history, world.log)
    assert [each for each in found if each.kind is kind and each.what.startswith(what)], found


def test_every_kind_of_anomaly_has_a_test() -> None:
    of_the_state = {Kind.FORGOTTEN, Kind.IMAGINED}
    assert {kind for kind, _, _ in WRONGS.values()} | of_the_state == set(Kind)


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ({"p": Marks(4, 4), "q": Marks(8, 8)}, []),
        # A producer that only asked for its last id has no marks.
        ({"p": Marks(4, 4), "q": Marks(8, 8), "r": Marks(None, None)}, []),
        ({"p": Marks(4, 4)}, [Kind.FORGOTTEN, Kind.FORGOTTEN]),
        ({"p": Marks(3, 4), "q": Marks(8, 8)}, [Kind.FORGOTTEN]),
        ({"p": Marks(5, 5), "q": Marks(8, 8)}, [Kind.IMAGINED, Kind.IMAGINED]),
        # Admitted and never withdrawn: its producer would wait forever.
        ({"p": Marks(4, 5), "q": Marks(8, 8)}, [Kind.IMAGINED]),
        ({"p": Marks(4, 4), "q": Marks(8, 8), "r": Marks(None, 0)}, [Kind.IMAGINED]),
        # One less, which a double cannot distinguish.
        ({"p": Marks(4, 4), "q": Marks(8, 8), "big": Marks(2**53, 2**53)}, [Kind.FORGOTTEN] * 2),
    ],
)
def test_the_state_is_compared_with_the_log(state: dict[str, Marks], expected: list[Kind]) -> None:
    log = World().log
    if "big" in state:
        log.append(Stored(at(5), Identity("big", 2**53 + 1), content(0)))
    assert [each.kind for each in state_anomalies(log, state)] == expected


def test_a_report_names_the_first_anomalies_and_counts_the_rest() -> None:
    text = report([Anomaly(Kind.LOST, f"p#{each}") for each in range(12)], "seed 7")
    assert text.splitlines()[:3] == ["12 anomalies", "seed 7", "  LOST: p#0"]
    assert text.splitlines()[-1] == "  and 2 more"


def test_one_id_is_one_message() -> None:
    history = History()
    history.send(Identity("p", 1), content(1))
    history.send(Identity("p", 1), content(1))
    with pytest.raises(AssertionError, match="one id is one message"):
        history.send(Identity("p", 1), content(2))

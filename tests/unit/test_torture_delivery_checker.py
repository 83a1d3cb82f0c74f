"""The torture's checker of deliveries finds every violation, and nothing else."""

from collections.abc import Callable

import pytest

from seqgate.client import SubscriptionType
from seqgate.types import Position
from tools.stack.journal import Line
from tools.torture.delivery_checker import Subscription, check_deliveries
from tools.torture.evidence import Entry, Log, Place, Progress, Stored

COUNT = 6
KEY = "k"


class History:
    """Six messages of one key, delivered to two consumers in turn, each acknowledged."""

    def __init__(self, kind: SubscriptionType = SubscriptionType.KEY_SHARED) -> None:
        self.log = Log("torture/all/t")
        self.kind = kind
        self.journals: dict[str, list[Line]] = {
            name: [{"t": 0, "e": "started", "pid": pid}] for pid, name in enumerate("ab")
        }
        self.progress = Progress(Position(1, COUNT - 1))
        self.letters: list[str] = []
        self.wanted: str | None = None
        self._now = 0
        for number in range(COUNT):
            place = Place(Position(1, number), 0)
            self.log.entries.append(Entry(place.position, "p", number, 0))
            self.log.messages.append(Stored(place, "p", number, f"p.{number}", KEY, "here"))
            self.deliver(number)

    def deliver(self, number: int, *, to: str = "", token: int | None = None) -> None:
        """A consumer gets a message, and acknowledges it."""
        name = to or "ab"[number % 2]
        self.give(number, name, number if token is None else token)
        self.say(name, number if token is None else token, "ask")
        self.say(name, number if token is None else token, "done")

    def give(self, number: int, name: str, token: int) -> None:
        """A consumer gets a message."""
        given = {"id": f"1:{number}:-1", "u": f"p.{number}", "key": KEY, "key_is": KEY}
        self.say(name, token, "given", **given)

    def say(self, name: str, token: int, event: str, **more: object) -> None:
        """A consumer writes a line."""
        self._now += 1
        self.journals[name].append({"t": self._now, "e": event, "k": [1, token, -1], **more})

    def forget(self, number: int, *events: str) -> None:
        """Remove these lines of a consumer."""
        for name, lines in self.journals.items():
            self.journals[name] = [
                line
                for line in lines
                if line.get("k", [0, -1])[1] != number or line["e"] not in events
            ]

    @property
    def kinds(self) -> set[str]:
        """The kinds of violations found."""
        subscription = Subscription(
            "s", self.kind, self.journals, self.progress, self.letters, self.wanted
        )
        return {each.kind for each in check_deliveries(self.log, subscription)}


def acknowledge_what_nobody_got(history: History) -> None:
    history.forget(2, "given", "ask", "done")


def acknowledge_what_nobody_asked(history: History) -> None:
    history.forget(2, "ask", "done")


def forget_what_was_answered(history: History) -> None:
    history.progress = Progress(Position(1, 3))


def deliver_again_after_the_answer(history: History) -> None:
    history.give(2, "b", COUNT + 1)


def deliver_again_what_was_acknowledged_through(history: History) -> None:
    history.kind = SubscriptionType.EXCLUSIVE
    history.forget(1, "ask", "done")
    for line in history.journals["a"]:
        if line["e"] == "ask" and line["k"][1] == 4:
            line["through"] = True
    history.give(1, "b", COUNT + 1)


def deliver_first_out_of_order(history: History) -> None:
    for lines in history.journals.values():
        for line in lines:
            if line.get("k") == [1, 2, -1]:
                line["k"] = [2, 2, -1]


def acknowledge_past_an_open_one(history: History) -> None:
    history.forget(2, "ask", "done")
    history.say("a", 2, "ask")


def give_a_key_to_two(history: History) -> None:
    history.forget(4, "ask", "done")
    history.forget(5, "ask", "done")
    for name, token in (("a", 4), ("b", 5)):
        history.say(name, token, "ask")
        history.say(name, token, "done")


def hand_out_twice(history: History) -> None:
    history.give(3, "b", 3)


def deliver_what_is_not_wanted(history: History) -> None:
    history.wanted = "here"
    history.log.messages[2] = history.log.messages[2]._replace(wanted_in="there")


def deliver_what_is_not_there(history: History) -> None:
    history.give(COUNT + 3, "a", COUNT + 3)


def bury_twice(history: History) -> None:
    history.forget(2, "ask", "done")
    history.letters = ["1:2", "1:2"]


def bury_what_was_answered(history: History) -> None:
    history.letters = ["1:2"]


def bury_what_is_not_there(history: History) -> None:
    history.letters = ["1:77"]


def damage_one(history: History) -> None:
    history.journals["a"].append({"t": 9, "e": "corrupt", "what": "1:2"})


@pytest.mark.parametrize(
    ("plant", "kind"),
    [
        (acknowledge_what_nobody_got, "UNSEEN"),
        (acknowledge_what_nobody_asked, "UNSEEN"),
        (forget_what_was_answered, "FORGOTTEN"),
        (deliver_again_after_the_answer, "RESURRECTED"),
        (deliver_again_what_was_acknowledged_through, "RESURRECTED"),
        (deliver_first_out_of_order, "REORDERED"),
        (acknowledge_past_an_open_one, "OVERTAKEN"),
        (give_a_key_to_two, "SHARED_KEY"),
        (hand_out_twice, "ONE_TOKEN"),
        (deliver_what_is_not_wanted, "UNWANTED"),
        (deliver_what_is_not_there, "INVENTED"),
        (bury_twice, "BURIED_TWICE"),
        (bury_what_was_answered, "BURIED_DONE"),
        (bury_what_is_not_there, "INVENTED"),
        (damage_one, "DAMAGED"),
    ],
)
def test_planted_violations_are_found(plant: Callable[[History], None], kind: str) -> None:
    history = History()
    plant(history)
    assert kind in history.kinds


@pytest.mark.parametrize("kind", SubscriptionType)
def test_a_correct_run_has_no_violations(kind: SubscriptionType) -> None:
    assert History(kind).kinds == set()


def test_subscriptions_without_keys_have_no_order() -> None:
    history = History(SubscriptionType.SHARED)
    deliver_first_out_of_order(history)
    assert history.kinds == set()


def test_a_cumulative_acknowledgement_covers_earlier_entries() -> None:
    history = History(SubscriptionType.EXCLUSIVE)
    for number in (1, 2, 3):
        history.forget(number, "ask", "done")
    for line in history.journals["a"]:
        if line["e"] == "ask" and line["k"][1] == 4:
            line["through"] = True
    assert history.kinds == set()


def test_a_cumulative_acknowledgement_of_undelivered_entries_is_a_violation() -> None:
    history = History(SubscriptionType.EXCLUSIVE)
    history.forget(1, "given", "ask", "done")
    for line in history.journals["a"]:
        if line["e"] == "ask" and line["k"][1] == 4:
            line["through"] = True
    assert "UNSEEN" in history.kinds


def test_a_dead_letter_counts_as_an_acknowledgement() -> None:
    history = History()
    history.forget(2, "ask", "done")
    history.letters = ["1:2"]
    assert history.kinds == set()


def test_redelivered_failures_are_in_order() -> None:
    history = History()
    history.forget(5, "ask", "done")
    history.deliver(5, to="a", token=9)
    assert history.kinds == set()

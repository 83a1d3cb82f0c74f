"""Histories of calls about one topic, made from a seed, and what each store makes of them.

A history is what writers, an operator and a careless Redis might do to one topic, with few
producers and few ids, so that calls meet each other often.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from seqgate.types import SEQUENCE_ID_MAX, Position, TopicName
from services.dedup.core.sequence import NEVER, Claim
from services.dedup.core.topic import (
    Confirmation,
    ProducerClaims,
    ProducerEntries,
    Withdrawal,
    Writer,
)
from services.dedup.ports import StateStore
from services.errors import Fenced

TOPIC = TopicName.parse("test/histories/topic")
PRODUCERS = ("a", "b", "naïve 📈")
CALLS_MAX = 20
SPAN = 10
"""How many different ids a history uses."""

BASES = (0, 2**53 - SPAN // 2, SEQUENCE_ID_MAX - SPAN)
"""Where its ids start: at nothing, around the last number that a double holds exactly, and so that
the last is the highest there is."""

VERBS = ("admit",) * 5 + ("confirm", "confirm", "rollback", "keep", "forget_producers")


@dataclass(frozen=True)
class Call:
    """One call of a store, by name and arguments."""

    verb: str
    arguments: tuple[Any, ...]
    keywords: tuple[tuple[str, Any], ...] = ()


def history_of(seed: int) -> list[Call]:
    """The history that a seed stands for."""
    author = _Author(Random(seed))
    return [author.call() for _ in range(author.random.randint(1, CALLS_MAX))]


async def play(store: StateStore, history: list[Call]) -> list[object]:
    """What each call answers, and the state in the end."""
    await store.forget_topic(TOPIC, None)
    seen: list[object] = []
    for call in history:
        method: Callable[..., Awaitable[object]] = getattr(store, call.verb)
        try:
            seen.append(await method(TOPIC, *call.arguments, **dict(call.keywords)))
        except Fenced as fenced:
            seen.append(("fenced", fenced.details["epoch"]))
    seen.append(await store.summary(TOPIC))
    page = await store.producers(TOPIC, size=len(PRODUCERS), token="")
    seen.append(sorted(page.producers))
    return seen


class _Author:
    """Mostly one writer in good order; now and then a zombie, a successor, another incarnation."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self._base = random.choice(BASES)

    def call(self) -> Call:
        random = self.random
        if random.random() < 0.02:
            return Call("forget_topic", (random.randint(1, 2),))
        match random.choice(VERBS):
            case "admit":
                keywords = (
                    ("now_ms", random.randint(0, 6)),
                    ("max_producers", random.choice((1, 2, 3, 3, 3))),
                )
                confirmation = self._confirmation() if random.random() < 0.4 else None
                return Call("admit", (self._writer(), confirmation, self._claims()), keywords)
            case "confirm":
                return Call("confirm", (self._writer(), self._confirmation()))
            case "rollback":
                confirmation = self._confirmation() if random.random() < 0.3 else None
                return Call("rollback", (self._writer(), confirmation, self._withdrawals()))
            case "keep":
                return Call("keep", (self._names(), random.randint(0, 6)))
            case verb:
                active = [(name, random.randint(0, 6)) for name in self._names()]
                return Call(verb, (), (("purge", active[:1]), ("evict", active[1:])))

    def _names(self) -> list[str]:
        return self.random.sample(PRODUCERS, self.random.randint(0, len(PRODUCERS)))

    def _id(self) -> int:
        return self._base + self.random.randint(0, SPAN)

    def _position(self) -> Position | None:
        # Few places, so that writers are often where the state is.
        place = self.random.randint(-1, 4)
        return None if place < 0 else Position(1 + place // 3, place % 3)

    def _writer(self) -> Writer:
        random = self.random
        return Writer(
            incarnation=random.choice((1,) * 12 + (2,)),
            epoch=random.choice((1,) * 8 + (2, SEQUENCE_ID_MAX)),
            position=self._position(),
            revision=random.choice((None, None, random.randint(0, 6))),
        )

    def _confirmation(self) -> Confirmation:
        random = self.random
        return Confirmation(
            after=self._position() if random.random() < 0.5 else None,
            through=self._position() or Position(1, 0),
            producers=tuple(
                ProducerEntries(
                    name,
                    tuple(self._id() for _ in range(random.randint(1, 3))),
                    random.randint(0, 5),
                )
                for name in self._names()
            ),
            entry_count=random.randint(1, 5),
            remaining=random.randint(0, 2),
        )

    def _claims(self) -> list[ProducerClaims]:
        return [
            ProducerClaims(
                name,
                tuple(
                    Claim(*sorted((self._id(), self._id())))
                    for _ in range(self.random.randint(1, 4))
                ),
            )
            for name in self._names()
        ]

    def _withdrawals(self) -> list[Withdrawal]:
        return [Withdrawal(name, self.random.choice((NEVER, self._id()))) for name in self._names()]

"""Histories of calls about one topic, drawn from a seed, and the answers of each store.

A history contains what writers, an operator and a lossy Redis may do to a topic, with few producers
and ids, so that calls often interact.
"""

from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

from seqgate.services.dedup.core.topic import Frozen, Persisted, Saved
from seqgate.services.dedup.ports import StateStore
from seqgate.services.deduplication import (
    NEVER,
    Claim,
    Confirmation,
    ProducerClaims,
    ProducerEntries,
    Withdrawal,
    Writer,
)
from seqgate.services.errors import Fenced
from seqgate.types import SEQUENCE_ID_MAX, Chunk, Position, TopicName

TOPIC = TopicName.parse("test/histories/topic")
PRODUCERS = ("a", "b", "naïve 📈")
CALLS_MAX = 20
SPAN = 10
"""The number of different ids in a history, less one."""

BASES = (0, 2**53 - SPAN // 2, SEQUENCE_ID_MAX - SPAN)
"""The first ids: zero; around the last integer that a double holds exactly; and such that the last
id is the highest allowed."""

UUIDS = ("one", "zwei/2 %20 ünd")

VERBS: tuple[str, ...] = (
    *("admit",) * 10,
    *("confirm",) * 4,
    *("rollback", "keep", "forget_producers") * 2,
    *("load", "load", "record_snapshot", "freeze"),
)


@dataclass(frozen=True)
class Call:
    """One call of a store, by name and arguments."""

    verb: str
    arguments: tuple[Any, ...]
    keywords: tuple[tuple[str, Any], ...] = ()


def history_of(seed: int) -> list[Call]:
    """The history of a seed."""
    author = _Author(Random(seed))
    return [author.call() for _ in range(author.random.randint(1, CALLS_MAX))]


async def play(store: StateStore, history: list[Call]) -> list[object]:
    """Play a history. Returns the answer to each call, and the final state."""
    await store.forget_topic(TOPIC, None)
    seen: list[object] = []
    for call in history:
        method: Callable[..., Awaitable[object]] = getattr(store, call.verb)
        try:
            answer = await method(TOPIC, *call.arguments, **dict(call.keywords))
            if isinstance(answer, Frozen):
                answer.producers.sort()
            seen.append(answer)
        except Fenced as fenced:
            seen.append(("fenced", fenced.details["epoch"]))
    seen.append(await store.summary(TOPIC))
    page = await store.producers(TOPIC, size=len(PRODUCERS), token="")
    seen.append(sorted(page.producers))
    return seen


class _Author:
    """Draws calls. Mostly one orderly writer, occasionally a zombie, a successor or another
    incarnation; mostly producers that continue what they started."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self._base = random.choice(BASES)
        self._incarnation, self._epoch = 1, 1
        self._tail: Position | None = None
        self._claimed: dict[str, tuple[int, Chunk]] = {}
        self._stored: dict[str, tuple[int, Chunk]] = {}

    def call(self) -> Call:
        random = self.random
        if random.random() < 0.02:
            return Call("forget_topic", (random.randint(1, 2),))
        match random.choice(VERBS):
            case "admit":
                keywords = (
                    ("now_ms", random.randint(0, 6)),
                    ("max_producers", random.choice((1, 2, 3, 3, 3, 3, 3, 3))),
                )
                confirmation = self._confirmation() if random.random() < 0.4 else None
                return Call("admit", (self._writer(), confirmation, self._claims()), keywords)
            case "confirm":
                confirmation = self._confirmation()
                return Call("confirm", (self._writer(), confirmation))
            case "rollback":
                confirmation = self._confirmation() if random.random() < 0.3 else None
                return Call("rollback", (self._writer(), confirmation, self._withdrawals()))
            case "keep":
                return Call("keep", (self._names(), random.randint(0, 6)))
            case "load":
                loading = (
                    ("replacing", random.random() < 0.3),
                    ("taken_ms", random.choice((None, 3))),
                )
                return Call("load", self._state(), loading)
            case "record_snapshot":
                saved = Saved(self._position(), random.randint(0, 3), random.randint(1, 6))
                return Call("record_snapshot", (random.choice((1, 1, 1, 2)), saved))
            case "freeze":
                return Call("freeze", ())
            case verb:
                active = [(name, random.randint(0, 6)) for name in self._names()]
                return Call(verb, (), (("purge", active[:1]), ("evict", active[1:])))

    def _state(self) -> tuple[int, Position, list[Persisted]]:
        """A state as a snapshot or a rebuild may load it."""
        incarnation = self._incarnation if self.random.random() < 0.9 else 3 - self._incarnation
        through = self._position() or Position(1, 0)
        producers = []
        for name in self._names():
            sequence_id, chunk = self._stored.get(name, (self._id(name), None))
            unfinished = None if chunk is None or chunk.is_last else chunk
            producers.append(Persisted(name, sequence_id, unfinished, self.random.randint(0, 5)))
        return incarnation, through, producers

    def _names(self) -> list[str]:
        return self.random.sample(PRODUCERS, self.random.randint(0, len(PRODUCERS)))

    def _id(self, name: str) -> int:
        """Any id, or that of the producer's current large message."""
        if name in self._claimed and self.random.random() < 0.3:
            return self._claimed[name][0]
        return self._base + self.random.randint(0, SPAN)

    def _position(self) -> Position | None:
        # Few positions, so that writers often meet the state's.
        place = self.random.randint(-1, 4)
        return None if place < 0 else Position(1 + place // 3, place % 3)

    def _end(self) -> Position | None:
        """Usually the end of the log."""
        return self._tail if self.random.random() < 0.8 else self._position()

    def _writer(self) -> Writer:
        random = self.random
        if random.random() < 0.02:
            self._incarnation, self._epoch = 3 - self._incarnation, 1
        if random.random() < 0.05:
            self._epoch = random.choice((1, 2, 2, SEQUENCE_ID_MAX))
        return Writer(
            self._incarnation,
            self._epoch,
            position=self._end(),
            revision=random.choice((None, None, None, random.randint(0, 6))),
        )

    def _confirmation(self) -> Confirmation:
        random = self.random
        after, through = self._end(), self._position() or Position(1, 0)
        self._tail = max(self._tail or through, through)
        return Confirmation(
            after=after,
            through=through,
            producers=tuple(self._entries(name) for name in self._names()),
            entry_count=random.randint(1, 5),
            remaining=random.randint(0, 2),
        )

    def _entries(self, name: str) -> ProducerEntries:
        ids: list[int] = []
        chunks: dict[int, Chunk] = {}
        for _ in range(self.random.randint(1, 3)):
            if self.random.random() < 0.4:
                ids.append(self._id(name))
                continue
            for sequence_id, chunk in self._chunks(name, self._stored, self._claimed):
                chunks[len(ids)] = chunk
                ids.append(sequence_id)
        return ProducerEntries(name, tuple(ids), self.random.randint(0, 5), chunks)

    def _claims(self) -> list[ProducerClaims]:
        return [ProducerClaims(name, tuple(self._claims_of(name))) for name in self._names()]

    def _claims_of(self, name: str) -> Iterator[Claim]:
        for _ in range(self.random.choice((1, 1, 2, 3))):
            if self.random.random() < 0.4:
                lowest, highest = sorted((self._id(name), self._id(name)))
                yield Claim(lowest, highest)
            else:
                chunks = self._chunks(name, self._claimed, self._stored)
                yield from (Claim(each, each, chunk) for each, chunk in chunks)

    def _chunks(
        self, name: str, mine: dict[str, tuple[int, Chunk]], others: dict[str, tuple[int, Chunk]]
    ) -> list[tuple[int, Chunk]]:
        """Some chunks of a large message, in order: those that continue `mine`, or others."""
        random = self.random
        sequence_id, chunk = mine.get(name, (self._base, None))
        follow = ("follow",) * (4 if mine is self._stored else 1)
        step = random.choice(("next",) * 5 + follow + ("anew", "again", "skip", "other", "astray"))
        if step == "follow" and name in others:
            other_id, other = others[name]
            if chunk is None or (sequence_id, chunk.layout) != (other_id, other.layout):
                sequence_id, chunk = other_id, _after(other, -1 - other.chunk_id)
            chunk = _after(chunk, 1)
        elif chunk is None or random.random() < 0.2:
            sequence_id, chunk = self._id(name), self._attempt()
        elif step in ("anew", "other"):
            attempt = self._attempt()
            chunk = attempt if step == "anew" else _after(attempt, chunk.chunk_id)
        else:
            chunk = _after(chunk, {"again": random.choice((0, -1)), "skip": 2}.get(step, 1))
            sequence_id = self._id(name) if step == "astray" else sequence_id
        few_or_all = (1, 1, 2, random.randint(1, chunk.num_chunks), chunk.num_chunks)
        last = min(chunk.chunk_id + random.choice(few_or_all), chunk.num_chunks) - 1
        run = [chunk._replace(chunk_id=each) for each in range(chunk.chunk_id, last + 1)]
        mine[name] = sequence_id, run[-1]
        return [(sequence_id, each) for each in run]

    def _attempt(self) -> Chunk:
        """Usually the first chunk of an attempt."""
        random = self.random
        num_chunks = random.choice((2, 3, 16))
        chunk_id = random.choice((0, 0, 0, 0, 0, random.randrange(num_chunks)))
        return Chunk(random.choice(UUIDS), chunk_id, num_chunks, random.choice((100, 200)))

    def _withdrawals(self) -> list[Withdrawal]:
        return [Withdrawal(name, self._keep_through(name)) for name in self._names()]

    def _keep_through(self, name: str) -> int:
        stored, _ = self._stored.get(name, (NEVER, None))
        return self.random.choice((NEVER, stored, self._id(name)))


def _after(chunk: Chunk, steps: int) -> Chunk:
    """The chunk this many steps further; the first one follows the last."""
    return chunk._replace(chunk_id=(chunk.chunk_id + steps) % chunk.num_chunks)

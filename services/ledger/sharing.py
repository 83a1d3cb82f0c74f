"""What a ledger does beside others on its store: which topics it takes, loses and hands over, and
what its readers may know of them.

Ownership is advisory (owners.py): two instances may take a topic from each other, and one may learn
late that it lost one. So whoever takes a topic does it only if nobody did since it looked, and
whoever answers from a topic compares its ledger_id in the store.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Final

import structlog

from seqgate.services.errors import DomainError, Draining, Fenced, StoreUnavailable
from seqgate.services.ledger.core.entry import StoredEntry
from seqgate.services.ledger.core.ownership import HANDED_OVER_MAX, HandOver
from seqgate.services.ledger.live import LiveTopic
from seqgate.services.ledger.owners import SharedOwner
from seqgate.services.ledger.ports import LedgerRange, LedgerStore, LogState, TopicNotFound
from seqgate.services.runtime.locks import Locks
from seqgate.types import Position, TopicName

log = structlog.get_logger()

HAND_OVER_S: Final = 2.0
"""How long a topic's publications may take to be answered before it is handed over regardless."""

HAND_OVER_RETRY_S: Final = 0.1
"""RetryInfo for the callers of a topic that is handed over."""


class Sharing:
    """The topics of one ledger process among several."""

    def __init__(
        self,
        owner: SharedOwner,
        store: LedgerStore,
        live: dict[TopicName, LiveTopic],
        changing: Locks[TopicName],
        take: Callable[[TopicName], Awaitable[object]],
    ) -> None:
        """
        Args:
            live: the topics that the process writes.
            changing: held while a topic is taken or given up.
            take: becomes the writer of a topic that exists, unless another instance owns it.
        """
        self._owner = owner
        self._store = store
        self._live = live
        self._changing = changing
        self._take = take
        self._owned: frozenset[str] = frozenset()

    async def take(self, topic: TopicName, *, create: bool) -> LogState:
        """Take a topic from whoever wrote it, if no other instance owns it. The caller holds
        `changing`.

        Raises:
            NotOwner, Draining: as from SharedOwner.check.
            TopicNotFound: the topic does not exist, and `create` is false.
            StoreUnavailable: another instance took the topic meanwhile.
        """
        await self._owner.check(topic)
        try:
            seen = (await self._store.create(topic))[0] if create else await self._store.get(topic)
        except TopicNotFound:
            await self.settle()
            raise
        await self._owner.check(topic)
        try:
            with another_owns():
                state = await self._store.take(topic, create=False, ledger_id=seen.ledger_id)
        except TopicNotFound as error:
            if create:
                raise StoreUnavailable(
                    "the topic was deleted meanwhile", retry_after_s=HAND_OVER_RETRY_S
                ) from error
            raise
        await self._owner.took(topic, state.ledger_id)
        return state

    async def confirm(self) -> None:
        """See SharedOwner.confirm."""
        await self._owner.confirm()

    async def settle(self) -> None:
        """Return once everything that the store has shown is durable. A commit is durable only
        after all before it, and a beat is one.

        Raises:
            Draining, StoreUnavailable: as from SharedOwner.beat.
        """
        await self._owner.beat()

    async def gave_up(self, topic: TopicName, ledger_id: int) -> None:
        """See SharedOwner.gave_up."""
        await self._owner.gave_up(topic, ledger_id)

    async def retains(self, topic: TopicName) -> bool:
        """Whether this instance trims a topic by retention: one of those on the store does."""
        live = self._live.get(topic)
        if str(topic) in self._owned or (live is not None and not live.stopped):
            return True
        try:
            return await self._owner.is_mine_to_retain(topic)
        except DomainError as error:
            log.warning("retention pass failed", topic=str(topic), reason=error.reason)
            return False

    async def share_forever(self) -> None:
        """Share the topics with the other instances until this one leaves."""
        async with asyncio.TaskGroup() as both:
            both.create_task(self._owner.beat_forever())
            both.create_task(self._act_forever())

    async def _act_forever(self) -> None:
        while (sent_s := await self._owner.next_beat()) is not None:
            try:
                await self.act(sent_s)
            except DomainError as error:
                log.warning("sharing topics failed", reason=error.reason)
            except Exception:  # the next beat may succeed
                log.exception("sharing topics failed")

    async def act(self, sent_s: float) -> None:
        """Do what follows from a beat that was sent then: stop the topics that another instance
        took before, take those that are handed over to this one, and hand over those beyond its
        share."""
        surplus = self._owner.surplus()
        await self._owner.tidy()
        self._owned = owned = await self._owner.owned()
        for topic, live in list(self._live.items()):
            if str(topic) not in owned and live.taken_s < sent_s and not live.stopped:
                live.lose(Fenced("another instance took the topic"))
        await self._take_some(owned)
        if surplus is not None:
            idlest = sorted(
                ((topic, live) for topic, live in self._live.items() if not live.stopped),
                key=lambda each: len(each[1].producers),
            )
            await asyncio.gather(
                *(self._hand_over(*each, surplus) for each in idlest[: surplus.topics])
            )

    async def _take_some(self, owned: frozenset[str]) -> None:
        """Take topics that are recorded for this instance and that it does not write: those handed
        over to it. Untaken, they would be neither released when idle nor handed on."""
        topics = (TopicName.parse(name) for name in sorted(owned))
        missing = [
            each for each in topics if each not in self._live and not self._owner.is_giving_up(each)
        ]
        for topic in missing[:HANDED_OVER_MAX]:
            try:
                await self._take(topic)
            except (TopicNotFound, Draining):
                continue
            except DomainError as error:
                log.warning("topic not taken", topic=str(topic), reason=error.reason)

    async def _hand_over(self, topic: TopicName, live: LiveTopic, to: HandOver) -> None:
        async with self._changing.of(topic):
            await _quiet(live)
            if self._live.get(topic) is not live or live.stopped:
                return
            del self._live[topic]
            live.stop(Draining("the topic was handed over", retry_after_s=HAND_OVER_RETRY_S))
            await self._owner.hand_over(topic, live.ledger_id, to)
            log.info("topic handed over", topic=str(topic), to=to.successor.address)

    async def leave(self) -> None:
        """Hand over all topics, so that other instances go on with them at once."""
        self._owner.drain()
        await asyncio.gather(*(_quiet(live) for live in self._live.values()))
        for live in self._live.values():
            live.stop(Draining("the service is shutting down", retry_after_s=HAND_OVER_RETRY_S))
        await self._owner.leave()


async def _quiet(live: LiveTopic) -> None:
    """Wait until a topic's publications are answered, within a limit."""
    with suppress(TimeoutError):
        async with asyncio.timeout(HAND_OVER_S):
            await live.quiet()


@contextmanager
def another_owns() -> Iterator[None]:
    """Translate Fenced: the caller's next attempt finds the new owner."""
    try:
        yield
    except Fenced as error:
        raise StoreUnavailable(
            "the topic has a new owner", retry_after_s=HAND_OVER_RETRY_S
        ) from error


@contextmanager
def reading(live: LiveTopic | None) -> Iterator[None]:
    """Keep a topic while it is read."""
    if live is None:
        yield
        return
    live.readers += 1
    try:
        yield
    finally:
        live.readers -= 1


# ---- what is known to be durable: a store shows other entries, too, while their outcome is
# unknown. `live` is None in a process that is alone on its store, which tells only of durable ones.


def is_durable(live: LiveTopic | None, position: Position) -> bool:
    return live is None or (live.tail is not None and position <= live.tail)


def durable(live: LiveTopic | None, entries: list[StoredEntry]) -> list[StoredEntry]:
    if live is None or not entries or is_durable(live, entries[-1].position):
        return entries
    return [each for each in entries if is_durable(live, each.position)]


def durable_ranges(live: LiveTopic | None, ledgers: list[LedgerRange]) -> list[LedgerRange]:
    if live is None:
        return ledgers
    tail = live.tail
    return [
        each._replace(last_entry=tail.entry_id) if each.ledger_id == tail.ledger_id else each
        for each in ledgers
        if tail is not None and (each.ledger_id, each.first_entry) <= tail
    ]


def known(live: LiveTopic | None, state: LogState) -> LogState:
    """A topic's state in the store, as far as it is durable.

    Raises:
        StoreUnavailable: another instance took the topic, or this one is just taking it again.
    """
    if live is None:
        return state
    if live.ledger_id != state.ledger_id:
        if not (live.stopped or live.reopening):
            live.lose(Fenced("another instance took the topic"))
        raise StoreUnavailable("the topic has a new owner", retry_after_s=HAND_OVER_RETRY_S)
    first = state.first
    if first is not None and not is_durable(live, first):
        first = None
    return state._replace(first=first, tail=live.tail)

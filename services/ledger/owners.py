"""The shell around core/ownership.py: beats, and whom a topic belongs to.

A free topic is taken by whoever is asked for it. An instance that is asked for another's topic
answers NOT_OWNER with its address. Nobody's word counts for safety: a writer that was taken from is
fenced.
"""

import asyncio
import time
import uuid
from collections.abc import Callable
from math import inf
from typing import Final

import structlog

from seqgate.services.errors import DomainError, Draining, Kind
from seqgate.services.ledger.core.ownership import BEAT_S, HandOver, Watch
from seqgate.services.ledger.ports import Register
from seqgate.types import TopicName

log = structlog.get_logger()

RETRY_AFTER_S: Final = 0.5
"""RetryInfo for a caller while it is not known who owns a topic."""


class NotOwner(DomainError):
    """Another instance owns the topic."""

    kind = Kind.IN_USE
    reason = "NOT_OWNER"


class SharedOwner:
    """What this instance owns, beside others on its store."""

    def __init__(
        self,
        register: Register,
        address: str,
        *,
        now_s: Callable[[], float] | None = None,
    ) -> None:
        """
        Args:
            address: where clients reach this instance.
            now_s: a monotonic clock, by default this process's.
        """
        self._register = register
        self._address = address
        self._now_s = now_s or _monotonic
        self._watch = Watch(uuid.uuid4().hex, address)
        self._beating = asyncio.Lock()
        self._has_beaten = asyncio.Condition()
        self._sent_s = -inf
        self._is_leaving = self._has_left = False
        self._giving_up: dict[TopicName, int] = {}
        """Topics that are stopped here and still recorded for this instance, with the ledger_id
        that it had taken them with."""

    async def beat(self) -> float:
        """Count a beat, and look at the others'. Returns when it was sent.

        Raises:
            Draining: this instance has left.
            StoreUnavailable: the outcome is unknown.
        """
        async with self._beating:
            return await self._beat()

    async def _beat(self) -> float:
        if self._has_left:
            raise _draining()
        sent_s = self._now_s()
        beats = await self._register.beat(self._watch.instance, self._address)
        self._watch.look(beats, sent_s=sent_s, now_s=self._now_s())
        self._sent_s = max(self._sent_s, sent_s)
        async with self._has_beaten:
            self._has_beaten.notify_all()
        return sent_s

    async def confirm(self) -> None:
        """Return if nobody can have taken this instance for over.

        Raises:
            Draining: it is handing over.
            StoreUnavailable: it cannot be confirmed now.
        """
        if self._is_leaving:
            raise _draining()
        while not self._watch.is_confirmed(self._now_s()):
            async with self._beating:
                # All who wait for their turn are confirmed by one beat.
                if not self._watch.is_confirmed(self._now_s()):
                    await self._beat()

    async def check(self, topic: TopicName) -> None:
        """Return if this instance may take a topic.

        Raises:
            NotOwner: another one owns it, and may be alive; the error names its address.
            Draining, StoreUnavailable: as from confirm.
        """
        await self.confirm()
        owner = await self._register.owner(topic)
        if owner is None:
            return
        if not self._watch.knows(owner):
            await self.beat()  # it may have begun since the last look
        address = self._watch.address_of(owner)
        if owner != self._watch.instance and address is not None:
            raise NotOwner("another instance owns the topic", topic=topic, owner=address)

    async def took(self, topic: TopicName, ledger_id: int) -> None:
        """Record that this instance took a topic.

        Raises:
            StoreUnavailable: the outcome is unknown.
        """
        await self._register.own(topic, ledger_id, self._watch.instance)

    async def gave_up(self, topic: TopicName, ledger_id: int) -> None:
        """Record that nobody owns a topic that this instance took. If that fails, it is tried again
        by `tidy`."""
        self._giving_up[topic] = ledger_id
        try:
            await self._disown(topic, ledger_id)
        except DomainError as error:
            log.warning("topic not given up", topic=str(topic), reason=error.reason)

    async def _disown(self, topic: TopicName, ledger_id: int) -> None:
        await self._register.disown(topic, ledger_id)
        if self._giving_up.get(topic) == ledger_id:
            del self._giving_up[topic]

    async def hand_over(self, topic: TopicName, ledger_id: int, to: HandOver) -> None:
        """Record another instance as the owner of a topic that this one took, and has stopped."""
        try:
            await self._register.own(topic, ledger_id, to.successor.instance)
        except DomainError as error:
            log.warning("topic not handed over", topic=str(topic), reason=error.reason)

    async def owned(self) -> frozenset[str]:
        """The names of the topics that the store records for this instance."""
        return await self._register.owned(self._watch.instance)

    async def is_mine_to_retain(self, topic: TopicName) -> bool:
        """Whether this instance should trim a topic that it does not write: nobody owns it, and
        this is the first of the living."""
        if not self._watch.is_first():
            return False
        owner = await self._register.owner(topic)
        return owner is None or self._watch.is_over(owner)

    def surplus(self) -> HandOver | None:
        """What is to be handed over, by the last beat."""
        return None if self._is_leaving else self._watch.surplus()

    def is_giving_up(self, topic: TopicName) -> bool:
        return topic in self._giving_up

    async def tidy(self) -> None:
        """Give up what could not be given up, and remove instances that are over for long. What
        fails is left to the next call."""
        try:
            for topic, ledger_id in list(self._giving_up.items()):
                await self._disown(topic, ledger_id)
            for each in self._watch.forgotten():
                await self._register.leave(each)
        except DomainError as error:
            log.warning("register not tidied", reason=error.reason)

    async def beat_forever(self) -> None:
        """Beat until this instance leaves. Nothing else is done between two beats, however slow:
        others would take this instance for over."""
        while not self._has_left:
            try:
                await self.beat()
            except Draining:
                return
            except DomainError as error:
                log.warning("beat failed", reason=error.reason)
            except Exception:  # the next beat may succeed
                log.exception("beat failed")
            await asyncio.sleep(BEAT_S)

    async def next_beat(self) -> float | None:
        """Wait for a beat that is sent after this call, and so sees what was recorded before it.
        Returns when it was sent; None: this instance has left."""
        now_s = self._now_s()
        async with self._has_beaten:
            await self._has_beaten.wait_for(lambda: self._sent_s > now_s or self._has_left)
        return None if self._has_left else self._sent_s

    def drain(self) -> None:
        """Take no more topics."""
        self._is_leaving = True

    async def leave(self) -> None:
        """Give up all topics: others take them at once."""
        self._is_leaving = True
        try:
            async with self._beating:  # a beat under way must not bring the row back
                self._has_left = True
                async with self._has_beaten:
                    self._has_beaten.notify_all()
                await self._register.leave(self._watch.instance)
        except DomainError as error:
            log.warning("topics not given up", reason=error.reason)


def _monotonic() -> float:
    return time.monotonic()


def _draining() -> Draining:
    return Draining("the service is shutting down", retry_after_s=RETRY_AFTER_S)

"""What operators do to a subscription's dead letters besides redriving them: discard and mend.

One operation is made at a time, redrives included: each is checked against the result of the one
before. Once begun, it completes even if its caller is gone.
"""

import asyncio
from collections.abc import Iterable, Sequence
from typing import Final

from seqgate.api.ledger.v1.ledger_pb2 import StoredEntry
from seqgate.keys import sticky_key
from seqgate.services.dispatcher.core.history import What
from seqgate.services.dispatcher.cursor.tenure import Tenure
from seqgate.services.dispatcher.errors import TooManyReturns
from seqgate.services.dispatcher.letters.discarding import Discards
from seqgate.services.dispatcher.letters.graveyard import Graveyard, held_key
from seqgate.services.dispatcher.letters.listing import Listing, origin_of
from seqgate.services.dispatcher.letters.mending import Amendment, Mends
from seqgate.services.dispatcher.letters.operations import Action, Operation
from seqgate.services.dispatcher.letters.returns import Returns
from seqgate.services.dispatcher.ports import InvalidProperty, Ports
from seqgate.services.dispatcher.shell.performing import Performing
from seqgate.services.dispatcher.shell.work import Work
from seqgate.types import Position

SETTLES_S: Final = 5.0
"""How long an operation waits until a letter that was just written is acknowledged, in seconds."""


class Amending:
    """The operations on one subscription's letters."""

    def __init__(
        self,
        tenure: Tenure,
        ports: Ports,
        work: Work,
        graveyard: Graveyard,
        returns: Returns,
        performing: Performing,
        one_by_one: asyncio.Lock,
    ) -> None:
        """`one_by_one` is held while an operation is made, or a redrive."""
        self._one_by_one = one_by_one
        self._work = work
        self._graveyard = graveyard
        self._returns = returns
        self._performing = performing
        self._now_ms = ports.now_ms
        self._discards = Discards(tenure, returns)
        self._mends = Mends(
            tenure,
            returns,
            ports.dead_letters,
            ports.log,
            work.repeated,
            performing.changing,
        )

    @property
    def latest(self) -> Sequence[Operation]:
        """The latest operations, the oldest first."""
        return self._returns.operations.latest

    def operation(
        self,
        action: Action,
        listing: Listing,
        letters: Iterable[Position],
        request_id: str,
        caller: str,
        reason: str = "",
    ) -> Operation:
        """An operation that is made now, without a number."""
        named, now_ms = tuple(letters), self._now_ms()
        about = (request_id, caller, now_ms, listing.dead_letter_topic, named, len(named), reason)
        return Operation(0, action, *about)

    async def discard(
        self,
        listing: Listing,
        letters: Sequence[Position],
        request_id: str,
        *,
        reason: str,
        caller: str,
    ) -> tuple[Operation, bool]:
        """Give letters up, all or none. Also returns whether a request with this id did so before.
        Raises LetterNotDiscardable, TooManyReturns, LedgerUnavailable, ServiceBusy: nothing
        changed."""

        async def change() -> tuple[Operation, bool]:
            async with self._one_by_one:
                before = self._returns.operations.repeated(Action.DISCARD, request_id)
                if before is not None:
                    return before, True
                await self.settled(listing, letters)
                acknowledged = self._performing.machine.acknowledged
                entries = await self._discards.check(listing, letters, acknowledged)
                made = self.operation(Action.DISCARD, listing, letters, request_id, caller, reason)
                origins = [
                    (origin, sticky_key(each.metadata))
                    for each in entries
                    if (origin := origin_of(each.metadata)) is not None
                ]
                async with self._performing.changing:
                    return await self._discard(made, entries, origins), False

        return await self._work.finished(change)

    async def _discard(
        self,
        operation: Operation,
        entries: Sequence[StoredEntry],
        origins: Sequence[tuple[Position, bytes]],
    ) -> Operation:
        performing = self._performing

        def held() -> list[str]:
            lanes = [performing.machine.held_by(*each) for each in origins]
            return [held_key(each) for each in lanes if each is not None]

        try:
            made: Operation = await self._work.repeated(
                lambda: self._discards.make(operation, entries, held), unless=InvalidProperty
            )
        except InvalidProperty as error:
            raise TooManyReturns(
                "too many properties of the cursor: held keys, and settled letters",
                retry_after_s=60.0,
            ) from error
        self._record(What.DISCARDED, [origin for origin, _ in origins], made, made.reason)
        with self._work.contained():
            performing.apply(performing.machine.discarded(origins, performing.now_ms()))
        self._work.check()
        return made

    async def mend(
        self,
        listing: Listing,
        letter: Position,
        change: Amendment,
        request_id: str,
        *,
        caller: str,
    ) -> tuple[Operation, bool]:
        """Publish a changed copy of a letter, which takes its place. Also returns whether a request
        with this id did so before. Raises as Mends.mend, and ServiceBusy."""

        async def make() -> tuple[Operation, bool]:
            async with self._one_by_one:
                before = self._returns.operations.repeated(Action.MEND, request_id)
                if before is not None:
                    return before, True
                await self.settled(listing, [letter])
                acknowledged = self._performing.machine.acknowledged
                operation = self.operation(Action.MEND, listing, [letter], request_id, caller)
                found = await listing.find([letter])
                made = await self._mends.mend(listing, change, operation, acknowledged)
                origins = [origin_of(each.metadata) for each in found]
                self._record(What.MENDED, origins, made, str(made.successor))
                return made, False

        return await self._work.finished(make)

    def _record(
        self, what: What, origins: Iterable[Position | None], operation: Operation, text: str
    ) -> None:
        """Record an operation in the histories of the letters' messages."""
        history, now_ms = self._performing.history, self._now_ms()
        messages = [each for each in dict.fromkeys(origins) if each is not None]
        if history is not None and messages:
            history.record(what, now_ms, messages, str(operation.number), operation.caller, text)

    async def settled(self, listing: Listing, letters: Sequence[Position]) -> None:
        """Wait until messages whose letters were just written are acknowledged durably."""
        if not self._graveyard.begun:
            return
        origins = {origin_of(each.metadata) for each in await listing.find(letters)}
        written = self._graveyard.begun & origins

        def are_acknowledged() -> bool:
            return all(each in self._performing.machine.acknowledged for each in written)

        await self._performing.until(are_acknowledged, SETTLES_S)

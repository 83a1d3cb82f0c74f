"""Letters that are given up: they stay in the dead letter topic, marked, and are never redriven."""

from collections.abc import Callable, Sequence

import structlog

from seqgate.api.ledger.v1.ledger_pb2 import StoredEntry
from seqgate.services.dispatcher.core.positions import Acknowledged
from seqgate.services.dispatcher.cursor.tenure import Tenure
from seqgate.services.dispatcher.entries import position_of
from seqgate.services.dispatcher.errors import LetterNotDiscardable
from seqgate.services.dispatcher.letters.listing import Listing
from seqgate.services.dispatcher.letters.marks import Fate
from seqgate.services.dispatcher.letters.operations import Operation
from seqgate.services.dispatcher.letters.returns import Returns, too_many_settled
from seqgate.types import Position

log = structlog.get_logger()


class Discards:
    """The discards of one subscription's letters."""

    def __init__(self, tenure: Tenure, returns: Returns) -> None:
        self._names = {"topic": str(tenure.topic), "subscription": tenure.name}
        self._tenure = tenure
        self._returns = returns

    async def check(
        self, listing: Listing, letters: Sequence[Position], acknowledged: Acknowledged
    ) -> Sequence[StoredEntry]:
        """The entries of letters that can be discarded, all chunks of large ones. Raises
        LetterNotDiscardable, TooManyReturns, LedgerUnavailable, EntryCorrupt."""
        where = listing.dead_letter_topic
        found: dict[Position, StoredEntry] = {}
        for letter, entries in (await self._returns.named(listing, letters)).items():
            each_entry: Sequence[StoredEntry | None] = entries or [None]
            for entry in each_entry:
                place = letter if entry is None else position_of(entry)
                if because := self._returns.why_settled(listing, place, entry, acknowledged):
                    raise LetterNotDiscardable(
                        f"letter {letter} cannot be discarded: {because}",
                        letter=letter,
                        dead_letter_topic=where,
                    )
                assert entry is not None
                found[place] = entry
        if self._returns.marks.are_full_with([(where, each) for each in found], Fate.DISCARDED):
            raise too_many_settled()
        return list(found.values())

    async def make(
        self,
        operation: Operation,
        entries: Sequence[StoredEntry],
        held: Callable[[], Sequence[str]],
    ) -> Operation:
        """Make a discard durable, in one change with the keys held behind its letters: `held`
        returns the properties that hold them. Returns the numbered operation. Raises
        CursorsUnavailable, InvalidProperty: it may be durable or not, and may be repeated."""
        returns = self._returns
        async with returns.writing:
            made = returns.operations.numbered(operation)
            put, remove = returns.operations.change(made)
            letters = [(made.topic, position_of(each)) for each in entries]
            pages = returns.marks.with_letters(letters, Fate.DISCARDED)
            await self._tenure.set_properties(put | pages.texts, [*remove, *held()])
            returns.marks.apply(pages)
            returns.operations.record(made)
        log.info(
            "dead letters discarded",
            **self._names,
            operation=made.number,
            letters=made.size,
            caller=made.caller,
            reason=made.reason,
        )
        return made

"""Which entries of a dead letter topic, or of a log, a redrive takes.

    entries ──▶ letters of the subscription ──▶ key, expression ──▶ candidates ──▶ redriven
                                                     │                   │
                                          not selected, failed     on its way, settled, ...

What does not change meanwhile is judged first, and may wait for the filter service. The rest is
decided by `outcome_now` at once, before a change is made.
"""

from collections.abc import Callable, Container, Sequence
from typing import Final, NamedTuple, Protocol

from seqgate.api.ledger.v1.ledger_pb2 import StoredEntry
from seqgate.keys import sticky_key
from seqgate.services.dispatcher.core.effects import ACCEPT, REJECT
from seqgate.services.dispatcher.core.positions import Acknowledged
from seqgate.services.dispatcher.entries import position_of
from seqgate.services.dispatcher.filtering.chains import Chain
from seqgate.services.dispatcher.filtering.trial import Trial
from seqgate.services.dispatcher.letters.listing import Listing, origin_of
from seqgate.services.dispatcher.letters.record import RedriveOutcome, Selection
from seqgate.services.dispatcher.letters.returns import (
    REDRIVES_MAX,
    Returns,
    delivered,
    is_chunk,
    redrives_of,
)
from seqgate.services.dispatcher.ports import Decision, Filter
from seqgate.types import Position, TopicName

NAME: Final = "redrive"
"""The name of the expression, as a filter."""


class Candidate(NamedTuple):
    """An entry of the source.

    Attributes:
        origin: the position of its message in the subscription's topic; None: it has none.
        outcome: why its message is left out; None: it is selected.
    """

    position: Position
    origin: Position | None
    entry: StoredEntry
    outcome: RedriveOutcome | None


class Redrivable(Protocol):
    """A subscription, as far as a redrive depends on it."""

    topic: TopicName
    returns: Returns

    @property
    def acknowledged(self) -> Acknowledged: ...

    @property
    def chain(self) -> Chain:
        """The filters that apply to new entries."""
        ...

    def letters(self, dead_letter_topic: TopicName | None) -> Listing: ...

    def trial(self, chain: Chain) -> Trial: ...


class Selecting:
    """Judges the entries of a source by a selection."""

    def __init__(self, of: Redrivable, source: TopicName, selection: Selection) -> None:
        self._key = selection.key
        self._listing = None if source == of.topic else of.letters(source)
        self._expression: Trial | None = None
        if selection.expression:
            chain = Chain((Filter(NAME, 1, selection.expression),))
            self._expression = of.trial(chain)
        # A replay delivers nothing that the subscription's filters reject.
        is_filtered = self._listing is None and of.chain.filters
        self._filters = of.trial(of.chain) if is_filtered else None

    async def check(self) -> None:
        """Raises InvalidExpression, InvalidChain, FiltersUnavailable."""
        if self._expression is not None:
            await self._expression.check()

    async def close(self) -> None:
        for each in (self._expression, self._filters):
            if each is not None:
                await each.close()

    async def judge(self, entries: Sequence[StoredEntry]) -> list[Candidate]:
        """The candidates among entries. Raises as `check`."""
        found = [each for entry in entries if (each := self._candidate(entry)) is not None]
        found = await self._judge(found, self._expression, _by_expression, self._as_delivered)
        return await self._judge(found, self._filters, _by_filters, lambda each: each.entry)

    async def _judge(
        self,
        found: list[Candidate],
        trial: Trial | None,
        outcome_of: Callable[[Decision], RedriveOutcome | None],
        shown: Callable[[Candidate], StoredEntry],
    ) -> list[Candidate]:
        asked = [place for place, each in enumerate(found) if each.outcome is None]
        if trial is None or not asked:
            return found
        decisions = await trial.judge([shown(found[place]) for place in asked])
        for place, each in zip(asked, decisions, strict=True):
            found[place] = found[place]._replace(outcome=outcome_of(each))
        return found

    def _candidate(self, entry: StoredEntry) -> Candidate | None:
        """None: it is no message, or no letter of the subscription."""
        position = position_of(entry)
        if self._listing is None:
            if entry.metadata.HasField("marker_type"):
                return None
            return Candidate(position, position, entry, self._why_not(entry, is_letter=False))
        if not self._listing.has(entry):
            return None
        origin = origin_of(entry.metadata)
        return Candidate(position, origin, entry, self._why_not(entry, is_letter=True))

    def _why_not(self, entry: StoredEntry, *, is_letter: bool) -> RedriveOutcome | None:
        if self._key is not None and sticky_key(entry.metadata) != self._key:
            return RedriveOutcome.NOT_SELECTED
        if is_chunk(entry):
            return RedriveOutcome.CHUNK
        if is_letter and redrives_of(entry) >= REDRIVES_MAX:
            return RedriveOutcome.REDRIVEN_TOO_OFTEN
        return None

    def _as_delivered(self, each: Candidate) -> StoredEntry:
        """A message as it would be delivered, with the properties of its letter."""
        if self._listing is None:
            return each.entry
        assert each.origin is not None
        shown = delivered(each.entry, each.origin)
        for name, value in each.entry.metadata.properties.items():
            shown.metadata.properties.setdefault(name, value)
        return shown


def outcome_now(
    of: Redrivable, source: TopicName, each: Candidate, taken: Container[Position]
) -> RedriveOutcome:
    """What becomes of a candidate now; `taken` has the origins of those before it."""
    if each.outcome is not None:
        return each.outcome
    assert each.origin is not None
    if source != of.topic and of.returns.why_over(source, each.entry):
        return RedriveOutcome.SETTLED
    if each.origin in of.returns.open or each.origin in taken:
        return RedriveOutcome.RETURNING
    if each.origin not in of.acknowledged:
        return RedriveOutcome.UNACKNOWLEDGED
    return RedriveOutcome.REDRIVEN


def _by_expression(decision: Decision) -> RedriveOutcome | None:
    if decision.failure is not None:
        return RedriveOutcome.EXPRESSION_FAILED
    return None if decision.verdict == ACCEPT else RedriveOutcome.NOT_SELECTED


def _by_filters(decision: Decision) -> RedriveOutcome | None:
    is_rejected = decision.failure is not None or decision.verdict == REJECT
    return RedriveOutcome.FILTERED if is_rejected else None

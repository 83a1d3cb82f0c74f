"""Which entries of a dead letter topic, or of a log, a redrive takes.

    entries ──▶ letters of the subscription ──▶ key, expression ──▶ candidates ──▶ redriven
                                                     │                   │
                                          not selected, failed     on its way, settled, ...

What does not change meanwhile is judged first, and may wait for the filter service. The rest is
decided by `outcome_now` at once, before a change is made.
"""

from collections import defaultdict
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Final, NamedTuple, Protocol

from seqgate.api.ledger.v1.ledger_pb2 import StoredEntry
from seqgate.keys import sticky_key
from seqgate.services.dispatcher.core.effects import ACCEPT, REJECT
from seqgate.services.dispatcher.core.positions import Acknowledged
from seqgate.services.dispatcher.entries import position_of
from seqgate.services.dispatcher.filtering.chains import Chain
from seqgate.services.dispatcher.filtering.trial import Trial
from seqgate.services.dispatcher.letters.chunks import is_earlier_chunk, message_of, put, whole
from seqgate.services.dispatcher.letters.listing import Listing, origin_of
from seqgate.services.dispatcher.letters.record import RedriveOutcome, Selection
from seqgate.services.dispatcher.letters.returns import (
    REDRIVES_MAX,
    RETURNS_MAX,
    Returns,
    delivered,
    is_lone_chunk,
    redrives_of,
)
from seqgate.services.dispatcher.ports import Decision, Filter, Log
from seqgate.types import Position, TopicName

NAME: Final = "redrive"
"""The name of the expression, as a filter."""


CHUNKS_BYTES_MAX: Final = 4 * 1024 * 1024
"""The bytes of chunks, without payloads, at which no more entries are judged at once: those of one
message may exceed it."""


class Candidate(NamedTuple):
    """A message of the source, or a batch.

    Attributes:
        entry: its entry; of a large message, its last chunk.
        parts: its entries, by their positions in the subscription's topic. A large message that is
            left out may have none.
        outcome: why it is left out; None: it is selected.
    """

    entry: StoredEntry
    parts: Mapping[Position, StoredEntry]
    outcome: RedriveOutcome | None

    @property
    def position(self) -> Position:
        return position_of(self.entry)


class Judged(NamedTuple):
    """The candidates among the first entries, and how many entries were judged."""

    candidates: Sequence[Candidate]
    read: int


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

    def __init__(self, of: Redrivable, log: Log, source: TopicName, selection: Selection) -> None:
        self._log = log
        self._source = source
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

    async def judge(self, entries: Sequence[StoredEntry]) -> Judged:
        """Judge consecutive entries: all, or the first ones once their chunks take
        CHUNKS_BYTES_MAX. Raises as `check`."""
        found, read = await self._candidates(entries)
        found = await self._judge(found, self._expression, _by_expression, self._as_delivered)
        found = await self._judge(found, self._filters, _by_filters, lambda each: each.entry)
        return Judged(found, read)

    async def _candidates(self, entries: Sequence[StoredEntry]) -> tuple[list[Candidate], int]:
        found, chunks_bytes = list[Candidate](), 0
        chunks = defaultdict[tuple[object, ...], dict[int, StoredEntry]](dict)
        for read, entry in enumerate(entries, 1):
            if not self._is_message(entry):
                continue
            near = chunks[message_of(entry)] if entry.metadata.num_chunks_from_msg > 1 else {}
            put(near, entry)
            if not is_earlier_chunk(entry):
                candidate = await self._candidate(entry, near)
                found.append(candidate)
                if len(candidate.parts) > 1:
                    chunks_bytes += sum(part.ByteSize() for part in candidate.parts.values())
                    if chunks_bytes >= CHUNKS_BYTES_MAX:
                        return found, read
        return found, len(entries)

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

    def _is_message(self, entry: StoredEntry) -> bool:
        """Whether an entry of the source is one of the subscription's messages or letters."""
        if self._listing is None:
            return not entry.metadata.HasField("marker_type")
        return self._listing.has(entry)

    async def _candidate(self, entry: StoredEntry, near: Mapping[int, StoredEntry]) -> Candidate:
        """`near`: chunks of the message that were just read."""
        metadata = entry.metadata
        if self._key is not None and sticky_key(metadata) != self._key:
            return Candidate(entry, {}, RedriveOutcome.NOT_SELECTED)
        if self._listing is not None and redrives_of(entry) >= REDRIVES_MAX:
            return Candidate(entry, {}, RedriveOutcome.REDRIVEN_TOO_OFTEN)
        count = max(1, metadata.num_chunks_from_msg)
        if count > RETURNS_MAX:
            return Candidate(entry, {}, RedriveOutcome.TOO_LARGE)
        chunks = [near[number] for number in sorted(near)]
        if len(chunks) < count:
            chunks = await whole(self._log, self._source, entry, self._is_message)
        if len(chunks) < count or is_lone_chunk(entry):
            return Candidate(entry, {}, RedriveOutcome.INCOMPLETE)
        return Candidate(entry, {self._origin(each): each for each in chunks}, None)

    def _origin(self, entry: StoredEntry) -> Position:
        """The position of an entry's message in the subscription's topic."""
        origin = position_of(entry) if self._listing is None else origin_of(entry.metadata)
        assert origin is not None, "else it is no letter"
        return origin

    def _as_delivered(self, each: Candidate) -> StoredEntry:
        """A message as it would be delivered, with the properties of its letter."""
        if self._listing is None:
            return each.entry
        shown = delivered(each.entry, self._origin(each.entry))
        for name, value in each.entry.metadata.properties.items():
            shown.metadata.properties.setdefault(name, value)
        return shown


def outcome_now(
    of: Redrivable, source: TopicName, each: Candidate, taken: Container[Position]
) -> RedriveOutcome:
    """What becomes of a candidate now; `taken` has the origins of those before it."""
    if each.outcome is not None:
        return each.outcome
    parts = each.parts
    if source != of.topic and any(of.returns.why_over(source, part) for part in parts.values()):
        return RedriveOutcome.SETTLED
    if any(origin in of.returns.open or origin in taken for origin in parts):
        return RedriveOutcome.RETURNING
    if any(origin not in of.acknowledged for origin in parts):
        return RedriveOutcome.UNACKNOWLEDGED
    return RedriveOutcome.REDRIVEN


def _by_expression(decision: Decision) -> RedriveOutcome | None:
    if decision.failure is not None:
        return RedriveOutcome.EXPRESSION_FAILED
    return None if decision.verdict == ACCEPT else RedriveOutcome.NOT_SELECTED


def _by_filters(decision: Decision) -> RedriveOutcome | None:
    is_rejected = decision.failure is not None or decision.verdict == REJECT
    return RedriveOutcome.FILTERED if is_rejected else None

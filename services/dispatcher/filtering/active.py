"""An active chain: the fields that it reads, and a cache of its verdicts.

A verdict is cached, with its tally, by the fields that the chain reads of an entry.
"""

from collections.abc import Hashable, Mapping
from typing import Final, NamedTuple

from seqgate.api.entry.v1.entry_pb2 import EntryMetadata
from seqgate.services.dispatcher.core.effects import ACCEPT, FILTER_FAILED, REJECT, UNJUDGED
from seqgate.services.dispatcher.core.history import What
from seqgate.services.dispatcher.filtering.chains import Chain, Policy
from seqgate.services.dispatcher.filtering.projection import Projection
from seqgate.services.dispatcher.filtering.tallies import (
    ACCEPTED,
    REJECTED,
    RESCHEDULED,
    Tallies,
    Tally,
)
from seqgate.services.dispatcher.ports import Decision, Line, Reads, Rules
from seqgate.types import TopicName

VERDICTS_MAX: Final = 10_000
"""The most verdicts cached for a chain."""

VERDICT_BYTES_MAX: Final = 1_024
"""The longest metadata, in bytes, by which a verdict is cached."""

UNAVAILABLE: Final = "UNAVAILABLE"
NOT_ASKED: Final = "NOT_ASKED"
"""Reasons of a missing verdict, besides those of the filter service."""


class Known(NamedTuple):
    """The verdict on entries, its tally, and, if filters failed, their decision. `event` is its
    event in the entries' histories, with details; None: it has none."""

    verdict: int
    tally: Tally
    decision: Decision | None = None
    event: tuple[What, tuple[str, ...]] | None = None


class ActiveChain:
    """A chain in use.

    Attributes:
        projection: the fields that it reads; None: not known yet.
        known: cached verdicts, by the fields that it reads of an entry.
        unanswered: the verdict while the filter service does not answer.
    """

    def __init__(self, chain: Chain, tallies: Tallies, *, is_shadow: bool) -> None:
        self.chain = chain
        self.names = tuple((each.name, each.version) for each in chain.filters)
        self.projection: Projection | None = None
        self.rules: Rules | None = None
        self.known: dict[Hashable, Known] = {}
        self._tallies = tallies
        self._is_shadow = is_shadow
        verdict = _unanswered(chain.policy)
        said = ("", "", f"{UNAVAILABLE}: the filter service did not answer")
        event = None if verdict == UNJUDGED else (What.FILTER_FAILED, said)
        self.unanswered = Known(verdict, self.tally(None, UNAVAILABLE), event=event)

    async def prepare(self, line: Line, topic: TopicName, properties: Mapping[str, str]) -> None:
        """Ask the filter service which fields the chain reads, unless they are known."""
        if self.projection is None:
            self.rules, self.projection = await prepared(line, self.chain, topic, properties)

    def stays(self, properties: Mapping[str, str]) -> bool:
        """Whether its verdicts hold for these properties of the subscription."""
        rules, projection = self.rules, self.projection
        if rules is None or projection is None:
            return False  # `prepare` may be running with other properties
        return _given(projection.reads, properties) == rules.properties

    async def ask(
        self, line: Line, asked: Mapping[Hashable, EntryMetadata]
    ) -> dict[Hashable, Known]:
        """Verdicts of the filter service, by key; those whose keys may recur are cached."""
        projection, rules = self.projection, self.rules
        assert projection is not None
        assert rules is not None
        metadata = [projection.metadata_of(each) for each in asked.values()]
        decisions = await line.judge(rules, metadata)
        known_by = {each: self._known_by(each) for each in set(decisions)}
        found = dict(zip(asked, map(known_by.__getitem__, decisions), strict=True))
        if projection.recurs:
            for (key, known), decisive in zip(found.items(), metadata, strict=True):
                if decisive.ByteSize() <= VERDICT_BYTES_MAX:
                    self.known[key] = known
        if len(self.known) > VERDICTS_MAX:
            for key in list(self.known)[: len(self.known) - VERDICTS_MAX // 2]:
                del self.known[key]
        return found

    def tally(self, place: int | None, verdict: str) -> Tally:
        return self._tallies.of(self.names, place, verdict, is_shadow=self._is_shadow)

    def _known_by(self, decision: Decision) -> Known:
        verdict, place, failure = decision
        by = ("", "")
        if place is not None and place < len(self.names):
            by = (self.names[place][0], str(self.names[place][1]))
        if failure is not None:
            verdict = {Policy.ACCEPT: ACCEPT, Policy.REJECT: REJECT}.get(
                self.chain.policy, FILTER_FAILED
            )
            said = (*by, f"{failure.reason}: {failure.message}")
            tally = self.tally(place, failure.reason)
            return Known(verdict, tally, decision, (What.FILTER_FAILED, said))
        if verdict > 0:
            event = (What.RESCHEDULED, (*by, str(verdict)))
            return Known(verdict, self.tally(place, RESCHEDULED), event=event)
        if verdict == ACCEPT:
            chain = ", ".join(f"{name} {version}" for name, version in self.names)
            tally = self.tally(place, ACCEPTED)
            return Known(verdict, tally, event=(What.ACCEPTED, (chain,)))
        return Known(verdict, self.tally(place, REJECTED), event=(What.REJECTED, by))


async def prepared(
    line: Line, chain: Chain, topic: TopicName, properties: Mapping[str, str]
) -> tuple[Rules, Projection]:
    """A chain with the subscription's properties and the entries' fields that it reads. Raises
    InvalidExpression or InvalidChain if the filter service refuses the chain, FiltersUnavailable if
    the service does not answer."""
    rules = Rules(chain.filters, str(topic))
    reads = await line.reads(rules)
    given = _given(reads, properties)
    if given:
        rules = rules._replace(properties=given)
        await line.reads(rules)
    return rules, Projection(reads)


def _given(reads: Reads, properties: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """The subscription's properties that are read."""
    names = properties if reads.subscription is None else reads.subscription
    return tuple((name, properties[name]) for name in sorted(names) if name in properties)


def _unanswered(policy: Policy) -> int:
    return {Policy.ACCEPT: ACCEPT, Policy.REJECT: REJECT}.get(policy, UNJUDGED)


UNFILTERED: Final = Known(ACCEPT, Tally())
"""Of an entry to which no chain applies; not counted."""

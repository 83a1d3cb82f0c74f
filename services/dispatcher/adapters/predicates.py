"""Filters in memory, for tests: an expression is a name for a Python function."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from seqgate.api.entry.v1 import entry_pb2
from seqgate.services.dispatcher.core.effects import ACCEPT, FILTER_FAILED
from seqgate.services.dispatcher.ports import (
    Decision,
    Failure,
    FiltersUnavailable,
    InvalidChain,
    InvalidExpression,
    Reads,
    Rules,
)

FILTERS_MAX = 16
"""How many filters a chain may have."""


class Predicate(NamedTuple):
    """The Python function behind an expression.

    Attributes:
        judge: the verdict on an entry, as in core.effects; a KeyError means that a property is
            absent.
    """

    reads: Reads
    judge: Callable[[entry_pb2.EntryMetadata, Rules], int]


class MemoryFilters:
    """See seqgate.services.dispatcher.ports.Filters.

    Attributes:
        available: whether it answers.
        answers: while cleared, answers are late.
        asked: the number of entries judged so far.
    """

    def __init__(self, predicates: Mapping[str, Predicate]) -> None:
        self.available = True
        self.answers = asyncio.Event()
        self.answers.set()
        self.asked = 0
        self.predicates = dict(predicates)

    def line(self) -> "MemoryLine":
        return MemoryLine(self)


class MemoryLine:
    """See seqgate.services.dispatcher.ports.Line."""

    def __init__(self, filters: MemoryFilters) -> None:
        self._filters = filters

    async def reads(self, rules: Rules) -> Reads:
        await self._check()
        found = [each.reads for each in self._predicates(rules)]
        by_name = [each.properties for each in found if each.properties is not None]
        of_subscription = [each.subscription for each in found if each.subscription is not None]
        return Reads(
            frozenset().union(*(each.variables for each in found)),
            None if len(by_name) < len(found) else _sorted(by_name),
            None if len(of_subscription) < len(found) else _sorted(of_subscription),
        )

    async def judge(
        self, rules: Rules, metadata: Sequence[entry_pb2.EntryMetadata]
    ) -> Sequence[Decision]:
        await self._check()
        predicates = self._predicates(rules)
        self._filters.asked += len(metadata)
        return [_judged(predicates, rules, each) for each in metadata]

    async def close(self) -> None:
        pass

    async def _check(self) -> None:
        await self._filters.answers.wait()
        if not self._filters.available:
            raise FiltersUnavailable("the filter service does not answer", retry_after_s=0.5)

    def _predicates(self, rules: Rules) -> list[Predicate]:
        if len(rules.filters) > FILTERS_MAX:
            raise InvalidChain("too many filters", field="filters")
        for each in rules.filters:
            if each.expression not in self._filters.predicates:
                raise InvalidExpression(
                    "no such predicate", field="filters", filter=each.name, version=each.version
                )
        return [self._filters.predicates[each.expression] for each in rules.filters]


def _judged(
    predicates: Sequence[Predicate], rules: Rules, metadata: entry_pb2.EntryMetadata
) -> Decision:
    is_unknown = metadata.HasField("num_messages_in_batch") and not metadata.properties
    for place, predicate in enumerate(predicates):
        if is_unknown and "properties" in predicate.reads.variables:
            continue
        try:
            verdict = predicate.judge(metadata, rules)
        except KeyError as error:
            return Decision(
                FILTER_FAILED, place, Failure("PROPERTY_ABSENT", f"there is no {error}")
            )
        if verdict != ACCEPT:
            return Decision(verdict, place)
    return Decision(ACCEPT)


def _sorted(names: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    return tuple(sorted({name for each in names for name in each}))

"""A batch of entries that is judged some steps at a time, so that the caller can serve other
requests in between. A step is one of `cost`; an entry with a cached decision takes a few.
"""

from collections.abc import Iterator, Sequence
from typing import Final

from seqgate.services.filter.core.chain import Chain, Decision, ReadKey, weight_of
from seqgate.services.filter.core.memo import Memo

REMEMBERED_STEPS: Final = 20
"""The cost of an entry with a cached decision."""


class Judging:
    def __init__(self, chain: Chain, read: ReadKey, memo: Memo, entries: Sequence[object]) -> None:
        self._chain = chain
        self._read = read
        self._memo = memo
        self._left: Iterator[object] = iter(entries)
        self._count = len(entries)
        self._numbers: dict[int, int] = {}  # by id() of a decision, which is quicker than its hash
        self._decisions: list[Decision] = []
        self._which: list[int] = []
        self.evaluated = 0
        """The number of entries without a cached decision."""

    def outcomes(self) -> tuple[list[Decision], list[int]]:
        """The distinct decisions, and for each entry the index of its own."""
        places: dict[Decision, int] = {}
        renumbered = [places.setdefault(each, len(places)) for each in self._decisions]
        if len(places) == len(renumbered):
            return self._decisions, self._which
        return list(places), [renumbered[each] for each in self._which]

    def go_on(self, steps: int) -> bool:
        """Judge entries, at least one, until the steps are spent. Returns whether any is left."""
        chain, read, memo = self._chain, self._read, self._memo
        young = memo.young
        numbers, decisions, which = self._numbers, self._decisions, self._which
        for entry in self._left:
            key = read(entry)
            decision = young.get(key)
            steps -= REMEMBERED_STEPS
            if decision is None:
                decision = memo.get(key)
                if decision is None:
                    weight = weight_of(key)
                    decision = chain.decide(key, weight)
                    self.evaluated += 1
                    memo.put(key, decision, weight)
                    steps -= chain.steps
                young = memo.young
            number = numbers.get(id(decision))
            if number is None:
                number = numbers[id(decision)] = len(decisions)
                decisions.append(decision)
            which.append(number)
            if steps <= 0:
                break
        return len(which) < self._count

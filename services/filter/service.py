"""The filter service behind the wire: compiles expressions into programs, and filters into chains.
Programs are cached by their text, decisions by their chain's content; both caches are bounded."""

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from seqgate.services.errors import DomainError, Kind
from seqgate.services.filter.core.chain import FILTERS_MAX, TOPIC, Chain
from seqgate.services.filter.core.cost import SUBSCRIPTION_BYTES_MAX, SUBSCRIPTION_PROPERTIES_MAX
from seqgate.services.filter.core.faults import InvalidExpression
from seqgate.services.filter.core.memo import Memo
from seqgate.services.filter.core.program import Program, check_text, program_of
from seqgate.services.filter.core.reads import SUBSCRIPTION
from seqgate.services.filter.core.room import ChainRoom
from seqgate.services.filter.metrics import FilterMetrics
from seqgate.services.filter.ports import Engine

CHAIN_COST_MAX: Final = 1_000_000
"""The most that the filters of a chain may cost together, in steps, at the largest entry."""

_SIZE: Final = 8
"""The bytes of the length that precedes each text in a digest."""


class InvalidChain(DomainError):
    """A chain has too many filters or costs too much, a filter's name is invalid, the subscription
    has too many properties, or the chain id is unknown."""

    kind = Kind.INVALID
    reason = "INVALID_CHAIN"


@dataclass(frozen=True, slots=True)
class Filter:
    """One expression of a chain."""

    name: str
    version: int
    expression: str


class Filters:
    def __init__(
        self,
        engine: Engine,
        memo: Memo,
        *,
        programs_max: int,
        program_bytes_max: int,
        chain_bytes_max: int,
        metrics: FilterMetrics | None = None,
    ) -> None:
        self.memo = memo
        self.chain_room = ChainRoom(chain_bytes_max)
        self.metrics = metrics or FilterMetrics()
        self._engine = engine
        self._programs_max = programs_max
        self._program_bytes_max = program_bytes_max
        self._programs: OrderedDict[str, Program] = OrderedDict()
        self._program_bytes = 0

    def program(self, text: str) -> Program:
        """Compile an expression, or find it in the cache. Raises InvalidExpression."""
        program = self._programs.get(text)
        if program is not None:
            self._programs.move_to_end(text)
            self.metrics.compilations["remembered"] += 1
            return program
        try:
            check_text(text)
            program = program_of(text, self._engine.compile(text))
        except InvalidExpression:
            self.metrics.compilations["refused"] += 1
            raise
        self.metrics.compilations["compiled"] += 1
        self._keep(program)
        return program

    async def chain(
        self, filters: Sequence[Filter], topic: str, subscription: Mapping[str, str]
    ) -> Chain:
        """Compile a chain; other tasks run between its filters. Raises InvalidChain above a limit
        of filters, properties or cost, and InvalidExpression for a filter."""
        if len(filters) > FILTERS_MAX:
            raise InvalidChain(
                f"too many filters (limit {FILTERS_MAX})", field="filters", count=len(filters)
            )
        check_subscription(subscription)
        programs = []
        for index, each in enumerate(filters):
            try:
                programs.append(self.program(each.expression))
            except InvalidExpression as error:
                raise InvalidExpression.of(
                    error.faults,
                    field=f"filters[{index}].expression",
                    filter=each.name,
                    version=each.version,
                ) from error
            await asyncio.sleep(0)
        chain = chain_of(programs, topic, subscription)
        if chain.steps > CHAIN_COST_MAX:
            raise InvalidChain(
                f"chain costs {chain.steps:,} steps for an entry (limit {CHAIN_COST_MAX:,})",
                field="filters",
                cost=chain.steps,
            )
        return chain

    def _keep(self, program: Program) -> None:
        self._programs[program.text] = program
        self._program_bytes += program.compiled.size_bytes
        while len(self._programs) > self._programs_max or (
            self._program_bytes > self._program_bytes_max and self._programs
        ):
            _, oldest = self._programs.popitem(last=False)
            self._program_bytes -= oldest.compiled.size_bytes

    @property
    def kept(self) -> tuple[int, int]:
        """The number of cached programs, and their bytes."""
        return len(self._programs), self._program_bytes


def chain_of(programs: Sequence[Program], topic: str, subscription: Mapping[str, str]) -> Chain:
    """A chain of programs. Its digest covers all inputs of a decision except the entry."""
    digest = hashlib.blake2b(digest_size=16)
    pairs = [part for pair in sorted(subscription.items()) for part in pair]
    for part in (str(len(programs)), *(each.text for each in programs), topic, *pairs):
        encoded = part.encode()
        digest.update(len(encoded).to_bytes(_SIZE, "big") + encoded)
    constants = {TOPIC: topic, SUBSCRIPTION: dict(subscription)}
    return Chain(digest.digest(), programs, constants)


def check_subscription(properties: Mapping[str, str]) -> None:
    """Raises InvalidChain if a subscription's properties are too many or too large for filters."""
    size = sum(len(name.encode()) + len(value.encode()) for name, value in properties.items())
    if len(properties) > SUBSCRIPTION_PROPERTIES_MAX or size > SUBSCRIPTION_BYTES_MAX:
        raise InvalidChain(
            f"subscription properties too large for filters (limit {SUBSCRIPTION_PROPERTIES_MAX:,} "
            f"properties, {SUBSCRIPTION_BYTES_MAX:,} bytes)",
            field="subscription",
            count=len(properties),
            bytes=size,
        )

"""A trial of chains: their verdicts change nothing and are not counted."""

from collections.abc import Hashable, Mapping, Sequence

from seqgate.api.ledger.v1.ledger_pb2 import StoredEntry
from seqgate.services.dispatcher.core.effects import ACCEPT
from seqgate.services.dispatcher.entries import position_of
from seqgate.services.dispatcher.filtering.active import VERDICTS_MAX, prepared
from seqgate.services.dispatcher.filtering.chains import Chain, Chains
from seqgate.services.dispatcher.filtering.projection import Projection
from seqgate.services.dispatcher.ports import Decision, Line, Rules
from seqgate.types import TopicName


class Trial:
    def __init__(
        self, line: Line, topic: TopicName, chains: Chains, properties: Mapping[str, str]
    ) -> None:
        self._line = line
        self._topic = topic
        self._chains = chains
        self._properties = dict(properties)
        self._prepared: dict[Chain, tuple[Rules, Projection]] = {}
        self._known: dict[tuple[Chain, Hashable], Decision] = {}

    async def check(self) -> None:
        """Check all chains at the filter service. Raises as `prepared`."""
        for stretch in self._chains.applied:
            if stretch.chain.filters:
                await self._of(stretch.chain)

    async def judge(self, entries: Sequence[StoredEntry]) -> Sequence[Decision]:
        """The chains' decisions on entries. Raises as `prepared`."""
        found: list[Decision] = [Decision(ACCEPT)] * len(entries)
        places: dict[Chain, list[int]] = {}
        for place, each in enumerate(entries):
            places.setdefault(self._chains.at(position_of(each)), []).append(place)
        for chain, some in places.items():
            if chain.filters:
                decisions = await self._judge(chain, [entries[place] for place in some])
                for place, decision in zip(some, decisions, strict=True):
                    found[place] = decision
        return found

    async def close(self) -> None:
        await self._line.close()

    async def _of(self, chain: Chain) -> tuple[Rules, Projection]:
        if chain not in self._prepared:
            self._prepared[chain] = await prepared(self._line, chain, self._topic, self._properties)
        return self._prepared[chain]

    async def _judge(self, chain: Chain, entries: Sequence[StoredEntry]) -> Sequence[Decision]:
        rules, projection = await self._of(chain)
        keys = [(chain, projection.key_of(each.metadata)) for each in entries]
        asked = {
            key: projection.metadata_of(each.metadata)
            for key, each in zip(keys, entries, strict=True)
            if key not in self._known
        }
        decisions = await self._line.judge(rules, list(asked.values())) if asked else []
        known = self._known | dict(zip(asked, decisions, strict=True))
        if projection.recurs and len(known) <= VERDICTS_MAX:
            self._known = known
        return [known[key] for key in keys]

"""Records, and topics, that are forgotten when the process ends. For tests."""

from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from services.errors import DomainError
from services.placement.core.placing import Holding, Placement, fewest
from services.placement.ports import Row


class MemoryKeeper:
    """See services.placement.ports.Keeper."""

    def __init__(self, instances: Sequence[str]) -> None:
        self._instances = instances
        self.records: dict[str, Placement] = {}
        self.failure: DomainError | None = None

    async def find(self, topic: str) -> Placement | None:
        self._answer()
        return self.records.get(topic)

    async def place(
        self, topic: str, *, version: int, owner: str, move: str
    ) -> tuple[Placement, bool]:
        self._answer()
        record = self.records.get(topic)
        if record is not None and record.version != version:
            return record, False
        version = 0 if record is None else version
        counts = Counter(each.owner for each in self.records.values())
        record = Placement(topic, owner or fewest(self._instances, counts), version + 1, move)
        self.records[topic] = record
        return record, True

    async def page(self, *, prefix: str, after: str, limit: int) -> list[Placement]:
        self._answer()
        names = sorted(each for each in self.records if each > after and each.startswith(prefix))
        return [self.records[each] for each in names[:limit]]

    def _answer(self) -> None:
        if self.failure is not None:
            raise self.failure


@dataclass
class MemoryStaging:
    """See services.placement.ports.Staging."""

    topic: str
    version: int
    rows: list[Row] = field(default_factory=list)
    is_complete: bool = False

    async def add(self, rows: Sequence[Row]) -> None:
        self.rows += rows

    async def complete(self) -> None:
        self.is_complete = True


class MemoryShelf:
    """See services.placement.ports.Shelf.

    Attributes:
        topics: the rows of each.
    """

    layout = 1

    def __init__(self) -> None:
        self.topics: dict[str, list[Row]] = {}
        self._holdings: dict[str, Holding] = {}
        self._staged: dict[str, MemoryStaging] = {}

    async def holdings(self) -> list[Holding]:
        return list(self._holdings.values())

    async def strays(self, *, limit: int) -> list[str]:
        return [each for each in self.topics if each not in self._holdings][:limit]

    async def hold(self, holding: Holding) -> None:
        self._holdings[holding.topic] = holding

    async def seal(self, holding: Holding) -> None:
        await self.hold(holding)

    async def rows(self, topic: str) -> AsyncIterator[Sequence[Row]]:
        for row in list(self.topics.get(topic, [])):
            yield [row]

    async def forget(self, holding: Holding) -> None:
        await self.hold(holding)
        self.topics.pop(holding.topic, None)

    async def stage(self, topic: str, move: str, version: int) -> MemoryStaging:
        for name, each in list(self._staged.items()):
            if each.topic == topic and each.version < version:
                del self._staged[name]
        self._staged[move] = MemoryStaging(topic, version)
        return self._staged[move]

    async def staged(self) -> list[Placement]:
        return [
            Placement(each.topic, "", each.version, move)
            for move, each in self._staged.items()
            if each.is_complete
        ]

    async def show(self, holding: Holding, move: str) -> None:
        await self.hold(holding)
        if move in self._staged:
            self.topics[holding.topic] = self._staged.pop(move).rows

    async def drop(self, move: str) -> None:
        self._staged.pop(move, None)

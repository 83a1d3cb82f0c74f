"""A dedup service for tests of the ledger's calls: every claim is new."""

from collections.abc import Callable, Sequence

from seqgate.services.deduplication import (
    Applied,
    Behind,
    Changed,
    Confirmation,
    Disabled,
    Judged,
    ProducerClaims,
    Writer,
    all_new,
)
from seqgate.services.ledger.ports import DedupUnavailable
from seqgate.types import Position, TopicName


class FakeDeduplicator:
    """A scripted seqgate.services.ledger.ports.Deduplicator."""

    def __init__(self) -> None:
        self.available = True
        self.confirmed: dict[TopicName, Position | None] = {}
        """The confirmed position of each topic."""
        self.asked: list[str] = []
        """All calls so far except admit."""
        self.on_snapshot: Callable[[TopicName], Position | None] = lambda _: None
        self.on_confirm: Callable[[Confirmation], None] = lambda _: None

    async def admit(
        self,
        topic: TopicName,
        writer: Writer,
        confirmation: Confirmation | None,
        claims: Sequence[ProducerClaims],
    ) -> Judged | Behind | Changed | Disabled:
        self._answer()
        self._confirm(topic, confirmation)
        if self.confirmed.get(topic) != writer.position:
            return Behind(self.confirmed.get(topic))
        return all_new(claims, revision=1)

    async def confirm(
        self, topic: TopicName, writer: Writer, confirmation: Confirmation
    ) -> Applied | Behind | Disabled:
        self._answer("confirm")
        self.on_confirm(confirmation)
        self._confirm(topic, confirmation)
        return Applied(1)

    async def rollback(
        self, topic: TopicName, writer: Writer, confirmation: Confirmation | None
    ) -> Applied | Behind | Disabled:
        self._answer("rollback")
        self._confirm(topic, confirmation)
        if self.confirmed.get(topic) != writer.position:
            return Behind(self.confirmed.get(topic))
        return Applied(1)

    async def keep(
        self, topic: TopicName, producers: Sequence[str], *, only_due: bool = False
    ) -> float | None:
        self._answer("keep")
        return None

    async def forget_topic(self, topic: TopicName, incarnation: int, *, deleted: bool) -> None:
        self._answer(f"forget {topic} {incarnation} {'deleted' if deleted else 'kept'}")
        self.confirmed.pop(topic, None)

    async def snapshot(self, topic: TopicName) -> Position | None:
        self._answer("snapshot")
        return self.on_snapshot(topic)

    async def check(self) -> None:
        self._answer()

    def _answer(self, what: str = "") -> None:
        if what:
            self.asked.append(what)
        if not self.available:
            raise DedupUnavailable("deduplication does not answer", retry_after_s=0.1)

    def _confirm(self, topic: TopicName, confirmation: Confirmation | None) -> None:
        if confirmation is not None and self.confirmed.get(topic) == confirmation.after:
            self.confirmed[topic] = confirmation.through

"""The end of a ledger service."""

import asyncio
from typing import Any

from seqgate.services.ledger.adapters.memory import MemoryLedgerStore
from seqgate.services.ledger.config import LedgerConfig
from seqgate.services.ledger.service import Ledger
from seqgate.services.runtime.cursors import MemoryCursors
from seqgate.types import TopicName


class Topic:
    """A live topic, as far as `finish` needs it."""

    def __init__(self, let_go: Any = None) -> None:
        self.has_stopped = False
        self._let_go = let_go

    async def quiet(self) -> None:
        """Release another topic while the last confirmation is pending."""
        await asyncio.sleep(0)
        if self._let_go is not None:
            self._let_go()

    def stop(self, _: object) -> None:
        self.has_stopped = True


async def test_a_topic_released_during_a_drain_does_not_interrupt_it() -> None:
    deduplicator: Any = None
    async with asyncio.TaskGroup() as tasks:
        ledger = Ledger(LedgerConfig(), MemoryLedgerStore(), deduplicator, MemoryCursors(), tasks)
        live: Any = ledger._live
        idle = TopicName.parse("t/n/idle")
        busy = [Topic(lambda: live.pop(idle, None)), Topic()]
        live |= {
            idle: Topic(),
            TopicName.parse("t/n/a"): busy[0],
            TopicName.parse("t/n/b"): busy[1],
        }

        await ledger.finish(1.0)

        assert all(each.has_stopped for each in busy)

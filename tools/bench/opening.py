"""A dispatcher that opens every batch to decide: python -m tools.bench.opening

The dispatcher service, with its settings, but for one thing: of each entry that it reads it unpacks
and parses the payload, compares the property of every message in it, and writes what comes of that
into the entry's metadata, where a filter finds it. There are two answers, so the filter service is
asked about two entries, once, and the rest is remembered: opening is what it costs.
"""

import sys
from collections.abc import AsyncIterator, Sequence
from typing import Any, Final

from seqgate.api.ledger.v1.ledger_pb2 import StoredEntry
from seqgate.payloads import open_batch
from seqgate.services.dispatcher import app
from seqgate.services.dispatcher.adapters.cursors import SubscriptionCursors
from seqgate.services.dispatcher.adapters.filters import GrpcFilters
from seqgate.services.dispatcher.adapters.ledger import GrpcLog
from seqgate.services.dispatcher.adapters.letters import GrpcDeadLetters
from seqgate.services.dispatcher.config import DispatcherConfig
from seqgate.services.runtime.channels import following_channel, peer_channel
from seqgate.services.runtime.process import run_service
from seqgate.types import Position, TopicName

PROPERTY: Final = "origin"  # of each message, that is looked at
WANTED: Final = "A"  # how it begins where a message is wanted
ANSWER: Final = "wanted"
"""The property of an entry with its verdict: `all` or `none` of its messages are wanted."""


class OpeningLog(GrpcLog):
    """A log whose batches are opened as they are read."""

    async def follow(
        self, topic: TopicName, after: Position | None
    ) -> AsyncIterator[Sequence[StoredEntry]]:
        async for page in super().follow(topic, after):
            for each in page:
                each.metadata.properties[ANSWER] = answer_of(each)
            yield page


def answer_of(entry: StoredEntry) -> str:
    """What the messages of a batch say, each of which is looked at."""
    messages = open_batch(entry.metadata, entry.payload)
    wanted = 0
    for each in messages:
        wanted += each.metadata.properties.get(PROPERTY, "").startswith(WANTED)
    assert wanted in (0, len(messages))
    return "all" if wanted else "none"


async def run(config: DispatcherConfig) -> None:
    """Serve until SIGTERM."""
    options: dict[str, Any] = {"keepalive_s": config.keepalive_s, "as_caller": config}
    async with (
        following_channel(config.ledger_target, **options) as ledger,
        following_channel(config.cursor_target, **options) as cursor,
        peer_channel(config.filter_target, **options) as filter_,
    ):
        await app.serve(
            config,
            OpeningLog(ledger, timeout_s=config.call_timeout_s),
            SubscriptionCursors(cursor, timeout_s=config.call_timeout_s),
            GrpcDeadLetters(ledger, timeout_s=config.call_timeout_s),
            GrpcFilters(filter_, timeout_s=config.filter_timeout_s),
        )


if __name__ == "__main__":
    sys.exit(run_service(DispatcherConfig, run))

"""A dispatcher that opens every batch to decide: python -m tools.bench.opening

The dispatcher service, with its settings and another log: of each entry that it reads it unpacks
and parses the payload, compares the property of every message in it, and writes the verdict into
the entry's metadata, where a filter finds it. There are two answers, so the filter service is
asked about two entries, once, and the rest is remembered: opening is what it costs.
"""

import sys
from collections.abc import AsyncIterator, Sequence
from typing import Final

from seqgate.api.ledger.v1.ledger_pb2 import StoredEntry
from seqgate.payloads import open_batch
from seqgate.services.dispatcher import app
from seqgate.services.dispatcher.adapters.ledger import GrpcLog
from seqgate.services.dispatcher.config import DispatcherConfig
from seqgate.services.runtime.process import run_service
from seqgate.types import Position, TopicName

PROPERTY: Final = "origin"  # of each message, that is looked at
WANTED: Final = "A"  # how it begins where a message is wanted
ANSWER: Final = "wanted"  # the property of an entry that says whether all or none are


class OpeningLog(GrpcLog):
    async def follow(
        self, topic: TopicName, after: Position | None
    ) -> AsyncIterator[Sequence[StoredEntry]]:
        async for page in super().follow(topic, after):
            for each in page:
                messages = open_batch(each.metadata, each.payload)
                properties = (message.metadata.properties.get(PROPERTY, "") for message in messages)
                wanted = sum(value.startswith(WANTED) for value in properties)
                assert wanted in (0, len(messages))
                each.metadata.properties[ANSWER] = "all" if wanted else "none"
            yield page


if __name__ == "__main__":
    vars(app)["GrpcLog"] = OpeningLog
    sys.exit(run_service(DispatcherConfig, app.run, sys.argv[1:]))

"""The trace of a stored message: its producer put the context among its properties (W3C)."""

import re
from collections.abc import Mapping
from typing import Final

from grpc import aio

from seqgate.api.entry.v1 import entry_pb2
from seqgate.api.ledger.v1 import ledger_pb2 as pb
from seqgate.cli._command import Run
from seqgate.cli._service import ledger_service
from seqgate.client._codec import decode_entry
from seqgate.errors import SeqgateError
from seqgate.types import Position

TRACEPARENT: Final = "traceparent"
"""The property's name."""

_FORM: Final = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}.*")


async def trace_of(run: Run, topic: str, position: Position, batch_index: int = -1) -> str | None:
    """The trace id of a message; None: it has none, or the log does not tell.

    Args:
        run: who asks.
        topic: tenant/namespace/name.
        position: of its entry; of a large message, of any of its chunks.
        batch_index: its place in its batch; -1: it is in none, or that of the first is wanted.
    """
    try:
        stored = await _read(run, topic, position, metadata_only=True)
        if stored is None:
            return None
        found = trace_in(stored.metadata.properties)
        if not stored.metadata.HasField("num_messages_in_batch"):
            return found
        stored = await _read(run, topic, position, metadata_only=False)
        messages = [] if stored is None else decode_entry(topic, stored)
        of_it = messages[max(0, batch_index) :][:1]
        return trace_in(of_it[0].properties) if of_it else found
    except (SeqgateError, aio.AioRpcError):
        return None


def trace_in(properties: Mapping[str, str]) -> str | None:
    """The trace id in a message's properties; None: there is none that is one."""
    found = _FORM.fullmatch(properties.get(TRACEPARENT, ""))
    return None if found is None else found[1]


async def _read(
    run: Run, topic: str, position: Position, *, metadata_only: bool
) -> pb.StoredEntry | None:
    at = entry_pb2.Position(ledger_id=position.ledger_id, entry_id=position.entry_id)
    request = pb.ReadEntriesRequest(topic=topic, positions=[at], metadata_only=metadata_only)
    async with ledger_service(run.settings) as service:
        async for response in service.stub.ReadEntries(request, timeout=run.settings.timeout_s):
            for entry in response.entries.entries:
                return entry  # type: ignore[no-any-return]
    return None

"""The trace of a stored message, from the W3C context that its producer put in its properties."""

from seqgate.api.ledger.v1 import ledger_pb2 as pb
from seqgate.cli._command import Run
from seqgate.cli._wire import wire_position
from seqgate.client._codec import decode_entry
from seqgate.errors import SeqgateError
from seqgate.telemetry import trace_id_of
from seqgate.types import Position


async def trace_of(run: Run, topic: str, position: Position, batch_index: int = -1) -> str | None:
    """The trace id of a message; None: it has none, or the log cannot be read.

    Args:
        position: its entry; for a large message, any of its chunks.
        batch_index: its index in its batch; -1: not in a batch, or the batch's first message.
    """
    try:
        stored = await _read(run, topic, position, metadata_only=True)
        if stored is None:
            return None
        if not stored.metadata.HasField("num_messages_in_batch"):
            return trace_id_of(stored.metadata.properties) or None
        stored = await _read(run, topic, position, metadata_only=False)
        messages = [] if stored is None else decode_entry(topic, stored)
        of_it = messages[max(0, batch_index) :][:1]
        return (trace_id_of(of_it[0].properties) or None) if of_it else None
    except SeqgateError:
        return None


async def _read(
    run: Run, topic: str, position: Position, *, metadata_only: bool
) -> pb.StoredEntry | None:
    request = pb.ReadEntriesRequest(
        topic=topic, positions=[wire_position(position)], metadata_only=metadata_only
    )
    responses = await run.services.responses(request)
    return next((each for read in responses for each in read.entries.entries), None)

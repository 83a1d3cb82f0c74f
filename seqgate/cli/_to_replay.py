"""The number of entries that would be replayed to deduplication before the next message is stored.

log           0 1 2 3 4 5 6 7 8 9
snapshot      ───────▶ 3              the one that reaches farther is where
state         ─▶ 1                    a replay starts: six entries
"""

from seqgate.api.dedup.v1 import dedup_pb2
from seqgate.api.ledger.v1 import ledger_pb2 as pb
from seqgate.cli._command import Run
from seqgate.cli._wire import position
from seqgate.types import Position


async def entries_to_replay(
    run: Run, topic: pb.Topic, status: dedup_pb2.GetTopicStatusResponse
) -> int | None:
    """The number of entries to replay, given a topic and then its status; None: not known, because
    the state is lost and the cursor service, which may have a snapshot, does not answer."""
    if topic.entries_to_replay:  # its ledger waits for them now
        return topic.entries_to_replay
    if not status.policy.enabled or not topic.HasField("last"):
        return 0
    if status.state == dedup_pb2.TOPIC_STATE_ACTIVE and topic.connected_producers:
        return 0  # the ledger is about to confirm the newest entries
    ends = [
        position(getattr(status, name))
        for name in ("confirmed", "snapshot")
        if status.HasField(name)
    ]
    covered = max(ends, default=None)
    if covered is not None and covered >= position(topic.last):
        return 0
    if status.snapshot_unknown:
        return None
    return topic.entries if covered is None else await _after(run, topic.name, covered)


async def _after(run: Run, topic: str, covered: Position) -> int:
    """The number of entries after a position."""
    count = 0
    async for ledger in run.services.pages(pb.ListLedgersRequest(topic=topic)):
        if ledger.ledger_id >= covered.ledger_id:
            first = ledger.first_entry_id
            if ledger.ledger_id == covered.ledger_id:
                first = max(first, covered.entry_id + 1)
            count += max(0, ledger.last_entry_id + 1 - first)
    return count

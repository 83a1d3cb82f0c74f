"""Predicts the outcome of sending a message now, from its deduplication verdict and its fate."""

from dataclasses import dataclass

from seqgate.api.dedup.v1 import dedup_pb2 as pb
from seqgate.cli._output import time_shown
from seqgate.cli._wire import position
from seqgate.times import milliseconds
from seqgate.types import Position


@dataclass(frozen=True, slots=True)
class Standing:
    """The deduplication verdict and the fate of a message.

    Attributes:
        found: deduplication's explanation.
        fate: the fate in the log: STORED, STALE or TRIMMED; None: unknown.
        message_id: its id, if it is in the log.
        position: the position of its last entry.
    """

    found: pb.ExplainResponse
    fate: str | None
    message_id: str | None
    position: Position | None

    @property
    def is_forgotten(self) -> bool:
        """Whether the log has the message, but deduplication has forgotten its producer."""
        status = self.found.status
        is_active = status.policy.enabled and status.state == pb.TOPIC_STATE_ACTIVE
        return is_active and self.fate == "STORED" and self.found.verdict == pb.CLAIM_VERDICT_NEW

    @property
    def covered(self) -> bool | None:
        """Whether a snapshot covers it; None: unknown, or it is not in the log."""
        if self.position is None or self.found.status.snapshot_unknown:
            return None
        snapshot = self._snapshot
        return snapshot is not None and self.position <= snapshot

    @property
    def _snapshot(self) -> Position | None:
        status = self.found.status
        if not status.HasField("snapshot"):
            return None
        return position(status.snapshot)


def sent_again(standing: Standing) -> str:
    status = standing.found.status
    if status.state == pb.TOPIC_STATE_RECOVERING:
        left = status.entries_remaining
        return f"It would wait: {left} entries of the log are replayed to deduplication first."
    if standing.found.verdict == pb.CLAIM_VERDICT_NEW:
        return _new(standing)
    if standing.found.verdict == pb.CLAIM_VERDICT_IN_FLIGHT:
        return (
            "It would wait for the outcome of the earlier copy: if that is stored, it is a "
            "duplicate, otherwise it is stored."
        )
    match standing.fate:
        case "STORED":
            return f"It would not be stored again: the receipt has its id, {standing.message_id}."
        case "STALE":
            return "It would not be stored: the receipt is STALE. Use a higher sequence id."
        case "TRIMMED":
            return (
                "It would not be stored: the fate in the receipt is TRIMMED. That part of the log "
                "is gone."
            )
        case _:
            return "It would not be stored. Whether the log already has it is not known."


def _new(standing: Standing) -> str:
    if standing.fate != "STORED":
        return "It would be stored."
    if not standing.found.status.policy.enabled:
        return "It would be stored a second time: deduplication is off for this topic."
    if standing.is_forgotten:
        timeout = standing.found.status.policy.producer_inactivity_timeout
        minutes = milliseconds(timeout) // 60_000
        inactive = f"after {minutes} minutes without activity, or " if minutes else ""
        return (
            f"It would be stored a second time: its producer was forgotten, {inactive}because the "
            "topic was full."
        )
    return (
        "It would not be stored again: the log, which has it, is replayed to deduplication before "
        "the next message is stored."
    )


def newest_snapshot(status: pb.GetTopicStatusResponse) -> str:
    """A topic's newest snapshot."""
    if status.snapshot_unknown:
        return "not known: the cursor service does not answer"
    return str(position(status.snapshot)) if status.HasField("snapshot") else "none"


def snapshot_shown(standing: Standing) -> str:
    """The snapshot that covers the message; if the message is not in the log, the newest one."""
    status, covered = standing.found.status, standing.covered
    if standing.position is None or not status.HasField("snapshot"):
        return newest_snapshot(status)
    snapshot = position(status.snapshot)
    if not covered:
        return f"none: the newest ends at {snapshot}, and later entries are replayed"
    taken = milliseconds(status.snapshot_taken) if status.HasField("snapshot_taken") else None
    when = "" if taken is None else f", taken {time_shown(taken)}"
    return f"covered by the one up to {snapshot}{when}"

"""What would become of a message if it were sent now: what deduplication says and what the log
says, taken together."""

from dataclasses import dataclass

from seqgate.api.dedup.v1 import dedup_pb2 as pb
from seqgate.cli._output import time_shown
from seqgate.cli._wire import position
from seqgate.types import Position


@dataclass(frozen=True, slots=True)
class Standing:
    """What is known of a message.

    Attributes:
        found: what deduplication says.
        fate: what the log says: STORED, STALE or TRIMMED; None: nothing.
        message_id: where the log holds it.
        position: of its last entry.
    """

    found: pb.ExplainResponse
    fate: str | None
    message_id: str | None
    position: Position | None

    @property
    def is_forgotten(self) -> bool:
        """Whether the log holds what deduplication does not remember, though it is there."""
        status = self.found.status
        is_active = status.policy.enabled and status.state == pb.TOPIC_STATE_ACTIVE
        return is_active and self.fate == "STORED" and self.found.verdict == pb.VERDICT_NEW

    @property
    def covered(self) -> bool | None:
        """Whether a snapshot covers it; None: it is nowhere, or that is not known."""
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
    """A sentence or two."""
    status = standing.found.status
    if status.state == pb.TOPIC_STATE_RECOVERING:
        left = status.entries_remaining
        return f"It would wait: what deduplication lacks is read from the log, {left} entries."
    if standing.found.verdict == pb.VERDICT_NEW:
        return _new(standing)
    if standing.found.verdict == pb.VERDICT_IN_FLIGHT:
        return (
            "It would wait for what becomes of the earlier copy: if that is stored, it is a "
            "duplicate, otherwise it is stored."
        )
    match standing.fate:
        case "STORED":
            return f"It would not be stored again: the answer is its id, {standing.message_id}."
        case "STALE":
            return "It would not be stored: the answer is STALE. A higher sequence id would be."
        case "TRIMMED":
            return "It would not be stored: the answer is TRIMMED, for nobody can tell any more."
        case _:
            return "It would not be stored: the log would tell whether it was before."


def _new(standing: Standing) -> str:
    if standing.fate != "STORED":
        return "It would be stored."
    if not standing.found.status.policy.enabled:
        return "It would be stored a second time: nothing is deduplicated here."
    if standing.is_forgotten:
        minutes = standing.found.status.policy.producer_inactivity_timeout_minutes
        inactive = f"after {minutes} minutes without activity, or " if minutes else ""
        return (
            f"It would be stored a second time: its producer was forgotten, {inactive}because the "
            "topic was full."
        )
    return (
        "It would not be stored again: before anything is, what deduplication lacks is read from "
        "the log, and this is there."
    )


def snapshot_shown(standing: Standing) -> str | None:
    """Which snapshot covers the message; None: it is nowhere."""
    status, covered = standing.found.status, standing.covered
    if standing.position is None:
        return None
    if status.snapshot_unknown:
        return "not known: the cursor service, which has it, does not answer"
    if not status.HasField("snapshot"):
        return "none covers it: there is none"
    snapshot = position(status.snapshot)
    if not covered:
        return f"none covers it: the newest ends at {snapshot}, and what follows is replayed"
    taken = status.snapshot_taken.ToMilliseconds() if status.HasField("snapshot_taken") else None
    when = "" if taken is None else f", taken {time_shown(taken)}"
    return f"the one up to {snapshot} covers it{when}"

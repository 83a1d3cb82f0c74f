"""Defects of the client."""

from typing import Any

from seqgate.api.ledger.v1 import ledger_pb2 as pb
from seqgate.cli import _jobs
from seqgate.client._outbox import Outbox
from seqgate.client._producer import Producer
from seqgate.client._reader import Reader
from tests.simulation.defects import defect


@defect("A4", "a producer that was away takes another's message of the same id for its own")
def look_at_the_number_alone(patch: Any) -> None:
    def is_anothers(self: Producer, opened: pb.Opened, last: int) -> bool:
        known = -1 if self._last_sequence_id is None else self._last_sequence_id
        return last > max(self._outbox.highest_sent, known)

    patch.setattr(Producer, "_is_anothers", is_anothers)


@defect("A13", "pending messages are not cut again when the service returns with a smaller limit")
def leave_what_is_too_large(patch: Any) -> None:
    patch.setattr(Outbox, "_cut_smaller", lambda self, chunk_bytes, payload_bytes_max: None)


@defect("D-gap", "a reader skips a trimmed gap silently")
def pass_over_what_was_trimmed(patch: Any) -> None:
    patch.setattr(Reader, "_take_trimmed", lambda self, trimmed: self._arrived.popleft())


@defect("C4", "a job imports modules from the current folder")
def look_for_modules_here(patch: Any) -> None:
    patch.setattr(_jobs, "_modules", dict)

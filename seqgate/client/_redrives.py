"""Redrives of many, as the admin client shows them."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

from seqgate.api.dispatcher.v1 import dispatcher_pb2 as pb
from seqgate.client._codec import position_of
from seqgate.client._subscribing import Place, start_to_wire
from seqgate.times import milliseconds
from seqgate.types import Position

ESTIMATE_TIMEOUT_S: Final = 15.0
"""How long an estimate may take, in seconds: the service ends it after ten."""

_STATE, _OUTCOME = "REDRIVE_STATE_", "REDRIVE_OUTCOME_"


@dataclass(frozen=True, slots=True)
class RedriveInfo:
    """A redrive, or a replay, as it is now.

    Attributes:
        number: counts the subscription's redrives.
        request_id: its caller's id for it.
        state: RUNNING, DONE, STOPPED or FAILED, as RedriveState in dispatcher.proto names them.
        failure: why it failed; empty: it did not.
        waits_for: what it waits for while it runs; empty: for nothing.
        dead_letter_topic: where its letters are; None: it is a replay, or of letters named one by
            one.
        after, through: of a replay, the entries after this one (None: from the first) through this
            one (None: there are none).
        key, expression: which messages it redrives; None and empty: all.
        letters_per_s: the most messages a second; 0: no limit.
        started_at, ended_at: None of a redrive of letters named one by one.
        entries: how many entries there were to read when it started, about.
        entries_read: how many of them it has read.
        outcomes: the number of messages by outcome: REDRIVEN, or why they are left out, as
            RedriveOutcome in dispatcher.proto names it.
        returning: how many of its messages are on their way, and not settled.
        caller: who started it, if known.
    """

    number: int
    request_id: str
    state: str
    failure: str
    waits_for: str
    dead_letter_topic: str | None
    after: Position | None
    through: Position | None
    key: bytes | None
    expression: str
    letters_per_s: int
    started_at: datetime | None
    ended_at: datetime | None
    entries: int
    entries_read: int
    outcomes: Mapping[str, int]
    returning: int
    caller: str

    @property
    def is_running(self) -> bool:
        """Whether it has not ended."""
        return self.state == "RUNNING"


class Estimated(NamedTuple):
    """How many messages would have an outcome.

    Attributes:
        entries, messages: the number of entries looked at with it, and of their messages.
        about, low, high: the estimated number of entries in all, and its bounds at 95 % confidence.
    """

    entries: int
    messages: int
    about: int
    low: int
    high: int


@dataclass(frozen=True, slots=True)
class RedriveEstimate:
    """What a redrive would redrive, and leave out.

    Attributes:
        entries: how many entries there are to read, about.
        entries_read: how many were looked at: all, or blocks spread evenly over them.
        is_complete: whether all were: the estimates are then exact.
        outcomes: by outcome, as in RedriveInfo.
    """

    entries: int
    entries_read: int
    is_complete: bool
    outcomes: Mapping[str, Estimated]


def selection(
    key: bytes | None, expression: str, stretch: tuple[Place, Place] | None = None
) -> pb.RedriveSelection:
    """The messages of a redrive. Raises InvalidRequestError."""
    found = pb.RedriveSelection(key=key, expression=expression)
    if stretch is not None:
        start, end = map(start_to_wire, stretch)
        found.stretch.CopyFrom(pb.TopicStretch(start=start, end=end))
    return found


def redrive_info(wire: pb.Redrive) -> RedriveInfo:
    stretch = wire.selection.stretch
    return RedriveInfo(
        number=wire.number,
        request_id=wire.request_id,
        state=pb.RedriveState.Name(wire.state).removeprefix(_STATE),
        failure=wire.failure,
        waits_for=wire.waits_for,
        dead_letter_topic=wire.dead_letter_topic or None,
        after=_after(stretch, "start"),
        through=_after(stretch, "end"),
        key=wire.selection.key if wire.selection.HasField("key") else None,
        expression=wire.selection.expression,
        letters_per_s=wire.letters_per_second,
        started_at=_time(wire, "started"),
        ended_at=_time(wire, "ended"),
        entries=wire.total_entries,
        entries_read=wire.scanned_entries,
        outcomes={_outcome(each.outcome): each.entries for each in wire.counts},
        returning=wire.returning_entries,
        caller=wire.caller,
    )


def redrive_estimate(wire: pb.EstimateRedriveResponse) -> RedriveEstimate:
    return RedriveEstimate(
        wire.total_entries,
        wire.scanned_entries,
        wire.complete,
        {
            _outcome(each.outcome): Estimated(
                each.entries,
                each.messages,
                each.estimated_entries,
                each.estimated_entries_low,
                each.estimated_entries_high,
            )
            for each in wire.outcomes
        },
    )


def _outcome(number: Any) -> str:
    value = pb.RedriveOutcome.DESCRIPTOR.values_by_number.get(number)
    return str(number) if value is None else value.name.removeprefix(_OUTCOME)


def _after(stretch: pb.TopicStretch, field: str) -> Position | None:
    place = getattr(stretch, field)
    return position_of(place.after) if place.HasField("after") else None


def _time(wire: pb.Redrive, field: str) -> datetime | None:
    if not wire.HasField(field):  # type: ignore[arg-type]
        return None
    return datetime.fromtimestamp(milliseconds(getattr(wire, field)) / 1000, UTC)

"""Redrives of many on the wire."""

from typing import Final

from seqgate.api.common.v1 import common_pb2
from seqgate.api.dispatcher.v1 import dispatcher_pb2 as pb
from seqgate.services.dispatcher.errors import InvalidRedrive, InvalidStart
from seqgate.services.dispatcher.letters.record import (
    EXPRESSION_BYTES_MAX,
    KEY_BYTES_MAX,
    RedriveOutcome,
    RedriveRecord,
    Selection,
    State,
)
from seqgate.services.dispatcher.letters.returns import Redrive
from seqgate.services.dispatcher.redrives.estimating import Estimated
from seqgate.services.dispatcher.redrives.wanted import Wanted
from seqgate.services.dispatcher.shell.live import Live
from seqgate.services.dispatcher.wire.parsing import dead_letter_topic
from seqgate.services.runtime.positions import to_position
from seqgate.services.runtime.requests import Latest, Start, read_start
from seqgate.times import timestamp
from seqgate.types import Position

RATE_MAX: Final = 10_000
"""The most messages a second that a redrive may ask for."""

ESTIMATED_DEFAULT: Final = 10_000
ESTIMATED_MAX: Final = 100_000
"""How many entries an estimate looks at, by default and at most."""


def wanted(request: pb.StartRedriveRequest | pb.EstimateRedriveRequest) -> Wanted:
    """The messages that a request selects."""
    given = request.selection
    if len(given.key) > KEY_BYTES_MAX:
        raise InvalidRedrive(f"key must have at most {KEY_BYTES_MAX} bytes", field="selection.key")
    if len(given.expression.encode()) > EXPRESSION_BYTES_MAX:
        raise InvalidRedrive(
            f"expression must have at most {EXPRESSION_BYTES_MAX:,} bytes",
            field="selection.expression",
        )
    key = given.key if given.HasField("key") else None
    stretch: tuple[Start, Start] | None = None
    if given.HasField("stretch"):
        has_end = given.stretch.HasField("end")
        end = read_start(given.stretch.end, InvalidStart) if has_end else Latest()
        stretch = (read_start(given.stretch.start, InvalidStart), end)
        if request.dead_letter_topic:
            raise InvalidRedrive(
                "dead_letter_topic must be empty with a stretch", field="dead_letter_topic"
            )
    elif request.create_subscription:
        raise InvalidRedrive("create_subscription requires a stretch", field="create_subscription")
    if request.dead_letter_topic and request.dead_letter_topic == request.topic:
        raise InvalidRedrive(
            "dead_letter_topic must not be the topic itself", field="dead_letter_topic"
        )
    selection = Selection(key, given.expression)
    return Wanted(dead_letter_topic(request), selection, stretch, request.create_subscription)


def letters_s(request: pb.StartRedriveRequest) -> int:
    if request.letters_per_second > RATE_MAX:
        raise InvalidRedrive(
            f"letters_per_second must be at most {RATE_MAX:,}", field="letters_per_second"
        )
    return request.letters_per_second


def redrive(live: Live, each: RedriveRecord | Redrive) -> pb.Redrive:
    """A redrive as it is now."""
    returning = sum(back.redrive == each.number for back in live.returns.open.values())
    if isinstance(each, Redrive):
        counts = [pb.RedriveCount(outcome=pb.REDRIVE_OUTCOME_REDRIVEN, entries=each.letters)]
        return pb.Redrive(
            number=each.number,
            request_id=each.request_id,
            state=pb.REDRIVE_STATE_DONE,
            total_entries=each.letters,
            scanned_entries=each.letters,
            counts=counts,
            returning_entries=returning,
        )
    is_replay, is_running = each.source == live.topic, each.state is State.RUNNING
    selection = pb.RedriveSelection(key=each.selection.key, expression=each.selection.expression)
    if is_replay:
        after, through = map(_place, each.stretch)
        selection.stretch.CopyFrom(pb.TopicStretch(start=after, end=through))
    return pb.Redrive(
        number=each.number,
        request_id=each.request_id,
        selection=selection,
        dead_letter_topic="" if is_replay else str(each.source),
        letters_per_second=each.letters_s,
        state=_STATES[each.state],
        failure=each.failure,
        waits_for=live.redriving.waits_for if is_running else "",
        started=timestamp(each.started_ms),
        ended=timestamp(each.ended_ms) if each.ended_ms else None,
        total_entries=each.total,
        scanned_entries=each.scanned,
        counts=[
            pb.RedriveCount(outcome=_OUTCOMES[outcome], entries=count)
            for outcome, count in sorted(each.counts.items(), key=lambda found: found[0].value)
        ],
        returning_entries=returning,
        caller=each.caller,
    )


def redrives(live: Live) -> list[pb.Redrive]:
    """The latest redrives, the newest first."""
    found: list[RedriveRecord | Redrive] = [*live.redriving.records.values(), *live.returns.latest]
    return [redrive(live, each) for each in sorted(found, key=lambda each: -each.number)]


def find(live: Live, number: int) -> pb.Redrive:
    """The redrive with a number. Raises RedriveNotFound."""
    named = next((each for each in live.returns.latest if each.number == number), None)
    return redrive(live, named or live.redriving.get(number))


def estimated(found: Estimated) -> pb.EstimateRedriveResponse:
    return pb.EstimateRedriveResponse(
        total_entries=found.total,
        scanned_entries=found.scanned,
        blocks=found.blocks,
        complete=found.is_complete,
        outcomes=[
            pb.RedriveEstimate(
                outcome=_OUTCOMES[each.outcome],
                entries=each.entries,
                messages=each.messages,
                estimated_entries=each.estimate.about,
                estimated_entries_low=each.estimate.low,
                estimated_entries_high=each.estimate.high,
            )
            for each in found.found
        ],
    )


def _place(after: Position | None) -> common_pb2.Start:
    if after is None:
        return common_pb2.Start(earliest=common_pb2.Earliest())
    return common_pb2.Start(after=to_position(after))


_STATES: Final = {each: pb.RedriveState.Value(f"REDRIVE_STATE_{each.name}") for each in State}
_OUTCOMES: Final = {
    each: pb.RedriveOutcome.Value(f"REDRIVE_OUTCOME_{each.name}") for each in RedriveOutcome
}

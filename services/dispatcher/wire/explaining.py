"""Explains why a key, or a message, is not delivered: a chain of reasons, the nearest first."""

from collections.abc import Iterator
from typing import Final

from seqgate.api.dispatcher.v1 import dispatcher_pb2 as pb
from seqgate.api.ledger.v1.ledger_pb2 import StoredEntry
from seqgate.services.dispatcher.core.effects import (
    ACCEPT,
    FILTER_FAILED,
    REJECT,
    UNJUDGED,
    SubscriptionType,
)
from seqgate.services.dispatcher.core.lane import Lane, Reason
from seqgate.services.dispatcher.core.subscription import Subscription
from seqgate.services.dispatcher.entries import entry_of, position_of
from seqgate.services.dispatcher.shell.live import Live
from seqgate.services.dispatcher.wire.reporting import key_report, name_of, reason_of
from seqgate.services.errors import DomainError
from seqgate.services.runtime.positions import to_position
from seqgate.times import timestamp
from seqgate.types import Position

TEXTS: Final = {
    pb.REASON_READY: "nothing withholds it: it is delivered soon",
    pb.REASON_DRAINING: "its key is in flight at {consumer}, which no longer owns it",
    pb.REASON_IN_FLIGHT_LIMIT: "its key has reached max_in_flight_per_key",
    pb.REASON_RETRY_DELAY: "a delivery failed, and its delay is not over",
    pb.REASON_RETRY: "an earlier message of its key failed, and is in flight again at {consumer}",
    pb.REASON_RECORDING: "a failed delivery of its key is being recorded",
    pb.REASON_DELAYED: "it is delayed, or waits for a delayed message",
    pb.REASON_DEAD_LETTERING: "a message of its key is on its way to the dead letter topic",
    pb.REASON_HELD: "its key is held until it is released: a message of the key was dead-lettered",
    pb.REASON_JOINING: "its owner {consumer} joined, and messages read before are unacknowledged",
    pb.REASON_SUBSCRIPTION_LIMIT: "the subscription has reached max_unacked",
    pb.REASON_NO_OWNER: "no consumer owns its slot",
    pb.REASON_NO_PERMITS: "its owner {consumer} has no permits left",
    pb.REASON_CONSUMER_LIMIT: "its owner {consumer} has reached max_unacked_per_consumer",
    pb.REASON_IN_ORDER: "an earlier message of its key comes first",
    pb.REASON_LAGGING: "too many entries wait in memory: it is read again when there is room",
    pb.REASON_UNREAD: "it is not read from the log yet",
    pb.REASON_IN_FLIGHT: "it is in flight at {consumer}",
    pb.REASON_ACKNOWLEDGED: "it is acknowledged",
    pb.REASON_SETTLING: "its acknowledgement is being made durable",
    pb.REASON_RETURNED_LIMIT: "too many messages of {consumer} wait for redelivery, and go first",
    pb.REASON_NO_ENTRY: "the log has no such entry",
    pb.REASON_FILTERING: "it waits for the verdict of the subscription's filters",
    pb.REASON_FILTER_FAILED: "a filter failed on it: it waits until filters or properties change",
    pb.REASON_RESCHEDULED: "a filter rescheduled it, and judges it again later",
    pb.REASON_REJECTED: "its filters reject it",
    pb.REASON_DEAD_LETTERED: "it went to the dead letter topic",
    pb.REASON_PASSED: "it was passed (acknowledged without a delivery)",
    pb.REASON_INCOMPLETE: "it is a chunk, and waits for the last chunk of its message",
}


_VERDICTS: Final = {
    Reason.FILTERING: UNJUDGED,
    Reason.FILTER_FAILED: FILTER_FAILED,
    Reason.RESCHEDULED: UNJUDGED,
}
"""The verdict for which a key is withheld, by the filters' reasons."""


def explain_key(live: Live, key: bytes) -> pb.ExplainResponse:
    """Why the next message of a key is not delivered."""
    machine = live.machine
    own = machine.lane_key(key)
    lane = machine.lanes.get(own)
    response = pb.ExplainResponse(key=key)
    if lane is not None:
        response.key_report.CopyFrom(key_report(live, lane))
        response.reasons.extend(_of_lane(live, lane))
    else:
        response.reasons.extend(_of_slot(live, own))
    return response


def tell_breakers(live: Live, explained: pb.ExplainResponse) -> None:
    """Say of each consumer that a reason names whether its circuit breaker is open."""
    opened = {
        name_of(live.machine, session.consumer): session.breaker
        for session in live.sessions.values()
        if session.breaker is not None
    }
    for each in explained.reasons:
        named = [name for name in opened if name in each.consumer.split(", ")]
        for name in named:
            pause_s = opened[name].pause_ms / 1000
            each.text += (
                f"; the circuit breaker of {name} is open, since its application refused the last"
                f" messages: it tries one every {pause_s:g} s"
            )


async def explain_position(live: Live, position: Position) -> pb.ExplainResponse:
    """Why a message is not delivered."""
    machine = live.machine
    found = await live.entry(position)
    if found is None:
        return pb.ExplainResponse(reasons=[_explanation(pb.REASON_NO_ENTRY, position=position)])
    entry = entry_of(found)
    key = entry.key or b""
    response = pb.ExplainResponse(key=key)
    if machine.settling.is_over(position):
        response.reasons.append(_explanation(pb.REASON_ACKNOWLEDGED, position=position))
        response.reasons.extend(await _of_end(live, found))
        return response
    if machine.read_position is None or position > machine.read_position:
        response.reasons.append(_explanation(pb.REASON_UNREAD, position=machine.read_position))
        response.reasons.extend(_why_not_reading(live))
        return response
    lane = machine.lanes.get(machine.key_of(entry)) if entry.key is not None else None
    flight = None if lane is None else lane.flights.get(position)
    if flight is None and machine.settling.is_settling(position):
        response.reasons.append(_explanation(pb.REASON_SETTLING, position=position))
        response.reasons.extend(await _of_end(live, found))
        return response
    if machine.parking.is_for_later(position, lane):
        until_ms = entry.deliver_at_ms or None
        response.reasons.append(
            _explanation(pb.REASON_DELAYED, position=position, until_ms=until_ms)
        )
        return response
    if lane is None:
        response.reasons.extend(_of_slot(live, machine.key_of(entry)))
        return response
    response.key_report.CopyFrom(key_report(live, lane))
    if flight is not None:
        reason = pb.REASON_SETTLING if flight.is_settling else pb.REASON_IN_FLIGHT
        why = _explanation(
            reason,
            consumer=name_of(machine, flight.consumer),
            position=position,
            since_ms=flight.delivered_ms,
            until_ms=flight.deadline_ms,
        )
        response.reasons.append(why)
        return response
    if lane.is_kept_back(position):
        response.reasons.append(_explanation(pb.REASON_INCOMPLETE, position=position))
        return response
    is_behind = lane.lag is not None and position >= lane.lag
    if is_behind:
        response.reasons.append(_explanation(pb.REASON_LAGGING, position=lane.lag))
    first = lane.next_position
    verdict = ACCEPT if is_behind else machine.verdict_of(lane, position)
    if verdict != ACCEPT:
        response.reasons.append(_of_filters(live, verdict, position))
        if first is None or first >= position or not live.options.orders_keys:
            return response
    if first is not None and first < position:
        response.reasons.append(_explanation(pb.REASON_IN_ORDER, position=first))
    response.reasons.extend(_of_lane(live, lane))
    return response


async def _of_end(live: Live, entry: StoredEntry) -> list[pb.Explanation]:
    """Why an entry is acknowledged, if the cause is known and no consumer did it."""
    position = position_of(entry)
    topic = live.buried(position)
    if topic is not None:
        why = _explanation(pb.REASON_DEAD_LETTERED, position=position)
        why.text += f" {topic}"
        why.dead_letter_topic = str(topic)
        return [why]
    because = live.passed(position)
    if because is not None:
        why = _explanation(pb.REASON_PASSED, position=position)
        why.text += f": {because.value}"
        return [why]
    chain = live.filtering.chains.at(position)
    if not chain.filters or entry.metadata.HasField("marker_type"):
        return []
    trial = live.filtering.trial(None)
    try:
        (found,) = await trial.judge([entry])
    except DomainError:
        return []  # the filter service is away: unknown
    finally:
        await trial.close()
    if found.failure is not None or found.verdict != REJECT or found.filter is None:
        return []
    name, version, _ = chain.filters[found.filter]
    why = _explanation(pb.REASON_REJECTED, position=position)
    why.text = f"its filter {name} (version {version}) rejects it"
    why.filter, why.filter_version = name, version
    return [why]


def _of_filters(
    live: Live, verdict: int, position: Position | None, since_ms: int | None = None
) -> pb.Explanation:
    """Why an entry waits for filters."""
    if verdict == FILTER_FAILED:
        why = _explanation(pb.REASON_FILTER_FAILED, position=position, since_ms=since_ms)
        failed = None if position is None else live.filtering.why(position)
        if failed is not None:
            reason, message = failed.failure
            why.text += (
                f": {failed.filter} (version {failed.version}) failed with {reason}: {message}"
            )
            why.filter, why.filter_version = failed.filter, failed.version
            why.since.CopyFrom(timestamp(failed.since_ms))
        return why
    if verdict > 0:
        return _explanation(
            pb.REASON_RESCHEDULED, position=position, since_ms=since_ms, until_ms=verdict
        )
    why = _explanation(pb.REASON_FILTERING, position=position, since_ms=since_ms)
    outage = live.filtering.outage
    if outage is not None:
        why.text += f": {outage.because}"
        why.since.CopyFrom(timestamp(outage.since_ms))
    return why


def _of_lane(live: Live, lane: Lane) -> Iterator[pb.Explanation]:
    """Why the next entry of a key waits."""
    machine = live.machine
    oldest = min(lane.flights.values(), key=lambda each: each.position, default=None)
    owner = machine.owner_of(lane.slot)
    if lane.reason in _VERDICTS and lane.next_position is not None:
        verdict = machine.verdict_of(lane, lane.next_position) or _VERDICTS[lane.reason]
        yield _of_filters(live, verdict, lane.next_position, lane.since_ms)
    elif lane.reason is not Reason.READY:
        about = lane.holder if lane.reason in (Reason.DRAINING, Reason.RETRY) else owner
        yield _explanation(
            reason_of(lane.reason),
            consumer=name_of(machine, about),
            position=lane.next_position if oldest is None else oldest.position,
            since_ms=lane.since_ms,
            until_ms=machine.retry_at_ms(lane),
        )
        if lane.reason is Reason.SUBSCRIPTION_LIMIT:
            return
    elif not lane.parked and oldest is not None:
        yield _explanation(
            pb.REASON_IN_FLIGHT,
            consumer=name_of(machine, oldest.consumer),
            position=oldest.position,
            since_ms=oldest.delivered_ms,
            until_ms=oldest.deadline_ms,
        )
        return
    else:
        yield from _of_owner(machine, owner)
    if oldest is not None and lane.reason in (
        Reason.DRAINING,
        Reason.IN_FLIGHT_LIMIT,
        Reason.RETRY,
    ):
        yield _explanation(
            pb.REASON_SETTLING if oldest.is_settling else pb.REASON_IN_FLIGHT,
            consumer=name_of(machine, oldest.consumer),
            position=oldest.position,
            since_ms=oldest.delivered_ms,
            until_ms=oldest.deadline_ms,
        )


def _of_slot(live: Live, key: bytes) -> Iterator[pb.Explanation]:
    """Why no message of a key without a lane is delivered."""
    machine = live.machine
    slot = machine.slot_of(key)
    if machine.parking.is_held(key):
        yield _explanation(pb.REASON_DELAYED)
    elif slot is not None and slot.lag is not None:
        yield _explanation(pb.REASON_LAGGING, position=slot.lag)
        yield from _of_owner(machine, machine.owner_of(slot))
    else:
        yield _explanation(pb.REASON_UNREAD, position=machine.read_position)
        yield from _why_not_reading(live)


def _why_not_reading(live: Live) -> Iterator[pb.Explanation]:
    machine = live.machine
    if machine.is_waiting_for_filters:
        yield _of_filters(live, UNJUDGED, None)
    elif machine.is_blocked:
        yield _explanation(pb.REASON_SUBSCRIPTION_LIMIT)
    elif not machine.consumers:
        yield _explanation(pb.REASON_NO_OWNER)
    elif all(each.permits <= 0 for each in machine.consumers.values()):
        yield _explanation(pb.REASON_NO_PERMITS, consumer=", ".join(_names(machine)))


def _of_owner(machine: Subscription, owner: int | None) -> Iterator[pb.Explanation]:
    """Why the owner of a key that is not withheld does not receive its next message."""
    consumer = None if owner is None else machine.consumers[owner]
    if consumer is None and (
        machine.options.kind is SubscriptionType.KEY_SHARED or not machine.consumers
    ):
        yield _explanation(pb.REASON_NO_OWNER)
    elif consumer is None:
        yield from _why_nobody(machine)
    elif consumer.is_blocked:
        yield _explanation(pb.REASON_CONSUMER_LIMIT, consumer=consumer.name)
    elif consumer.permits <= 0:
        yield _explanation(pb.REASON_NO_PERMITS, consumer=consumer.name)
    else:
        yield _explanation(pb.REASON_READY, consumer=consumer.name)


def _why_nobody(machine: Subscription) -> Iterator[pb.Explanation]:
    if all(each.permits <= 0 for each in machine.consumers.values()):
        yield _explanation(pb.REASON_NO_PERMITS, consumer=", ".join(_names(machine)))
    elif all(each.is_blocked for each in machine.consumers.values()):
        yield _explanation(pb.REASON_CONSUMER_LIMIT, consumer=", ".join(_names(machine)))
    else:
        yield _explanation(pb.REASON_READY)


def _explanation(
    reason: pb.Reason.ValueType,
    *,
    consumer: str = "",
    position: Position | None = None,
    since_ms: int | None = None,
    until_ms: int | None = None,
) -> pb.Explanation:
    return pb.Explanation(
        reason=reason,
        text=TEXTS[reason].format(consumer=consumer or "no consumer"),
        consumer=consumer,
        position=to_position(position),
        since=None if since_ms is None else timestamp(since_ms),
        until=None if until_ms is None else timestamp(until_ms),
    )


def _names(machine: Subscription) -> list[str]:
    return [each.name for each in machine.consumers.values()]

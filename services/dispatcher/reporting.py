"""What a subscription is doing, and why something waits: from what the machine knows anyway."""

from collections.abc import Iterator
from typing import Final

from google.protobuf.timestamp_pb2 import Timestamp

from seqgate.api.dispatcher.v1 import dispatcher_pb2 as pb
from seqgate.api.entry.v1 import entry_pb2
from seqgate.types import Position
from services.dispatcher.core.effects import AfterDeadLetter, Kind, Options
from services.dispatcher.core.lane import Consumer, Lane, Reason
from services.dispatcher.core.subscription import Subscription
from services.dispatcher.entries import entry_of
from services.dispatcher.live import Live
from services.dispatcher.placement import Placement

TEXTS: Final = {
    pb.REASON_READY: "nothing withholds it: it is its turn soon",
    pb.REASON_DRAINING: "its key is in flight at {consumer}, who does not own it any more",
    pb.REASON_IN_FLIGHT_LIMIT: "as many of its key are in flight as may be",
    pb.REASON_RETRY_DELAY: "a delivery failed, and its delay is not over",
    pb.REASON_RETRY: "an earlier message of its key failed, and is in flight again at {consumer}",
    pb.REASON_RECORDING: "a failed delivery of its key is being recorded",
    pb.REASON_DELAYED: "it is to be delivered later, or what it waits for is",
    pb.REASON_DEAD_LETTERING: "a message of its key is on its way to the dead letter topic",
    pb.REASON_HELD: "its key is held until it is released: a message of it was dead-lettered",
    pb.REASON_JOINING: "its owner {consumer} joined, and what was read before is unacknowledged",
    pb.REASON_SUBSCRIPTION_LIMIT: "the subscription has as many unacknowledged messages as it may",
    pb.REASON_NO_OWNER: "nobody owns its slot",
    pb.REASON_NO_PERMITS: "its owner {consumer} takes no more messages now",
    pb.REASON_CONSUMER_LIMIT: "its owner {consumer} has as many unacknowledged messages as it may",
    pb.REASON_IN_ORDER: "an earlier message of its key comes first",
    pb.REASON_LAGGING: "more waits than is remembered: it is read again when there is room",
    pb.REASON_UNREAD: "nothing of it is known to wait: whatever there is was not read yet",
    pb.REASON_IN_FLIGHT: "it is in flight at {consumer}",
    pb.REASON_ACKNOWLEDGED: "it is acknowledged",
    pb.REASON_SETTLING: "it is acknowledged, and that is being made durable",
    pb.REASON_RETURNED_LIMIT: "as much of {consumer} waits to be delivered again as may",
    pb.REASON_NO_ENTRY: "the log has no such entry",
}


def report(live: Live, keys_max: int) -> pb.ReportResponse:
    """What a subscription is doing."""
    machine = live.machine
    lanes = machine.lanes.values()
    withheld = [lane for lanes_ in machine.withheld.values() for lane in lanes_]
    oldest = sorted(withheld, key=lambda lane: lane.since_ms)[:keys_max]
    return pb.ReportResponse(
        epoch=live.epoch,
        options=_options(live.options, live.placement),
        consumers=[_consumer(live, each) for _, each in sorted(machine.consumers.items())],
        read_position=_wire(machine.read_position),
        mark_delete=_wire(machine.acknowledged.mark_delete),
        unacked_messages=machine.unacked,
        blocked_on_unacked=machine.is_blocked,
        active_keys=len(machine.lanes),
        withheld=[
            pb.WithheldKeys(
                reason=_reason(reason),
                keys=len(lanes_),
                oldest=_time(min(lane.since_ms for lane in lanes_)),
            )
            for reason, lanes_ in machine.withheld.items()
            if lanes_
        ],
        parked_entries=machine.parked,
        lagging=machine.lagging,
        delayed_entries=machine.delayed,
        failed_entries=sum(len(lane.unresolved or ()) for lane in lanes),
        keys=[_key(live, lane) for lane in oldest],
        totals=pb.Totals(**machine.totals),
        assignment_version=live.assignment_version,
    )


def ranges(live: Live, consumer: int) -> list[pb.KeyRange]:
    """Which slots a consumer owns."""
    if live.options.kind is not Kind.KEY_SHARED:
        return []
    owned = live.machine.selector.ranges(consumer)
    return [pb.KeyRange(first=each.first, last=each.last) for each in owned]


def explain_key(live: Live, key: bytes) -> pb.ExplainResponse:
    """Why the next message of a key is not delivered."""
    machine = live.machine
    own = _own_key(machine, key)
    lane = machine.lanes.get(own)
    response = pb.ExplainResponse(key=key)
    if lane is not None:
        response.key_report.CopyFrom(_key(live, lane))
        response.reasons.extend(_of_lane(live, lane))
    else:
        response.reasons.extend(_of_slot(live, own))
    return response


async def explain_position(live: Live, position: Position) -> pb.ExplainResponse:
    """Why a message is not delivered."""
    machine = live.machine
    found = await live.entry(position)
    if found is None:
        return pb.ExplainResponse(reasons=[_say(pb.REASON_NO_ENTRY, position=position)])
    entry = entry_of(found)
    key = entry.key or b""
    response = pb.ExplainResponse(key=key)
    if position in machine.acknowledged:
        response.reasons.append(_say(pb.REASON_ACKNOWLEDGED, position=position))
        return response
    if machine.read_position is None or position > machine.read_position:
        response.reasons.append(_say(pb.REASON_UNREAD, position=machine.read_position))
        response.reasons.extend(_why_not_reading(live))
        return response
    lane = machine.lanes.get(machine.key_of(entry)) if entry.key is not None else None
    if lane is None:
        response.reasons.extend(_of_slot(live, machine.key_of(entry)))
        return response
    response.key_report.CopyFrom(_key(live, lane))
    flight = lane.flights.get(position)
    if flight is not None:
        reason = pb.REASON_SETTLING if flight.is_settling else pb.REASON_IN_FLIGHT
        said = _say(
            reason,
            consumer=_name(machine, flight.consumer),
            position=position,
            since_ms=flight.delivered_ms,
            until_ms=flight.deadline_ms,
        )
        response.reasons.append(said)
        return response
    if lane.lag is not None and position >= lane.lag:
        response.reasons.append(_say(pb.REASON_LAGGING, position=lane.lag))
    first = lane.next_position
    if first is not None and first < position:
        response.reasons.append(_say(pb.REASON_IN_ORDER, position=first))
    response.reasons.extend(_of_lane(live, lane))
    return response


def _of_lane(live: Live, lane: Lane) -> Iterator[pb.Explanation]:
    """Why the next entry of a key waits."""
    machine = live.machine
    oldest = min(lane.flights.values(), key=lambda each: each.position, default=None)
    owner = machine.owner_of(lane.slot)
    if lane.reason is not Reason.READY:
        about = lane.holder if lane.reason in (Reason.DRAINING, Reason.RETRY) else owner
        yield _say(
            _reason(lane.reason),
            consumer=_name(machine, about),
            position=lane.next_position if oldest is None else oldest.position,
            since_ms=lane.since_ms,
            until_ms=machine.retry_at_ms(lane),
        )
        if lane.reason is Reason.SUBSCRIPTION_LIMIT:
            return
    elif not lane.parked and oldest is not None:
        yield _say(
            pb.REASON_IN_FLIGHT,
            consumer=_name(machine, oldest.consumer),
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
        yield _say(
            pb.REASON_SETTLING if oldest.is_settling else pb.REASON_IN_FLIGHT,
            consumer=_name(machine, oldest.consumer),
            position=oldest.position,
            since_ms=oldest.delivered_ms,
            until_ms=oldest.deadline_ms,
        )


def _of_slot(live: Live, key: bytes) -> Iterator[pb.Explanation]:
    """Why nothing of a key that has no work is delivered."""
    machine = live.machine
    slot = machine.slot_of(key)
    if slot is not None and slot.lag is not None:
        yield _say(pb.REASON_LAGGING, position=slot.lag)
        yield from _of_owner(machine, machine.owner_of(slot))
    else:
        yield _say(pb.REASON_UNREAD, position=machine.read_position)
        yield from _why_not_reading(live)


def _why_not_reading(live: Live) -> Iterator[pb.Explanation]:
    machine = live.machine
    if machine.is_blocked:
        yield _say(pb.REASON_SUBSCRIPTION_LIMIT)
    elif not machine.consumers:
        yield _say(pb.REASON_NO_OWNER)
    elif all(each.permits <= 0 for each in machine.consumers.values()):
        yield _say(pb.REASON_NO_PERMITS, consumer=", ".join(_names(machine)))


def _of_owner(machine: Subscription, owner: int | None) -> Iterator[pb.Explanation]:
    """What the owner of a key that may go has to do with it."""
    consumer = None if owner is None else machine.consumers[owner]
    if consumer is None and (machine.options.kind is Kind.KEY_SHARED or not machine.consumers):
        yield _say(pb.REASON_NO_OWNER)
    elif consumer is None:
        yield from _why_nobody(machine)
    elif consumer.is_blocked:
        yield _say(pb.REASON_CONSUMER_LIMIT, consumer=consumer.name)
    elif consumer.permits <= 0:
        yield _say(pb.REASON_NO_PERMITS, consumer=consumer.name)
    else:
        yield _say(pb.REASON_READY, consumer=consumer.name)


def _why_nobody(machine: Subscription) -> Iterator[pb.Explanation]:
    if all(each.permits <= 0 for each in machine.consumers.values()):
        yield _say(pb.REASON_NO_PERMITS, consumer=", ".join(_names(machine)))
    elif all(each.is_blocked for each in machine.consumers.values()):
        yield _say(pb.REASON_CONSUMER_LIMIT, consumer=", ".join(_names(machine)))
    else:
        yield _say(pb.REASON_READY)


def _own_key(machine: Subscription, key: bytes) -> bytes:
    """The key of the lane in which a key's messages are."""
    return key if machine.options.kind is Kind.KEY_SHARED else b""


def _consumer(live: Live, consumer: Consumer) -> pb.ConsumerReport:
    session = live.sessions.get(consumer.id)
    oldest = next(iter(consumer.flights.values()), None)
    draining = {
        flight.lane
        for flight in consumer.flights.values()
        if flight.lane.slot.queue is not consumer.queue
    }
    return pb.ConsumerReport(
        consumer_id=consumer.id,
        name=consumer.name,
        ranges=ranges(live, consumer.id),
        permits=consumer.permits,
        unacked_messages=consumer.unacked,
        blocked_on_unacked=consumer.is_blocked,
        draining_keys=len(draining),
        parked_entries=consumer.queue.parked,
        oldest_delivery=None if oldest is None else _time(oldest.delivered_ms),
        connected=None if session is None else _time(session.connected_ms),
    )


def _key(live: Live, lane: Lane) -> pb.KeyReport:
    machine = live.machine
    oldest = min(
        [*lane.flights, *([lane.next_position] if lane.next_position else [])], default=None
    )
    retry_ms = machine.retry_at_ms(lane)
    return pb.KeyReport(
        key=lane.key,
        slot=lane.slot.number,
        reason=_reason(lane.reason),
        since=None if lane.reason is Reason.READY else _time(lane.since_ms),
        holder=_name(machine, lane.holder),
        owner=_name(machine, machine.owner_of(lane.slot)),
        oldest=_wire(oldest),
        attempts=machine.attempts.get(oldest, 0) if oldest is not None else 0,
        in_flight_entries=len(lane.flights),
        parked_entries=lane.parked,
        next_retry=None if retry_ms is None else _time(retry_ms),
    )


def _options(options: Options, placement: Placement) -> pb.SubscriptionOptions:
    return pb.SubscriptionOptions(
        type=pb.SubscriptionType.Value(f"SUBSCRIPTION_TYPE_{options.kind.name}"),
        placement=pb.Placement.Value(f"PLACEMENT_{placement.name}"),
        allow_out_of_order_delivery=not options.in_order,
        max_in_flight_per_key=options.max_in_flight_per_key,
        max_unacked_per_consumer=options.consumer_unacked_max,
        max_unacked=options.unacked_max,
        max_redeliveries=options.redeliveries_max,
        after_dead_letter=pb.AfterDeadLetter.Value(
            f"AFTER_DEAD_LETTER_{AfterDeadLetter(options.after_dead_letter).name}"
        ),
        delay_holds_key=options.delay_holds_key,
        drain_deadline_ms=options.drain_deadline_ms,
        classic_join=options.classic_join,
    )


def _say(
    reason: pb.Reason.ValueType,
    *,
    consumer: str = "",
    position: Position | None = None,
    since_ms: int | None = None,
    until_ms: int | None = None,
) -> pb.Explanation:
    return pb.Explanation(
        reason=reason,
        text=TEXTS[reason].format(consumer=consumer or "nobody"),
        consumer=consumer,
        position=_wire(position),
        since=None if since_ms is None else _time(since_ms),
        until=None if until_ms is None else _time(until_ms),
    )


def _reason(reason: Reason) -> pb.Reason.ValueType:
    return pb.Reason.Value(f"REASON_{reason.name}")


def _name(machine: Subscription, consumer: int | None) -> str:
    known = None if consumer is None else machine.consumers.get(consumer)
    return "" if known is None else known.name


def _names(machine: Subscription) -> list[str]:
    return [each.name for each in machine.consumers.values()]


def _wire(position: Position | None) -> entry_pb2.Position | None:
    if position is None:
        return None
    return entry_pb2.Position(ledger_id=position.ledger_id, entry_id=position.entry_id)


def _time(ms: int) -> Timestamp:
    stamp = Timestamp()
    stamp.FromMilliseconds(ms)
    return stamp

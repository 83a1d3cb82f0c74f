"""Reports of a subscription and its filters, on the wire."""

from typing import Any

from google.protobuf.duration_pb2 import Duration

from seqgate.api.dispatcher.v1 import dispatcher_pb2 as pb
from seqgate.api.filter.v1 import filter_pb2
from seqgate.payloads import batches_opened
from seqgate.services.dispatcher.core.effects import AfterDeadLetter, Options, SubscriptionType
from seqgate.services.dispatcher.core.lane import Consumer, Lane, Reason
from seqgate.services.dispatcher.core.selectors import Placement
from seqgate.services.dispatcher.core.subscription import Subscription
from seqgate.services.dispatcher.filtering.analysis import Analysis
from seqgate.services.dispatcher.filtering.applied import Filtering
from seqgate.services.dispatcher.filtering.chains import Chains, Policy, Stretch
from seqgate.services.dispatcher.filtering.tallies import Row, Tally
from seqgate.services.dispatcher.shell.live import Live
from seqgate.services.dispatcher.shell.session import Session
from seqgate.services.runtime.positions import to_position
from seqgate.times import duration, timestamp


def report(live: Live, max_keys: int) -> pb.ReportResponse:
    machine = live.machine
    lanes = machine.lanes.values()
    withheld = [lane for lanes_ in machine.withheld.values() for lane in lanes_]
    oldest = sorted(withheld, key=lambda lane: lane.since_ms)[:max_keys]
    return pb.ReportResponse(
        epoch=live.epoch,
        options=_options(live.options, live.placement),
        consumers=[_consumer(live, each) for _, each in sorted(machine.consumers.items())],
        read_position=to_position(machine.read_position),
        mark_delete=to_position(machine.acknowledged.mark_delete),
        unacked_messages=machine.unacked,
        blocked_on_unacked=machine.is_blocked,
        active_keys=len(machine.lanes),
        withheld=[
            pb.WithheldKeys(
                reason=reason_of(reason),
                keys=len(lanes_),
                oldest=timestamp(min(lane.since_ms for lane in lanes_)),
            )
            for reason, lanes_ in machine.withheld.items()
            if lanes_
        ],
        parked_entries=machine.parked,
        lagging=machine.lagging,
        delayed_entries=machine.delayed,
        failed_entries=sum(len(lane.unresolved or ()) for lane in lanes),
        keys=[key_report(live, lane) for lane in oldest],
        totals=pb.Totals(**machine.totals),
        assignment_revision=live.assignment_revision,
        filtering=_filtering(live.filtering),
        unjudged_entries=machine.unjudged,
        filter_failed_entries=machine.filter_failed,
        rescheduled_entries=machine.rescheduled,
        payloads_opened=batches_opened(),
    )


def filters(chains: Chains) -> pb.SubscriptionFilters:
    return pb.SubscriptionFilters(
        applied=map(_stretch, chains.applied),
        shadow=None if chains.shadow is None else _stretch(chains.shadow),
        changes=[
            pb.FilterChange(
                time=timestamp(each.time_ms),
                mode=_mode(is_shadow=each.is_shadow),
                start=to_position(each.start),
                filters=[
                    filter_pb2.Filter(name=name, version=version) for name, version in each.filters
                ],
                policy=_policy(each.policy),
                epoch=each.epoch,
                caller=each.caller,
            )
            for each in chains.changes
        ],
    )


def analysis(found: Analysis) -> pb.AnalyzeBacklogResponse:
    response = pb.AnalyzeBacklogResponse(
        backlog_entries=found.backlog_entries,
        scanned_entries=found.entries,
        scanned_messages=found.messages,
        first=to_position(found.first),
        last=to_position(found.last),
        blocks=found.blocks,
        complete=found.is_complete,
    )
    for each in found.found:
        row = response.verdicts.add(
            entries=each.entries,
            messages=each.messages,
            estimated_entries=each.estimate.about,
            estimated_entries_low=each.estimate.low,
            estimated_entries_high=each.estimate.high,
            estimated_messages=each.messages_about,
        )
        if each.is_failure:
            row.failure = filter_pb2.FailureReason.Value(f"FAILURE_REASON_{each.verdict}")
        else:
            row.verdict = filter_pb2.FilterVerdict.Value(f"FILTER_VERDICT_{each.verdict}")
    return response


def ranges(live: Live, consumer: int) -> list[pb.KeyRange]:
    """The slots that a consumer owns; none unless the subscription is KEY_SHARED."""
    if live.options.kind is not SubscriptionType.KEY_SHARED:
        return []
    owned = live.machine.selector.ranges(consumer)
    return [pb.KeyRange(first=each.first, last=each.last) for each in owned]


def _breaker(session: Session | None) -> dict[str, Any]:
    if session is None or session.breaker is None:
        return {}
    pause = duration(session.breaker.pause_ms)
    return {
        "breaker": pb.Breaker(open=True, pause=pause),
        "breaker_opened": timestamp(session.breaker.opened_ms),
    }


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
        oldest_delivery=None if oldest is None else timestamp(oldest.delivered_ms),
        connected=None if session is None else timestamp(session.connected_ms),
        **_breaker(session),
    )


def key_report(live: Live, lane: Lane) -> pb.KeyReport:
    machine = live.machine
    oldest = min(
        [*lane.flights, *([lane.next_position] if lane.next_position else [])], default=None
    )
    retry_ms = machine.retry_at_ms(lane)
    return pb.KeyReport(
        key=lane.key,
        slot=lane.slot.number,
        reason=reason_of(lane.reason),
        since=None if lane.reason is Reason.READY else timestamp(lane.since_ms),
        holder=name_of(machine, lane.holder),
        owner=name_of(machine, machine.owner_of(lane.slot)),
        oldest=to_position(oldest),
        attempts=machine.attempts.get(oldest, 0) if oldest is not None else 0,
        in_flight_entries=len(lane.flights),
        parked_entries=lane.parked,
        next_retry=None if retry_ms is None else timestamp(retry_ms),
    )


def _filtering(filtering: Filtering) -> pb.FilteringReport | None:
    rows = filtering.tallies.rows()
    if not rows and not filtering.is_on:
        return None
    outage = filtering.outage
    return pb.FilteringReport(
        filters=map(_row, rows),
        answers=filtering.answers,
        answers_duration=_duration_of(filtering.answers_s),
        max_answer_duration=_duration_of(filtering.answer_max_s),
        unanswered=filtering.unanswered,
        unanswered_since=None if outage is None else timestamp(outage.since_ms),
        unanswered_because="" if outage is None else outage.because,
    )


def _row(row: Row) -> pb.FilterReport:
    return pb.FilterReport(
        mode=_mode(is_shadow=row.is_shadow),
        name=row.name,
        version=row.version,
        processed=_count(row.processed),
        accepted=_count(row.accepted),
        rejected=_count(row.rejected),
        rescheduled=_count(row.rescheduled),
        failed=_count(row.failed_all),
        failures=[
            pb.FilterFailures(reason=reason, count=_count(tally))
            for reason, tally in sorted(row.failed.items())
            if tally.entries
        ],
    )


def _count(tally: Tally) -> pb.FilterCount:
    return pb.FilterCount(entries=tally.entries, messages=tally.messages)


def _stretch(stretch: Stretch) -> pb.FilterStretch:
    return pb.FilterStretch(
        start=to_position(stretch.start),
        filters=[
            filter_pb2.Filter(name=each.name, version=each.version, expression=each.expression)
            for each in stretch.chain.filters
        ],
        policy=_policy(stretch.chain.policy),
    )


def _mode(*, is_shadow: bool) -> pb.FilterMode.ValueType:
    return pb.FILTER_MODE_SHADOW if is_shadow else pb.FILTER_MODE_APPLIED


def _policy(policy: Policy) -> pb.FailurePolicy.ValueType:
    return pb.FailurePolicy.Value(f"FAILURE_POLICY_{policy.name}")


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
        drain_deadline=duration(options.drain_deadline_ms),
        classic_join=options.classic_join,
    )


def reason_of(reason: Reason) -> pb.Reason.ValueType:
    return pb.Reason.Value(f"REASON_{reason.name}")


def name_of(machine: Subscription, consumer: int | None) -> str:
    """A consumer's name; empty: none, or not connected."""
    known = None if consumer is None else machine.consumers.get(consumer)
    return "" if known is None else known.name


def _duration_of(seconds: float) -> Duration:
    return Duration(seconds=int(seconds), nanos=int(seconds % 1 * 1e9))

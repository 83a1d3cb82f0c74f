"""What became of one message in a subscription, from its history and the dead letter topic."""

from collections.abc import Iterable, Iterator
from typing import Final

from seqgate.api.dispatcher.v1 import dispatcher_pb2 as pb
from seqgate.services.dispatcher.core.history import Event, What
from seqgate.services.dispatcher.shell.live import Live
from seqgate.services.dispatcher.wire import lettering
from seqgate.times import milliseconds, timestamp
from seqgate.types import Position

CLOCKS_MS: Final = 60_000
"""How far the clocks of two services may differ: events of a message are looked for from this long
before it was appended."""

_ENDS: Final = frozenset({What.REJECTED, What.DEAD_LETTERED, What.PASSED})
"""Events after which the entry's acknowledgement is a matter of course."""


async def history(live: Live, position: Position) -> pb.GetMessageHistoryResponse:
    """Raises LedgerUnavailable, EntryCorrupt."""
    entry = await live.entry(position)
    appended_ms = None if entry is None else milliseconds(entry.append_time)
    since_ms = max(0, (appended_ms or 0) - CLOCKS_MS)
    listing = live.letters(None)
    letters = await listing.of(position, since_ms)
    events = await live.events(position, since_ms)
    since = None if live.history is None else live.history.since_ms
    audited = await live.audited(position, since_ms)
    if audited is not None:
        events = [*(each for each in audited.events if each not in events), *events]
        if not audited.missing and appended_ms is not None:
            since = appended_ms
    events.sort(key=lambda each: each.at_ms)
    response = pb.GetMessageHistoryResponse(
        events=(_event(live, *each) for each in _told(events)),
        epoch=live.epoch,
        letters=[
            lettering.letter(live, listing.dead_letter_topic, each, await listing.first_of(each))
            for each in letters.letters
        ],
        dead_letter_topic=str(listing.dead_letter_topic),
        more_letters=letters.last is not None,
    )
    if since is not None:
        response.complete_since.CopyFrom(timestamp(since))
    if audited is not None:
        response.audit_topic, response.audit_missing = str(live.audit_topic), audited.missing
    if position in live.returns.open:
        response.redrive = live.returns.open[position].redrive
    return response


def _told(events: Iterable[Event]) -> Iterator[tuple[Event, str]]:
    """Events, each with its consumer. That of an acknowledgement is the one with the delivery; of
    a part of a batch, only if no other one had the batch before: its acknowledgement may have
    become durable after the next delivery."""
    holder, holders = "", set[str]()
    before: What | None = None
    for event in events:
        consumer = event.named.get("consumer", "")
        match event.what:
            case What.DELIVERED:
                holder = consumer
                holders.add(consumer)
            case What.ACKNOWLEDGED:
                if before in _ENDS:
                    continue
                consumer = holder
            case What.PARTLY_ACKNOWLEDGED:
                consumer = holder if len(holders) == 1 else ""
        if event.what is not What.TAKEN:
            before = event.what
        yield event, consumer


def _event(live: Live, event: Event, consumer: str) -> pb.MessageEvent:
    named = event.named
    found = pb.MessageEvent(
        kind=pb.MessageEventKind.Value(f"MESSAGE_EVENT_KIND_{event.what.name}"),
        time=timestamp(event.at_ms),
        consumer=consumer,
        attempts=_number(named, "attempts"),
        filter=named.get("filter", ""),
        filter_version=_number(named, "filter_version"),
        number=_number(named, "number"),
        target=named.get("target", ""),
        text=named.get("text", ""),
        caller=named.get("caller", ""),
    )
    if event.what is What.FAILED:
        found.failure = pb.DeliveryFailure.Value(f"DELIVERY_FAILURE_{named['failure']}")
    if event.what is What.RESCHEDULED:
        delay_ms = min(_number(named, "delay_ms"), live.options.reschedule_max_ms)
        found.until.CopyFrom(timestamp(event.at_ms + delay_ms))
    if event.what is What.PARTLY_ACKNOWLEDGED:
        bits = int(named["messages"], 16)
        found.indexes.extend(each for each in range(bits.bit_length()) if bits >> each & 1)
    return found


def _number(named: dict[str, str], name: str) -> int:
    return int(named.get(name) or 0)

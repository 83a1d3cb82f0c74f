"""The life of one message: its entry, and what became of it in each subscription, as a timeline."""

from collections.abc import Sequence
from typing import Final

from seqgate.api.dispatcher.v1 import dispatcher_pb2
from seqgate.client._admin import Admin
from seqgate.client._life import MessageEvent, MessageLife, SubscriptionLife
from seqgate.errors import InvalidRequestError, NotFoundError
from seqgate.message_id import MessageId
from seqgate.services.console.pages.answers import cut
from seqgate.services.console.pages.query import number_of, parsed_id, time_given, topic_of
from seqgate.services.console.pages.visit import Values, Visit
from seqgate.times import moment

NOT_OWNED: Final = "No dispatcher owns this subscription."

FIELDS: Final = ("position", "producer", "sequence_id", "trace", "time")
"""What a message is looked for by; the time is where a search for its trace begins."""

EVENTS_MAX: Final = 40
"""The most events shown of a subscription: the latest."""

EVENTS_OF_ALL_MAX: Final = 160
"""The most events shown of all subscriptions, which share them; each has one."""

TEXTS_CHARACTERS_MAX: Final = 12_000
"""The most characters of the texts of all events, which share them."""

KINDS: Final = {
    "ACKNOWLEDGED": "good",
    "PARTLY_ACKNOWLEDGED": "good",
    "FAILED": "bad",
    "FILTER_FAILED": "bad",
    "DEAD_LETTERED": "bad",
    "REJECTED": "warm",
    "RESCHEDULED": "warm",
    "PASSED": "warm",
    "DISCARDED": "warm",
}
"""How events are marked; the others are not."""


NUMBERED: Final = {
    "REDRIVEN": "as redrive",
    "DISCARDED": "operation",
    "MENDED": "operation",
    "TAKEN": "epoch",
}
"""What the numbers of events count. That of a dead letter names it in its topic, not its place."""


class Looking(Admin):
    """An admin client whose looks make no instance take a subscription."""

    async def message_history(
        self, topic: str, subscription: str, message_id: MessageId
    ) -> SubscriptionLife:
        request = dispatcher_pb2.GetSubscriptionRequest(topic=topic, subscription=subscription)
        if not (await self._calls.call(request)).subscription.owner:
            raise NotFoundError(NOT_OWNED, reason="NO_OWNER")
        return await super().message_history(topic, subscription, message_id)


async def life(visit: Visit) -> Values:
    """By its position, by its producer and sequence id, or by the trace of its producer."""
    name = topic_of(visit.query)
    given = {each: visit.query.get(each, "").strip() for each in FIELDS}
    values: Values = {"topic": name, "given": given, "life": None, "fault": ""}
    if not (given["position"] or given["producer"] or given["trace"]):
        return values
    try:
        found = await _found(visit, name, given)
    except (InvalidRequestError, NotFoundError) as error:
        if error.reason == "TOPIC_NOT_FOUND":
            raise
        return values | {"fault": str(error)}
    return values | {
        "life": found,
        "position": None if found.id is None else found.id.position,
        "appended": None if found.message is None else moment(found.message.append_time_ms),
        "subscriptions": timelines(found.subscriptions),
    }


async def _found(visit: Visit, topic: str, given: dict[str, str]) -> MessageLife:
    admin = Looking(visit.calls)
    if given["position"]:
        return await admin.message_life(topic, message_id=parsed_id(given["position"]))
    if given["producer"]:
        sequence_id = number_of(given, "sequence_id")
        if sequence_id is None:
            raise InvalidRequestError("a producer's message needs its sequence id")
        return await admin.message_life(topic, producer=given["producer"], sequence_id=sequence_id)
    return await admin.message_life(topic, trace_id=given["trace"], since=time_given(given["time"]))


def timelines(lives: Sequence[SubscriptionLife]) -> list[Values]:
    """What the page shows of each subscription."""
    events_max = min(EVENTS_MAX, max(1, EVENTS_OF_ALL_MAX // max(1, len(lives))))
    events = sum(min(events_max, len(each.events)) for each in lives)
    text_max = TEXTS_CHARACTERS_MAX // max(1, events)
    return [_subscription(each, events_max, text_max) for each in lives]


def _subscription(each: SubscriptionLife, events_max: int, text_max: int) -> Values:
    return {
        "name": each.subscription,
        "life": each,
        "not_owned": each.unknown == NOT_OWNED,
        "events": [_event(it, text_max) for it in each.events[-events_max:]],
        "earlier": max(0, len(each.events) - events_max),
    }


def _event(each: MessageEvent, text_max: int) -> Values:
    return {"event": each, "mark": KINDS.get(each.kind, ""), "what": _what(each, text_max)}


def _what(each: MessageEvent, text_max: int) -> str:
    """An event's details, in words."""
    parts = []
    if each.consumer:
        to = "to" if each.kind == "DELIVERED" else "by"
        parts.append(f"{to} {each.consumer}")
    if each.caller:
        parts.append(f"by {each.caller}")
    if each.failure:
        parts.append(each.failure.replace("_", " ").lower())
    if each.kind in ("FAILED", "DEAD_LETTERED") and each.attempts:
        parts.append(f"attempt {each.attempts}")
    if each.filter:
        parts.append(f"filter {each.filter} {each.filter_version}")
    if each.kind in NUMBERED and each.number:
        parts.append(f"{NUMBERED[each.kind]} {each.number:,}")
    if each.target:
        parts.append(f"{'at' if each.kind == 'TAKEN' else 'in'} {each.target}")
    if each.indexes:
        parts.append("messages " + ", ".join(map(str, each.indexes)))
    if each.until:
        parts.append(f"until {each.until:%H:%M:%S} UTC")
    if each.text and each.kind == "FAILED":
        return f"{', '.join(parts)}: {cut(each.text, text_max)}"
    if each.text:  # of a dead letter: an enum's value
        is_name = each.kind == "DEAD_LETTERED"
        parts.append(each.text.replace("_", " ").lower() if is_name else cut(each.text, text_max))
    return ", ".join(parts)

"""Parses requests into values of the core, or refuses them."""

import itertools
import uuid
from collections.abc import Iterable, Sequence
from typing import Any, Final

from seqgate.api.dispatcher.v1 import dispatcher_pb2 as pb
from seqgate.services.dispatcher.config import DispatcherConfig
from seqgate.services.dispatcher.core.effects import AfterDeadLetter, Options, SubscriptionType
from seqgate.services.dispatcher.core.selectors import Placement, SlotRange
from seqgate.services.dispatcher.core.subscription import Ack, Nack
from seqgate.services.dispatcher.errors import (
    InvalidConsumer,
    InvalidDiscard,
    InvalidMend,
    InvalidOptions,
    InvalidPermits,
    InvalidSettlement,
    InvalidSubscriptionName,
)
from seqgate.services.dispatcher.filtering.chains import Chain, Policy
from seqgate.services.dispatcher.letters.graveyard import default_topic
from seqgate.services.dispatcher.letters.mending import Amendment
from seqgate.services.dispatcher.ports import INTERNAL, PROPERTIES_MAX, Filter, InvalidChain
from seqgate.services.dispatcher.shell.session import Joining
from seqgate.services.errors import DomainError, InvalidPage
from seqgate.services.runtime.requests import (
    DAY_MS,
    read_duration_ms,
    read_name,
    read_position,
    read_topic,
)
from seqgate.times import milliseconds
from seqgate.types import (
    NACK_REASON_BYTES_MAX,
    InvalidNameError,
    Position,
    TopicName,
)

ITEMS_MAX: Final = 10_000
"""How many deliveries one request may name."""

PERMIT_MAX: Final = 1_000_000
PERMITS_MAX: Final = 10_000_000
"""How many messages one request may permit, and how many permits a consumer may have."""

ACK_TIMEOUT_MIN_MS: Final = 100
"""The shortest time-out of a delivery, in milliseconds."""

WEIGHT_MAX: Final = 100
"""The largest weight of a consumer."""

RANGES_MAX: Final = 1_000
"""How many ranges a consumer may take."""

UNACKED_MAX: Final = 1_000_000
"""The highest limit of unacknowledged messages."""

IN_FLIGHT_MAX: Final = 10_000
"""The highest limit of a key's entries in flight."""

REDELIVERIES_DEFAULT: Final = 16
REDELIVERIES_MAX: Final = 1_000
"""How often a message is redelivered, by default and at most."""

DRAIN_DEADLINE_MS: Final = 300_000
"""How long a draining key waits by default, in milliseconds: five minutes."""

PAGE_DEFAULT: Final = 100
PAGE_MAX: Final = 1_000
"""How many subscriptions a page holds, by default and at most."""

KEYS_DEFAULT: Final = 20
KEYS_MAX: Final = 1_000
"""How many keys a report lists, by default and at most."""

ANALYZED_DEFAULT: Final = 10_000
ANALYZED_MAX: Final = 100_000
"""How many entries an analysis judges, by default and at most."""

REDRIVEN_MAX: Final = 100
"""How many letters one request redrives."""

REQUEST_ID_BYTES_MAX: Final = 64
"""The longest id of a request, in bytes: 32 of them fit into one property."""

DISCARD_REASON_BYTES_MAX: Final = 256
"""The longest reason of a discard, in bytes."""

ANALYSIS_S: Final = 10
ANALYSIS_MAX_S: Final = 120
"""How many seconds an analysis takes, by default and at most."""


def breaker(given: pb.Breaker) -> int | None:
    """The pause of an open circuit breaker, in milliseconds; None: it is closed."""
    return milliseconds(given.pause) if given.open else None


def joining(
    topic: TopicName, name: str, subscribe: pb.Subscribe, config: DispatcherConfig
) -> Joining:
    given = subscribe.options
    consumer_name = subscribe.consumer_name or f"consumer-{uuid.uuid4().hex[:12]}"
    read_name("consumer_name", consumer_name, InvalidConsumer)
    timeout_ms = 0
    if subscribe.HasField("ack_timeout"):
        timeout_ms = read_duration_ms(
            "ack_timeout",
            subscribe.ack_timeout,
            InvalidConsumer,
            least_ms=ACK_TIMEOUT_MIN_MS,
            most_ms=DAY_MS,
        )
    if subscribe.weight > WEIGHT_MAX:
        raise InvalidConsumer(f"weight must be at most {WEIGHT_MAX}", field="weight")
    if len(subscribe.ranges) > RANGES_MAX:
        raise InvalidConsumer(f"too many ranges (limit {RANGES_MAX:,})", field="ranges")
    return Joining(
        consumer_name,
        _options(given, config),
        _PLACEMENTS[given.placement],
        _dead_letter_topic(topic, name, given.dead_letter_topic),
        [SlotRange(each.first, each.last) for each in subscribe.ranges],
        subscribe.weight or 1,
        timeout_ms,
        subscribe.delivery_runs,
    )


def _drain_deadline_ms(given: pb.SubscriptionOptions) -> int:
    if not given.HasField("drain_deadline"):
        return DRAIN_DEADLINE_MS
    field = "options.drain_deadline"
    return read_duration_ms(field, given.drain_deadline, InvalidOptions, least_ms=1, most_ms=DAY_MS)


def _options(given: pb.SubscriptionOptions, config: DispatcherConfig) -> Options:
    if given.type not in _KINDS:
        raise InvalidOptions("options.type is required", field="options.type")
    for field, known in (("placement", _PLACEMENTS), ("after_dead_letter", _AFTER)):
        if getattr(given, field) not in known:
            raise InvalidOptions(f"options.{field} is unknown", field=f"options.{field}")
    defaults = Options()
    limits = {
        "max_in_flight_per_key": IN_FLIGHT_MAX,
        "max_unacked_per_consumer": UNACKED_MAX,
        "max_unacked": UNACKED_MAX,
        "max_redeliveries": REDELIVERIES_MAX,
    }
    for field, most in limits.items():
        if getattr(given, field) > most:
            raise InvalidOptions(
                f"options.{field} must be at most {most:,}", field=f"options.{field}"
            )
    return Options(
        kind=_KINDS[given.type],
        in_order=not given.allow_out_of_order_delivery,
        max_in_flight_per_key=given.max_in_flight_per_key,
        consumer_unacked_max=given.max_unacked_per_consumer
        if given.HasField("max_unacked_per_consumer")
        else defaults.consumer_unacked_max,
        unacked_max=given.max_unacked if given.HasField("max_unacked") else defaults.unacked_max,
        key_parked_max=config.key_parked_max,
        consumer_parked_max=config.consumer_parked_max,
        delayed_max=config.delayed_max,
        delayed_bytes_max=config.delayed_bytes_max,
        classic_join=given.classic_join,
        delay_holds_key=given.delay_holds_key,
        drain_deadline_ms=_drain_deadline_ms(given),
        redeliveries_max=given.max_redeliveries
        if given.HasField("max_redeliveries")
        else REDELIVERIES_DEFAULT,
        after_dead_letter=_AFTER[given.after_dead_letter],
        filter_failed_max_ms=int(config.filter_failed_max_s * 1000),
    )


_KINDS: Final = {
    pb.SUBSCRIPTION_TYPE_KEY_SHARED: SubscriptionType.KEY_SHARED,
    pb.SUBSCRIPTION_TYPE_SHARED: SubscriptionType.SHARED,
    pb.SUBSCRIPTION_TYPE_EXCLUSIVE: SubscriptionType.EXCLUSIVE,
}
_PLACEMENTS: Final = {
    pb.PLACEMENT_UNSPECIFIED: Placement.CONSISTENT_HASHING,
    pb.PLACEMENT_CONSISTENT_HASHING: Placement.CONSISTENT_HASHING,
    pb.PLACEMENT_AUTO_SPLIT: Placement.AUTO_SPLIT,
    pb.PLACEMENT_STICKY: Placement.STICKY,
}
_AFTER: Final = {
    pb.AFTER_DEAD_LETTER_UNSPECIFIED: AfterDeadLetter.CONTINUE,
    pb.AFTER_DEAD_LETTER_CONTINUE: AfterDeadLetter.CONTINUE,
    pb.AFTER_DEAD_LETTER_HOLD: AfterDeadLetter.HOLD,
    pb.AFTER_DEAD_LETTER_TAIL: AfterDeadLetter.TAIL,
}


_POLICIES: Final = {
    pb.FAILURE_POLICY_UNSPECIFIED: Policy.PARK,
    pb.FAILURE_POLICY_PARK: Policy.PARK,
    pb.FAILURE_POLICY_ACCEPT: Policy.ACCEPT,
    pb.FAILURE_POLICY_REJECT: Policy.REJECT,
}
_MODES: Final = frozenset(
    {pb.FILTER_MODE_UNSPECIFIED, pb.FILTER_MODE_APPLIED, pb.FILTER_MODE_SHADOW}
)


def chain(request: pb.SetFiltersRequest | pb.AnalyzeBacklogRequest) -> Chain:
    """The given filters, and their failure policy. The filter service checks the expressions."""
    filters = tuple(Filter(each.name, each.version, each.expression) for each in request.filters)
    if isinstance(request, pb.AnalyzeBacklogRequest):
        return Chain(filters)
    for field, known in (("policy", _POLICIES), ("mode", _MODES)):
        if getattr(request, field) not in known:
            raise InvalidChain(f"{field} is unknown", field=field)
    return Chain(filters, _POLICIES[request.policy])


def names(request: Any) -> tuple[TopicName, str]:
    """A request's topic and subscription."""
    return read_topic(request.topic), _subscription_name(request.subscription)


def _subscription_name(text: str) -> str:
    read_name("subscription", text, InvalidSubscriptionName)
    if text.startswith(INTERNAL):
        raise InvalidSubscriptionName(f"the prefix {INTERNAL} is reserved", field="subscription")
    return text


def _dead_letter_topic(topic: TopicName, name: str, given: str) -> TopicName:
    try:
        dead = TopicName.parse(given) if given else default_topic(topic, name)
    except InvalidNameError as error:
        raise InvalidOptions(str(error), field="options.dead_letter_topic") from error
    if dead == topic:
        raise InvalidOptions(
            "dead_letter_topic must not be the topic itself",
            field="options.dead_letter_topic",
        )
    return dead


def dead_letter_topic(request: Any) -> TopicName | None:
    """The dead letter topic that a request names; None: it names none."""
    return read_topic(request.dead_letter_topic) if request.dead_letter_topic else None


def letters(request: Any, invalid: type[DomainError]) -> list[Position]:
    """The letters that a request names."""
    if not 1 <= len(request.positions) <= REDRIVEN_MAX:
        raise invalid(f"positions must have 1 to {REDRIVEN_MAX} letters", field="positions")
    found = [read_position("positions", each, invalid) for each in request.positions]
    if len(set(found)) < len(found):
        raise invalid("positions must name each letter once", field="positions")
    return found


def request_id(request: Any, invalid: type[DomainError]) -> str:
    if not 1 <= len(request.request_id.encode()) <= REQUEST_ID_BYTES_MAX:
        raise invalid(f"request_id must have 1 to {REQUEST_ID_BYTES_MAX} bytes", field="request_id")
    return str(request.request_id)


def discard_reason(request: pb.DiscardDeadLettersRequest) -> str:
    if len(request.reason.encode()) > DISCARD_REASON_BYTES_MAX:
        limit = f"reason must have at most {DISCARD_REASON_BYTES_MAX} bytes"
        raise InvalidDiscard(limit, field="reason")
    return request.reason


def change(request: pb.MendDeadLetterRequest) -> Amendment:
    """What a mend changes."""
    has_payload = request.HasField("payload")
    if not (has_payload or request.put or request.remove):
        raise InvalidMend("set one of payload, put, remove", field="payload")
    for field in ("put", "remove"):
        names = list(getattr(request, field))
        if any(each.startswith(INTERNAL) for each in names):
            raise InvalidMend(f"{field}: the prefix {INTERNAL} is reserved", field=field)
        if len(names) > PROPERTIES_MAX:
            raise InvalidMend(
                f"{field}: too many properties ({PROPERTIES_MAX} at most)", field=field
            )
    payload = request.payload if has_payload else None
    return Amendment(payload, dict(request.put), list(request.remove))


def permits(messages: int, have: int) -> int:
    """The permits granted to a consumer that has `have` already."""
    if not 1 <= messages <= PERMIT_MAX or have + messages > PERMITS_MAX:
        raise InvalidPermits(
            f"messages must be 1 to {PERMIT_MAX:,}, and outstanding permits at most "
            f"{PERMITS_MAX:,}",
            field="messages",
        )
    return messages


def acknowledged(request: pb.Acknowledge) -> tuple[Sequence[Ack], Sequence[int]]:
    """The settlements of a request, and the deliveries of its runs."""
    runs = [(run.first, run.count) for run in request.runs]
    if not all(count for _, count in runs):
        raise InvalidSettlement("a run must have at least one delivery", field="runs.count")
    _check_count(len(request.settlements) + sum(count for _, count in runs))
    whole = [*itertools.chain.from_iterable(range(first, first + count) for first, count in runs)]
    return [_item(each) for each in request.settlements], whole


def items(kind: str, request: Any) -> Sequence[Any]:
    """The items of another request, by the name of its field."""
    match kind:
        case "negative_acknowledge":
            return [_nack(each) for each in _counted(request.negative_acknowledgements)]
    return list(_counted(request.deliveries))


def _counted(given: Any) -> Iterable[Any]:
    _check_count(len(given))
    return given  # type: ignore[no-any-return]


def _check_count(deliveries: int) -> None:
    if not 1 <= deliveries <= ITEMS_MAX:
        raise InvalidSettlement(
            f"a request must name 1 to {ITEMS_MAX:,} deliveries", field="request"
        )


def _item(settlement: pb.Settlement) -> Ack:
    bits = 0
    for index in settlement.indexes:
        if index >= ITEMS_MAX:
            raise InvalidSettlement(f"indexes must be below {ITEMS_MAX:,}", field="indexes")
        bits |= 1 << index
    return Ack(settlement.delivery, bits)


def through(settlement: pb.Settlement) -> Ack:
    """All messages of a batch up to the last one named."""
    item = _item(settlement)
    return Ack(item.delivery, (1 << item.messages.bit_length()) - 1)


def _nack(given: pb.NegativeAcknowledgement) -> Nack:
    reason = given.reason
    if reason and len(reason.encode()) > NACK_REASON_BYTES_MAX:
        limit = f"reason must have at most {NACK_REASON_BYTES_MAX} bytes"
        raise InvalidSettlement(limit, field="reason")
    if not given.HasField("delay"):
        return Nack(given.delivery, None, reason)
    delay_ms = read_duration_ms("delay", given.delay, InvalidSettlement, least_ms=0, most_ms=DAY_MS)
    return Nack(given.delivery, delay_ms, reason)


def analysis_s(request: pb.AnalyzeBacklogRequest | pb.EstimateRedriveRequest) -> float:
    if not request.HasField("max_duration"):
        return ANALYSIS_S
    most_ms = ANALYSIS_MAX_S * 1000
    given_ms = read_duration_ms(
        "max_duration", request.max_duration, InvalidPage, least_ms=1, most_ms=most_ms
    )
    return given_ms / 1000

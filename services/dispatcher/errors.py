"""How the dispatcher says no."""

from services.errors import DomainError, Kind


class InvalidSubscriptionName(DomainError):
    """A subscription's name is empty, too long, holds control characters, or is a system's."""

    kind = Kind.INVALID
    reason = "INVALID_SUBSCRIPTION_NAME"


class NotSubscribed(DomainError):
    """A Consume stream starts with one Subscribe, and has no other."""

    kind = Kind.INVALID
    reason = "NOT_SUBSCRIBED"


class InvalidConsumer(DomainError):
    """A consumer's name, weight or time-out is wrong."""

    kind = Kind.INVALID
    reason = "INVALID_CONSUMER"


class InvalidOptions(DomainError):
    """A subscription's options are wrong, or contradict each other."""

    kind = Kind.INVALID
    reason = "INVALID_OPTIONS"


class InvalidPermits(DomainError):
    """Permits are granted by 1 to 1,000,000, and a consumer has at most 10,000,000."""

    kind = Kind.INVALID
    reason = "INVALID_PERMITS"


class InvalidStart(DomainError):
    """A place in the log is missing, or cannot be."""

    kind = Kind.INVALID
    reason = "INVALID_START"


class InvalidSettlement(DomainError):
    """A request has no items or too many, or one of them cannot be."""

    kind = Kind.INVALID
    reason = "INVALID_SETTLEMENT"


class InvalidPosition(DomainError):
    """A position, or a key, is missing, or out of bounds."""

    kind = Kind.INVALID
    reason = "INVALID_POSITION"


class CumulativeAckRefused(DomainError):
    """Everything before a message is acknowledged only where there is one consumer."""

    kind = Kind.INVALID
    reason = "CUMULATIVE_ACK_REFUSED"


class SubscriptionBusy(DomainError):
    """Consumers are connected that do not go together with what is asked."""

    kind = Kind.IN_USE
    reason = "SUBSCRIPTION_BUSY"


class TooManyConsumers(DomainError):
    """The subscription has as many consumers as it may, or this instance as many subscriptions."""

    kind = Kind.EXHAUSTED
    reason = "TOO_MANY_CONSUMERS"


class TooManyUnanswered(DomainError):
    """A consumer asks faster than it can be answered, or does not read the answers."""

    kind = Kind.EXHAUSTED
    reason = "TOO_MANY_UNANSWERED"


class SlowConsumer(DomainError):
    """A consumer does not read what it is sent."""

    kind = Kind.UNAVAILABLE
    reason = "SLOW_CONSUMER"


class SubscriptionFailed(DomainError):
    """Something unforeseen happened to the subscription here; it is taken anew."""

    kind = Kind.UNAVAILABLE
    reason = "SUBSCRIPTION_FAILED"


class KeyNotHeld(DomainError):
    """The key goes on by itself."""

    kind = Kind.NOT_FOUND
    reason = "KEY_NOT_HELD"

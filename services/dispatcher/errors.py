"""The dispatcher's refusals."""

from seqgate.services.errors import DomainError, Kind


class InvalidSubscriptionName(DomainError):
    """A subscription name is empty, too long or reserved, or contains control characters."""

    kind = Kind.INVALID
    reason = "INVALID_SUBSCRIPTION_NAME"


class NotSubscribed(DomainError):
    """A Consume stream does not start with Subscribe, sends a second one, or sends an empty
    request."""

    kind = Kind.INVALID
    reason = "NOT_SUBSCRIBED"


class InvalidConsumer(DomainError):
    """A consumer's name, weight, ranges or acknowledgement timeout is out of range."""

    kind = Kind.INVALID
    reason = "INVALID_CONSUMER"


class InvalidOptions(DomainError):
    """A subscription option is missing, unknown or out of range."""

    kind = Kind.INVALID
    reason = "INVALID_OPTIONS"


class InvalidPermits(DomainError):
    """A grant of permits is outside 1 to 1,000,000, or exceeds 10,000,000 outstanding ones."""

    kind = Kind.INVALID
    reason = "INVALID_PERMITS"


class InvalidStart(DomainError):
    """A start position is missing, or beyond the end of the log, whose last entry is in `last`."""

    kind = Kind.INVALID
    reason = "INVALID_START"


class InvalidSettlement(DomainError):
    """A request settles no deliveries or too many, or one of them is malformed."""

    kind = Kind.INVALID
    reason = "INVALID_SETTLEMENT"


class InvalidPosition(DomainError):
    """A position or key is missing or out of range."""

    kind = Kind.INVALID
    reason = "INVALID_POSITION"


class CumulativeAckRefused(DomainError):
    """Cumulative acknowledgement needs an EXCLUSIVE subscription."""

    kind = Kind.INVALID
    reason = "CUMULATIVE_ACK_REFUSED"


class SubscriptionBusy(DomainError):
    """The connected consumers rule the request out: they have other options, the subscription is
    EXCLUSIVE, or it is to be deleted."""

    kind = Kind.IN_USE
    reason = "SUBSCRIPTION_BUSY"


class TooManyConsumers(DomainError):
    """The subscription has too many consumers, or the instance too many subscriptions."""

    kind = Kind.EXHAUSTED
    reason = "TOO_MANY_CONSUMERS"


class TooManyUnanswered(DomainError):
    """A consumer has too many unanswered requests."""

    kind = Kind.EXHAUSTED
    reason = "TOO_MANY_UNANSWERED"


class SlowConsumer(DomainError):
    """A consumer does not read its stream."""

    kind = Kind.UNAVAILABLE
    reason = "SLOW_CONSUMER"


class SubscriptionFailed(DomainError):
    """A bug in the dispatcher stopped this subscription; it is being reloaded."""

    kind = Kind.UNAVAILABLE
    reason = "SUBSCRIPTION_FAILED"


class LetterNotFound(DomainError):
    """The dead letter topic has no such letter of the subscription."""

    kind = Kind.NOT_FOUND
    reason = "LETTER_NOT_FOUND"


class LetterNotRedrivable(DomainError):
    """A letter cannot be redriven: there is no such letter, its message is on its way back, it was
    redriven, mended or discarded before, or it is a large message of which chunks are missing."""

    kind = Kind.IN_USE
    reason = "LETTER_NOT_REDRIVABLE"


class LetterNotMendable(DomainError):
    """A letter cannot be mended: there is no such letter, it is on its way back, was redriven,
    discarded or mended before, or is a batch or a large message."""

    kind = Kind.IN_USE
    reason = "LETTER_NOT_MENDABLE"


class LetterNotDiscardable(DomainError):
    """A letter cannot be discarded: there is no such letter, it is on its way back, or it was
    redriven, discarded or mended before."""

    kind = Kind.IN_USE
    reason = "LETTER_NOT_DISCARDABLE"


class InvalidMend(DomainError):
    """A mend changes nothing, uses reserved names, makes the message too large, or has an invalid
    request id."""

    kind = Kind.INVALID
    reason = "INVALID_MEND"


class InvalidDiscard(DomainError):
    """A discard names no letters or too many, names one twice, or its reason or request id is
    invalid."""

    kind = Kind.INVALID
    reason = "INVALID_DISCARD"


class TooManyReturns(DomainError):
    """Too many letters of the subscription are on their way back, or settled."""

    kind = Kind.EXHAUSTED
    reason = "TOO_MANY_RETURNS"


class InvalidRedrive(DomainError):
    """A redrive names no letters or too many, names one twice, or its request id, selection or rate
    is invalid."""

    kind = Kind.INVALID
    reason = "INVALID_REDRIVE"


class RedriveRunning(DomainError):
    """Another redrive of many runs on the subscription."""

    kind = Kind.IN_USE
    reason = "REDRIVE_RUNNING"


class RedriveNotFound(DomainError):
    """The subscription has no such redrive, or has forgotten it."""

    kind = Kind.NOT_FOUND
    reason = "REDRIVE_NOT_FOUND"


class KeyNotHeld(DomainError):
    """The key is not held: its messages are delivered."""

    kind = Kind.NOT_FOUND
    reason = "KEY_NOT_HELD"

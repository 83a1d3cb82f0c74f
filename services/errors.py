"""How a core says no, before gRPC is mentioned.

A refusal has a kind (what the caller can do about it), a reason (stable, matchable, never renamed)
and details (fields, not prose). services/runtime/status.py turns it into a gRPC status.

What a caller plans for is not here: that is a return value. What must not happen is not here
either: that is an assert.
"""

from enum import Enum, auto
from typing import ClassVar


class Kind(Enum):
    """What a refused caller can do."""

    INVALID = auto()
    """Correct the request."""
    NOT_FOUND = auto()
    """Check the name, or create what it names."""
    IN_USE = auto()
    """Wait until it is released, or take over."""
    FENCED = auto()
    """Stop: a newer owner has taken over."""
    EXHAUSTED = auto()
    """Use less, or have a limit raised."""
    UNAVAILABLE = auto()
    """Try again later."""
    DATA_LOSS = auto()
    """Call an operator: stored data is damaged."""
    UNKNOWN_CALLER = auto()
    """Authenticate."""
    DENIED = auto()
    """Have the right granted."""


class DomainError(Exception):
    """A refusal. Subclasses fix `kind` and `reason`.

    Args:
        message: one sentence for people, without anything from inside the service.
        field: the request's field that is wrong, when the kind is INVALID.
        retry_after_s: when a retry helps, how long to wait before it.
        details: what a program needs to react; names in lower case, values as text on the wire.
    """

    kind: ClassVar[Kind]
    reason: ClassVar[str]

    def __init__(
        self,
        message: str,
        *,
        field: str | None = None,
        retry_after_s: float | None = None,
        **details: object,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.retry_after_s = retry_after_s
        self.details = details


class MalformedRequest(DomainError):
    """The bytes of a request do not decode as the message that the method takes."""

    kind = Kind.INVALID
    reason = "MALFORMED_REQUEST"


class InvalidTopicName(DomainError):
    """A topic name is not of the form tenant/namespace/name."""

    kind = Kind.INVALID
    reason = "INVALID_TOPIC_NAME"


class InvalidProducerName(DomainError):
    """A producer name is empty, too long, or contains control characters."""

    kind = Kind.INVALID
    reason = "INVALID_PRODUCER_NAME"


class InvalidSequenceId(DomainError):
    """A sequence id is missing or outside 0 to 2^63 - 1."""

    kind = Kind.INVALID
    reason = "INVALID_SEQUENCE_ID"


class InvalidPage(DomainError):
    """A page size is out of range, or a page token is not one that this request returned."""

    kind = Kind.INVALID
    reason = "INVALID_PAGE"


class Draining(DomainError):
    """The service is shutting down."""

    kind = Kind.UNAVAILABLE
    reason = "DRAINING"


class ServiceBusy(DomainError):
    """The service is at a limit of concurrent work, by count or by bytes: `limit` names the setting
    or the constant. Nothing was done."""

    kind = Kind.EXHAUSTED
    reason = "SERVICE_BUSY"


class Fenced(DomainError):
    """A newer owner has taken over the topic, the subscription or the lease."""

    kind = Kind.FENCED
    reason = "FENCED"


class StoreFull(DomainError):
    """The store has no space left. Nothing was stored."""

    kind = Kind.EXHAUSTED
    reason = "STORE_FULL"


class StoreUnavailable(DomainError):
    """The store failed. Whether the request took effect is unknown."""

    kind = Kind.UNAVAILABLE
    reason = "STORE_UNAVAILABLE"

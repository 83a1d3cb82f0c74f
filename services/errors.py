"""Refusals, independent of gRPC.

A refusal has a kind (what the caller can do about it), a reason (stable, matchable, never renamed)
and details (fields, not prose). services/runtime/status.py turns it into a gRPC status.

An outcome that callers plan for is a return value instead, and a broken invariant is an assert.
"""

from enum import Enum, auto
from typing import ClassVar


class Kind(Enum):
    """What the caller of a refused request can do."""

    INVALID = auto()
    """Correct the request."""
    NOT_FOUND = auto()
    """Check the name, or create the resource."""
    IN_USE = auto()
    """Wait until it is released, or take over."""
    FENCED = auto()
    """Stop: a newer owner has taken over."""
    EXHAUSTED = auto()
    """Use less, or have the limit raised."""
    UNAVAILABLE = auto()
    """Try again later."""
    DATA_LOSS = auto()
    """Call an operator: stored data is damaged."""
    UNKNOWN_CALLER = auto()
    """Authenticate."""
    DENIED = auto()
    """Request the right from an operator."""


class DomainError(Exception):
    """A refusal. Subclasses fix `kind` and `reason`.

    Args:
        message: one sentence for people, without internals of the service.
        field: the invalid field of the request, if the kind is INVALID.
        retry_after_s: how long to wait before a retry, if a retry helps.
        details: fields for programs; names in lower case, values as text on the wire.
    """

    kind: ClassVar[Kind]
    reason: ClassVar[str]
    is_usual: ClassVar[bool] = False
    """Whether callers ask in order to find this out; if so, it is logged at debug level only."""

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
    """A request does not decode as the method's message."""

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
    """A page size is out of range, or a page token is not from an earlier page of this list."""

    kind = Kind.INVALID
    reason = "INVALID_PAGE"


class Draining(DomainError):
    """The service is shutting down."""

    kind = Kind.UNAVAILABLE
    reason = "DRAINING"


class ServiceBusy(DomainError):
    """The service is at a limit of concurrent work, by count or by bytes; `limit` names the setting
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

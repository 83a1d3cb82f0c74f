"""The exceptions of Seqgate.

Every refusal of a service has a stable reason (ErrorInfo.reason in its gRPC status). The reason
selects one of the classes below, each for one reaction of the application; the exception keeps the
reason and its details.
"""

from collections.abc import Mapping
from typing import ClassVar, Final, Self


class SeqgateError(Exception):
    """A request that Seqgate refused or failed to serve.

    Attributes:
        reason: stable, UPPER_SNAKE, never renamed; "" if no service gave one.
        details: what a program needs to react.
        retry_after_s: how long the service asks to wait before a retry; None: no such request.
        sequence_id: the id of the message that failed to be sent; None: the message had none yet,
            or the error is not about a message. Also in `details`.
    """

    default_reason: ClassVar[str] = ""

    def __init__(
        self,
        message: str,
        *,
        reason: str = "",
        details: Mapping[str, str] | None = None,
        retry_after_s: float | None = None,
        sequence_id: int | None = None,
    ) -> None:
        super().__init__(message)
        self.reason = reason or self.default_reason
        self.details = dict(details or {})
        self.retry_after_s = retry_after_s
        self.sequence_id = sequence_id

    def of_message(self, sequence_id: int) -> Self:
        """A copy for the message with this id: many messages may fail for one cause."""
        told = type(self)(
            f"{self} (sequence id {sequence_id})",
            reason=self.reason,
            details=self.details | {"sequence_id": str(sequence_id)},
            retry_after_s=self.retry_after_s,
            sequence_id=sequence_id,
        )
        told.__cause__ = self.__cause__
        return told


class InvalidRequestError(SeqgateError, ValueError):
    """The request is invalid, and changed nothing: correct it."""


class NotFoundError(SeqgateError, LookupError):
    """The topic, producer, cursor or subscription does not exist."""


class InUseError(SeqgateError):
    """Another caller uses the name, topic, cursor, range or subscription: wait, or take over."""


class FencedError(SeqgateError):
    """A newer owner has taken over: stop."""


class LimitExceededError(SeqgateError):
    """A limit is reached: use less, or have it raised."""


class UnavailableError(SeqgateError):
    """A service is unavailable: try again."""


class AuthenticationError(SeqgateError):
    """The token or certificate is missing, invalid or expired, as `reason` says."""


class PermissionDeniedError(SeqgateError):
    """The caller lacks a right. `details` names the principal, verb, topic and subscription."""


class DataLossError(SeqgateError):
    """Stored data is damaged or gone."""


class InternalError(SeqgateError):
    """A service failed unexpectedly: report the bug."""


class WrongServiceError(SeqgateError):
    """The server at the address does not know the call: it is another service, or an older version.
    Nothing changed. `details` names the `service` that was expected and its `address`."""

    default_reason = "WRONG_SERVICE"


class StaleSequenceIdError(SeqgateError):
    """The message is not in the log and never will be under this sequence id: a higher one of its
    producer is stored."""

    default_reason = "STALE"


class SequenceIdTrimmedError(SeqgateError):
    """It is unknown whether the message is in the log: its sequence id is at or below its
    producer's last one, and that part of the log is trimmed. This attempt did not store it. A
    resend under the same id fails likewise; one under a new id may store it twice."""

    default_reason = "TRIMMED"


class ConflictError(SeqgateError):
    """Another message is stored under this sequence id, and the producer or the topic's policy
    refuses that (`on_conflict`). This message is not in the log: its producer numbers anew under a
    name that was used before. Send it under another producer name, or a higher id."""

    default_reason = "CONFLICT"


class ProducerClosedError(SeqgateError):
    """The producer was closed before the message got its receipt. It may be in the log. If the
    application assigns ids, a resend with the same id stores it at most once."""

    default_reason = "PRODUCER_CLOSED"


class ProducerQueueFullError(SeqgateError):
    """The limit of pending messages or bytes is reached."""

    default_reason = "PRODUCER_QUEUE_FULL"


class SendTimeoutError(SeqgateError):
    """No receipt arrived in time. The message may be in the log. If the application assigns ids, a
    resend with the same `sequence_id` stores it at most once. `details` has the last failure's
    reason as `last_reason`, if known."""

    default_reason = "SEND_TIMEOUT"


class MixedSequenceIdsError(SeqgateError, ValueError):
    """Some messages of a producer have a sequence id assigned by the application, others do not
    (PIP-6: all have one, or none)."""

    default_reason = "MIXED_SEQUENCE_IDS"


class MessageTooLargeError(InvalidRequestError):
    """A message exceeds the service's or the reader's limit."""

    default_reason = "ENTRY_TOO_LARGE"


class CorruptMessageError(DataLossError):
    """A message does not match its checksum or cannot be decoded."""

    default_reason = "CHECKSUM_MISMATCH"


class MessagesTrimmedError(DataLossError):
    """Messages were trimmed before the reader got to them. `details` has the first and the last
    position of the gap, `first` and `last`, as LEDGER:ENTRY."""

    default_reason = "MESSAGES_TRIMMED"


class ConsumerClosedError(SeqgateError):
    """The consumer is closed, or was never opened."""

    default_reason = "CONSUMER_CLOSED"


class StaleTokenError(SeqgateError):
    """The delivery is not this consumer's: another consumer received the message. Or no longer: it
    was acknowledged, refused or given back, timed out, was revoked, or its connection is gone.
    Nothing changed. Unless it is acknowledged, the message is redelivered."""

    default_reason = "STALE_TOKEN"


class ClientForkedError(SeqgateError, RuntimeError):
    """The client was made before this process was forked, and is the parent's."""

    default_reason = "CLIENT_FORKED"


BY_REASON: Final[Mapping[str, type[SeqgateError]]] = {
    "MALFORMED_REQUEST": InvalidRequestError,
    "INVALID_TOPIC_NAME": InvalidRequestError,
    "INVALID_PRODUCER_NAME": InvalidRequestError,
    "INVALID_SEQUENCE_ID": InvalidRequestError,
    "INVALID_PAGE": InvalidRequestError,
    "INVALID_CLAIM": InvalidRequestError,
    "INVALID_WRITER": InvalidRequestError,
    "INVALID_CONFIRMATION": InvalidRequestError,
    "INVALID_POLICY": InvalidRequestError,
    "INVALID_STATE": InvalidRequestError,
    "INVALID_PUBLICATION": InvalidRequestError,
    "INVALID_ENTRY": InvalidRequestError,
    "INVALID_RANGE": InvalidRequestError,
    "INVALID_CREATION_TIME": InvalidRequestError,
    "CONFLICT": ConflictError,
    "INVALID_CURSOR_NAME": InvalidRequestError,
    "INVALID_POSITION": InvalidRequestError,
    "INVALID_PROPERTY": InvalidRequestError,
    "INVALID_LEASE": InvalidRequestError,
    "INVALID_MANAGED_CURSOR": InvalidRequestError,
    "INVALID_KEY_RANGE": InvalidRequestError,
    "NOT_OPENED": InvalidRequestError,
    "INVALID_SUBSCRIPTION_NAME": InvalidRequestError,
    "INVALID_CONSUMER": InvalidRequestError,
    "INVALID_OPTIONS": InvalidRequestError,
    "INVALID_PERMITS": InvalidRequestError,
    "INVALID_REDRIVE": InvalidRequestError,
    "INVALID_MEND": InvalidRequestError,
    "INVALID_DISCARD": InvalidRequestError,
    "INVALID_START": InvalidRequestError,
    "INVALID_SETTLEMENT": InvalidRequestError,
    "CUMULATIVE_ACK_REFUSED": InvalidRequestError,
    "NOT_SUBSCRIBED": InvalidRequestError,
    "INVALID_EXPRESSION": InvalidRequestError,
    "INVALID_CHAIN": InvalidRequestError,
    "INVALID_BATCH": InvalidRequestError,
    "ENTRY_TOO_LARGE": MessageTooLargeError,
    "CHECKSUM_MISMATCH": InvalidRequestError,
    "TOPIC_NOT_FOUND": NotFoundError,
    "TOPIC_DELETED": NotFoundError,
    "PRODUCER_NOT_FOUND": NotFoundError,
    "CURSOR_NOT_FOUND": NotFoundError,
    "SUBSCRIPTION_NOT_FOUND": NotFoundError,
    "LETTER_NOT_FOUND": NotFoundError,
    "LETTER_NOT_REDRIVABLE": InUseError,
    "REDRIVE_NOT_FOUND": NotFoundError,
    "REDRIVE_RUNNING": InUseError,
    "LETTER_NOT_MENDABLE": InUseError,
    "LETTER_NOT_DISCARDABLE": InUseError,
    "KEY_NOT_HELD": NotFoundError,
    "PRODUCER_BUSY": InUseError,
    "TOPIC_IN_USE": InUseError,
    "CURSOR_EXISTS": InUseError,
    "ALREADY_MARK_DELETED": InUseError,
    "LEASE_HELD": InUseError,
    "RANGE_CONFLICT": InUseError,
    "SUBSCRIPTION_BUSY": InUseError,
    "NOT_OWNER": InUseError,
    "PRODUCER_TAKEN_OVER": FencedError,
    "FENCED": FencedError,
    "REVISION_CONFLICT": FencedError,
    "CURSORS_REFUSED": FencedError,
    "TOO_MANY_PRODUCERS": LimitExceededError,
    "TOO_MANY_STREAMS": LimitExceededError,
    "LEDGER_BUSY": LimitExceededError,
    "WINDOW_EXCEEDED": LimitExceededError,
    "RECEIPTS_UNREAD": LimitExceededError,
    "CURSOR_TOO_LARGE": LimitExceededError,
    "SNAPSHOT_TOO_LARGE": LimitExceededError,
    "NO_SLOTS_LEFT": LimitExceededError,
    "TOO_MANY_CONSUMERS": LimitExceededError,
    "TOO_MANY_RETURNS": LimitExceededError,
    "TOO_MANY_UNANSWERED": LimitExceededError,
    "TOO_MANY_FILTERS": LimitExceededError,
    "SERVICE_BUSY": LimitExceededError,
    "STORE_FULL": LimitExceededError,
    "STORE_UNAVAILABLE": UnavailableError,
    "DEDUP_UNAVAILABLE": UnavailableError,
    "STATE_UNAVAILABLE": UnavailableError,
    "CURSORS_UNAVAILABLE": UnavailableError,
    "LEDGER_UNAVAILABLE": UnavailableError,
    "FILTERS_UNAVAILABLE": UnavailableError,
    "DEAD_LETTER_REFUSED": UnavailableError,
    "SLOW_CONSUMER": UnavailableError,
    "SLOW_READER": UnavailableError,
    "RECOVERING": UnavailableError,
    "TOPIC_FAILED": UnavailableError,
    "SUBSCRIPTION_FAILED": UnavailableError,
    "DRAINING": UnavailableError,
    "GIVEN_UP": UnavailableError,
    "SILENT_STREAM": UnavailableError,
    "MISSING_CREDENTIALS": AuthenticationError,
    "INVALID_TOKEN": AuthenticationError,
    "TOKEN_EXPIRED": AuthenticationError,
    "TOKEN_NOT_YET_VALID": AuthenticationError,
    "WRONG_AUDIENCE": AuthenticationError,
    "WRONG_ISSUER": AuthenticationError,
    "PERMISSION_DENIED": PermissionDeniedError,
    "ENTRY_CORRUPT": DataLossError,
    "FILTERS_UNREADABLE": DataLossError,
    "CURSOR_CORRUPT": DataLossError,
    "INTERNAL": InternalError,
}

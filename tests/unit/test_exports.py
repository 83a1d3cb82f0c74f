"""The public names on which applications may rely."""

import importlib

import pytest

import seqgate.client
import seqgate.errors


def test_the_client_library_exports_these_names() -> None:
    assert sorted(seqgate.client.__all__) == [
        "Admin",
        "AfterDeadLetter",
        "AssemblyLimits",
        "Batching",
        "Breaker",
        "BreakerState",
        "ChunkMessageId",
        "Chunking",
        "Client",
        "Compression",
        "Consumer",
        "CursorInfo",
        "DeduplicationInfo",
        "DropReason",
        "Dropped",
        "EARLIEST",
        "Gap",
        "Incomplete",
        "LATEST",
        "Message",
        "MessageId",
        "Missed",
        "Outgoing",
        "Placement",
        "PolicyValues",
        "Producer",
        "Reader",
        "Reason",
        "Receipt",
        "Received",
        "RetryPolicy",
        "SendManyError",
        "Start",
        "SubscriptionInfo",
        "SubscriptionOptions",
        "SubscriptionType",
        "TLS",
        "Token",
        "TopicInfo",
        "Trimmed",
        "Verdict",
        "connect",
        "process_by_key",
    ]


def test_every_exported_name_exists_and_is_documented() -> None:
    for name in seqgate.client.__all__:
        exported = getattr(seqgate.client, name)
        if not isinstance(exported, str) and name != "Start":
            assert exported.__doc__, name


def test_the_exported_errors_can_be_caught() -> None:
    names = {name for name in vars(seqgate.errors) if name.endswith("Error")}
    assert names == {
        "AuthenticationError",
        "ConsumerClosedError",
        "CorruptMessageError",
        "DataLossError",
        "FencedError",
        "InUseError",
        "InternalError",
        "InvalidRequestError",
        "LimitExceededError",
        "MessageTooLargeError",
        "MessagesTrimmedError",
        "MixedSequenceIdsError",
        "NotFoundError",
        "PermissionDeniedError",
        "ProducerClosedError",
        "ProducerQueueFullError",
        "SendTimeoutError",
        "SeqgateError",
        "SequenceIdTrimmedError",
        "StaleSequenceIdError",
        "StaleTokenError",
        "UnavailableError",
    }


def test_services_are_imported_as_seqgate_services() -> None:
    """Otherwise a checkout's root would also provide `services`, and each module would exist
    twice."""
    with pytest.raises(ImportError, match=r"seqgate\.services"):
        importlib.import_module("services")

"""The public names on which applications may rely."""

import importlib
import inspect

import pytest

import seqgate.client
import seqgate.client.blocking
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
        "DeadLetter",
        "DeadLetterLife",
        "DeduplicationInfo",
        "Discard",
        "DropReason",
        "Dropped",
        "EARLIEST",
        "Estimated",
        "FailedDelivery",
        "Gap",
        "Incomplete",
        "LATEST",
        "LetterMend",
        "LetterOperation",
        "Mend",
        "Message",
        "MessageEvent",
        "MessageId",
        "MessageLife",
        "Missed",
        "OnConflict",
        "Outgoing",
        "Placement",
        "PolicyValues",
        "Producer",
        "Reader",
        "Reason",
        "Receipt",
        "Received",
        "Redrive",
        "RedriveEstimate",
        "RedriveInfo",
        "RetryPolicy",
        "SendManyError",
        "Start",
        "SubscriptionInfo",
        "SubscriptionLife",
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


def test_the_client_for_threads_exports_the_same_names() -> None:
    names = seqgate.client.blocking.__all__
    assert sorted(names) == ["Admin", "Client", "Consumer", "Producer", "Reader", "connect"]
    assert set(names) < set(seqgate.client.__all__)


@pytest.mark.parametrize("name", ["Admin", "Client", "Consumer", "Producer", "Reader"])
def test_the_client_for_threads_has_the_methods_and_arguments_of_the_asyncio_client(
    name: str,
) -> None:
    ours = getattr(seqgate.client.blocking, name)
    theirs = getattr(seqgate.client, name)
    for each in (each for each in vars(theirs) if not each.startswith("_")):
        member, blocking = getattr(theirs, each), getattr(ours, each)
        assert blocking.__doc__, each
        if callable(member):
            parameters = inspect.signature(member).parameters
            assert inspect.signature(blocking).parameters == parameters, each


def test_every_exported_name_exists_and_is_documented() -> None:
    for name in seqgate.client.__all__:
        exported = getattr(seqgate.client, name)
        if not isinstance(exported, str) and name != "Start":
            assert exported.__doc__, name


def test_the_exported_errors_can_be_caught() -> None:
    names = {name for name in vars(seqgate.errors) if name.endswith("Error")}
    assert names == {
        "AuthenticationError",
        "ClientForkedError",
        "ConflictError",
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
        "WrongServiceError",
    }


def test_services_are_imported_as_seqgate_services() -> None:
    """Otherwise a checkout's root would also provide `services`, and each module would exist
    twice."""
    with pytest.raises(ImportError, match=r"seqgate\.services"):
        importlib.import_module("services")

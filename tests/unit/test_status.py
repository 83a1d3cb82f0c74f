"""The error catalogue: every refusal of every service, and the client's error for it."""

import importlib
import pkgutil

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

import seqgate.services
from seqgate.client._status import error_of_status
from seqgate.errors import (
    BY_REASON,
    InternalError,
    InvalidRequestError,
    LimitExceededError,
    SeqgateError,
    UnavailableError,
)
from seqgate.services.errors import DomainError, Draining, InvalidTopicName, Kind
from seqgate.services.runtime.status import INTERNAL, status_of
from seqgate.status import DOMAIN, Refusal, code_of, decode, encode


def refusals() -> list[type[DomainError]]:
    """Every refusal defined by a service."""
    for module in pkgutil.walk_packages(seqgate.services.__path__, "seqgate.services."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    found: list[type[DomainError]] = []
    unseen = [DomainError]
    while unseen:
        for each in unseen.pop().__subclasses__():
            unseen.append(each)
            if each.__module__.startswith("seqgate.services."):  # tests define some of their own
                found.append(each)
    return sorted(found, key=lambda each: each.reason)


@pytest.mark.parametrize("refusal", refusals(), ids=lambda each: each.__module__ + each.__name__)
def test_every_refusal_is_known_to_the_client_and_documented(refusal: type[DomainError]) -> None:
    assert refusal.reason in BY_REASON
    assert refusal.reason == refusal.reason.upper()
    assert refusal.__doc__
    assert isinstance(refusal.kind, Kind)


def test_the_client_knows_exactly_the_reasons_of_the_services() -> None:
    assert set(BY_REASON) == {refusal.reason for refusal in refusals()} | {"INTERNAL"}


def test_one_reason_means_one_kind_everywhere() -> None:
    kinds: dict[str, set[Kind]] = {}
    for refusal in refusals():
        kinds.setdefault(refusal.reason, set()).add(refusal.kind)
    assert all(len(each) == 1 for each in kinds.values())


@pytest.mark.parametrize("refusal", refusals(), ids=lambda each: each.__module__ + each.__name__)
def test_a_refusal_is_decoded_unchanged(refusal: type[DomainError]) -> None:
    original = refusal("in words", retry_after_s=0.25, topic="a/b/c", flag=True, count=3)
    received = error_of_status(
        status_pb2.Status.FromString(status_of(original).SerializeToString())
    )
    assert type(received) is BY_REASON[refusal.reason]
    assert str(received) == "in words"
    assert received.reason == refusal.reason
    assert received.retry_after_s == 0.25
    assert received.details == {"topic": "a/b/c", "flag": "true", "count": "3"}


@pytest.mark.parametrize(
    "refusal",
    [
        Refusal(grpc.StatusCode.ABORTED, "fenced", "FENCED"),
        Refusal(grpc.StatusCode.UNAVAILABLE, "", "DRAINING", {"topic": "a/b/c"}, 0.000_001),
        Refusal(grpc.StatusCode.INVALID_ARGUMENT, "wrong", "INVALID_PAGE", {}, None, "page_size"),
    ],
)
def test_a_decoded_status_equals_the_refusal_it_was_encoded_from(refusal: Refusal) -> None:
    assert decode(encode(refusal)) == refusal


def test_a_code_that_grpc_does_not_have_decodes_to_unknown() -> None:
    assert decode(status_pb2.Status(code=99)).code is grpc.StatusCode.UNKNOWN


def test_a_refusal_names_the_field_at_fault() -> None:
    status = status_of(InvalidTopicName("not a topic", field="topic"))
    assert code_of(status) is grpc.StatusCode.INVALID_ARGUMENT
    details = {detail.TypeName(): detail for detail in status.details}
    bad = error_details_pb2.BadRequest()
    details["google.rpc.BadRequest"].Unpack(bad)
    assert [each.field for each in bad.field_violations] == ["topic"]
    info = error_details_pb2.ErrorInfo()
    details["google.rpc.ErrorInfo"].Unpack(info)
    assert (info.reason, info.domain) == ("INVALID_TOPIC_NAME", DOMAIN)
    assert "google.rpc.RetryInfo" not in details


def test_an_internal_error_reveals_no_internals() -> None:
    assert INTERNAL.message == "internal error"
    error = error_of_status(INTERNAL)
    assert isinstance(error, InternalError)
    assert (error.reason, error.details) == ("INTERNAL", {})


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, InvalidRequestError),
        (grpc.StatusCode.UNAVAILABLE, UnavailableError),
        (grpc.StatusCode.DEADLINE_EXCEEDED, UnavailableError),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, LimitExceededError),
        (grpc.StatusCode.INTERNAL, UnavailableError),  # gRPC's own: a broken stream
        (grpc.StatusCode.UNIMPLEMENTED, InternalError),
    ],
)
def test_a_status_without_a_reason_maps_by_its_code(
    code: grpc.StatusCode, kind: type[SeqgateError]
) -> None:
    error = error_of_status(status_pb2.Status(code=code.value[0], message="from a proxy"))
    assert type(error) is kind
    assert error.reason == ""


def test_draining_can_be_retried() -> None:
    error = error_of_status(status_of(Draining("going away", retry_after_s=1)))
    assert isinstance(error, UnavailableError)
    assert error.retry_after_s == 1

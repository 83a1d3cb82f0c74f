"""Every method of every service, a request for each, and the rights to call it.

The rights are repeated here on purpose: an accidental change differs from this table.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple

from google.protobuf.descriptor import Descriptor, MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from seqgate.api.cursor.v1 import cursor_pb2
from seqgate.api.dedup.v1 import dedup_pb2
from seqgate.api.dispatcher.v1 import dispatcher_pb2
from seqgate.api.filter.v1 import filter_pb2
from seqgate.api.internal.cursor.v1 import lease_pb2
from seqgate.api.internal.dedup.v1 import writer_pb2
from seqgate.api.ledger.v1 import ledger_pb2
from seqgate.services.cursor.rights import RIGHTS as CURSOR
from seqgate.services.dedup.rights import RIGHTS as DEDUP
from seqgate.services.dispatcher.rights import RIGHTS as DISPATCHER
from seqgate.services.filter.rights import RIGHTS as FILTER
from seqgate.services.ledger.rights import RIGHTS as LEDGER
from seqgate.services.runtime.rights import Right, Rights

TOPIC: Final = "acme/shop/orders"
SUBSCRIPTION: Final = "billing"

VERBS: Final = ("publish", "consume", "read", "administer", "keep")
ROLES: Final = ("ledger", "dedup", "dispatcher", "jobs")

TABLES: Final[Mapping[str, Rights]] = {
    "cursor": CURSOR,
    "dedup": DEDUP,
    "dispatcher": DISPATCHER,
    "filter": FILTER,
    "ledger": LEDGER,
}
"""The rights of each service's methods."""

PROTOS: Final[Mapping[str, tuple[Any, ...]]] = {
    "cursor": (cursor_pb2, lease_pb2),
    "dedup": (dedup_pb2, writer_pb2),
    "dispatcher": (dispatcher_pb2,),
    "filter": (filter_pb2,),
    "ledger": (ledger_pb2,),
}

_ALL: Final = " ".join(VERBS)

ALLOWED: Final[Mapping[str, Mapping[str, tuple[str, str]]]] = {
    # method: (verbs, any of which suffices; roles)
    "ledger": {
        "Publish": ("publish", "dispatcher"),
        "Read": ("read", "dispatcher jobs"),
        "ReadEntries": ("read", "dispatcher jobs"),
        "ReadColumns": ("read", "jobs"),
        "ListLedgers": ("read", "dispatcher jobs"),
        "ListTrimmedProducers": ("read", "jobs"),
        "CreateTopic": ("administer", ""),
        "GetTopic": (_ALL, "dispatcher jobs"),
        "ListTopics": ("read administer", "jobs"),
        "GetLastMessageId": ("read", "jobs"),
        "FindMessage": ("read publish", "jobs"),
        "FindPosition": ("read", "dispatcher"),
        "TrimTopic": ("administer", ""),
        "RenewTopic": ("administer", ""),
        "DeleteTopic": ("administer", ""),
    },
    "dedup": {
        "Admit": ("keep", "ledger"),
        "Confirm": ("keep", "ledger"),
        "Rollback": ("keep", "ledger"),
        "Exchange": ("keep", "ledger"),
        "KeepProducersAlive": ("keep", "ledger"),
        "GetProducer": ("publish read administer keep", "jobs"),
        "ListProducers": ("read administer keep", "jobs"),
        "GetTopicStatus": ("publish read administer keep", "jobs"),
        "TakeSnapshot": ("administer keep", "ledger jobs"),
        "LoadState": ("keep", "jobs"),
        "SetPolicy": ("administer", ""),
        "GetPolicy": ("read administer keep", ""),
        "ForgetTopic": ("keep", "ledger"),
        "Explain": ("publish read administer keep", ""),
    },
    "cursor": {
        "CreateCursor": ("keep", "dispatcher dedup"),
        "GetCursor": ("consume administer keep", "dispatcher dedup jobs"),
        "ListCursors": ("consume administer keep", "dispatcher ledger jobs"),
        "DeleteCursor": ("administer keep", "dispatcher dedup ledger"),
        "ResetCursor": ("administer keep", "dispatcher"),
        "MarkDelete": ("keep", "dedup"),
        "Acknowledge": ("keep", "dispatcher"),
        "ListAcknowledged": ("consume administer keep", "dispatcher"),
        "RecordAttempts": ("keep", "dispatcher"),
        "ListAttempts": ("consume administer keep", "dispatcher"),
        "UpdateCursorProperties": ("keep", "dispatcher dedup"),
        "AcquireLease": ("keep", "dispatcher"),
        "RenewLease": ("keep", "dispatcher"),
        "ReleaseLease": ("keep", "dispatcher"),
        "ImportManagedCursor": ("keep", ""),
        "ExportManagedCursor": ("consume administer keep", ""),
    },
    "dispatcher": {
        "Consume": ("consume", ""),
        "CreateSubscription": ("consume administer", ""),
        "GetSubscription": ("consume administer", ""),
        "ListSubscriptions": ("consume administer", ""),
        "DeleteSubscription": ("administer", ""),
        "ResetSubscription": ("consume administer", ""),
        "UpdateSubscriptionProperties": ("administer", ""),
        "ReleaseKey": ("consume administer", ""),
        "ListDeadLetters": ("consume administer", ""),
        "RedriveDeadLetters": ("consume administer", ""),
        "StartRedrive": ("consume administer", ""),
        "EstimateRedrive": ("consume administer", ""),
        "GetRedrive": ("consume administer", ""),
        "ListRedrives": ("consume administer", ""),
        "StopRedrive": ("consume administer", ""),
        "DiscardDeadLetters": ("consume administer", ""),
        "MendDeadLetter": ("", ""),  # no verb alone
        "ListLetterOperations": ("consume administer", ""),
        "GetDeadLetter": ("consume", ""),
        "SetFilters": ("administer", ""),
        "GetFilters": ("consume administer", ""),
        "AnalyzeBacklog": ("consume administer", ""),
        "Report": ("consume administer", ""),
        "Explain": ("consume administer", ""),
        "GetMessageHistory": ("consume administer", ""),
    },
    "filter": {
        "Evaluate": ("keep", "dispatcher"),
        "Compile": (_ALL, "dispatcher"),
        "Explain": (_ALL, ""),
    },
}


class Rpc(NamedTuple):
    """A method."""

    service: str
    descriptor: MethodDescriptor

    @property
    def name(self) -> str:
        return f"{self.service}.{self.descriptor.name}"

    @property
    def path(self) -> str:
        """Its path in gRPC."""
        return f"/{self.descriptor.containing_service.full_name}/{self.descriptor.name}"

    @property
    def right(self) -> Right:
        """The right to call it."""
        return TABLES[self.service][self.path]

    @property
    def verbs(self) -> frozenset[str]:
        """The verbs, any of which suffices."""
        return frozenset(ALLOWED[self.service][self.descriptor.name][0].split())

    @property
    def roles(self) -> frozenset[str]:
        """The roles that may call it for any topic."""
        return frozenset(ALLOWED[self.service][self.descriptor.name][1].split())

    def request(self, topic: str = TOPIC, subscription: str = SUBSCRIPTION) -> Any:
        """A request that names a topic and, where possible, a subscription."""
        return filled(self.descriptor.input_type, topic, subscription)


def rpcs() -> Iterator[Rpc]:
    """Every method of every service."""
    for name, protos in PROTOS.items():
        for service in services_of(protos):
            for method in service.methods:
                yield Rpc(name, method)


def services_of(protos: Iterable[Any]) -> Iterator[Any]:
    """The services that files define."""
    for proto in protos:
        yield from proto.DESCRIPTOR.services_by_name.values()


_NESTED: Final = ("open", "subscribe", "admit", "header", "set_chain", "chain")
"""Fields whose messages name the topic."""


def filled(kind: Descriptor, topic: str, subscription: str) -> Message:
    """A message of this type that names a topic and a subscription."""
    message: Any = GetMessageClass(kind)()
    for field in kind.fields:
        is_text = field.type == field.TYPE_STRING and not field.is_repeated
        if field.name == "topic" and is_text:
            message.topic = topic
        elif field.name in ("subscription", "cursor", "name") and is_text:
            setattr(message, field.name, subscription)
        elif field.name == "prefix":
            message.prefix = topic.rpartition("/")[0] + "/"
        elif field.name in _NESTED and field.message_type is not None:
            inside = filled(field.message_type, topic, subscription)
            getattr(message, field.name).CopyFrom(inside)
    return message  # type: ignore[no-any-return]

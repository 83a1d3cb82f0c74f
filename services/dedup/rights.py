"""The rights that each method of the dedup service needs.

Confirming and withdrawing messages is reserved for the log's keeper: the ledger service, a rebuild,
or an application with a log of its own (`keep`).
"""

from collections.abc import Sequence
from typing import Any, Final

from seqgate.api.dedup.v1 import dedup_pb2 as pb
from seqgate.api.internal.dedup.v1 import writer_pb2
from seqgate.services.runtime.access import Need, Role, Verb
from seqgate.services.runtime.rights import (
    Right,
    Rights,
    of_topic,
    roles,
    table,
    the_topic,
    topics_from,
)

PUBLISH, READ, ADMINISTER, KEEP = Verb.PUBLISH, Verb.READ, Verb.ADMINISTER, Verb.KEEP

SERVICE: Final = pb.DESCRIPTOR.services_by_name["DedupService"]
WRITER_SERVICE: Final = writer_pb2.DESCRIPTOR.services_by_name["DedupWriterService"]


def _exchange(request: Any) -> Sequence[Need]:
    which = request.WhichOneof("request")
    if which is None:
        return ()
    return [Need(frozenset({KEEP}), the_topic(getattr(request, which).topic))]


def _load_state(request: Any) -> Sequence[Need]:
    if not request.HasField("header"):
        return ()
    return [Need(frozenset({KEEP}), the_topic(request.header.topic))]


def _policy(*verbs: Verb) -> Any:
    wanted = frozenset(verbs)

    def needs(request: Any) -> Sequence[Need]:
        match request.WhichOneof("level"):
            case "topic":
                return [Need(wanted, the_topic(request.topic))]
            case "namespace":
                return [Need(wanted, topics_from(f"{request.namespace}/"))]
        return ()

    return needs


_OF_LOGS: Final = roles(Role.LEDGER)

RIGHTS: Final[Rights] = table(
    WRITER_SERVICE.full_name,
    {
        "Admit": Right(of_topic(KEEP), _OF_LOGS),
        "Confirm": Right(of_topic(KEEP), _OF_LOGS),
        "Rollback": Right(of_topic(KEEP), _OF_LOGS),
        "Exchange": Right(_exchange, _OF_LOGS),
        "KeepProducersAlive": Right(of_topic(KEEP), _OF_LOGS),
        "ForgetTopic": Right(of_topic(KEEP), _OF_LOGS),
        "LoadState": Right(_load_state, roles(Role.JOBS)),
    },
    WRITER_SERVICE.methods_by_name,
) | table(
    SERVICE.full_name,
    {
        "TakeSnapshot": Right(of_topic(KEEP, ADMINISTER), roles(Role.LEDGER, Role.JOBS)),
        "GetProducer": Right(of_topic(PUBLISH, READ, ADMINISTER, KEEP), roles(Role.JOBS)),
        "Explain": Right(of_topic(PUBLISH, READ, ADMINISTER, KEEP)),
        "ListProducers": Right(of_topic(READ, ADMINISTER, KEEP), roles(Role.JOBS)),
        "GetTopicStatus": Right(of_topic(PUBLISH, READ, ADMINISTER, KEEP), roles(Role.JOBS)),
        "SetPolicy": Right(_policy(ADMINISTER)),
        "GetPolicy": Right(_policy(READ, ADMINISTER, KEEP)),
    },
    SERVICE.methods_by_name,
)
"""By full method name."""

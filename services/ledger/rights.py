"""The rights that each method of the ledger service needs."""

from collections.abc import Sequence
from typing import Any, Final

from seqgate.api.ledger.v1 import ledger_pb2 as pb
from seqgate.services.runtime.access import SYSTEM_PRODUCER, Need, Role, Verb
from seqgate.services.runtime.rights import (
    ANY_VERB,
    Right,
    Rights,
    Shown,
    of_topic,
    of_topic_somehow,
    roles,
    table,
    the_topic,
    topics_from,
)

PUBLISH, READ, ADMINISTER = Verb.PUBLISH, Verb.READ, Verb.ADMINISTER

SERVICE: Final = pb.DESCRIPTOR.services_by_name["LedgerService"]


def _publish(request: Any) -> Sequence[Need]:
    if request.WhichOneof("request") != "open":
        return ()
    topic = the_topic(request.open.topic)
    if is_of_services(request.open.producer_name):
        return [Need(frozenset(), topic)]  # no verb grants it
    return [Need(frozenset({PUBLISH}), topic)]


def is_of_services(producer: str) -> bool:
    """Whether a producer's name is reserved for services: publishing under the name of a
    subscription's dead letters would make all later letters stale."""
    return producer.startswith(SYSTEM_PRODUCER)


def _list_topics(request: Any) -> Sequence[Need]:
    return [Need(frozenset({READ, ADMINISTER}), topics_from(request.prefix))]


def _of_listed(topic: Any) -> Sequence[Need]:
    return [Need(ANY_VERB, the_topic(topic.name), None)]


_READERS: Final = roles(Role.DISPATCHER, Role.JOBS)

RIGHTS: Final[Rights] = table(
    SERVICE.full_name,
    {
        # The dispatcher publishes dead letters; a consumer that names a dead letter topic must
        # itself have the right to publish there.
        "Publish": Right(_publish, roles(Role.DISPATCHER)),
        "Read": Right(of_topic(READ), _READERS),
        "ReadEntries": Right(of_topic(READ), _READERS),
        "ReadColumns": Right(of_topic(READ), roles(Role.JOBS)),
        "ListLedgers": Right(of_topic(READ), _READERS),
        "ListTrimmedProducers": Right(of_topic(READ), roles(Role.JOBS)),
        "GetLastMessageId": Right(of_topic(READ), roles(Role.JOBS)),
        "FindMessage": Right(of_topic(READ, PUBLISH), roles(Role.JOBS)),
        "FindPosition": Right(of_topic(READ), roles(Role.DISPATCHER)),
        # A caller with any right on a topic may see that it exists.
        "GetTopic": Right(of_topic_somehow(*ANY_VERB), _READERS),
        "ListTopics": Right(_list_topics, roles(Role.JOBS), Shown("topics", _of_listed)),
        "CreateTopic": Right(of_topic(ADMINISTER)),
        "TrimTopic": Right(of_topic(ADMINISTER)),
        "RenewTopic": Right(of_topic(ADMINISTER)),
        "DeleteTopic": Right(of_topic(ADMINISTER)),
    },
    SERVICE.methods_by_name,
)
"""By full method name."""

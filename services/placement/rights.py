"""What each method of placement needs."""

from typing import Any, Final

from seqgate.api.placement.v1 import placement_pb2 as pb
from services.runtime.access import Need, Role, Verb
from services.runtime.rights import (
    ANY_VERB,
    NOBODY,
    Right,
    Rights,
    Shown,
    always,
    of_topic,
    of_topic_somehow,
    roles,
    table,
    topics_from,
)

SERVICE: Final = pb.DESCRIPTOR.services_by_name["PlacementService"]


def _list(request: Any) -> list[Need]:
    return [Need(frozenset({Verb.READ, Verb.ADMINISTER}), topics_from(request.prefix))]


def rights_among(role: Role) -> Rights:
    """Of the instances of a service, who call one another in this role."""
    own = roles(role)
    return table(
        SERVICE.full_name,
        {
            "Locate": Right(of_topic_somehow(*ANY_VERB), own),
            "ListPlacements": Right(_list, own, Shown("placements", of_topic_somehow(*ANY_VERB))),
            "MoveTopic": Right(of_topic(Verb.ADMINISTER)),
            "Record": Right(always(NOBODY), own),
            "ReceiveTopic": Right(always(NOBODY), own),
        },
        SERVICE.methods_by_name,
    )

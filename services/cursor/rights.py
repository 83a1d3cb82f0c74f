"""The rights that each method of the cursor service needs.

Other services keep records in cursors' properties and act on them: a dispatcher publishes the
records that it finds there to the topics that they name, with its own rights. So only services may
write properties whose names belong to the system.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Final

from google.protobuf.message import DecodeError

from seqgate.api.cursor.v1 import cursor_pb2 as pb
from seqgate.api.cursor.v1 import managed_pb2
from seqgate.api.internal.cursor.v1 import lease_pb2
from seqgate.services.runtime.access import SYSTEM_CURSOR, Need, Part, Role, Verb
from seqgate.services.runtime.rights import (
    NOBODY,
    Right,
    Rights,
    Shown,
    of_cursor,
    of_listed,
    roles,
    table,
    the_topic,
    topics_from,
)

CONSUME, ADMINISTER, KEEP = Verb.CONSUME, Verb.ADMINISTER, Verb.KEEP

SERVICE: Final = pb.DESCRIPTOR.services_by_name["CursorService"]
LEASE_SERVICE: Final = lease_pb2.DESCRIPTOR.services_by_name["CursorLeaseService"]

SYSTEM_PROPERTIES: Final = (SYSTEM_CURSOR, "#seqgate.")
"""The prefixes of property names that belong to the system."""


def _list_cursors(request: Any) -> Sequence[Need]:
    topics = the_topic(request.topic) if request.topic else topics_from("")
    return [Need(frozenset({CONSUME, ADMINISTER, KEEP}), topics)]


def _kept(request: Any, properties: Iterable[str]) -> Sequence[Need]:
    own = Need(frozenset({KEEP}), the_topic(request.topic), Part(request.cursor))
    return [own, NOBODY] if any(map(_is_system, properties)) else [own]


def _is_system(name: str) -> bool:
    return name.startswith(SYSTEM_PROPERTIES)


def _create(request: Any) -> Sequence[Need]:
    return _kept(request, request.properties)


def _update_properties(request: Any) -> Sequence[Need]:
    return _kept(request, [*request.put, *request.remove])


def _import(request: Any) -> Sequence[Need]:
    info = managed_pb2.ManagedCursorInfo()
    try:
        info.ParseFromString(request.managed_cursor_info)
    except DecodeError:  # the call will be refused
        return _kept(request, ())
    return _kept(request, [each.name for each in info.cursor_properties])


_DISPATCHER: Final = roles(Role.DISPATCHER)

RIGHTS: Final[Rights] = table(
    SERVICE.full_name,
    {
        "CreateCursor": Right(_create, roles(Role.DISPATCHER, Role.DEDUP)),
        "GetCursor": Right(
            of_cursor(CONSUME, ADMINISTER, KEEP), roles(Role.DISPATCHER, Role.DEDUP, Role.JOBS)
        ),
        "ListCursors": Right(
            _list_cursors,
            roles(Role.DISPATCHER, Role.LEDGER, Role.JOBS),
            Shown("cursors", of_listed(CONSUME, ADMINISTER, KEEP)),
        ),
        "DeleteCursor": Right(
            of_cursor(ADMINISTER, KEEP), roles(Role.DISPATCHER, Role.DEDUP, Role.LEDGER)
        ),
        "ResetCursor": Right(of_cursor(ADMINISTER, KEEP), _DISPATCHER),
        "MarkDelete": Right(of_cursor(KEEP), roles(Role.DEDUP)),
        "Acknowledge": Right(of_cursor(KEEP), _DISPATCHER),
        "ListAcknowledged": Right(of_cursor(CONSUME, ADMINISTER, KEEP), _DISPATCHER),
        "UpdateCursorProperties": Right(_update_properties, roles(Role.DISPATCHER, Role.DEDUP)),
        "ImportManagedCursor": Right(_import),
        "ExportManagedCursor": Right(of_cursor(CONSUME, ADMINISTER, KEEP)),
    },
    SERVICE.methods_by_name,
) | table(
    LEASE_SERVICE.full_name,
    {
        "AcquireLease": Right(of_cursor(KEEP), _DISPATCHER),
        "RenewLease": Right(of_cursor(KEEP), _DISPATCHER),
        "ReleaseLease": Right(of_cursor(KEEP), _DISPATCHER),
        "RecordAttempts": Right(of_cursor(KEEP), _DISPATCHER),
        "ListAttempts": Right(of_cursor(CONSUME, ADMINISTER, KEEP), _DISPATCHER),
    },
    LEASE_SERVICE.methods_by_name,
)
"""By full method name."""

"""The rights that each method of the filter service needs. The service keeps no state, so a caller
with any right at all may try an expression."""

from collections.abc import Sequence
from typing import Any, Final

from seqgate.api.filter.v1 import filter_pb2 as pb
from seqgate.services.runtime.access import Need, Role, Verb
from seqgate.services.runtime.rights import SOMEBODY, Right, Rights, always, roles, table, the_topic

SERVICE: Final = pb.DESCRIPTOR.services_by_name["FilterService"]


def _evaluate(request: Any) -> Sequence[Need]:
    if request.WhichOneof("request") != "set_chain":
        return ()
    return [Need(frozenset({Verb.KEEP}), the_topic(request.set_chain.chain.topic))]


RIGHTS: Final[Rights] = table(
    SERVICE.full_name,
    {
        "Evaluate": Right(_evaluate, roles(Role.DISPATCHER)),
        "Compile": Right(always(SOMEBODY), roles(Role.DISPATCHER)),
        "Explain": Right(always(SOMEBODY)),
    },
    SERVICE.methods_by_name,
)
"""By the full names of the methods."""

"""Cursors as seen by services that store data in the cursor service."""

from collections.abc import Awaitable, Callable, Mapping
from typing import NamedTuple

from seqgate.services.errors import DomainError, Kind
from seqgate.types import Position


class CursorsUnavailable(DomainError):
    """The cursor service does not answer. Whether the request took effect is unknown."""

    kind = Kind.UNAVAILABLE
    reason = "CURSORS_UNAVAILABLE"


class CursorConflict(DomainError):
    """The cursor has another revision than the given one, is already past the position, or is gone.
    Stays inside the service."""

    kind = Kind.FENCED
    reason = "REVISION_CONFLICT"


IsGone = Callable[[], Awaitable[bool]]
"""Whether a topic is deleted, asked now."""


class Cursor(NamedTuple):
    """A cursor of a topic; `mark_delete_properties` are attached to its mark-delete position."""

    name: str
    mark_delete: Position | None
    mark_delete_properties: Mapping[str, str]
    properties: Mapping[str, str]
    revision: int

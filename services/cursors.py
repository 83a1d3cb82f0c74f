"""Cursors, as the services use them that keep something in the cursor service."""

from collections.abc import Mapping
from typing import NamedTuple

from seqgate.services.errors import DomainError, Kind
from seqgate.types import Position


class CursorsUnavailable(DomainError):
    """The cursor service does not answer; whether it did what it was asked is not known."""

    kind = Kind.UNAVAILABLE
    reason = "CURSORS_UNAVAILABLE"


class CursorConflict(DomainError):
    """The cursor has another revision than the one given, is past the position already, or is gone.
    Stays inside the service."""

    kind = Kind.FENCED
    reason = "REVISION_CONFLICT"


class Cursor(NamedTuple):
    """A cursor of a topic; `mark_delete_properties` are attached to its position."""

    name: str
    mark_delete: Position | None
    mark_delete_properties: Mapping[str, str]
    properties: Mapping[str, str]
    revision: int

"""Positions on the wire."""

from typing import overload

from seqgate.api.common.v1 import common_pb2
from seqgate.types import Position


@overload
def to_position(position: Position) -> common_pb2.Position: ...
@overload
def to_position(position: Position | None) -> common_pb2.Position | None: ...
def to_position(position: Position | None) -> common_pb2.Position | None:
    """A position on the wire; None leaves the field unset."""
    if position is None:
        return None
    return common_pb2.Position(ledger_id=position.ledger_id, entry_id=position.entry_id)


def of_position(message: common_pb2.Position) -> Position:
    """The position in a message from one of our services, which needs no validation."""
    return Position(message.ledger_id, message.entry_id)

"""HTTP/2 streams: two directions over one connection, each with flow control.

A direction has a window: the bytes that may be in transit or unread. A writer may exceed it by the
write buffer before its writes block. A message larger than the window passes once a reader waits
for it, since gRPC extends the window for a pending read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Final

from tests.simulation.ground.network import CLIENT, SERVER, Connection, Ordered

HEADER_BYTES: Final = 5
"""gRPC's prefix of each message."""

FRAME_BYTES: Final = 100
"""The approximate size of a frame without a message."""


class Way(Ordered):
    """One direction of a stream.

    Attributes:
        is_awaited: a receiver is waiting, with no message to read.
    """

    __slots__ = (
        "_connection",
        "_limit",
        "_pending",
        "_sent",
        "_waiting",
        "_way",
        "_written",
        "is_awaited",
        "receive",
    )

    def __init__(self, connection: Connection, way: int) -> None:
        super().__init__()
        self._connection = connection
        self._way = way
        self._limit = connection.network.window_bytes
        self._written = 0
        self._sent = 0
        self._pending: deque[tuple[int, bytes | None, Any]] = deque()
        self._waiting: tuple[int, Callable[[], object]] | None = None
        self.is_awaited = False
        self.receive: Callable[[bytes, int], object] = _nobody

    def frame(self, size: int, receive: Callable[..., object], *args: Any) -> None:
        """Send a frame other than a message, after all earlier messages."""
        if self._pending:
            self._pending.append((self._written, None, (size, receive, args)))
        else:
            self._connection.transmit(self._way, self, size, receive, *args)

    def message(self, message: bytes, written: Callable[[], object]) -> bool:
        """Send a message. Returns True if it fits; otherwise `written` is called once it does."""
        size = len(message) + HEADER_BYTES
        self._written += size
        self._pending.append((self._written, message, None))
        self._pump()
        ahead = self._written - self._connection.network.write_buffer_bytes
        if ahead <= self._limit:
            return True
        self._waiting = ahead, written
        return False

    def flushed(self, written: Callable[[], object]) -> bool:
        """True if everything was sent; otherwise `written` is called once it is."""
        if not self._pending:
            return True
        self._waiting = self._written, written
        return False

    def _pump(self) -> None:
        pending = self._pending
        while pending:
            end, message, frame = pending[0]
            if message is None:
                size, receive, args = frame
                self._connection.transmit(self._way, self, size, receive, *args)
            elif end <= self._limit or (self.is_awaited and self._sent == self._consumed()):
                self._limit = max(self._limit, end)
                self._sent = end
                self.is_awaited = False
                size = len(message) + HEADER_BYTES
                self._connection.transmit(self._way, self, size, self._arrived, message, end)
            else:
                break
            pending.popleft()
        if (
            self._waiting is not None
            and self._waiting[0] <= self._limit
            and not (pending and self._waiting[0] == self._written)
        ):
            (_, written), self._waiting = self._waiting, None
            written()

    def _arrived(self, message: bytes, end: int) -> None:
        self.receive(message, end)

    def _consumed(self) -> int:
        return self._limit - self._connection.network.window_bytes

    # ---- the receiving end

    def consumed(self, end: int) -> None:
        """A message was read: extend the window."""
        limit = end + self._connection.network.window_bytes
        if self._pending or self._waiting is not None:
            self._connection.transmit(1 - self._way, Ordered(), 13, self.room, limit)
        elif limit > self._limit:
            self._limit = limit

    def awaited(self) -> None:
        """A reader started to wait."""
        self.is_awaited = True
        if self._pending:
            self._connection.transmit(1 - self._way, Ordered(), 13, self.room, 0)

    def room(self, limit: int) -> None:
        """The writer received a window update."""
        self._limit = max(self._limit, limit)
        self._pump()

    def drop(self) -> None:
        """Discard unsent frames: the stream has ended."""
        self._pending.clear()
        self._waiting = None


def _nobody(message: bytes, end: int) -> None:
    """The receiver of a direction that has none yet."""


class Stream:
    """A call on a connection. Each end sets `receive` of its incoming direction.

    Attributes:
        up: from client to server. down: from server to client.
        call: the client's end; None for the copy of a request duplicated in transit.
        rpc: the server's end, once the request has arrived.
    """

    __slots__ = ("call", "connection", "down", "rpc", "up")

    def __init__(self, connection: Connection, call: Any) -> None:
        self.connection = connection
        self.call = call
        self.rpc: Any = None
        self.up = Way(connection, CLIENT)
        self.down = Way(connection, SERVER)

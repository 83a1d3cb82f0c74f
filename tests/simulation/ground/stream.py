"""What HTTP/2 is to a call: two ways on one connection, each with flow control.

A way has a window: so many bytes may be under way or wait to be read. A writer may be ahead of it
by the write buffer; then its writes wait. A message that is larger than the window gets through
when somebody waits for it, as gRPC makes room for what is being read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Final

from tests.simulation.ground.network import CLIENT, SERVER, Connection, Ordered

HEADER_BYTES: Final = 5
"""What gRPC puts before each message."""

FRAME_BYTES: Final = 100
"""About as long is a frame that has no message."""


class Way(Ordered):
    """One way of a stream.

    Attributes:
        is_awaited: whether the receiver waits for a message, and has none.
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
        """Send something that is no message, after the messages before."""
        if self._pending:
            self._pending.append((self._written, None, (size, receive, args)))
        else:
            self._connection.transmit(self._way, self, size, receive, *args)

    def message(self, message: bytes, written: Callable[[], object]) -> bool:
        """Send a message. True: it is written; otherwise `written` is called when it is."""
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
        """Whether everything has been sent; otherwise `written` is called then."""
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

    # ---- at the other end

    def consumed(self, end: int) -> None:
        """A message was read: there is room again."""
        limit = end + self._connection.network.window_bytes
        if self._pending or self._waiting is not None:
            self._connection.transmit(1 - self._way, Ordered(), 13, self.room, limit)
        elif limit > self._limit:
            self._limit = limit

    def awaited(self) -> None:
        """The receiver waits, and has nothing."""
        self.is_awaited = True
        if self._pending:
            self._connection.transmit(1 - self._way, Ordered(), 13, self.room, 0)

    def room(self, limit: int) -> None:
        """The writer hears of it."""
        self._limit = max(self._limit, limit)
        self._pump()

    def drop(self) -> None:
        """The stream is over: what was not sent will not be."""
        self._pending.clear()
        self._waiting = None


def _nobody(message: bytes, end: int) -> None:
    """Received by nobody."""


class Stream:
    """A call on a connection. Each end sets what its way in calls.

    Attributes:
        up: from the client. down: from the server.
        call: the client's end of it; None: nobody's, of a request that was repeated on the way.
        rpc: the server's end of it, once the request has arrived.
    """

    __slots__ = ("call", "connection", "down", "rpc", "up")

    def __init__(self, connection: Connection, call: Any) -> None:
        self.connection = connection
        self.call = call
        self.rpc: Any = None
        self.up = Way(connection, CLIENT)
        self.down = Way(connection, SERVER)

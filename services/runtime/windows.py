"""Fixed flow-control windows: a limit on the unread bytes of a stream.

gRPC's windows grow with the throughput of a connection: up to 16 MiB a stream were seen, held in
memory for each stream that is not being read, and in no budget. Fixed windows bound that: to one
window a stream, or one message if a reader waits for a larger one.

A stream transfers at most one window in a round trip: 256 MiB/s at a millisecond.
"""

from typing import Final

WINDOW_BYTES: Final = 256 * 1024
"""The most bytes that a peer may send on a stream before they are read."""

WINDOWS: Final = (
    ("grpc.http2.bdp_probe", 0),  # windows do not grow
    ("grpc.http2.lookahead_bytes", WINDOW_BYTES),
)
"""The options of servers and channels that set this."""

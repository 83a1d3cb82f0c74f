"""Fixed flow-control windows, which limit the unread bytes of a stream.

gRPC's windows grow with a connection's throughput, up to 16 MiB per stream as measured; that memory
is held for each stream that is not being read, outside any budget. Fixed windows bound it to one
window per stream, or one message if a reader waits for a larger one.

A stream transfers at most one window per round trip: 256 MiB/s at one millisecond.
"""

from typing import Final

WINDOW_BYTES: Final = 256 * 1024
"""The most unread bytes of a stream that a peer may send."""

WINDOWS: Final = (
    ("grpc.http2.bdp_probe", 0),  # keep windows from growing
    ("grpc.http2.lookahead_bytes", WINDOW_BYTES),
)
"""The options of servers and channels that fix the windows."""

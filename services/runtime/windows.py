"""How much of a stream is taken in before anybody reads it.

gRPC's windows grow with what a connection carries: to 16 MiB a stream were seen, which is held in
memory for each stream that is not being read, and counted by no budget. Windows of a fixed size
bound that: a window a stream, or one message if somebody waits for one that is larger.

A stream carries a window in each round trip at most: 256 MiB/s where one takes a millisecond.
"""

from typing import Final

WINDOW_BYTES: Final = 256 * 1024
"""What a peer may send on a stream, in bytes, before somebody reads it."""

WINDOWS: Final = (
    ("grpc.http2.bdp_probe", 0),  # windows do not grow
    ("grpc.http2.lookahead_bytes", WINDOW_BYTES),
)
"""The options of servers and channels that make it so."""

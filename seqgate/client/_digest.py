"""The digest of a message's content, by which the ledger tells whether a message that is sent again
is the stored one; entry.proto (EntryMetadata.content_digests) defines it."""

from collections.abc import Mapping
from typing import Final

from xxhash import xxh3_64_digest, xxh3_64_intdigest

TRACE_PROPERTIES: Final = frozenset({"traceparent", "tracestate", "baggage"})
"""They differ each time a message is sent."""


def content_digest(
    payload: bytes,
    key: str | bytes | None,
    ordering_key: bytes | None,
    event_time_ms: int | None,
    deliver_at_ms: int | None,
    properties: Mapping[str, str],
) -> bytes:
    """8 bytes. Leave out `deliver_at_ms` if the application gave a delay, which is another time
    whenever the message is sent."""
    seed = 0
    if key is not None:
        field = b"K" + key if isinstance(key, bytes) else ("k" + key).encode()
        seed = xxh3_64_intdigest(field)
    if ordering_key is not None:
        seed = xxh3_64_intdigest(b"o" + ordering_key, seed)
    if event_time_ms is not None:
        seed = xxh3_64_intdigest(b"e%d" % event_time_ms, seed)
    if deliver_at_ms is not None:
        seed = xxh3_64_intdigest(b"d%d" % deliver_at_ms, seed)
    if properties:
        for name in sorted(properties) if len(properties) > 1 else properties:
            if name not in TRACE_PROPERTIES:
                seed = xxh3_64_intdigest(("p" + name).encode(), seed)
                seed = xxh3_64_intdigest(("v" + properties[name]).encode(), seed)
    digest: bytes = xxh3_64_digest(payload, seed)
    return digest

"""The digest of a message's content, by which the ledger tells whether a message that is sent again
is the stored one; entry.proto (EntryMetadata.content_digests) defines it."""

from collections.abc import Mapping
from typing import Final

from xxhash import xxh3_64_digest as digest_of

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
    digest: bytes = digest_of(payload)
    fields = digest
    if key is not None:
        fields += (
            b"K" + digest_of(key) if isinstance(key, bytes) else b"k" + digest_of(key.encode())
        )
    if ordering_key is not None:
        fields += b"o" + digest_of(ordering_key)
    if event_time_ms is not None:
        fields += b"e" + digest_of(b"%d" % event_time_ms)
    if deliver_at_ms is not None:
        fields += b"d" + digest_of(b"%d" % deliver_at_ms)
    for name in sorted(properties) if properties else ():
        if name not in TRACE_PROPERTIES:
            fields += b"p" + digest_of(name.encode()) + b"v" + digest_of(properties[name].encode())
    if fields is digest:
        return digest
    whole: bytes = digest_of(fields, 1)
    return whole

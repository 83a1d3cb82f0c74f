"""The sticky key of an entry, by Pulsar's rule.

The dispatcher places keys at consumers, and clients keep their order: with one rule, both agree
which entries share a key.
"""

import re
from binascii import a2b_base64
from typing import Final

from seqgate.api.entry.v1.entry_pb2 import EntryMetadata

NO_KEY: Final = b"NONE_KEY"
"""The sticky key of an entry with neither a key nor a producer and sequence id."""

_BASE64: Final = re.compile(r"(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}(?:==)?|[A-Za-z0-9+/]{3}=?)?")


def sticky_key(metadata: EntryMetadata) -> bytes:
    """The ordering key, else the partition key, else a key of the entry's own. A key that is set
    counts even if it is empty. A partition key flagged as base64 that is not base64 counts as text.
    """
    if metadata.HasField("ordering_key"):
        return metadata.ordering_key
    if metadata.HasField("partition_key"):
        text = metadata.partition_key
        return _decoded(text) if metadata.partition_key_b64_encoded else text.encode()
    if metadata.HasField("producer_name") and metadata.HasField("sequence_id"):
        return f"{metadata.producer_name}-{metadata.sequence_id}".encode()
    return NO_KEY


def _decoded(text: str) -> bytes:
    # Java's decoder accepts no padding or full padding, rejects characters outside the alphabet,
    # and ignores leftover bits.
    if not _BASE64.fullmatch(text):
        return text.encode()
    digits = text.rstrip("=")
    return a2b_base64(digits + "=" * (-len(digits) % 4))

"""From an entry's metadata to the key under which a chain remembers its decision.

This is done for each entry, and costs more than all else when decisions are remembered. So each
chain has a function of its own that touches only what the chain reads.
"""

from collections.abc import Callable
from typing import Any, Final

from services.filter.core.chain import Chain, Key, ReadKey

Read = Callable[[Any], object]

_FIELDS: Final[dict[str, Read]] = {
    "key": lambda metadata: metadata.partition_key,
    "producer": lambda metadata: metadata.producer_name,
    "sequence_id": lambda metadata: metadata.sequence_id,
    "publish_time_ms": lambda metadata: metadata.publish_time,
    "num_messages": lambda metadata: metadata.num_messages_in_batch or 1,
}


def reader_of(chain: Chain) -> ReadKey:
    """Makes the keys of entries for a chain."""
    digest = chain.digest
    fields = [_FIELDS[name] for name in chain.fields]
    properties = _properties(chain)
    if not fields:

        def read_properties(metadata: Any) -> Key:
            return digest, properties(metadata)

        return read_properties

    def read(metadata: Any) -> Key:
        return (digest, properties(metadata), *[field(metadata) for field in fields])

    return read


def _properties(chain: Chain) -> Read:
    names = chain.names
    if not chain.reads_properties:
        return lambda _: ()
    if names is None:
        return _all_of
    if len(names) == 1:
        return _one(names[0])

    absent = (None,) * len(names)

    def named(metadata: Any) -> object:
        # By `get`: [name] would put an empty one there.
        found = tuple(map(metadata.properties.get, names))
        return _none_of(metadata, absent) if found == absent else found

    return named


def _one(name: str) -> Read:
    absent = (None,)

    def one(metadata: Any) -> object:
        found = metadata.properties.get(name)  # [name] would put an empty one there
        return _none_of(metadata, absent) if found is None else (found,)

    return one


def _all_of(metadata: Any) -> object:
    found = tuple(sorted(metadata.properties.items()))
    return found or _none_of(metadata, ())


def _none_of(metadata: Any, found: tuple[object, ...]) -> object:
    """What is known of properties none of which was found; of a batch without any, nothing."""
    is_batch = metadata.HasField("num_messages_in_batch")
    return None if is_batch and not metadata.properties else found

"""The part of an entry's metadata that filters read, which is the cache key of a verdict.

Entries with equal keys have equal verdicts. A key is computed for each entry, and costs more than
all else when verdicts are cached; so each set of variables gets functions that touch only the
fields it needs. The filter service and its client, the dispatcher, use the same functions.
"""

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any, Final

Read = Callable[[Any], object]

PROPERTIES: Final = "properties"

FIELDS: Final = {
    "key": "partition_key",
    "producer": "producer_name",
    "sequence_id": "sequence_id",
    "publish_time_ms": "publish_time",
    "num_messages": "num_messages_in_batch",
}
"""The variables that are fields of the metadata."""


def _messages_in(metadata: Any) -> int:
    return metadata.num_messages_in_batch or 1


def field_readers(variables: Iterable[str]) -> list[Read]:
    return [
        _messages_in if each == "num_messages" else attrgetter(FIELDS[each]) for each in variables
    ]


def properties_reader(names: Sequence[str] | None) -> Read:
    """Reads the properties with these names as a tuple of values, None for an absent one; without
    names, all properties, as pairs. Of a batch without properties it reads None: its messages may
    have some, but batches are never opened."""
    if names is None:

        def all_of(metadata: Any) -> object:
            return tuple(sorted(metadata.properties.items())) or _none_of(metadata, ())

        return all_of

    absent = (None,) * len(names)
    if len(names) == 1:
        (name,) = names

        def one(metadata: Any) -> object:
            value = metadata.properties.get(name)  # properties[name] would insert an empty value
            return _none_of(metadata, absent) if value is None else (value,)

        return one

    def some(metadata: Any) -> object:
        found = tuple(map(metadata.properties.get, names))
        return _none_of(metadata, absent) if found == absent else found

    return some


def _none_of(metadata: Any, found: tuple[object, ...]) -> object:
    is_batch = metadata.HasField("num_messages_in_batch")
    return None if is_batch and not metadata.properties else found

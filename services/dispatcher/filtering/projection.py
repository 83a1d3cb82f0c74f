"""What of an entry's metadata matters to rules, and nothing else: as a key under which a verdict is
remembered, and as the metadata that the filter service is asked about.

A key is made for each entry, and costs more than all else when verdicts are remembered. So rules
have a function of their own that touches only what they read.
"""

from collections.abc import Callable, Hashable
from typing import Any, Final

from seqgate.api.entry.v1.entry_pb2 import EntryMetadata
from services.dispatcher.ports import Reads

KeyOf = Callable[[EntryMetadata], Hashable]

_FIELDS: Final = {
    "key": "partition_key",
    "producer": "producer_name",
    "sequence_id": "sequence_id",
    "publish_time_ms": "publish_time",
    "num_messages": "num_messages_in_batch",
}
"""The variables that are fields of metadata."""

_EVER_NEW: Final = frozenset({"sequence_id", "publish_time_ms"})
"""Variables that hardly any two entries have in common."""


class Projection:
    """See the module.

    Attributes:
        reads: what rules read.
        key_of: an entry's key; entries with equal keys have the same verdict.
        recurs: whether keys are worth remembering.
    """

    def __init__(self, reads: Reads) -> None:
        self.reads = reads
        self.recurs = not reads.variables & _EVER_NEW
        self._fields = [_FIELDS[name] for name in sorted(reads.variables & _FIELDS.keys())]
        self._reads_properties = "properties" in reads.variables
        self._names = reads.properties
        self._other = _other_than(reads.properties or ())
        self.key_of = self._key_of()

    def metadata_of(self, metadata: EntryMetadata) -> EntryMetadata:
        """As much of it as decides."""
        found = EntryMetadata()
        for field in self._fields:
            if metadata.HasField(field):  # type: ignore[arg-type]
                setattr(found, field, getattr(metadata, field))
        if self._reads_properties:
            properties, kept = metadata.properties, found.properties
            for name in properties if self._names is None else self._names:
                value = properties.get(name)
                if value is not None:
                    kept[name] = value
            if metadata.HasField("num_messages_in_batch"):
                # A batch without any properties is another matter than one without these.
                found.num_messages_in_batch = metadata.num_messages_in_batch
                if properties and not kept:
                    kept[self._other] = ""
        return found

    def _key_of(self) -> KeyOf:
        properties_of = self._properties_of()
        fields = self._fields
        if not fields:
            return properties_of
        if not self._reads_properties:
            return lambda metadata: tuple(_value(metadata, field) for field in fields)
        return lambda metadata: (
            properties_of(metadata),
            *[_value(metadata, field) for field in fields],
        )

    def _properties_of(self) -> KeyOf:
        names = self._names
        if not self._reads_properties:
            return lambda _: ()
        if names is None:

            def all_of(metadata: EntryMetadata) -> Hashable:
                return tuple(sorted(metadata.properties.items())) or _none_of(metadata)

            return all_of

        if len(names) == 1:
            (name,) = names

            def one(metadata: EntryMetadata) -> Hashable:
                value = metadata.properties.get(name)  # [name] would put an empty one there
                return _none_of(metadata) if value is None else value

            return one

        absent = (None,) * len(names)

        def some(metadata: EntryMetadata) -> Hashable:
            found = tuple(map(metadata.properties.get, names))
            return _none_of(metadata) if found == absent else found

        return some


def _none_of(metadata: EntryMetadata) -> bool:
    """Of what is read there is nothing: whether nothing is known of it, either."""
    return metadata.HasField("num_messages_in_batch") and not metadata.properties


def _value(metadata: EntryMetadata, field: str) -> Any:
    return getattr(metadata, field)


def _other_than(names: tuple[str, ...]) -> str:
    """The name of a property that nobody looks up."""
    other = "-"
    while other in names:
        other += "-"
    return other

"""The part of an entry's metadata that rules read: as a key under which a verdict is cached, and as
the metadata that is sent to the filter service."""

from collections.abc import Callable, Hashable
from typing import Any, Final, cast

from seqgate.api.entry.v1.entry_pb2 import EntryMetadata
from seqgate.services.dispatcher.ports import Reads
from seqgate.services.runtime.projection import FIELDS, PROPERTIES, field_readers, properties_reader

KeyOf = Callable[[EntryMetadata], Hashable]

_EVER_NEW: Final = frozenset({"sequence_id", "publish_time_ms"})
"""Variables whose value hardly ever recurs."""


class Projection:
    """The metadata that rules read.

    Attributes:
        key_of: an entry's key; entries with equal keys have the same verdict.
        recurs: whether keys recur often enough to be cached.
    """

    def __init__(self, reads: Reads) -> None:
        self.reads = reads
        self.recurs = not reads.variables & _EVER_NEW
        self._variables = sorted(reads.variables & FIELDS.keys())
        self._reads_properties = PROPERTIES in reads.variables
        self._names = reads.properties
        self._other = _other_than(reads.properties or ())
        self.key_of = self._key_of()

    def metadata_of(self, metadata: EntryMetadata) -> EntryMetadata:
        """The part that the rules read."""
        found = EntryMetadata()
        for variable in self._variables:
            field: Any = FIELDS[variable]
            if metadata.HasField(field):
                setattr(found, field, getattr(metadata, field))
        if self._reads_properties:
            properties, kept = metadata.properties, found.properties
            for name in properties if self._names is None else self._names:
                value = properties.get(name)
                if value is not None:
                    kept[name] = value
            if metadata.HasField("num_messages_in_batch"):
                # A batch without properties is judged differently from one without these.
                found.num_messages_in_batch = metadata.num_messages_in_batch
                if properties and not kept:
                    kept[self._other] = ""
        return found

    def _key_of(self) -> KeyOf:
        properties = properties_reader(self._names)
        if not self._variables:
            return cast(KeyOf, properties) if self._reads_properties else lambda _: ()
        fields = field_readers(self._variables)
        if not self._reads_properties:
            return lambda metadata: tuple([field(metadata) for field in fields])
        return lambda metadata: (properties(metadata), *[field(metadata) for field in fields])


def _other_than(names: tuple[str, ...]) -> str:
    """The name of a property that no filter reads."""
    other = "-"
    while other in names:
        other += "-"
    return other

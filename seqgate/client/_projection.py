"""The properties of a batch that filters see.

A filter decides on an entry by its metadata, without opening the payload. The metadata of a single
message has all its properties. The metadata of a batch has its messages' projection: the properties
that the producer lists, with values that all messages of the batch share.

    listed: origin, carrier            {"carrier": "UA", "tail": "N1"}  ──▶  {"carrier": "UA"}
    listed: origin (EWR, JFK)          {"origin": "LGA", "tail": "N1"}  ──▶  {}

A projection omits properties that the message lacks, and values that are not listed; an empty value
is a value. The order of properties does not matter, nor do those not listed. (apache/pulsar#16680
and PIP-191, which were never merged.)
"""

from collections.abc import Iterable, Mapping
from typing import Final

from seqgate.client._arguments import invalid, texts
from seqgate.errors import InvalidRequestError

NAMES_MAX: Final = 64
"""The most names to list: half of the properties that an entry may have."""

NAME_BYTES_MAX: Final = 255
"""The longest name to list, in bytes of UTF-8."""

VALUES_MAX: Final = 1_000

PROJECTION_BYTES_MAX: Final = 32 * 1024
"""The most bytes of a projection: its names and values in UTF-8. An entry's metadata may have
128 KiB, of which the sequence ids of a batch take up to 80."""

Listed = tuple[str, ...] | Mapping[str, frozenset[str]]
"""Names with any values, or the values by name."""


def listed(given: Iterable[str] | Mapping[str, Iterable[str]]) -> Listed:
    """Check an application's list; duplicate names count once. Raises InvalidRequestError for too
    many names or values, or an invalid one."""
    values = dict(given) if isinstance(given, Mapping) else None
    names = texts("filter_properties", given if values is None else list(values))
    listed = tuple(dict.fromkeys(names))
    if len(listed) > NAMES_MAX:
        invalid(f"filter_properties must be up to {NAMES_MAX} names, or values by name")
    if not all(0 < _size_bytes(name) <= NAME_BYTES_MAX for name in listed):
        invalid(f"a filter property's name must be a text of 1 to {NAME_BYTES_MAX} bytes")
    if values is None:
        return listed
    return dict(zip(names, map(_values, values.values()), strict=True))


def _values(given: Iterable[str]) -> frozenset[str]:
    values = frozenset(texts("filter_properties: the values of each name", given))
    if not 1 <= len(values) <= VALUES_MAX:
        invalid(f"a filter property must list 1 to {VALUES_MAX:,} values")
    if not all(_size_bytes(value) <= PROJECTION_BYTES_MAX for value in values):
        invalid(
            f"a filter property's value must be a text of at most {PROJECTION_BYTES_MAX:,} bytes"
        )
    return values


def _size_bytes(text: str) -> int:
    return len(text.encode())


class Projection:
    def __init__(self, listed: Listed) -> None:
        self._names = tuple(listed)
        self._counting = listed if isinstance(listed, Mapping) else None
        # Cached from the previous message: most share its values, and so its projection.
        self._values: tuple[str | None, ...] = (None,) * len(self._names)
        self._shown: Mapping[str, str] = {}

    def of(self, properties: Mapping[str, str]) -> Mapping[str, str]:
        """A message's projection. Do not change it: messages share it. Raises InvalidRequestError
        if it exceeds PROJECTION_BYTES_MAX."""
        values = tuple(map(properties.get, self._names))
        if values != self._values:
            self._shown = self._look(values)
            self._values = values
        return self._shown

    def _look(self, values: tuple[str | None, ...]) -> Mapping[str, str]:
        named = zip(self._names, values, strict=True)
        shown = {
            name: value
            for name, value in named
            if value is not None and (self._counting is None or value in self._counting[name])
        }
        size_bytes = sum(_size_bytes(name) + _size_bytes(value) for name, value in shown.items())
        if size_bytes > PROJECTION_BYTES_MAX:
            raise InvalidRequestError(
                f"filter_properties of a message must have at most {PROJECTION_BYTES_MAX:,} bytes",
                reason="INVALID_ENTRY",
                details={"filter_properties_bytes": str(size_bytes)},
            )
        return shown

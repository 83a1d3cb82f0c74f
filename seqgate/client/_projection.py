"""Which properties of its messages does a batch show?

A filter decides about an entry without opening it: it sees what the entry's metadata says. There, a
message that is an entry by itself says all its properties. A batch says those that its producer
lists, and all its messages have them with the same values. That is their projection:

    listed: origin, carrier            {"carrier": "UA", "tail": "N1"}  ──▶  {"carrier": "UA"}
    listed: origin (EWR, JFK)          {"origin": "LGA", "tail": "N1"}  ──▶  {}

What a message lacks is absent from its projection, and so is a value that does not count; an empty
value is a value. The order of properties, and what is not listed, make no difference.
(apache/pulsar#16680 and PIP-191, which were never merged.)
"""

from collections.abc import Iterable, Mapping
from typing import Final

from seqgate.errors import InvalidRequestError

NAMES_MAX: Final = 64
"""How many names may be listed: half of the properties that an entry may have."""

NAME_BYTES_MAX: Final = 255
"""The longest name that may be listed, in bytes of UTF-8."""

VALUES_MAX: Final = 1_000
"""How many values of a name may be listed."""

PROJECTION_BYTES_MAX: Final = 32 * 1024
"""How large a projection is at most: its names and values, in bytes of UTF-8. An entry's metadata
may have 128 KiB, of which the sequence ids of a batch take up to 80."""

Listed = tuple[str, ...] | Mapping[str, frozenset[str]]
"""Names whose values all count, or the values that count, by name."""


def listed(given: Iterable[str] | Mapping[str, Iterable[str]]) -> Listed:
    """What an application lists, checked; a name that is given twice counts once.

    Raises:
        ValueError: there are too many names or values, or one cannot be one.
    """
    names = tuple(dict.fromkeys(given))
    if isinstance(given, str) or len(names) > NAMES_MAX:
        raise ValueError(f"filter_properties are up to {NAMES_MAX} names, or values by name")
    if not all(0 < _size_bytes(name) <= NAME_BYTES_MAX for name in names):
        raise ValueError(f"a filter property's name is a text of 1 to {NAME_BYTES_MAX} bytes")
    if not isinstance(given, Mapping):
        return names
    return {name: _values(given[name]) for name in names}


def _values(given: Iterable[str]) -> frozenset[str]:
    values = frozenset(given)
    if isinstance(given, str) or not 1 <= len(values) <= VALUES_MAX:
        raise ValueError(f"of a filter property 1 to {VALUES_MAX:,} values are listed")
    if not all(0 <= _size_bytes(value) <= PROJECTION_BYTES_MAX for value in values):
        raise ValueError(
            f"a filter property's value is a text of at most {PROJECTION_BYTES_MAX:,} bytes"
        )
    return values


def _size_bytes(text: object) -> int:
    """How long a text is in UTF-8; -1: it is none, or one that UTF-8 cannot write."""
    try:
        return len(text.encode()) if isinstance(text, str) else -1
    except UnicodeEncodeError:
        return -1


class Projection:
    """Projects the properties of one producer's messages, one message after the other."""

    def __init__(self, listed: Listed) -> None:
        self._names = tuple(listed)
        self._counting = listed if isinstance(listed, Mapping) else None
        # Of the message before: most have the same values, and are not looked at again.
        self._values: tuple[str | None, ...] = (None,) * len(self._names)
        self._shown: Mapping[str, str] = {}

    def of(self, properties: Mapping[str, str]) -> Mapping[str, str]:
        """What a message shows; not to be changed, since messages share it.

        Raises:
            InvalidRequestError: it is larger than PROJECTION_BYTES_MAX.
        """
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
                f"what filters see of a message has at most {PROJECTION_BYTES_MAX:,} bytes",
                reason="INVALID_ENTRY",
                details={"filter_properties_bytes": str(size_bytes)},
            )
        return shown

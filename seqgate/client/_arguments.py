"""Arguments of the client's public functions: parsed where they come in, before any effect.

Each function takes the argument's name and value, and returns a value of exactly the named type,
which the caller cannot change later. It raises InvalidRequestError, a ValueError, which names the
argument and the limit, for all else.

    a number     what has __index__, or is a real number; never a bool, a text, or NaN
    a text       a str that UTF-8 can encode; of a subclass, its characters
    bytes        bytes, a bytearray or a memoryview, copied
    properties   a Mapping of texts, copied
"""

import operator
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from datetime import datetime
from decimal import Decimal
from enum import Enum
from inspect import iscoroutinefunction
from math import inf, isfinite
from numbers import Real
from typing import Any, Final, NoReturn, TypeVar

from seqgate.errors import InvalidRequestError
from seqgate.message_id import ChunkMessageId, MessageId, topic_of
from seqgate.types import SEQUENCE_ID_MAX

COUNT_MAX: Final = 2**63 - 1
"""The largest number of messages or bytes, where nothing else limits it."""

TIMEOUT_MAX_S: Final = 100 * 365 * 24 * 3600
"""The longest time-out, in seconds: about a century. Threads cannot wait for three."""

UINT32_MAX: Final = 2**32 - 1

_INT32_MAX: Final = 2**31 - 1

_NUMBER: Final = "INVALID_SEQUENCE_ID"

E = TypeVar("E", bound=Enum)
T = TypeVar("T")


def invalid(text: str, reason: str = "") -> NoReturn:
    raise InvalidRequestError(text, reason=reason)


def whole(
    name: str, value: object, least: int, most: int = COUNT_MAX, unit: str = "", *, reason: str = ""
) -> int:
    """A whole number from `least` to `most`."""
    number = value if type(value) is int else _index(name, value, reason)
    if not least <= number <= most:
        invalid(f"{name} must be {_bounds(least, most)}{unit and f' {unit}'}", reason)
    return number


def _index(name: str, value: object, reason: str) -> int:
    if not isinstance(value, bool):
        with suppress(Exception):  # the value's own, too
            return operator.index(value)  # type: ignore[arg-type]
    invalid(f"{name} must be a whole number, not {_kind(value)}", reason)


def _bounds(least: int, most: int) -> str:
    return f"at least {least:,}" if most == COUNT_MAX else f"{_figure(least)} to {_figure(most)}"


def _figure(number: int) -> str:
    for left in (1, 2):
        bits = (number + left).bit_length() - 1
        if bits >= 31 and number + left == 1 << bits:
            return f"2^{bits} - {left}"
    return f"{number:,}"


def sequence_id(value: object) -> int:
    """A message's sequence id. The error carries an id that is out of its bounds."""
    number = value if type(value) is int else _index("sequence_id", value, _NUMBER)
    if not 0 <= number <= SEQUENCE_ID_MAX:
        wrong = InvalidRequestError(
            f"sequence_id must be 0 to {_figure(SEQUENCE_ID_MAX)}", reason=_NUMBER
        )
        raise wrong.of_message(number)
    return number


def real(
    name: str,
    value: object,
    least: float,
    most: float,
    unit: str = "seconds",
    *,
    above: bool = False,
    reason: str = "",
) -> float:
    """A finite number from `least` to `most`; with `above`, not `least` itself."""
    given = number(name, value, reason=reason)
    if not (isfinite(given) and least <= given <= most) or (above and given == least):
        from_ = f"above {least:,g}, up to" if above else f"{least:,g} to"
        invalid(f"{name} must be {from_} {most:,.12g}{unit and f' {unit}'}", reason)
    return given


def number(name: str, value: object, *, reason: str = "") -> float:
    """A number, perhaps infinite or NaN."""
    if type(value) is not bool and isinstance(value, Real | Decimal):
        with suppress(Exception):  # of a signalling NaN, or the value's own
            return _converted(value)
    invalid(f"{name} must be a number, not {_kind(value)}", reason)


def _converted(value: Real | Decimal) -> float:
    try:
        return float(value)
    except OverflowError:  # of an int or a Fraction
        return inf if value > 0 else -inf  # type: ignore[operator]


def timeout(name: str, value: object) -> float | None:
    """Seconds; None, as infinity: no limit."""
    if value is None or number(name, value) == inf:
        return None
    return real(name, value, 0, TIMEOUT_MAX_S)


def open_timeout(value: object) -> float:
    return real("open_timeout_s", value, 0, TIMEOUT_MAX_S, above=True)


def flag(name: str, value: object, *, reason: str = "") -> bool:
    if type(value) is not bool:
        invalid(f"{name} must be True or False, not {_kind(value)}", reason)
    return value


def member(name: str, value: object, kind: type[E], *, reason: str = "") -> E:
    if not isinstance(value, kind):
        invalid(f"{name} must be of {kind.__name__}, not {_kind(value)}", reason)
    return value


def choice(name: str, value: object, kind: type[E]) -> E:
    """A member, or its value as text."""
    for each in kind:
        if value is each or (isinstance(value, str) and value == each.value):
            return each
    texts = " or ".join(str(each.value) for each in kind)
    invalid(f"{name} must be {texts}, or of {kind.__name__}")


def instance(name: str, value: object, kind: type[T]) -> T:
    if not isinstance(value, kind):
        invalid(f"{name} must be of {kind.__name__}, not {_kind(value)}")
    return value


def instance_or_none(name: str, value: object, kind: type[T]) -> T | None:
    return None if value is None else instance(name, value, kind)


def text(name: str, value: object, *, least: int = 0, reason: str = "") -> str:
    """A text of `least` characters or more."""
    if not isinstance(value, str):
        invalid(f"{name} must be text, not {_kind(value)}", reason)
    exact = str.__str__(value)
    if not is_encodable(exact):
        invalid(f"{name} has a character without a form in UTF-8", reason)
    if len(exact) < least:
        invalid(f"{name} must not be empty", reason)
    return exact


def is_encodable(value: str) -> bool:
    """Whether UTF-8 can encode a str: one without lone surrogates."""
    if value.isascii():
        return True
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def binary(name: str, value: object, *, reason: str = "") -> bytes:
    if type(value) is bytes:
        return value
    if not isinstance(value, bytes | bytearray | memoryview):
        invalid(f"{name} must be bytes, a bytearray or a memoryview, not {_kind(value)}", reason)
    try:
        return memoryview(value).tobytes()
    except ValueError:
        invalid(f"{name} must be bytes, not a memoryview that was released", reason)


def key_of(name: str, value: object, *, reason: str = "") -> str | bytes:
    if type(value) is bytes or (type(value) is str and value.isascii()):
        return value
    if isinstance(value, str):
        exact = str.__str__(value)
        if not is_encodable(exact):
            invalid(f"{name} must be text or bytes: UTF-8 has no form of a character in it", reason)
        return exact
    if not isinstance(value, bytes | bytearray | memoryview):
        invalid(f"{name} must be text or bytes, not {_kind(value)}", reason)
    return binary(name, value, reason=reason)


def properties_of(
    name: str, value: object, most: int = COUNT_MAX, *, reason: str = ""
) -> dict[str, str]:
    """At most `most` texts by name; None: none."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        invalid(f"{name} must be a mapping of texts, not {_kind(value)}", reason)
    try:
        given = dict(value)
    except Exception as error:  # the mapping's own
        raise InvalidRequestError(f"{name} cannot be copied: {error!r}", reason=reason) from error
    if len(given) > most:
        invalid(f"{name} must be at most {most} texts by name", reason)
    for each, its in given.items():
        if not (type(each) is type(its) is str and each.isascii() and its.isascii()):
            return {
                text(f"{name}: each name", one, reason=reason): text(
                    f"{name}: the value of {one!r}", other, reason=reason
                )
                for one, other in given.items()
            }
    return given


def each_of(
    name: str, value: object, parse: Callable[[str, Any], T], *, reason: str = ""
) -> list[T]:
    place = f"each of {name}"
    return [parse(place, each) for each in listed(name, value, reason=reason)]


def listed(name: str, value: object, *, reason: str = "") -> list[Any]:
    """The elements of a list or another iterable that is no text, no bytes, and no mapping."""
    if isinstance(value, str | bytes | bytearray | memoryview | Mapping):
        invalid(f"{name} must be a list, not {_kind(value)}", reason)
    if not isinstance(value, Iterable):
        invalid(f"{name} must be a list, not {_kind(value)}", reason)
    return list(value)


def texts(name: str, value: object) -> list[str]:
    return each_of(name, value, text)


def moment(name: str, value: object, *, reason: str = "") -> datetime:
    if not isinstance(value, datetime):
        invalid(f"{name} must be a datetime, not {_kind(value)}", reason)
    return value


def message_id(name: str, value: object, *, least: int = -1, reason: str = "") -> MessageId:
    """A message's id. `least` is the least number of its ledger and its entry: 0 if the message
    must be stored, -1 if it may be before all that are."""
    if not isinstance(value, MessageId):
        invalid(f"{name} must be a MessageId, not {_kind(value)}", reason)
    if isinstance(value, ChunkMessageId):
        first = message_id(f"{name}: its first chunk", value.first_chunk, least=least)
        return ChunkMessageId(first, message_id(name, value.last_chunk, least=least))
    place = [
        whole(f"{name}: its {part}", number, least, SEQUENCE_ID_MAX, reason=reason)
        for part, number in (("ledger_id", value.ledger_id), ("entry_id", value.entry_id))
    ]
    rest = [
        whole(f"{name}: its {part}", getattr(value, part), -1, _INT32_MAX, reason=reason)
        for part in ("partition", "batch_index", "batch_size")
    ]
    return MessageId(*place, *rest, _topic=topic_of(value))


def callback(name: str, value: Any) -> Any:
    """A function that is called and not awaited; None: none is."""
    if value is None:
        return None
    if not callable(value):
        invalid(f"{name} must be a function, not {_kind(value)}")
    if iscoroutinefunction(value) or iscoroutinefunction(type(value).__call__):
        invalid(f"{name} must be a plain function: nothing would await a coroutine function")
    return value


def settle(options: object, **parsed: object) -> None:
    """Replace values of a frozen dataclass, in its `__post_init__`, by what they were parsed to."""
    for name, value in parsed.items():
        object.__setattr__(options, name, value)


def _kind(value: object) -> str:
    return "None" if value is None else type(value).__name__

"""Properties of letters that are JSON: who may publish to a dead letter topic may forge them.

What is read must have a form on the wire, or it would spoil a whole list of letters.
"""

from typing import Any, Final

FORGED: Final = (AttributeError, TypeError, ValueError, OverflowError, RecursionError)
"""What parsing a forged property may raise."""


def number_of(given: Any) -> int:
    """A part of a position. Raises FORGED if there is no such part."""
    number = int(given)
    if not 0 <= number < 2**64:
        raise ValueError("no part of a position")
    return number


def text_of(given: Any) -> str:
    """Raises FORGED for text without a form in UTF-8: JSON may escape half a surrogate pair."""
    text = str(given)
    text.encode()
    return text

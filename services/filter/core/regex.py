"""An upper bound of the size of a regular expression's program.

RE2's time is proportional to text times program, and counted repetitions expand a short pattern
into a large program. This module counts the expansion; RE2 itself checks the syntax.
"""

import re
from typing import Final

LETTER: Final = 1
CLASS: Final = 12
"""Of a class of characters beyond ASCII, whose UTF-8 has a few forms."""

UNICODE_CLASS: Final = 600
"""Of a class such as \\pL, which has hundreds of ranges."""

FOLDED: Final = 4
"""The most forms of a letter where case is ignored."""

_COUNTED: Final = re.compile(r"\{(\d+)(?:,(\d*))?\}")
_RANGE: Final = re.compile(r"[^\\\]\[]-[^\\\]\[]", re.DOTALL)
_FOLDS: Final = re.compile(r"\(\?[A-Za-z]*i")


def program_size(pattern: str) -> int:
    """An upper bound of a pattern's number of instructions. Raises ValueError for a quotation
    (\\Q), whose end is not searched."""
    sums = [0]  # of the groups that are open
    last = 0  # the operand of a repetition
    at = 0
    while at < len(pattern):
        counted = _COUNTED.match(pattern, at)
        character = pattern[at]
        if counted:
            low, high = counted.groups()
            times = max(1, int(low), int(high or 0))
            sums[-1] += last * (times - 1)
            last *= times
            at = counted.end()
            continue
        if character == "(":
            sums.append(2)
            last = 0
        elif character == ")" and len(sums) > 1:
            last = sums.pop()
            sums[-1] += last
        else:
            size, at = _atom(pattern, at)
            if character not in "*+?|":  # their expansion repeats without a count
                last = size
            sums[-1] += size
            continue
        at += 1
    return sum(sums) * (FOLDED if _FOLDS.search(pattern) else 1)


def _atom(pattern: str, at: int) -> tuple[int, int]:
    """The size of the atom at this position, and its end."""
    match pattern[at]:
        case "\\":
            escaped = pattern[at + 1 : at + 2]
            if escaped == "Q":
                raise ValueError("\\Q is not supported in regular expressions")
            if escaped in ("p", "P"):
                return UNICODE_CLASS, at + 2
            return CLASS if escaped in "wWdDsS" else LETTER, at + 2
        case "[":
            return _class(pattern, at)
        case ".":
            return CLASS, at + 1
        case _:
            return LETTER, at + 1


def _class(pattern: str, start: int) -> tuple[int, int]:
    """The size of a class, which is the sum over its ranges, and its end. Ranges of a negated class
    count as beyond ASCII."""
    at = start + 1
    each = LETTER
    if pattern[at : at + 1] == "^":
        each = CLASS
        at += 1
    size = each
    first = True
    while at < len(pattern) and (first or pattern[at] != "]"):
        first = False
        if pattern.startswith("[:", at) and (end := pattern.find(":]", at + 2)) >= 0:
            size += CLASS
            at = end + 2
        elif pattern[at] == "\\":
            size += UNICODE_CLASS if pattern[at + 1 : at + 2] in ("p", "P") else CLASS
            at += 2
        elif range_ := _RANGE.match(pattern, at):
            size += each if range_.group().isascii() else CLASS
            at = range_.end()
        else:
            size += each if pattern[at].isascii() else CLASS
            at += 1
    return size, at + 1

"""Patterns of names, as rules and settings have them: * matches any characters, ? matches one.

Where a name has parts, as a topic's has, the caller says whether * crosses them: it does if the
whole is matched, and does not if each part is.
"""


def matches(pattern: str, text: str) -> bool:
    """Whether a pattern matches the whole text. Takes at most as many steps as both lengths
    multiplied, whatever the pattern is."""
    at = place = 0
    star, after = -1, 0
    while place < len(text):
        if at < len(pattern) and pattern[at] == "*":
            star, after, at = at, place, at + 1
        elif at < len(pattern) and pattern[at] in ("?", text[place]):
            at, place = at + 1, place + 1
        elif star >= 0:
            after += 1
            at, place = star + 1, after
        else:
            return False
    return not pattern[at:].strip("*")

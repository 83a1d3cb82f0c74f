"""Patterns of names in rules and settings: * matches any characters, ? matches one.

To keep * within one part of a name, such as a topic's, match each part by itself.
"""


def matches(pattern: str, text: str) -> bool:
    """Whether a pattern matches all of a text, in at most len(pattern) * len(text) steps."""
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

"""Text of the code as Markdown."""

from collections.abc import Iterable, Sequence


def table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [titles, ["---"] * len(titles), *rows]
    return "".join(f"| {' | '.join(map(cell, each))} |\n" for each in lines)


def cell(text: str) -> str:
    """Text in one line of a table."""
    return " ".join(text.replace("|", "\\|").split())


def escaped(text: str) -> str:
    """Plain text: nothing in it is markup, except code in backticks."""
    parts = text.split("`")
    for index in range(0, len(parts), 2):
        for mark in ("\\", "<", "*", "_", "["):
            parts[index] = parts[index].replace(mark, "\\" + mark)
    return "`".join(parts)

"""One scrape of several workers: each worker's series, with its number as the label `worker`."""

from collections.abc import Iterator, Mapping
from typing import Final

LABEL: Final = "worker"


def merged(texts: Mapping[int, str]) -> str:
    """The workers' answers to a scrape, by their numbers, as one in Prometheus' text format: a
    metric's HELP and TYPE once, then its series of all workers."""
    families: dict[str, list[str]] = {}
    for number, text in texts.items():
        described = set(families)
        for family, line in _lines(text):
            found = families.setdefault(family, [])
            if not line.startswith("#"):
                found.append(_labelled(line, number))
            elif family not in described:
                found.append(line)
    return "".join(f"{line}\n" for lines in families.values() for line in lines)


def _lines(text: str) -> Iterator[tuple[str, str]]:
    """Each line with the name of its family: a HELP begins one."""
    family = ""
    for line in text.split("\n"):
        if line.startswith("# HELP "):
            family = line.split(" ", 3)[2]
        if line:
            yield family, line


def _labelled(series: str, number: int) -> str:
    name, brace, rest = series.partition("{")
    if not brace or " " in name:  # a value follows the name
        name, _, rest = series.partition(" ")
        return f'{name}{{{LABEL}="{number}"}} {rest}'
    comma = "" if rest.startswith("}") else ","
    return f'{name}{{{LABEL}="{number}"{comma}{rest}'

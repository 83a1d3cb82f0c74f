"""The pages of the reference, each written by walking the code: nothing is listed by hand."""

from collections.abc import Callable, Mapping
from typing import Final

from tools.site.reference import command_line, metrics, protos, python, settings

REFERENCE: Final[Mapping[str, Callable[[], str]]] = {
    "python": python.page,
    "cli": command_line.page,
    "settings": settings.page,
    "protos": protos.page,
    "metrics": metrics.page,
}

"""What pip installs for an extra of Seqgate.

Seqgate comes from a checkout or a wheel, and no package index need have it. So a message names the
packages that an extra stands for, which indexes have, instead of the extra.
"""

import re
import shlex
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version
from typing import Final

PROJECT: Final = "seqgate"

REQUIRED: Final = re.compile(
    r"(?P<name>[\w.-]+)(?:\[(?P<extras>[\w,-]+)\])?[^;]*; .*\bextra == [\"'](?P<extra>\w+)[\"']$"
)
"""A package that an extra needs, as the metadata of a distribution has it."""


def pip_install(extra: str) -> str:
    """The command that installs what an extra lacks; all of its packages, if it lacks none. Where
    Seqgate runs without having been installed, it is the command for a checkout."""
    try:
        every = list(dict.fromkeys(_packages(extra)))
    except PackageNotFoundError:
        return shlex.join(["pip", "install", f".[{extra}]"])
    lacking = [each for each in every if not _is_installed(each)]
    return shlex.join(["pip", "install", *(lacking or every)])


def _packages(extra: str) -> Iterator[str]:
    """The packages of an extra and of those that it includes: `rich<16,>=15`."""
    for line in requires(PROJECT) or ():
        found = REQUIRED.fullmatch(line)
        if found is None or found["extra"] != extra:
            continue
        if found["name"] == PROJECT:
            for each in found["extras"].split(","):
                yield from _packages(each)
        else:
            yield line.partition(";")[0]


def _is_installed(package: str) -> bool:
    name = re.split(r"[^\w.-]", package)[0]
    try:
        version(name)
    except PackageNotFoundError:
        return False
    return True

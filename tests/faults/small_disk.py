"""How this user can mount a small disk that only one process tree sees."""

import subprocess
from collections.abc import Sequence
from functools import cache
from typing import Final

_WAYS: Final = (("--user", "--map-root-user"), ())
"""In a user namespace; or root, where there is none."""


@cache
def way_to_mount() -> Sequence[str] | None:
    """The options of `unshare`; None: this user cannot."""
    for way in _WAYS:
        command = ["unshare", *way, "--mount", "--", "true"]
        try:
            if not subprocess.run(command, capture_output=True, check=False).returncode:
                return way
        except FileNotFoundError:
            return None
    return None

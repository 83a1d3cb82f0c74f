"""The command line `seqgate`. It needs the extra `cli`.

_main.py registers the commands; each group has a module. _command.py turns an async function into a
command: it adds the shared options, parses the arguments (_arguments.py), resolves the settings
(_settings.py) and maps errors to exit codes (_failure.py). A command sends requests to services
(_service.py), turns responses into records (_wire.py), and prints these as tables for people or as
JSON for programs (_output.py).
"""

import sys

from seqgate.cli._failure import WRONG
from seqgate.extras import pip_install

__all__ = ["main"]


def main() -> int:
    try:
        from seqgate.cli._main import main as run
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("rich", "typer"):
            raise
        sys.stderr.write(f"seqgate needs the packages of an extra: {pip_install('cli')}\n")
        return WRONG
    return run()

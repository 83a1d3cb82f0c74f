"""The command line `seqgate`. It needs the extra `cli`: pip install 'seqgate[cli]'.

_command.py turns a coroutine into a command: it adds the options that every command takes, before
it and after it, settles where the services are (_settings.py), and turns what went wrong into an
exit code (_failure.py). The commands themselves are in _topic.py, _publish.py, _read.py, _dedup.py,
_cursor.py, _subscription.py, _consume.py and _context.py; _output.py writes what they found, as
tables for people or as JSON for programs.
"""

import sys

from seqgate.cli._failure import WRONG

__all__ = ["main"]


def main() -> int:
    """Run the command line. Returns the exit code."""
    try:
        from seqgate.cli._main import main as run
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("rich", "typer"):
            raise
        sys.stderr.write("seqgate needs the packages of an extra: pip install 'seqgate[cli]'\n")
        return WRONG
    return run()

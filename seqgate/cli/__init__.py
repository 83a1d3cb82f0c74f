"""The command line `seqgate`.

_command.py turns a coroutine into a command: it adds the options that every command takes, before
it and after it, settles where the services are (_settings.py), and turns what went wrong into an
exit code (_failure.py). The commands themselves are in _topic.py, _publish.py, _read.py, _dedup.py,
_cursor.py, _subscription.py, _consume.py and _context.py; _output.py writes what they found, as
tables for people or as JSON for programs.
"""

from seqgate.cli._main import main

__all__ = ["main"]

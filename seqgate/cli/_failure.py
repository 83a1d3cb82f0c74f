"""Errors of the command line, and exit codes.

  0   done
  1   a service refused, or a message was not stored
  2   the command line, its settings or its input is wrong
  3   a service does not answer, or not in time: trying again may help
130   interrupted
"""

import re
from typing import Final

from seqgate.errors import SendTimeoutError, SeqgateError, UnavailableError

DONE: Final = 0
REFUSED: Final = 1
WRONG: Final = 2
UNAVAILABLE: Final = 3
INTERRUPTED: Final = 130


class WrongUsage(SeqgateError):
    """The command's arguments are invalid."""

    default_reason = "WRONG_USAGE"


class InvalidSettings(WrongUsage):
    """An address, a context or the config file is invalid."""

    default_reason = "INVALID_SETTINGS"


class InvalidInput(WrongUsage):
    """The messages to publish cannot be read."""

    default_reason = "INVALID_INPUT"


class OutputFailed(SeqgateError):
    """The command's output cannot be written."""

    default_reason = "OUTPUT_FAILED"


def exit_code(error: SeqgateError) -> int:
    """The exit code of a command that ended with this error."""
    match error:
        case WrongUsage():
            return WRONG
        case UnavailableError() | SendTimeoutError():
            return UNAVAILABLE
        case _:
            return REFUSED


def reason_of(error: SeqgateError) -> str:
    """Its reason; where no service gave one, the name of its kind."""
    kind = type(error).__name__.removesuffix("Error")
    return error.reason or re.sub(r"(?<=[a-z])(?=[A-Z])", "_", kind).upper()

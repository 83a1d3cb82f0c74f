"""Errors of the command line, and exit codes.

  0   success
  1   a service refused the request, a message was not stored, or what the command waits for did not
      come within --timeout
  2   the command line, its settings or its input is invalid
  3   a service is unreachable, or timed out: a retry may help
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


class WaitTimedOut(SeqgateError):
    """What the command waits for did not happen within --timeout seconds."""

    default_reason = "WAIT_TIMED_OUT"


def exit_code(error: SeqgateError) -> int:
    match error:
        case WrongUsage():
            return WRONG
        case UnavailableError() | SendTimeoutError():
            return UNAVAILABLE
        case _:
            return REFUSED


def reason_of(error: SeqgateError) -> str:
    """The error's reason, or else its class name in the same form."""
    kind = type(error).__name__.removesuffix("Error")
    return error.reason or re.sub(r"(?<=[a-z])(?=[A-Z])", "_", kind).upper()

"""Names as people give them on a command line."""

from typing import Annotated

import typer

from seqgate.cli._failure import WrongUsage
from seqgate.types import InvalidNameError, check_cursor_name

Name = Annotated[str, typer.Argument(metavar="NAME", help="The subscription.", show_default=False)]
"""The subscription that a command is about."""


def subscription_name(name: str) -> str:
    """The name itself, if it can be one of a subscription.

    Raises:
        WrongUsage: it cannot.
    """
    try:
        return check_cursor_name(name)
    except InvalidNameError as error:
        raise WrongUsage(
            f"subscription {error}",
            reason="INVALID_SUBSCRIPTION_NAME",
        ) from error

"""Registers the commands, and runs the process."""

import inspect
import logging
import sys
from collections.abc import Sequence
from typing import Final

import typer

from seqgate.cli._admin import app as admin
from seqgate.cli._bench import bench
from seqgate.cli._command import command, group
from seqgate.cli._consume import consume
from seqgate.cli._context import app as context
from seqgate.cli._cursor import app as cursor
from seqgate.cli._dead_letter import app as dead_letter
from seqgate.cli._declared import flag
from seqgate.cli._dedup import app as dedup
from seqgate.cli._failure import INTERRUPTED, WrongUsage, exit_code
from seqgate.cli._filter import app as filter_
from seqgate.cli._jobs import audit, dev, diff, rebuild
from seqgate.cli._life import app as message
from seqgate.cli._output import Format, Output
from seqgate.cli._publish import publish
from seqgate.cli._read import read
from seqgate.cli._redrive import app as redrive
from seqgate.cli._subscription import app as subscription
from seqgate.cli._top import top
from seqgate.cli._topic import app as topic


def _version(given: bool) -> None:  # noqa: FBT001 - typer calls it
    if given:
        from importlib import metadata  # slow to import, and seldom needed

        sys.stdout.write(f"seqgate {metadata.version('seqgate')}\n")
        raise typer.Exit


VERSION: Final = inspect.Parameter(
    "version",
    inspect.Parameter.KEYWORD_ONLY,
    default=flag("Show the version and exit.", callback=_version, is_eager=True),
    annotation=bool,
)

app = group(
    "Publish and consume messages exactly once, and inspect topics and deduplication.",
    VERSION,
    is_root=True,
)
command(dedup, "rebuild")(rebuild)
command(dedup, "diff")(diff)
command(topic, "audit")(audit)
app.add_typer(topic, name="topic")
app.add_typer(dedup, name="dedup")
app.add_typer(cursor, name="cursor")
app.add_typer(subscription, name="subscription")
app.add_typer(dead_letter, name="dead-letter")
app.add_typer(redrive, name="redrive")
app.add_typer(message, name="message")
app.add_typer(filter_, name="filter")
app.add_typer(context, name="context")
app.add_typer(admin, name="admin")
command(app, "dev")(dev)
command(app, "publish")(publish)
command(app, "read")(read)
command(app, "consume")(consume)
command(app, "top")(top)
command(app, "bench")(bench)


def main() -> int:
    arguments = sys.argv[1:]
    # Standard error is for the command's own lines, which programs read.
    logging.getLogger("seqgate").addHandler(logging.NullHandler())
    try:
        return int(app(arguments, prog_name="seqgate", standalone_mode=False) or 0)
    except typer.TyperException as error:
        usage = WrongUsage(error.format_message(), details=_help_of(error))
        Output(_asked(arguments)).error(usage)
        return exit_code(usage)
    except WrongUsage as usage:
        Output(_asked(arguments)).error(usage)
        return exit_code(usage)
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED


def _help_of(error: typer.TyperException) -> dict[str, str]:
    context = getattr(error, "ctx", None)
    return {} if context is None else {"help": f"{context.command_path} --help"}


def _asked(arguments: Sequence[str]) -> Format:
    """The output format that an invalid command line requests."""
    form = Format.TABLE
    for argument, following in zip(arguments, [*arguments[1:], ""], strict=True):
        value = ""
        if argument in ("-o", "--output"):
            value = following
        elif argument.startswith(("-o", "--output=")):
            value = argument.removeprefix("--output=").removeprefix("-o")
        if value in list(Format):
            form = Format(value)
    return form

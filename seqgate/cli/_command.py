"""A coroutine as a command.

A command is a function that is given a Run, and then its own arguments, and returns what to await;
what that returns is the exit code. The options that every command takes are the fields of Given:
they may stand before the command, after its group, or after the command, where the last one wins.
"""

import asyncio
import inspect
import os
import sys
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, fields
from typing import Annotated, Any, TypeVar

import typer
from opentelemetry.trace import Span

from seqgate.cli._failure import (
    DONE,
    INTERRUPTED,
    WRONG,
    InvalidSettings,
    WrongUsage,
    exit_code,
    reason_of,
)
from seqgate.cli._output import Format, Output, OutputClosed
from seqgate.cli._settings import FILES, Settings, resolve
from seqgate.errors import SeqgateError
from seqgate.telemetry import TelemetrySettingError, names, spans, tracing
from seqgate.types import InvalidNameError, TopicName

Topic = Annotated[str, typer.Argument(metavar="TOPIC", help="The topic.", show_default=False)]
"""The topic that a command is about."""

Command = TypeVar("Command", bound=Callable[..., Coroutine[Any, Any, int]])


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """The options that every command takes; None: not given."""

    output: Annotated[
        Format | None,
        typer.Option("--output", "-o", help="Print tables, or JSON with one object per line."),
    ] = None
    context: Annotated[
        str | None,
        typer.Option("--context", metavar="NAME", help="The context of the config file to use."),
    ] = None
    ledger: Annotated[
        str | None,
        typer.Option("--ledger", metavar="HOST:PORT", help="Address of the ledger service."),
    ] = None
    dedup: Annotated[
        str | None,
        typer.Option("--dedup", metavar="HOST:PORT", help="Address of the dedup service."),
    ] = None
    cursor: Annotated[
        str | None,
        typer.Option("--cursor", metavar="HOST:PORT", help="Address of the cursor service."),
    ] = None
    dispatcher: Annotated[
        str | None,
        typer.Option("--dispatcher", metavar="HOST:PORT", help="Address of a dispatcher instance."),
    ] = None
    filter: Annotated[
        str | None,
        typer.Option("--filter", metavar="HOST:PORT", help="Address of the filter service."),
    ] = None
    ca_file: Annotated[
        str | None,
        typer.Option(
            "--ca-file",
            metavar="FILE",
            help="Connect over TLS and trust these certificate authorities (PEM).",
        ),
    ] = None
    certificate_file: Annotated[
        str | None,
        typer.Option("--certificate-file", metavar="FILE", help="Client certificate (PEM)."),
    ] = None
    key_file: Annotated[
        str | None,
        typer.Option(
            "--key-file", metavar="FILE", help="Key of the client certificate (PEM, no passphrase)."
        ),
    ] = None
    token_file: Annotated[
        str | None,
        typer.Option("--token-file", metavar="FILE", help="File with the bearer token to send."),
    ] = None
    timeout: Annotated[
        float | None,
        typer.Option("--timeout", metavar="SECONDS", help="Timeout of each call to a service."),
    ] = None

    def over(self, earlier: "Given | None") -> "Given":
        """Both, where this one wins."""
        before = {} if earlier is None else asdict(earlier)
        now = {name: value for name, value in asdict(self).items() if value is not None}
        return Given(**(before | now))


@dataclass(frozen=True, slots=True)
class Run:
    """What a command works with."""

    settings: Settings
    output: Output


def topic_name(text: str) -> TopicName:
    """A topic as people write it.

    Raises:
        WrongUsage: it cannot be one.
    """
    try:
        return TopicName.expand(text)
    except InvalidNameError as error:
        raise WrongUsage(
            str(error), reason="INVALID_TOPIC_NAME", details={"topic": text}
        ) from error


def option_properties(option: str, given: Sequence[str] | None) -> dict[str, str]:
    """What an option sets that is given as NAME=VALUE, and may be given several times.

    Raises:
        WrongUsage: it is not.
    """
    properties = {}
    for each in given or ():
        name, equals, value = each.partition("=")
        if not equals or not name:
            raise WrongUsage(f"{option} must be NAME=VALUE", details={"given": each})
        properties[name] = value
    return properties


def group(text: str, *own: inspect.Parameter) -> typer.Typer:
    """Commands that belong together. `own` are options of the group's own; their callbacks act."""
    app = typer.Typer(
        help=text,
        rich_markup_mode=None,
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["--help", "-h"]},
    )

    def remember(parsed: typer.Context, **given: Any) -> None:
        parsed.obj = _take(given).over(parsed.obj)
        if parsed.invoked_subcommand is None:
            sys.stderr.write(f"{parsed.get_help()}\n")
            raise typer.Exit(WRONG)

    _set_signature(remember, [*own, *_shared()])
    app.callback(invoke_without_command=True)(remember)
    return app


def command(app: typer.Typer, name: str) -> Callable[[Command], Command]:
    """Make a function a command of `app`; its docstring is the help."""

    def register(function: Command) -> Command:
        def call(parsed: typer.Context, **given: Any) -> int:
            options = _take(given).over(parsed.obj)
            return _run(options, parsed.command_path, lambda run: function(run, **given))

        call.__doc__ = function.__doc__
        own = list(inspect.signature(function).parameters.values())[1:]
        _set_signature(call, [*own, *_shared()])
        app.command(name)(call)
        return function

    return register


def _run(options: Given, name: str, work: Callable[[Run], Coroutine[Any, Any, int]]) -> int:
    output = Output(options.output or Format.TABLE)
    try:
        with _traced(name) as span:
            code = _done(options, output, work, span)
            span.set_attribute(names.PROCESS_EXIT_CODE, code)
            return code
    except WrongUsage as error:
        output.error(error)
        return exit_code(error)


@contextmanager
def _traced(name: str) -> Iterator[Span]:
    """Record spans, if OTEL_* ask for it, below one of the command's own. That one is below what
    TRACEPARENT says, if it says something.

    Raises:
        WrongUsage: a variable asks for what there is not.
    """
    with ExitStack() as stack:
        try:
            stack.enter_context(tracing("seqgate-cli"))
        except TelemetrySettingError as error:
            raise InvalidSettings(str(error)) from error
        yield stack.enter_context(spans.command(name, os.environ))


def _done(
    options: Given, output: Output, work: Callable[[Run], Coroutine[Any, Any, int]], span: Span
) -> int:
    """Do a command's work. Returns the exit code."""
    try:
        settings = resolve(
            os.environ,
            context=options.context,
            ledger=options.ledger,
            dedup=options.dedup,
            cursor=options.cursor,
            dispatcher=options.dispatcher,
            filter=options.filter,
            timeout_s=options.timeout,
            files={name: getattr(options, name) for name in FILES},
        )
        return asyncio.run(work(Run(settings, output)))
    except SeqgateError as error:
        output.error(error)
        spans.fail(span, reason_of(error), str(error))
        return exit_code(error)
    except OutputClosed:
        return DONE
    except KeyboardInterrupt:
        return INTERRUPTED


def _shared() -> list[inspect.Parameter]:
    return list(inspect.signature(Given).parameters.values())


def _take(given: dict[str, Any]) -> Given:
    return Given(**{each.name: given.pop(each.name) for each in fields(Given)})


def _set_signature(function: Callable[..., Any], options: list[inspect.Parameter]) -> None:
    """What typer reads: the options by name, and what it hands in itself."""
    parsed, *_ = inspect.signature(function).parameters.values()
    named = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in options]
    function.__dict__["__signature__"] = inspect.Signature([parsed, *named])

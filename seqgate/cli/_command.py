"""Turns an async function into a command.

The function gets a Run, and then the command's own arguments, parsed; it returns the exit code, or
None for 0. Every command takes the options of _shared: before the command, after its group, or
after the command; the last one wins.
"""

import asyncio
import inspect
import os
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeVar

import typer
from opentelemetry.trace import Span

from seqgate.api.ledger.v1.ledger_pb2 import GetTopicRequest
from seqgate.cli._declared import check_given, choice, option, parsed_arguments, plain
from seqgate.cli._failure import (
    DONE,
    INTERRUPTED,
    WRONG,
    InvalidSettings,
    WaitTimedOut,
    WrongUsage,
    exit_code,
    reason_of,
)
from seqgate.cli._output import Format, Output, OutputClosed
from seqgate.cli._service import Services
from seqgate.cli._settings import FILES, SERVICES, Settings, resolve
from seqgate.cli._waiting import Because, Waits
from seqgate.errors import NotFoundError, SeqgateError
from seqgate.telemetry import TelemetrySettingError, names, spans, tracing

Work = Callable[..., Coroutine[Any, Any, int | None]]

Command = TypeVar("Command", bound=Work)


def _shared(
    *,
    output: Format | None = choice(
        "Print tables, or JSON with one object per line.", "--output", "-o"
    ),
    context: str | None = option("NAME", "The context of the config file to use."),
    ledger: str | None = option("HOST:PORT", "Address of the ledger service."),
    dedup: str | None = option("HOST:PORT", "Address of the dedup service."),
    cursor: str | None = option("HOST:PORT", "Address of the cursor service."),
    dispatcher: str | None = option("HOST:PORT", "Address of a dispatcher instance."),
    filter: str | None = option("HOST:PORT", "Address of the filter service."),  # noqa: A002
    ca_file: str | None = option(
        "FILE", "Connect over TLS and trust these certificate authorities (PEM)."
    ),
    certificate_file: str | None = option("FILE", "Client certificate (PEM)."),
    key_file: str | None = option("FILE", "Key of the client certificate (PEM, no passphrase)."),
    token_file: str | None = option("FILE", "File with the bearer token to send."),
    timeout: float | None = option(
        "SECONDS",
        "Timeout of each call to a service; if given, also of a wait for the next message, or for "
        "the end of a redrive.",
    ),
) -> None:
    """The options that every command takes."""


SHARED: Final = list(inspect.signature(_shared).parameters.values())

Given = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Run:
    """The context of a command: settings, output, services, and what it waits for."""

    settings: Settings
    output: Output
    services: Services
    waits: Waits

    @asynccontextmanager
    async def waiting(self, what: str, because: Because | None = None) -> AsyncIterator[None]:
        """Wait for a message, or for an end: no longer than --timeout, if that is given. Raises
        WaitTimedOut."""
        limit_s = self.settings.wait_s
        limit = asyncio.timeout(limit_s)
        try:
            with self.waits.on(what, because):
                async with limit:
                    yield
        except TimeoutError:
            if not limit.expired():
                raise
            raise WaitTimedOut(f"waited {limit_s:g} s for {what} (--timeout)") from None


def group(text: str, *own: inspect.Parameter, is_root: bool = False) -> typer.Typer:
    """A group of commands. `own` are the group's own options, whose callbacks do their work; the
    root also has those that install shell completion."""
    app = typer.Typer(
        help=text,
        rich_markup_mode=None,
        add_completion=is_root,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["--help", "-h"]},
    )

    def remember(parsed: typer.Context, **given: Any) -> None:
        check_given(parsed, SHARED)
        parsed.obj = {**(parsed.obj or {}), **_take(given)}
        if parsed.invoked_subcommand is None:
            sys.stderr.write(f"{parsed.get_help()}\n")
            raise typer.Exit(WRONG)

    _set_signature(remember, [*own, *SHARED])
    app.callback(invoke_without_command=True)(remember)
    return app


def command(app: typer.Typer, name: str) -> Callable[[Command], Command]:
    """Make a function a command of `app`; its docstring is the help."""

    def register(function: Command) -> Command:
        _, *own = inspect.signature(function).parameters.values()

        def call(parsed: typer.Context, **given: Any) -> int:
            options = {**parsed.obj, **_take(given)}
            check = partial(check_given, parsed, [*own, *SHARED])
            return _run(options, parsed.command_path, function, given, check)

        call.__doc__ = function.__doc__
        _set_signature(call, [*own, *SHARED])
        app.command(name)(call)
        return function

    return register


def _run(
    options: Given, name: str, function: Work, arguments: Given, check: Callable[[], None]
) -> int:
    output = Output(options.get("output", Format.TABLE))
    try:
        with _traced(name) as span:
            code = _done(options, output, function, arguments, check, span)
            span.set_attribute(names.PROCESS_EXIT_CODE, code)
            return code
    except WrongUsage as error:
        output.error(error)
        return exit_code(error)


@contextmanager
def _traced(name: str) -> Iterator[Span]:
    """Record spans if OTEL_* enable it, in the trace of TRACEPARENT if that is set. Raises
    InvalidSettings if an OTEL_* variable is invalid."""
    with ExitStack() as stack:
        try:
            stack.enter_context(tracing("seqgate-cli"))
        except TelemetrySettingError as error:
            raise InvalidSettings(str(error)) from error
        yield stack.enter_context(spans.command(name, os.environ))


def _done(
    options: Given,
    output: Output,
    function: Work,
    arguments: Given,
    check: Callable[[], None],
    span: Span,
) -> int:
    async def work(given: Given, waits: Waits) -> int:
        async with Services(settings, waits) as services:
            run = Run(settings, output, services, waits)
            try:
                return await function(run, **given) or DONE
            except NotFoundError as error:
                await _check_topic(services, error)
                raise

    try:
        named = {name: options.get(name) for name in ("context", *SERVICES, *FILES)}
        settings = resolve(os.environ, timeout_s=options.get("timeout"), **named)
        given = parsed_arguments(function, arguments)
        check()
        with Waits(output) as waits:
            return asyncio.run(work(given, waits))
    except SeqgateError as error:
        output.error(error)
        spans.fail(span, reason_of(error), str(error))
        return exit_code(error)
    except OutputClosed:
        return DONE
    except KeyboardInterrupt:
        return INTERRUPTED


async def _check_topic(services: Services, error: NotFoundError) -> None:
    """Raise TOPIC_NOT_FOUND if a subscription was not found because its topic is unknown."""
    topic = error.details.get("topic")
    if error.reason == "SUBSCRIPTION_NOT_FOUND" and topic:
        try:
            await services.call(GetTopicRequest(topic=topic))
        except NotFoundError as unknown:
            raise unknown from error
        except SeqgateError:
            return  # it may be known


def _take(given: dict[str, Any]) -> Given:
    taken = {each.name: given.pop(each.name) for each in SHARED}
    return {name: value for name, value in taken.items() if value is not None}


def _set_signature(function: Callable[..., Any], options: list[inspect.Parameter]) -> None:
    """Set the signature that typer reads: its own context, and options by name."""
    context, *_ = inspect.signature(function).parameters.values()
    named = [plain(each).replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in options]
    function.__dict__["__signature__"] = inspect.Signature([context, *named])

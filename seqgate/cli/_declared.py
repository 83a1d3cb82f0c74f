"""Declarations of a command's arguments and options.

A declaration is the default of a parameter, or an annotation of its type if several commands share
it. The command gets the parsed value:

    async def trim(run: Run, topic: Topic, before: MessageId = argument("BEFORE", ..., parse=...))
"""

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, get_args, get_origin

import typer
from typer.models import OptionInfo

from seqgate.cli._failure import WrongUsage

REQUIRED: Final = inspect.Parameter.empty
"""The default of a required argument or option."""


@dataclass(frozen=True, slots=True)
class Declared:
    """An argument or option, as the default or an annotation of a command's parameter.

    Attributes:
        info: its flags, metavar, help and bounds, for typer.
        default: in the form of the command line, and parsed; None: not given. The default of an
            annotated parameter is a parsed value already.
        parse: parses the value, or raises WrongUsage. None: use the value unchanged.
        raw: the type that `parse` takes.
        when_empty: what to do instead of giving an empty text, which is refused. None: the command
            refuses it.
        is_bytes: whether bytes that are not UTF-8 are taken, too.
    """

    info: Any
    default: Any
    parse: Callable[[Any], Any] | None
    raw: Any
    when_empty: str | None = ""
    is_bytes: bool = False


def argument(
    metavar: str,
    text: str,
    *,
    default: Any = REQUIRED,
    parse: Callable[[Any], Any] | None = None,
    raw: Any = str,
    when_empty: str | None = "",
    is_bytes: bool = False,
    **how: Any,
) -> Any:
    """An argument; its help does not show the default. `how` is for typer."""
    info = typer.Argument(metavar=metavar, help=text, **{"show_default": False, **how})
    return Declared(info, default, parse, raw, when_empty, is_bytes)


def option(
    metavar: str | None,
    text: str,
    *flags: str,
    default: Any = None,
    parse: Callable[[Any], Any] | None = None,
    raw: Any = str,
    when_empty: str | None = "",
    is_bytes: bool = False,
    **how: Any,
) -> Any:
    """An option with a value; without `flags`, the parameter's name is its flag."""
    info = typer.Option(..., *flags, metavar=metavar, help=text, **how)
    is_bytes = is_bytes or metavar in ("FILE", "DIR")
    return Declared(info, default, parse, raw, when_empty, is_bytes)


def choice(text: str, *flags: str, **how: Any) -> Any:
    return option(None, text, *flags, **how)


def flag(text: str, *flags: str, **how: Any) -> Any:
    return option(None, text, *flags, default=False, **how)


def parsed_arguments(
    function: Callable[..., object], arguments: Mapping[str, Any]
) -> Mapping[str, Any]:
    found = dict(arguments)
    for name, parameter in inspect.signature(function).parameters.items():
        declared = _declared(parameter)
        if declared and declared.parse and found[name] not in (None, parameter.default):
            found[name] = declared.parse(found[name])
    return found


def check_given(parsed: typer.Context, parameters: Iterable[inspect.Parameter]) -> None:
    """Raise WrongUsage for values on the command line that no argument takes."""
    declared = {each.name: found for each in parameters if (found := _declared(each))}
    for each in parsed.command.params:
        source = parsed.get_parameter_source(each.name or "")
        if source is None or source.name != "COMMANDLINE" or each.name not in declared:
            continue
        given = parsed.params.get(each.name)
        for value in given if isinstance(given, list | tuple) else [given]:
            _check_value(_label(each), value, declared[each.name])


def _check_value(label: str, value: Any, declared: Declared) -> None:
    match value:
        case "" if declared.when_empty is not None:
            # A variable that is not set, more often than an empty text that is meant.
            hint = declared.when_empty
            raise WrongUsage(f"{label} is empty: {hint}" if hint else f"{label} is empty")
        case Path() if value == Path():
            raise WrongUsage(f"{label} must be the name of a file")
        case str() if not (declared.is_bytes or _is_unicode(value)):
            raise WrongUsage(f"{label} is not UTF-8")
        case float() if not math.isfinite(value):
            raise WrongUsage(f"{label} must be a number", details={"given": str(value)})


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _label(of: Any) -> str:
    is_option = of.param_type_name == "option"
    return str(max(of.opts, key=len) if is_option else of.metavar or of.name)


def _declared(parameter: inspect.Parameter) -> Declared | None:
    metadata = getattr(parameter.annotation, "__metadata__", ())
    return next(
        (each for each in (parameter.default, *metadata) if isinstance(each, Declared)), None
    )


def plain(parameter: inspect.Parameter) -> inspect.Parameter:
    """A command's parameter in the form that typer takes, not parsed yet."""
    declared = _declared(parameter)
    assert declared is not None, parameter
    is_own = parameter.default is declared or parameter.default is REQUIRED
    default = declared.default if is_own else parameter.default
    annotated = get_origin(parameter.annotation) is Annotated
    kind = get_args(parameter.annotation)[0] if annotated else parameter.annotation
    given = declared.raw if declared.parse else kind
    info = copy(declared.info)
    if isinstance(info, OptionInfo) and not info.param_decls:
        info.param_decls = (f"--{parameter.name.rstrip('_').replace('_', '-')}",)
    optional = given | None if default is None else given
    return parameter.replace(annotation=Annotated[optional, info], default=default)

"""The help and the errors of a service's command line: `python -m seqgate.services.<name> --help`.

Settings are environment variables or keys of a TOML file; --help lists them with the units, bounds
and defaults of the service's settings class. The one other argument is --migrate, of a service that
has a layout in PostgreSQL.
"""

import difflib
import pkgutil
import textwrap
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any, Final, Literal, get_args, get_origin

from annotated_types import Ge, Gt, Le
from pydantic import ValidationError
from pydantic.fields import FieldInfo

import seqgate.services
from seqgate.services.runtime.config import ProcessConfig

WIDTH: Final = 100

CLIENT: Final = frozenset(
    f"SEQGATE_{name}"
    for name in (
        "CA_FILE",
        "CERTIFICATE_FILE",
        "KEY_FILE",
        "TOKEN_FILE",
        "TOKEN",
        "CONFIG",
        "CONTEXT",
        "SPARK_LOG",
    )
)
"""Variables of the command line and of jobs, which a shell may export to a service."""

SERVICES: Final = frozenset(
    each.name.upper() for each in pkgutil.iter_modules(seqgate.services.__path__)
)
"""The services' names as they follow SEQGATE_ in variables."""

UNITS: Final = {"s": "seconds", "minutes": "minutes", "bytes": "bytes"}
"""Units, by a part of a setting's name."""


def usage(config_type: type[ProcessConfig]) -> str:
    prefix = _prefix(config_type)
    head = (
        f"The {config_type.service} service. Each setting is an environment variable, or a key of "
        f"the TOML file that {prefix}CONFIG_FILE names, there in lower case and without {prefix}. "
        "The variable comes first."
    )
    lines = [f"usage: python -m seqgate.services.{config_type.service} [--help]", ""]
    lines += textwrap.wrap(head, WIDTH)
    for name, field in config_type.model_fields.items():
        lines += ["", f"{prefix}{name.upper()}  ({_type(name, field)}; default: {_default(field)})"]
        lines.append(textwrap.indent(_description(config_type, name), "    "))
    return "\n".join(lines) + "\n"


def wrong_values(config_type: type[ProcessConfig], error: ValidationError) -> Iterator[str]:
    """A sentence for each invalid setting, without its value, which may be a secret."""
    for fault in error.errors(include_url=False, include_input=False):
        name = str(fault["loc"][0]) if fault["loc"] else ""
        if fault["type"] == "extra_forbidden":
            file = config_type.variable("config_file")
            meant = _meant(name, config_type.model_fields, "--help lists the settings")
            yield f"unknown key {name!r} in the file that {file} names; {meant}"
            continue
        setting = _prefix(config_type) + name.upper() if name else "the settings"
        message = fault["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
        yield f"{setting}: {message[:1].lower()}{message[1:]}"


def faults(
    config_type: type[ProcessConfig], arguments: Iterable[str], environment: Iterable[str]
) -> Iterator[str]:
    """A sentence for each unknown argument and each unknown variable.

    Variables of other services, of the client and of the tests (SEQGATE_TEST_...) are accepted: a
    shell exports them to every process.
    """
    help_ = f"python -m seqgate.services.{config_type.service} --help lists the settings"
    has_layout = "postgres_migrates" in config_type.model_fields
    arguments_ = ("--help", "--migrate") if has_layout else ("--help",)
    for argument in arguments:
        yield f"unknown argument {argument!r}; {_meant(argument, arguments_, help_)}"
    known = [_prefix(config_type) + name.upper() for name in config_type.model_fields]
    known.append(f"{_prefix(config_type)}CONFIG_FILE")
    for name in sorted(environment):
        if _is_unknown(name.upper(), config_type.service, known):
            yield f"unknown setting {name}; {_meant(name.upper(), known, help_)}"


def _meant(name: str, known: Collection[str], otherwise: str) -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.85)
    return f"did you mean {near[0]}?" if near else otherwise


def _is_unknown(name: str, service: str, known: Iterable[str]) -> bool:
    if not name.startswith("SEQGATE_") or name.startswith("SEQGATE_TEST_"):
        return False
    if name in known or name in CLIENT:
        return False
    whose, separator, _ = name.removeprefix("SEQGATE_").partition("_")
    # a service's bare name is its address, for the command line
    return whose not in SERVICES or (whose == service.upper() and bool(separator))


def _prefix(config_type: type[ProcessConfig]) -> str:
    return str(config_type.model_config["env_prefix"])


def _description(config_type: type[ProcessConfig], name: str) -> str:
    """A setting's docstring; the base class's if a service overrides only the default."""
    for each in config_type.__mro__:
        field = getattr(each, "model_fields", {}).get(name)
        if field is not None and field.description:
            return str(field.description)
    return ""


def _type(name: str, field: FieldInfo) -> str:
    kind: Any = field.annotation
    if get_origin(kind) is Literal:
        return " | ".join(get_args(kind))
    if kind is bool:
        return "true | false"
    if kind in (int, float):
        units = [UNITS[part] for part in name.split("_") if part in UNITS]
        return ", ".join([*(units or ["number"]), *_bounds(field)])
    if kind is Path or Path in get_args(kind):
        return "path"
    return "JSON list" if get_origin(kind) is tuple else "text"


def _bounds(field: FieldInfo) -> Iterator[str]:
    for each in field.metadata:
        match each:
            case Gt(gt=bound):
                yield f"> {bound}"
            case Ge(ge=bound):
                yield f">= {bound}"
            case Le(le=bound):
                yield f"<= {bound}"


def _default(field: FieldInfo) -> str:
    match field.default:
        case None | "":
            return "none"
        case bool(value):
            return str(value).lower()
        case tuple(values):
            return "[" + ", ".join(f'"{each}"' for each in values) + "]"
    return str(field.default)

"""The page of settings, from the classes in services/*/config.py."""

import importlib
import types
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from seqgate.services.runtime.config import ProcessConfig, ServiceConfig
from seqgate.telemetry.metrics import SERVICES
from tools.site.reference.tables import escaped

HEAD: Final = """\
# Settings

A setting comes from the environment, or from the TOML file named by
`SEQGATE_<SERVICE>_CONFIG_FILE`, where its name is in lower case without the prefix; the
environment takes precedence. An unknown name or an invalid value ends the process before it
listens. `python -m seqgate.services.<name> --help` prints this list.

A name's end is its unit: `_s` seconds, `_bytes` bytes, `_max` the most that are allowed.
"""

BOUNDS: Final = (("ge", "at least"), ("gt", "above"), ("le", "at most"), ("lt", "below"))

KINDS: Final = {bool: "true or false", int: "whole number", float: "number", str: "text"}


def config_type(service: str) -> type[ProcessConfig]:
    module = importlib.import_module(f"seqgate.services.{service}.config")
    found: type[ProcessConfig] = getattr(module, f"{service.capitalize()}Config")
    return found


def variables(service: str) -> dict[str, FieldInfo]:
    """The settings of a service, by their environment variables."""
    config = config_type(service)
    prefix = config.model_config["env_prefix"]
    return {f"{prefix}{name}".upper(): field for name, field in config.model_fields.items()}


def page() -> str:
    parts = [HEAD]
    for service in SERVICES:
        parts.append(f"## {service.capitalize()}\n")
        common = ServiceConfig.model_fields
        own = config_type(service).model_fields
        for variable, (name, field) in zip(variables(service), own.items(), strict=True):
            if name not in common or name == "listen":
                parts.append(_entry(variable, field, meaning(service, name)))
        parts.append("And those of every service, below.\n")
    parts.append("## Console\n")
    parts += [
        _entry(variable, field, meaning("console", name))
        for variable, (name, field) in zip(
            variables("console"), config_type("console").model_fields.items(), strict=True
        )
    ]
    parts.append("## Every service\n")
    parts.append("`<SERVICE>` stands for the service's name: `SEQGATE_LEDGER_LOG_LEVEL`.\n")
    for name, field in ServiceConfig.model_fields.items():
        if name != "listen":
            variable = f"SEQGATE_<SERVICE>_{name.upper()}"
            parts.append(_entry(variable, field, field.description or ""))
    return "\n".join(parts)


def meaning(service: str, name: str) -> str:
    """The docstring of a setting, or of the one whose default it changes."""
    for each in config_type(service).__mro__:
        field = getattr(each, "model_fields", {}).get(name)
        if field is not None and field.description:
            return str(field.description)
    return ""


def _entry(variable: str, field: FieldInfo, meaning: str) -> str:
    facts = [_kind(field.annotation), *_bounds(field), f"default: {_default(field)}"]
    text = escaped(" ".join(meaning.split()))
    return f"### `{variable}`\n\n{'; '.join(facts)}\n{{ .facts }}\n\n{text}\n"


def _kind(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _kind(arguments[0])
    if origin is Literal:
        return "one of " + ", ".join(f"`{each}`" for each in arguments)
    if origin in (Union, types.UnionType):
        return " or ".join(_kind(each) for each in arguments if each is not type(None))
    if origin in (tuple, list, frozenset):
        return f"list (JSON) of {_kind(arguments[0])}"
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return "one of " + ", ".join(f"`{each.value}`" for each in annotation)
    if isinstance(annotation, type) and issubclass(annotation, Path):
        return "path"
    return KINDS.get(annotation, "text")


def _bounds(field: FieldInfo) -> Iterator[str]:
    for name, words in BOUNDS:
        for each in field.metadata:
            if (bound := getattr(each, name, None)) is not None:
                yield f"{words} {bound:,}"


def _default(field: FieldInfo) -> str:
    value = field.default
    if value is None or value in ("", ()):
        return "none"
    if isinstance(value, Enum):
        value = value.value
    if isinstance(value, bool):
        value = str(value).lower()
    if isinstance(value, int | float):
        return f"{value:,}"
    if isinstance(value, tuple):
        value = ", ".join(map(str, value))
    return f"`{value}`"

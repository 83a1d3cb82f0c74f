"""Where are the services, and who says so?

Each value comes from the first of these that has it:

    option  >  environment  >  context in the config file  >  built in

A config file names contexts, and the one that is used unless another is asked for:

    current = "dev"

    [contexts.dev]
    ledger = "127.0.0.1:7702"
    dedup = "127.0.0.1:7701"
    cursor = "127.0.0.1:7703"
    dispatcher = "127.0.0.1:7704"
    filter = "127.0.0.1:7705"
    ca_file = "ca.pem"                   # connect over TLS, and believe these authorities
    certificate_file = "me.pem"          # what services are shown, where they ask
    key_file = "me.key"
    token_file = "token"

Relative names of files are relative to the config file there. A token itself is taken from
SEQGATE_TOKEN alone: other users of the machine see a command's options.
"""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final, NamedTuple

from seqgate.cli._failure import InvalidSettings
from seqgate.client._channel import PLAIN, Security
from seqgate.tls import TLS, is_loopback

LEDGER_DEFAULT: Final = "127.0.0.1:7702"
DEDUP_DEFAULT: Final = "127.0.0.1:7701"
CURSOR_DEFAULT: Final = "127.0.0.1:7703"
DISPATCHER_DEFAULT: Final = "127.0.0.1:7704"
FILTER_DEFAULT: Final = "127.0.0.1:7705"

TIMEOUT_DEFAULT_S: Final = 30.0
TIMEOUT_MAX_S: Final = 86_400.0
"""How long a service may take to answer, unless asked otherwise, and at most."""

Environment = Mapping[str, str]


class Setting(NamedTuple):
    """A value, and who set it."""

    value: str
    source: str


@dataclass(frozen=True, slots=True)
class Context:
    """The services of one installation; None: not said."""

    ledger: str | None = None
    dedup: str | None = None
    cursor: str | None = None
    dispatcher: str | None = None
    filter: str | None = None
    ca_file: str | None = None
    certificate_file: str | None = None
    key_file: str | None = None
    token_file: str | None = None


FILES: Final = ("ca_file", "certificate_file", "key_file", "token_file")
"""The settings that name files."""


@dataclass(frozen=True, slots=True)
class Config:
    """The config file; without contexts when there is none."""

    path: Path
    current: str | None = None
    contexts: Mapping[str, Context] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Settings:
    """What a command goes by."""

    config: Config
    context: Setting | None
    ledger: Setting
    dedup: Setting
    cursor: Setting
    dispatcher: Setting
    filter: Setting
    timeout_s: float
    files: Mapping[str, Setting | None] = field(default_factory=dict)
    """By the names of FILES; None: not set."""
    security: Security = PLAIN
    """How to connect, and what to show."""


def resolve(
    environment: Environment,
    *,
    context: str | None = None,
    ledger: str | None = None,
    dedup: str | None = None,
    cursor: str | None = None,
    dispatcher: str | None = None,
    filter: str | None = None,  # noqa: A002 - the option's name
    timeout_s: float | None = None,
    files: Mapping[str, str | None] | None = None,
) -> Settings:
    """The settings, given the options of the command line.

    Raises:
        InvalidSettings: an address cannot be one, the context is unknown, the config file is
            wrong, or files are missing that go with others.
    """
    config = load(environment)
    name = _first(
        Setting(context or "", "--context"),
        Setting(environment.get("SEQGATE_CONTEXT", ""), "SEQGATE_CONTEXT"),
        Setting(config.current or "", str(config.path)),
    )
    chosen = Context() if name is None else _context(config, name.value)
    origin = "" if name is None else f"context {name.value}"
    ledger_setting = _target(
        Setting(ledger or "", "--ledger"),
        Setting(environment.get("SEQGATE_LEDGER", ""), "SEQGATE_LEDGER"),
        Setting(chosen.ledger or "", origin),
        Setting(LEDGER_DEFAULT, "default"),
    )
    dedup_setting = _target(
        Setting(dedup or "", "--dedup"),
        Setting(environment.get("SEQGATE_DEDUP", ""), "SEQGATE_DEDUP"),
        Setting(chosen.dedup or "", origin),
        Setting(DEDUP_DEFAULT, "default"),
    )
    cursor_setting = _target(
        Setting(cursor or "", "--cursor"),
        Setting(environment.get("SEQGATE_CURSOR", ""), "SEQGATE_CURSOR"),
        Setting(chosen.cursor or "", origin),
        Setting(CURSOR_DEFAULT, "default"),
    )
    dispatcher_setting = _target(
        Setting(dispatcher or "", "--dispatcher"),
        Setting(environment.get("SEQGATE_DISPATCHER", ""), "SEQGATE_DISPATCHER"),
        Setting(chosen.dispatcher or "", origin),
        Setting(DISPATCHER_DEFAULT, "default"),
    )
    filter_setting = _target(
        Setting(filter or "", "--filter"),
        Setting(environment.get("SEQGATE_FILTER", ""), "SEQGATE_FILTER"),
        Setting(chosen.filter or "", origin),
        Setting(FILTER_DEFAULT, "default"),
    )
    timeout_s = TIMEOUT_DEFAULT_S if timeout_s is None else timeout_s
    if not 0 < timeout_s <= TIMEOUT_MAX_S:
        raise InvalidSettings(f"--timeout must be above 0 and at most {TIMEOUT_MAX_S:.0f} seconds")
    services = (
        ledger_setting,
        dedup_setting,
        cursor_setting,
        dispatcher_setting,
        filter_setting,
    )
    given = files or {}
    named = {
        each: _first(
            Setting(given.get(each) or "", f"--{each.replace('_', '-')}"),
            Setting(environment.get(f"SEQGATE_{each.upper()}", ""), f"SEQGATE_{each.upper()}"),
            Setting(_beside(config.path, getattr(chosen, each)), origin),
        )
        for each in FILES
    }
    security = _security(named, environment.get("SEQGATE_TOKEN", ""), services)
    return Settings(config, name, *services, timeout_s, named, security)


def _beside(config: Path, file: str | None) -> str:
    return str(config.parent / file) if file else ""


def _security(
    named: Mapping[str, Setting | None], token: str, services: Sequence[Setting]
) -> Security:
    paths = {each: None if it is None else Path(it.value) for each, it in named.items()}
    authorities, certificate, key = (paths[each] for each in FILES[:3])
    if (certificate is None) != (key is None):
        raise InvalidSettings("--certificate-file and --key-file must be given together")
    if authorities is None and certificate is not None:
        raise InvalidSettings("--certificate-file requires TLS: give --ca-file")
    shown = paths["token_file"] or token or None
    if shown is not None and authorities is None:
        for service in services:
            if not is_loopback(service.value):
                raise InvalidSettings(
                    f"will not send a token to {service.value} ({service.source}) without TLS: "
                    "give --ca-file"
                )
    return Security(None if authorities is None else TLS(authorities, certificate, key), shown)


def load(environment: Environment) -> Config:
    """Read the config file: $SEQGATE_CONFIG, which must exist; else seqgate/config.toml in
    $XDG_CONFIG_HOME or ~/.config, which need not.

    Raises:
        InvalidSettings: it cannot be read, or holds what does not belong there.
    """
    given = environment.get("SEQGATE_CONFIG")
    path = Path(given) if given else _usual_path(environment)
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if given:
            raise InvalidSettings(f"{path}: file not found (SEQGATE_CONFIG)") from None
        return Config(path)
    except OSError as error:
        raise InvalidSettings(f"{path}: {error.strerror}") from error
    except ValueError as error:  # not TOML, or not UTF-8
        raise InvalidSettings(f"{path}: {error}") from error
    return _config(path, values)


def _usual_path(environment: Environment) -> Path:
    home = Path(environment.get("XDG_CONFIG_HOME", ""))
    if not home.is_absolute():  # the XDG specification: a relative path is ignored
        home = Path.home() / ".config"
    return home / "seqgate" / "config.toml"


def _config(path: Path, values: Mapping[str, Any]) -> Config:
    _known(path, "", values, {"current", "contexts"})
    tables = values.get("contexts", {})
    if not isinstance(tables, dict) or not all(isinstance(each, dict) for each in tables.values()):
        raise InvalidSettings(f"{path}: contexts must be tables: [contexts.NAME]")
    contexts = {}
    for name, table in tables.items():
        services = {each.name for each in fields(Context)}
        _known(path, f"contexts.{name}.", table, services)
        for key, value in table.items():
            if not isinstance(value, str):
                what = "the name of a file" if key in FILES else "HOST:PORT"
                raise InvalidSettings(f"{path}: contexts.{name}.{key} must be a string, {what}")
        contexts[name] = Context(**table)
    config = Config(path, values.get("current"), contexts)
    if config.current is not None:
        _context(config, config.current)
    return config


def _known(path: Path, prefix: str, values: Mapping[str, Any], known: set[str]) -> None:
    for key in values:
        if key not in known:
            raise InvalidSettings(f"{path}: unknown key {prefix}{key}")


def _context(config: Config, name: str) -> Context:
    try:
        return config.contexts[name]
    except (KeyError, TypeError):
        raise InvalidSettings(f"{config.path}: context {name!r} not found") from None


def _first(*settings: Setting) -> Setting | None:
    return next((setting for setting in settings if setting.value), None)


def _target(*settings: Setting) -> Setting:
    setting = _first(*settings)
    assert setting is not None
    host, _, port = setting.value.rpartition(":")
    plain = host and (":" not in host or (host.startswith("[") and host.endswith("]")))
    resolved = "://" in setting.value or setting.value.startswith(("unix:", "ipv4:", "ipv6:"))
    number = int(port) if port.isascii() and port.isdecimal() and len(port) <= 5 else 0
    if not resolved and not (plain and 0 < number < 65536):
        raise InvalidSettings(f"{setting.value!r} is not HOST:PORT ({setting.source})")
    return setting

"""The addresses of the services, and the source of each.

Each value comes from the first of these that has it:

    option  >  environment  >  context in the config file  >  built in

A config file defines contexts, and the current one:

    current = "dev"

    [contexts.dev]
    ledger = "127.0.0.1:7702"
    dedup = "127.0.0.1:7701"
    cursor = "127.0.0.1:7703"
    dispatcher = "127.0.0.1:7704"
    filter = "127.0.0.1:7705"
    ca_file = "ca.pem"                   # connect over TLS, and trust these authorities
    certificate_file = "me.pem"          # the client certificate
    key_file = "me.key"
    token_file = "token"

Its relative file names are relative to the config file. A token itself comes only from
SEQGATE_TOKEN: other users of the machine can see a command's options.
"""

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

from seqgate.cli._failure import InvalidSettings
from seqgate.client._address import checked_address
from seqgate.client._channel import Security
from seqgate.errors import InvalidRequestError
from seqgate.tls import TLS, is_loopback

SERVICES: Final[Mapping[str, str]] = {
    "ledger": "127.0.0.1:7702",
    "dedup": "127.0.0.1:7701",
    "cursor": "127.0.0.1:7703",
    "dispatcher": "127.0.0.1:7704",
    "filter": "127.0.0.1:7705",
}
"""The services, and their default addresses."""

FILES: Final = ("ca_file", "certificate_file", "key_file", "token_file")

TIMEOUT_DEFAULT_S: Final = 30.0
TIMEOUT_MAX_S: Final = 86_400.0
"""The default and the longest time-out of a call."""

Environment = Mapping[str, str]


class Setting(NamedTuple):
    value: str
    source: str


Context = Mapping[str, str]
"""The addresses and files of one installation: keys of SERVICES, and FILES."""


@dataclass(frozen=True, slots=True)
class Config:
    """The config file; without contexts if there is none."""

    path: Path
    current: str | None = None
    contexts: Mapping[str, Context] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Settings:
    config: Config
    context: Setting | None
    ledger: Setting
    dedup: Setting
    cursor: Setting
    dispatcher: Setting
    filter: Setting
    timeout_s: float
    """The limit of each call."""
    wait_s: float | None
    """The limit of a wait for a message, or for the end of a redrive: the time-out, if it is given.
    None: no limit."""
    files: Mapping[str, Setting]
    """The files that are set, by the names of FILES."""
    security: Security


def resolve(
    environment: Environment, *, timeout_s: float | None = None, **options: str | None
) -> Settings:
    """Resolve the settings, given the options of the command line.

    Args:
        options: `context`, SERVICES and FILES; None: not given.

    Raises:
        InvalidSettings: an address, the context or the config file is invalid, or a file is set
            without another one that it needs.
    """
    assert options.keys() <= {"context", *SERVICES, *FILES}
    config = load(environment)

    def first(name: str, *fallbacks: tuple[str | None, str]) -> Setting | None:
        option, variable = f"--{name.replace('_', '-')}", f"SEQGATE_{name.upper()}"
        given = (options.get(name), option), (environment.get(variable), variable), *fallbacks
        return next((Setting(value, source) for value, source in given if value), None)

    context = first("context", (config.current, str(config.path)))
    chosen: Context = {} if context is None else _context(config, context.value)
    origin = "" if context is None else f"context {context.value}"
    services = {
        name: _target(first(name, (chosen.get(name), origin), (default, "default")))
        for name, default in SERVICES.items()
    }
    beside = {name: str(config.path.parent / chosen[name]) for name in FILES if chosen.get(name)}
    files = {
        name: setting for name in FILES if (setting := first(name, (beside.get(name), origin)))
    }
    wait_s, timeout_s = timeout_s, TIMEOUT_DEFAULT_S if timeout_s is None else timeout_s
    if not 0 < timeout_s <= TIMEOUT_MAX_S:
        raise InvalidSettings(f"--timeout must be above 0 and at most {TIMEOUT_MAX_S:.0f} seconds")
    security = _security(files, environment.get("SEQGATE_TOKEN", ""), services.values())
    return Settings(
        config,
        context,
        **services,
        timeout_s=timeout_s,
        wait_s=wait_s,
        files=files,
        security=security,
    )


def _security(files: Mapping[str, Setting], token: str, services: Iterable[Setting]) -> Security:
    paths = {name: Path(setting.value) for name, setting in files.items()}
    authorities, certificate, key, token_file = (paths.get(name) for name in FILES)
    if (certificate is None) != (key is None):
        raise InvalidSettings("--certificate-file and --key-file must be given together")
    if authorities is None and certificate is not None:
        raise InvalidSettings("--certificate-file requires TLS: give --ca-file")
    shown = token_file or token or None
    if shown is not None and authorities is None:
        for service in services:
            if not is_loopback(service.value):
                raise InvalidSettings(
                    f"will not send a token to {service.value} ({service.source}) without TLS: "
                    "give --ca-file"
                )
    return Security(None if authorities is None else TLS(authorities, certificate, key), shown)


def load(environment: Environment) -> Config:
    """Read the config file: $SEQGATE_CONFIG, which must exist, or else seqgate/config.toml in
    $XDG_CONFIG_HOME or ~/.config, which need not exist.

    Raises:
        InvalidSettings: it is unreadable, or has unknown or invalid settings.
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
    for name, table in tables.items():
        _known(path, f"contexts.{name}.", table, {*SERVICES, *FILES})
        for key, value in table.items():
            if not isinstance(value, str):
                what = "the name of a file" if key in FILES else "HOST:PORT"
                raise InvalidSettings(f"{path}: contexts.{name}.{key} must be a string, {what}")
    config = Config(path, values.get("current"), tables)
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


def _target(setting: Setting | None) -> Setting:
    assert setting is not None  # every service has a default
    try:
        checked_address(setting.value)
    except InvalidRequestError as error:
        raise InvalidSettings(f"{error} ({setting.source})") from error
    return setting

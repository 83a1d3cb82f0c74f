"""Changes to the config file, which keep its comments and its other settings."""

import os
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import tomlkit
from tomlkit import TOMLDocument

from seqgate.cli._failure import InvalidSettings, OutputFailed, WrongUsage
from seqgate.cli._settings import Config


def add_context(config: Config, name: str, values: Mapping[str, str]) -> None:
    """Add a context; it becomes the current one if there is none. Raises WrongUsage if its name is
    taken."""
    if not name:
        raise WrongUsage("a context needs a name")
    if name in config.contexts:
        raise WrongUsage(
            f"context {name!r} exists: remove it first, or choose another name",
            details={"config": str(config.path)},
        )

    def change(document: TOMLDocument) -> None:
        if config.current is None:
            _set_current(document, name)
        if "contexts" not in document:
            document["contexts"] = tomlkit.table(is_super_table=True)
        table = tomlkit.table()
        table.update(values)
        document["contexts"][name] = table

    _change(config.path, change)


def use_context(config: Config, name: str) -> None:
    """Make a context the current one. Raises InvalidSettings if there is none of that name."""
    _check_known(config, name)
    _change(config.path, lambda document: _set_current(document, name))


def remove_context(config: Config, name: str) -> None:
    """Remove a context; if it is the current one, there is none then. Raises InvalidSettings if
    there is none of that name."""
    _check_known(config, name)

    def change(document: TOMLDocument) -> None:
        del document["contexts"][name]
        if config.current == name:
            del document["current"]

    _change(config.path, change)


def _check_known(config: Config, name: str) -> None:
    if name not in config.contexts:
        raise InvalidSettings(f"{config.path}: context {name!r} not found")


def _set_current(document: TOMLDocument, name: str) -> None:
    if "current" in document:
        document["current"] = name
        return
    # A key after a table would be the table's.
    rest = tomlkit.dumps(document)
    document.clear()
    document.update(tomlkit.parse(f"current = {tomlkit.item(name).as_string()}\n\n{rest}"))


def _change(path: Path, change: Callable[[TOMLDocument], None]) -> None:
    """Change the file, all or nothing. Raises OutputFailed."""
    path = path.resolve()
    try:
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        document = tomlkit.parse(text)
        change(document)
        path.parent.mkdir(parents=True, exist_ok=True)
        _replace(path, tomlkit.dumps(document))
    except OSError as error:
        raise OutputFailed(f"{path}: {error.strerror}") from error


def _replace(path: Path, text: str) -> None:
    descriptor, scratch = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        mode = path.stat().st_mode & 0o777 if path.exists() else 0o600
        Path(scratch).chmod(mode)
        Path(scratch).replace(path)
    except BaseException:
        with suppress(FileNotFoundError):
            Path(scratch).unlink()
        raise

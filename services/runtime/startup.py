"""What must hold on this machine before a service starts: its files, its folder and its ports.

Each is checked before anything is logged or begun, so that a process which cannot start ends with
one sentence that names the setting. What changes between the check and the use is an error of its
own, likewise by name.
"""

import errno
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import Final

from seqgate.services.runtime.config import ProcessConfig
from seqgate.services.runtime.held_port import held_port

PORTS: Final = ("listen", "health_listen", "metrics_listen")

_PASSING: Final = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EMFILE, errno.ENFILE)
"""Errors of a folder that may pass: its store waits for that."""


def check_read_files(config: ProcessConfig) -> None:
    """Check that the files of settings can be read. Raises UnusableSetting."""
    for name in type(config).model_fields:
        path = getattr(config, name)
        if name.endswith("_file") and isinstance(path, Path):
            try:
                path.open("rb").close()
            except OSError as error:
                raise config.unusable(name, f"{path}: {error.strerror}") from error


def check_database(config: ProcessConfig, name: str) -> None:
    """Check that a setting names a database of SQLite that can be opened or created. Raises
    UnusableSetting."""
    path: Path = getattr(config, name)
    folder = path.absolute().parent
    if not folder.is_dir():
        what = "is not a folder" if folder.exists() else "does not exist"
        raise config.unusable(name, f"the folder {folder} {what}")
    if path.is_dir():
        raise config.unusable(name, f"{path.absolute()} is a folder, not a database")
    try:
        if path.exists():
            path.open("r+b").close()
        with TemporaryFile(dir=folder):  # as SQLite creates its log beside the database
            pass
    except OSError as error:
        if error.errno not in _PASSING:
            why = f"the folder {folder} is not writable: {error.strerror}"
            raise config.unusable(name, why) from error


def check_ports(config: ProcessConfig) -> None:
    """Check that the service can listen on each of its ports. Raises UnusableSetting."""
    with ExitStack() as held:
        for name in PORTS:
            if getattr(config, name, ""):
                held.enter_context(held_for(config, name))


@contextmanager
def held_for(config: ProcessConfig, name: str) -> Iterator[str]:
    """Hold a setting's port, as held_port does. Raises UnusableSetting."""
    with ExitStack() as held:
        with listening(config, name):
            address = held.enter_context(held_port(getattr(config, name)))
        yield address


@contextmanager
def listening(config: ProcessConfig, name: str) -> Iterator[None]:
    """Name the setting in errors of listening on its address. Raises UnusableSetting."""
    listen: str = getattr(config, name)
    try:
        yield
    except OSError as error:
        why = error.strerror or str(error)
        if error.errno == errno.EADDRINUSE:
            host, _, port = listen.rpartition(":")
            why = f"port {port} of {host} is in use"
        raise config.unusable(name, why) from error
    except RuntimeError as error:  # gRPC gives no reason
        raise config.unusable(name, f"cannot listen on {listen}") from error

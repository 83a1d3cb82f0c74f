"""A PostgreSQL server on loopback, from the Python package pgserver.

Where that package has no binaries for the machine, those of Debian or on PATH serve, of version 15
or later. PostgreSQL refuses to run as root: then it runs in a user namespace, or, where there is
none, as the user nobody. Either command becomes the server, so its process id is the server's.
"""

import importlib.util
import os
import platform
import pwd
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Final

from seqgate.extras import pip_install

VERSION_MIN: Final = 15

PACKAGED: Final = sys.version_info < (3, 13) and (
    platform.machine() == "x86_64" or sys.platform == "darwin"
)
"""Whether pgserver has files for this Python and machine."""

DEBIAN: Final = Path("/usr/lib/postgresql")
"""Where Debian's packages put the binaries of each version."""

USER: Final = "seqgate"
"""The superuser, who needs no password on loopback."""

NOBODY: Final = "nobody"

_ASKS: Final = "import os, sys; sys.exit(not os.access(sys.argv[1], os.X_OK))"

COMMAND_TIMEOUT_S: Final = 300.0

SETTINGS: Final[Mapping[str, str]] = {
    "listen_addresses": "127.0.0.1",
    "unix_socket_directories": "",  # a socket's path may not be long
    "max_connections": "200",
    "shared_buffers": "64MB",
    "logging_collector": "off",
}


@cache
def postgres_binaries() -> Path:
    """The folder of the server's binaries. Raises FileNotFoundError if none is installed."""
    spec = importlib.util.find_spec("pgserver")
    if spec is not None and spec.origin is not None:
        embedded = Path(spec.origin).parent / "pginstall" / "bin"
        if (embedded / "postgres").is_file():
            return embedded
    debian = sorted(DEBIAN.glob("*/bin"), key=_version_of, reverse=True)
    on_path = shutil.which("postgres")
    for folder in [*debian, *([Path(on_path).parent] if on_path else [])]:
        if (folder / "postgres").is_file() and _version_of(folder) >= VERSION_MIN:
            return folder
    packaged = f"{pip_install('postgres')}, or " if PACKAGED else ""
    raise FileNotFoundError(f"no PostgreSQL server: {packaged}apt-get install postgresql")


def _version_of(folder: Path) -> int:
    """The major version of the binaries in a folder; 0 if it is unknown."""
    if folder.parent.name.isdecimal():
        return int(folder.parent.name)
    try:
        said = subprocess.run(
            [folder / "postgres", "--version"], capture_output=True, text=True, check=True
        ).stdout
    except (OSError, subprocess.CalledProcessError):
        return 0
    match = re.search(r"(\d+)[.\s]", said)
    return int(match[1]) if match else 0


@cache
def not_root() -> tuple[str, ...]:
    """The command that runs another one as a user that PostgreSQL accepts; empty if this user is
    one. initdb refuses root, and users that /etc/passwd does not name.

    Raises:
        FileNotFoundError: no PostgreSQL is installed.
        OSError: no command works here.
    """
    if os.geteuid() != 0 and _is_named(os.geteuid()):
        return ()
    for command in (in_namespace(), as_nobody()):
        if works(command):
            return command
    raise OSError(
        "PostgreSQL runs neither as root nor as a user without a name, and its binaries in "
        f"{postgres_binaries()} cannot be run as {NOBODY} here: use another user, allow user "
        "namespaces, or, as root, install setpriv (util-linux) and keep the capabilities setuid, "
        "setgid, setpcap and dac_override"
    )


def works(command: Sequence[str]) -> bool:
    """Whether a command can run the server's binaries, wherever they are. Raises FileNotFoundError
    if there are none."""
    postgres = str(postgres_binaries() / "postgres")
    if shutil.which(command[0]) is None or not _succeeds(*command, postgres, "--version"):
        return False
    # initdb does not try, it asks: access() may deny what exec allows.
    return _succeeds(*command, sys.executable, "-I", "-S", "-c", _ASKS, postgres)


def in_namespace() -> tuple[str, ...]:
    """A command that runs another one in a user namespace, where this user has another name. Files
    stay this user's."""
    nobody = pwd.getpwnam(NOBODY)
    return (
        "unshare",
        "--user",
        f"--map-user={nobody.pw_uid}",
        f"--map-group={nobody.pw_gid}",
        "--",
    )


def as_nobody() -> tuple[str, ...]:
    """A command with which root runs another one as NOBODY, who can enter every folder, also below
    one of mode 0700. Without no_setuid_fixup, access() would ignore that capability of his."""
    nobody = pwd.getpwnam(NOBODY)
    user = ("--reuid", str(nobody.pw_uid), "--regid", str(nobody.pw_gid), "--clear-groups")
    kept = [f"--{each}=-all,+dac_override" for each in ("inh-caps", "ambient-caps", "bounding-set")]
    return ("setpriv", *user, *kept, "--securebits=+no_setuid_fixup", "--")


def _is_named(user_id: int) -> bool:
    try:
        pwd.getpwuid(user_id)
    except KeyError:
        return False
    return True


def make_database_folder(folder: Path, *, is_lasting: bool = True) -> None:
    """Make a server's data folder, all or nothing, unless it is there: `initdb`. Its superuser is
    USER. Unless `is_lasting`, it is not flushed to the disk.

    Raises:
        FileNotFoundError: no PostgreSQL is installed.
        OSError: initdb failed, or the folder has other files.
    """
    if (folder / "PG_VERSION").exists():
        return
    scratch = folder.with_name(f"{folder.name}.{os.getpid()}")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    give_to_server(scratch)
    initdb = [str(postgres_binaries() / "initdb"), "--pgdata", str(scratch), "--auth", "trust"]
    options = ["--username", USER, "--encoding", "UTF8", "--locale", "C", "--no-instructions"]
    run_as_server([*initdb, *options, *([] if is_lasting else ["--no-sync"])])
    with suppress(FileNotFoundError):
        folder.rmdir()
    scratch.rename(folder)


def give_to_server(folder: Path) -> None:
    """Let the server's user have a folder."""
    if not_root() == as_nobody():
        shutil.chown(folder, NOBODY)
    folder.chmod(0o700)


def run_as_server(command: Sequence[str]) -> None:
    """Run one of PostgreSQL's commands as the server's user. Raises OSError if it fails."""
    ran = subprocess.run(
        [*not_root(), *command],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=COMMAND_TIMEOUT_S,
        check=False,
    )
    if ran.returncode:
        raise OSError(f"{Path(command[0]).name} failed: {(ran.stderr or ran.stdout).strip()}")


def postgres_command(
    folder: Path, port: int, settings: Mapping[str, str] | None = None
) -> list[str]:
    """The command of a server on loopback, with its data in `folder`. SIGINT stops it; SIGTERM lets
    it wait for its clients. If its parent dies, the kernel sends it SIGINT."""
    options = [f"{name}={value}" for name, value in {**SETTINGS, **(settings or {})}.items()]
    flags = [text for option in options for text in ("-c", option)]
    setpriv = shutil.which("setpriv")
    bound = [setpriv, "--pdeathsig", "INT", "--"] if setpriv else []
    postgres = str(postgres_binaries() / "postgres")
    return [*not_root(), *bound, postgres, "-D", str(folder), "-p", str(port), *flags]


def postgres_url(*ports: int, database: str = "postgres") -> str:
    """The URL of a database on one of several servers."""
    hosts = ",".join(f"127.0.0.1:{port}" for port in ports)
    return f"postgresql://{USER}@{hosts}/{database}"


def is_ready(port: int) -> bool:
    """Whether a server on loopback accepts connections."""
    asking = str(postgres_binaries() / "pg_isready")
    return _succeeds(asking, "--quiet", "--host", "127.0.0.1", "--port", str(port))


def _succeeds(*command: str) -> bool:
    return not subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True).returncode

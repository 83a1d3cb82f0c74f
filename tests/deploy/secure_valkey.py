"""A Valkey that the programs of the component valkey-tls start, on a port of this machine: with the
password, and without TLS, for which the binary that tests have is not built."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from redis import Redis

from seqgate.dev.ports import free_ports
from seqgate.dev.redis_server import redis_binary
from tests.deploy.manifests import K8S
from tests.support.redis_groups import until

TLS = K8S / "components" / "valkey-tls"
PASSWORD = "secret"
HERE = "/opt/seqgate"


def install(folder: Path, port: int) -> str:
    """Put the component's files into a folder, as into the pod's; returns the PATH."""
    (folder / "bin").mkdir(parents=True)
    (folder / "real").mkdir()
    for name in ("valkey-server", "valkey-cli"):
        text = (TLS / name).read_text().replace(HERE, str(folder))
        plain = text.replace("port 0\ntls-port", "port").replace("26379", "6379")
        program = folder / "bin" / name
        program.write_text(plain.replace("6379", str(port)))
        program.chmod(0o755)
    (folder / "tls.conf").touch()
    (folder / "real" / "valkey-server").symlink_to(redis_binary())
    (folder / "password").write_text(PASSWORD)
    return f"{folder}/bin:{folder}/real:/usr/bin:/bin"


@contextmanager
def secure_valkey(folder: Path, *arguments: str) -> Iterator[int]:
    """Run one; the value is its port."""
    (port,) = free_ports(1)
    path = install(folder, port)
    (folder / "data").mkdir()
    settings = folder / "valkey.conf"
    settings.write_text(f"dir {folder}/data\n")
    command = ["sh", "-c", f'exec valkey-server {settings} "$@"', "-", *arguments]
    process = subprocess.Popen(command, env={"PATH": path}, stdout=subprocess.DEVNULL)
    try:
        with Redis(port=port, password=PASSWORD) as client:
            until(client.ping, "it answers")
        yield port
    finally:
        process.kill()
        process.wait()

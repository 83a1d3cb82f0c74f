"""A real Redis-protocol server for a test, on a free port and in its own folder."""

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from redis import Redis
from redis.backoff import ConstantBackoff
from redis.exceptions import RedisError
from redis.retry import Retry

from seqgate.dev.child import bound_to_us
from seqgate.dev.ports import free_ports
from seqgate.dev.redis_server import redis_command

START_RETRIES = 500


class RedisServer:
    """A server that can be killed and restarted with its data."""

    def __init__(
        self, folder: Path, *, port: int | None = None, options: Sequence[str] = ()
    ) -> None:
        self.folder = folder
        self.port = free_ports(1)[0] if port is None else port
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """Its process id."""
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        assert self._process is None
        command = bound_to_us([*redis_command(self.folder, self.port), *self._options])
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        with self.client() as redis:
            redis.ping()

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def flush(self) -> None:
        """Delete all data."""
        with self.client() as redis:
            redis.flushall()

    def client(self) -> Redis:
        """A blocking client that retries until the server is up."""
        return Redis.from_url(
            self.url, retry=Retry(ConstantBackoff(0.01), START_RETRIES), retry_on_error=[RedisError]
        )


@contextmanager
def running_redis(folder: Path) -> Iterator[RedisServer]:
    server = RedisServer(folder)
    server.start()
    try:
        yield server
    finally:
        server.kill()

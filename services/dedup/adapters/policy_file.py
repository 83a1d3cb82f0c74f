"""Policies from a TOML file, read again when it changes.

    [cluster]
    enabled = true

    [namespace."public/default"]
    producer_inactivity_timeout_minutes = 60

    [topic."public/default/orders"]
    max_producers = 50
    on_full = "refuse"

A file that becomes unreadable, or wrong, changes nothing: the last good policies stay in use, and
the topic's status says why.
"""

import asyncio
import tomllib
from pathlib import Path

import structlog

from services.dedup.core.policy import InvalidPolicy, Policies

log = structlog.get_logger()


class PolicyFile:
    """See services.dedup.ports.GivenPolicies. Without a file, everything is as built in."""

    def __init__(self, path: Path | None) -> None:
        """Read the file.

        Raises:
            OSError, ValueError, InvalidPolicy: it cannot be used.
        """
        self._path = path
        self._seen = self._stamp()
        self._policies = Policies() if path is None else _read(path)
        self._error = ""

    @property
    def policies(self) -> Policies:
        return self._policies

    @property
    def error(self) -> str:
        return self._error

    async def watch(self, interval_s: float) -> None:
        """Look at the file again and again, for as long as the task lives. A file that is replaced,
        as Kubernetes replaces a mounted ConfigMap, is noticed too."""
        while self._path is not None:
            await asyncio.sleep(interval_s)
            stamp = self._stamp()
            if stamp == self._seen:
                continue
            self._seen = stamp
            try:
                self._policies = _read(self._path)
            except (OSError, ValueError, InvalidPolicy) as error:
                self._error = f"{self._path.name}: {error}"
                log.warning("the policy file cannot be used", error=self._error)
            except Exception:  # nobody foresaw: those from before count, as they do in any case
                self._error = f"{self._path.name}: something unforeseen is wrong with it"
                log.exception("the policy file cannot be used")
            else:
                self._error = ""
                log.info("policies read", file=str(self._path))

    def _stamp(self) -> tuple[int, int, int] | None:
        if self._path is None:
            return None
        try:
            stat = self._path.stat()
        except OSError:
            return None
        return stat.st_mtime_ns, stat.st_size, stat.st_ino


def _read(path: Path) -> Policies:
    with path.open("rb") as file:
        return Policies.parse(tomllib.load(file))

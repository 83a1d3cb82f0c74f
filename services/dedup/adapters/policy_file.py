"""Policies from a TOML file, reloaded when it changes.

    [cluster]
    enabled = true

    [namespace."public/default"]
    producer_inactivity_timeout_minutes = 60

    [topic."public/default/orders"]
    max_producers = 50
    on_full = "refuse"

If the file becomes unreadable or invalid, the last valid policies stay in force, and each topic's
status has the error.
"""

import tomllib
from collections.abc import Callable
from pathlib import Path

import structlog

from seqgate.services.dedup.core.policy import InvalidPolicy, Policies
from seqgate.watched import LOOK_INTERVAL_S, Watched

log = structlog.get_logger()


class PolicyFile:
    """See dedup.ports.GivenPolicies. Without a file, the built-in defaults apply."""

    def __init__(self, path: Path | None, interval_s: float = LOOK_INTERVAL_S) -> None:
        """
        Args:
            path: the file; None: there is none.
            interval_s: the shortest interval between checks for changes, which happen on use.

        Raises:
            OSError, ValueError: the file is unreadable or invalid.
        """
        self._error = ""
        self._get: Callable[[], Policies]
        if path is None:
            defaults = Policies()
            self._get = lambda: defaults
        else:
            file, self._name = path, path.name
            self._get = Watched(
                [file], lambda: _read(file), self._changed, interval_s=interval_s
            ).get

    @property
    def policies(self) -> Policies:
        return self._get()

    @property
    def error(self) -> str:
        self._get()
        return self._error

    def _changed(self, error: str) -> None:
        self._error = f"{self._name}: {error}" if error else ""
        if error:
            log.warning("policy file rejected, keeping the previous policies", error=self._error)
        else:
            log.info("policy file loaded", file=self._name)


def _read(path: Path) -> Policies:
    try:
        with path.open("rb") as file:
            return Policies.parse(tomllib.load(file))
    except InvalidPolicy as error:
        raise ValueError(error.message) from error
    except (OSError, ValueError):
        raise
    except Exception as error:  # such as a file nested too deeply
        log.exception("unexpected error in the policy file")
        raise ValueError("unexpected error, see the log") from error

"""A stack whose services die at given points."""

import sys
from collections.abc import Mapping
from pathlib import Path
from random import Random

from seqgate.dev.stack import Stack
from tests.support.application import Application
from tests.support.crash_points import ORDER, REPLAY_PAGE, Order

REPLAY_PAGE_ENTRIES = 40

CRASHING = ("dedup", "ledger", "dispatcher")
"""The services that execute orders."""

NO_SNAPSHOTS = "[cluster]\nsnapshot_entries = 0\nsnapshot_interval_s = 0\n"
"""Makes a replay as long as the log, so that orders can hit it."""


class World:
    """A stack, with applications that publish to it."""

    def __init__(
        self,
        folder: Path,
        *,
        ports: Mapping[str, int] | None = None,
        policies: str = NO_SNAPSHOTS,
        **environment: str,
    ) -> None:
        self.orders = {name: folder / f"order-{name}" for name in CRASHING}
        commands = {}
        for service, file in self.orders.items():
            module = [sys.executable, "-m", "tests.support.crash_points", service]
            commands[service] = ["env", f"{ORDER}={file}", *module]
        self.stack = Stack(
            folder,
            commands=commands,
            ports=ports,
            environment={REPLAY_PAGE: str(REPLAY_PAGE_ENTRIES), **environment},
        )
        self._topics = 0
        folder.mkdir(parents=True, exist_ok=True)
        self.stack.policy_file.write_text(policies)

    def application(self, seed: int, *, ledger: str | None = None) -> Application:
        """An application with its own topic."""
        self._topics += 1
        return Application(
            ledger or self.stack.target("ledger"),
            self.stack.address("dedup"),
            f"public/default/faults-{self._topics}",
            Random(seed),
        )

    def order(self, service: str, order: Order) -> None:
        order.give(self.orders[service])

    def pid(self, name: str) -> int:
        """The id of a process."""
        pids = self.stack.endpoints["pids"]
        assert isinstance(pids, dict)
        return int(pids[name])

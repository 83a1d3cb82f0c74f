"""The processes of the applications: started, killed, started again, and ended."""

import asyncio
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from signal import Signals
from typing import Final

from tools.stack.child import Child, tell
from tools.stack.stack import Stack
from tools.torture.roles import Application

KILLED_S: Final = 10.0
"""How long a process may take to be gone after SIGKILL."""


class Applications:
    """See the module."""

    def __init__(self, folder: Path, cast: Mapping[str, Application]) -> None:
        self.cast = cast
        self._folder = folder
        self._processes: dict[str, Child] = {}
        self._finishing: set[str] = set()
        (folder / "logs").mkdir(parents=True, exist_ok=True)

    async def start(self, name: str) -> None:
        """Start one; it goes on from its journals."""
        told = self._folder / f"{name}.json"
        told.write_text(json.dumps(self.cast[name].to_json()))
        command = [sys.executable, "-m", "tools.torture.application", str(told)]
        with self.log(name).open("ab") as log:
            self._processes[name] = await Stack.start_process(command, log.fileno(), os.environ)

    def log(self, name: str) -> Path:
        """What one writes."""
        return self._folder / "logs" / f"{name}.log"

    def signal(self, name: str, number: Signals) -> None:
        """Send one a signal, if it runs."""
        if name in self._processes:
            tell(self._processes[name], number)

    async def kill(self, name: str) -> None:
        """SIGKILL one, and return when it is gone."""
        process = self._processes.pop(name, None)
        if process is not None:
            tell(process, Signals.SIGKILL)
            async with asyncio.timeout(KILLED_S):
                await process.wait()

    def ended(self) -> dict[str, int]:
        """Those that ended without having been told to, with their exit statuses. They are
        forgotten."""
        found = {
            name: process.returncode
            for name, process in self._processes.items()
            if process.returncode is not None and name not in self._finishing
        }
        for name in found:
            del self._processes[name]
        return found

    async def finish(self, name: str, within_s: float) -> int | None:
        """Let one end in good order; its exit status, or None when it took too long and was
        killed."""
        process = self._processes.get(name)
        if process is None:
            return None
        self._finishing.add(name)
        tell(process, Signals.SIGTERM)
        try:
            async with asyncio.timeout(within_s):
                return await process.wait()
        except TimeoutError:
            return None
        finally:
            await self.kill(name)
            self._finishing.discard(name)

    async def kill_all(self) -> None:
        """End everything."""
        for name in list(self._processes):
            self.signal(name, Signals.SIGCONT)
            await self.kill(name)

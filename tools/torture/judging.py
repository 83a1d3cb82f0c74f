"""Gathers the evidence and runs every checker on it."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tools.stack.journal import Line, lines, path_of
from tools.torture.cast import Cast
from tools.torture.delivery_checker import Subscription, check_deliveries
from tools.torture.evidence import (
    Log,
    Progress,
    place_of,
    progress,
    progress_by_dispatcher,
    read_letters,
    read_log,
    with_trimmed,
)
from tools.torture.log_checker import check_log, check_reader
from tools.torture.roles import ConsumerRole, ProducerRole, reader_of
from tools.torture.settling import explained
from tools.torture.shown import Services
from tools.torture.violation import Violation

LOOK_S: Final = 0.5


class Judge:
    def __init__(self, cast: Cast, folder: Path, services: Services) -> None:
        """`folder` has the journals."""
        self._cast = cast
        self._folder = folder
        self._ledger, self._dispatcher, self._cursor = services

    async def progress(self, topic: str, subscription: str) -> Progress:
        if self._cursor.address:
            return await progress(self._cursor, topic, subscription)
        return await progress_by_dispatcher(self._dispatcher, topic, subscription)

    async def explain(self, stuck: Sequence[tuple[str, str]]) -> list[Violation]:
        found = []
        for topic, subscription in stuck:
            log = await read_log(self._ledger, topic)
            reached = await self.progress(topic, subscription)
            violation = await explained(self._dispatcher, log, subscription, reached)
            if violation is not None:
                found.append(violation)
        return found

    async def wait_for_readers(self, within_s: float) -> list[Violation]:
        """Wait until readers have read everything. Those that take too long are violations."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + within_s
        found = []
        for topic in self._cast.topics:
            log = await read_log(self._ledger, topic)
            last = log.messages[-1].place if log.messages else None
            while last is not None:
                read = [line for line in self._of(reader_of(topic)) if line["e"] == "read"]
                if read and place_of(read[-1]["id"]) >= last:
                    break
                if loop.time() > deadline_s:
                    at = read[-1]["id"] if read else "nothing"
                    found.append(Violation("LAGGING", topic, f"read {at}, the log ends at {last}"))
                    break
                await asyncio.sleep(LOOK_S)
        return found

    async def verdict(self) -> list[Violation]:
        found = self._surprises()
        for topic in self._cast.topics:
            log = await read_log(self._ledger, topic)
            read = self._of(reader_of(topic))
            with_trimmed(log, read)
            producers = {
                role.name: role
                for role in self._cast.roles
                if isinstance(role, ProducerRole) and role.topic == topic
            }
            found += check_log(log, producers, {name: self._of(name) for name in producers})
            found += check_reader(log, read)
            for name in sorted(name for where, name in self._cast.subscriptions if where == topic):
                found += check_deliveries(log, await self._subscription(log, name))
        return found

    async def _subscription(self, log: Log, name: str) -> Subscription:
        roles = [
            role
            for role in self._cast.roles
            if isinstance(role, ConsumerRole)
            and (role.topic, role.subscription) == (log.topic, name)
        ]
        return Subscription(
            name,
            roles[0].type,
            {role.name: self._of(role.name) for role in roles},
            await self.progress(log.topic, name),
            await read_letters(self._ledger, f"{log.topic}-{name}-DLQ"),
            self._cast.filtered.get((log.topic, name)),
        )

    def _surprises(self) -> list[Violation]:
        return [
            Violation("SURPRISED", role.name, line["what"], line["t"])
            for role in self._cast.roles
            for line in self._of(role.name)
            if line["e"] == "surprise"
        ]

    def _of(self, role: str) -> list[Line]:
        return list(lines(path_of(self._folder, role)))

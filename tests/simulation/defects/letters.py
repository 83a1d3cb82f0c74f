"""Defects of dead letters."""

from typing import Any

from seqgate.services.dispatcher.core.effects import AfterDeadLetter, DeadLetter
from seqgate.services.dispatcher.letters.graveyard import Graveyard
from tests.simulation.defects import defect


@defect("F3", "a restart releases a long key that is held")
def forget_long_keys(patch: Any) -> None:
    def remembered(key: bytes) -> bytes:
        return key if len(key) <= 2_000 else b""

    patch.setattr("seqgate.services.dispatcher.letters.graveyard.remembered", remembered)


@defect("F4", "taking a subscription waits for its dead letter topic, and letters for each other")
def wait_for_letters(patch: Any) -> None:
    load = Graveyard.load

    async def load_and_publish(self: Graveyard, *durable: Any) -> Any:
        keys = await load(self, *durable)
        for position in self.begun:
            await self.bury(DeadLetter(position, b"", 0, AfterDeadLetter.CONTINUE))
        return keys

    async def bury(self: Graveyard, what: DeadLetter) -> bool:
        async with self._one_by_one:
            if what.position not in self._open:
                await self._number(what)
            for position in sorted(self._open.keys() - self._published):
                assert await self._publish(position)
                self._published.add(position)
            return True

    patch.setattr(Graveyard, "load", load_and_publish)
    patch.setattr(Graveyard, "bury", bury)


@defect("C1", "any publisher may use producer names of services")
def allow_names_of_services(patch: Any) -> None:
    patch.setattr("seqgate.services.ledger.rights.is_of_services", lambda producer: False)


@defect("F9", "a message that always fails is copied endlessly between dead letter topics")
def forget_generations(patch: Any) -> None:
    patch.setattr("seqgate.services.dispatcher.letters.graveyard._generation", lambda entry: 0)

"""A reader of the torture. It writes these lines:

read   a message's producer and sequence id, and the content of its payload
"""

import asyncio
from random import Random

from seqgate.client import EARLIEST, Client, MessageId, Reader
from tools.stack.journal import Journal, lines
from tools.torture.messages import read
from tools.torture.roles import ReaderRole, Work


class Reading(Work[ReaderRole]):
    def __init__(self, role: ReaderRole, client: Client, journal: Journal, random: Random) -> None:
        super().__init__(role, client, journal, random)
        self._last: MessageId | None = None
        for line in lines(journal.path):
            if line["e"] == "read":
                self._last = MessageId.parse(line["id"])

    async def run(self, over: asyncio.Event) -> None:
        reader = self._client.reader(
            self._role.topic, start=self._last or EARLIEST, inclusive=False
        )
        async with reader:
            await self._until(over, self._read(reader))

    async def _read(self, reader: Reader) -> None:
        async for message in reader:
            self._journal.write(
                "read",
                id=str(message.id),
                p=message.producer_name,
                s=message.sequence_id,
                u=read(message.payload).uid,
                key=message.key,
                at=message.append_time_ms,
            )
            self._last = message.id

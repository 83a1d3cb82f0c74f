"""A reader of the torture.

read   a message was read; its sequence id, its producer, and what its payload says
"""

import asyncio
from random import Random

from seqgate.client import EARLIEST, Client, MessageId
from tools.torture.journal import Journal, lines
from tools.torture.messages import read
from tools.torture.roles import ReaderRole


class Reading:
    """One role's work."""

    def __init__(self, role: ReaderRole, client: Client, journal: Journal, random: Random):
        del random
        self._role = role
        self._client = client
        self._journal = journal
        self._last: MessageId | None = None
        for line in lines(journal.path):
            if line["e"] == "read":
                self._last = MessageId.parse(line["id"])

    @property
    def is_finished(self) -> bool:
        """It may end whenever it is over."""
        return True

    async def run(self, over: asyncio.Event) -> None:
        """Read until it is over.

        Raises:
            SeqgateError: the reader ended; call again to go on.
        """
        reader = self._client.reader(
            self._role.topic, start=self._last or EARLIEST, inclusive=False
        )
        async with reader:
            ending = asyncio.create_task(over.wait())
            try:
                while not over.is_set():
                    reading = asyncio.create_task(reader.read())
                    await asyncio.wait([reading, ending], return_when=asyncio.FIRST_COMPLETED)
                    if not reading.done():
                        reading.cancel()
                        await asyncio.wait([reading])
                        return
                    message = reading.result()
                    assert message is not None
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
            finally:
                ending.cancel()

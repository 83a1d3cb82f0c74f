"""The reader for threads: takes what has arrived in one hand-over, and returns it one by one."""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import repeat
from typing import TypeVar

from seqgate.client._arguments import whole
from seqgate.client._assembler import DropReason
from seqgate.client._message import MANY_MESSAGES, Message
from seqgate.client._reader import Missed, Start
from seqgate.client._reader import Reader as AsyncioReader
from seqgate.client.blocking._portal import ClosedError, Held, Portal, close_when_dropped
from seqgate.errors import SeqgateError

T = TypeVar("T")


class SharedReader(AsyncioReader):
    """The asyncio reader, which a fork interrupts."""

    async def hang_up(self) -> None:
        self._drop_call()

    def call_again(self) -> None:
        """Nothing: the next read does."""


class Reader(Held[AsyncioReader]):
    """Reads one topic, message by message: `seqgate.client.Reader` for threads.

    Made by Client.reader, and used as an iterator and a context manager. Threads may share it; each
    message goes to one of them. Besides what the stream holds, it buffers the messages of one
    response.

        for message in reader:
            ...
    """

    def __init__(self, portal: Portal, held: AsyncioReader, owner: object) -> None:
        super().__init__(portal, held, owner)
        self._ready: deque[Message] = deque()
        self._arriving = asyncio.Lock()  # in the loop
        close_when_dropped(self, portal, held.close)

    @property
    def connection_error(self) -> SeqgateError | None:
        """Why there is no connection; None: it is connected, or the first attempt is under way."""
        return self._held.connection_error

    @property
    def topic(self) -> str:
        """The topic's full name."""
        return self._held.topic

    @property
    def dropped(self) -> Mapping[DropReason, int]:
        """See the asyncio Reader."""
        return self._portal.look(lambda: self._held.dropped)

    def __iter__(self) -> "Reader":
        return self

    def __next__(self) -> Message:
        """The next message. At the topic's end, waits if the reader follows, and otherwise ends the
        iteration. Raises the same as the asyncio Reader."""
        return self._take(1, _next)

    def read(self) -> Message | None:
        """The next message; None at the topic's end, if the reader does not follow. An interrupt
        loses no message."""
        return self._take(1, _first)

    def read_many(self, messages_max: int = MANY_MESSAGES) -> list[Message]:
        """Wait for a message, and return it with those that have arrived already, at most
        `messages_max`; nothing at the topic's end, if the reader does not follow. Raises the same
        as iterating."""
        messages_max = whole("messages_max", messages_max, 1)
        return self._take(messages_max, list)

    def _take(self, messages_max: int, returned: Callable[[list[Message]], T]) -> T:
        """What a function makes of the next messages; of none at the topic's end."""
        self._portal.check()
        ready, claim = self._ready, list[Message]()
        try:
            while not claim:
                with suppress(IndexError):  # one call into C
                    claim.extend(map(deque.popleft, repeat(ready, messages_max)))
                if not claim and not self._fill():
                    break
            return returned(claim)
        except BaseException:
            ready.extendleft(claim[::-1])
            raise

    def skip(self) -> Missed | None:
        """Continue after the range whose error the reader raised: see the asyncio Reader."""
        return self._portal.call(self._held.skip)

    def seek(self, start: Start, *, inclusive: bool = True) -> None:
        """Continue at another place: at a message, or after it."""
        self._portal.run(self._seek, start, inclusive=inclusive)

    def has_message_available(self) -> bool:
        """Whether `read` now returns a message, or raises, without waiting for one to be published.
        See the asyncio Reader."""
        self._portal.check()
        return bool(self._ready) or self._portal.run(self._held.has_message_available)

    def close(self) -> None:
        """End the iteration and the stream."""
        if not self._portal.is_gone:
            self._portal.run(self._close)

    def __enter__(self) -> "Reader":
        self._portal.check()
        return self

    def __exit__(self, *rest: object) -> None:
        self.close()

    def _fill(self) -> bool:
        """Wait for messages; False at the topic's end, or when the reader is closed."""
        while not self._portal.is_gone:
            # Otherwise a fork interrupted the call.
            with suppress(ClosedError):
                return self._portal.run(self._arrive)
        return False

    async def _arrive(self) -> bool:
        # They are here before anything can interrupt: an interrupted thread loses none.
        async with self._arriving:
            if not self._ready:
                self._ready.extend(await self._held.read_many())
            return bool(self._ready)

    async def _seek(self, start: Start, *, inclusive: bool) -> None:
        await self._held.seek(start, inclusive=inclusive)
        self._ready.clear()

    async def _close(self) -> None:
        await self._held.close()
        self._ready.clear()


def _first(messages: list[Message]) -> Message | None:
    return messages[0] if messages else None


def _next(messages: list[Message]) -> Message:
    if not messages:
        raise StopIteration
    return messages[0]

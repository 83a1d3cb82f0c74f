"""`seqgate consume`: a subscription's messages, each acknowledged when it is written."""

import asyncio
from collections.abc import Coroutine
from enum import StrEnum
from typing import Annotated, Any, Final

import typer

from seqgate.cli._command import Run, Topic, topic_name
from seqgate.cli._failure import DONE, REFUSED
from seqgate.cli._left_out import LeftOut, tell_left_out
from seqgate.cli._message import Listing
from seqgate.cli._names import subscription_name
from seqgate.cli._place import PLACE_HELP, place
from seqgate.cli._service import client as client_of
from seqgate.cli._service import reaching
from seqgate.client import Consumer, SubscriptionType
from seqgate.client._subscribing import Place
from seqgate.errors import CorruptMessageError
from seqgate.types import TopicName

QUEUE_MESSAGES: Final = 1_000
"""How many messages are taken before they are written."""


class Type(StrEnum):
    """Who gets a subscription's messages."""

    KEY_SHARED = "key-shared"
    SHARED = "shared"
    EXCLUSIVE = "exclusive"


def consume(
    run: Run,
    topic: Topic,
    subscription: Annotated[
        str, typer.Argument(metavar="SUBSCRIPTION", help="The subscription.", show_default=False)
    ],
    *,
    count: Annotated[
        int | None,
        typer.Option("--count", "-n", metavar="MAX", min=1, help="Stop after this many messages."),
    ] = None,
    kind: Annotated[
        Type,
        typer.Option(
            "--type",
            help="How messages are distributed; must be the same for all connected consumers.",
        ),
    ] = Type.KEY_SHARED,
    name: Annotated[
        str | None,
        typer.Option(
            "--name",
            metavar="NAME",
            help="The consumer's name. A consumer that reconnects under its name keeps its keys.",
        ),
    ] = None,
    start: Annotated[
        str | None,
        typer.Option(
            "--start",
            metavar="PLACE",
            help="Create the subscription at this place if it does not exist: "
            f"{PLACE_HELP} "
            "Without this option it must exist.",
            show_default=False,
        ),
    ] = None,
) -> Coroutine[Any, Any, int]:
    """Consume from a subscription: print messages as `read` does, and acknowledge each one once
    it is printed.

    Waits for new messages. When the command ends, also on an interrupt, all acknowledgements are
    durable, and unprinted messages are delivered to other consumers.
    """
    return _consume(
        run,
        topic_name(topic),
        subscription_name(subscription),
        SubscriptionType[kind.name],
        name=name,
        start=None if start is None else place("--start", start),
        count=count,
    )


async def _consume(
    run: Run,
    topic: TopicName,
    subscription: str,
    kind: SubscriptionType,
    *,
    name: str | None,
    start: Place | None,
    count: int | None,
) -> int:
    settings = run.settings
    target = settings.dispatcher.value
    left_out = LeftOut()
    async with client_of(settings, target) as client:
        consumer = client.consumer(
            str(topic),
            subscription,
            type=kind,
            name=name,
            start=start,
            receiver_queue=min(count or QUEUE_MESSAGES, QUEUE_MESSAGES),
            on_dropped=left_out.add,
            open_timeout_s=settings.timeout_s,
        )
        with reaching("dispatcher", target):
            await consumer.open()
        taking = _Taking(run, consumer, left_out)
        try:
            return await taking.run(count)
        finally:
            await consumer.close(settings.timeout_s)
            taking.tell()


class _Taking:
    """Messages on their way to the output, and acknowledgements on theirs back."""

    def __init__(self, run: Run, consumer: Consumer, left_out: LeftOut) -> None:
        self._output = run.output
        self._consumer = consumer
        self._left_out = left_out
        self._listing = Listing(run.output, whole=True)
        self._settling: set[asyncio.Future[None]] = set()
        self._stale = 0

    async def run(self, count: int | None) -> int:
        """Take so many; None: for ever. Returns the exit code.

        Raises:
            OutputClosed: nobody reads the output. What could not be written is not acknowledged.
            SeqgateError: what ended the consumer.
        """
        code = DONE
        while count is None or count > 0:
            try:
                message = await self._consumer.receive()
            except CorruptMessageError as error:  # it was refused, and may come again
                self._output.error(error)
                code = REFUSED
                continue
            self._left_out.came(message)
            with self._consumer.processing(message):
                self._listing.add(message)
                settling = self._consumer.ack_nowait(message)
            self._settling.add(settling)
            settling.add_done_callback(self._settled)
            if count is not None:
                count -= 1
        return code

    def _settled(self, settling: "asyncio.Future[None]") -> None:
        if settling in self._settling:
            self._settling.remove(settling)
            self._stale += settling.cancelled() or settling.exception() is not None

    def tell(self) -> None:
        """Say what did not go as it should, once the consumer is closed."""
        for settling in list(self._settling):
            self._settled(settling)
        if self._stale:
            self._output.note(
                "STALE_TOKEN",
                f"{self._stale} messages were not acknowledged and will be delivered again",
                {"messages": self._stale},
            )
        tell_left_out(self._output, self._left_out)

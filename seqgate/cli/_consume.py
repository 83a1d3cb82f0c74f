"""`seqgate consume`: prints and acknowledges a subscription's messages."""

import asyncio
from enum import StrEnum
from functools import partial
from typing import Final

from seqgate.api.dispatcher.v1 import dispatcher_pb2 as pb
from seqgate.cli._arguments import COUNT_MAX, PLACE_HELP, Topic, place, subscription_name
from seqgate.cli._command import Run
from seqgate.cli._declared import argument, choice, option
from seqgate.cli._failure import DONE, REFUSED
from seqgate.cli._left_out import LeftOut, tell_left_out
from seqgate.cli._message import Listing
from seqgate.cli._report import waiting_shown
from seqgate.cli._service import client as client_of
from seqgate.cli._service import reaching, trouble_of
from seqgate.cli._wire import position
from seqgate.client import BreakerState, Consumer, SubscriptionType
from seqgate.client._subscribing import Place
from seqgate.errors import CorruptMessageError

QUEUE_MESSAGES: Final = 1_000
"""The most messages to receive before they are written."""


class Type(StrEnum):
    KEY_SHARED = "key-shared"
    SHARED = "shared"
    EXCLUSIVE = "exclusive"


async def consume(
    run: Run,
    topic: Topic,
    subscription: str = argument("SUBSCRIPTION", "The subscription.", parse=subscription_name),
    *,
    count: int | None = option(
        "MAX", "Stop after this many messages.", "--count", "-n", min=1, max=COUNT_MAX
    ),
    kind: Type = choice(
        "How messages are distributed; must be the same for all connected consumers.",
        "--type",
        default=Type.KEY_SHARED,
    ),
    name: str | None = option(
        "NAME", "The consumer's name. A consumer that reconnects under its name keeps its keys."
    ),
    start: Place | None = option(
        "PLACE",
        f"Create the subscription at this place if it does not exist: {PLACE_HELP} "
        "Without this option it must exist.",
        "--from",
        parse=partial(place, "--from"),
    ),
) -> int:
    """Consume from a subscription: print messages as `read` does, and acknowledge each one once it
    is printed.

    Waits for new messages, and says after a second why none comes; with --timeout, ends with 1 when
    none has come for so long. When the command ends, also on an interrupt, all acknowledgements are
    durable, and unprinted messages go to other consumers.
    """
    settings = run.settings
    target = settings.dispatcher.value
    left_out = LeftOut()
    async with client_of(settings, target) as client:
        consumer = client.consumer(
            topic,
            subscription,
            type=SubscriptionType[kind.name],
            name=name,
            start=start,
            receiver_queue=min(count or QUEUE_MESSAGES, QUEUE_MESSAGES),
            on_dropped=left_out.add,
            open_timeout_s=settings.timeout_s,
        )
        what = f"the dispatcher service at {target} to accept the consumer"
        with reaching("dispatcher", target), run.waits.on(what, partial(trouble_of, consumer)):
            await consumer.open()
        taking = _Taking(run, consumer, left_out)
        try:
            return await taking.run(count)
        finally:
            with run.waits.on("acknowledgements to be durable", partial(trouble_of, consumer)):
                await consumer.close(settings.timeout_s)
            taking.tell()


class _Taking:
    """Prints messages and acknowledges them once they are printed."""

    def __init__(self, run: Run, consumer: Consumer, left_out: LeftOut) -> None:
        self._run = run
        self._output = run.output
        self._consumer = consumer
        self._left_out = left_out
        self._listing = Listing(run.output, whole=True)
        self._settling: set[asyncio.Future[None]] = set()
        self._stale = 0

    async def run(self, count: int | None) -> int:
        """Receive `count` messages; None: no limit. Returns the exit code. If the output is closed
        (OutputClosed), messages not written are not acknowledged."""
        code = DONE
        what = f"messages of subscription {self._consumer.subscription}"
        while count is None or count > 0:
            try:
                async with self._run.waiting(what, self._because):
                    message = await self._consumer.receive()
            except CorruptMessageError as error:  # it was refused, and may be redelivered
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

    async def _because(self) -> str:
        """Why no message comes."""
        if trouble := trouble_of(self._consumer):
            return trouble
        if self._consumer.breaker_state is not BreakerState.CLOSED:
            return "too many in a row were refused, so that none is handed out for a while"
        call = self._run.services.call
        topic, name = self._consumer.topic, self._consumer.subscription
        report = await call(pb.ReportRequest(topic=topic, subscription=name, max_keys=1))
        text = waiting_shown(report)
        if not report.keys or not report.keys[0].HasField("oldest"):
            return text
        oldest = report.keys[0].oldest
        asked = pb.ExplainRequest(topic=topic, subscription=name, position=oldest)
        explained = await call(asked)
        return f"{text}; the oldest is {position(oldest)}: {explained.reasons[0].text}"

    def _settled(self, settling: "asyncio.Future[None]") -> None:
        if settling in self._settling:
            self._settling.remove(settling)
            self._stale += settling.cancelled() or settling.exception() is not None

    def tell(self) -> None:
        """Report stale acknowledgements and skipped chunks, once the consumer is closed."""
        for settling in list(self._settling):
            self._settled(settling)
        if self._stale:
            self._output.note(
                "STALE_TOKEN",
                f"{self._stale} messages were not acknowledged and will be delivered again",
                {"messages": self._stale},
            )
        tell_left_out(self._output, self._left_out)

"""`seqgate read`: a topic's messages."""

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Annotated, Any

import typer

from seqgate.api.ledger.v1 import ledger_pb2 as pb
from seqgate.cli._command import Run, topic_name
from seqgate.cli._failure import DONE, WrongUsage
from seqgate.cli._left_out import LeftOut, tell_left_out
from seqgate.cli._message import Listing
from seqgate.cli._service import client as client_of
from seqgate.cli._service import ledger_service, reaching
from seqgate.client import EARLIEST, LATEST, Message, MessageId, Start
from seqgate.errors import UnavailableError
from seqgate.types import TopicName


def read(
    run: Run,
    topic: Annotated[str, typer.Argument(metavar="TOPIC", help="The topic.", show_default=False)],
    *,
    start: Annotated[
        str,
        typer.Option(
            "--from",
            metavar="PLACE",
            help="earliest, latest, or a message's id. That of a large message has a semicolon, "
            "and stands in quotes.",
        ),
    ] = EARLIEST,
    exclusive: Annotated[
        bool, typer.Option("--exclusive", help="Start after the message of that id.")
    ] = False,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Wait for messages that are yet to come.")
    ] = False,
    count: Annotated[
        int | None,
        typer.Option("-n", metavar="MAX", min=1, help="End after so many messages."),
    ] = None,
) -> Coroutine[Any, Any, int]:
    """Read a topic's messages, in order.

    As JSON a message's payload is text where it is valid UTF-8, and payload_base64 where it is not.

    A large message comes once, whole, at the place of its last chunk. When chunks were left out
    because they make no message, a line on standard error says so at the end, with the reasons.
    """
    place = _place(start)
    if exclusive and not isinstance(place, MessageId):
        raise WrongUsage("--exclusive needs --from with a message's id")
    return _read(run, topic_name(topic), place, inclusive=not exclusive, follow=follow, count=count)


async def _read(
    run: Run, topic: TopicName, start: Start, *, inclusive: bool, follow: bool, count: int | None
) -> int:
    async with ledger_service(run.settings) as service:
        await service.call("GetTopic", pb.GetTopicRequest(topic=str(topic)))
    listing = Listing(run.output, whole=True)
    left_out = LeftOut()
    found = messages(run, topic, start, inclusive=inclusive, follow=follow, left_out=left_out)
    try:
        async with aclosing(found):
            async for message in found:
                listing.add(message)
                if count is not None:
                    count -= 1
                    if count == 0:
                        break
    finally:
        tell_left_out(run.output, left_out)
    return DONE


async def messages(
    run: Run,
    topic: TopicName,
    start: Start,
    *,
    inclusive: bool = True,
    follow: bool = False,
    left_out: LeftOut | None = None,
) -> AsyncGenerator[Message, None]:
    """A topic's messages; `left_out` counts the chunks that are not among them.

    Raises:
        UnavailableError: no message, and no end, within the time limit. Who follows waits on.
        SeqgateError: the service refuses.
    """
    target = run.settings.ledger.value
    limit_s = None if follow else run.settings.timeout_s
    async with (
        client_of(run.settings) as client,
        client.reader(
            str(topic),
            start=start,
            inclusive=inclusive,
            follow=follow,
            on_dropped=None if left_out is None else left_out.add,
        ) as reader,
    ):
        while True:
            with reaching("ledger", target):
                try:
                    async with asyncio.timeout(limit_s):
                        message = await reader.read()
                except TimeoutError:
                    raise UnavailableError("nothing was read in time") from None
            if message is None:
                return
            if left_out is not None:
                left_out.came(message)
            yield message


def _place(text: str) -> Start:
    match text:
        case "earliest":
            return EARLIEST
        case "latest":
            return LATEST
    try:
        return MessageId.parse(text)
    except ValueError:
        raise WrongUsage(
            "--from is earliest, latest, or a message's id (LEDGER:ENTRY, or as read shows it)",
            details={"from": text},
        ) from None

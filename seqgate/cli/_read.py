"""`seqgate read`: a topic's messages."""

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Annotated, Any, NamedTuple

import typer

from seqgate.api.ledger.v1 import ledger_pb2 as pb
from seqgate.cli._command import Run, Topic, topic_name
from seqgate.cli._failure import DONE, WrongUsage, reason_of
from seqgate.cli._left_out import LeftOut, tell_left_out
from seqgate.cli._message import Listing
from seqgate.cli._output import Output
from seqgate.cli._service import client as client_of
from seqgate.cli._service import ledger_service, reaching
from seqgate.client import EARLIEST, LATEST, Message, MessageId, Missed, Start
from seqgate.errors import DataLossError, MessageTooLargeError, UnavailableError
from seqgate.types import TopicName


def read(
    run: Run,
    topic: Topic,
    *,
    start: Annotated[
        str,
        typer.Option(
            "--from",
            metavar="PLACE",
            help="earliest, latest, or a message id. Quote the id of a large message: it has a "
            "and stands in quotes.",
        ),
    ] = EARLIEST,
    exclusive: Annotated[
        bool, typer.Option("--exclusive", help="Start after the message with that id.")
    ] = False,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Wait for new messages.")] = False,
    skip_damaged: Annotated[
        bool,
        typer.Option("--skip-damaged", help="Skip messages that cannot be read."),
    ] = False,
    count: Annotated[
        int | None,
        typer.Option("-n", metavar="MAX", min=1, help="Stop after this many messages."),
    ] = None,
) -> Coroutine[Any, Any, int]:
    """Print a topic's messages in order.

    In JSON, a payload that is valid UTF-8 is in payload, any other in payload_base64.

    A large message is printed once, at the place of its last chunk. If chunks of incomplete
    messages were skipped, a line on standard error says so at the end, with the reasons.

    Messages that were trimmed before they were read are reported on standard error, and so are
    unreadable ones with --skip-damaged; without it the first of them ends the command.
    """
    place = _place(start)
    if exclusive and not isinstance(place, MessageId):
        raise WrongUsage("--exclusive requires --from with a message id")
    what = _What(place, inclusive=not exclusive, follow=follow, skip_damaged=skip_damaged)
    return _read(run, topic_name(topic), what, count)


class _What(NamedTuple):
    """Which messages are read, and what ends that."""

    start: Start
    inclusive: bool = True
    follow: bool = False
    skip_damaged: bool = False


async def _read(run: Run, topic: TopicName, what: _What, count: int | None) -> int:
    async with ledger_service(run.settings) as service:
        await service.call("GetTopic", pb.GetTopicRequest(topic=str(topic)))
    listing = Listing(run.output, whole=True)
    left_out = LeftOut()
    found = messages(run, topic, **what._asdict(), left_out=left_out)
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
    skip_damaged: bool = False,
    left_out: LeftOut | None = None,
) -> AsyncGenerator[Message, None]:
    """A topic's messages; `left_out` counts the chunks that are not among them. What is missing is
    said on standard error.

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
            on_missed=lambda missed: _tell(run.output, missed),
        ) as reader,
    ):
        while True:
            with reaching("ledger", target):
                try:
                    async with asyncio.timeout(limit_s):
                        message = await reader.read()
                except TimeoutError:
                    raise UnavailableError("the ledger service did not answer in time") from None
                except (DataLossError, MessageTooLargeError):
                    missed = reader.skip() if skip_damaged else None
                    if missed is None:
                        raise
                    _tell(run.output, missed)
                    continue
            if message is None:
                return
            if left_out is not None:
                left_out.came(message)
            yield message


def _tell(output: Output, missed: Missed) -> None:
    """Say on standard error what is not given out, and why."""
    first, last = (f"{each.ledger_id}:{each.entry_id}" for each in (missed.first, missed.last))
    error = missed.error
    text = str(error) if first in str(error) else f"{error}: {first} to {last}"
    output.note(reason_of(error), text, {"first": first, "last": last})


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
            "--from must be earliest, latest, or a message id (LEDGER:ENTRY, or as printed by "
            "read)",
            details={"from": text},
        ) from None

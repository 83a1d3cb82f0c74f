"""`seqgate read`: prints a topic's messages."""

import asyncio
import sys
from collections.abc import AsyncGenerator
from contextlib import aclosing, nullcontext
from datetime import datetime
from functools import partial

from seqgate.api.ledger.v1 import ledger_pb2 as pb
from seqgate.cli._arguments import COUNT_MAX, PLACE_HELP, Topic, place
from seqgate.cli._command import Run
from seqgate.cli._declared import flag, option
from seqgate.cli._failure import WrongUsage, reason_of
from seqgate.cli._left_out import LeftOut, tell_left_out
from seqgate.cli._message import Listing
from seqgate.cli._output import Output
from seqgate.cli._progress import Progress
from seqgate.cli._service import client as client_of
from seqgate.cli._service import reaching, trouble_of
from seqgate.cli._wire import position
from seqgate.client import EARLIEST, Message, MessageId, Missed, Reader, Start
from seqgate.client._log import check_place, position_at
from seqgate.client._subscribing import Place
from seqgate.errors import DataLossError, MessageTooLargeError, UnavailableError
from seqgate.types import Position


async def read(
    run: Run,
    topic: Topic,
    *,
    start: Start = option(
        "PLACE",
        f"{PLACE_HELP} Quote the id of a large message: it contains a semicolon.",
        "--from",
        default=EARLIEST,
        parse=partial(place, "--from"),
    ),
    to: Place | None = option(
        "PLACE",
        "Stop after the message with this id, or before the first message stored at this time.",
        parse=partial(place, "--to"),
    ),
    exclusive: bool = flag("Start after the message with that id."),
    follow: bool = flag(
        "Wait for new messages, with --timeout no longer than that for each.", "--follow", "-f"
    ),
    skip_damaged: bool = flag("Skip messages that cannot be read."),
    count: int | None = option("MAX", "Stop after this many messages.", "-n", min=1, max=COUNT_MAX),
) -> None:
    """Print a topic's messages in order.

    In JSON, a payload that is valid UTF-8 is in payload, any other in payload_base64.

    A large message is printed once, at the place of its last chunk. Skipped chunks of incomplete
    messages are reported on standard error at the end, with the reasons.

    Messages that were trimmed before they were read are reported on standard error, and so are
    unreadable ones with --skip-damaged; without it the first of them ends the command.
    """
    if exclusive and not isinstance(start, MessageId):
        raise WrongUsage("--exclusive requires --from with a message id")
    if follow and to is not None:
        raise WrongUsage("--to and --follow are mutually exclusive")
    found_topic = (await run.services.call(pb.GetTopicRequest(topic=topic))).topic
    last = position(found_topic.last) if found_topic.HasField("last") else None
    check_place(start, last, field="--from")
    if to is not None:
        check_place(to, last, field="--to")
    end = await _end(run, topic, to)
    listing = Listing(run.output, whole=True)
    left_out = LeftOut()
    found = messages(
        run,
        topic,
        start,
        inclusive=not exclusive,
        follow=follow,
        skip_damaged=skip_damaged,
        left_out=left_out,
    )
    is_all = start == EARLIEST and end is None
    total = count or (found_topic.messages if is_all else None)
    progress = Progress("read", messages=total, is_patient=True)
    is_seen = follow or sys.stdout.isatty()  # by the messages themselves
    try:
        with nullcontext() if is_seen else progress:
            async with aclosing(_first(found, count, end)) as wanted:
                async for message in wanted:
                    listing.add(message)
                    progress.add(messages=1)
    finally:
        tell_left_out(run.output, left_out)


_Place = tuple[Position, int]
"""A message's entry, and its index in a batch; -1: it is no batch."""


async def _end(run: Run, topic: str, to: Place | None) -> _Place | None:
    """The first place that is not printed; None: no limit."""
    match to:
        case MessageId(batch_index=index) if index >= 0:
            return to.position, index + 1
        case MessageId():
            return Position(to.ledger_id, to.entry_id + 1), -1
        case datetime():
            found = await position_at(run.services, topic, to)
            return None if found is None else (found, -1)
        case "earliest":
            return Position(0, 0), -1
        case _:
            return None


async def _first(
    found: AsyncGenerator[Message, None], count: int | None, end: _Place | None
) -> AsyncGenerator[Message, None]:
    """The first `count` messages, as far as they are before `end`."""
    left = count
    async with aclosing(found):
        async for message in found:
            if end is not None and (message.id.position, message.id.batch_index) >= end:
                return
            yield message
            if left is not None:
                left -= 1
                if not left:
                    return


async def messages(
    run: Run,
    topic: str,
    start: Start,
    *,
    inclusive: bool = True,
    follow: bool = False,
    skip_damaged: bool = False,
    left_out: LeftOut | None = None,
) -> AsyncGenerator[Message, None]:
    """A topic's messages; `left_out` counts chunks that make none. Missing messages are reported on
    standard error.

    Raises:
        UnavailableError: neither a message nor the end arrived in time; not with `follow`.
        WaitTimedOut: no message arrived within --timeout; only with `follow`.
        SeqgateError: the service refused.
    """
    target = run.settings.ledger.value
    what = f"messages of topic {topic}" if follow else f"the ledger service at {target} to answer"
    async with (
        client_of(run.settings) as client,
        client.reader(
            topic,
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
                    message = await _next(run, reader, what, follow=follow)
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


async def _next(run: Run, reader: Reader, what: str, *, follow: bool) -> Message | None:
    def because() -> str:
        return trouble_of(reader) or ("none is left in the topic" if follow else "")

    if follow:
        async with run.waiting(what, because):
            return await reader.read()
    try:
        with run.waits.on(what, because):
            async with asyncio.timeout(run.settings.timeout_s):
                return await reader.read()
    except TimeoutError:
        raise UnavailableError("the ledger service did not answer in time") from None


def _tell(output: Output, missed: Missed) -> None:
    first, last = (f"{each.ledger_id}:{each.entry_id}" for each in (missed.first, missed.last))
    error = missed.error
    text = str(error) if first in str(error) else f"{error}: {first} to {last}"
    output.note(reason_of(error), text, {"first": first, "last": last})

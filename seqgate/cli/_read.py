"""`seqgate read`: prints a topic's messages."""

import asyncio
import sys
from collections.abc import AsyncGenerator
from contextlib import aclosing, nullcontext
from datetime import datetime
from functools import partial
from typing import Final

from seqgate.api.ledger.v1 import ledger_pb2 as pb
from seqgate.cli._arguments import PLACE_HELP, Topic, place
from seqgate.cli._command import Run
from seqgate.cli._declared import flag, option
from seqgate.cli._failure import WrongUsage, reason_of
from seqgate.cli._left_out import LeftOut, tell_left_out
from seqgate.cli._message import Listing
from seqgate.cli._output import Output
from seqgate.cli._progress import Progress
from seqgate.cli._service import client as client_of
from seqgate.cli._service import reaching
from seqgate.cli._wire import position
from seqgate.client import EARLIEST, Message, MessageId, Missed, Start
from seqgate.client._subscribing import Place, start_to_wire
from seqgate.errors import DataLossError, MessageTooLargeError, UnavailableError
from seqgate.types import Position

_WHOLE_BATCH: Final = 2**31
"""Beyond the index of any message in a batch."""


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
    follow: bool = flag("Wait for new messages.", "--follow", "-f"),
    skip_damaged: bool = flag("Skip messages that cannot be read."),
    count: int | None = option("MAX", "Stop after this many messages.", "-n", min=1),
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
        async with aclosing(found):
            with nullcontext() if is_seen else progress:
                async for message in found:
                    if end is not None and _place_of(message.id) > end:
                        break
                    listing.add(message)
                    progress.add(messages=1)
                    if count is not None:
                        count -= 1
                        if count == 0:
                            break
    finally:
        tell_left_out(run.output, left_out)


_Place = tuple[Position, int]
"""A message's entry, and its index in a batch."""


async def _end(run: Run, topic: str, to: Place | None) -> _Place | None:
    """The last place to print; None: no limit."""
    match to:
        case MessageId():
            return to.position, _WHOLE_BATCH if to.batch_index < 0 else to.batch_index
        case datetime():
            asked = start_to_wire(to).time
            request = pb.FindPositionRequest(topic=topic, append_time=asked)
            answer = await run.services.call(request)
            return (position(answer.position), -2) if answer.HasField("position") else None
        case "earliest":
            return Position(0, 0), -2
        case _:
            return None


def _place_of(message_id: MessageId) -> _Place:
    return message_id.position, message_id.batch_index


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
        SeqgateError: the service refused.
    """
    target = run.settings.ledger.value
    limit_s = None if follow else run.settings.timeout_s
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
    first, last = (f"{each.ledger_id}:{each.entry_id}" for each in (missed.first, missed.last))
    error = missed.error
    text = str(error) if first in str(error) else f"{error}: {first} to {last}"
    output.note(reason_of(error), text, {"first": first, "last": last})

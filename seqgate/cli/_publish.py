"""`seqgate publish`: lines in, messages out, a receipt for each.

Two tasks share the work. One reads lines and hands messages to the producer, without waiting for
receipts; the other waits for them, in the order of the lines, and tells what became of each
message. Between them is only so much room.

A message that is refused does not keep the others from being stored. But after a time-out, or when
somebody has taken the name over, nothing more is sent: what followed would overtake what was not
stored, and bar its way for ever.
"""

import asyncio
import sys
from collections.abc import Coroutine, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass
from io import FileIO
from typing import Annotated, Any, Final, NamedTuple

import typer

from seqgate.cli._command import Run, topic_name
from seqgate.cli._failure import DONE, REFUSED, InvalidInput, OutputFailed, WrongUsage
from seqgate.cli._lines import numbered_lines
from seqgate.cli._message import parse
from seqgate.cli._output import Output, OutputClosed
from seqgate.cli._service import reaching
from seqgate.client import Batching, Compression, Producer, Receipt, connect
from seqgate.errors import (
    FencedError,
    InvalidRequestError,
    MixedSequenceIdsError,
    ProducerClosedError,
    SendTimeoutError,
    SeqgateError,
    UnavailableError,
)
from seqgate.types import (
    SEQUENCE_ID_MAX,
    InvalidNameError,
    TopicName,
    check_producer_name,
)

PENDING_MAX: Final = 5_000
"""How many messages wait for their receipt at most."""

PENDING_BYTES_MAX: Final = 64 * 1024 * 1024
"""How many bytes of lines they have at most; one line always has room."""

_ENDING: Final = (SendTimeoutError, UnavailableError, FencedError, ProducerClosedError)
"""After these nothing more is sent."""


class Room:
    """What is left of PENDING_MAX and PENDING_BYTES_MAX."""

    def __init__(self) -> None:
        self._messages = 0
        self._size_bytes = 0
        self._given_back = asyncio.Event()

    async def take(self, size_bytes: int) -> None:
        """Take room for a message, as soon as there is."""
        while self._messages >= PENDING_MAX or (
            self._messages and self._size_bytes + size_bytes > PENDING_BYTES_MAX
        ):
            self._given_back.clear()
            await self._given_back.wait()
        self._messages += 1
        self._size_bytes += size_bytes

    def give_back(self, size_bytes: int) -> None:
        """Give the room of a message back."""
        self._messages -= 1
        self._size_bytes -= size_bytes
        self._given_back.set()


class _Sent(NamedTuple):
    """A message that waits for its receipt."""

    line: int
    size_bytes: int
    receipt: asyncio.Future[Receipt]


@dataclass(frozen=True, slots=True)
class _Options:
    name: str | None
    takeover: bool
    batching: Batching | None
    compression: Compression
    initial_sequence_id: int | None


def publish(
    run: Run,
    topic: Annotated[
        str,
        typer.Argument(
            metavar="TOPIC", help="The topic; created if policy allows.", show_default=False
        ),
    ],
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="Where the lines are; -: standard input.")
    ] = "-",
    *,
    producer: Annotated[
        str | None,
        typer.Option(
            "--producer",
            metavar="NAME",
            help="The producer's name, by which duplicates are recognised. Without one the "
            "service assigns a name that nobody has had.",
        ),
    ] = None,
    takeover: Annotated[
        bool, typer.Option("--takeover", help="Take the name from a producer that is using it.")
    ] = False,
    batch: Annotated[bool, typer.Option("--batch", help="Collect messages into batches.")] = False,
    compression: Annotated[
        Compression, typer.Option("--compression", help="Compress each entry.")
    ] = Compression.NONE,
    initial_sequence_id: Annotated[
        int | None,
        typer.Option(
            "--initial-sequence-id",
            metavar="N",
            min=0,
            max=SEQUENCE_ID_MAX - 1,
            help="The last sequence id that counts as published, where the service knows nothing "
            "of the name.",
        ),
    ] = None,
) -> Coroutine[Any, Any, int]:
    """Publish messages, each exactly once: a JSON object a line.

    {"payload": "...", "key": "...", "properties": {"name": "value"}, "sequence_id": 7,
    "event_time_ms": 1700000000000, "ordering_key": "..."}

    Bytes that are no text go into payload_base64 and ordering_key_base64. Only the payload is
    required; either every line has a sequence_id, or none does. With -o json each message that is
    stored, now or before, gives a line: {"message_id", "sequence_id", "duplicate"}.
    """
    name = topic_name(topic)
    if takeover and producer is None:
        raise WrongUsage("--takeover needs --producer")
    if producer is not None:
        _check_producer(producer)
    options = _Options(
        producer, takeover, Batching() if batch else None, compression, initial_sequence_id
    )
    return _publish(run, name, options, _open(file))


async def _publish(run: Run, topic: TopicName, options: _Options, file: FileIO) -> int:
    target = run.settings.ledger.value
    with file, reaching("ledger", target):
        async with (
            connect(target) as client,
            client.producer(
                str(topic),
                name=options.name,
                initial_sequence_id=options.initial_sequence_id,
                takeover=options.takeover,
                batching=options.batching,
                compression=options.compression,
                max_pending_messages=PENDING_MAX,
                send_timeout_s=run.settings.timeout_s,
                open_timeout_s=run.settings.timeout_s,
            ) as producer,
        ):
            work = _Work(producer, run.output)
            try:
                await work.do(file.fileno())
            finally:
                work.summarize()
            work.check()
    return work.outcome()


class _Work:
    """See the module."""

    def __init__(self, producer: Producer, output: Output) -> None:
        self._producer = producer
        self._output = output
        self._room = Room()
        self._pending: asyncio.Queue[_Sent | None] = asyncio.Queue()
        self._newest: asyncio.Future[Receipt] | None = None
        self._at_end = False
        self._output_closed = False
        self._error: SeqgateError | None = None  # why the rest was not sent
        self._counts = {"sent": 0, "stored": 0, "duplicates": 0, "failed": 0}

    async def do(self, descriptor: int) -> None:
        """Publish the lines, until they end or one cannot be published."""
        async with asyncio.TaskGroup() as group:
            sending = group.create_task(self._send_all(descriptor))
            while (sent := await self._pending.get()) is not None:
                await self._settle(sent)
                if self._error is not None or self._output_closed:
                    sending.cancel()

    def summarize(self) -> None:
        """For people: say how many messages were sent, and what became of them."""
        if self._output.json or self._output_closed:
            return
        counts = self._counts
        unknown = counts["sent"] - counts["stored"] - counts["duplicates"] - counts["failed"]
        counted = counts | ({"unknown": unknown} if unknown else {})
        headings = ("PRODUCER", *map(str.upper, counted))
        with suppress(OutputClosed):
            self._output.table(headings, [(self._producer.name, *counted.values())])

    def check(self) -> None:
        """Raise what has ended the producer: there is nothing to be closed in good order."""
        if isinstance(self._error, _ENDING):
            raise _with(self._error, str(self._error), self._counts)

    def outcome(self) -> int:
        """The exit code.

        Raises:
            InvalidInput, OutputFailed: the rest was not sent.
        """
        if self._error is not None:
            raise _with(self._error, str(self._error), self._counts)
        return DONE if self._at_end and not self._counts["failed"] else REFUSED

    async def _send_all(self, descriptor: int) -> None:
        try:
            async with aclosing(numbered_lines(descriptor)) as found:
                async for number, line in found:
                    await self._room.take(len(line))
                    if self._has_ended():
                        return
                    self._send(number, line)
            self._at_end = True
        except SeqgateError as error:
            self._error = error
        finally:
            self._pending.put_nowait(None)

    def _send(self, number: int, line: bytes) -> None:
        try:
            draft = parse(line)
            self._newest = self._producer.send_nowait(
                draft.payload,
                key=draft.key,
                properties=draft.properties,
                sequence_id=draft.sequence_id,
                ordering_key=draft.ordering_key,
                event_time_ms=draft.event_time_ms,
            )
        except (InvalidInput, InvalidRequestError, MixedSequenceIdsError) as error:
            raise InvalidInput(
                f"line {number}: {error}", reason=error.reason, details={"line": str(number)}
            ) from error
        except SeqgateError as error:  # the producer has ended: this line is the first not sent
            raise _with(error, str(error), {"line": number}) from error
        self._counts["sent"] += 1
        self._pending.put_nowait(_Sent(number, len(line), self._newest))

    def _has_ended(self) -> bool:
        """Whether the newest message failed in a way that takes all others with it."""
        newest = self._newest
        return newest is not None and newest.done() and isinstance(newest.exception(), _ENDING)

    async def _settle(self, sent: _Sent) -> None:
        try:
            receipt = await sent.receipt
        except SeqgateError as error:
            self._counts["failed"] += 1
            self._output.error(_with(error, f"line {sent.line}: {error}", {"line": sent.line}))
            if isinstance(error, _ENDING):
                self._error = self._error or error
        else:
            self._counts["duplicates" if receipt.duplicate else "stored"] += 1
            self._print(receipt)
        finally:
            self._room.give_back(sent.size_bytes)

    def _print(self, receipt: Receipt) -> None:
        if not self._output.json or self._output_closed:
            return
        try:
            self._output.record(
                {
                    "message_id": str(receipt.message_id),
                    "sequence_id": receipt.sequence_id,
                    "duplicate": receipt.duplicate,
                }
            )
        except OutputClosed:
            self._output_closed = True
        except OutputFailed as error:
            self._error = self._error or error


def _with(error: SeqgateError, message: str, details: Mapping[str, int]) -> SeqgateError:
    """The same error, with more to say."""
    more = {name: str(value) for name, value in details.items()}
    return type(error)(
        message,
        reason=error.reason,
        details=error.details | more,
        retry_after_s=error.retry_after_s,
    )


def _open(text: str) -> FileIO:
    """The input, without a buffer: what is there is read at once."""
    if text != "-":
        try:
            return FileIO(text)
        except OSError as error:
            raise InvalidInput(f"{text}: {error.strerror}") from error
    if sys.stdin is None:
        raise InvalidInput("there is no standard input")
    return FileIO(sys.stdin.fileno(), closefd=False)


def _check_producer(name: str) -> None:
    try:
        check_producer_name(name)
    except InvalidNameError as error:
        raise WrongUsage(
            str(error), reason="INVALID_PRODUCER_NAME", details={"producer": name}
        ) from error

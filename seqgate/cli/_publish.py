"""`seqgate publish`: publishes a message, lines, or a whole file, and prints the receipts.

Two tasks share the work. One reads lines and passes messages to the producer, without waiting for
receipts; the other awaits them, in the order of the lines, and reports each outcome. Room bounds
the messages between them.

Messages that are too large for one entry are cut into chunks, because users of a shell should not
have to know how large an entry may be.

A refused message does not keep the others from being stored. But after a time-out, or a takeover of
the name, nothing more is sent: later messages would overtake those that were not stored, whose
sequence ids could then never be stored.
"""

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import aclosing, contextmanager, suppress
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Final, NamedTuple

from seqgate.cli._arguments import Key, producer_name, properties_of, topic_name
from seqgate.cli._command import Run
from seqgate.cli._declared import argument, choice, flag, option
from seqgate.cli._failure import DONE, REFUSED, InvalidInput, OutputFailed, WrongUsage
from seqgate.cli._lines import WHOLE_BYTES_MAX, Pieces
from seqgate.cli._output import OutputClosed
from seqgate.cli._progress import Progress
from seqgate.cli._publish_input import WHY_A_NAME, Given, Input, size_bytes
from seqgate.cli._service import client as client_of
from seqgate.cli._service import reaching, trouble_of
from seqgate.client import Batching, Chunking, Compression, OnConflict, Producer, Receipt
from seqgate.errors import (
    FencedError,
    InvalidRequestError,
    MessageTooLargeError,
    MixedSequenceIdsError,
    ProducerClosedError,
    SendTimeoutError,
    SeqgateError,
    UnavailableError,
)
from seqgate.types import SEQUENCE_ID_MAX

PENDING_MAX: Final = 5_000
"""The most messages that await a receipt."""

PENDING_BYTES_MAX: Final = 64 * 1024 * 1024
"""The most bytes of their lines; one line always has room."""

CHUNK_BYTES_MIN: Final = 1024
"""The smallest chunk size to accept: no service can be configured to take only smaller ones."""

_ENTRIES_MAX: Final = PENDING_MAX + WHOLE_BYTES_MAX // CHUNK_BYTES_MIN
"""The producer's limit on entries without a receipt: so high that only Room makes senders wait."""

_BYTES_MAX: Final = 2 * PENDING_BYTES_MAX + WHOLE_BYTES_MAX
"""The producer's limit on their bytes, likewise: a message may count for more than its line."""

_ENDING: Final = (SendTimeoutError, UnavailableError, FencedError, ProducerClosedError)
"""After one of these errors nothing more is sent."""


class Room:
    """The unused part of PENDING_MAX and PENDING_BYTES_MAX."""

    def __init__(self) -> None:
        self._messages = 0
        self._size_bytes = 0
        self._given_back = asyncio.Event()

    async def take(self, size_bytes: int) -> None:
        """Take room for a message, waiting until there is enough."""
        while self._messages >= PENDING_MAX or (
            self._messages and self._size_bytes + size_bytes > PENDING_BYTES_MAX
        ):
            self._given_back.clear()
            await self._given_back.wait()
        self._messages += 1
        self._size_bytes += size_bytes

    def give_back(self, size_bytes: int) -> None:
        self._messages -= 1
        self._size_bytes -= size_bytes
        self._given_back.set()


class _Sent(NamedTuple):
    line: int | None
    size_bytes: int
    receipt: asyncio.Future[Receipt]


async def publish(
    run: Run,
    topic: str = argument("TOPIC", "The topic; created if the ledger allows it.", parse=topic_name),
    message: str | None = argument(
        "MESSAGE",
        "The payload of one message. Default, and -: read standard input.",
        default=None,
        when_empty="to publish an empty payload, give --empty instead",
        is_bytes=True,
    ),
    *,
    empty: bool = flag("Publish one message with an empty payload."),
    key: Key = None,
    properties: dict[str, str] | None = option(
        "NAME=VALUE",
        "A property of each message; repeatable.",
        "--property",
        parse=partial(properties_of, "--property"),
        raw=list[str],
    ),
    sequence_id: int | None = option(
        "N", "The sequence id of MESSAGE; requires --producer.", min=0, max=SEQUENCE_ID_MAX
    ),
    file: Path | None = option(
        "FILE",
        "Publish this file. The sequence id of a line is its number, from 1: publishing the file "
        "again stores only what is not stored yet. That does not hold for pipes, and for -, which "
        "is standard input.",
    ),
    form: Input = choice(
        "How to read input: each line is a payload (text) or a JSON object (json), or all of it is "
        "one payload (whole).",
        "--input",
        default=Input.TEXT,
    ),
    producer: str | None = option(
        "NAME",
        "The producer's name, which identifies duplicates. Default: for lines of a file, a name "
        "made of its path and this machine's name; else a unique name that the service assigns.",
        parse=producer_name,
    ),
    takeover: bool = flag("Take over the name from a connected producer."),
    batch: bool = flag("Batch messages. Messages too large for an entry are refused, not split."),
    filter_properties: list[str] | None = option(
        "NAME",
        "A property that filters see of a batch; a message with another value for it starts a "
        "new batch. Repeatable.",
        "--filter-property",
        when_empty=None,
    ),
    chunk_bytes: int | None = option(
        "N",
        "Cut messages larger than N bytes, at least 1024, into chunks of N; 0, the default: cut "
        "messages too large for the service, into the largest chunks that it takes.",
        min=0,
        max=WHOLE_BYTES_MAX,
    ),
    compression: Compression = choice("Compression of each entry.", default=Compression.NONE),
    on_conflict: OnConflict = choice(
        "A message whose sequence id is stored with other content: refuse it, or report it as a "
        "duplicate.",
        default=OnConflict.REFUSE,
    ),
    initial_sequence_id: int | None = option(
        "N",
        "The last sequence id considered published, if the service does not know the name; "
        "requires --producer.",
        min=0,
        max=SEQUENCE_ID_MAX - 1,
    ),
) -> int:
    """Publish messages exactly once: a message, lines of standard input, or a file.

    Blank lines are skipped. With --input json, a line is:

    {"payload": "...", "key": "...", "properties": {"name": "value"}, "sequence_id": 7,
    "event_time_ms": 1700000000000, "ordering_key": "..."}

    Binary data goes into payload_base64 and ordering_key_base64. Only the payload is required;
    sequence_id must be set on all lines or none. With -o json, each message that is stored now or
    was before is printed as {"message_id", "sequence_id", "duplicate"}, and with "differs" if
    its content is not, or may not be, what is stored.

    A message that is too large for one entry is split into chunks and read as one message. Its id
    names the first and the last chunk: FIRST;LAST.
    """
    given = Given(message, file, form, key, properties or {}, sequence_id, empty, producer)
    given.check()
    if takeover and given.producer is None:
        raise WrongUsage("--takeover requires --producer")
    if initial_sequence_id is not None and given.producer is None:
        raise WrongUsage(f"--initial-sequence-id requires --producer: {WHY_A_NAME}")
    settings = run.settings
    batching = _batching(filter_properties or [], batch=batch)
    chunking = _chunking(chunk_bytes, batch=batch)
    target = settings.ledger.value
    with _opened(run, given) as opened, reaching("ledger", target):
        async with client_of(settings) as client:
            made = client.producer(
                topic,
                name=given.producer,
                initial_sequence_id=initial_sequence_id,
                takeover=takeover,
                batching=batching,
                chunking=chunking,
                compression=compression,
                max_pending_messages=_ENTRIES_MAX,
                max_pending_bytes=_BYTES_MAX,
                send_timeout_s=settings.timeout_s,
                open_timeout_s=settings.timeout_s,
                on_conflict=on_conflict,
            )
            because = partial(trouble_of, made)
            what = f"the ledger service at {target} to accept the producer"
            async with run.waits.entering(what, made, because) as connected:
                counts = Progress(
                    "publish", messages=None, bytes=size_bytes(opened), is_patient=True
                )
                work = _Work(connected, run, given, counts)
                try:
                    with counts:
                        await work.do(opened)
                finally:
                    work.summarize()
                work.check()
    return work.outcome()


@contextmanager
def _opened(run: Run, given: Given) -> Iterator[FileIO | None]:
    """The input that is given. Opening a pipe waits for its writer."""
    with run.waits.on(f"a writer to open {given.input_shown}"):
        opened = given.opened()
    with opened as file:
        yield file


def _batching(filter_properties: list[str], *, batch: bool) -> Batching | None:
    if not batch:
        if filter_properties:
            raise WrongUsage(
                "--filter-property requires --batch: without it, filters see all properties"
            )
        return None
    try:
        return Batching(filter_properties=filter_properties)
    except ValueError as error:
        raise WrongUsage(f"--filter-property: {error}") from error


def _chunking(chunk_bytes: int | None, *, batch: bool) -> Chunking | None:
    if chunk_bytes is None:
        return None if batch else Chunking()
    if batch:
        raise WrongUsage("--batch and --chunk-bytes are mutually exclusive")
    if 0 < chunk_bytes < CHUNK_BYTES_MIN:
        raise WrongUsage(
            f"--chunk-bytes must be 0 or at least {CHUNK_BYTES_MIN:,}",
            details={"chunk_bytes": str(chunk_bytes)},
        )
    return Chunking(chunk_bytes)


class _Work:
    def __init__(
        self,
        producer: Producer,
        run: Run,
        given: Given,
        progress: Progress,
    ) -> None:
        self._producer = producer
        self._output = run.output
        self._waits = run.waits
        self._ledger = f"the ledger service at {run.settings.ledger.value}"
        self._given = given
        self._progress = progress
        self._room = Room()
        self._pending: asyncio.Queue[_Sent | None] = asyncio.Queue()
        self._newest: asyncio.Future[Receipt] | None = None
        self._at_end = False
        self._output_closed = False
        self._error: SeqgateError | None = None  # the reason why the rest was not sent
        self._counts = {"sent": 0, "stored": 0, "duplicates": 0, "failed": 0}

    async def do(self, opened: FileIO | None) -> None:
        """Publish the input until it ends or an error stops it."""
        async with asyncio.TaskGroup() as group:
            sending = group.create_task(self._send_all(self._given.source(opened)))
            while (sent := await self._pending.get()) is not None:
                await self._settle(sent)
                if self._error is not None or self._output_closed:
                    sending.cancel()

    def summarize(self) -> None:
        if self._output.json or self._output_closed:
            return
        counts = self._counts
        unknown = counts["sent"] - counts["stored"] - counts["duplicates"] - counts["failed"]
        counted = counts | ({"unknown": unknown} if unknown else {})
        headings = ("PRODUCER", *map(str.upper, counted))
        with suppress(OutputClosed):
            self._output.table(headings, [(self._producer.name, *counted.values())])

    def check(self) -> None:
        """Raise the error that ended the producer, which then cannot be closed in good order."""
        if isinstance(self._error, _ENDING):
            raise _with(self._error, self._counts)

    def outcome(self) -> int:
        """The exit code. Raises InvalidInput or OutputFailed if the rest was not sent."""
        if self._error is not None:
            raise _with(self._error, self._counts)
        return DONE if self._at_end and not self._counts["failed"] else REFUSED

    async def _send_all(self, source: Pieces) -> None:
        try:
            async with aclosing(source) as found:
                what = f"input from {self._given.input_shown}"
                async for line, data in self._waits.each(what, found):
                    await self._room.take(len(data))
                    if self._has_ended():
                        return
                    self._send(line, data)
            self._at_end = True
        except SeqgateError as error:
            self._error = error
        finally:
            self._pending.put_nowait(None)

    def _send(self, line: int | None, data: bytes) -> None:
        try:
            draft = self._given.draft(data, line)
            self._newest = self._producer.send_nowait(**draft._asdict())
        except (
            MessageTooLargeError
        ) as error:  # fails alone, like a message that the service refuses
            self._newest = _failed(error)
        except (InvalidInput, InvalidRequestError, MixedSequenceIdsError) as error:
            wrong = InvalidInput(str(error), reason=error.reason)
            raise _at(line, wrong) from error
        except SeqgateError as error:  # the producer has ended: the first line that is not sent
            raise _with(error, {"line": line}) from error
        self._counts["sent"] += 1
        self._pending.put_nowait(_Sent(line, len(data), self._newest))

    def _has_ended(self) -> bool:
        """Whether the newest message failed with an error that stops all others."""
        newest = self._newest
        return newest is not None and newest.done() and isinstance(newest.exception(), _ENDING)

    def _because(self) -> str:
        return trouble_of(self._producer)

    async def _settle(self, sent: _Sent) -> None:
        try:
            with self._waits.on(f"receipts from {self._ledger}", self._because):
                receipt = await sent.receipt
        except SeqgateError as error:
            self._counts["failed"] += 1
            self._output.error(_at(sent.line, error))
            if isinstance(error, _ENDING):
                self._error = self._error or error
        else:
            self._counts["duplicates" if receipt.duplicate else "stored"] += 1
            self._print(receipt)
        finally:
            self._room.give_back(sent.size_bytes)
            newline_bytes = 0 if sent.line is None else 1
            self._progress.add(messages=1, bytes=sent.size_bytes + newline_bytes)

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
                | ({} if receipt.differs is False else {"differs": receipt.differs})
            )
        except OutputClosed:
            self._output_closed = True
        except OutputFailed as error:
            self._error = self._error or error


def _failed(error: SeqgateError) -> asyncio.Future[Receipt]:
    receipt: asyncio.Future[Receipt] = asyncio.get_running_loop().create_future()
    receipt.set_exception(error)
    receipt.exception()  # marks it as retrieved: the receipt need not be awaited
    return receipt


def _at(line: int | None, error: SeqgateError) -> SeqgateError:
    return _with(error, {"line": line}, before="" if line is None else f"line {line}: ")


def _with(
    error: SeqgateError, details: Mapping[str, int | None], *, before: str = ""
) -> SeqgateError:
    more = {name: str(value) for name, value in details.items() if value is not None}
    return type(error)(
        f"{before}{error}",
        reason=error.reason,
        details=error.details | more,
        retry_after_s=error.retry_after_s,
    )

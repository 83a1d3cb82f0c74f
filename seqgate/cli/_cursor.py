"""`seqgate cursor`: how far somebody has come in a topic, and moving it."""

from collections.abc import Coroutine
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from seqgate.api.cursor.v1 import cursor_pb2 as pb
from seqgate.api.entry.v1 import entry_pb2
from seqgate.api.ledger.v1 import ledger_pb2
from seqgate.cli._command import Run, Topic, command, group, topic_name
from seqgate.cli._failure import DONE, InvalidInput, OutputFailed, WrongUsage
from seqgate.cli._output import Columns, time_shown
from seqgate.cli._place import parsed_id
from seqgate.cli._service import Service, cursor_service, ledger_service, pages, reaching
from seqgate.cli._wire import position, record
from seqgate.client import ChunkMessageId, MessageId
from seqgate.client._channel import translated
from seqgate.errors import UnavailableError
from seqgate.types import SEQUENCE_ID_MAX, InvalidNameError, Position, TopicName, check_cursor_name

EARLIEST: Final = "earliest"
LATEST: Final = "latest"

HOLES_SHOWN: Final = 20
"""How many runs of entries and batches `show` names; it counts all of them."""

FILE_BYTES_MAX: Final = 64 * 1024 * 1024
"""The largest file that `import` reads, in bytes."""

app = group("Manage cursors: the positions that readers have acknowledged.")

Name = Annotated[str, typer.Argument(metavar="NAME", help="The cursor.", show_default=False)]


@command(app, "ls")
def ls(
    run: Run,
    topic: Annotated[
        str,
        typer.Argument(
            metavar="TOPIC", help="List the cursors of this topic only.", show_default=False
        ),
    ] = "",
) -> Coroutine[Any, Any, int]:
    """List cursors, sorted by topic and name."""
    return _ls(run, str(topic_name(topic)) if topic else "")


@command(app, "show")
def show(run: Run, topic: Topic, name: Name) -> Coroutine[Any, Any, int]:
    """Show a cursor: its position, what is acknowledged beyond it, its properties and its lease.

    Beyond the position, the first 20 acknowledged ranges and batches are listed.
    """
    return _show(run, topic_name(topic), _cursor_name(name))


@command(app, "create")
def create(
    run: Run,
    topic: Topic,
    name: Name,
    *,
    at: Annotated[
        str,
        typer.Option(
            "--at",
            metavar="PLACE",
            help="earliest, latest, or the id of the first message to deliver.",
        ),
    ] = EARLIEST,
) -> Coroutine[Any, Any, int]:
    """Create a cursor. An existing one is left unchanged.

    With latest, everything up to the last message, which the ledger service is asked for, counts
    as acknowledged; with an id, everything before that message. For a message in a batch, delivery
    starts with the whole batch; for a large message, with its first chunk.
    """
    return _create(run, topic_name(topic), _cursor_name(name), _place("--at", at))


@command(app, "reset")
def reset(
    run: Run,
    topic: Topic,
    name: Name,
    *,
    to: Annotated[
        str,
        typer.Option(
            "--to",
            metavar="PLACE",
            help="earliest, latest, or the id of the next message to deliver.",
            show_default=False,
        ),
    ],
) -> Coroutine[Any, Any, int]:
    """Move a cursor forwards or backwards. Acknowledgements beyond its new position, delivery
    counts, and the properties of its position are discarded.

    With an id, everything before that message counts as acknowledged. For a message in a batch,
    delivery starts with the whole batch; for a large message, with its first chunk. With latest,
    everything up to the last message, which the ledger service is asked for, counts as
    acknowledged.
    """
    return _reset(run, topic_name(topic), _cursor_name(name), _place("--to", to))


@command(app, "rm")
def rm(run: Run, topic: Topic, name: Name) -> Coroutine[Any, Any, int]:
    """Delete a cursor."""
    return _rm(run, topic_name(topic), _cursor_name(name))


@command(app, "import")
def import_(
    run: Run,
    topic: Topic,
    name: Name,
    info_file: Annotated[
        Path,
        typer.Argument(
            metavar="INFO_FILE",
            help="Pulsar's ManagedCursorInfo, as stored in its metadata store.",
            show_default=False,
        ),
    ],
    position_file: Annotated[
        Path | None,
        typer.Argument(
            metavar="POSITION_FILE",
            help="PositionInfo, the last entry of the cursor ledger; takes precedence.",
            show_default=False,
        ),
    ] = None,
    *,
    replace: Annotated[bool, typer.Option("--replace", help="Replace an existing cursor.")] = False,
) -> Coroutine[Any, Any, int]:
    """Create a cursor from Pulsar's records of one.

    If the cursor was not closed cleanly, its latest state is in its cursor ledger: pass that
    ledger's last entry as POSITION_FILE.
    """
    info = _read(info_file)
    request = pb.ImportManagedCursorRequest(
        topic=str(topic_name(topic)),
        name=_cursor_name(name),
        managed_cursor_info=info,
        position_info=b"" if position_file is None else _read(position_file),
        replace=replace,
    )
    return _import(run, request)


@command(app, "export")
def export(
    run: Run,
    topic: Topic,
    name: Name,
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="The file to write.", show_default=False)
    ],
) -> Coroutine[Any, Any, int]:
    """Write a cursor to a file, as Pulsar's ManagedCursorInfo."""
    return _export(run, topic_name(topic), _cursor_name(name), file)


async def _ls(run: Run, topic: str) -> int:
    columns: Columns = {
        "TOPIC": "topic",
        "CURSOR": "cursor",
        "MARK-DELETE": "mark_delete",
        "BEYOND": "acknowledged_entries",
        "PARTIAL": "partial_batches",
        "VERSION": "version",
        "LEASE": lambda each: each["lease"] and each["lease"]["owner"],
    }
    async with cursor_service(run.settings) as service:
        cursors = pages(service, "ListCursors", pb.ListCursorsRequest(topic=topic), "cursors")
        await run.output.listing(columns, (record(each) async for each in cursors))
    return DONE


async def _show(run: Run, topic: TopicName, name: str) -> int:
    async with cursor_service(run.settings) as service:
        found = await service.call("GetCursor", pb.GetCursorRequest(topic=str(topic), name=name))
        request = pb.ReadAcknowledgedRequest(topic=str(topic), name=name, page_size=HOLES_SHOWN)
        page = await service.call("ReadAcknowledged", request)
    shown = record(found.cursor) | {
        "ranges": [record(each) for each in page.ranges],
        "batches": [record(each) for each in page.batches],
        "more": page.HasField("next_after"),
    }
    run.output.result(shown, _fields(shown))
    return DONE


async def _create(run: Run, topic: TopicName, name: str, place: MessageId | str) -> int:
    mark_delete = await _before(run, topic, place)
    request = pb.CreateCursorRequest(
        topic=str(topic), name=name, mark_delete=_to_position(mark_delete)
    )
    async with cursor_service(run.settings) as service:
        answer = await service.call("CreateCursor", request)
    return _tell(run, answer.cursor, created=answer.created)


async def _reset(run: Run, topic: TopicName, name: str, place: MessageId | str) -> int:
    mark_delete = await _before(run, topic, place)
    request = pb.ResetCursorRequest(
        topic=str(topic), name=name, mark_delete=_to_position(mark_delete)
    )
    async with cursor_service(run.settings) as service:
        answer = await service.call("ResetCursor", request)
    return _tell(run, answer.cursor)


async def _rm(run: Run, topic: TopicName, name: str) -> int:
    async with cursor_service(run.settings) as service:
        await service.call("DeleteCursor", pb.DeleteCursorRequest(topic=str(topic), name=name))
    run.output.result({"topic": str(topic), "cursor": name, "removed": True})
    return DONE


async def _import(run: Run, request: pb.ImportManagedCursorRequest) -> int:
    async with cursor_service(run.settings) as service:
        answer = await service.call("ImportManagedCursor", request)
    return _tell(run, answer.cursor)


async def _export(run: Run, topic: TopicName, name: str, file: Path) -> int:
    request = pb.ExportManagedCursorRequest(topic=str(topic), name=name)
    async with cursor_service(run.settings) as service:
        info = (await service.call("ExportManagedCursor", request)).managed_cursor_info
    _write(file, info)
    written = {"topic": str(topic), "cursor": name, "file": str(file), "bytes": len(info)}
    run.output.result(written)
    return DONE


# ---- places


def _place(option: str, text: str) -> MessageId | str:
    """Earliest, latest, or the message that will be the next one."""
    if text in (EARLIEST, LATEST):
        return text
    place = parsed_id(text)
    if place is None:
        raise WrongUsage(
            f"{option} must be earliest, latest, or a message id (LEDGER:ENTRY, or as printed by "
            "read)",
            details={"given": text},
        )
    return place.first_chunk if isinstance(place, ChunkMessageId) else place


async def _before(run: Run, topic: TopicName, place: MessageId | str) -> Position | None:
    """The last entry before a place. Before the first one of a ledger lies the last one of an
    earlier ledger, which only the ledger service knows."""
    match place:
        case MessageId(ledger_id=ledger_id, entry_id=entry_id) if entry_id > 0:
            return Position(ledger_id, entry_id - 1)
        case MessageId(ledger_id=ledger_id):
            async with ledger_service(run.settings) as service:
                return await _last_before(run, service, topic, ledger_id)
        case _ if place == LATEST:
            request = ledger_pb2.LastMessageIdRequest(topic=str(topic))
            async with ledger_service(run.settings) as service:
                answer = await service.call("LastMessageId", request)
            return position(answer.last) if answer.HasField("last") else None
        case _:
            return None


async def _last_before(
    run: Run, service: Service, topic: TopicName, ledger_id: int
) -> Position | None:
    """The last entry of all ledgers before one, found by halving: first the ledger, then in it."""
    found = await service.call("GetTopic", ledger_pb2.GetTopicRequest(topic=str(topic)))

    async def follows(place: Position) -> Position | None:
        """The first entry from a place on that is in one of those ledgers."""
        request = ledger_pb2.ReadRequest(topic=str(topic), max_entries=1, metadata_only=True)
        request.at.ledger_id, request.at.entry_id = place
        request.through.ledger_id, request.through.entry_id = ledger_id - 1, SEQUENCE_ID_MAX
        with reaching("ledger", run.settings.ledger.value):
            return await translated(_first(service, request, run.settings.timeout_s))

    first = await follows(Position(0, 0)) if ledger_id else None
    if first is None:
        return None
    low, high = first.ledger_id, ledger_id
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if await follows(Position(middle, 0)) else (low, middle)
    last = await follows(Position(low, 0)) or first
    low, high = last.entry_id, last.entry_id + found.topic.entries
    while high - low > 1:
        middle = (low + high) // 2
        there = await follows(Position(last.ledger_id, middle))
        low, high = (middle, high) if there else (low, middle)
    return Position(last.ledger_id, low)


async def _first(
    service: Service, request: ledger_pb2.ReadRequest, timeout_s: float
) -> Position | None:
    found = None
    async for response in service.stub.Read(request, timeout=timeout_s):
        if response.HasField("draining"):
            raise UnavailableError("the ledger service is shutting down", reason="DRAINING")
        for each in response.entries.entries:
            found = found or position(each.position)
    return found


# ---- what is shown


def _tell(run: Run, cursor: pb.Cursor, *, created: bool | None = None) -> int:
    shown = record(cursor)
    fields = [
        ("Topic", shown["topic"]),
        ("Cursor", shown["cursor"]),
        ("Mark-delete position", shown["mark_delete"]),
        ("Version", shown["version"]),
    ]
    if created is not None:
        shown |= {"created": created}
        fields.append(("Created", "now" if created else "before; it stays as it is"))
    run.output.result(shown, fields)
    return DONE


def _fields(shown: dict[str, Any]) -> list[tuple[str, object]]:
    lease = shown["lease"]
    fields: list[tuple[str, object]] = [
        ("Topic", shown["topic"]),
        ("Cursor", shown["cursor"]),
        ("Created", time_shown(shown["created_ms"])),
        ("Version", shown["version"]),
        ("Mark-delete position", shown["mark_delete"]),
        *_properties("attached to it", shown["mark_delete_properties"]),
        ("Entries acknowledged beyond", shown["acknowledged_entries"]),
        *[("  entries", _range_shown(each)) for each in shown["ranges"]],
        ("Batches acknowledged in part", shown["partial_batches"]),
        *[("  batch", _batch_shown(each)) for each in shown["batches"]],
    ]
    if shown["more"]:
        fields.append(("  and more", "not shown"))
    fields += _properties("Properties", shown["properties"])
    fields.append(("Lease", None if lease is None else lease["owner"]))
    if lease is not None:
        fields += [("  epoch", lease["epoch"]), ("  expires", time_shown(lease["expires_ms"]))]
    return fields


def _properties(title: str, properties: dict[str, str]) -> list[tuple[str, object]]:
    lines: list[tuple[str, object]] = [
        ("  property", f"{name} = {value}") for name, value in properties.items()
    ]
    return [(f"  {title}" if title.islower() else title, len(properties)), *lines]


def _range_shown(range_: dict[str, Any]) -> str:
    first, last = range_["first"], range_["last_entry_id"]
    return first if first.endswith(f":{last}") else f"{first} to {last}"


def _batch_shown(batch: dict[str, Any]) -> str:
    return f"{batch['position']}: {len(batch['indexes'])} of {batch['batch_size']} messages"


# ---- translating


def _cursor_name(name: str) -> str:
    try:
        return check_cursor_name(name)
    except InvalidNameError as error:
        raise WrongUsage(str(error), reason="INVALID_CURSOR_NAME") from error


def _read(file: Path) -> bytes:
    try:
        with file.open("rb") as opened:
            read = opened.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise InvalidInput(f"{file}: {error.strerror}") from error
    if len(read) > FILE_BYTES_MAX:
        raise InvalidInput(f"{file} is too large (limit {FILE_BYTES_MAX:,} bytes)")
    return read


def _write(file: Path, data: bytes) -> None:
    try:
        file.write_bytes(data)
    except OSError as error:
        raise OutputFailed(f"{file}: {error.strerror}") from error


def _to_position(place: Position | None) -> entry_pb2.Position | None:
    return None if place is None else entry_pb2.Position(**place._asdict())

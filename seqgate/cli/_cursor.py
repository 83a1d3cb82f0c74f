"""`seqgate cursor`: manages cursors, the acknowledged positions of readers."""

import sys
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final

from seqgate.api.cursor.v1 import cursor_pb2 as pb
from seqgate.cli._arguments import PLACE_HELP, Cursor, Topic, place, topic_name
from seqgate.cli._command import Run, command, group
from seqgate.cli._confirm import Yes, confirm
from seqgate.cli._declared import REQUIRED, argument, flag, option
from seqgate.cli._failure import OutputFailed
from seqgate.cli._known import OwnLog, check_known, known
from seqgate.cli._lines import STANDARD_STREAM, read_whole
from seqgate.cli._losses import of_progress
from seqgate.cli._output import Columns, time_shown
from seqgate.cli._skipped import DryRun, confirm_move, move_to, tell_move
from seqgate.cli._wire import record, wire_position
from seqgate.client import EARLIEST
from seqgate.client._log import before, check_within
from seqgate.client._subscribing import Place
from seqgate.errors import NotFoundError

HOLES_SHOWN: Final = 20
"""The most ranges and batches that `show` lists; it counts all of them."""

FILE_BYTES_MAX: Final = 64 * 1024 * 1024

app = group("Manage cursors: the positions that readers have acknowledged.")


# ---- arguments


def _read(file: Path) -> bytes:
    return read_whole(str(file), FILE_BYTES_MAX)


# ---- commands


@command(app, "ls")
async def ls(
    run: Run,
    topic: Annotated[
        str, argument("TOPIC", "List the cursors of this topic only.", parse=topic_name)
    ] = "",
) -> None:
    """List cursors, sorted by topic and name."""
    columns: Columns = {
        "TOPIC": "topic",
        "CURSOR": "cursor",
        "MARK-DELETE": "mark_delete",
        "BEYOND": "acknowledged_entries",
        "PARTIAL": "partial_batches",
        "REVISION": "revision",
        "LEASE": lambda each: each["lease"] and each["lease"]["owner"],
    }
    cursors = run.services.pages(pb.ListCursorsRequest(topic=topic))
    if topic:
        cursors = known(run, topic, cursors)
    await run.output.listing(columns, (record(each) async for each in cursors))


@command(app, "show")
async def show(run: Run, topic: Topic, name: Cursor) -> None:
    """Show a cursor: its position, acknowledgements beyond it, its properties and its lease.

    At most 20 acknowledged ranges and batches beyond the position are listed.
    """
    found = await run.services.call(pb.GetCursorRequest(topic=topic, cursor=name))
    page = await run.services.call(
        pb.ListAcknowledgedRequest(topic=topic, cursor=name, page_size=HOLES_SHOWN)
    )
    shown = record(found.cursor) | {
        "ranges": [record(each) for each in page.ranges],
        "batches": [record(each) for each in page.batches],
        "more": bool(page.next_page_token),
    }
    run.output.result(shown, _fields(shown))


@command(app, "create")
async def create(
    run: Run,
    topic: Topic,
    name: Cursor,
    *,
    start: Place = option(
        "PLACE", PLACE_HELP, "--from", default=EARLIEST, parse=partial(place, "--from")
    ),
    own_log: OwnLog = False,
) -> None:
    """Create a cursor. An existing one is left unchanged.

    With an id, everything before that message counts as acknowledged. For a message in a batch,
    delivery starts with the whole batch; for a large message, with its first chunk. With latest,
    everything up to the topic's last message in the ledger service counts as acknowledged.
    """
    if not own_log:
        await check_known(run, topic)
        await check_within(run.services, topic, start, field="--from")
    found = await before(run.services, topic, start)
    mark_delete = None if found is None else wire_position(found)
    answer = await run.services.call(
        pb.CreateCursorRequest(topic=topic, cursor=name, mark_delete=mark_delete)
    )
    _tell(run, answer.cursor, created=answer.created)


@command(app, "reset")
async def reset(
    run: Run,
    topic: Topic,
    name: Cursor,
    *,
    to: Place = option("PLACE", PLACE_HELP, default=REQUIRED, parse=partial(place, "--to")),
    own_log: OwnLog = False,
    dry_run: DryRun = False,
    yes: Yes = False,
) -> None:
    """Move a cursor forwards or backwards. Acknowledgements beyond its new position, delivery
    counts, and the properties of its position are discarded.

    With an id, everything before that message counts as acknowledged. For a message in a batch,
    delivery starts with the whole batch; for a large message, with its first chunk. With latest,
    everything up to the topic's last message in the ledger service counts as acknowledged. A move
    that skips unacknowledged entries is asked for first, with their number.
    """
    get = pb.GetCursorRequest(topic=topic, cursor=name)
    move = await move_to(run, get, topic, name, to, own_log=own_log)
    if dry_run:
        tell_move(run, {"topic": topic, "cursor": name}, move)
        return
    await confirm_move(topic, name, move, yes=yes)
    mark_delete = None if move.moves_to is None else wire_position(move.moves_to)
    answer = await run.services.call(
        pb.ResetCursorRequest(topic=topic, cursor=name, mark_delete=mark_delete)
    )
    _tell(run, answer.cursor)


@command(app, "rm")
async def rm(run: Run, topic: Topic, name: Cursor, *, yes: Yes = False) -> None:
    """Delete a cursor.

    Counts what is lost, and asks first; without a terminal, --yes is required.
    """
    found = await run.services.call(pb.GetCursorRequest(topic=topic, cursor=name))
    await confirm(await of_progress(run, "Cursor", found.cursor), yes=yes)
    await run.services.call(pb.DeleteCursorRequest(topic=topic, cursor=name))
    run.output.result({"topic": topic, "cursor": name, "removed": True})


@command(app, "import")
async def import_(
    run: Run,
    topic: Topic,
    name: Cursor,
    info_file: bytes = argument(
        "INFO_FILE",
        "Pulsar's ManagedCursorInfo, as stored in its metadata store; - for standard input.",
        parse=_read,
        raw=Path,
    ),
    position_file: bytes | None = argument(
        "POSITION_FILE",
        "PositionInfo, the last entry of the cursor ledger; takes precedence.",
        default=None,
        parse=_read,
        raw=Path,
    ),
    *,
    replace: bool = flag("Replace an existing cursor."),
    yes: Yes = False,
) -> None:
    """Create a cursor from Pulsar's records of one.

    If the cursor was not closed cleanly, its cursor ledger has the latest state: pass that ledger's
    last entry as POSITION_FILE. Before it replaces a cursor, the command asks; without a terminal,
    --yes is required.
    """
    if replace and not yes:
        with suppress(NotFoundError):
            found = await run.services.call(pb.GetCursorRequest(topic=topic, cursor=name))
            await confirm(await of_progress(run, "Cursor", found.cursor), yes=yes)
    request = pb.ImportManagedCursorRequest(
        topic=topic,
        cursor=name,
        managed_cursor_info=info_file,
        position_info=position_file or b"",
        replace=replace,
    )
    _tell(run, (await run.services.call(request)).cursor)


@command(app, "export")
async def export(
    run: Run,
    topic: Topic,
    name: Cursor,
    file: Path = argument("FILE", "The file to write; - for standard output."),
) -> None:
    """Write a cursor to a file, as Pulsar's ManagedCursorInfo."""
    request = pb.ExportManagedCursorRequest(topic=topic, cursor=name)
    info = (await run.services.call(request)).managed_cursor_info
    _write(file, info)
    if str(file) != STANDARD_STREAM:
        run.output.result({"topic": topic, "cursor": name, "file": str(file), "bytes": len(info)})


def _write(file: Path, data: bytes) -> None:
    try:
        if str(file) == STANDARD_STREAM:
            sys.stdout.buffer.write(data)
            sys.stdout.buffer.flush()
            return
        file.write_bytes(data)
    except OSError as error:
        raise OutputFailed(f"{file}: {error.strerror}") from error


# ---- output


def _tell(run: Run, cursor: pb.Cursor, *, created: bool | None = None) -> None:
    shown = record(cursor)
    fields = [
        ("Topic", shown["topic"]),
        ("Cursor", shown["cursor"]),
        ("Mark-delete position", shown["mark_delete"]),
        ("Revision", shown["revision"]),
    ]
    if created is not None:
        shown |= {"created": created}
        fields.append(("Created", "now" if created else "before; left unchanged"))
    run.output.result(shown, fields)


def _fields(shown: dict[str, Any]) -> list[tuple[str, object]]:
    lease = shown["lease"]
    fields: list[tuple[str, object]] = [
        ("Topic", shown["topic"]),
        ("Cursor", shown["cursor"]),
        ("Created", time_shown(shown["created_ms"])),
        ("Revision", shown["revision"]),
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

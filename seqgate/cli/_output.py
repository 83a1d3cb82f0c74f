"""The output of a command: tables for people, JSON for programs.

JSON is one object per line, in UTF-8, without colours. On a terminal a table is folded to fit; in a
pipe or a file it has its full width, and nothing is omitted.
"""

import json
import os
import re
import sys
from collections.abc import AsyncIterable, Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Any, Final, NamedTuple, TextIO

from rich.cells import cell_len

from seqgate.cli._failure import OutputFailed, reason_of
from seqgate.errors import SeqgateError
from seqgate.times import TIME_MAX_MS, moment

_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_ENCODER: Final = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
_GAP: Final = "  "


class Format(StrEnum):
    TABLE = "table"
    JSON = "json"


Columns = Mapping[str, str | Callable[[Any], object]]
"""The cells under each heading of a table, or after each title: a field of an object, shown as a
time if its name ends in _ms, or a function of the object."""


Fields = Sequence[tuple[str, object]]
"""The titles and values of one object, one line each."""


class Table(NamedTuple):
    headings: Sequence[str]
    rows: Sequence[Sequence[object]]


def table(columns: Columns, records: Iterable[Mapping[str, Any]]) -> Table:
    rows = [[_cell(each, of) for of in columns.values()] for each in records]
    return Table(list(columns), rows)


def fields_of(record: Mapping[str, Any], columns: Columns) -> list[tuple[str, object]]:
    return [(title, _cell(record, of)) for title, of in columns.items()]


def _cell(record: Mapping[str, Any], of: str | Callable[[Any], object]) -> object:
    if not isinstance(of, str):
        return of(record)
    return time_shown(record[of]) if of.endswith("_ms") else record[of]


class OutputClosed(Exception):
    """The reader of the output has gone (`| head`)."""


class Output:
    def __init__(self, form: Format) -> None:
        self.form = form
        for stream in (sys.stdout, sys.stderr):
            if hasattr(stream, "reconfigure"):
                stream.reconfigure(encoding="utf-8", errors="backslashreplace")

    @property
    def json(self) -> bool:
        return self.form is Format.JSON

    def line(self, text: str) -> None:
        """Write a line immediately. Raises OutputClosed or OutputFailed."""
        try:
            sys.stdout.write(f"{text}\n")
            sys.stdout.flush()
        except BrokenPipeError as error:
            _discard(sys.stdout)
            raise OutputClosed from error
        except OSError as error:
            _discard(sys.stdout)
            raise OutputFailed(f"writing failed: {error.strerror}") from error

    def record(self, record: Mapping[str, Any]) -> None:
        self.line(json_line(record))

    async def listing(
        self, columns: Columns, records: AsyncIterable[Mapping[str, Any]], *, by: str | None = None
    ) -> None:
        """Write objects as JSON as they arrive; or as a table, sorted by the field `by`, each value
        once (None: in order of arrival)."""
        kept: list[Mapping[str, Any]] = []
        put = self.record if self.json else kept.append
        async for each in records:
            put(each)
        if by is not None:
            kept = [each for _, each in sorted({each[by]: each for each in kept}.items())]
        if not self.json:
            self.table(*table(columns, kept))

    def result(self, record: Mapping[str, Any], *parts: "Table | Fields | str") -> None:
        """Write one object as JSON, or its nonempty parts for people, separated by blank lines."""
        if self.json:
            self.record(record)
            return
        for index, part in enumerate([each for each in parts if each]):
            if index:
                self.line("")
            match part:
                case str():
                    self.line(part)
                case Table():
                    self.table(*part)
                case _:
                    self._write(None, [[name, shown(value)] for name, value in part])

    def table(self, headings: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        self._write(headings, [[shown(cell) for cell in row] for row in rows])

    def error(self, error: SeqgateError) -> None:
        reason, message = reason_of(error), " ".join(str(error).split())
        if self.json:
            text = json_line(
                {"error": {"reason": reason, "message": message, "details": error.details}}
            )
        else:
            lines = [f"seqgate: {shown(message)} ({reason})"]
            lines += [f"  {name}: {shown(value)}" for name, value in error.details.items()]
            text = "\n".join(lines)
        say(text)

    def note(self, reason: str, message: str, details: Mapping[str, int | str]) -> None:
        """Write a note, which is not an error, on standard error. Tables omit the details."""
        if self.json:
            say(json_line({"note": {"reason": reason, "message": message, "details": details}}))
        else:
            say(f"seqgate: {shown(message)} ({reason})")

    def _write(self, headings: Sequence[str] | None, rows: list[list[str]]) -> None:
        if sys.stdout.isatty():
            self._write_folded(headings, rows)
            return
        lines = ([list(headings)] if headings else []) + rows
        widths = [max(map(cell_len, column)) for column in zip(*lines, strict=True)]
        for cells in lines:
            padded = [
                cell + " " * (width - cell_len(cell))
                for cell, width in zip(cells, widths, strict=True)
            ]
            self.line(_GAP.join(padded).rstrip())

    def _write_folded(self, headings: Sequence[str] | None, rows: list[list[str]]) -> None:
        # Slow to import, and useless to scripts.
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, pad_edge=False, show_header=headings is not None)
        for heading in headings or [""] * len(rows[0]):
            table.add_column(heading, overflow="fold")
        for cells in rows:
            table.add_row(*map(Text, cells))
        Console(file=sys.stdout, highlight=False).print(table)


def shown(value: object) -> str:
    """A value in a table: on one line, without control sequences for the terminal."""
    match value:
        case None | "":
            return "-"
        case bool():
            return "yes" if value else "no"
        case _:
            return _CONTROL.sub(lambda found: _escape(found.group()), str(value))


def time_shown(milliseconds: int | None) -> str | None:
    if milliseconds is None:
        return None
    if not 0 <= milliseconds <= TIME_MAX_MS:  # a producer's clock may have any value
        return str(milliseconds)
    return moment(milliseconds).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def words(name: str) -> str:
    return name.lower().replace("_", " ")


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


def say(text: str) -> None:
    try:
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()
    except OSError:
        _discard(sys.stderr)


def json_line(record: Mapping[str, Any]) -> str:
    return _ENCODER.encode(record)


def _discard(stream: TextIO) -> None:
    """Make the interpreter flush the stream's buffer to /dev/null at exit, silently."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)

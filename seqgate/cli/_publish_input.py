"""What `seqgate publish` publishes: a message, lines, or a whole input, as the options say.

A file's lines have their numbers as sequence ids, under a producer name that stands for the file:
published again, only the lines that are not stored yet are.
"""

import hashlib
import os
import socket
import stat
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import StrEnum
from io import FileIO
from pathlib import Path
from typing import Final

from seqgate.cli._failure import WrongUsage
from seqgate.cli._lines import Pieces, numbered_lines, one, open_input, whole
from seqgate.cli._message import Draft, parse
from seqgate.errors import MixedSequenceIdsError

FILE_NAME_CHARACTERS: Final = 40
DIGEST_CHARACTERS: Final = 16
"""How much of a file's name, and of the digest of its place, are in its producer's name."""


class Input(StrEnum):
    """How the input is read."""

    TEXT = "text"
    JSON = "json"
    WHOLE = "whole"


@dataclass(slots=True)
class Given:
    """What is to be published, as given."""

    message: str | None
    file: Path | None
    form: Input
    key: str | None
    properties: Mapping[str, str]
    sequence_id: int | None
    _has_ids: bool | None = None  # whether a file's lines have sequence ids of their own

    def check(self) -> None:
        if self.message is not None and self.file is not None:
            raise WrongUsage("MESSAGE and --file are mutually exclusive")
        if self.message is not None and self.form is not Input.TEXT:
            raise WrongUsage("MESSAGE and --input are mutually exclusive")
        if self.form is Input.JSON and (self.key is not None or self.properties):
            raise WrongUsage("with --input json, keys and properties are in the lines")
        if self.sequence_id is not None and self.message is None and self.form is not Input.WHOLE:
            raise WrongUsage("--sequence-id requires MESSAGE or --input whole")

    @property
    def numbers_lines(self) -> bool:
        return self.file is not None and self.form is not Input.WHOLE

    @property
    def producer(self) -> str | None:
        """The name of the producer of a file's lines. It stands for the path on this machine, so
        that two files never share their numbers."""
        if not self.numbers_lines:
            return None
        assert self.file is not None
        path = self.file.resolve()
        place = f"{socket.gethostname()}:{path}"
        digest = hashlib.sha256(place.encode(errors="surrogateescape")).hexdigest()
        name = "".join(each if each.isprintable() else "?" for each in path.name)
        name = name[:FILE_NAME_CHARACTERS]
        return f"file-{name}-{digest[:DIGEST_CHARACTERS]}"

    def opened(self) -> AbstractContextManager[FileIO | None]:
        if self.message is not None:
            return nullcontext()
        return open_input("-" if self.file is None else str(self.file))

    def source(self, opened: FileIO | None) -> Pieces:
        if opened is None:
            assert self.message is not None
            return one(self.message.encode(errors="surrogateescape"))
        if self.form is Input.WHOLE:
            return whole(opened.fileno())
        return numbered_lines(opened.fileno())

    def draft(self, data: bytes, line: int | None) -> Draft:
        """The message of a piece of input. Raises InvalidInput."""
        number = line if self.numbers_lines else self.sequence_id
        if self.form is Input.JSON:
            parsed = parse(data)
            has_id = parsed.sequence_id is not None
            if self.numbers_lines and self._has_ids not in (None, has_id):
                raise MixedSequenceIdsError("sequence_id must be set on all lines or none")
            self._has_ids = has_id
            return parsed if has_id else parsed._replace(sequence_id=number)
        return Draft(data, key=self.key, properties=self.properties, sequence_id=number)


def size_bytes(opened: FileIO | None) -> int | None:
    """The size of a file in bytes; None: it is not known."""
    if opened is None:
        return None
    about = os.fstat(opened.fileno())
    return about.st_size if stat.S_ISREG(about.st_mode) else None

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

from seqgate.cli._failure import InvalidInput, WrongUsage
from seqgate.cli._lines import STANDARD_STREAM, Pieces, numbered_lines, one, open_input, whole
from seqgate.cli._message import Draft, parse
from seqgate.errors import MixedSequenceIdsError

FILE_NAME_CHARACTERS: Final = 40
DIGEST_CHARACTERS: Final = 16
"""How much of a file's name, and of the digest of its place, are in its producer's name."""


WHY_A_NAME: Final = "under a name that is new each time, no message is recognized as a duplicate"
"""Why a sequence id needs a producer's name."""


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
    is_empty: bool = False  # whether --empty is given, instead of a message
    named: str | None = None  # the producer, if --producer is given
    _has_ids: bool | None = None  # whether a file's lines have sequence ids of their own

    def check(self) -> None:
        if self.is_empty and (self.message, self.file, self.form) != (None, None, Input.TEXT):
            raise WrongUsage("--empty excludes MESSAGE, --file and --input")
        if self.message is not None and self.file is not None:
            raise WrongUsage("MESSAGE and --file are mutually exclusive")
        is_argument = self.is_empty or self.message not in (None, STANDARD_STREAM)
        if is_argument and self.form is not Input.TEXT:
            raise WrongUsage("MESSAGE and --input are mutually exclusive")
        if self.form is Input.JSON and (self.key is not None or self.properties):
            raise WrongUsage("with --input json, keys and properties are in the lines")
        if self.sequence_id is None:
            return
        if not is_argument and self.form is not Input.WHOLE:
            raise WrongUsage("--sequence-id requires MESSAGE or --input whole")
        if self.named is None:
            raise WrongUsage(f"--sequence-id requires --producer: {WHY_A_NAME}")

    @property
    def text(self) -> str | None:
        """The message that is an argument; None: input is to be read."""
        if self.is_empty:
            return ""
        return None if self.message == STANDARD_STREAM else self.message

    @property
    def path(self) -> str:
        """The input; `-` is standard input."""
        return STANDARD_STREAM if self.file is None else str(self.file)

    @property
    def input_shown(self) -> str:
        return "standard input" if self.path == STANDARD_STREAM else self.path

    @property
    def numbers_lines(self) -> bool:
        """Whether lines have their numbers as sequence ids: only what stays where it is, and is
        read again, has the same lines."""
        if self.file is None or self.path == STANDARD_STREAM or self.form is Input.WHOLE:
            return False
        return self.file.is_file()

    @property
    def producer(self) -> str | None:
        """The name that is given, or that of the producer of a file's lines. That stands for the
        path on this machine, so that two files never share their numbers."""
        if self.named is not None or not self.numbers_lines:
            return self.named
        assert self.file is not None
        path = self.file.resolve()
        place = f"{socket.gethostname()}:{path}"
        digest = hashlib.sha256(place.encode(errors="surrogateescape")).hexdigest()
        name = "".join(each if each.isprintable() else "?" for each in path.name)
        name = name[:FILE_NAME_CHARACTERS]
        return f"file-{name}-{digest[:DIGEST_CHARACTERS]}"

    def opened(self) -> AbstractContextManager[FileIO | None]:
        return nullcontext() if self.text is not None else open_input(self.path)

    def source(self, opened: FileIO | None) -> Pieces:
        if opened is None:
            assert self.text is not None
            return one(self.text.encode(errors="surrogateescape"))
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
        if self.form is Input.WHOLE and not data:
            raise InvalidInput("the input is empty: to publish an empty payload, give --empty")
        return Draft(data, key=self.key, properties=self.properties, sequence_id=number)


def size_bytes(opened: FileIO | None) -> int | None:
    """The size of a file in bytes; None: it is not known."""
    if opened is None:
        return None
    about = os.fstat(opened.fileno())
    return about.st_size if stat.S_ISREG(about.st_mode) else None

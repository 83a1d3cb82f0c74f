"""Reads a file, a pipe or a terminal: line by line as they arrive, or whole."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from io import FileIO
from typing import Final

from seqgate.cli._failure import InvalidInput
from seqgate.client import AssemblyLimits

LINE_BYTES_MAX: Final = 384 * 1024 * 1024
"""The longest line: base64 of the largest payload that a ledger service takes by default."""

WHOLE_BYTES_MAX: Final = AssemblyLimits().message_bytes_max
"""The largest input that is one message: the default limit of readers."""

STANDARD_STREAM: Final = "-"
"""Stands for standard input wherever a command reads a file or a payload, and for standard output
where it writes a file."""

_BLOCK_BYTES: Final = 64 * 1024


def open_input(text: str) -> FileIO:
    """Open a file or STANDARD_STREAM, unbuffered: available bytes are read immediately.
    Raises InvalidInput if it cannot be opened."""
    if text != STANDARD_STREAM:
        try:
            with _interruptible():
                return FileIO(text)
        except OSError as error:
            raise InvalidInput(f"{text}: {error.strerror}") from error
    if sys.stdin is None:
        raise InvalidInput("standard input is closed")
    return FileIO(sys.stdin.fileno(), closefd=False)


def read_whole(text: str, bytes_max: int) -> bytes:
    """Read a file or STANDARD_STREAM whole. Raises InvalidInput if that fails, or it is larger."""
    try:
        with open_input(text) as opened:
            read = b""
            while len(read) <= bytes_max and (block := opened.read(_BLOCK_BYTES)):
                read += block
    except OSError as error:
        raise InvalidInput(f"{text}: {error.strerror}") from error
    if len(read) > bytes_max:
        raise InvalidInput(f"{text} is too large (limit {bytes_max:,} bytes)")
    return read


@contextmanager
def _interruptible() -> Iterator[None]:
    """Let Ctrl-C interrupt a blocking call, such as opening a pipe without a writer. The event
    loop's handler would cancel a task, which only takes effect at an await."""
    handler = signal.getsignal(signal.SIGINT)
    if callable(handler):
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


Pieces = AsyncGenerator[tuple[int | None, bytes], None]
"""The input of each message, and the number of its line; None: the input is one message."""


async def numbered_lines(descriptor: int) -> AsyncGenerator[tuple[int, bytes], None]:
    """The lines that are not blank, numbered from 1. Holds one block and one line at a time. Raises
    InvalidInput if reading fails or a line is too long."""
    number = 0
    async with aclosing(_lines(descriptor)) as lines:
        async for line in lines:
            number += 1
            if line.strip():
                yield number, line


async def one(data: bytes) -> Pieces:
    """Data that is given, as one piece."""
    yield None, data


async def whole(descriptor: int) -> Pieces:
    """The whole input as one piece. Raises InvalidInput if reading fails or it is too large."""
    parts: list[bytes] = []
    size_bytes = 0
    while block := await _block(descriptor):
        parts.append(block)
        size_bytes += len(block)
        if size_bytes > WHOLE_BYTES_MAX:
            raise InvalidInput(f"message too large (limit {WHOLE_BYTES_MAX:,} bytes)")
    yield None, b"".join(parts)


async def _lines(descriptor: int) -> AsyncGenerator[bytes, None]:
    parts: list[bytes] = []
    size_bytes = 0
    while block := await _block(descriptor):
        *whole, rest = block.split(b"\n")
        for line in whole:
            yield b"".join([*parts, line])
            parts, size_bytes = [], 0
        parts.append(rest)
        size_bytes += len(rest)
        if size_bytes > LINE_BYTES_MAX:
            raise InvalidInput(f"line too long (limit {LINE_BYTES_MAX:,} bytes)")
    yield b"".join(parts)


async def _block(descriptor: int) -> bytes:
    while True:
        await _readable(descriptor)
        try:
            return os.read(descriptor, _BLOCK_BYTES)
        except BlockingIOError:
            continue  # another process read it
        except OSError as error:
            raise InvalidInput(f"reading failed: {error.strerror}") from error


async def _readable(descriptor: int) -> None:
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    try:
        loop.add_reader(descriptor, readable.set)
    except PermissionError:  # epoll refuses regular files, which are always readable
        await asyncio.sleep(0)
        return
    try:
        await readable.wait()
    finally:
        loop.remove_reader(descriptor)

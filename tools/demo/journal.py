"""What a producer knows across its own crashes: a few counters, and the receipts that it got.

Both are files that outlive a SIGKILL of the producer. The counters are mapped into memory,
so that the demo sees them move.
"""

import mmap
import os
from collections.abc import Iterator
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple

from seqgate.client import Receipt


class Counter(IntEnum):
    """What is counted."""

    CHECKPOINT = 0
    """How much of what it has is known to be stored: where to go on after a crash."""
    SENT = 1
    """How many messages were handed to the client, resent ones included."""
    RECEIPTS = 2
    """How many receipts came."""
    DUPLICATES = 3
    """How many of these said that the message was stored before."""
    REWINDS = 4
    """How often it went back and sent a stretch again, cut into other batches."""


class Acknowledged(NamedTuple):
    """A receipt that a producer got."""

    sequence_id: int
    message_id: str


class Journal:
    """One producer's counters and receipts."""

    def __init__(self, folder: Path, producer: str) -> None:
        counters = folder / f"{producer}.counters"
        if not counters.exists():
            counters.write_bytes(bytes(8 * len(Counter)))
        with counters.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 8 * len(Counter))
        self._counters = memoryview(self._map).cast("q")
        self._receipts = _without_torn_line(folder / f"{producer}.receipts").open("a")

    def close(self) -> None:
        """Let go of the files."""
        self._counters.release()
        self._map.close()
        self._receipts.close()

    def __getitem__(self, counter: Counter) -> int:
        return self._counters[counter]

    def count(self, counter: Counter, by: int = 1) -> None:
        """Add to a counter."""
        self._counters[counter] += by

    def settle(self, receipts: list[Receipt], checkpoint: int) -> None:
        """Keep receipts, and then go on from `checkpoint`."""
        self._receipts.writelines(f"{each.sequence_id} {each.message_id}\n" for each in receipts)
        self._receipts.flush()
        self.count(Counter.RECEIPTS, len(receipts))
        self.count(Counter.DUPLICATES, sum(each.duplicate for each in receipts))
        self._counters[Counter.CHECKPOINT] = max(self[Counter.CHECKPOINT], checkpoint)


def acknowledged(folder: Path, producer: str) -> Iterator[Acknowledged]:
    """Every receipt that a producer's journal holds."""
    for line in (folder / f"{producer}.receipts").read_text().splitlines():
        sequence_id, message_id = line.split(" ")
        yield Acknowledged(int(sequence_id), message_id)


def _without_torn_line(file: Path) -> Path:
    """The file, without what a crash cut off in the middle of a line."""
    if file.exists():
        text = file.read_bytes()
        os.truncate(file, text.rfind(b"\n") + 1)
    return file

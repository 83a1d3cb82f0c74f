"""The staging folder: the rows of a write, durable before the first one is sent.

    STAGING/JOB/rows-<uuid>.arrow       the rows of one task
    STAGING/JOB/epoch-<number>.json     the manifest: which files, in which order, are an epoch

Several attempts at a task leave several files, of which the manifest names one. A manifest appears
whole, and once: whoever comes second reads the first one's. It alone decides on the rows and their
numbers; a batch write is epoch 0.
"""

import hashlib
import json
import os
import time
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any, Final

import pyarrow as pa
from pyarrow import ipc

from seqgate.errors import DataLossError

MANIFESTS_KEPT: Final = 100
"""How many manifests of sent epochs a stream keeps: Spark replays only the last epoch."""

ORPHAN_AGE_S: Final = 86_400.0
"""The age from which files of attempts that did not count are deleted."""

_OPTIONS: Final = ipc.IpcWriteOptions(compression="zstd")


class StagedRowsLostError(DataLossError):
    """A staged file is gone or damaged. `details` names it."""

    default_reason = "STAGED_ROWS_LOST"


@dataclass(frozen=True)
class StagedFile:
    """A file of rows.

    Attributes:
        digest: of its bytes.
    """

    name: str
    rows: int
    digest: str


@dataclass(frozen=True)
class Manifest:
    """What an epoch consists of.

    Attributes:
        digest: of the rows, in any order.
        message_bytes_max: the largest row's payload, key and properties.
        keyed: whether rows have keys.
        sent: whether all rows are stored in the topic; the files are then deleted.
    """

    topic: str
    epoch: int
    rows: int
    digest: str
    message_bytes_max: int
    keyed: bool
    files: tuple[StagedFile, ...]
    sent: bool = False


class JobFolder:
    """The folder of one job. Every method may be called again after a crash."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def stage(self, batches: Iterator[pa.RecordBatch], schema: pa.Schema) -> StagedFile:
        """Store rows durably, in a new file."""
        self._path.mkdir(parents=True, exist_ok=True)
        file = self._path / f"rows-{uuid.uuid4().hex}.arrow"
        rows = 0
        with file.open("wb") as sink:
            with ipc.new_file(sink, schema, options=_OPTIONS) as writer:
                for batch in batches:
                    rows += batch.num_rows
                    writer.write_batch(batch)
            _sync(sink)
        self._sync()
        return StagedFile(file.name, rows, _digest(file))

    def read(self, staged: StagedFile) -> Iterator[pa.RecordBatch]:
        """The rows of a file, if it is as it was staged. Raises StagedRowsLostError."""
        file = self._path / staged.name
        found = _digest(file) if file.exists() else "none"
        if found != staged.digest:
            raise StagedRowsLostError(
                f"{file} is {'gone' if found == 'none' else 'not as it was staged'}; restore it",
                details={"file": str(file)},
            )
        with ipc.open_file(str(file)) as reader:
            for index in range(reader.num_record_batches):
                yield reader.get_batch(index)

    def manifest(self, epoch: int) -> Manifest | None:
        """An epoch's manifest; None: there is none yet."""
        try:
            text = self._manifest(epoch).read_text(encoding="utf-8")
        except FileNotFoundError:
            return None
        values: dict[str, Any] = json.loads(text)
        files = tuple(StagedFile(**each) for each in values.pop("files"))
        return Manifest(files=files, **values)

    def decide(self, manifest: Manifest) -> Manifest:
        """Make this the epoch's manifest, unless it has one. Returns the one that it has."""
        self._path.mkdir(parents=True, exist_ok=True)
        draft = self._draft(manifest)
        try:
            os.link(draft, self._manifest(manifest.epoch))
        except FileExistsError:
            found = self.manifest(manifest.epoch)
            assert found is not None
            return found
        finally:
            draft.unlink()
            self._sync()
        return manifest

    def finish(self, manifest: Manifest) -> None:
        """Remember that an epoch is sent, and delete its files and what else is of no use."""
        draft = self._draft(replace(manifest, sent=True))
        draft.replace(self._manifest(manifest.epoch))
        self._sync()
        self.delete([each.name for each in manifest.files])
        self._manifest(manifest.epoch - MANIFESTS_KEPT).unlink(missing_ok=True)
        oldest_s = time.time() - ORPHAN_AGE_S
        for file in self._path.glob("rows-*.arrow"):
            if file.stat().st_mtime < oldest_s:
                file.unlink(missing_ok=True)

    def delete(self, names: list[str]) -> None:
        for each in names:
            (self._path / each).unlink(missing_ok=True)

    def _manifest(self, epoch: int) -> Path:
        return self._path / f"epoch-{epoch}.json"

    def _draft(self, manifest: Manifest) -> Path:
        draft = self._path / f"draft-{uuid.uuid4().hex}.json"
        with draft.open("w", encoding="utf-8") as file:
            json.dump(asdict(manifest), file)
            _sync(file)
        return draft

    def _sync(self) -> None:
        """Make the names in the folder durable."""
        folder = os.open(self._path, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _sync(file: IO[Any]) -> None:
    file.flush()
    os.fsync(file.fileno())


def _digest(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "blake2b").hexdigest()[:32]

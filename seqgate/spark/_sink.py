"""The sink for Spark; the package describes its use.

    tasks     rows ──▶ files in the staging folder ──▶ their names, to the driver
    driver    names ──▶ the epoch's manifest ──▶ send what the log lacks ──▶ mark it sent

Nothing is sent before the manifest is durable, and nothing is sent but what it names: whatever is
killed and started again, and whatever Spark computes then, a row keeps its sequence id. See
docs/decisions/the-spark-sink-stages-then-sends.md.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

from seqgate.errors import DataLossError, InvalidRequestError, LimitExceededError
from seqgate.spark._options import (
    TIMEOUT_MAX_S,
    TIMEOUT_S,
    InvalidOptionError,
    parse_choice,
    parse_number,
)
from seqgate.spark._rows import MODULUS, measured, staged, staged_schema, wrong_column
from seqgate.spark._sending import (
    EPOCH_MAX,
    EPOCH_ROWS_MAX,
    check_size,
    first_id,
    progress,
    send,
)
from seqgate.spark._staging import JobFolder, Manifest, StagedFile
from seqgate.types import InvalidNameError, TopicName

JOB: Final = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,199}")
"""A job's id: the name of its producer, and of its folder."""


class OtherRowsError(InvalidRequestError):
    """Other rows were staged under this job's id before. Nothing of these rows was sent."""

    default_reason = "OTHER_ROWS"


class StagingLostError(DataLossError):
    """The topic has messages of this job that the staging folder knows nothing of, so it is unknown
    which rows were sent. Nothing was sent now."""

    default_reason = "STAGING_LOST"


class TooManyRowsError(LimitExceededError):
    """A write, or a micro-batch, has more rows than there are sequence ids for it. Nothing of it
    was sent."""

    default_reason = "TOO_MANY_ROWS"


@dataclass(frozen=True)
class WriteOptions:
    ledger: str
    topic: str
    job: str
    staging: Path
    timeout_s: float
    resume: bool

    @classmethod
    def parse(cls, given: Mapping[str, str]) -> "WriteOptions":
        """Parse the options, whose names are case-insensitive. Raises InvalidOptionError."""
        options = {name.lower(): value.strip() for name, value in given.items()}
        for name, what in (
            ("ledger", "HOST:PORT of the ledger service"),
            ("topic", "the topic to write to"),
            ("job", "an id of your choice, the same whenever these rows are written again"),
            ("staging", "a folder that the driver and all executors reach under this path"),
        ):
            if not options.get(name):
                raise InvalidOptionError(f"option {name} is required: {what}")
        if not JOB.fullmatch(options["job"]):
            raise InvalidOptionError(
                "option job must be 1 to 200 letters, digits, _, - and ., and not begin with ., "
                f"not {options['job']!r}"
            )
        staging = Path(options["staging"].removeprefix("file://"))
        if not staging.is_absolute():
            raise InvalidOptionError(
                f"option staging must be the absolute path of a folder, not {options['staging']!r}"
            )
        try:
            topic = str(TopicName.expand(options["topic"]))
        except InvalidNameError as error:
            raise InvalidOptionError(f"option topic, {options['topic']!r}: {error}") from error
        return cls(
            options["ledger"],
            topic,
            options["job"],
            staging,
            parse_number(options, "timeout", TIMEOUT_S, TIMEOUT_MAX_S),
            parse_choice("resume", options.get("resume", "false"), ("true", "false")) == "true",
        )

    @property
    def folder(self) -> JobFolder:
        return JobFolder(self.staging / self.job)


@dataclass(frozen=True)
class Staged(WriterCommitMessage):
    """The rows of one task. `file` is None if there are none."""

    partition: int
    file: StagedFile | None = None
    digest: int = 0
    message_bytes_max: int = 0


class SeqgateWriter(DataSourceArrowWriter):
    """Writes a DataFrame: epoch 0 of its job."""

    def __init__(self, options: WriteOptions, schema: pa.Schema) -> None:
        self._options = options
        self._schema = schema

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Staged:
        return stage(self._options, self._schema, iterator)

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        settle(self._options, self._schema, 0, messages)


class SeqgateStreamWriter(DataSourceStreamArrowWriter):
    """Writes the micro-batches of a stream: each is an epoch of the job."""

    def __init__(self, options: WriteOptions, schema: pa.Schema) -> None:
        self._options = options
        self._schema = schema

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Staged:
        return stage(self._options, self._schema, iterator)

    def commit(
        self,
        messages: Sequence[WriterCommitMessage | None],
        batchId: int,  # noqa: N803 - Spark's name
    ) -> None:
        settle(self._options, self._schema, batchId, messages)


def parsed(
    given: Mapping[str, str], schema: StructType, *, overwrite: bool
) -> tuple[WriteOptions, pa.Schema]:
    """The options and columns of a write. Raises InvalidOptionError."""
    options = WriteOptions.parse(given)
    if overwrite:
        raise InvalidOptionError("a log is only appended to: write with mode append")
    columns = [(field.name, field.dataType.simpleString()) for field in schema]
    if wrong := wrong_column(columns):
        raise InvalidOptionError(wrong)
    return options, staged_schema(columns)


def stage(options: WriteOptions, schema: pa.Schema, iterator: Iterator[pa.RecordBatch]) -> Staged:
    """Store a task's rows in the staging folder. Raises InvalidRowError, OSError."""
    context = TaskContext.get()
    digest, largest = 0, 0

    def batches() -> Iterator[pa.RecordBatch]:
        nonlocal digest, largest
        for given in iterator:
            for batch in staged(given, schema):
                total, size_bytes = measured(batch)
                digest, largest = (digest + total) % MODULUS, max(largest, size_bytes)
                yield batch

    file = options.folder.stage(batches(), schema)
    return Staged(context.partitionId() if context else 0, file, digest, largest)


def settle(
    options: WriteOptions,
    schema: pa.Schema,
    epoch: int,
    messages: Sequence[WriterCommitMessage | None],
) -> None:
    """Decide on an epoch's rows, unless that was done before, and have all of them stored."""
    folder = options.folder
    parts = sorted(
        (each for each in messages if isinstance(each, Staged)), key=lambda each: each.partition
    )
    mine = _manifest(options.topic, schema, epoch, parts)
    manifest = folder.manifest(epoch)
    if manifest is None:
        _check_new(options, mine)
        manifest = folder.decide(mine)
    _check_same(options, mine, manifest)
    if not manifest.sent:
        send(folder, manifest, options.ledger, options.job, options.timeout_s)
        folder.finish(manifest)
    named = {each.name for each in manifest.files}
    folder.delete([part.file.name for part in parts if part.file and part.file.name not in named])


def _manifest(topic: str, schema: pa.Schema, epoch: int, parts: Sequence[Staged]) -> Manifest:
    files = tuple(part.file for part in parts if part.file is not None and part.file.rows)
    return Manifest(
        topic,
        epoch,
        sum(each.rows for each in files),
        f"{sum(part.digest for part in parts) % MODULUS:032x}",
        max((part.message_bytes_max for part in parts), default=0),
        not {"key", "ordering_key"}.isdisjoint(schema.names),
        files,
    )


def _check_new(options: WriteOptions, manifest: Manifest) -> None:
    """Look whether an epoch without a manifest may begin.

    Raises:
        TooManyRowsError: it has too many rows, or too high a number.
        StagingLostError: it has begun.
        MessageTooLargeError: a row exceeds the ledger's limits.
    """
    if manifest.rows > EPOCH_ROWS_MAX or manifest.epoch > EPOCH_MAX:
        raise TooManyRowsError(
            f"epoch {manifest.epoch} with {manifest.rows:,} rows has no sequence ids: at most "
            f"{EPOCH_ROWS_MAX:,} rows, and epochs up to {EPOCH_MAX:,}"
        )
    found = progress(options.ledger, options.topic, options.job, options.timeout_s)
    if found.last >= first_id(manifest.epoch):
        raise StagingLostError(
            f"{options.topic} has messages of job {options.job} up to id {found.last}, but "
            f"{options.staging} has no manifest of its epoch {manifest.epoch}: restore the folder "
            "(and a stream's checkpoint), or write under another job id",
            details={"topic": options.topic, "job": options.job, "last": str(found.last)},
        )
    check_size(manifest, found.limits)


def _check_same(options: WriteOptions, mine: Manifest, manifest: Manifest) -> None:
    """Raises OtherRowsError if what was decided on differs, unless to resume is requested."""
    if manifest.topic == mine.topic and (
        options.resume or (manifest.rows, manifest.digest) == (mine.rows, mine.digest)
    ):
        return
    raise OtherRowsError(
        f"job {options.job}, epoch {mine.epoch}, has {manifest.rows:,} rows for {manifest.topic} "
        f"in {options.staging}, and these are others ({mine.rows:,} rows for {mine.topic}): write "
        "them under another job id, or set option resume to true to have the staged ones sent",
        details={"job": options.job, "epoch": str(mine.epoch)},
    )

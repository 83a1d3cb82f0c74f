"""Commands that start a job, a process of its own, and wait for it.

They need the extra `spark`; each is also `python -P -m` of its module, with the same options.

A job runs in any folder with the operator's credentials, so neither it nor Spark's workers import
modules from the current folder.
"""

import asyncio
import os
import signal
import sys
import sysconfig
from collections.abc import Sequence
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Final

import seqgate
from seqgate.cli._arguments import topic_pattern
from seqgate.cli._command import Run
from seqgate.cli._declared import REQUIRED, argument, choice, flag, option
from seqgate.cli._failure import WrongUsage
from seqgate.extras import pip_install
from seqgate.telemetry import spans

DEV: Final = "seqgate.dev"
REBUILD: Final = "seqgate.jobs.rebuild"
AUDIT: Final = "seqgate.jobs.audit"
COPY: Final = "seqgate.jobs.copy"


def _expanded(topics: Sequence[str]) -> list[str]:
    return [topic_pattern(each, "*?") for each in topics]


Topics = Annotated[
    list[str] | None,
    argument(
        "TOPIC...",
        "Topics, or patterns with * and ?, which without a slash are of names in public/default.",
        parse=_expanded,
        raw=list[str],
    ),
]
SkipCorrupt = Annotated[
    bool, flag("Skip unreadable entries. Their messages count as never stored.", "--skip-corrupt")
]
LogFile = Annotated[
    str | None,
    option(
        "FILE",
        "Append what Spark writes to this file, and keep it. Default: $SEQGATE_SPARK_LOG, or a "
        "temporary file that is kept if the job fails.",
    ),
]
FromEarliest = Annotated[bool, flag("Use the log alone, not snapshots.", "--from-earliest")]


class Store(StrEnum):
    SQLITE = "sqlite"
    POSTGRES = "postgres"


class JobsMissing(WrongUsage):
    """Spark is not installed in this environment."""

    default_reason = "JOBS_MISSING"


async def rebuild(
    run: Run,
    topics: Topics = None,
    *,
    from_earliest: FromEarliest = False,
    skip_corrupt: SkipCorrupt = False,
    dry_run: bool = flag("Print what a rebuild would load, and load nothing."),
    replace: bool = flag("Also replace existing state, after diff found it wrong."),
    log_file: LogFile = None,
) -> int:
    """Rebuild deduplication state from the log, with Spark.

    Default: all topics that need it. Safe to interrupt, to repeat, and to run twice at once.
    """
    options = ["--dry-run"] * dry_run + ["--replace"] * replace
    options += [*(["--from", "earliest"] * from_earliest), *_log_file(log_file)]
    return await _rebuild(run, topics, options, skip_corrupt=skip_corrupt)


async def diff(
    run: Run,
    topics: Topics = None,
    *,
    from_snapshot: bool = flag("Start from the snapshot and read only the log after it (faster)."),
    skip_corrupt: SkipCorrupt = False,
    log_file: LogFile = None,
) -> int:
    """Compare deduplication state with the whole log, with Spark.

    Exits with 1 if they differ. Read-only.
    """
    options = ["--dry-run", "--diff", *(["--from", "snapshot"] * from_snapshot)]
    options += _log_file(log_file)
    return await _rebuild(run, topics, options, skip_corrupt=skip_corrupt)


async def audit(
    run: Run,
    topics: Topics = None,
    *,
    parquet: str | None = option("DIR", "Write the findings to this folder, as Parquet."),
    log_file: LogFile = None,
) -> int:
    """Prove from the log alone that nothing is stored twice, with Spark.

    Exits with 1 if a message is stored twice, or a producer's messages are out of order.
    """
    options = [*([] if parquet is None else ["--parquet", parquet]), *_log_file(log_file)]
    return await _job(AUDIT, ["--ledger", run.settings.ledger.value, *options], run, topics)


async def copy(
    run: Run,
    *,
    sources: list[str] = option(
        "sqlite:PATH",
        "The database of a stopped ledger or cursor service.",
        "--from",
        default=REQUIRED,
        raw=list[str],
    ),
    target: str = option(
        "postgresql://...", "The database to copy it into.", "--to", default=REQUIRED
    ),
) -> int:
    """Copy a stopped installation's stores from SQLite to PostgreSQL, and compare both ends.

    Interrupted, it is continued by the same command.
    """
    options = [part for each in sources for part in ("--from", each)]
    return await _process(COPY, [*options, "--to", target], run)


async def dev(
    run: Run,
    *,
    data: str | None = option(
        "DIR", "Keep data in this folder. Default: a temporary one, deleted at the end."
    ),
    port_base: int | None = option(
        "N", "First of 7 consecutive ports; 0: free ones. Default: 7700.", min=0, max=65529
    ),
    store: Store = choice("Where logs and cursors are.", default=Store.SQLITE),
    ready_timeout: float | None = option(
        "SECONDS",
        "How long each process may take to become ready, while it is alive. Default: 300.",
        min=1.0,
    ),
) -> None:
    """Run all of Seqgate on this machine until Ctrl-C, with an embedded Redis server.

    Its ports are those that commands call by default. A process that ends is started again.
    """
    options = ["--store", store]
    options += [] if data is None else ["--data", data]
    options += [] if port_base is None else ["--port-base", str(port_base)]
    options += [] if ready_timeout is None else ["--ready-timeout", str(ready_timeout)]
    options += ["--json"] * run.output.json
    command = [sys.executable, "-m", DEV, *options]
    os.execve(sys.executable, command, {**os.environ, **_modules()})  # noqa: S606


def _log_file(file: str | None) -> Sequence[str]:
    return [] if file is None else ["--log-file", file]


async def _rebuild(
    run: Run, topics: Sequence[str] | None, options: Sequence[str], *, skip_corrupt: bool
) -> int:
    settings = run.settings
    services = ("ledger", settings.ledger), ("dedup", settings.dedup), ("cursor", settings.cursor)
    arguments = [part for name, each in services for part in (f"--{name}", each.value)]
    arguments += options
    arguments += ["--skip-corrupt"] * skip_corrupt
    return await _job(REBUILD, arguments, run, topics)


async def _job(
    module: str, arguments: Sequence[str], run: Run, topics: Sequence[str] | None
) -> int:
    if find_spec("pyspark") is None:
        raise JobsMissing(f"a job needs the packages of an extra: {pip_install('spark')}")
    patience = ["--timeout", str(max(1, round(run.settings.timeout_s)))]
    return await _process(module, [*arguments, *patience], run, ["--", *(topics or ())])


async def _process(
    module: str, arguments: Sequence[str], run: Run, operands: Sequence[str] = ()
) -> int:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        module,
        *arguments,
        *(["--json"] if run.output.json else []),
        *operands,
        env={**os.environ, **_modules(), **_shown(run), **spans.environment()},
    )
    # Ctrl-C reaches both processes; SIGTERM is passed on.
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, process.terminate)
    with run.waits.on("the job to end"):
        status = await process.wait()
    return status if status >= 0 else 128 - status


def _modules() -> dict[str, str]:
    """The variables by which a job and Spark's workers import modules: from the installation or the
    checkout of this command, never from the current folder."""
    root = str(Path(seqgate.__file__).resolve().parents[1])
    given = [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each]
    if root not in given and root not in sysconfig.get_paths().values():
        given.append(root)
    return {"PYTHONSAFEPATH": "1", "PYTHONPATH": os.pathsep.join(given)}


def _shown(run: Run) -> dict[str, str]:
    return {f"SEQGATE_{name.upper()}": each.value for name, each in run.settings.files.items()}

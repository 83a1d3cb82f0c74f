"""What the image for jobs starts with.

    executor             as Spark on Kubernetes starts its executors: all else is in the environment
    submit ARGUMENT ...  spark-submit
    driver ARGUMENT ...  as Spark on Kubernetes starts the driver, where that is a pod that Spark or
                         its operator makes
    anything else        Python, with these arguments

Nothing but the standard library, before it becomes another program.
"""

import os
import re
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Final

BACKEND: Final = "org.apache.spark.scheduler.cluster.k8s.KubernetesExecutorBackend"
"""Which program of Spark's an executor is."""

OPTION: Final = re.compile(r"SPARK_JAVA_OPT_([0-9]+)")
"""In these variables Spark passes on options for Java, one each, numbered."""

ARGUMENTS: Final = {
    "--driver-url": "SPARK_DRIVER_URL",
    "--executor-id": "SPARK_EXECUTOR_ID",
    "--cores": "SPARK_EXECUTOR_CORES",
    "--app-id": "SPARK_APPLICATION_ID",
    "--hostname": "SPARK_EXECUTOR_POD_IP",
    "--resourceProfileId": "SPARK_RESOURCE_PROFILE_ID",
    "--podName": "SPARK_EXECUTOR_POD_NAME",
}
"""The backend's arguments, and the variable in which Spark passes each on."""


def command(
    arguments: Sequence[str], environment: Mapping[str, str], *, python: str, spark: Path
) -> list[str]:
    """The program to become, and its arguments.

    Args:
        arguments: those of the container.
        environment: its variables.
        python: this interpreter.
        spark: the folder of the package pyspark.

    Raises:
        KeyError: an executor, or a driver, lacks a variable.
    """
    match arguments:
        case ["executor", *_]:
            return _executor(environment, spark)
        case ["submit", *rest]:
            return [str(spark / "bin" / "spark-submit"), *rest]
        case ["driver", *rest]:
            address = environment["SPARK_DRIVER_BIND_ADDRESS"]
            bound = ["--deploy-mode", "client", "--conf", f"spark.driver.bindAddress={address}"]
            return [str(spark / "bin" / "spark-submit"), *bound, *rest]
        case _:
            return [python, *arguments]


def _executor(environment: Mapping[str, str], spark: Path) -> list[str]:
    numbered = {
        int(found[1]): value
        for name, value in environment.items()
        if (found := OPTION.fullmatch(name))
    }
    memory = environment["SPARK_EXECUTOR_MEMORY"]
    extra = environment.get("SPARK_EXTRA_CLASSPATH", "")
    folders = [environment.get("SPARK_CONF_DIR", "/opt/spark/conf"), extra, f"{spark}/jars/*"]
    return [
        str(Path(environment["JAVA_HOME"]) / "bin" / "java"),
        *(numbered[each] for each in sorted(numbered)),
        f"-Xms{memory}",
        f"-Xmx{memory}",
        "-cp",
        ":".join(each for each in folders if each),
        BACKEND,
        *(part for flag, name in ARGUMENTS.items() for part in (flag, environment[name])),
    ]


def main() -> None:
    """Become the program."""
    spec = find_spec("pyspark")
    assert spec is not None
    assert spec.origin is not None
    program = command(
        sys.argv[1:], os.environ, python=sys.executable, spark=Path(spec.origin).parent
    )
    os.execv(program[0], program)  # noqa: S606 - that is what it is for


if __name__ == "__main__":
    main()

"""The entry point of the jobs' image, as called by Spark on Kubernetes, by an operator, and for
Python."""

import os
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pyspark
import pytest

from seqgate.spark._java import find_java, wrapped

EXECUTOR = {
    "JAVA_HOME": "/java",
    "SPARK_EXECUTOR_MEMORY": "1g",
    "SPARK_DRIVER_URL": "spark://CoarseGrainedScheduler@127.0.0.1:1",
    "SPARK_EXECUTOR_ID": "1",
    "SPARK_EXECUTOR_CORES": "1",
    "SPARK_APPLICATION_ID": "spark-application-1",
    "SPARK_EXECUTOR_POD_IP": "127.0.0.1",
    "SPARK_RESOURCE_PROFILE_ID": "0",
    "SPARK_EXECUTOR_POD_NAME": "executor-1",
}
SPARK = Path(pyspark.__path__[0])


@pytest.fixture(scope="module")
def entrypoint() -> ModuleType:
    file = Path(__file__).resolve().parents[2] / "deploy" / "docker" / "entrypoint.py"
    spec = spec_from_file_location("entrypoint", file)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_anything_but_spark_is_python(entrypoint: ModuleType) -> None:
    found = entrypoint.command(["-m", "seqgate.services.filter"], {}, python="/py", spark=SPARK)
    assert found == ["/py", "-m", "seqgate.services.filter"]


def test_submit_and_driver_are_spark_submit(entrypoint: ModuleType) -> None:
    given = ["submit", "--master", "local", "job.py"]
    found = entrypoint.command(given, {}, python="/py", spark=SPARK)
    assert found == [str(SPARK / "bin" / "spark-submit"), *given[1:]]
    given = ["driver", "--properties-file", "/opt/spark/conf/spark.properties", "job.py"]
    variables = {"SPARK_DRIVER_BIND_ADDRESS": "10.0.0.1"}
    found = entrypoint.command(given, variables, python="/py", spark=SPARK)
    assert found == [
        str(SPARK / "bin" / "spark-submit"),
        "--deploy-mode",
        "client",
        "--conf",
        "spark.driver.bindAddress=10.0.0.1",
        *given[1:],
    ]


def test_an_executors_options_for_java_are_in_their_order(entrypoint: ModuleType) -> None:
    numbered = {f"SPARK_JAVA_OPT_{n}": f"-D{n}=a b" for n in range(11, -1, -1)}
    found = entrypoint.command(["executor"], EXECUTOR | numbered, python="/py", spark=SPARK)
    assert found[:13] == ["/java/bin/java", *(f"-D{n}=a b" for n in range(12))]
    assert found[13:15] == ["-Xms1g", "-Xmx1g"]


def test_an_executor_without_its_variables_is_refused(entrypoint: ModuleType) -> None:
    for name in EXECUTOR:
        lacking = {each: value for each, value in EXECUTOR.items() if each != name}
        with pytest.raises(KeyError, match=name):
            entrypoint.command(["executor"], lacking, python="/py", spark=SPARK)


def test_sparks_executor_program_exists_and_takes_the_arguments(
    entrypoint: ModuleType, tmp_path: Path
) -> None:
    java = find_java(os.environ)
    home = java.home if java.complete else wrapped(java, tmp_path)
    options = {
        "SPARK_JAVA_OPT_0": "-XX:TieredStopAtLevel=1",
        "SPARK_JAVA_OPT_1": "-Dspark.rpc.lookupTimeout=1s",
        "SPARK_EXECUTOR_MEMORY": "128m",
    }
    given = EXECUTOR | options | {"JAVA_HOME": str(home)}
    command = entrypoint.command(["executor"], given, python=sys.executable, spark=SPARK)
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=120, cwd=tmp_path
    )
    # It parsed its arguments, and fails because its driver is not listening.
    assert done.returncode == 1
    said = done.stdout + done.stderr
    assert "Unrecognized options" not in said
    assert "127.0.0.1:1" in said

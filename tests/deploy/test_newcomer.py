"""A newcomer's first hour: the commands of the pages to install, one to run everything, and what
they would type next."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.deploy.conftest import copy_sources
from tests.deploy.test_installing import install
from tests.support.ports import consecutive_ports

PATIENCE_S = 180.0


@pytest.fixture
def environment(tmp_path: Path, root: Path) -> Path:
    """A virtual environment with Seqgate, as the pages install it, from the package index."""
    checkout = copy_sources(root, tmp_path / "checkout")
    return Path(install(root, checkout, os.environ)).parents[1]


@pytest.mark.deep
def test_the_first_hour(tmp_path: Path, environment: Path, root: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    done = subprocess.run(
        ["sh", str(root / "tests" / "deploy" / "first_hour.sh"), str(consecutive_ports(7))],
        cwd=folder,
        env={
            "PATH": f"{environment / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "HOME": str(folder),
        },
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, ""), (done, (folder / "dev.log").read_text())
    summaries = [line.split() for line in done.stdout.splitlines() if is_summary(line)]
    counts = [each[1:4] for each in summaries]  # sent, stored, duplicates
    assert ["".join(each) for each in counts] == ["110", "101", "110", "220", "202"]
    assert "Verdict" in done.stdout
    assert "duplicate" in done.stdout
    consumed = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    by_key = {key: [m["payload"] for m in consumed if m["key"] == key] for key in ("alice", "bob")}
    assert by_key == {"alice": ["2 apples", "three", "four"], "bob": ["1 pear"]}
    assert "ledger was killed by SIGKILL, and is started again" in (folder / "dev.log").read_text()


def is_summary(line: str) -> bool:
    """Whether a line is the summary of a publish: a producer and four counts."""
    words = line.split()
    return len(words) == 5 and all(each.isdecimal() for each in words[1:])

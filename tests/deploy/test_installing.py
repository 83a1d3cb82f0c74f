"""What pages have their readers type to install Seqgate installs it, in a checkout."""

import os
import subprocess
import sysconfig
from collections.abc import Mapping
from pathlib import Path

from tests.deploy.conftest import copy_sources
from tests.support.depth import times
from tests.support.page_programs import of_page

PAGES = ("README.md", "docs/start.md")

DOWNLOAD_S = 600.0


def install(root: Path, checkout: Path, environment: Mapping[str, str]) -> str:
    """Type what both pages have in a checkout. Returns what the commands print last: where the
    command `seqgate` is."""
    blocks = {
        each.code for page in PAGES for each in of_page(root / page) if "pip install" in each.code
    }
    (commands,) = blocks
    done = subprocess.run(
        ["bash", "-eu", "-c", f"{commands}\nseqgate --version\ncommand -v seqgate"],
        cwd=checkout,
        env=environment,
        capture_output=True,
        text=True,
        timeout=DOWNLOAD_S,
        check=False,
    )
    assert done.returncode == 0, done
    assert "does not provide the extra" not in done.stderr
    return done.stdout.splitlines()[-1]


def test_the_commands_of_pages_install_seqgate_with_its_extra(root: Path, tmp_path: Path) -> None:
    """Without a package index: what Seqgate needs is installed here, and found by pip."""
    checkout = copy_sources(root, tmp_path / "checkout")
    own = {key: value for key, value in os.environ.items() if not key.startswith("PIP_")}
    offline = {
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_NO_BUILD_ISOLATION": "0",  # which means no isolation: the build takes our setuptools
        "PIP_NO_INDEX": "1",
        "PYTHONPATH": sysconfig.get_path("purelib"),
    }
    for _ in range(times(quick=1, full=2)):
        at = install(root, checkout, own | offline)
        assert at == str(checkout / "venv" / "bin" / "seqgate")

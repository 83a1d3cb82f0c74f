"""What the README names exists. test_site_programs.py runs its programs."""

import re
from pathlib import Path


def test_the_targets_and_files_named_by_the_readme_exist(root: Path) -> None:
    text = (root / "README.md").read_text()
    makefile = (root / "Makefile").read_text()
    for target in re.findall(r"make (\w+)", text):
        assert f"\n{target}:" in makefile
    for named in re.findall(
        r"\]\((?!http)([^)]+)\)|\b((?:deploy/k8s|deploy/docker|services)/[\w./-]+)", text
    ):
        assert (root / "".join(named)).exists()

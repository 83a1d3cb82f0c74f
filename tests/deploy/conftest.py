"""Tests that need a tool other than a Python package are collected only if the tool is installed.
Each run reports those left out once."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.left_out import report_left_out
from tools.dev.kubectls import FOLDER, minors

SOURCES = ("pyproject.toml", "README.md", "LICENSE", "seqgate", "services")
"""The sources of a wheel."""

KUBECTLS = tuple(str(FOLDER / f"kubectl-1.{each}") for each in minors())

NEEDS = {
    "test_manifests.py": ("kubectl", "kustomize"),
    "test_overrides.py": KUBECTLS,
    "test_pods.py": ("kubectl", "kustomize"),
    "test_alerts.py": ("promtool",),
    "test_image.py": ("buildah", "podman"),
}
"""The tools that a file of tests needs: all of them, but only one of kubectl and kustomize."""


def missing(file: str) -> str:
    """The missing tools of a file of tests; empty if it can run."""
    tools = NEEDS.get(file, ())
    absent = [tool for tool in tools if shutil.which(tool) is None]
    if "kustomize" in tools:
        return "kubectl or kustomize" if len(absent) == len(tools) else ""
    return " and ".join(absent)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip files whose tools are missing, and report them."""
    if collection_path.parent != Path(__file__).parent:
        return None
    lacking = missing(collection_path.name)
    if not lacking:
        return None
    report_left_out(config, f"tests/deploy/{collection_path.name}", lacking)
    return True


def copy_sources(root: Path, folder: Path) -> Path:
    """A copy, because setuptools also packs what an earlier build left in build/."""
    folder.mkdir()
    for name in SOURCES:
        if (root / name).is_file():
            shutil.copy(root / name, folder)
        else:
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(root / name, folder / name, symlinks=True, ignore=ignored)
    return folder


@pytest.fixture(scope="session")
def wheel(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    source = copy_sources(root, folder / "source")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-index"]
    command += ["--no-build-isolation", "--wheel-dir", str(folder), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (built,) = folder.glob("*.whl")
    return built

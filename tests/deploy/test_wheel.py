"""The wheel: its contents, and that all of it runs from any folder."""

import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Mapping
from compileall import compile_dir
from email import message_from_string
from pathlib import Path

import pytest

from tests.deploy.manifests import SERVICES
from tests.support.depth import some_of

SEQGATE = ("-c", "import sys; from seqgate.cli import main; sys.exit(main())")
"""The effect of the script `seqgate`."""

COMMANDS = {
    "seqgate": SEQGATE,
    **{
        f"seqgate {name}": (*SEQGATE, *name.split())
        for name in ("dev", "dedup rebuild", "topic audit")
    },
    **{name: ("-m", f"seqgate.services.{name}") for name in SERVICES},
    **{name: ("-m", f"seqgate.jobs.{name}") for name in ("rebuild", "audit")},
    "dev": ("-m", "seqgate.dev"),
}

PATIENCE_S = 120.0


@pytest.fixture(scope="session")
def installed(wheel: Path) -> Path:
    """A folder with the contents that the wheel installs into site-packages."""
    folder = wheel.parent / "site-packages"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    compile_dir(folder, quiet=2)  # as pip does
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder in which commands are started, with tools and services of its own: what needs a
    folder of that name fails here as in any other."""
    for name in ("tools", "services"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"raise ImportError('a foreign {name}')\n")
    return tmp_path


def environment(installed: Path) -> Mapping[str, str]:
    """Variables with which Python finds the wheel before the checkout."""
    own = {key: value for key, value in os.environ.items() if not key.startswith("SEQGATE_")}
    return {**own, "PYTHONPATH": str(installed)}


def files_below(folder: Path) -> Iterator[str]:
    for file in folder.rglob("*"):
        if file.is_file() and "__pycache__" not in file.parts:
            yield file.relative_to(folder).as_posix()


def test_the_top_level_is_one_package(installed: Path) -> None:
    names = {each.name.partition("-")[0] + each.suffix for each in installed.iterdir()}
    assert names == {"seqgate", "seqgate.dist-info"}


def test_the_wheel_has_all_code_of_seqgate_and_services(installed: Path, root: Path) -> None:
    found = set(files_below(installed / "seqgate"))
    services = {f"services/{each}" for each in files_below(root / "services")}
    assert found == {*files_below(root / "seqgate"), *services}


def test_extras_hold_dependencies_that_a_client_does_not_need(installed: Path) -> None:
    (metadata,) = installed.glob("*.dist-info/METADATA")
    required = message_from_string(metadata.read_text()).get_all("Requires-Dist", [])
    client = {re.split("[<>=]", each)[0] for each in required if "extra ==" not in each}
    assert client == {
        "google-crc32c",
        "googleapis-common-protos",
        "grpcio",
        "grpcio-status",
        "lz4",
        "opentelemetry-api",
        "protobuf",
        "xxhash",
        "zstandard",
    }


def test_the_wheel_installs_one_command(installed: Path) -> None:
    (scripts,) = installed.glob("*.dist-info/entry_points.txt")
    assert scripts.read_text().split("\n")[:2] == [
        "[console_scripts]",
        "seqgate = seqgate.cli:main",
    ]


def test_each_command_shows_its_help(installed: Path, folder: Path) -> None:
    running = {
        name: subprocess.Popen(
            [sys.executable, *command, "--help"],
            cwd=folder,
            env=environment(installed),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for name, command in some_of(list(COMMANDS.items()), every=3)
    }
    for name, process in running.items():
        out, error = process.communicate(timeout=PATIENCE_S)
        assert (process.returncode, error) == (0, ""), name
        assert "usage: " in out.lower(), name


def test_modules_are_imported_from_the_wheel(installed: Path, folder: Path) -> None:
    modules = [
        f"seqgate.{each}" for each in ("client", "cli", "services.dedup.app", "jobs.rebuild")
    ]
    program = f"""if True:
        import importlib
        for name in {modules}:
            print(importlib.import_module(name).__file__)
    """
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=folder,
        env=environment(installed),
        capture_output=True,
        text=True,
        check=True,
    )
    files = [Path(each) for each in done.stdout.splitlines()]
    assert len(files) == len(modules)
    assert all(each.is_relative_to(installed) for each in files), files

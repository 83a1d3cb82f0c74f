"""The contract: callers of the last release stay served, and protos/ compiles alone."""

import json
import os
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest

from tools.dev import protos

FIELD = "  bool delivery_runs = 10;"


@pytest.mark.parametrize(
    ("changed", "found"),
    [
        (f"{FIELD}\n  // One more.\n  bool another = 11;", ""),
        ("  uint32 delivery_runs = 10;", 'changed type from "bool" to "uint32"'),
        ("  reserved 10;", "delivery_runs"),
    ],
)
def test_only_changes_that_break_callers_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, changed: str, found: str
) -> None:
    copy = tmp_path / "protos"
    shutil.copytree(protos.PROTOS, copy)
    file = copy / "seqgate/api/dispatcher/v1/dispatcher.proto"
    text = file.read_text()
    assert text.count(FIELD) == 1
    file.write_text(text.replace(FIELD, changed))
    monkeypatch.setattr(protos, "PROTOS", copy)
    faults = protos.lint()
    assert len(faults) == bool(found)
    assert all(found in fault for fault in faults)


def test_buf_generates_code_from_a_copy_of_protos_without_a_network(tmp_path: Path) -> None:
    copy = tmp_path / "protos"
    shutil.copytree(protos.PROTOS, copy)
    plugin = {"local": "protoc-gen-mypy", "out": "gen", "opt": "quiet"}
    template = json.dumps({"version": "v2", "plugins": [plugin]})
    scripts = sysconfig.get_path("scripts")
    environment = {"PATH": f"{scripts}:{os.environ['PATH']}", "HOME": str(tmp_path)}
    environment |= dict.fromkeys(("HTTPS_PROXY", "HTTP_PROXY"), "http://127.0.0.1:9")
    command = [f"{scripts}/buf", "generate", "--template", template]
    done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    generated = files(copy / "gen")
    assert {each for each in generated if each.startswith("google/")} == {
        "google/rpc/error_details_pb2.pyi",
        "google/rpc/status_pb2.pyi",
    }
    committed = {f"seqgate/api/{name}": text for name, text in files(protos.GENERATED).items()}
    assert committed.items() <= generated.items()


def files(folder: Path) -> dict[str, str]:
    """The stubs of messages below a folder."""
    found = folder.rglob("*_pb2.pyi")
    return {str(each.relative_to(folder)): each.read_text() for each in found}

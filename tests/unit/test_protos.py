"""tools/dev/protos.py: callers of the last released version stay served."""

import shutil
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

"""One message's journey through real services, as a tree and as a file."""

import json
from pathlib import Path

import pytest

from tests.integration.services import running
from tools.demo.journey import TOPIC, following


async def test_a_message_is_traced_through_a_stack(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with following(wanted=True) as spans:
        async with running(tmp_path / "stack", **spans.environment) as services:
            await spans.travel(services.stack)
        spans.show(tmp_path)
    said = capsys.readouterr().out
    lines = said.splitlines()
    for step in (
        "  demo: one message ",
        f"    demo: send {TOPIC} ",
        f"      ledger: publish {TOPIC} ",
        f"        ledger: admit {TOPIC} ",
        f"        ledger: append {TOPIC} ",
        f"        ledger: confirm {TOPIC} ",
        f"      dispatcher: deliver {TOPIC} ",
        f"      demo: process {TOPIC} ",
        f"        demo: ack {TOPIC} ",
    ):
        assert sum(line.startswith(step) for line in lines) == 1, f"{step}\n{said}"
    written = [json.loads(line) for line in (tmp_path / "trace.jsonl").read_text().splitlines()]
    assert {f"send {TOPIC}", f"process {TOPIC}"} <= {span["name"] for span in written}
    assert [span["start_ns"] for span in written] == sorted(span["start_ns"] for span in written)


async def test_nothing_is_traced_by_default(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    async with following(wanted=False) as spans:
        assert spans.environment == {}
        spans.show(tmp_path)
    assert capsys.readouterr().out == ""
    assert list(tmp_path.iterdir()) == []

"""The committed page of the benchmarks, and the README's figures, are made from a report."""

import json
from pathlib import Path
from typing import Any

import pytest

from tools.bench import document

README = f"# Ours\n\n{document.BEGIN}{document.END}\n## More\n"


def figure(group: str, name: str, value: float, **more: Any) -> dict[str, Any]:
    spread = {"value": value, "min": value - 1, "max": value + 1}
    nothing = {"unit": "messages/s", "limit": None, "ratio": None}
    return {"group": group, "name": name, **spread, **nothing, **more}


def report(*measurements: dict[str, Any]) -> dict[str, Any]:
    return {
        "date": "2026-11-01",
        "command": "make bench",
        "machine": {"cpus": 2, "cpu_model": "some | model"},
        "left_out": ["a peer, which is not here"],
        "measurements": list(measurements),
    }


PEER = figure("peers", "A log: publish, unbatched", 1_000.0, cpu_us={"log": 90.0, "others": 5.0})
OURS = figure(
    "peers",
    "Seqgate: publish, unbatched",
    20_000.0,
    limit={"name": PEER["name"], "value": 1_000.0},
    ratio=20.0,
    ratio_min=19.0,
    ratio_max=21.0,
    cpu_us={"client": 20.0, "ledger": 10.5, "others": 1.0},
)


def test_the_page_has_a_table_for_each_group_and_how_it_was_measured() -> None:
    text = document.document(report(figure("disk", "write", 12.5), PEER, OURS))
    assert "Measured on 2026-11-01 by `make bench`." in text
    assert "Left out: a peer, which is not here." in text
    assert r"| cpu_model | some \| model |" in text
    assert text.index("## disk") < text.index("| write | 12.5 |") < text.index("## peers")
    assert "| 2000%, 1900% … 2100% |" in text
    assert "client 20.0, ledger 10.5, others 1.0" in text
    tables = [line.count(" | ") for line in text.split("## peers")[1].splitlines() if line]
    assert len(set(tables)) == 1


def test_the_readme_shows_figures_beside_their_peers_again_and_again(tmp_path: Path) -> None:
    file, readme = tmp_path / "report.json", tmp_path / "README.md"
    readme.write_text(README)
    file.write_text(json.dumps(report(PEER, OURS)))
    arguments = ["--report", str(file), "--root", str(tmp_path)]

    assert document.main(arguments) == 0
    shown = readme.read_text()
    assert (
        "| publish, unbatched | 20,000 messages/s, 30.5 µs of processor each "
        "| 1,000 messages/s, 90.0 µs of processor each (A log) |"
    ) in shown
    assert shown.startswith("# Ours\n")
    assert shown.endswith("## More\n")
    kept = tmp_path / "docs" / "benchmarks"
    assert json.loads((kept / "report.json").read_text()) == report(PEER, OURS)
    assert (kept / "README.md").read_text() == document.document(report(PEER, OURS))

    document.main(arguments)
    assert readme.read_text() == shown


def test_some_groups_of_another_run_say_how_it_measured(tmp_path: Path) -> None:
    file, readme = tmp_path / "report.json", tmp_path / "README.md"
    readme.write_text(README)
    arguments = ["--report", str(file), "--root", str(tmp_path)]
    file.write_text(json.dumps(report(PEER, OURS, figure("spark", "old", 1.0))))
    document.main(arguments)
    shown = readme.read_text()
    limits = figure("peers", "a limit, and not kept", 1.0)
    some = report(limits, figure("spark", "new", 2.0), figure("rebuild", "new", 3.0))
    some |= {"date": "2026-11-02", "command": "python -m tools.bench --only spark,rebuild"}
    some["machine"]["load_before"] = 4.5
    file.write_text(json.dumps(some))

    assert document.main([*arguments, "--only", "spark,rebuild"]) == 0
    assert readme.read_text() == shown
    kept = tmp_path / "docs" / "benchmarks"
    found = json.loads((kept / "report.json").read_text())["measurements"]
    assert [(each["group"], each["name"]) for each in found[2:]] == [
        ("spark", "new"),
        ("rebuild", "new"),
    ]
    text = (kept / "README.md").read_text()
    assert text.startswith("# Benchmarks\n\nMeasured on 2026-11-01 by `make bench`.")
    how = (
        "Measured on 2026-11-02 by `python -m tools.bench --only spark,rebuild`, on a machine with"
    )
    assert text.count(f"{how} a load of 4.5 before.") == 2


def test_without_a_peer_the_readme_shows_no_figures() -> None:
    assert document.summary(report({**OURS, "limit": None})) == ""
    assert document.with_summary(README, "") == README


def test_a_readme_without_marks_is_refused() -> None:
    with pytest.raises(ValueError, match="marks"):
        document.with_summary("# Ours", "text")


def test_our_readme_has_the_marks() -> None:
    text = Path(document.ROOT, "README.md").read_text()
    assert document.BEGIN in text.partition(document.END)[0]

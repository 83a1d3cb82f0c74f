"""The torture's page and report: complete, self-contained, and consistent with the journals."""

import json
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tools.stack.journal import Journal, journals, lines
from tools.torture.__main__ import parsed
from tools.torture.faults import Fault, Kind
from tools.torture.figures import by_second, figures_of, percentiles
from tools.torture.happening import Happened
from tools.torture.report import logged, write_report
from tools.torture.torturing import Options, Tortured
from tools.torture.violation import Violation

SECOND_NS = 1_000_000_000
VOID = {"meta"}


class Elements(HTMLParser):
    """The elements of a page; fails on an element without an end tag."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def written(folder: Path, *violations: Violation) -> Options:
    """A torture with a complete record."""
    (folder / "journals").mkdir()
    producer, consumer = (Journal(folder / "journals", name) for name in ("p", "c"))
    producer.write("sent", n=0, s=7)
    producer.write("receipt", n=0, s=7, id="1:0:-1", dup=False)
    producer.write("failed", n=1, why="SEND_TIMEOUT")
    consumer.write("given", u="p.0", k=[1, 1, -1], id="1:0:-1")
    consumer.write("done", k=[1, 1, -1])
    began_ns = next(lines(producer.path))["t"]
    fault = Happened(
        Fault(1.0, Kind.KILL, "<ledger>", 2.0), began_ns + SECOND_NS, began_ns + 3 * SECOND_NS
    )
    options = Options(folder, 60, "a-seed")
    ended_ns = began_ns + 100 * SECOND_NS
    tortured = Tortured(list(violations), [fault], began_ns, began_ns + 60 * SECOND_NS, ended_ns)
    write_report(options, tortured)
    return options


def elements(folder: Path) -> Elements:
    page = Elements()
    page.feed((folder / "index.html").read_text())
    page.close()
    assert page.open == []
    return page


def test_the_page_is_complete_and_self_contained(tmp_path: Path) -> None:
    written(tmp_path)
    page = elements(tmp_path)
    assert {"html", "svg", "polyline", "rect", "table"} <= {tag for tag, _ in page.found}
    outside = {"src", "href", "srcset", "xlink:href", "action", "data"}
    assert not [attrs for _, attrs in page.found if outside & attrs.keys()]
    source = (tmp_path / "index.html").read_text()
    assert "<script" not in source
    assert "url(" not in source
    assert "@import" not in source


def test_faults_are_shown_at_their_time_and_process(tmp_path: Path) -> None:
    written(tmp_path)
    assert f"{Kind.KILL.text}: <ledger>, 1.0 to 3.0 s" in elements(tmp_path).text


def test_violations_are_shown_and_escaped(tmp_path: Path) -> None:
    written(tmp_path, Violation("LOST", "a/b/c", "<script>p.1</script>"))
    page = elements(tmp_path)
    assert "1 violations." in page.text
    assert "<script>p.1</script>" in page.text
    assert "script" not in {tag for tag, _ in page.found}


def test_the_report_agrees_with_the_journals(tmp_path: Path) -> None:
    written(tmp_path, Violation("LOST", "a/b/c", "p.1", 5))
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["seed"] == "a-seed"
    assert report["operations"] == {"sent": 1, "receipt": 1, "failed": 1, "given": 1, "done": 1}
    assert report["faults"] == {"KILL": 1}
    assert report["errors"] == {"failed SEND_TIMEOUT": 1}
    assert report["violations"] == [{"kind": "LOST", "where": "a/b/c", "what": "p.1", "at_ns": 5}]
    assert report["versions"].keys() >= {"python", "grpcio", "apsw"}
    assert report["receipt_ms"]["max"] >= 0


def test_warnings_of_services_are_counted(tmp_path: Path) -> None:
    lost = '{"level": "warning", "event": "topic lost"}'
    ready = '{"level": "info", "event": "ready"}'
    failed = '{"level": "error", "event": "one\\ntwo"}'
    said = [lost, ready, "no object", failed, "[1]", lost]
    (tmp_path / "ledger-1.log").write_text("\n".join(said))
    assert logged(tmp_path) == {"ledger warning: topic lost": 2, "ledger error: one": 1}


def test_latency_spans_the_receipt_to_the_first_delivery() -> None:
    told = {
        "p": [
            {"t": 0, "e": "sent", "n": 0},
            {"t": SECOND_NS, "e": "receipt", "n": 0},
        ],
        "c": [
            {"t": 3 * SECOND_NS, "e": "given", "u": "p.0"},
            {"t": 9 * SECOND_NS, "e": "given", "u": "p.0"},
        ],
    }
    figures = figures_of(told, 0)
    assert figures.receipts == [(1.0, 1_000.0)]
    assert figures.waits == [(3.0, 2_000.0)]
    assert figures.series["given"] == {3: 1, 9: 1}


def test_percentiles_are_observed_values() -> None:
    assert percentiles([3.0, 1.0, 2.0]) == {"p50": 2.0, "p99": 3.0, "p999": 3.0, "max": 3.0}
    assert percentiles([]) == {}
    assert by_second([(0.2, 5.0), (0.9, 7.0), (2.0, 1.0)], 1.0) == [(0.0, 7.0), (2.0, 1.0)]


def test_a_line_truncated_by_a_crash_is_ignored(tmp_path: Path) -> None:
    Journal(tmp_path, "p").write("sent", n=0)
    with (tmp_path / "p.jsonl").open("a") as file:
        file.write('{"t": 1, "e": "se')
    assert [line["e"] for line in lines(tmp_path / "p.jsonl")] == ["sent"]
    Journal(tmp_path, "p").write("sent", n=1)
    assert [line["n"] for line in lines(journals(tmp_path)["p"])] == [0, 1]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--minutes", "0"],
        ["--rate", "0"],
        ["--seed", "../x"],
        ["--limits", "none"],
        ["--store", "redis"],
        ["--ledger", "h:1", "--dispatcher", "h:1", "--store", "postgres"],
        ["--ledger", "h:1"],
        ["--dispatcher", "h:1"],
        ["--cursor", "h:1"],
        ["--certificate", "c", "--key", "k"],
        ["--ca", "a", "--key", "k"],
    ],
)
def test_malformed_options_are_refused(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as refusal:
        parsed(arguments)
    assert refusal.value.code == 2


def test_a_foreign_folder_is_not_changed(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    with pytest.raises(SystemExit):
        parsed(["--seed", "mine", "--out", str(tmp_path)])

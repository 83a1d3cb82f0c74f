"""The demo, on a part of its input."""

import json
import sys
from pathlib import Path

import pytest

from seqgate.dev.stack import Stack
from tests.support.jobs import quick_spark
from tools.demo import __main__ as demo
from tools.demo import filtering, proof
from tools.demo.dataset import Original
from tools.demo.filtering import filter_flights
from tools.demo.report import LABELS, Screen, broken

FLIGHTS = 10_000


# Five processes publish while others die, and then Spark runs three jobs.
pytestmark = pytest.mark.timeout(400)


@pytest.mark.parametrize(
    "store", ["SQLite", pytest.param("PostgreSQL, 3 nodes", marks=pytest.mark.deep)]
)
async def test_the_demo_proves_that_every_flight_is_stored_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, store: str
) -> None:
    for name, value in quick_spark(tmp_path).items():
        monkeypatch.setenv(name, value)
    on_postgres = store != "SQLite"
    assert await demo.run(tmp_path / "demo", 7, FLIGHTS, on_postgres=on_postgres) == 0
    report = json.loads((tmp_path / "demo" / "report.json").read_text())
    assert report["store"] == store
    assert report["failovers"] == on_postgres
    assert report["stored"] == FLIGHTS
    assert report["sent"] - report["resent"] == FLIGHTS
    assert report["stored_twice"] == report["lost"] == 0
    assert report["faults"] > 0
    assert report["large_messages_sent"] == report["large_messages_read"] == 6
    assert report["large_messages_chunks"] > 6 * 10
    assert report["large_message_crashes"] > 0
    assert report["large_message_attempts_aborted"] > 0
    assert report["orphan_chunks_delivered"] == report["large_messages_wrong"] == 0
    assert report["rebuild"]["topics"] == 1
    assert report["rebuild"]["producers"] == report["producers"] + 3
    assert report["rebuild"]["differences"] == report["rebuild"]["failed"] == 0
    assert report["audit"]["messages"] == FLIGHTS + 6
    assert report["audit"]["findings"] == 0
    conflicts = report["conflicts"]
    assert conflicts["reported"] == conflicts["refused"] > 0
    assert conflicts["silent"] == conflicts["false"] == 0
    delivered = report["deliver"]
    assert delivered["missing"] == 0 < delivered["refused"]
    assert delivered["key_order_violations"] == delivered["exclusivity_violations"] == 0
    assert delivered["keys_blocked_by_the_stuck_one"] <= 1
    filtered = report["filter"]
    assert filtered["filtered_actual"] == filtered["filtered_expected"] > 0
    assert filtered["wrong"] == filtered["early"] == 0 < filtered["waited"]
    assert 0 < filtered["rejected"] < filtered["entries"] < delivered["delivered"]
    assert filtered["payloads_opened"] == 0
    mended = report["mend"]
    assert mended["redriven"] == mended["dead_letters"] == mended["cancelled"] > 0
    assert 0 < mended["explained"] <= mended["dead_letters"]
    assert mended["missing"] == mended["doubled"] == mended["key_order_violations"] == 0


async def test_the_demo_fails_when_a_promise_is_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flights = [Original("UA", each, None, {"origin": "EWR"}, b"{}") for each in range(200)]
    monkeypatch.setattr(demo, "load_flights", lambda _: flights)

    def done(part: str) -> dict[str, float]:
        """A part of the report, with every promise kept."""
        of_part = (path.split(".") for path in LABELS if path.startswith(f"{part}."))
        return {name: LABELS[f"{part}.{name}"].startswith("+ ") for _, name in of_part}

    async def marks(_: object) -> dict[str, int | None]:
        return {"UA": 1, "EWR": 201302, "JFK": 201302, "LGA": 201302}

    async def recovered(_: object) -> tuple[dict[str, float], dict[str, float]]:
        return done("rebuild"), done("audit")

    async def delivered(*_: object) -> dict[str, float]:
        return done("deliver")

    async def filtered(*_: object) -> dict[str, float]:
        return done("filter")

    async def mended(*_: object) -> dict[str, float]:
        return done("mend")

    monkeypatch.setattr(demo, "deliver", delivered)
    monkeypatch.setattr(demo, "filter_flights", filtered)
    monkeypatch.setattr(demo, "mend_flights", mended)
    monkeypatch.setattr(proof, "marks", marks)
    monkeypatch.setattr(demo, "recover", recovered)
    assert await demo.run(tmp_path / "demo", 7, None) == 1
    report = json.loads((tmp_path / "demo" / "report.json").read_text())
    assert report["marks_wrong"] == 1
    assert "marks_wrong" in broken(report)


async def test_a_dispatcher_that_opens_batches_breaks_a_promise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(filtering, "OUTAGE_S", 0.2)
    origins = ["EWR", "EWR", "JFK", "EWR", "LGA"]
    flights = [
        Original("UA", each, "N1", {"origin": origins[each % len(origins)]}, f"{each}".encode())
        for each in range(200)
    ]
    opening = {"dispatcher": (sys.executable, "-m", "tools.bench.opening")}
    with Screen() as screen:
        async with Stack(tmp_path, commands=opening) as stack:
            filtered = await filter_flights(stack, flights, screen)
    assert filtered["filtered_actual"] == filtered["filtered_expected"] == 120
    assert (filtered["entries"], filtered["rejected"]) == (160, 80)
    assert filtered["payloads_opened"] >= filtered["entries"]
    assert broken({"filter": filtered}) == ["filter.payloads_opened"]

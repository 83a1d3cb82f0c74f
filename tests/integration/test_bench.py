"""The benchmarks' reports, on short runs; not their figures."""

import asyncio
import json
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from html import escape
from pathlib import Path
from typing import Any

import pytest

from seqgate.dev.child import tell
from tests.support.waiting import eventually
from tools.bench import peers
from tools.bench.__main__ import INTERRUPTED, parse

pytestmark = pytest.mark.deep

WITHIN_S = 300.0
"""Limit of one run, in seconds: it computes for 10 to 20 seconds on a shared machine."""

FIELDS = {"group", "name", "unit", "value", "min", "max", "rounds", "limit", "ratio"}


class Run:
    """A run of the benchmarks whose processes can be identified."""

    def __init__(self, root: Path, folder: Path) -> None:
        self._root = root
        self._report = folder / "made" / "report.json"
        self._mark = f"SEQGATE_TEST_BENCH={folder}"
        self._started: list[Process] = []

    async def start(self, *arguments: str) -> Process:
        name, _, value = self._mark.partition("=")
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tools.bench", "--report", str(self._report), *arguments),
            cwd=self._root,
            env={**os.environ, name: value},
            stdout=PIPE,
            stderr=PIPE,
        )
        self._started.append(process)
        return process

    async def end(self) -> None:
        """Kill the run of a failed test; its children end with it."""
        for process in self._started:
            tell(process, signal.SIGKILL)
            await process.wait()

    async def finish(self, *arguments: str) -> str:
        """Wait until the run has ended. Returns its output."""
        process = await self.start("--seconds-per-measurement", "0.05", *arguments)
        async with asyncio.timeout(WITHIN_S):
            wrote, trouble = await process.communicate()
        assert process.returncode == 0, trouble.decode()
        self.leaves_nothing()
        return wrote.decode()

    async def figures(self, group: str) -> dict[str, dict[str, Any]]:
        """The figures of a group and of the limits that it needs, by name, measured in a minimal
        run."""
        wrote = await self.finish("--json", "--seconds-per-measurement", "0.004", "--only", group)
        return {each["name"]: each for each in json.loads(wrote)["measurements"]}

    @property
    def report(self) -> dict[str, Any]:
        report: dict[str, Any] = json.loads(self._report.read_text())
        return report

    @property
    def page(self) -> str:
        return self._report.with_name("index.html").read_text()

    def leaves_nothing(self) -> None:
        assert self.processes == []
        assert list(self._report.parent.glob("stack-*")) == []

    @property
    def processes(self) -> list[str]:
        """The commands of the running processes."""
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            try:
                if self._mark.encode() in (process / "environ").read_bytes().split(b"\0"):
                    found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode())
            except OSError:
                continue  # the process has ended
        return found


@pytest.fixture
async def bench(root: Path, tmp_path: Path) -> AsyncIterator[Run]:
    run = Run(root, tmp_path)
    try:
        yield run
    finally:
        await run.end()


async def test_figures_are_reported_beside_their_limits(bench: Run, root: Path) -> None:
    wrote = await bench.finish("--json", "--only", "exchange,price")

    report = json.loads(wrote)
    assert bench.report == report
    assert report["machine"]["cpus"] == len(os.sched_getaffinity(0))
    assert {"python", "kernel", "disk", "memory_gib"} <= set(report["machine"])
    again = "python -m tools.bench --only exchange,price --seconds-per-measurement 0.05"
    assert report["command"] == again
    assert str(root) not in wrote
    assert os.uname().nodename not in report["machine"].values()

    found: dict[str, list[dict[str, Any]]] = {}
    for each in report["measurements"]:
        found.setdefault(each["group"], []).append(each)
        assert set(each) >= FIELDS
        assert each["rounds"] >= 3
        assert 0 < each["min"] <= each["value"] <= each["max"]
        if each["limit"] is None:
            assert each["ratio"] is None
        else:
            reached = each["value"] / each["limit"]["value"]
            expected = 1 / reached if each["unit"] == "ms" else reached
            assert each["ratio"] == pytest.approx(expected, rel=1e-3)
    assert list(found) == ["redis", "grpc", "exchange", "price"]
    assert all(each["limit"] for each in found["exchange"] if "p99" not in each["name"])
    for each in found["price"]:
        assert set(each["cpu_percent"]) == {"client", "ledger", "dedup", "redis", "others"}
        assert set(each["cpu_us"]) == set(each["cpu_percent"])

    shown = bench.page
    for each in report["measurements"]:
        assert escape(each["name"]) in shown
    assert str(root) not in shown


async def test_text_output_has_tables(bench: Run) -> None:
    wrote = await bench.finish("--only", "store")

    (row,) = [line for line in wrote.splitlines() if "100 entries of 100 B" in line]
    assert "entries/s" in row
    assert "fdatasync 20 kB" in row
    assert "%" in row
    assert any("MB/s" in line for line in wrote.splitlines())
    assert [each["group"] for each in bench.report["measurements"]] == ["disk"] * 4 + ["store"] * 6


async def test_large_messages_are_compared_with_the_same_bytes_in_small_ones(bench: Run) -> None:
    report = json.loads(await bench.finish("--json", "--only", "large"))

    found = {each["name"]: each for each in report["measurements"] if each["group"] == "large"}
    assert len(found) == 18
    for kind in ("publish", "read"):
        for size, mib in (("1 MiB", 1), ("64 KiB", 1 / 16)):
            for ledger in ("", ", null ledger"):
                uncut = found[f"{kind}, single messages of {size}{ledger}"]
                chunked = found[f"{kind}, 4 MiB in chunks of {size}{ledger}"]
                assert uncut["mb_per_s"] == pytest.approx(uncut["value"] * mib * 1.048576, rel=1e-3)
                assert chunked["limit"]["name"] == uncut["name"]
                expected = chunked["mb_per_s"] / uncut["mb_per_s"]
                assert chunked["ratio"] == pytest.approx(expected, rel=1e-3)
            name = f"{kind}, single messages of {size}"
            limits = (f"{name}, null ledger", f"store append, {round(8 / mib)} entries")
            assert found[name]["limit"]["name"].startswith(limits)


async def test_recoveries_are_compared_with_a_publish_without_loss(bench: Run) -> None:
    found = await bench.figures("recovery")
    for states in (100, 1_000):
        loaded = found[f"LoadState, {states:,} states a call"]
        assert loaded["limit"]["name"] == f"Redis load script, {states:,} states a call"
    snapshots = [each for name, each in found.items() if name.startswith("TakeSnapshot")]
    assert len(snapshots) == 4
    assert all(each["limit"]["name"].startswith("MarkDelete") for each in snapshots)
    recoveries = [each for name, each in found.items() if name.startswith("publish after")]
    assert len(recoveries) == 5
    assert all(each["limit"]["name"].startswith("publish, nothing") for each in recoveries)
    assert all(each["rounds"] == 3 and each["unit"] == "ms" for each in recoveries)


async def test_deliveries_are_compared_with_a_bare_stream(bench: Run) -> None:
    found = await bench.figures("dispatch")
    shapes = [f"{each}, 10,000 keys" for each in ("1 consumer", "4 consumers", "16 consumers")]
    for shape in (*shapes, "4 consumers, 10 keys", "4 consumers, 1,000,000 keys"):
        delivered = found[f"delivered, {shape}"]
        assert delivered["limit"]["name"].startswith(("plain read", f"bare stream, {shape}"))
        assert {"client", "dispatcher", "ledger"} <= set(delivered["cpu_percent"])
    stuck = "delivered, what 3 of 4 consumers, 10,000 keys get"
    assert found[f"{stuck}, one stuck"]["limit"]["name"] == f"{stuck}, none stuck"
    join = found["machine, join, 10,000 parked of 10,000 keys, p50"]
    assert join["limit"]["name"] == "machine, join, 0 parked, p50"
    assert found["machine, leave, 500 in flight, p50"]["unit"] == "ms"
    memory = [each for name, each in found.items() if each["unit"] == "B" and "machine" in name]
    assert len(memory) == 2
    for each in memory:
        expected = each["limit"]["value"] / each["value"]
        assert each["ratio"] == pytest.approx(expected, rel=1e-3)
    latency = found["published until it is delivered, p99"]
    assert latency["limit"]["name"] == "published until a plain read has it, p99"


async def test_verdicts_are_compared_with_a_stream_that_only_answers(bench: Run) -> None:
    found = await bench.figures("filter")
    kinds = ("10 property sets", "10 property sets, shared metadata", "all distinct")
    for kind in kinds:
        assert found[f"stream, {kind}"]["limit"]["name"] == f"bare stream, {kind}"
    assert found["engine"]["limit"]["name"] == "Python function"
    for each in found.values():
        if each["limit"]:
            assert each["ratio_min"] <= each["ratio"] <= each["ratio_max"]
    assert {each["unit"] for each in found.values()} == {"verdicts/s"}


async def test_filters_are_compared_with_none_and_with_ones_that_open_batches(
    bench: Run,
) -> None:
    found = await bench.figures("filtered")
    beside = {
        "delivered, all accepted": "delivered, no filter",
        "delivered, all accepted, batches opened": "delivered, all accepted",
        "judged, half rejected": "delivered, no filter",
        "judged, half rejected, batches opened": "judged, half rejected",
    }
    for kind in ("10 property sets", "all distinct"):
        for name, limit in beside.items():
            each = found[f"{name}, {kind}"]
            assert each["limit"]["name"] == f"{limit}, {kind}"
            assert each["ratio_min"] <= each["ratio"] <= each["ratio_max"]
            assert {"client", "dispatcher", "opening", "filter"} <= set(each["cpu_percent"])
        computed = found[f"dispatcher computes: delivered, all accepted, {kind}"]
        assert computed["unit"] == "µs/message"


async def test_histories_are_compared_with_none(bench: Run) -> None:
    found = await bench.figures("history")
    for shape in ("1 consumer, 10,000 keys", "4 consumers, 10,000 keys"):
        without = f"delivered, no history, {shape}"
        for way in ("history", "history and audit topic"):
            each = found[f"delivered, {way}, {shape}"]
            assert each["limit"]["name"] == without
            assert {"client", "dispatcher", "ledger"} <= set(each["cpu_us"])
            computed = found[f"dispatcher computes: delivered, {way}, {shape}"]
            assert computed["limit"]["name"] == f"dispatcher computes: {without}"


async def test_tracing_is_compared_with_none(bench: Run) -> None:
    found = await bench.figures("tracing")
    assert len(found) == 8
    for kind in ("unbatched", "batched"):
        without = f"publish, {kind}, no tracing"
        assert found[without]["limit"] is None
        for percent in (0, 1, 100):
            limit = found[f"publish, {kind}, tracing at {percent} percent"]["limit"]
            assert limit["name"] == without


async def test_metrics_are_compared_with_none(bench: Run) -> None:
    found = await bench.figures("metrics")
    assert len(found) == 4
    for kind in ("unbatched", "batched"):
        without = f"publish, {kind}, no metrics"
        assert found[without]["limit"] is None
        each = found[f"publish, {kind}, metrics, scraped every second"]
        assert each["limit"]["name"] == without
        assert each["ratio_min"] <= each["ratio"] <= each["ratio_max"]
        assert {"client", "telling ledger", "telling dedup"} <= set(each["cpu_percent"])


async def test_stores_are_compared_with_sqlite(bench: Run) -> None:
    found = await bench.figures("stores")
    kinds = (
        *(f"append, {each}" for each in ("1 entry", "100 entries", "1,000 entries")),
        "append, 100 entries, 8 topics at once",
        "read columns",
        "read with payloads",
        "step, 50 acknowledgements, 8 cursors at once",
    )
    for kind in kinds:
        assert found[f"{kind}, SQLite"]["limit"] is None
        for store, server in (
            ("PostgreSQL", "postgres"),
            ("PostgreSQL with standbys", "postgres-1"),
        ):
            each = found[f"{kind}, {store}"]
            assert each["limit"]["name"] == f"{kind}, SQLite"
            assert {"client", "postgres", server} <= set(each["cpu_percent"])
    computed = [each for name, each in found.items() if name.startswith("computed")]
    assert {each["unit"] for each in computed} == {"µs/append", "µs/step"}
    for shape in ("unbatched", "batched"):
        for ledgers in ("a ledger", "two ledgers"):
            each = found[f"publish, {shape}, 8 topics, {ledgers} on PostgreSQL"]
            assert each["limit"]["name"] == f"publish, {shape}, 8 topics, a ledger on SQLite"
            assert {"client", "ledger", "postgres"} <= set(each["cpu_percent"])
    assert (
        "ledger-1" in found["publish, batched, 8 topics, two ledgers on PostgreSQL"]["cpu_percent"]
    )


async def test_publishing_and_claims_are_compared_with_what_peers_do(bench: Run) -> None:
    found = await bench.figures("peers")
    for claims, keys in (("1 claim", "one at a time"), ("1,000 claims", "1,000 at a time")):
        each = found[f"Seqgate: {claims} on a stream"]
        assert each["limit"]["name"] == f"Redis: SET NX EX, {keys}"
        assert each["unit"] == "claims/s"
        assert {"client", "dedup", "redis"} <= set(each["cpu_us"])
    assert found["Redis: SET NX EX, one at a time, p50"]["unit"] == "ms"

    prices = {
        "publish, unbatched": {"client", "ledger", "dedup", "redis"},
        "publish, one at a time": {"client", "ledger", "dedup", "redis"},
        "receive a backlog": {"client", "dispatcher", "ledger", "cursor"},
    }
    is_left_out = any("JetStream" in each for each in bench.report["left_out"])
    assert is_left_out == (peers.jetstream_program() is None)
    without_rabbitmq = any("RabbitMQ" in each for each in bench.report["left_out"])
    assert without_rabbitmq == (peers.rabbitmq_programs() is None)
    for kind, processes in prices.items():
        each = found[f"Seqgate: {kind}"]
        assert each["unit"] == "messages/s"
        assert processes <= set(each["cpu_us"])
        if not without_rabbitmq:
            assert {"client", "rabbitmq"} <= set(found[f"{peers.RABBITMQ}: {kind}"]["cpu_us"])
        if is_left_out:
            assert each["limit"] is None
            continue
        assert each["limit"]["name"] == f"JetStream, synced always: {kind}"
        for sync in ("always", "every 2 minutes"):
            assert {"client", "nats"} <= set(found[f"JetStream, synced {sync}: {kind}"]["cpu_us"])


async def test_terminated_benchmarks_leave_no_process(bench: Run) -> None:
    process = await bench.start("--seconds-per-measurement", "30", "--only", "price")
    await eventually(
        lambda: any("tools.bench.rounds" in each for each in bench.processes), within_s=60
    )
    process.terminate()
    async with asyncio.timeout(30):
        wrote, _ = await process.communicate()

    assert process.returncode == INTERRUPTED
    assert wrote == b""
    bench.leaves_nothing()


@pytest.mark.parametrize(
    "arguments", [["--only", "speed"], ["--seconds-per-measurement", "0"], ["--fast"]]
)
def test_unknown_benchmarks_are_refused(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as refused:
        parse(arguments)

    assert refused.value.code == 2
    assert "error" in capsys.readouterr().err

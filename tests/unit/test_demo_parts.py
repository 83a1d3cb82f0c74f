"""The demo's input, its journal, and its plan."""

from collections import Counter as Multiset
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest

from seqgate.api.entry.v1.entry_pb2 import EntryMetadata
from seqgate.api.ledger.v1 import ledger_pb2 as pb
from seqgate.client import MessageId, Receipt
from tools.demo.dataset import (
    Original,
    by_airport,
    by_carrier,
    load_flights,
    load_weather,
    months_for,
)
from tools.demo.publisher import Progress, note_receipts
from tools.demo.publishing import CHUNK_BYTES, Kind, plan
from tools.demo.relay import Gate, one_by_one
from tools.stack.journal import Journal


@pytest.mark.deep
def test_every_flight_is_a_separate_message() -> None:
    carriers = by_carrier(load_flights())
    assert sum(len(flights) for flights in carriers.values()) == 336_776
    assert len(carriers) == 16
    for flights in carriers.values():
        ids = [flight.sequence_id for flight in flights]
        assert all(earlier < later for earlier, later in pairwise(ids))
        assert ids[0] > 2**53


def test_progress_resumes_where_it_stopped(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "UA")
    journal.write("sent", messages=2)
    receipt = Receipt(MessageId(1, 2, -1, 3), 7, duplicate=False)
    note_receipts(journal, [receipt, Receipt(MessageId(1, 4), 8, duplicate=True)], 2)
    journal.close()
    seen = Progress(tmp_path, "UA").read()  # by another process
    with (tmp_path / "UA.jsonl").open("a") as file:
        file.write('{"t": 1, "e": "se')  # a crash in the middle of a line
    journal = Journal(tmp_path, "UA")
    note_receipts(journal, [], 1)  # a stretch sent again: the checkpoint never goes back
    journal.close()
    for progress in (seen.read(), Progress(tmp_path, "UA").read()):
        assert (progress.checkpoint, progress.sent) == (2, 2)
        assert (progress.duplicates, progress.rewinds) == (1, 0)
        assert progress.receipts == [(7, "1:2:-1:3"), (8, "1:4:-1")]


def test_each_plan_has_every_fault_in_order() -> None:
    for seed in range(50):
        faults = plan(Random(seed), fails_over=seed % 2 == 0)
        assert all(earlier.at < later.at for earlier, later in pairwise(faults))
        assert 0 < faults[0].at < faults[-1].at < 1
        kinds = [fault.kind for fault in faults]
        assert set(kinds) | {Kind.KILL_PRIMARY} == set(Kind)
        assert kinds.count(Kind.KILL_PRIMARY) == (seed % 2 == 0)
        assert kinds.index(Kind.COPY_REDIS) < kinds.index(Kind.RESTORE_REDIS)
        assert Multiset(kinds)[Kind.WIPE_REDIS] == Multiset(kinds)[Kind.RESTORE_REDIS] == 1
        interrupting = [kind for kind in kinds if kind.interrupts_stations]
        assert interrupting[0] is Kind.KILL_STATIONS


def test_the_weather_is_a_large_message_for_each_airport_and_month() -> None:
    airports = load_weather(12)
    assert list(airports) == ["EWR", "JFK", "LGA"]
    for airport, weather in airports.items():
        assert [month.sequence_id for month in weather] == list(range(201301, 201313))
        assert {(month.producer, month.key) for month in weather} == {(airport, airport)}
        assert all(len(month.payload) > 10 * max(CHUNK_BYTES) for month in weather)
        assert load_weather(2)[airport] == weather[:2]


def weather(airport: str, month: str, table: bytes) -> Original:
    return Original(airport, int(month), airport, {"origin": airport, "month": month}, table)


def test_a_table_is_split_by_airport_and_month() -> None:
    head = b"origin,year,month,temp\n"
    rows = [b"JFK,2013,2,1\n", b"EWR,2013,10,2\n", b"EWR,2013,9,3\n", b"JFK,2013,2,4\n"]
    assert by_airport(head + b"".join(rows)) == {
        "EWR": [weather("EWR", "201309", head + rows[2]), weather("EWR", "201310", head + rows[1])],
        "JFK": [weather("JFK", "201302", head + rows[0] + rows[3])],
    }


@pytest.mark.parametrize(
    ("flights", "months"), [(1, 2), (56_000, 2), (84_000, 3), (336_776, 12), (10**9, 12)]
)
def test_fewer_flights_span_fewer_months(flights: int, months: int) -> None:
    assert months_for(flights) == months


def chunk(uuid: str, chunk_id: int, num_chunks: int = 5) -> EntryMetadata:
    return EntryMetadata(uuid=uuid, chunk_id=chunk_id, num_chunks_from_msg=num_chunks)


def stops(gate: Gate, uuid: str) -> list[bool]:
    return [gate.stops(chunk(uuid, chunk_id)) for chunk_id in range(5)]


def test_an_attempt_stops_once_somewhere_in_its_middle() -> None:
    places = set()
    for seed in range(50):
        gate = Gate(Random(seed))
        first = stops(gate, "a")
        assert first == sorted(first)
        assert (first[0], first[-1]) == (False, True)
        assert stops(gate, "a") == first  # the same chunks, on another stream
        gate.release(["a"])
        assert not any(stops(gate, "a"))
        assert any(stops(gate, "b"))
        places.add(first.index(True))
    assert places == {1, 2, 3, 4}


def test_only_chunks_before_the_last_may_be_stopped_at() -> None:
    gate = Gate(Random(0))
    assert not gate.stops(EntryMetadata(sequence_id=7))
    gate.open()
    assert not any(stops(gate, "a"))


def test_requests_are_split_into_single_publications() -> None:
    opening = pb.PublishRequest(open=pb.Open(topic="t"))
    assert list(one_by_one(opening)) == [opening]
    both = [pb.Publication(request_id=3, resume=True), pb.Publication(request_id=4)]
    request = pb.PublishRequest(publications=pb.Publications(publications=both, ledger_id=9))
    assert list(one_by_one(request)) == [
        pb.PublishRequest(publications=pb.Publications(publications=[each], ledger_id=9))
        for each in both
    ]

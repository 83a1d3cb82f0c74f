"""The demo's input, its journal, and its plan."""

from collections import Counter as Multiset
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from random import Random

from seqgate.client import MessageId, Receipt
from tools.demo.faults import Kind, plan
from tools.demo.flights import Flight, by_carrier, load_flights, read_flights, write_flights
from tools.demo.journal import Acknowledged, Counter, Journal, acknowledged


def test_every_flight_is_a_message_of_its_own() -> None:
    carriers = by_carrier(load_flights())
    assert sum(len(flights) for flights in carriers.values()) == 336_776
    assert len(carriers) == 16
    for flights in carriers.values():
        ids = [flight.sequence_id for flight in flights]
        assert all(earlier < later for earlier, later in pairwise(ids))
        assert ids[0] > 2**53


def test_flights_come_back_from_a_file(tmp_path: Path) -> None:
    flights = [
        Flight("UA", 2**60 + 1, "N14228", "EWR", "IAH", b'{"flight":"1545"}'),
        Flight("UA", 2**60 + 2, None, "LGA", "MIA", b"{}"),
    ]
    write_flights(tmp_path / "UA", flights)
    assert read_flights(tmp_path / "UA", "UA") == flights


def test_a_journal_goes_on_where_it_was(tmp_path: Path) -> None:
    receipt = Receipt(MessageId(1, 2, -1, 3), 7, duplicate=False)
    with closing(Journal(tmp_path, "UA")) as journal:
        journal.count(Counter.SENT, 2)
        journal.settle([receipt, Receipt(MessageId(1, 4), 8, duplicate=True)], 2)
    with closing(Journal(tmp_path, "UA")) as journal:
        journal.settle([], 1)  # a stretch that was sent again: the checkpoint never goes back
        assert [journal[each] for each in Counter] == [2, 2, 2, 1, 0]
    with (tmp_path / "UA.receipts").open("a") as file:
        file.write("9 1:5")  # a crash in the middle of a line
    Journal(tmp_path, "UA").close()
    assert list(acknowledged(tmp_path, "UA")) == [
        Acknowledged(7, "1:2:-1:3"),
        Acknowledged(8, "1:4:-1"),
    ]


def test_each_plan_has_every_fault_in_order() -> None:
    for seed in range(50):
        faults = plan(Random(seed))
        assert all(earlier.at < later.at for earlier, later in pairwise(faults))
        assert 0 < faults[0].at < faults[-1].at < 1
        kinds = [fault.kind for fault in faults]
        assert set(kinds) == set(Kind)
        assert kinds.index(Kind.COPY_REDIS) < kinds.index(Kind.RESTORE_REDIS)
        assert Multiset(kinds)[Kind.WIPE_REDIS] == Multiset(kinds)[Kind.RESTORE_REDIS] == 1

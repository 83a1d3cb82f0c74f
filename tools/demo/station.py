"""The other application of the demo: publishes the weather, in large messages.

Each airport is a producer of its own. It publishes its months one by one, each in chunks; after a
crash it goes back by one month, and cuts everything anew, since it is given other chunks each time.

    python -m tools.demo.station LEDGER FOLDER MONTHS CHUNK_BYTES
"""

import asyncio
import sys
from contextlib import closing
from pathlib import Path

from seqgate.client import Chunking, Client, connect
from tools.demo.airline import TOPIC
from tools.demo.journal import Counter, Journal
from tools.demo.weather import Weather, load_weather


async def run(ledger: str, folder: Path, months: int, chunking: Chunking) -> None:
    """Publish until everything is stored."""
    async with connect(ledger) as client, asyncio.TaskGroup() as tasks:
        for airport, weather in load_weather(months).items():
            tasks.create_task(_report(client, airport, weather, folder, chunking))


async def _report(
    client: Client, airport: str, weather: list[Weather], folder: Path, chunking: Chunking
) -> None:
    producer = client.producer(
        TOPIC,
        name=airport,
        takeover=True,  # from the stream of a process that was killed
        chunking=chunking,
        send_timeout_s=None,
        open_timeout_s=120,
    )
    with closing(Journal(folder, airport)) as journal:
        async with producer:
            start = max(0, journal[Counter.CHECKPOINT] - 1)
            for number, month in enumerate(weather[start:], start + 1):
                journal.count(Counter.SENT)
                receipt = await producer.send(
                    month.payload,
                    key=month.key,
                    properties=month.properties,
                    sequence_id=month.sequence_id,
                )
                journal.settle([receipt], number)


if __name__ == "__main__":
    address, where, how_many, chunk_bytes = sys.argv[1:]
    asyncio.run(run(address, Path(where), int(how_many), Chunking(int(chunk_bytes))))

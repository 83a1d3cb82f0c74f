"""An application as a process of its own, that stops at a named point until it is killed.

    python -m tests.support.publishing_process LEDGER TOPIC FOLDER BATCH COUNT POINT

It goes on from the checkpoint that an earlier one left in FOLDER, and notes there what it was told.
Points: opened, sent (nothing is answered), acknowledged (the checkpoint has not moved), none.
"""

import asyncio
import json
import sys
from pathlib import Path

from seqgate.client import Batching, connect

STRETCH = 40
"""How many messages are sent between two checkpoints."""

POINTS = ("opened", "sent", "acknowledged")
FIRST_ID = 2**60


def content(number: int) -> bytes:
    return f"message {number}".encode()


def tell(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


async def stop_at(point: str, wanted: str) -> None:
    if point == wanted:
        tell(point)
        await asyncio.Event().wait()


async def run(ledger: str, topic: str, folder: Path, batch: int, count: int, point: str) -> None:
    checkpoint = folder / "checkpoint"
    done = int(checkpoint.read_text()) if checkpoint.exists() else 0
    async with (
        connect(ledger) as client,
        client.producer(
            topic, name="app", takeover=True, batching=Batching(messages_max=batch, delay_s=0.001)
        ) as producer,
    ):
        await stop_at("opened", point)
        stretches = 0
        while done < count:
            last = min(done + STRETCH, count)
            sends = [
                producer.send_nowait(content(number), sequence_id=FIRST_ID + number)
                for number in range(done, last)
            ]
            stretches += 1
            if stretches == 2:
                await asyncio.sleep(0.01)  # what was sent may have arrived by now, or not
                await stop_at("sent", point)
            receipts = await asyncio.gather(*sends)
            with (folder / "receipts").open("a") as file:
                for receipt in receipts:
                    told = [receipt.sequence_id, str(receipt.message_id), receipt.duplicate]
                    file.write(json.dumps(told) + "\n")
            if stretches == 2:
                await stop_at("acknowledged", point)
            checkpoint.write_text(str(last))
            done = last
    tell("done")


if __name__ == "__main__":
    address, name, where, messages_max, total, stop = sys.argv[1:]
    asyncio.run(run(address, name, Path(where), int(messages_max), int(total), stop))

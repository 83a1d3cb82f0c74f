"""Publish the rows of an outbox: each once and in order, though the relay may die at any point.

    python examples/outbox_relay.py localhost:7702 sales shop.db
    python examples/outbox_relay.py localhost:7702 sales postgresql://shop@localhost/shop

An application writes, in one transaction, what it did and last what is to be published:

    INSERT INTO outbox (key, payload) VALUES ('customer-17', '2 apples')

The relay publishes a row under a number, its sequence id, and deletes it after the receipt. Killed
between the two, it publishes the row again, and the ledger answers that it is a duplicate.

The number is not the row's id, since transactions do not commit in the order of their ids: row 8
may be published before row 7 is visible, and row 7 would then be stale. So the relay numbers the
rows that it sees, durably, before it publishes them. A row that becomes visible later gets a later
number, and ids that were rolled back leave no gap. Rows have the order in which they became
visible; those seen together, that of their ids. So two transactions that write the same row of
another table before their outbox are published in the order of their commits.

Of two relays, as in a rolling restart, the later one takes the producer's name, and the other one
ends. Meanwhile both publish the same rows under the same numbers. A row that the ledger refuses
stays with its `error` and stops no other. Set to NULL, it is published under a new number.
"""

import argparse
import asyncio
import sys
from collections.abc import Sequence

from databases import Transaction, open_database

from seqgate import errors
from seqgate.client import Chunking, Outgoing, Producer, Receipt, SendManyError, connect

OUTBOX = """CREATE TABLE IF NOT EXISTS outbox (id BIGSERIAL PRIMARY KEY, key TEXT,
    payload TEXT NOT NULL, number BIGINT UNIQUE, error TEXT)"""
NUMBERS = "CREATE TABLE IF NOT EXISTS numbers (topic TEXT PRIMARY KEY, last BIGINT NOT NULL)"
LOCK = """INSERT INTO numbers AS mine VALUES ($1, 0)
    ON CONFLICT (topic) DO UPDATE SET last = mine.last RETURNING last"""
NUMBER = """WITH fresh AS (SELECT id, row_number() OVER (ORDER BY id) AS place FROM outbox
    WHERE number IS NULL AND error IS NULL)
    UPDATE outbox SET number = $1 + place FROM fresh WHERE outbox.id = fresh.id RETURNING number"""
ADVANCE = "UPDATE numbers SET last = last + $2 WHERE topic = $1"
NEXT = "SELECT number, key, payload FROM outbox WHERE number > 0 ORDER BY number LIMIT 1000"
REFUSED = "UPDATE outbox SET number = NULL, error = $2 WHERE number = $1"
DELETE = "DELETE FROM outbox WHERE number <= $1"
NOT_STORED = errors.InvalidRequestError, errors.StaleSequenceIdError, errors.SequenceIdTrimmedError
POLL_S = 0.1


async def relay(transaction: Transaction, producer: Producer) -> None:
    async with transaction() as execute:
        ((last,),) = await execute(LOCK, producer.topic)
    if (producer.last_sequence_id or 0) > last:
        raise SystemExit(f"{producer.topic} has rows that this database, restored, may not have")
    while True:
        async with transaction() as execute:
            ((last,),) = await execute(LOCK, producer.topic)  # other relays wait
            await execute(ADVANCE, producer.topic, len(await execute(NUMBER, last)))
            rows = await execute(NEXT)
        messages = [Outgoing(payload.encode(), key, sequence_id=at) for at, key, payload in rows]
        outcomes: Sequence[Receipt | errors.SeqgateError]
        try:
            outcomes = await producer.send_many(messages)  # or another relay took over
        except SendManyError as error:
            outcomes = error.outcomes
        async with transaction() as execute:
            for (number, *_), outcome in zip(rows, outcomes, strict=True):
                if isinstance(outcome, NOT_STORED):
                    await execute(REFUSED, number, str(outcome))
                elif isinstance(outcome, errors.SeqgateError):
                    raise outcome
            await execute(DELETE, rows[-1][0] if rows else 0)
        await asyncio.sleep(0 if rows else POLL_S)


async def run(ledger: str, topic: str, database: str) -> None:
    async with (
        open_database(database, OUTBOX, NUMBERS) as transaction,
        connect(ledger) as client,
        client.producer(
            topic, name="outbox", takeover=True, chunking=Chunking(), send_timeout_s=None
        ) as producer,
    ):
        await relay(transaction, producer)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Publish the rows of an outbox, each once.")
    parser.add_argument("ledger", help="the ledger service, host:port")
    parser.add_argument("topic", help="tenant/namespace/name, or a name in public/default")
    parser.add_argument("database", help="a SQLite file, or the URL of a PostgreSQL database")
    try:
        asyncio.run(run(**vars(parser.parse_args())))
    except (errors.FencedError, errors.InUseError):
        sys.stdout.write("another relay took over\n")
    except errors.SeqgateError as error:
        raise SystemExit(str(error)) from None

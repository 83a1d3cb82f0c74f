"""Write balances from payments, each applied once, though any consumer may die at any point.

    python examples/balances.py localhost:7702 localhost:7704 payments bank.db
    python examples/balances.py localhost:7702 localhost:7704 payments postgresql://localhost/bank

Run any number of these: each has accounts of its own, and takes over those of one that dies. A
payment's key is its account, its payload a whole number. It may be delivered again: after a crash
between the commit and the acknowledgement, or to the next owner of its account while this one is
suspended. So the transaction that changes the balance also stores the payment's id, and a payment
whose id is stored is acknowledged without effect.

One id for each key is enough, because deliveries of a key follow the order of the log:

- A redelivered payment comes before the later ones of its key. A refused one (`nack`) withholds
  them, and a key that moves to another consumer starts with its first unacknowledged payment. So
  if a later one was applied, the earlier ones were applied, or are dead letters.
- A consumer that wakes up late may apply what it holds, or finds its id stored; the row's lock puts
  it before or after the key's next owner.
- The messages of a batch are ordered by their index. A batch is in the order of one key, though it
  may hold others: that key, which `receive_and_lock` returns, is the one stored, not the account.
- A payment with a delivery time must hold back its account (`delay_holds_key`): it would otherwise
  be delivered after later ones.

A dead letter may have had its effect, if its last consumer died after the commit: look before you
publish it again. Ids begin anew when a topic is deleted and created: then delete what is stored.
"""

import argparse
import asyncio

from databases import Transaction, open_database

from seqgate.client import Received, SubscriptionOptions, connect
from seqgate.errors import CorruptMessageError, SeqgateError

BALANCE = "CREATE TABLE IF NOT EXISTS balance (account TEXT PRIMARY KEY, amount BIGINT NOT NULL)"
APPLIED = """CREATE TABLE IF NOT EXISTS applied (topic TEXT, key TEXT, ledger_id BIGINT,
    entry_id BIGINT, batch_index INTEGER, PRIMARY KEY (topic, key))"""
ADVANCE = """INSERT INTO applied AS last VALUES ($1, $2, $3, $4, $5)
    ON CONFLICT (topic, key) DO UPDATE SET ledger_id = excluded.ledger_id,
        entry_id = excluded.entry_id, batch_index = excluded.batch_index
    WHERE (last.ledger_id, last.entry_id, last.batch_index)
        < (excluded.ledger_id, excluded.entry_id, excluded.batch_index)
    RETURNING topic"""
ADD = """INSERT INTO balance AS old VALUES ($1, $2)
    ON CONFLICT (account) DO UPDATE SET amount = old.amount + excluded.amount"""


async def apply(transaction: Transaction, payment: Received, key: bytes) -> None:
    """Change the balance, unless this or a later payment of the key was applied."""
    if payment.key is None:
        raise ValueError("a payment names its account")
    amount, at = int(payment.payload), payment.id
    async with transaction() as execute:
        last = payment.topic, key.hex(), at.ledger_id, at.entry_id, at.batch_index
        if await execute(ADVANCE, *last):
            await execute(ADD, payment.key, amount)


async def run(ledger: str, dispatcher: str, topic: str, database: str) -> None:
    """Apply payments until the process ends."""
    options = SubscriptionOptions(delay_holds_key=True)
    async with (
        open_database(database, BALANCE, APPLIED) as transaction,
        connect(ledger, dispatcher) as client,
        client.consumer(topic, "balances", options=options) as consumer,
    ):
        while True:
            try:
                payment, key = await consumer.receive_and_lock()
            except CorruptMessageError:
                continue  # it is refused
            try:
                await apply(transaction, payment, key)
            except (ValueError, OverflowError) as failure:  # at last, it becomes a dead letter
                consumer.nack_nowait(payment, reason=failure)
            else:
                consumer.ack_nowait(payment)
            consumer.unlock(key)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Apply the payments of a topic, each once.")
    parser.add_argument("ledger", help="the ledger service, host:port")
    parser.add_argument("dispatcher", help="the dispatcher service, host:port")
    parser.add_argument("topic", help="tenant/namespace/name, or a name in public/default")
    parser.add_argument("database", help="a SQLite file, or the URL of a PostgreSQL database")
    try:
        asyncio.run(run(**vars(parser.parse_args())))
    except SeqgateError as error:
        raise SystemExit(str(error)) from None

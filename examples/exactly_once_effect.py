"""Each message has its effect exactly once, though the reader may die at any point.

    python examples/exactly_once_effect.py localhost:7702 payments balances.db

Deduplication stores each message once in the topic. That its effect happens once as well is up to
who reads: store the effect and the message's id in one transaction, and go on after that id (the
reader of Apache Pulsar's PIP-6). Here a message is a payment: its key is an account, its payload a
whole number. The effect is the account's balance, in SQLite. Any other message ends the program
before it has an effect.

Started again, it goes on where it was. Killed between two messages or amid one, it has applied each
payment before that point once, and none after it.
"""

import argparse
import asyncio
import sqlite3
import sys
from contextlib import closing

from seqgate.client import EARLIEST, Message, MessageId, Start, connect
from seqgate.errors import SeqgateError

TABLES = """
CREATE TABLE IF NOT EXISTS balance (account TEXT PRIMARY KEY, amount INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS progress (topic TEXT PRIMARY KEY, message_id BLOB NOT NULL);
"""

BALANCE = """
INSERT INTO balance VALUES (?, ?)
ON CONFLICT (account) DO UPDATE SET amount = amount + excluded.amount
"""

AMOUNT_MAX = 10**15
"""A limit that keeps balances within SQLite's integers."""

PROGRESS = "INSERT OR REPLACE INTO progress VALUES (?, ?)"


def place(database: sqlite3.Connection, topic: str) -> Start:
    """After which message to go on."""
    row = database.execute("SELECT message_id FROM progress WHERE topic = ?", (topic,)).fetchone()
    return EARLIEST if row is None else MessageId.from_bytes(row[0])


def amount_of(message: Message) -> int:
    """Raises SystemExit: the message is no payment."""
    try:
        amount = int(message.payload)
    except ValueError:
        amount = AMOUNT_MAX + 1
    if message.key is None or abs(amount) > AMOUNT_MAX:
        raise SystemExit(
            f"{message.topic} has a message that is no payment, {message.id}: a payment has an "
            f"account as its key, and a whole number up to {AMOUNT_MAX:,} as its payload"
        )
    return amount


def apply(database: sqlite3.Connection, message: Message) -> None:
    """The effect of a message, and that it has had it: both are stored, or neither is."""
    amount = amount_of(message)
    with database:  # one transaction
        database.execute(BALANCE, (message.key, amount))
        database.execute(PROGRESS, (message.topic, message.id.to_bytes()))


async def run(ledger: str, topic: str, path: str, *, follow: bool) -> int:
    """Apply what the topic has beyond what was applied; with `follow`, also what is yet to come.
    Returns how many messages that were."""
    applied = 0
    with closing(sqlite3.connect(path)) as database:
        database.executescript(TABLES)
        async with connect(ledger) as client:
            reader = client.reader(topic, follow=follow)
            await reader.seek(place(database, reader.topic), inclusive=False)
            async with reader:
                async for message in reader:
                    apply(database, message)
                    applied += 1
    return applied


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Apply the payments of a topic, each once.")
    parser.add_argument("ledger", help="the ledger service, host:port")
    parser.add_argument("topic", help="tenant/namespace/name, or a name in public/default")
    parser.add_argument("database", help="a SQLite file; made if there is none")
    parser.add_argument("--follow", action="store_true", help="wait for what is yet to come")
    asked = parser.parse_args()
    try:
        applied = asyncio.run(run(asked.ledger, asked.topic, asked.database, follow=asked.follow))
    except SeqgateError as error:
        raise SystemExit(f"{asked.topic}: {error}") from None
    sys.stdout.write(f"{applied} payments applied\n")


if __name__ == "__main__":
    main()

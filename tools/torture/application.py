"""A process with applications, which may be killed at any time and continues from its journals.

    python -m tools.torture.application FILE

FILE has its pickled Assignment. After SIGTERM the process ends once every message sent has its
receipt, and every acknowledgement its answer.
"""

import asyncio
import os
import pickle
import signal
import sys
import traceback
from pathlib import Path
from random import Random
from typing import Any, Final

from seqgate.client import Client
from seqgate.errors import InternalError, SeqgateError
from tools.stack.journal import Journal
from tools.torture.consuming import Consuming
from tools.torture.producing import Producing
from tools.torture.reading import Reading
from tools.torture.roles import Assignment, ConsumerRole, ProducerRole, Role, Work

AGAIN_S: Final = 0.5
"""The longest pause before a role restarts after an error."""

LOOK_S: Final = 1.0
"""How often to check that the parent is alive."""


def work_of(role: Role, client: Client, journal: Journal, random: Random) -> Work[Any]:
    if isinstance(role, ProducerRole):
        return Producing(role, client, journal, random)
    if isinstance(role, ConsumerRole):
        return Consuming(role, client, journal, random)
    return Reading(role, client, journal, random)


async def play(role: Role, client: Client, journal: Journal, over: asyncio.Event) -> None:
    random = Random(f"{os.getpid()}/{role.name}")
    journal.write("started", pid=os.getpid())
    work = work_of(role, client, journal, random)
    while not (over.is_set() and work.is_finished):
        try:
            await work.run(over)
        except SeqgateError as error:
            journal.write("error", what=type(error).__name__, why=error.reason, says=str(error))
            if isinstance(error, InternalError) and error.reason:
                journal.write("surprise", what=str(error))
        except Exception:
            journal.write("surprise", what=traceback.format_exc())
        await asyncio.sleep(random.uniform(0, AGAIN_S))
    journal.write("ended")


def end_with(parent: int) -> None:
    """Exit once the parent has died."""
    if os.getppid() != parent:
        os._exit(1)
    asyncio.get_running_loop().call_later(LOOK_S, end_with, parent)


async def run(assignment: Assignment) -> None:
    """Run all roles until SIGTERM or SIGINT."""
    over = asyncio.Event()
    end_with(os.getppid())
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, over.set)
    clients = [
        assignment.shown.client(*addresses)
        for addresses in zip(assignment.ledgers, assignment.dispatchers, strict=True)
    ]
    try:
        async with asyncio.TaskGroup() as tasks:
            for role in assignment.roles:
                journal = Journal(assignment.journals, role.name)
                tasks.create_task(play(role, clients[role.home % len(clients)], journal, over))
    finally:
        for client in clients:
            await client.close()


def main() -> None:
    asyncio.run(run(pickle.loads(Path(sys.argv[1]).read_bytes())))  # noqa: S301 - the torture's


if __name__ == "__main__":
    main()

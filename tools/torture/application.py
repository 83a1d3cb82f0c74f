"""A process of an application, which may be killed at any time, and goes on from its journals.

    python -m tools.torture.application FILE

FILE says what it does (roles.py). Ends when everything that was sent has its receipt, and what was
acknowledged its answer, after SIGTERM.
"""

import asyncio
import json
import os
import signal
import sys
import traceback
from pathlib import Path
from random import Random
from typing import Final

from seqgate.client import Client
from seqgate.errors import InternalError, SeqgateError
from tools.torture.consuming import Consuming
from tools.torture.journal import Journal
from tools.torture.producing import Producing
from tools.torture.reading import Reading
from tools.torture.roles import Application, ConsumerRole, ProducerRole, Role

AGAIN_S: Final = 0.5
"""How long a role waits at most before it begins again."""

LOOK_S: Final = 1.0
"""How often it is looked whether whoever started us is there."""

Work = Producing | Consuming | Reading


def work_of(role: Role, client: Client, journal: Journal, random: Random) -> Work:
    """What does what a role says."""
    if isinstance(role, ProducerRole):
        return Producing(role, client, journal, random)
    if isinstance(role, ConsumerRole):
        return Consuming(role, client, journal, random)
    return Reading(role, client, journal, random)


async def play(role: Role, client: Client, journal: Journal, over: asyncio.Event) -> None:
    """Do what a role says, again and again until it is over."""
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
    """End when the torture has died: nobody goes on alone."""
    if os.getppid() != parent:
        os._exit(1)
    asyncio.get_running_loop().call_later(LOOK_S, end_with, parent)


async def run(application: Application) -> None:
    """Play all roles until told to stop."""
    over = asyncio.Event()
    end_with(os.getppid())
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, over.set)
    folder = Path(application.journals)
    clients = [
        application.shown.client(ledger, dispatcher)
        for ledger, dispatcher in zip(application.ledgers, application.dispatchers, strict=True)
    ]
    try:
        async with asyncio.TaskGroup() as tasks:
            for role in application.roles:
                journal = Journal(folder, role.name)
                tasks.create_task(play(role, clients[role.home % len(clients)], journal, over))
    finally:
        for client in clients:
            await client.close()


def main() -> None:
    asyncio.run(run(Application.from_json(json.loads(Path(sys.argv[1]).read_text()))))


if __name__ == "__main__":
    main()

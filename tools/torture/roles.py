"""Roles of applications: values that the torture passes to their processes."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Generic, TypeVar

from seqgate.client import Client, SubscriptionOptions, SubscriptionType
from tools.stack.journal import Journal
from tools.torture.shown import NOTHING, Shown


@dataclass(frozen=True, slots=True)
class ProducerRole:
    """A producer of a topic.

    Attributes:
        name: the role's name, and the producer's unless `producer` is set.
        producer: the producer's name; roles with the same name are rivals.
        ids: it numbers its messages itself, and after a crash resends those without a receipt.
            Otherwise the client numbers them, and none is resent.
        way: "single", "batch", "by_key" or "chunks".
        rate: messages a second, about.
        pending_max: the most messages without a receipt.
        keys: the number of keys, shared by the roles of a topic.
        bytes_max: the largest payload.
        large_share: the approximate share of large payloads; the others are small.
        delays: some messages are delayed.
    """

    name: str
    topic: str
    producer: str = ""
    ids: bool = True
    way: str = "single"
    rate: float = 30.0
    pending_max: int = 100
    keys: int = 20
    bytes_max: int = 200
    large_share: float = 0.0
    delays: bool = False
    home: int = 0


@dataclass(frozen=True, slots=True)
class ConsumerRole:
    """A consumer of a subscription.

    Attributes:
        refused_share: the share of messages that it refuses at random.
        is_strict: it always refuses poison.
        through_share: the share of messages that it acknowledges cumulatively; EXCLUSIVE only.
        queue: the size of its receiver queue, in messages.
        assembled_max: the most large messages that it holds in part.
    """

    name: str
    topic: str
    subscription: str
    type: SubscriptionType = SubscriptionType.KEY_SHARED
    options: SubscriptionOptions = SubscriptionOptions()
    refused_share: float = 0.02
    is_strict: bool = False
    through_share: float = 0.0
    queue: int = 100
    assembled_max: int = 100
    work_s: float = 0.002
    home: int = 0


@dataclass(frozen=True, slots=True)
class ReaderRole:
    """A reader of a whole topic, which continues from its journal after a crash."""

    name: str
    topic: str
    home: int = 0


Role = ProducerRole | ConsumerRole | ReaderRole
R = TypeVar("R", bound=Role)


def reader_of(topic: str) -> str:
    return f"reader-{topic.rpartition('/')[2]}"


@dataclass(frozen=True, slots=True)
class Assignment:
    """The roles of a process.

    Attributes:
        ledgers, dispatchers: addresses by `home`: roles of one home prefer the same instance.
        journals: the folder of the roles' journals.
        shown: its credentials.
    """

    ledgers: list[str]
    dispatchers: list[str]
    journals: Path
    roles: list[Role]
    shown: Shown = NOTHING


class Work(ABC, Generic[R]):
    """A role's work, across reconnections."""

    def __init__(self, role: R, client: Client, journal: Journal, random: Random) -> None:
        self._role = role
        self._client = client
        self._journal = journal
        self._random = random

    @property
    def is_finished(self) -> bool:
        """True if nothing is left to do after `over`."""
        return True

    @staticmethod
    async def _until(over: asyncio.Event, *work: Coroutine[Any, Any, object]) -> None:
        """Run the work until `over`, or until part of it ends or raises."""
        tasks = [asyncio.create_task(each) for each in (*work, over.wait())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(result, Exception):
                raise result

    @abstractmethod
    async def run(self, over: asyncio.Event) -> None:
        """Work until `over`. After a SeqgateError, call again to continue."""

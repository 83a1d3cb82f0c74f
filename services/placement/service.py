"""Which topics this instance holds, where the others are, and how a topic moves.

    a call ──check──▶ here? ──▶ the handler
                       else the keeper's record ──▶ NOT_OWNER, or it is taken over here

A topic that is here is known to be without asking anybody. Of the others the record is remembered
for a moment: what is answered meanwhile leads, at worst, to where the topic was, and that instance
knows where it went.
"""

import asyncio
import contextvars
import time
import uuid
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import structlog

from services.errors import DomainError
from services.placement.core.placing import Holding, Outcome, Placement, State, outcome
from services.placement.ports import (
    AlreadyHere,
    InvalidInstance,
    InvalidMove,
    Keeper,
    MoveFailed,
    Moving,
    NotOwner,
    Peers,
    PlacementUnavailable,
    Shelf,
    Staging,
    TopicLost,
    TopicNotPlaced,
)
from services.runtime.locks import Locks
from services.runtime.tasks import end

log = structlog.get_logger()

REMEMBERED_S: Final = 5.0
"""For how long it is remembered where a topic is that another instance holds."""

REMEMBERED_MAX: Final = 10_000
"""Of how many topics."""

SETTLE_INTERVAL_S: Final = 0.5
"""How often moves are looked at that were cut short."""

WRITERS_TIMEOUT_S: Final = 30.0
"""How long a move waits for calls that began before it."""

STRAYS_PAGE: Final = 1_000
"""How many topics are looked at at a time that the store has, and that nobody has placed."""

RETRY_AFTER_S: Final = 0.2
"""What a caller is told to wait while a topic is being moved."""

Release = Callable[[str, DomainError], Awaitable[None]]
"""Ends whatever writes a topic on its own account, with this error; after it, nothing begins."""


async def nothing_to_release(topic: str, error: DomainError) -> None:
    """Of a service where nothing writes but calls."""


class Places:
    """See the module."""

    def __init__(
        self,
        own: str,
        instances: Sequence[str],
        keeper: Keeper,
        shelf: Shelf,
        peers: Peers,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            own: the address of this instance, one of `instances`.
        """
        self.own: Final = own
        self.instances: Final = tuple(instances)
        self.keeper: Final = keeper
        self.shelf: Final = shelf
        self._peers = peers
        self._clock = clock
        self._release: Release = nothing_to_release
        self._holdings: dict[str, Holding] = {}
        self._staged: dict[str, Placement] = {}
        self._unsettled: dict[str, Holding] = {}
        self._settling: Locks[str] = Locks()
        self._remembered: OrderedDict[str, tuple[str, float]] = OrderedDict()
        self._writers: Counter[str] = Counter()
        self._written = asyncio.Event()
        self._arriving = asyncio.Lock()
        self._moves: dict[str, tuple[str, asyncio.Task[tuple[Placement, bool]]]] = {}

    def release_with(self, release: Release) -> None:
        """Say what ends that writes topics on its own account."""
        self._release = release

    async def start(self) -> None:
        """Learn what is here. Topics that were made before there were several instances are placed
        where they are; an instance that has such waits for the keeper."""
        for holding in await self.shelf.holdings():
            self._holdings[holding.topic] = holding
            if holding.state is State.SEALED:
                self._unsettled[holding.topic] = holding
        for each in await self.shelf.staged():
            self._staged[each.move] = each
        while strays := await self.shelf.strays(limit=STRAYS_PAGE):
            for topic in strays:
                await self._adopt(topic)

    async def _adopt(self, topic: str) -> None:
        while True:
            try:
                record, _ = await self.keeper.place(topic, version=0, owner=self.own, move="")
            except PlacementUnavailable:
                log.warning("waiting for the keeper of places", topic=topic)
                await asyncio.sleep(SETTLE_INTERVAL_S)
                continue
            state = State.HELD if record.owner == self.own else State.GONE
            if state is State.GONE:
                log.error("a topic is here and elsewhere", topic=topic, owner=record.owner)
            holding = Holding(topic, state, record.version, "", record.owner)
            await self.shelf.hold(holding)
            self._holdings[topic] = holding
            return

    # ---- asked about a topic

    async def check(self, topic: str, *, create: bool = False) -> None:
        """Return if the topic is here, or was never made.

        Args:
            create: place it if it was never made.

        Raises:
            NotOwner: another instance holds it.
            PlacementUnavailable: who knows does not answer.
            TopicLost: it should be here.
        """
        if self._is_here(topic):
            return
        owner = self._remembers(topic)
        if owner is None:
            record = await self._locate(topic, create=create)
            if record is None or record.owner == self.own:
                return
            owner = record.owner
        raise NotOwner("another instance holds the topic", owner=owner)

    async def locate(self, topic: str) -> Placement | None:
        """Where a topic is, whatever is remembered; if here, it is taken over."""
        holding = self._holdings.get(topic)
        if holding is not None and self._is_here(topic):
            return Placement(topic, self.own, holding.version, "")
        return await self._locate(topic, create=False)

    async def _locate(self, topic: str, *, create: bool) -> Placement | None:
        try:
            record = await self.keeper.find(topic)
            if record is None and create:
                record, _ = await self.keeper.place(topic, version=0, owner="", move="")
        except PlacementUnavailable:
            gone = self._holdings.get(topic)
            if gone is not None and gone.state is State.GONE:
                return Placement(topic, gone.other, gone.version, "")
            raise
        if record is not None and record.owner == self.own:
            await self._arrive(record)
        elif record is not None:
            self._remember(topic, record.owner)
        return record

    def stay(self, topic: str) -> int | None:
        """Which of its stays here a topic is at; None: it is not here."""
        holding = self._holdings.get(topic)
        return holding.version if holding is not None and self._is_here(topic) else None

    async def check_stayed(self, topic: str, stay: int | None) -> None:
        """Return if a topic has been here since. What was read of one that was not may lack
        everything.

        Raises:
            NotOwner, PlacementUnavailable: it is elsewhere.
            Moving: it was.
        """
        if stay is None or self.stay(topic) == stay:
            return
        await self.check(topic)
        raise Moving("the topic was moved meanwhile", retry_after_s=RETRY_AFTER_S)

    def check_writable(self, topic: str) -> None:
        """Return unless the topic is sealed, or gone.

        Raises:
            Moving, NotOwner: it is.
        """
        holding = self._holdings.get(topic)
        if holding is None or holding.state is State.HELD:
            return
        if holding.state is State.SEALED:
            raise Moving("the topic is being moved", retry_after_s=RETRY_AFTER_S)
        raise NotOwner("another instance holds the topic", owner=holding.other)

    @contextmanager
    def writing(self, topic: str) -> Iterator[None]:
        """Something changes the topic meanwhile, and no move of it goes on.

        Raises:
            Moving, NotOwner: the topic is sealed, or gone.
        """
        self.check_writable(topic)
        self._writers[topic] += 1
        try:
            yield
        finally:
            self._writers[topic] -= 1
            if not self._writers[topic]:
                del self._writers[topic]
            self._written.set()

    def _is_here(self, topic: str) -> bool:
        holding = self._holdings.get(topic)
        return holding is not None and holding.state is not State.GONE

    def _remembers(self, topic: str) -> str | None:
        owner, until = self._remembered.get(topic, ("", 0.0))
        if self._clock() >= until or any(each.topic == topic for each in self._staged.values()):
            return None  # what came whole may be ours at any moment
        return owner

    def _remember(self, topic: str, owner: str) -> None:
        self._remembered[topic] = owner, self._clock() + REMEMBERED_S
        self._remembered.move_to_end(topic)
        if len(self._remembered) > REMEMBERED_MAX:
            self._remembered.popitem(last=False)

    # ---- a topic arrives

    async def receive(self, topic: str, move: str, version: int, layout: int) -> Staging:
        """Begin to take in a topic, as its record of that version is going to say.

        Raises:
            InvalidMove: the record is another one, or the layout.
            AlreadyHere: the topic is.
        """
        if layout != self.shelf.layout:
            raise InvalidMove(
                "the other instance's store has another layout", field="begin.layout", layout=layout
            )
        record = await self._locate(topic, create=False)
        if record is not None and record.owner == self.own:
            raise AlreadyHere("the topic is here")
        if record is None or record.version != version:
            raise InvalidMove("the topic's record has changed", field="begin.version")
        self._remembered.pop(topic, None)
        for each in list(self._staged.values()):
            if each.topic == topic and each.version < version:
                del self._staged[each.move]
        return await self.shelf.stage(topic, move, version)

    async def received(self, staging: Staging, topic: str, move: str, version: int) -> None:
        """All of it came."""
        await staging.complete()
        self._staged[move] = Placement(topic, "", version, move)

    async def _arrive(self, record: Placement) -> None:
        """Take over a topic that is here by its record."""
        topic, own, version, move = record
        async with self._arriving:
            if self._is_here(topic):
                return
            if move and move not in self._staged:
                log.critical("a topic is lost", topic=topic, version=version)
                raise TopicLost("the topic was moved here, and is not here", topic=topic)
            holding = Holding(topic, State.HELD, version, "", own)
            await self.shelf.show(holding, move)
            self._holdings[topic] = holding
            self._staged.pop(move, None)
            self._remembered.pop(topic, None)
        if move:
            log.info("topic arrived", topic=topic, version=version)

    # ---- a topic leaves

    async def move(self, topic: str, to: str) -> tuple[Placement, bool]:
        """Move a topic to another instance; where it is then, and whether this call moved it. Goes
        on when the caller leaves.

        Raises:
            InvalidInstance: there is no such instance.
            TopicNotPlaced: the topic was never made.
            NotOwner: another instance holds it.
            MoveFailed: it is where it was, or will be soon.
        """
        if to not in self.instances:
            raise InvalidInstance("there is no such instance", field="to", instance=to)
        await self.check(topic)
        going_to, task = self._moves.get(topic, (to, None))
        if task is None:
            # Work for a topic belongs to no call: it must not inherit a caller's deadline.
            task = asyncio.get_running_loop().create_task(
                self._move(topic, to), context=contextvars.Context()
            )
            self._moves[topic] = to, task
            task.add_done_callback(lambda done: self._moved(topic, done))
        elif going_to != to:
            raise MoveFailed(
                "the topic is being moved elsewhere", retry_after_s=RETRY_AFTER_S, owner=going_to
            )
        return await asyncio.shield(task)

    def _moved(self, topic: str, done: asyncio.Task[tuple[Placement, bool]]) -> None:
        self._moves.pop(topic, None)
        if not done.cancelled() and (error := done.exception()) is not None:
            log.warning("topic not moved", topic=topic, error=repr(error))

    async def _move(self, topic: str, to: str) -> tuple[Placement, bool]:
        holding = self._holdings.get(topic)
        if holding is None:
            raise TopicNotPlaced("the topic was never made", topic=topic)
        if holding.state is State.SEALED:  # an earlier move was cut short
            await self._settle(holding)
            await self.check(topic)
        record = await self.keeper.find(topic)
        if record is None or record.owner != self.own:
            raise MoveFailed("the topic's record is not known", because="NO_RECORD")
        if to == self.own:
            return record, False
        try:
            await self._peers.locate(to, topic)  # or it would be sealed in vain
        except DomainError as error:
            raise MoveFailed(
                "the other instance does not answer",
                retry_after_s=RETRY_AFTER_S,
                because=error.reason,
            ) from error
        sealed = Holding(topic, State.SEALED, record.version, uuid.uuid4().hex, to)
        log.info("topic leaves", topic=topic, to=to)
        self._holdings[topic] = self._unsettled[topic] = sealed
        try:
            await self._send(sealed)
        except (DomainError, TimeoutError) as error:
            reason = error.reason if isinstance(error, DomainError) else "TOPIC_BUSY"
            log.warning("a move was cut short", topic=topic, to=to, reason=reason)
            if await self._settle(sealed) is not Outcome.MOVED:
                raise MoveFailed(
                    "the topic was not moved", retry_after_s=RETRY_AFTER_S, because=reason
                ) from error
        else:
            await self._settle(sealed)
        return Placement(topic, to, sealed.version + 1, sealed.move), True

    async def _send(self, sealed: Holding) -> None:
        """Seal a topic, send it, and have the keeper decide."""
        topic, _, version, move, to = sealed
        await self._release(topic, Moving("the topic is being moved", retry_after_s=RETRY_AFTER_S))
        async with asyncio.timeout(WRITERS_TIMEOUT_S):
            while self._writers[topic]:
                self._written.clear()
                await self._written.wait()
        await self.shelf.seal(sealed)
        await self._peers.send(to, sealed, self.shelf.layout, self.shelf.rows(topic))
        await self.keeper.place(topic, version=version, owner=to, move=move)

    async def _settle(self, sealed: Holding) -> Outcome:
        """Find out what became of a move, and bring it to its end. One that is not decided is
        decided here: the topic stays.

        Raises:
            PlacementUnavailable: the keeper, or the other instance, does not answer.
        """
        async with self._settling.of(sealed.topic):
            if self._unsettled.get(sealed.topic) is not sealed:  # somebody did meanwhile
                return Outcome.STAYED if self._is_here(sealed.topic) else Outcome.MOVED
            became = await self._settled(sealed)
            del self._unsettled[sealed.topic]
            return became

    async def _settled(self, sealed: Holding) -> Outcome:
        topic, _, version, _, to = sealed
        record = await self.keeper.find(topic)
        became = outcome(sealed, record, self.own)
        if became is Outcome.UNDECIDED:
            expected = 0 if record is None else record.version
            record, _ = await self.keeper.place(topic, version=expected, owner=self.own, move="")
            became = outcome(sealed, record, self.own)
        if record is None or became is Outcome.UNDECIDED:
            raise PlacementUnavailable("the keeper has lost a record", retry_after_s=RETRY_AFTER_S)
        if became is Outcome.STAYED:
            held = Holding(topic, State.HELD, record.version, "", self.own)
            await self.shelf.hold(held)
            self._holdings[topic] = held
            log.info("topic stays", topic=topic, version=record.version)
            return became
        # From here on it is read there alone; what is here stays until it is seen there.
        gone = Holding(topic, State.GONE, version + 1, "", to)
        self._holdings[topic] = gone
        await self._peers.locate(to, topic)
        await self.shelf.forget(gone)
        log.info("topic left", topic=topic, to=to)
        return became

    # ---- for as long as the process lives

    async def settle_forever(self) -> None:
        """Bring moves to their ends that were cut short, from this instance or to it."""
        while True:
            for sealed in list(self._unsettled.values()):
                if sealed.topic not in self._moves:
                    await _try(self._settle(sealed))
            for staged in list(self._staged.values()):
                await _try(self._tidy(staged))
            await asyncio.sleep(SETTLE_INTERVAL_S)

    async def _tidy(self, staged: Placement) -> None:
        """Take over what came, or drop it if it stayed where it was."""
        record = await self.keeper.find(staged.topic)
        if record is None or record.version <= staged.version:
            return  # not decided yet
        if record.owner == self.own and record.move == staged.move:
            await self._arrive(record)
        elif staged.move in self._staged:
            del self._staged[staged.move]
            await self.shelf.drop(staged.move)

    async def announce(self) -> None:
        """Have the keeper record what is here, if it does not: its records may be older."""
        for topic, holding in list(self._holdings.items()):
            while holding.state is State.HELD:
                try:
                    await self.keeper.place(topic, version=0, owner=self.own, move="")
                    break
                except DomainError:
                    await asyncio.sleep(SETTLE_INTERVAL_S)

    async def finish(self) -> None:
        """Leave moves as they are: the next start settles them."""
        await end(*(task for _, task in self._moves.values()))


async def _try(settling: Awaitable[object]) -> None:
    try:
        await settling
    except DomainError as error:
        log.warning("a move is not settled", reason=error.reason)

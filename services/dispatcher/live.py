"""One subscription that this instance has: carries out what its machine decides.

    streams ──requests──▶ machine ──effects──▶ the log, the cursor, the dead letter topic
       ▲                                            │
       └──────── outboxes ◀──── effects ◀── machine ┘  (an event for each outcome)

Requests and outcomes are given to the machine as they come, in one thread and without waiting, so
they never meet. What may fail is repeated here until it succeeds. When the lease is lost,
everything stops at once, and nothing that comes later counts: the cursor service refuses the epoch.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Sequence
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar

import structlog
from google.rpc import status_pb2

from seqgate.api.dispatcher.v1 import dispatcher_pb2 as pb
from seqgate.api.ledger.v1 import ledger_pb2
from seqgate.types import Position, TopicName
from services.dispatcher.cache import EntryCache
from services.dispatcher.config import DispatcherConfig
from services.dispatcher.core.effects import (
    AfterDeadLetter,
    Assigned,
    DeadLetter,
    Deliver,
    Delivery,
    Drain,
    Effect,
    ForgetKey,
    Options,
    Outcome,
    Persist,
    Read,
    Record,
    Revoke,
    Scan,
)
from services.dispatcher.core.effects import Kind as SubscriptionKind
from services.dispatcher.core.positions import Acknowledged
from services.dispatcher.core.selectors import SlotRange
from services.dispatcher.core.subscription import Durable, Item, Refused, Subscription
from services.dispatcher.dead import Graveyard
from services.dispatcher.entries import entry_of
from services.dispatcher.placement import Placement, selector_of
from services.dispatcher.ports import (
    Cursors,
    DeadLetters,
    EntryCorrupt,
    LetterRefused,
    Log,
    Part,
    SubscriptionNotFound,
)
from services.dispatcher.refusals import (
    SlowConsumer,
    SubscriptionBusy,
    TooManyConsumers,
    TooManyUnanswered,
)
from services.errors import DomainError, Draining, Fenced, Kind
from services.runtime.tasks import end

log = structlog.get_logger()

T = TypeVar("T")

BACKOFF_FIRST_S: Final = 0.05
BACKOFF_MAX_S: Final = 2.0
"""How long something that failed waits before it is tried again, doubling from the first to the
longest."""

RENEWALS: Final = 6
"""How often a lease is renewed in its time."""

OUTBOX_ITEMS_MAX: Final = 100_000
"""How many messages wait for a consumer that does not read, before it is cut off. Deliveries are
bounded by its permits; this bounds the rest."""

UNANSWERED_MAX: Final = 1_000
"""How many requests of a consumer may be unanswered, before it is cut off."""

RESPONSE_ENTRIES_MAX: Final = 500
RESPONSE_BYTES_MAX: Final = 2 * 1024 * 1024
"""How many entries, and bytes of them, one message to a consumer holds; one entry always is."""


class Joining(NamedTuple):
    """How somebody subscribes."""

    name: str
    options: Options
    placement: Placement
    dead_letter_topic: TopicName
    ranges: Sequence[SlotRange]
    weight: int
    ack_timeout_ms: int


class Session:
    """A consumer's stream: what is on its way to it."""

    def __init__(self, live: "Live", consumer: int, joining: Joining, connected_ms: int) -> None:
        self.live = live
        self.consumer = consumer
        self.joining = joining
        self.connected_ms = connected_ms
        self._outbox: deque[Delivery | pb.ConsumeResponse] = deque()
        self._news = asyncio.Event()
        self._failed = asyncio.Event()
        self._error: Exception | None = None
        self._over = False
        self._unanswered = 0

    @property
    def is_over(self) -> bool:
        """Whether nothing more is to come."""
        return self._over

    def put(self, *items: Delivery | pb.ConsumeResponse) -> None:
        """Send these, after all that were put before."""
        if self._over:
            return
        self._outbox.extend(items)
        self._news.set()
        if len(self._outbox) > OUTBOX_ITEMS_MAX + self.live.permitted(self.consumer):
            error = SlowConsumer("the consumer does not read what it is sent", retry_after_s=0.5)
            self.finish(error)
            # Not at once: the machine's effects are being carried out.
            asyncio.get_running_loop().call_soon(self.live.leave, self)

    def asked(self) -> None:
        """A request came that is answered.

        Raises:
            TooManyUnanswered: too many were not.
        """
        if self._unanswered >= UNANSWERED_MAX:
            raise TooManyUnanswered(
                "too many requests are unanswered", unanswered_max=UNANSWERED_MAX
            )
        self._unanswered += 1

    def forget_deliveries(self) -> None:
        """Deliveries that are not sent yet are not sent."""
        self._outbox = deque(each for each in self._outbox if not isinstance(each, Delivery))

    def finish(self, error: Exception | None = None, *, at_once: bool = True) -> None:
        """End the stream: at once with an error, else after what was put."""
        if self._over:
            return
        self._over = True
        self._error = error
        self._news.set()
        if error is not None and at_once:
            self._failed.set()

    async def failure(self) -> Exception:
        """Why the stream ends at once, when it does."""
        await self._failed.wait()
        assert self._error is not None
        return self._error

    async def responses(self) -> AsyncIterator[pb.ConsumeResponse]:
        """What is sent.

        Raises:
            DomainError: why the stream ends.
        """
        while True:
            await self._news.wait()
            self._news.clear()
            while self._outbox:
                first = self._outbox[0]
                if isinstance(first, Delivery):
                    async for response in self.live.filled(self.consumer, self._deliveries()):
                        yield response
                else:
                    self._outbox.popleft()
                    self._unanswered -= first.HasField("settled")
                    yield first
            if self._over:
                if self._error is not None and not self._failed.is_set():
                    raise self._error
                return

    def _deliveries(self) -> list[Delivery]:
        some: list[Delivery] = []
        while self._outbox and len(some) < RESPONSE_ENTRIES_MAX:
            first = self._outbox[0]
            if not isinstance(first, Delivery):
                break
            some.append(first)
            self._outbox.popleft()
        return some


class _Waiting(NamedTuple):
    """A request whose acknowledgements are not durable yet; without a response: a farewell, which
    ends the stream, with an error or in good order."""

    number: int
    session: Session
    response: pb.ConsumeResponse | None
    error: DomainError | None = None


class Live:
    """See the module."""

    def __init__(
        self,
        config: DispatcherConfig,
        topic: TopicName,
        name: str,
        epoch: int,
        ports: "Ports",
        tasks: asyncio.TaskGroup,
    ) -> None:
        self.topic = topic
        self.name = name
        self.epoch = epoch
        self.options = Options()
        self.placement = Placement.CONSISTENT_HASHING
        self.stopped: DomainError | None = None
        self.assignment_version = 0
        self.sessions: dict[int, Session] = {}
        self.idle_since_s: float | None = asyncio.get_running_loop().time()
        self._config = config
        self._ports = ports
        self._tasks = tasks
        self._running: set[asyncio.Task[None]] = set()
        self._work: set[asyncio.Task[None]] = set()
        self._generation = 0
        self._numbers = 1
        self._changing = asyncio.Lock()
        self._change = asyncio.Event()
        self._cache = EntryCache(config.cache_bytes_max)
        self._reader: AsyncIterator[Sequence[ledger_pb2.StoredEntry]] | None = None
        self._reader_after: Position | None = None
        self._waiting: deque[_Waiting] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_ms: int | None = None
        self._graveyard = Graveyard(topic, name, ports.cursors, ports.log, ports.dead_letters)
        nothing = Durable(Acknowledged(None))
        self.machine = Subscription(
            self.options, selector_of(self.options.kind, self.placement), nothing
        )
        self._start(self._renew_forever)

    # ---- life

    async def load(self) -> None:
        """Begin with what is durable."""
        durable = await self._durable()
        self._begin(durable)

    def _begin(self, durable: Durable) -> None:
        self._generation += 1
        self._reader = None
        self._cache.clear()
        self.machine = Subscription(
            self.options,
            selector_of(self.options.kind, self.placement),
            durable,
            first_delivery=self.machine.next_delivery,
        )

    async def _durable(self) -> Durable:
        cursors = self._ports.cursors
        cursor = await cursors.get(self.topic, self.name)
        acknowledged = Acknowledged(cursor.mark_delete)
        left = {}
        async for each in cursors.acknowledged(self.topic, self.name):
            if isinstance(each, Part):
                left[each.position] = (1 << each.messages) - 1 & ~each.acknowledged
            else:
                acknowledged.add_range(each.first, each.last_entry_id)
        keys = await self._graveyard.load(cursor, self.epoch, acknowledged)
        attempts = {each: count async for each, count in cursors.attempts(self.topic, self.name)}
        return Durable(acknowledged, left, attempts, keys)

    def stop(self, error: DomainError) -> None:
        """Stop at once. Consumers are told why."""
        if self.stopped is not None:
            return
        self.stopped = error
        self._change.set()
        self._generation += 1
        for session in list(self.sessions.values()):
            session.finish(error)
        for waiting in self._waiting:
            waiting.session.finish(error)
        for task in self._running:
            task.cancel()
        if self._timer is not None:
            self._timer.cancel()

    async def close(self, timeout_s: float) -> None:
        """Stop in good order: what was acknowledged is made durable first, and the lease given
        back."""
        was_lost = self.stopped is not None
        try:
            async with asyncio.timeout(timeout_s):
                if not was_lost:
                    await self._settled()
                await self._ports.cursors.release(self.topic, self.name, self.epoch)
        except (TimeoutError, DomainError) as error:
            if not was_lost:
                log.warning(
                    "not released", topic=str(self.topic), subscription=self.name, why=str(error)
                )
        self.stop(Draining("the service is shutting down", retry_after_s=0.1))
        await end(*self._running)

    async def _renew_forever(self) -> None:
        config = self._config
        loop = asyncio.get_running_loop()
        lost_s = loop.time() + config.lease_s
        while True:
            await asyncio.sleep(config.lease_s / RENEWALS)
            asked_s = loop.time()
            try:
                async with asyncio.timeout_at(lost_s):
                    await self._ports.cursors.renew(
                        self.topic,
                        self.name,
                        self._ports.owner,
                        self.epoch,
                        int(config.lease_s * 1000),
                    )
                lost_s = asked_s + config.lease_s
            except (Fenced, SubscriptionNotFound) as error:
                self.stop(error)
                return
            except (DomainError, TimeoutError) as error:
                log.warning("lease not renewed", subscription=self.name, why=str(error))
                if loop.time() >= lost_s:
                    self.stop(Fenced("the lease on the subscription was lost"))
                    return

    # ---- consumers

    async def subscribe(self, joining: Joining) -> Session:
        """Somebody connects.

        Raises:
            SubscriptionBusy, TooManyConsumers, InvalidKeyRange, RangeConflict, NoSlotsLeft.
        """
        async with self._changing:
            self._check_running()
            if not self.sessions:
                await self._change_options(joining)
            self._check_fits(joining)
            number, self._numbers = self._numbers, self._numbers + 1
            session = Session(self, number, joining, self._ports.now_ms())
            self.sessions[number] = session
            self.idle_since_s = None
            try:
                self._join(session)
            except DomainError:
                self._forget(session)
                raise
        return session

    def leave(self, session: Session) -> None:
        """Somebody's stream ended, without a word."""
        if self._forget(session) and self.stopped is None:
            self._apply(self.machine.leave(session.consumer, self._ports.now_ms()))

    def say_goodbye(self, session: Session, error: DomainError | None = None) -> None:
        """Somebody leaves in good order: its stream ends when what it acknowledged is durable."""
        if not self._forget(session):
            return
        now_ms = self._ports.now_ms()
        number = self.machine.durable_with
        self._apply(self.machine.close(session.consumer, now_ms))
        if number:
            self._waiting.append(_Waiting(number, session, None, error))
        else:
            session.finish(error, at_once=False)

    def _forget(self, session: Session) -> bool:
        if self.sessions.get(session.consumer) is not session:
            return False
        del self.sessions[session.consumer]
        if not self.sessions:
            self.idle_since_s = asyncio.get_running_loop().time()
        return True

    def _join(self, session: Session) -> None:
        joining = session.joining
        self._apply(
            self.machine.join(
                session.consumer,
                name=joining.name,
                now_ms=self._ports.now_ms(),
                weight=joining.weight,
                ranges=joining.ranges,
                ack_timeout_ms=joining.ack_timeout_ms,
            )
        )

    async def _change_options(self, joining: Joining) -> None:
        """Nobody is connected: who comes first says how the subscription behaves."""
        self._graveyard.dead_letter_topic = joining.dead_letter_topic
        if (joining.options, joining.placement) == (self.options, self.placement):
            return
        await self._ports.cursors.get(self.topic, self.name)  # it answers: this will not take long
        await self._settled()
        await end(*self._work)
        try:
            durable = await self._durable()
        except DomainError as error:
            self.stop(error)
            raise
        self.options, self.placement = joining.options, joining.placement
        self._begin(durable)

    def _check_fits(self, joining: Joining) -> None:
        given = (joining.options, joining.placement, joining.dead_letter_topic)
        have = (self.options, self.placement, self._graveyard.dead_letter_topic)
        if given != have:
            raise SubscriptionBusy("consumers are connected with other options")
        if self.options.kind is SubscriptionKind.EXCLUSIVE and self.sessions:
            raise SubscriptionBusy("the subscription is exclusive, and somebody has it")
        if len(self.sessions) >= self._config.consumers_max:
            raise TooManyConsumers(
                "the subscription has as many consumers as it may",
                consumers_max=self._config.consumers_max,
            )

    def _check_running(self) -> None:
        if self.stopped is not None:
            raise self.stopped

    # ---- what consumers ask

    async def ready(self) -> None:
        """Return when requests can be given to the machine: not amid a change of place."""
        if self._changing.locked():
            async with self._changing:
                pass
        self._check_running()

    def permitted(self, consumer: int) -> int:
        """How many deliveries a consumer may have before it."""
        known = self.machine.consumers.get(consumer)
        return 0 if known is None else max(0, known.permits) + len(known.flights)

    def permit(self, session: Session, messages: int) -> None:
        """Somebody takes more."""
        self._apply(self.machine.permit(session.consumer, messages, self._ports.now_ms()))

    def acknowledge(self, session: Session, request_id: int, items: Iterable[Item]) -> None:
        """Somebody is done with deliveries."""
        effects, outcomes, number = self.machine.acknowledge(
            session.consumer, items, self._ports.now_ms()
        )
        self._answer(session, request_id, outcomes, number)
        self._apply(effects)

    def acknowledge_through(self, session: Session, request_id: int, item: Item) -> None:
        """Somebody is done with a delivery and everything before it."""
        effects, outcome, number = self.machine.acknowledge_through(
            session.consumer, item, self._ports.now_ms()
        )
        self._answer(session, request_id, [outcome], number)
        self._apply(effects)

    def refuse(self, session: Session, request_id: int, items: Iterable[Refused]) -> None:
        """Somebody failed to process deliveries."""
        effects, outcomes = self.machine.refuse(session.consumer, items, self._ports.now_ms())
        self._apply(effects)
        self._answer(session, request_id, outcomes, 0)

    def give_back(self, session: Session, request_id: int, deliveries: Iterable[int]) -> None:
        """Somebody returns deliveries unprocessed."""
        effects, outcomes = self.machine.give_back(
            session.consumer, deliveries, self._ports.now_ms()
        )
        self._apply(effects)
        self._answer(session, request_id, outcomes, 0)

    def renew(self, session: Session, request_id: int, deliveries: Iterable[int]) -> None:
        """Somebody needs more time."""
        outcomes = self.machine.renew(session.consumer, deliveries, self._ports.now_ms())
        self._answer(session, request_id, outcomes, 0)

    def stale(self, session: Session, request_id: int, count: int) -> None:
        """Somebody uses tokens of another epoch."""
        self._answer(session, request_id, [Outcome.STALE] * count, 0)

    def refused(self, session: Session, request_id: int, status: status_pb2.Status) -> None:
        """A request as a whole is refused."""
        settled = pb.Settled(request_id=request_id, error=status)
        session.put(pb.ConsumeResponse(settled=settled))

    def release_key(self, key: bytes) -> bool:
        """Let a key go on; whether it was held."""
        held = self.machine.keys.get(key)
        self._apply(self.machine.release_key(key, self._ports.now_ms()))
        return held is not None and held.after is not AfterDeadLetter.CONTINUE

    async def reset(self, mark_delete: Position | None) -> None:
        """Go on from another place. Consumers stay; nothing of what they have counts any more. What
        is begun is finished, whether somebody still waits for it or not.

        Raises:
            CursorsUnavailable: nothing was begun.
        """
        await self._ports.cursors.get(self.topic, self.name)
        self._check_running()
        await asyncio.wait({self._start(self._reset, mark_delete)})
        self._check_running()

    async def _reset(self, mark_delete: Position | None) -> None:
        cursors = self._ports.cursors
        async with self._changing:
            await self._settled()
            await end(*self._work)
            await self._repeated(
                lambda: cursors.reset(self.topic, self.name, mark_delete, self.epoch)
            )
            self._waiting_are_over()
            self._begin(await self._repeated(self._durable))
            for session in self.sessions.values():
                session.forget_deliveries()
                session.put(pb.ConsumeResponse(sought=pb.Sought()))
                self._join(session)

    async def _settled(self) -> None:
        """Return when nothing is left to make durable."""
        while not self.machine.is_idle:
            self._check_running()
            self._change.clear()
            await self._change.wait()

    def _answer(
        self, session: Session, request_id: int, outcomes: Sequence[Outcome], number: int
    ) -> None:
        settled = pb.Settled(request_id=request_id)
        if any(outcome is not Outcome.DONE for outcome in outcomes):
            settled.outcomes.extend(_OUTCOMES[outcome] for outcome in outcomes)
        response = pb.ConsumeResponse(settled=settled)
        if number:
            self._waiting.append(_Waiting(number, session, response))
        else:
            session.put(response)

    async def entry(self, position: Position) -> ledger_pb2.StoredEntry | None:
        """The entry at a position, without its payload; None: the log has none there."""
        found = await self._ports.log.scan(self.topic, position, None, 1)
        if (
            not found
            or Position(found[0].position.ledger_id, found[0].position.entry_id) != position
        ):
            return None
        return found[0]

    # ---- carrying out

    def _apply(self, effects: Iterable[Effect]) -> None:
        """Begin to do what the machine wants."""
        for effect in effects:
            match effect:
                case Deliver(consumer, deliveries):
                    self._put(consumer, *deliveries)
                case Revoke(consumer, numbers):
                    self._put(consumer, pb.ConsumeResponse(revoked=pb.Revoked(deliveries=numbers)))
                case Drain(consumer, numbers):
                    self._put(consumer, pb.ConsumeResponse(moved=pb.Moved(deliveries=numbers)))
                case Assigned(consumer, ranges):
                    self._tell_ranges(consumer, ranges)
                case Read(after):
                    self._do(self._read, after, self._generation)
                case Scan(at, after, limit):
                    self._do(self._scan, at, after, limit, self._generation)
                case Persist():
                    self._do(self._persist, effect, self._generation)
                case Record():
                    self._do(self._record, effect, self._generation)
                case DeadLetter():
                    self._do(self._bury, effect, self._generation)
                case ForgetKey(key):
                    self._do(self._repeated, partial(self._graveyard.forget, key))
        self._change.set()
        self._set_timer()

    def _put(self, consumer: int, *items: Delivery | pb.ConsumeResponse) -> None:
        session = self.sessions.get(consumer)
        if session is not None:
            session.put(*items)

    def _tell_ranges(self, consumer: int, ranges: Sequence[SlotRange]) -> None:
        self.assignment_version += 1
        assigned = pb.Assigned(
            ranges=[pb.KeyRange(first=each.first, last=each.last) for each in ranges],
            version=self.assignment_version,
        )
        self._put(consumer, pb.ConsumeResponse(assigned=assigned))

    def _set_timer(self) -> None:
        when_ms = self.machine.next_timer_ms
        if when_ms == self._timer_ms:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_ms = when_ms
        self._timer = None
        if when_ms is not None and self.stopped is None:
            delay_s = max(0.0, (when_ms - self._ports.now_ms()) / 1000)
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._tick)

    def _tick(self) -> None:
        self._timer_ms = None
        if self.stopped is None and not self._changing.locked():
            self._apply(self.machine.tick(self._ports.now_ms()))

    def _do(self, work: Callable[..., Coroutine[Any, Any, None]], *arguments: Any) -> None:
        """Do something for the machine, until it is done or another machine takes its place."""
        if self.stopped is not None:
            return
        task = self._start(work, *arguments)
        self._work.add(task)
        task.add_done_callback(self._work.discard)

    def _start(
        self, work: Callable[..., Coroutine[Any, Any, None]], *arguments: Any
    ) -> asyncio.Task[None]:
        task = self._tasks.create_task(self._until_stopped(work, *arguments))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    async def _until_stopped(
        self, work: Callable[..., Coroutine[Any, Any, None]], *arguments: Any
    ) -> None:
        try:
            await work(*arguments)
        except DomainError:
            if self.stopped is None:
                raise

    async def _repeated(self, do: Callable[[], Awaitable[T]]) -> T:
        """Do something until it succeeds.

        Raises:
            DomainError: it never will: everything has stopped.
        """
        backoff_s = BACKOFF_FIRST_S
        while True:
            self._check_running()
            try:
                return await do()
            except DomainError as error:
                if error.kind is not Kind.UNAVAILABLE and error.kind is not Kind.EXHAUSTED:
                    if isinstance(error, EntryCorrupt):
                        log.critical(
                            "an entry is damaged",
                            topic=str(self.topic),
                            subscription=self.name,
                            **error.details,
                        )
                    self.stop(error)
                    raise
                log.debug("tried again", subscription=self.name, why=error.message)
                wait_s = error.retry_after_s if isinstance(error, LetterRefused) else None
                await asyncio.sleep(wait_s or backoff_s)
                backoff_s = min(backoff_s * 2, BACKOFF_MAX_S)

    async def _read(self, after: Position | None, generation: int) -> None:
        entries = await self._repeated(lambda: self._next_entries(after))
        if generation != self._generation:
            return
        for stored in entries:
            self._cache.put(stored)
        known = [entry_of(stored) for stored in entries]
        self._apply(self.machine.read(known, self._ports.now_ms()))

    async def _next_entries(self, after: Position | None) -> Sequence[ledger_pb2.StoredEntry]:
        """What follows in the log. The stream stays open from one page to the next."""
        while True:
            if self._reader is None or self._reader_after != after:
                self._reader = self._ports.log.follow(self.topic, after)
                self._reader_after = after
            reader = self._reader
            try:
                entries = await anext(reader)
            except StopAsyncIteration:
                self._reader = None
                await asyncio.sleep(BACKOFF_FIRST_S)
                continue
            except BaseException:
                self._reader = None
                raise
            last = entries[-1].position
            self._reader_after = Position(last.ledger_id, last.entry_id)
            return entries

    async def _scan(
        self, at: Position | None, after: Position | None, limit: int, generation: int
    ) -> None:
        entries = await self._repeated(lambda: self._ports.log.scan(self.topic, at, after, limit))
        if generation == self._generation:
            known = [entry_of(stored) for stored in entries]
            self._apply(self.machine.scanned(known, self._ports.now_ms()))

    async def _persist(self, what: Persist, generation: int) -> None:
        mark_delete = await self._repeated(
            lambda: self._ports.cursors.persist(self.topic, self.name, what, self.epoch)
        )
        if generation != self._generation:
            return
        effects = self.machine.persisted(mark_delete, self._ports.now_ms())
        while self._waiting and self._waiting[0].number <= what.number:
            self._over(self._waiting.popleft())
        self._apply(effects)
        self._graveyard.acknowledged(what.entries)
        if self._graveyard.has_done:
            self._do(self._repeated, self._graveyard.tidy)

    def _over(self, waiting: _Waiting) -> None:
        if waiting.response is not None:
            waiting.session.put(waiting.response)
        else:
            waiting.session.finish(waiting.error, at_once=False)

    def _waiting_are_over(self) -> None:
        while self._waiting:
            self._over(self._waiting.popleft())

    async def _record(self, what: Record, generation: int) -> None:
        await self._repeated(
            lambda: self._ports.cursors.record(self.topic, self.name, what.attempts, self.epoch)
        )
        if generation == self._generation:
            self._apply(self.machine.recorded(self._ports.now_ms()))

    async def _bury(self, what: DeadLetter, generation: int) -> None:
        await self._repeated(lambda: self._graveyard.bury(what))
        if generation == self._generation:
            self._apply(self.machine.dead_lettered(what.position, what.key, self._ports.now_ms()))

    # ---- what is sent

    async def filled(
        self, consumer: int, deliveries: Sequence[Delivery]
    ) -> AsyncIterator[pb.ConsumeResponse]:
        """Deliveries with what they deliver, but for those that count no more."""
        generation = self._generation
        missing = sorted(each.position for each in deliveries if each.position not in self._cache)
        fetched: dict[Position, ledger_pb2.StoredEntry] = {}
        if missing:
            for stored in await self._repeated(lambda: self._ports.log.fetch(self.topic, missing)):
                position = Position(stored.position.ledger_id, stored.position.entry_id)
                fetched[position] = stored
        response, size_bytes = pb.Deliveries(), 0
        gone = []
        unsent = 0
        for delivery in deliveries:
            if generation != self._generation:
                continue
            known = self.machine.consumers.get(consumer)
            if known is None or delivery.delivery not in known.flights:
                unsent += delivery.unacked.bit_count()
                continue
            entry = self._cache.take(delivery.position) or fetched.get(delivery.position)
            if entry is None:
                unsent += delivery.unacked.bit_count()
                gone.append(Item(delivery.delivery))
                continue
            added = entry.ByteSize()
            if response.deliveries and size_bytes + added > RESPONSE_BYTES_MAX:
                yield pb.ConsumeResponse(deliveries=response)
                response, size_bytes = pb.Deliveries(), 0
            _fill(response.deliveries.add(), delivery, entry)
            size_bytes += added
        if response.deliveries:
            yield pb.ConsumeResponse(deliveries=response)
        if generation != self._generation:
            return
        if gone:
            log.error("entries are gone from the log", subscription=self.name, count=len(gone))
            effects, _, _ = self.machine.acknowledge(consumer, gone, self._ports.now_ms())
            self._apply(effects)
        if unsent:  # the consumer counts what it receives
            self._apply(self.machine.permit(consumer, unsent, self._ports.now_ms()))


def _fill(wire: pb.Delivery, delivery: Delivery, entry: ledger_pb2.StoredEntry) -> None:
    wire.delivery = delivery.delivery
    wire.position.CopyFrom(entry.position)
    wire.metadata.CopyFrom(entry.metadata)
    wire.payload = entry.payload
    wire.append_time = entry.append_time
    wire.attempts = delivery.attempts
    if entry.aborts:
        wire.aborts = entry.aborts
    if entry.metadata.HasField("num_messages_in_batch"):
        messages = entry.metadata.num_messages_in_batch
        if delivery.unacked != (1 << messages) - 1:
            wire.acknowledged.extend(
                index for index in range(messages) if not delivery.unacked >> index & 1
            )
    if delivery.gap is not None:
        wire.gap.position.ledger_id, wire.gap.position.entry_id = delivery.gap.position
        wire.gap.attempts = delivery.gap.attempts


_OUTCOMES: Final = {
    Outcome.DONE: pb.OUTCOME_DONE,
    Outcome.STALE: pb.OUTCOME_STALE,
    Outcome.INVALID: pb.OUTCOME_INVALID,
}


class Ports(NamedTuple):
    """What subscriptions stand on."""

    log: Log
    cursors: Cursors
    dead_letters: DeadLetters
    owner: str
    now_ms: Callable[[], int]

"""A subscription held by this instance: its consumers, changes to it, and its end.

    consumers ──▶ sessions ──▶ the machine, and the execution of its decisions (performing.py)
                                   ▲
    administrators ──▶ Live ───────┘ another machine, other filters

Only the holder of the lease on the subscription's cursor makes anything durable. When the lease is
lost everything stops at once, and later calls fail: the cursor service refuses the epoch.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, NamedTuple, TypeVar

import structlog

from seqgate.api.dispatcher.v1 import dispatcher_pb2 as pb
from seqgate.api.ledger.v1 import ledger_pb2
from seqgate.services.cursors import CursorsUnavailable
from seqgate.services.dispatcher.auditing.reading import Audited, audited
from seqgate.services.dispatcher.config import DispatcherConfig
from seqgate.services.dispatcher.core.effects import (
    AfterDeadLetter,
    Because,
    Entry,
    Options,
    SubscriptionType,
)
from seqgate.services.dispatcher.core.history import Event, What, find, time_of
from seqgate.services.dispatcher.core.positions import Acknowledged
from seqgate.services.dispatcher.core.selectors import Placement
from seqgate.services.dispatcher.core.settling import FAILED_ENTRIES_MAX, Durable
from seqgate.services.dispatcher.core.subscription import Subscription
from seqgate.services.dispatcher.cursor import resuming
from seqgate.services.dispatcher.cursor.tenure import Tenure, keep_lease
from seqgate.services.dispatcher.cursor.waiting import Waiting
from seqgate.services.dispatcher.entries import position_of
from seqgate.services.dispatcher.errors import (
    LetterNotRedrivable,
    SubscriptionBusy,
    TooManyConsumers,
    TooManyReturns,
)
from seqgate.services.dispatcher.filtering.applied import Filtering
from seqgate.services.dispatcher.filtering.chains import (
    NO_FILTERS,
    Chain,
    Stretch,
    from_properties,
    to_properties,
)
from seqgate.services.dispatcher.filtering.trial import Trial
from seqgate.services.dispatcher.letters.graveyard import Graveyard
from seqgate.services.dispatcher.letters.listing import Listing
from seqgate.services.dispatcher.letters.operations import Action
from seqgate.services.dispatcher.letters.record import RedriveRecord
from seqgate.services.dispatcher.letters.returns import Redrive, Return, Returns
from seqgate.services.dispatcher.ports import Cursor, InvalidProperty, Part, Ports, TopicNotFound
from seqgate.services.dispatcher.redrives.redriving import Order, Redriving
from seqgate.services.dispatcher.shell.amending import SETTLES_S, Amending
from seqgate.services.dispatcher.shell.cache import EntryCache
from seqgate.services.dispatcher.shell.performing import Performing
from seqgate.services.dispatcher.shell.sending import Sending
from seqgate.services.dispatcher.shell.session import Joining, Session
from seqgate.services.dispatcher.shell.shared import Shared
from seqgate.services.dispatcher.shell.work import Work
from seqgate.services.errors import DomainError, Draining, Fenced
from seqgate.services.runtime.metrics import Recorder, nowhere
from seqgate.services.runtime.room import Room
from seqgate.types import Position, TopicName

log = structlog.get_logger()

T = TypeVar("T")

RECALLED: Final = 1_000
"""How many records of a history are searched at a time."""

DAMAGED_RETRY_S: Final = 5.0
"""How often a damaged letter that comes back is looked at again, in seconds."""

_FIRST: Final = Position(0, 0)
"""No entry of a log is before this."""


@dataclass(slots=True, eq=False)
class _Joiner:
    """A consumer that is connecting, and its outcome."""

    joining: Joining
    session: Session | None = None
    error: DomainError | None = None

    @property
    def is_done(self) -> bool:
        return self.session is not None or self.error is not None


class Unread(NamedTuple):
    """Stands for the start of a change that names none; see `_from_now_on`."""


class Live:
    """A subscription held by this instance.

    Attributes:
        sessions: connected consumers, by number.
        idle_since_s: when the last consumer left, by the loop's clock; None while any is connected.
        analyzing: held while the backlog is analyzed.
        history: the latest events of its messages; None: none are recorded.
        audit_topic: where its history is published, too; None: nowhere.
    """

    def __init__(
        self,
        config: DispatcherConfig,
        topic: TopicName,
        name: str,
        epoch: int,
        ports: Ports,
        tasks: asyncio.TaskGroup,
        answered: Recorder = nowhere,
        handed_over: Recorder = nowhere,
        *,
        shared: Shared | None = None,
        leased_s: float | None = None,
    ) -> None:
        """`epoch` is the epoch of the acquired lease; it is part of every delivery's token.
        `leased_s` is when the lease was requested, by the loop's clock; None: now. `shared` has the
        instance's budgets; None: budgets of its own. `answered` and `handed_over` record how long
        the filter service took, and how long keys drained."""
        self.topic = topic
        self.name = name
        self.epoch = epoch
        self.sessions: dict[int, Session] = {}
        now_s = asyncio.get_running_loop().time()
        self.idle_since_s: float | None = now_s
        self.analyzing = asyncio.Lock()
        self._config = config
        self._ports = ports
        lease_ms = int(config.lease_s * 1000)
        tenure = Tenure(ports.cursors, topic, name, ports.owner, epoch, lease_ms)
        self._tenure = tenure
        self._numbers = 1
        self._leaving: list[int] = []
        self._joiners: list[_Joiner] = []
        shared = shared or Shared.of(config)
        self.history = shared.history(topic, name)
        self.audit_topic = shared.audit_topic(topic)
        self._changing_filters = asyncio.Lock()
        self._work = Work(topic, name, tasks, self._at_stop, shared.changes)
        self.returns = Returns(tenure, ports.log)
        self.redriving = Redriving(self, self._work, ports.log, ports.now_ms)
        refused_max_s = config.dead_letter_refused_max_s
        self._graveyard = Graveyard(
            tenure, self.returns, ports.dead_letters, ports.now_ms, refused_max_s
        )
        self.filtering = Filtering(
            tenure, ports.filters, ports.now_ms, self._work.start, answered, self.history
        )
        self._performing = Performing(
            tenure,
            ports,
            self._work,
            self.sessions,
            self._graveyard,
            self.filtering,
            self.returns,
            cache=EntryCache(config.cache_bytes_max, shared.caches),
            delayed=shared.delayed,
            read_entries_max=config.read_entries_max,
            handed_over=handed_over,
            history=self.history,
        )
        self.amending = Amending(
            tenure,
            ports,
            self._work,
            self._graveyard,
            self.returns,
            self._performing,
            self.redriving.one_by_one,
        )
        self._sending = Sending(
            topic,
            name,
            self.returns,
            self._work,
            self._performing,
            shared.streams,
            bytes_max=min(config.stream_bytes_max, shared.streams.bytes_max),
        )
        self._waiting = Waiting(tenure, lambda: self.machine.waits)
        lost_s = (now_s if leased_s is None else leased_s) + config.lease_s
        self._work.start(keep_lease, tenure, name, config.lease_s, lost_s, self.stop)

    @property
    def machine(self) -> Subscription:
        """For reading only: changes go through Performing."""
        return self._performing.machine

    @property
    def acknowledged(self) -> Acknowledged:
        """The entries that are acknowledged durably."""
        return self.machine.acknowledged

    @property
    def totals(self) -> Counter[str]:
        """Counters since the subscription was taken."""
        return self._performing.totals

    @property
    def cache_bytes(self) -> int:
        """The size of cached entries that are not sent yet, in bytes."""
        return self._performing.cache.size_bytes

    @property
    def changing(self) -> asyncio.Lock:
        """Held while the machine is replaced or the filters change."""
        return self._performing.changing

    @property
    def room(self) -> Room:
        """The budget for deliveries on their way to consumers."""
        return self._sending.room

    @property
    def cache_bytes_max(self) -> int:
        return self._config.cache_bytes_max

    @property
    def options(self) -> Options:
        return self._performing.options

    @property
    def placement(self) -> Placement:
        return self._performing.placement

    @property
    def assignment_revision(self) -> int:
        """How often the assignment of slots to consumers changed."""
        return self._performing.assignment_revision

    @property
    def failures(self) -> int:
        return self._work.failures

    @property
    def changes(self) -> int:
        return self._work.changes

    @property
    def stopped(self) -> DomainError | None:
        """Why it stopped; None while it runs."""
        return self._work.stopped

    # ---- life

    async def load(self) -> None:
        """Start from durable state."""
        durable = await self._durable()
        if self.history is not None:
            self.history.begin(self._ports.now_ms(), self.epoch, self._ports.owner)
        self._begin(durable)
        self._work.start(self._waiting.keep)
        self.redriving.go_on()

    def _begin(self, durable: Durable) -> None:
        """Start a machine from durable state."""
        self._performing.begin(durable)
        if self.returns.open:
            self._work.start_for_machine(self._bring_back)

    async def _bring_back(self) -> None:
        """Give the machine the dead letters that come back. A damaged one is looked at again until
        it is repaired, or its loss is accepted."""
        performing = self._performing
        generation, wanted = performing.generation, list(self.returns.open)
        while wanted:
            found = await self._work.repeated(partial(self.returns.messages, wanted))
            if generation != performing.generation:
                return
            performing.apply(performing.machine.redrive(found.entries, performing.now_ms()))
            wanted = list(found.damaged)
            if wanted:
                await asyncio.sleep(DAMAGED_RETRY_S)

    async def _durable(self) -> Durable:
        """The durable state, first moved back if it is beyond the end of the log. The lease keeps
        it from changing."""
        tenure = self._tenure
        cursor = await tenure.get()
        chains = from_properties(cursor.properties).needed_after(cursor.mark_delete)
        self.filtering.use(chains, cursor.own)
        acknowledged = Acknowledged(cursor.mark_delete)
        left = {}
        async for each in tenure.acknowledged():
            if isinstance(each, Part):
                left[each.position] = (1 << each.messages) - 1 & ~each.acknowledged
            else:
                acknowledged.add_range(each.first, each.last_entry_id)
        attempts, failures = {}, {}
        async for failed in tenure.attempts():
            attempts[failed.position] = failed.attempts
            if failed.failures:
                failures[failed.position] = failed.failures
                if len(failures) > FAILED_ENTRIES_MAX:
                    del failures[next(iter(failures))]
        if acknowledged.highest or left or attempts:
            try:
                last = (await self._ports.log.ends(self.topic)).last
            except TopicNotFound:
                last = None  # the first entry is yet to come
            if resuming.is_beyond(acknowledged, left, attempts, last):
                await resuming.move_back(tenure, self.topic, cursor, last)
                return await self._durable()
        await self.returns.load(cursor, acknowledged)
        self.redriving.load(cursor)
        returned = frozenset(self.returns.open)
        left |= self.returns.partial
        keys = await self._graveyard.load(cursor, acknowledged, returned, left)
        return Durable(
            acknowledged,
            left,
            attempts | self.returns.attempts,
            keys,
            self._graveyard.begun,
            self._waiting.load(cursor),
            returned,
            failures | self.returns.failures,
            large_letters=self._graveyard.large,
        )

    def stop(self, error: DomainError) -> None:
        """Stop at once and end every stream with this error."""
        self._work.stop(error)

    def _at_stop(self, error: DomainError) -> None:
        names = {"topic": str(self.topic), "subscription": self.name, "epoch": self.epoch}
        if isinstance(error, Fenced):
            log.warning("subscription lost", **names, why=error.message)
        else:
            log.info("subscription released", **names, reason=error.reason)
        self._performing.stop()
        for session in list(self.sessions.values()):
            session.finish(error)
        self._performing.answers.stop(error)

    async def close(self, timeout_s: float) -> None:
        """Stop gracefully: make acknowledgements durable, then release the lease."""
        was_lost = self.stopped is not None
        try:
            async with asyncio.timeout(timeout_s):
                if not was_lost:
                    await self._performing.all_durable()
                    await self._waiting.try_write()
                await self._tenure.release()
        except (TimeoutError, DomainError) as error:
            if not was_lost:
                log.warning(
                    "releasing the lease failed",
                    topic=str(self.topic),
                    subscription=self.name,
                    why=str(error),
                )
        finally:  # even if the caller is gone, or the lease would be renewed forever
            self.stop(Draining("the service is shutting down", retry_after_s=0.1))
        await self._work.ended()
        await self.filtering.close()

    # ---- consumers

    async def subscribe(self, joining: Joining) -> Session:
        """Connect a consumer. Consumers that wait to connect join together, and slots are
        reassigned once for all of them. Raises SubscriptionBusy, TooManyConsumers, InvalidKeyRange,
        RangeConflict, NoSlotsLeft."""
        joiner = _Joiner(joining)
        self._joiners.append(joiner)
        try:
            async with self._performing.changing:
                if not joiner.is_done:
                    await self._admit_waiting(joining)
        except BaseException:  # it may have joined with others
            if joiner in self._joiners:
                self._joiners.remove(joiner)
            if joiner.session is not None:
                self.leave(joiner.session)
            raise
        if joiner.error is not None:
            raise joiner.error
        assert joiner.session is not None
        return joiner.session

    async def _admit_waiting(self, first: Joining) -> None:
        """Admit all waiting consumers. The first one's options apply to the subscription."""
        await asyncio.sleep(0)  # when many connect at once, the lease is renewed in between
        self._work.check()
        self._let_leave()
        if not self.sessions:
            with self._work.contained():
                await self._change_options(first)
            self._work.check()  # the lease may have been lost meanwhile
        joiners, self._joiners = self._joiners, []
        with self._work.contained():
            for each in joiners:
                self._admit(each)
            joined = [each.session for each in joiners if each.session is not None]
            if joined:
                self._assign(joined)
        if self.stopped is not None:
            for each in joiners:
                if each.session is not None:
                    self._forget(each.session)
                each.session, each.error = None, self.stopped

    def _admit(self, joiner: _Joiner) -> None:
        """Admit a consumer, or record why not."""
        joining = joiner.joining
        session = Session(self._numbers, joining, self._performing, self._sending, self.leave)
        try:
            self._check_fits(joining)
            self._admit_to_machine(session)
        except DomainError as error:
            joiner.error = error
            return
        self._numbers += 1
        self.sessions[session.consumer] = joiner.session = session
        self.idle_since_s = None

    async def ready(self) -> None:
        """Wait until the machine accepts requests: not while it is being replaced."""
        changing = self._performing.changing
        if changing.locked():
            async with changing:
                pass
        self._work.check()

    def leave(self, session: Session) -> None:
        """Disconnect a consumer whose stream ended without Leave. Streams that end together, as
        those of one process do, leave together: reassigning slots for each of a thousand takes
        longer than a lease."""
        if self._forget(session) and self.stopped is None:
            if not self._leaving:
                asyncio.get_running_loop().call_soon(self._let_leave)
            self._leaving.append(session.consumer)

    def _let_leave(self) -> None:
        leaving, self._leaving = self._leaving, []
        if leaving and self.stopped is None:
            performing = self._performing
            with self._work.contained():
                performing.apply(performing.machine.leave(*leaving, now_ms=performing.now_ms()))

    def say_goodbye(self, session: Session, error: DomainError | None = None) -> None:
        """A consumer leaves gracefully: its stream ends once its acknowledgements are durable."""
        if not self._forget(session):
            return
        performing = self._performing
        with self._work.contained():
            number = performing.machine.durable_with
            performing.apply(performing.machine.close(session.consumer, performing.now_ms()))
            performing.answers.give(session, None, number, error)

    def _forget(self, session: Session) -> bool:
        if self.sessions.get(session.consumer) is not session:
            return False
        del self.sessions[session.consumer]
        if not self.sessions:
            self.idle_since_s = asyncio.get_running_loop().time()
        return True

    def _admit_to_machine(self, session: Session) -> None:
        """`_assign` must follow."""
        joining = session.joining
        self._performing.machine.admit(
            session.consumer,
            name=joining.name,
            weight=joining.weight,
            ranges=joining.ranges,
            ack_timeout_ms=joining.ack_timeout_ms,
        )

    def _assign(self, sessions: Iterable[Session]) -> None:
        """Assign slots to consumers that were admitted."""
        performing, consumers = self._performing, [each.consumer for each in sessions]
        performing.apply(performing.machine.assign(*consumers, now_ms=performing.now_ms()))

    def _check_fits(self, joining: Joining) -> None:
        given = (joining.options, joining.placement, joining.dead_letter_topic)
        have = (self.options, self.placement, self._graveyard.dead_letter_topic)
        if given != have:
            raise SubscriptionBusy("consumers are connected with other options")
        if self.options.kind is SubscriptionType.EXCLUSIVE and self.sessions:
            raise SubscriptionBusy("the exclusive subscription already has a consumer")
        if len(self.sessions) >= self._config.consumers_max:
            raise TooManyConsumers(
                f"too many consumers (limit {self._config.consumers_max:,})",
                consumers_max=self._config.consumers_max,
            )

    # ---- replacing the machine

    async def _change_options(self, joining: Joining) -> None:
        """Replace the machine if the first consumer's options differ."""
        performing = self._performing
        self._graveyard.dead_letter_topic = joining.dead_letter_topic
        if (joining.options, joining.placement) == (self.options, self.placement):
            return
        await self.cursor()  # the cursor service answers: this will not take long
        await self._performing.all_durable()
        await self._work.end_of_machine()
        try:
            durable = await self._durable()
        except DomainError as error:
            self.stop(error)
            raise
        performing.options, performing.placement = joining.options, joining.placement
        self._begin(durable)

    async def reset(self, mark_delete: Position | None) -> None:
        """Continue from another position. Consumers stay connected; their deliveries become stale.
        Once begun, the reset completes even if its caller is gone. Raises CursorsUnavailable or
        ServiceBusy if it was not begun."""
        await self.cursor()
        await self._work.finished(lambda: self._reset(mark_delete))

    async def _reset(self, mark_delete: Position | None) -> None:
        performing = self._performing
        async with performing.changing:
            await performing.all_durable()
            await self._work.end_of_machine()
            await self._work.repeated(self._keep_needed_chains)
            if self._graveyard.has_done:  # a redelivered entry needs a new letter
                await self._work.repeated(self._graveyard.tidy)
            await self._work.repeated(lambda: self._tenure.reset(mark_delete))
            if self.history is not None:
                self.history.record_reset(performing.now_ms(), mark_delete)
            await self._work.repeated(self._graveyard.start_over)
            performing.answers.give_all()
            self._begin(await self._work.repeated(self._durable))
            for session in self.sessions.values():
                session.forget_deliveries()
                session.put(pb.ConsumeResponse(sought=pb.Sought()))
                self._admit_to_machine(session)
            self._assign(self.sessions.values())

    async def _keep_needed_chains(self) -> None:
        """Drop the chains that only acknowledged entries need, and apply the first remaining one
        from the beginning: it filters all entries that a reset delivers again. So the result does
        not depend on later writes."""
        cursor = await self._tenure.get()
        chains = from_properties(cursor.properties)
        kept = chains.needed_after(cursor.mark_delete)
        if kept != chains:
            put, remove = to_properties(kept, cursor.properties)
            await self._tenure.set_properties(put, remove)

    # ---- changes of filters and properties

    async def set_filters(
        self, chain: Chain, start: Position | Unread | None, *, is_shadow: bool, caller: str
    ) -> Cursor:
        """Apply a chain from a position on. Once begun, the change completes even if its caller is
        gone. If it raises InvalidExpression, InvalidChain, FiltersUnavailable, TooManyFilters,
        CursorsUnavailable or ServiceBusy, nothing changed."""

        async def change() -> Cursor:
            await self.filtering.check(chain)
            await self.cursor()
            async with self._performing.changing, self.filtering.changing:
                at = self._from_now_on(is_shadow=is_shadow) if isinstance(start, Unread) else start
                cursor, is_other = await self.filtering.change(
                    Stretch(at, chain),
                    self._work.repeated,
                    is_shadow=is_shadow,
                    caller=caller,
                )
                if not is_shadow:
                    self._refilter(at or _FIRST)
                elif is_other:
                    self._refilter(None)
                return cursor

        return await self._one_by_one(change)

    async def set_properties(
        self,
        put: Mapping[str, str],
        remove: Sequence[str],
        properties_max: int,
        *,
        caller: str,
    ) -> Cursor:
        """Change the subscription's own properties, which its filters read. Completes, and raises,
        as `set_filters`, with InvalidProperty in place of TooManyFilters."""

        async def change() -> Cursor:
            own = (await self.cursor()).own
            left = {name: value for name, value in own.items() if name not in remove}
            given = left | dict(put)
            if len(given) > properties_max:
                raise InvalidProperty(f"too many properties (limit {properties_max})", field="put")
            if self.filtering.is_on:
                await self.filtering.check_properties(given)
            async with self._performing.changing, self.filtering.changing:
                cursor = await self._work.repeated(
                    lambda: self._tenure.set_properties(put, remove),
                    unless=InvalidProperty,
                )
                log.info(
                    "properties changed",
                    topic=str(self.topic),
                    subscription=self.name,
                    put=sorted(put),
                    removed=sorted(remove),
                    caller=caller,
                )
                if self.filtering.use(self.filtering.chains, cursor.own):
                    self._refilter(None)
                return cursor

        return await self._one_by_one(change)

    async def _one_by_one(self, change: Callable[[], Awaitable[Cursor]]) -> Cursor:
        """Make one change at a time: each is validated against the result of the one before."""

        async def in_turn() -> Cursor:
            async with self._changing_filters:
                return await change()

        return await self._work.finished(in_turn)

    def _from_now_on(self, *, is_shadow: bool) -> Position | None:
        """Where a change without a start begins: at the first entry that waits because a filter
        failed, which a corrected filter is meant for; else at the first unread entry."""
        failed = None if is_shadow else self.machine.judging.first_failed()
        return self._unread if failed is None else failed

    @property
    def _unread(self) -> Position | None:
        read = self.machine.read_position
        return None if read is None else Position(read.ledger_id, read.entry_id + 1)

    def _refilter(self, start: Position | None) -> None:
        performing = self._performing
        is_filtered = self.filtering.chains.filters_any
        performing.apply(
            performing.machine.refilter(performing.now_ms(), is_filtered=is_filtered, start=start)
        )

    # ---- calls of administrators

    def release_key(self, key: bytes) -> bool:
        """Release a key. Returns whether it was held."""
        performing = self._performing
        held = performing.machine.gaps.state(performing.machine.lane_key(key))
        with self._work.contained():
            performing.apply(performing.machine.release_key(key, performing.now_ms()))
        self._work.check()
        return held is not None and held.after is not AfterDeadLetter.CONTINUE

    def letters(self, dead_letter_topic: TopicName | None) -> Listing:
        """The subscription's letters in a dead letter topic; None: the one that it uses."""
        topic = dead_letter_topic or self._graveyard.known_topic
        return Listing(self._ports.log, topic, self.topic, self.name)

    async def redrive(
        self,
        dead_letter_topic: TopicName | None,
        letters: Sequence[Position],
        request_id: str,
        *,
        is_trial: bool,
        caller: str,
    ) -> tuple[Redrive, bool]:
        """Take letters back to the subscription, all or none. Also returns whether a request with
        this id did so before. `is_trial`: check only. Once begun, it completes even if its caller
        is gone. Raises LetterNotRedrivable, TooManyReturns, LedgerUnavailable, ServiceBusy: nothing
        changed."""

        async def change() -> tuple[Redrive, bool]:
            async with self.redriving.one_by_one:
                if request_id and (before := self.returns.repeated(request_id)) is not None:
                    return before, True
                listing = self.letters(dead_letter_topic)
                await self.amending.settled(listing, letters)
                acknowledged = self.machine.acknowledged
                found = await self.returns.check(listing, letters, acknowledged)
                if is_trial:
                    return Redrive(0, request_id, len(letters)), False
                async with self._performing.changing:
                    action, about = Action.REDRIVE, (letters, request_id, caller)
                    operation = self.amending.operation(action, listing, *about)
                    return await self.bring(
                        found, lambda returns: self.returns.begin(returns, request_id, operation)
                    ), False

        return await self._work.finished(change)

    async def start_redrive(self, order: Order) -> tuple[RedriveRecord, bool]:
        """See Redriving.start. Once begun, it completes even if its caller is gone."""
        return await self._work.finished(lambda: self.redriving.start(order))

    async def stop_redrive(self, number: int) -> RedriveRecord:
        """See Redriving.stop."""
        return await self._work.finished(lambda: self.redriving.stop(number))

    async def bring(
        self,
        found: Mapping[Position, tuple[Return, Entry]],
        make_durable: Callable[[Mapping[Position, Return]], Awaitable[T]],
    ) -> T:
        """Make returns durable, and deliver them; the caller holds `changing`. Raises
        LetterNotRedrivable, TooManyReturns, CursorsUnavailable: nothing changed."""
        performing = self._performing
        # Another letter of the same message may have come back before. Its return goes first: then
        # the machine is still to learn that the message is settled.
        await performing.until(lambda: not self.machine.is_bringing(found), SETTLES_S)
        if self.machine.is_bringing(found):
            raise CursorsUnavailable("an acknowledgement is not durable yet", retry_after_s=0.5)
        if any(position not in self.machine.acknowledged for position in found):
            raise LetterNotRedrivable("the subscription was reset meanwhile")
        returns = {position: each for position, (each, _) in found.items()}
        try:
            made = await self._work.repeated(lambda: make_durable(returns), unless=InvalidProperty)
        except InvalidProperty as error:
            raise TooManyReturns(
                "too many held keys, and letters on their way back, for the cursor's properties",
                retry_after_s=1.0,
            ) from error
        if self.history is not None:
            for place in returns:
                redrive = self.returns.open[place].redrive
                self.history.record(What.REDRIVEN, performing.now_ms(), [place], str(redrive))
        performing.cache.drop(found)
        with self._work.contained():
            messages = [message for _, message in found.values()]
            partial = {each: back.left for each, back in returns.items() if back.acknowledged}
            now_ms = performing.now_ms()
            performing.apply(performing.machine.redrive(messages, now_ms, partial))
        self._work.check()
        return made

    async def check_cursor(self) -> None:
        """Raises CursorsUnavailable."""
        await self._tenure.renew()

    @property
    def begun(self) -> frozenset[Position]:
        """The messages on their way to the dead letter topic."""
        return self._graveyard.begun

    @property
    def chain(self) -> Chain:
        """The filters that apply to new entries."""
        applied = self.filtering.chains.applied
        return applied[-1].chain if applied else NO_FILTERS

    def trial(self, chain: Chain) -> Trial:
        """A trial of a chain, with the subscription's properties."""
        return self.filtering.trial(chain)

    async def cursor(self) -> Cursor:
        return await self._tenure.get()

    def buried(self, position: Position) -> TopicName | None:
        """The topic that an entry was dead-lettered to; None: it was not, or that is forgotten."""
        return self._graveyard.buried.get(position)

    def passed(self, position: Position) -> Because | None:
        """Why an entry was skipped; None: it was not, or that is forgotten."""
        return self._performing.passed.get(position)

    async def events(self, position: Position, since_ms: int) -> list[Event]:
        """The remembered events of an entry since a time, the oldest first."""
        records = [] if self.history is None else self.history.records
        found: list[Event] = []
        for end in range(len(records), 0, -RECALLED):
            some = records[max(0, end - RECALLED) : end]
            found[:0] = find(some, position)
            if all(time_of(each) < since_ms for each in some):  # failures are recorded later
                break
            await asyncio.sleep(0)
        return [each for each in found if each.at_ms >= since_ms]

    async def audited(self, position: Position, since_ms: int) -> Audited | None:
        """The published events of an entry since a time; None: none are published."""
        if self.audit_topic is None:
            return None
        return await audited(
            self._ports.log, self.audit_topic, self.name, position, since_ms=since_ms
        )

    async def entry(self, position: Position) -> ledger_pb2.StoredEntry | None:
        """The entry at a position, without its payload; None: the log has none there."""
        found = await self._ports.log.scan(self.topic, position, None, 1)
        return found[0] if found and position_of(found[0]) == position else None

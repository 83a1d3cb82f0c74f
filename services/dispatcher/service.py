"""The subscriptions of this instance: taken on demand, and released when unused."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Final

import structlog

from seqgate.api.ledger.v1.ledger_pb2 import StoredEntry
from seqgate.keys import sticky_key
from seqgate.services.dispatcher.auditing.publishing import Auditing
from seqgate.services.dispatcher.config import DispatcherConfig
from seqgate.services.dispatcher.errors import (
    InvalidStart,
    KeyNotHeld,
    LetterNotFound,
    SubscriptionBusy,
    TooManyConsumers,
)
from seqgate.services.dispatcher.filtering.analysis import Analysis, analyze
from seqgate.services.dispatcher.filtering.chains import Chain, Chains, from_properties
from seqgate.services.dispatcher.letters.chunks import is_earlier_chunk
from seqgate.services.dispatcher.letters.mending import Amendment
from seqgate.services.dispatcher.letters.operations import Operation
from seqgate.services.dispatcher.letters.record import Extent, RedriveRecord
from seqgate.services.dispatcher.letters.returns import Redrive
from seqgate.services.dispatcher.metrics import DispatcherMetrics
from seqgate.services.dispatcher.ports import (
    INTERNAL,
    Cursor,
    InvalidProperty,
    Ports,
    SubscriptionNotFound,
    TopicNotFound,
)
from seqgate.services.dispatcher.redrives.estimating import Estimated, estimate_redrive
from seqgate.services.dispatcher.redrives.redriving import Order
from seqgate.services.dispatcher.redrives.wanted import Unborn, Wanted
from seqgate.services.dispatcher.shell.live import Live, Unread
from seqgate.services.dispatcher.shell.session import Joining, Session
from seqgate.services.dispatcher.shell.shared import Shared
from seqgate.services.errors import DomainError, Draining
from seqgate.services.runtime.locks import Locks
from seqgate.services.runtime.requests import After, At, Earliest, Latest, Start, check_start
from seqgate.types import Position, TopicName

log = structlog.get_logger()

KEEP_INTERVAL_S: Final = 1.0
"""How often unused subscriptions are looked for."""

PROPERTIES_MAX: Final = 64
PROPERTY_BYTES_MAX: Final = 4 * 1024
"""How many properties a subscription may have, and the bytes of a name and its value together."""


class Dispatcher:
    def __init__(
        self,
        config: DispatcherConfig,
        ports: Ports,
        tasks: asyncio.TaskGroup,
        metrics: DispatcherMetrics | None = None,
        auditing: Auditing | None = None,
    ) -> None:
        self._config = config
        self._ports = ports
        self._tasks = tasks
        self._live: dict[tuple[TopicName, str], Live] = {}
        self._opening: Locks[tuple[TopicName, str]] = Locks()
        self._taking: set[tuple[TopicName, str]] = set()
        self._finished = False
        self._metrics = metrics or DispatcherMetrics()
        self._shared = Shared.of(config, auditing)
        self._metrics.tell_histories(self._shared.histories, auditing)

    # ---- consumers

    async def subscribe(
        self,
        topic: TopicName,
        name: str,
        joining: Joining,
        create_at: Start | None,
        properties: Mapping[str, str],
    ) -> tuple[Live, Session]:
        """Connect a consumer. Raises what `create`, `live` and `Live.subscribe` do."""
        if create_at is not None:
            await self.create(topic, name, create_at, properties)
        live = await self.live(topic, name)
        return live, await live.subscribe(joining)

    async def live(self, topic: TopicName, name: str) -> Live:
        """A subscription of this instance, which takes it if no other instance owns it. Raises
        SubscriptionNotFound, NotOwner, TooManyConsumers, and Draining while shutting down."""
        key = (topic, name)
        async with self._opening.of(key):
            before = self._live.get(key)
            if before is not None and before.stopped is None:
                return before
            # Includes the subscriptions that concurrent calls are taking.
            if len((self._live.keys() | self._taking) - {key}) >= self._config.subscriptions_max:
                raise TooManyConsumers(
                    f"too many subscriptions on this instance "
                    f"(limit {self._config.subscriptions_max:,})",
                    retry_after_s=1.0,
                    subscriptions_max=self._config.subscriptions_max,
                )
            self._taking.add(key)
            try:
                live = await self._taken(topic, name)
            finally:
                self._taking.discard(key)
            if self._finished:
                await live.close(self._config.call_timeout_s)
                raise Draining("the service is shutting down", retry_after_s=0.1)
            self._live[key] = live
            if before is not None:
                self._metrics.end(before)
                self._tasks.create_task(self._close(key, before))
            self._metrics.begin(live)
            log.info("subscription taken", topic=str(topic), subscription=name, epoch=live.epoch)
            return live

    async def _taken(self, topic: TopicName, name: str) -> Live:
        duration_ms = int(self._config.lease_s * 1000)
        cursors, owner = self._ports.cursors, self._ports.owner
        lease = await cursors.acquire(topic, name, owner, duration_ms)
        # It may be this instance's lease from before a restart: a new epoch makes its deliveries
        # stale.
        await cursors.release(topic, name, lease.epoch)
        asked_s = asyncio.get_running_loop().time()
        lease = await cursors.acquire(topic, name, owner, duration_ms)
        live = self._new(topic, name, lease.epoch, asked_s)
        try:
            await live.load()
        except BaseException:
            await live.close(self._config.call_timeout_s)
            raise
        return live

    def _new(self, topic: TopicName, name: str, epoch: int, leased_s: float) -> Live:
        metrics = self._metrics
        return Live(
            self._config,
            topic,
            name,
            epoch,
            self._ports,
            self._tasks,
            metrics.answer_duration,
            metrics.handover_duration,
            shared=self._shared,
            leased_s=leased_s,
        )

    # ---- administration

    async def create(
        self, topic: TopicName, name: str, start: Start, properties: Mapping[str, str]
    ) -> tuple[Cursor, bool]:
        """Create a subscription unless it exists. Returns whether this call created it. Raises
        TopicNotFound, InvalidStart, InvalidProperty."""
        _check_properties(properties)
        try:
            return await self._ports.cursors.get(topic, name), False
        except SubscriptionNotFound:
            mark_delete = await self.resolve(topic, start)
        return await self._ports.cursors.create(topic, name, mark_delete, properties)

    async def delete(self, topic: TopicName, name: str, *, force: bool) -> None:
        """Raises SubscriptionNotFound, NotOwner, and SubscriptionBusy unless `force` disconnects
        its consumers."""
        live = await self.live(topic, name)
        async with live.changing:  # no consumer connects between the check and the deletion
            if live.stopped is not None:
                raise live.stopped  # another instance may own it now, with consumers
            if live.sessions and not force:
                raise SubscriptionBusy(
                    "the subscription has connected consumers", consumers=len(live.sessions)
                )
            await self._ports.cursors.delete(topic, name)
            self._shared.histories.end(topic, name)
            live.stop(SubscriptionNotFound("the subscription was deleted"))

    async def reset(self, topic: TopicName, name: str, start: Start) -> Cursor:
        """Move a subscription. Raises SubscriptionNotFound, NotOwner, InvalidStart, ServiceBusy."""
        live = await self.live(topic, name)
        await live.reset(await self.resolve(topic, start))
        return await self._ports.cursors.get(topic, name)

    async def set_properties(
        self,
        topic: TopicName,
        name: str,
        put: Mapping[str, str],
        remove: Sequence[str],
        *,
        caller: str,
    ) -> Cursor:
        """Raises SubscriptionNotFound, NotOwner, InvalidProperty, ServiceBusy; with filters also
        InvalidChain, InvalidExpression, FiltersUnavailable."""
        _check_properties(put)
        if any(each.startswith(INTERNAL) for each in remove):
            raise InvalidProperty(f"the prefix {INTERNAL} is reserved", field="remove")
        live = await self.live(topic, name)
        return await live.set_properties(put, remove, PROPERTIES_MAX, caller=caller)

    # ---- filters

    async def set_filters(
        self,
        topic: TopicName,
        name: str,
        chain: Chain,
        start: Start | None,
        *,
        is_shadow: bool,
        caller: str,
    ) -> Chains:
        """Apply a chain from `start` on; None: from the first entry that waits because a filter
        failed, or else the first unread one; a shadow chain always from the latter. `caller` is the
        principal, if known. Raises SubscriptionNotFound, NotOwner, InvalidStart, InvalidExpression,
        InvalidChain, TooManyFilters, FiltersUnavailable, ServiceBusy."""
        live = await self.live(topic, name)
        where: Position | Unread | None = Unread()
        if start is not None:
            before = await self.resolve(topic, start)
            where = None if before is None else Position(before.ledger_id, before.entry_id + 1)
        cursor = await live.set_filters(chain, where, is_shadow=is_shadow, caller=caller)
        return _chains(cursor)

    async def filters(self, topic: TopicName, name: str) -> Chains:
        """Raises SubscriptionNotFound."""
        return _chains(await self._ports.cursors.get(topic, name))

    async def analyze(
        self,
        topic: TopicName,
        name: str,
        chain: Chain | None,
        *,
        entries_max: int,
        seconds_max: float,
    ) -> Analysis:
        """Try a chain on a subscription's backlog; None: the applied chains. Raises
        SubscriptionNotFound, NotOwner, TopicNotFound, InvalidExpression, InvalidChain,
        FiltersUnavailable."""
        live = await self.live(topic, name)
        async with live.analyzing:
            trial = live.filtering.trial(chain)
            try:
                await trial.check()
                return await analyze(
                    live, self._ports.log, trial, entries_max=entries_max, seconds_max=seconds_max
                )
            finally:
                await trial.close()

    # ---- reading

    async def get(self, topic: TopicName, name: str) -> Cursor:
        """Raises SubscriptionNotFound."""
        return await self._ports.cursors.get(topic, name)

    async def page(
        self, topic: TopicName, *, limit: int, token: str
    ) -> tuple[Sequence[Cursor], str]:
        """A page of a topic's subscriptions by name, shorter by the internal cursors in it."""
        cursors, token = await self._ports.cursors.page(topic, limit=limit, token=token)
        return [each for each in cursors if not each.name.startswith(INTERNAL)], token

    async def release_key(self, topic: TopicName, name: str, key: bytes) -> None:
        """Raises KeyNotHeld, and what `live` does."""
        live = await self.live(topic, name)
        if not live.release_key(key):
            raise KeyNotHeld("the key is not held")

    async def dead_letters(
        self,
        topic: TopicName,
        name: str,
        dead_letter_topic: TopicName | None,
        *,
        key: bytes | None,
        after: Position | None,
        limit: int,
    ) -> tuple[Live, TopicName, Sequence[tuple[StoredEntry, Position | None]], Position | None]:
        """A page of a subscription's letters, each with the position at which its message begins
        (None: not known), and the last entry that was read, as in Letters. A large letter is its
        last chunk. `key` None: of all keys; `dead_letter_topic` None: in the one that it uses.
        Raises EntryCorrupt, and what `live` does."""
        live = await self.live(topic, name)
        listing = live.letters(dead_letter_topic)

        def is_wanted(entry: StoredEntry) -> bool:
            if is_earlier_chunk(entry):
                return False
            return key is None or sticky_key(entry.metadata) == key

        page = await listing.page(after, limit, is_wanted)
        shown = [(each, await listing.first_of(each)) for each in page.letters]
        return live, listing.dead_letter_topic, shown, page.last

    async def dead_letter(
        self, topic: TopicName, name: str, dead_letter_topic: TopicName | None, position: Position
    ) -> tuple[Live, TopicName, StoredEntry, Position | None]:
        """A letter, with its payload, and the position at which its message begins (None: not
        known). Raises LetterNotFound, EntryCorrupt, and what `live` does."""
        live = await self.live(topic, name)
        listing = live.letters(dead_letter_topic)
        entry = await listing.get(position)
        if entry is None:
            raise LetterNotFound(
                "the dead letter topic has no such letter of the subscription",
                dead_letter_topic=listing.dead_letter_topic,
            )
        return live, listing.dead_letter_topic, entry, await listing.first_of(entry)

    async def redrive(
        self,
        topic: TopicName,
        name: str,
        dead_letter_topic: TopicName | None,
        letters: Sequence[Position],
        request_id: str,
        *,
        is_trial: bool,
        caller: str,
    ) -> tuple[Redrive, bool]:
        """Raises what `live` and `Live.redrive` do."""
        live = await self.live(topic, name)
        return await live.redrive(
            dead_letter_topic, letters, request_id, is_trial=is_trial, caller=caller
        )

    async def discard(
        self,
        topic: TopicName,
        name: str,
        dead_letter_topic: TopicName | None,
        letters: Sequence[Position],
        request_id: str,
        *,
        reason: str,
        caller: str,
    ) -> tuple[Operation, bool]:
        """Raises what `live` and `Amending.discard` do."""
        live = await self.live(topic, name)
        listing = live.letters(dead_letter_topic)
        return await live.amending.discard(
            listing, letters, request_id, reason=reason, caller=caller
        )

    async def mend(
        self,
        topic: TopicName,
        name: str,
        dead_letter_topic: TopicName,
        letter: Position,
        change: Amendment,
        request_id: str,
        *,
        caller: str,
    ) -> tuple[Operation, bool]:
        """Raises what `live` and `Amending.mend` do."""
        live = await self.live(topic, name)
        listing = live.letters(dead_letter_topic)
        return await live.amending.mend(listing, letter, change, request_id, caller=caller)

    async def start_redrive(
        self,
        topic: TopicName,
        name: str,
        given: Wanted,
        letters_s: int,
        request_id: str,
        caller: str,
    ) -> tuple[Live, RedriveRecord, bool]:
        """Start a redrive of many. Also returns whether a request with this id did so before.
        Raises what `live` and `Redriving.start` do, and, with `creates`, what `create` does."""
        if given.creates:
            await self.create(topic, name, Latest(), {})
        live = await self.live(topic, name)
        source = self._source(live, topic, given)

        async def stretch() -> Extent:
            return await self._stretch(topic, source, given)

        order = Order(request_id, caller, source, given.selection, letters_s, stretch)
        record, repeated = await live.start_redrive(order)
        return live, record, repeated

    async def estimate_redrive(
        self, topic: TopicName, name: str, given: Wanted, *, entries_max: int, seconds_max: float
    ) -> Estimated:
        """What a redrive of many would redrive. Raises as `start_redrive`; changes nothing."""
        of: Live | Unborn
        try:
            of = await self.live(topic, name)
            source = self._source(of, topic, given)
        except SubscriptionNotFound:
            if not given.creates:
                raise
            source = topic
            of = Unborn(topic, name, (await self._ports.log.ends(topic)).last, self._ports)
        return await estimate_redrive(
            of,
            self._ports.log,
            source,
            given.selection,
            await self._stretch(topic, source, given),
            entries_max=entries_max,
            seconds_max=seconds_max,
        )

    def _source(self, live: Live, topic: TopicName, given: Wanted) -> TopicName:
        if given.stretch is not None:
            return topic
        return live.letters(given.dead_letter_topic).dead_letter_topic

    async def _stretch(self, topic: TopicName, source: TopicName, given: Wanted) -> Extent:
        if given.stretch is not None:
            begin, end = given.stretch
            return Extent(await self.resolve(topic, begin), await self.resolve(topic, end))
        try:
            return Extent(None, (await self._ports.log.ends(source)).last)
        except TopicNotFound:  # it has no letters yet
            return Extent(None, None)

    async def resolve(self, topic: TopicName, start: Start) -> Position | None:
        """The mark-delete position for a start: everything up to it counts as acknowledged. Raises
        TopicNotFound, and InvalidStart beyond the end of the log."""
        ends = await self._ports.log.ends(topic)
        check_start(start, ends.last, self._ports.now_ms(), InvalidStart)
        match start:
            case Earliest():
                return None
            case Latest():
                return ends.last
            case After(position):
                return None if ends.first is None or position < ends.first else position
        at = (
            start.position
            if isinstance(start, At)
            else await self._ports.log.find(topic, start.append_ms)
        )
        if at is None or ends.last is None or at > ends.last:
            return ends.last
        if ends.first is None or at <= ends.first:
            return None
        if at.entry_id > 0:
            return Position(at.ledger_id, at.entry_id - 1)
        return await self._ports.log.last_before(topic, at.ledger_id)

    # ---- life

    async def keep_forever(self) -> None:
        """Release unused subscriptions and drop lost ones, until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(KEEP_INTERVAL_S)
            for key, live in list(self._live.items()):
                since_s = None if live.redriving.is_busy else live.idle_since_s
                idle_s = 0.0 if since_s is None else loop.time() - since_s
                if live.stopped is not None or idle_s > self._config.idle_timeout_s:
                    async with self._opening.of(key):
                        if live.sessions and live.stopped is None:
                            continue
                        if self._live.get(key) is not live:
                            continue  # its successor closes it
                        del self._live[key]
                        await self._close(key, live)
                        self._metrics.end(live)

    async def _close(self, key: tuple[TopicName, str], live: Live) -> None:
        try:
            await live.close(self._config.call_timeout_s)
        except Exception:  # one subscription must not stop the others
            log.exception(
                "releasing the subscription failed", topic=str(key[0]), subscription=key[1]
            )

    async def finish(self, timeout_s: float) -> None:
        """Release all subscriptions and take no more."""
        self._finished = True
        lives = list(self._live.values())
        self._live.clear()
        results = await asyncio.gather(
            *(live.close(timeout_s) for live in lives), return_exceptions=True
        )
        for result in results:
            if isinstance(result, DomainError):
                log.warning("releasing a subscription failed", why=result.message)


def _chains(cursor: Cursor) -> Chains:
    return from_properties(cursor.properties).needed_after(cursor.mark_delete)


def _check_properties(properties: Mapping[str, str]) -> None:
    if len(properties) > PROPERTIES_MAX:
        raise InvalidProperty(f"too many properties (limit {PROPERTIES_MAX})", field="properties")
    for name, value in properties.items():
        if not name or name.startswith(INTERNAL):
            raise InvalidProperty(
                f"property names must not be empty or begin with {INTERNAL}", field="properties"
            )
        if len(name.encode()) + len(value.encode()) > PROPERTY_BYTES_MAX:
            raise InvalidProperty(
                f"property too large (limit {PROPERTY_BYTES_MAX:,} bytes)", field="properties"
            )

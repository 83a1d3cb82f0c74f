"""Deliveries on their way out: each gets its entry; revoked ones are dropped.

deliveries ──▶ cached, or fetched? ──▶ one message ──▶ sent
                  │ neither  ▲
                  ▼          │
                fetch some, within a byte limit
"""

import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any, Final, NamedTuple, Protocol

from seqgate.api.dispatcher.v1 import dispatcher_pb2 as pb
from seqgate.api.ledger.v1 import ledger_pb2
from seqgate.message_id import MessageId
from seqgate.services.dispatcher.core.effects import Delivery
from seqgate.services.dispatcher.core.history import History, What
from seqgate.services.dispatcher.entries import position_of
from seqgate.services.dispatcher.ports import Fetched
from seqgate.services.dispatcher.shell.cache import Cached
from seqgate.services.dispatcher.shell.performing import Performing
from seqgate.services.dispatcher.shell.work import Work
from seqgate.services.dispatcher.spans import MessageSpans
from seqgate.services.runtime.room import Room, Share
from seqgate.telemetry import names
from seqgate.telemetry.propagation import TRACEPARENT
from seqgate.types import Position, TopicName

RESPONSE_ENTRIES_MAX: Final = 500
RESPONSE_BYTES_MAX: Final = 2 * 1024 * 1024
"""The entries in one message to a consumer, and their bytes, at most; one entry always fits."""

ENTRY_BYTES: Final = 64 * 1024
"""The assumed size of an entry before any was fetched."""


class Sources(Protocol):
    """Where entries are fetched from: the log, or, for dead letters that came back, their dead
    letter topic."""

    async def fetch_some(
        self, topic: TopicName, positions: Sequence[Position], /, *, bytes_max: int
    ) -> Fetched: ...


class Sending:
    def __init__(
        self,
        topic: TopicName,
        name: str,
        entries: Sources,
        work: Work,
        performing: Performing,
        room: Room,
        *,
        bytes_max: int,
    ) -> None:
        """`bytes_max` bounds the bytes fetched for one consumer and not sent yet."""
        self.room = room
        self._bytes_max = bytes_max
        self._entry_bytes = ENTRY_BYTES
        self._topic = topic
        self._log = entries
        self._work = work
        self._performing = performing
        named = {names.MESSAGING_DESTINATION_SUBSCRIPTION_NAME: name}
        self._spans = MessageSpans(names.DELIVER, str(topic), named)

    async def filled(
        self, consumer: int, deliveries: Sequence[Delivery], share: Share, *, runs: bool
    ) -> AsyncGenerator[pb.ConsumeResponse, None]:
        """Deliveries with their entries, without stale ones; in runs where they can be, if `runs`.

        The next entries are chosen and taken in one step, without waiting. An entry that is neither
        cached nor fetched is fetched, with some that follow, and the choice starts over: meanwhile
        deliveries may become stale, and cached entries be evicted. Only an entry that was requested
        from the log and is no longer there counts as gone."""
        page = _Page(self._performing.generation, deque(deliveries), share, runs)
        try:
            while page.pending and page.generation == self._performing.generation:
                with self._work.contained():
                    response = self._next(consumer, page)
                self._work.check()
                if response is not None:
                    with share.writing():
                        yield response
                    del response
                    share.give(page.sending_bytes)
                    page.sending_bytes = 0
                elif page.pending:
                    await self._fetch(page)
        finally:
            share.give_all()

    def _next(self, consumer: int, page: "_Page") -> pb.ConsumeResponse | None:
        """Take as many deliveries off the page as one message holds. None: the first one's entry is
        missing, or there is no budget for it, or none is left."""
        chosen, gone, unsent = self._choose(consumer, page)
        pending = page.pending
        while chosen and not page.take(sum(each.taken_bytes for each in chosen)):
            page.lacks_bytes = chosen[0].taken_bytes
            left = len(chosen) // 2
            pending.extendleft(each.delivery for each in reversed(chosen[left:]))
            del chosen[left:]
        if chosen:
            page.lacks_bytes = 0
        for each in chosen:
            page.fetched.pop(each.delivery.position, None)
            page.sending_bytes += each.size_bytes
        self._performing.cache.drop(each.delivery.position for each in chosen)
        page.give_reserve()
        if chosen and self._performing.history is not None:
            self._record_delivered(self._performing.history, consumer, chosen)
        if self._spans.is_on:
            self._record_spans(chosen, page.began_ns)
        response = _response(chosen) if chosen else None
        self._return_unsent(consumer, gone, unsent)
        return response

    def _choose(self, consumer: int, page: "_Page") -> tuple[list["_Chosen"], list[int], int]:
        """Take deliveries off the page, up to the first whose entry is missing, or that does not
        fit into the same message. Also returns the deliveries whose entries the log no longer has,
        and the number of messages in stale deliveries."""
        pending, fetched, cached = page.pending, page.fetched, self._performing.cache.get
        known = self._performing.machine.consumers.get(consumer)
        flights: Container[int] = () if known is None else known.flights
        chosen: list[_Chosen] = []
        gone: list[int] = []
        unsent, size_bytes, in_run = 0, 0, False
        while pending:
            delivery = pending[0]
            number, position, messages, unacked, attempts, _, gap = delivery
            if number not in flights:
                unsent += unacked.bit_count()
                page.forget(position)
                pending.popleft()
                continue
            if position in page.gone:
                gone.append(number)
                pending.popleft()
                continue
            found = fetched.get(position) or cached(position)
            if found is None:
                break
            entry, entry_bytes = found
            is_plain = page.runs and not attempts and gap is None and unacked + 1 == 1 << messages
            size_bytes += entry_bytes
            if chosen and (size_bytes > RESPONSE_BYTES_MAX or is_plain is not in_run):
                break
            in_run = is_plain
            taken_bytes = 0 if position in fetched else entry_bytes
            chosen.append(_chosen((delivery, entry, entry_bytes, taken_bytes, is_plain)))
            pending.popleft()
        return chosen, gone, unsent

    def _return_unsent(self, consumer: int, gone: Sequence[int], unsent: int) -> None:
        """Return the permits of deliveries that are not sent, since the log no longer has the entry
        or they are stale: the consumer counts only the messages that it receives."""
        performing = self._performing
        if gone:
            effects = performing.machine.gone(consumer, gone, performing.now_ms())
            performing.apply(effects)
        if unsent:
            performing.apply(performing.machine.permit(consumer, unsent, performing.now_ms()))

    def _record_delivered(
        self, history: History, consumer: int, chosen: Sequence["_Chosen"]
    ) -> None:
        performing = self._performing
        name = performing.machine.consumers[consumer].name
        positions = [each[0][1] for each in chosen]
        history.record(What.DELIVERED, performing.now_ms(), positions, name)

    def _record_spans(self, chosen: Iterable["_Chosen"], began_ns: int) -> None:
        for delivery, entry, *_ in chosen:
            metadata = entry.metadata
            if TRACEPARENT not in metadata.properties:
                continue
            about: dict[str, str | int] = {
                names.MESSAGING_MESSAGE_ID: str(MessageId(*delivery.position)),
                names.PRODUCER_NAME: metadata.producer_name,
                names.SEQUENCE_ID: metadata.sequence_id,
                names.ATTEMPTS: delivery.attempts,
            }
            self._spans.record(metadata.properties, began_ns, about)

    async def _fetch(self, page: "_Page") -> None:
        """Wait for the budget that the first delivery lacks, or fetch its entry and some more."""
        share, lacks_bytes = page.share, page.lacks_bytes
        page.lacks_bytes = 0
        if lacks_bytes:
            page.drop()
            await share.take(lacks_bytes)
            page.reserve_bytes = lacks_bytes  # the entry may be evicted by now: decide again
            return
        await self._work.repeated(lambda: self._fetch_once(page))

    async def _fetch_once(self, page: "_Page") -> None:
        """Fetch entries that are not cached. An attempt that fails releases its budget before the
        next one."""
        room_bytes = await self._room_for(page)
        wanted = self._wanted(page, room_bytes)
        try:
            found = await self._log.fetch_some(self._topic, wanted, bytes_max=room_bytes)
        except BaseException:
            page.share.give(room_bytes)
            raise
        page.add(wanted[: found.answered], found.entries)
        page.was_left_out = page.pending[0].position not in wanted[: found.answered]
        fetched_bytes = sum(page.fetched[position_of(each)].size_bytes for each in found.entries)
        page.share.add(fetched_bytes)
        page.share.give(room_bytes)
        if found.entries:
            self._entry_bytes = max(1, fetched_bytes // len(found.entries))

    async def _room_for(self, page: "_Page") -> int:
        """Take budget for a fetch. Returns it in bytes. A page releases the bytes that it holds
        before it waits."""
        share = page.share
        left_bytes = self._bytes_max - share.size_bytes
        if page.was_left_out and left_bytes < self._entry_bytes:
            page.drop()  # one entry may exceed the limit, if it is alone
            left_bytes = max(self._bytes_max - share.size_bytes, self._entry_bytes)
        if left_bytes > 0 and share.try_take(left_bytes):
            return left_bytes
        page.drop()
        await share.take(self._bytes_max)
        return self._bytes_max

    def _wanted(self, page: "_Page", room_bytes: int) -> list[Position]:
        """The positions to fetch, in order: the first delivery's, and about as many of the next as
        the budget holds; the first alone if it was left out before."""
        cache, first = self._performing.cache, page.pending[0].position
        if page.was_left_out:
            return [first]
        some = islice(page.pending, min(RESPONSE_ENTRIES_MAX, 1 + room_bytes // self._entry_bytes))
        wanted = {each.position for each in some if each.position not in cache}
        return sorted({first} | wanted - page.fetched.keys() - page.gone)


@dataclass(slots=True)
class _Page:
    """Deliveries that are on their way to a consumer.

    Attributes:
        generation: of the machine that made them.
        pending: those not sent yet, in order.
        share: the budget taken for fetched entries, and for those being sent.
        runs: whether the consumer understands runs.
        fetched: entries not sent yet.
        gone: requested positions at which the log no longer has an entry.
        sending_bytes: the size of the entries being sent.
        lacks_bytes: the budget missing for the first one's cached entry; 0: none.
        reserve_bytes: budget that was waited for and is not used yet.
        was_left_out: whether a response left out the first: it is fetched alone next.
    """

    generation: int
    pending: deque[Delivery]
    share: Share
    runs: bool
    fetched: dict[Position, Cached] = field(default_factory=dict)
    gone: set[Position] = field(default_factory=set)
    sending_bytes: int = 0
    lacks_bytes: int = 0
    reserve_bytes: int = 0
    was_left_out: bool = False
    began_ns: int = field(default_factory=time.time_ns)

    def take(self, size_bytes: int) -> bool:
        """Take budget for cached entries, from the reserve if that suffices. Returns whether there
        was enough."""
        if size_bytes > self.reserve_bytes:
            return self.share.try_take(size_bytes)
        self.reserve_bytes -= size_bytes
        return True

    def give_reserve(self) -> None:
        self.share.give(self.reserve_bytes)
        self.reserve_bytes = 0

    def add(self, answered: Sequence[Position], entries: Sequence[ledger_pb2.StoredEntry]) -> None:
        """Record the log's answer about these positions."""
        self.fetched.update((position_of(each), Cached(each, each.ByteSize())) for each in entries)
        self.gone.update(each for each in answered if each not in self.fetched)

    def forget(self, position: Position) -> None:
        """Release an entry that is not sent."""
        found = self.fetched.pop(position, None)
        if found is not None:
            self.share.give(found.size_bytes)

    def drop(self) -> None:
        """Release everything before waiting for budget; it is fetched again."""
        self.fetched.clear()
        self.share.give_all()


class _Chosen(NamedTuple):
    """A delivery to be sent with its entry.

    Attributes:
        taken_bytes: the budget to take for it: that of a fetched entry is taken already.
        is_plain: whether nothing is to be said of it but its number and its entry.
    """

    delivery: Delivery
    entry: ledger_pb2.StoredEntry
    size_bytes: int
    taken_bytes: int
    is_plain: bool


# _Chosen._make without a Python call per entry.
_chosen: Final[Callable[[Iterable[Any]], _Chosen]] = partial(tuple.__new__, _Chosen)


def _response(chosen: Sequence[_Chosen]) -> pb.ConsumeResponse:
    """Deliveries that are all plain, or none of them."""
    response = pb.ConsumeResponse()
    if chosen[0].is_plain:
        _fill_runs(response.deliveries, chosen)
    else:
        add = response.deliveries.deliveries.add
        for delivery, entry, *_ in chosen:
            _fill(add(), delivery, entry)
    return response


def _fill_runs(wire: pb.Deliveries, chosen: Sequence[_Chosen]) -> None:
    run = wire.runs.add(first=chosen[0].delivery.delivery)
    add, following = run.entries.add, run.first
    for delivery, entry, *_ in chosen:
        if delivery.delivery != following:
            following = delivery.delivery
            add = wire.runs.add(first=following).entries.add
        add().CopyFrom(entry)
        following += 1


def _fill(wire: pb.Delivery, delivery: Delivery, entry: ledger_pb2.StoredEntry) -> None:
    wire.delivery = delivery.delivery
    wire.position.CopyFrom(entry.position)
    wire.metadata.CopyFrom(entry.metadata)
    wire.payload = entry.payload
    wire.append_time.CopyFrom(entry.append_time)
    wire.attempts = delivery.attempts
    if entry.aborts:
        wire.aborts = entry.aborts
    if delivery.unacked + 1 != 1 << delivery.messages:
        wire.acknowledged.extend(
            index for index in range(delivery.messages) if not delivery.unacked >> index & 1
        )
    if delivery.gap is not None:
        wire.gap.position.ledger_id, wire.gap.position.entry_id = delivery.gap.position
        wire.gap.attempts = delivery.gap.attempts

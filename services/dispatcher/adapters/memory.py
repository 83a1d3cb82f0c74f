"""Cursors in memory, for tests and simulations."""

from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from seqgate.services.cursors import CursorsUnavailable
from seqgate.services.dispatcher.core.effects import FailedEntry, Persist
from seqgate.services.dispatcher.core.positions import Run
from seqgate.services.dispatcher.ports import (
    Cursor,
    CursorsRefused,
    InvalidProperty,
    Lease,
    NotOwner,
    Part,
    SubscriptionNotFound,
)
from seqgate.services.errors import Fenced, InvalidPage
from seqgate.types import Position, TopicName

PROPERTIES_MAX: Final = 2_000
PROPERTY_BYTES_MAX: Final = 4 * 1024
"""How many properties a cursor may have, and the bytes of a name and its value together."""

_START: Final = Position(0, 0)
"""Stands for the start of the log in successions."""


@dataclass
class _Kept:
    """One cursor."""

    mark_delete: Position | None
    properties: dict[str, str]
    created_ms: int
    whole: set[Position] = field(default_factory=set)
    parts: dict[Position, tuple[int, int]] = field(default_factory=dict)
    successions: dict[Position, Position] = field(default_factory=dict)
    failed: dict[Position, FailedEntry] = field(default_factory=dict)
    lease: Lease | None = None
    expires_ms: int = 0

    def __contains__(self, position: Position) -> bool:
        is_before = self.mark_delete is not None and position <= self.mark_delete
        return is_before or position in self.whole

    def learn(self, successions: Iterable[tuple[Position, Position]]) -> None:
        """Record successions. Of two that contradict each other the later counts, provided that the
        log was trimmed up to it; otherwise the call is refused."""
        told = dict(self.successions)
        for last, following in successions:
            told[last] = max(following, told.get(last, following))
        first = told.get(_START, _START)
        for last, following in (*successions, *self.successions.items()):
            if following != told[last] > first:
                raise CursorsRefused(
                    "the cursor service refused a write for good", because="INVALID_POSITION"
                )
        self.successions = told

    def advance(self) -> None:
        """Move the mark-delete position up to the first hole."""
        while True:
            at = self.mark_delete
            following = Position(1, 0) if at is None else Position(at.ledger_id, at.entry_id + 1)
            leap = self.successions.get(at or _START)
            if following in self.whole:
                self.mark_delete = following
            elif leap is not None and leap in self.whole:
                self.mark_delete = leap
            else:
                break
            self.whole.discard(self.mark_delete)
        end = self.mark_delete
        if end is not None:
            self.parts = {each: part for each, part in self.parts.items() if each > end}
            self.failed = {each: failed for each, failed in self.failed.items() if each > end}


class MemoryCursors:
    """See seqgate.services.dispatcher.ports.Cursors.

    Attributes:
        available: whether it answers.
    """

    def __init__(self, now_ms: Callable[[], int] = lambda: 0) -> None:
        self.available = True
        self._now_ms = now_ms
        self._kept: dict[tuple[TopicName, str], _Kept] = {}
        self._spent: dict[TopicName, int] = {}

    async def create(
        self,
        topic: TopicName,
        name: str,
        mark_delete: Position | None,
        properties: Mapping[str, str],
    ) -> tuple[Cursor, bool]:
        self._check()
        kept = self._kept.get((topic, name))
        if kept is not None:
            return self._cursor(name, kept), False
        _check_properties(properties)
        kept = _Kept(mark_delete, dict(properties), self._now_ms())
        self._kept[topic, name] = kept
        return self._cursor(name, kept), True

    async def get(self, topic: TopicName, name: str) -> Cursor:
        return self._cursor(name, self._get(topic, name))

    async def page(
        self, topic: TopicName, *, limit: int, token: str
    ) -> tuple[Sequence[Cursor], str]:
        self._check()
        names = sorted((name for of, name in self._kept if of == topic), key=str.encode)
        if token:
            if token not in names:
                raise InvalidPage("page_token is invalid", field="page_token")
            names = names[names.index(token) + 1 :]
        page = [self._cursor(name, self._kept[topic, name]) for name in names[:limit]]
        return page, page[-1].name if len(names) > limit else ""

    async def delete(self, topic: TopicName, name: str) -> None:
        lease = self._get(topic, name).lease
        del self._kept[topic, name]
        if lease is not None:
            self._spent[topic] = max(self._spent.get(topic, 0), lease.epoch)

    async def reset(
        self, topic: TopicName, name: str, mark_delete: Position | None, epoch: int
    ) -> None:
        kept = self._fenced(topic, name, epoch)
        kept.mark_delete = mark_delete
        kept.whole, kept.parts, kept.failed = set(), {}, {}

    async def acknowledged(self, topic: TopicName, name: str) -> AsyncIterator[Run | Part]:
        kept = self._get(topic, name)
        runs: list[Run] = []
        for position in sorted(kept.whole):
            last = runs[-1] if runs else None
            if last is not None and position == (last.first.ledger_id, last.last_entry_id + 1):
                runs[-1] = Run(last.first, position.entry_id)
            else:
                runs.append(Run(position, position.entry_id))
        for run in runs:
            yield run
        for position, (messages, bits) in sorted(kept.parts.items()):
            yield Part(position, messages, bits)

    async def attempts(self, topic: TopicName, name: str) -> AsyncIterator[FailedEntry]:
        for _, each in sorted(self._get(topic, name).failed.items()):
            yield each

    async def persist(
        self, topic: TopicName, name: str, what: Persist, epoch: int
    ) -> Position | None:
        kept = self._fenced(topic, name, epoch)
        kept.learn(what.successions)
        done = list(what.entries)
        for position, messages, bits in what.parts:
            if position in kept:
                continue
            bits |= kept.parts.get(position, (messages, 0))[1]
            kept.parts[position] = (messages, bits)
            if bits == (1 << messages) - 1:
                done.append(position)
        for position in done:
            kept.parts.pop(position, None)
            kept.failed.pop(position, None)
            if position not in kept:
                kept.whole.add(position)
        kept.advance()
        return kept.mark_delete

    async def record(
        self, topic: TopicName, name: str, failed: Sequence[FailedEntry], epoch: int
    ) -> None:
        kept = self._fenced(topic, name, epoch)
        kept.failed |= {each.position: each for each in failed if each.position not in kept}

    async def set_properties(
        self,
        topic: TopicName,
        name: str,
        put: Mapping[str, str],
        remove: Sequence[str],
        *,
        epoch: int | None,
    ) -> Cursor:
        kept = self._get(topic, name) if epoch is None else self._fenced(topic, name, epoch)
        properties = {
            each: value for each, value in kept.properties.items() if each not in remove
        } | dict(put)
        _check_properties(properties)
        kept.properties = properties
        return self._cursor(name, kept)

    async def acquire(self, topic: TopicName, name: str, owner: str, duration_ms: int) -> Lease:
        kept, now_ms = self._get(topic, name), self._now_ms()
        lease = kept.lease
        if lease is None or kept.expires_ms <= now_ms:
            last = self._spent.get(topic, 0) if lease is None else lease.epoch
            lease = Lease(owner, last + 2 if last else 1)  # the one between: see next_epoch
        elif lease.owner != owner:
            raise NotOwner(
                "another instance owns the subscription", retry_after_s=0.5, owner=lease.owner
            )
        kept.lease, kept.expires_ms = lease, now_ms + duration_ms
        return lease

    async def renew(
        self,
        topic: TopicName,
        name: str,
        owner: str,
        epoch: int,
        duration_ms: int,
        *,
        next_epoch: bool = False,
    ) -> Lease:
        kept = self._get(topic, name)
        if kept.lease is not None and kept.expires_ms == 0:
            raise Fenced("the lease was released")
        following = Lease(owner, epoch + 1)
        if not (next_epoch and kept.lease == following):
            if self._fenced(topic, name, epoch).lease != Lease(owner, epoch):
                raise Fenced("another instance owns the subscription")
            kept.lease = following if next_epoch else kept.lease
        kept.expires_ms = self._now_ms() + duration_ms
        assert kept.lease is not None
        return kept.lease

    async def release(self, topic: TopicName, name: str, epoch: int) -> None:
        self._fenced(topic, name, epoch).expires_ms = 0

    async def check(self) -> None:
        self._check()

    def _check(self) -> None:
        if not self.available:
            raise CursorsUnavailable("the cursor service does not answer", retry_after_s=0.5)

    def _get(self, topic: TopicName, name: str) -> _Kept:
        self._check()
        kept = self._kept.get((topic, name))
        if kept is None:
            raise SubscriptionNotFound(
                "subscription not found", topic=str(topic), subscription=name
            )
        return kept

    def _fenced(self, topic: TopicName, name: str, epoch: int) -> _Kept:
        kept = self._get(topic, name)
        if kept.lease is None or kept.lease.epoch != epoch:
            raise Fenced("another instance owns the subscription")
        return kept

    def _cursor(self, name: str, kept: _Kept) -> Cursor:
        is_held = kept.lease is not None and kept.expires_ms > self._now_ms()
        return Cursor(
            name,
            kept.mark_delete,
            dict(kept.properties),
            len(kept.whole),
            kept.created_ms,
            kept.lease.owner if kept.lease is not None and is_held else "",
        )


def _check_properties(properties: Mapping[str, str]) -> None:
    if len(properties) > PROPERTIES_MAX:
        raise InvalidProperty("too many properties", field="properties")
    for name, value in properties.items():
        if len(name.encode()) + len(value.encode()) > PROPERTY_BYTES_MAX:
            raise InvalidProperty("a property is too long", field="properties")

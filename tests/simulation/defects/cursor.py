"""Defects of the cursor service, and of deduplication's use of it."""

from typing import Any

from seqgate.services.cursor.core.cursor import CursorState
from seqgate.services.cursor.core.sightings import Sightings
from seqgate.services.cursors import Cursor
from seqgate.services.dedup.snapshots import Snapshots, SnapshotTooLarge, Taken
from seqgate.services.dispatcher.core.effects import Persist
from seqgate.services.dispatcher.cursor.tenure import Tenure
from seqgate.services.dispatcher.ports import CursorsRefused, Log
from seqgate.services.dispatcher.shell import performing
from seqgate.services.errors import Kind
from seqgate.services.runtime.guard import Judged
from seqgate.types import DEDUP_CURSOR, Position, TopicName
from tests.simulation.defects import defect


@defect("A11", "epochs restart when a cursor is deleted and recreated")
def begin_epochs_anew(patch: Any) -> None:
    def next_epoch(self: CursorState) -> int:
        return (0 if self.head.lease is None else self.head.lease.epoch) + 1

    patch.setattr(CursorState, "_next_epoch", next_epoch)


@defect("A15", "a lease lasts until its expiry by the clock of the process that granted it")
def believe_the_clock(patch: Any) -> None:
    patch.setattr(Sightings, "judged", lambda self, head, now_ms, matters: head.lease)


@defect("A15-given-back", "a released lease lasts as if it were not released")
def go_by_one_clock(patch: Any) -> None:
    def release_lease(self: CursorState, epoch: int, now_ms: int) -> None:
        lease = self._lease(epoch)
        self.head.lease = lease._replace(expires_ms=min(lease.expires_ms, now_ms))

    patch.setattr(CursorState, "release_lease", release_lease)


@defect("A10", "a cursor is made for a snapshot that turns out too large, and blocks every trim")
def make_the_cursor_first(patch: Any) -> None:
    attach = Snapshots._attach

    async def made_first(self: Snapshots, topic: TopicName, cursor: Cursor | None) -> Taken | None:
        if cursor is None and await self._store.freeze(topic) is not None:
            cursor = await self._cursors.create(topic, DEDUP_CURSOR)
        return await attach(self, topic, cursor)

    async def kept(self: Snapshots, topic: TopicName) -> None:
        raise SnapshotTooLarge("the state is too large for a snapshot", topic=topic)

    patch.setattr(Snapshots, "_attach", made_first)
    patch.setattr(Snapshots, "_let_go", kept)


@defect("C2", "lists contain items that their callers may not get")
def show_everything(patch: Any) -> None:
    patch.setattr(Judged, "shown", lambda self, reply: reply)


@defect("A12", "a permanently refused persist is repeated for ever")
def repeat_refused_persists(patch: Any) -> None:
    async def persist(tenure: Tenure, log: Log, topic: TopicName, what: Persist) -> Position | None:
        return await tenure.persist(what)

    patch.setattr(performing, "persist", persist)
    patch.setattr(CursorsRefused, "kind", Kind.UNAVAILABLE)

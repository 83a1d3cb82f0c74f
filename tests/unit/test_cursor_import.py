"""Concurrent imports of cursors: services/cursor/service.py."""

from collections.abc import Mapping
from typing import Any

import pytest

from seqgate.services.cursor.adapters.memory import MemoryCursorStore
from seqgate.services.cursor.core.cursor import Caller
from seqgate.services.cursor.core.managed import Imported
from seqgate.services.cursor.core.state import Head
from seqgate.services.cursor.service import IMPORTING, CursorExists, ManagedCursors
from seqgate.types import Position, TopicName

TOPIC = TopicName.parse("test/import/topic")
UNUSED: Any = None


def imported(entry_id: int) -> Imported:
    return Imported(Position(1, entry_id), {}, {}, (), (), (), stale=False)


class Overtaken(MemoryCursorStore):
    """Between an import's two calls another import is made and completed, and the cursor is
    used."""

    is_between = False

    async def create(
        self,
        topic: TopicName,
        name: str,
        *,
        mark_delete: Position | None,
        properties: Mapping[str, str],
    ) -> tuple[Head, bool]:
        made = await super().create(topic, name, mark_delete=mark_delete, properties=properties)
        if not self.is_between:
            self.is_between = True
            other = ManagedCursors(self, UNUSED, UNUSED)
            await other.import_cursor(topic, name, imported(5), replacing=False)
            await self.change(topic, name, lambda state, _: state.reset(Position(1, 9), Caller()))
        return made


async def test_an_import_finished_by_another_call_resets_no_used_cursor() -> None:
    store = Overtaken()
    managed = ManagedCursors(store, UNUSED, UNUSED)
    with pytest.raises(CursorExists):
        await managed.import_cursor(TOPIC, "c", imported(5), replacing=False)
    assert await store.look(TOPIC, "c", lambda state: state.head.mark_delete) == (1, 9)
    await managed.import_cursor(TOPIC, "c", imported(5), replacing=True)
    assert await store.look(TOPIC, "c", lambda state: state.head.mark_delete) == (1, 5)


async def test_an_interrupted_import_is_resumed() -> None:
    store = MemoryCursorStore()
    await store.create(TOPIC, "c", mark_delete=None, properties={IMPORTING: "begun"})
    managed = ManagedCursors(store, UNUSED, UNUSED)
    head = await managed.import_cursor(TOPIC, "c", imported(5), replacing=False)
    assert (head.mark_delete, head.properties) == ((1, 5), {})
    with pytest.raises(CursorExists):
        await managed.import_cursor(TOPIC, "c", imported(5), replacing=False)

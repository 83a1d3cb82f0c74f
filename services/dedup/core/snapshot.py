"""The form of a topic's state as properties of a cursor's position.

    <producer>              "41", or inside a large message "41/<chunk>/<chunks>/<bytes>/<uuid>"
    #seqgate.internal.dedup {"layout": 1, "incarnation": 7, "position": [3, 41], "taken_ms": ...,
                             "active_ms": [...]}

Pulsar stores a bare decimal number under the same name, so its snapshots can be read here, and ours
by Pulsar. `active_ms` has the last activity of each producer, in the order of their names. The
position is repeated because a cursor that is moved manually keeps its properties. A producer name
that begins with "#" gets an additional one.
"""

import json
from collections.abc import Mapping
from typing import Final, NamedTuple
from urllib.parse import quote, unquote

from seqgate.services.dedup.core.topic import Frozen, Persisted
from seqgate.services.deduplication import Writer
from seqgate.types import SEQUENCE_ID_MAX, Chunk, InvalidChunkError, Position, check_chunk

ABOUT: Final = "#seqgate.internal.dedup"
"""The property that identifies the log and the position of the others."""

LAYOUT: Final = 1


class UnreadableSnapshot(ValueError):
    """The properties are not a readable snapshot; none of them may be used."""


class Snapshot(NamedTuple):
    """A state with its log's incarnation and position; Pulsar's snapshots record neither: None.
    `taken_ms` 0: it does not record when it was taken."""

    incarnation: int | None
    position: Position | None
    producers: list[Persisted]
    taken_ms: int = 0

    def is_of(self, incarnation: int, position: Position) -> bool:
        """Whether this is the state of that log at that position."""
        return self.incarnation in (None, incarnation) and self.position in (None, position)


def covers_more(position: Position | None, writer: Writer, confirmed: Position | None) -> bool:
    """Whether a snapshot at a position covers more than a state that ends at `confirmed`, and no
    more than the writer's log: a snapshot beyond that belongs to a log that was lost."""
    if position is None or writer.position is None or position > writer.position:
        return False
    return confirmed is None or confirmed < position


def encode(frozen: Frozen, *, taken_ms: int) -> dict[str, str]:
    """The properties for a state, which must have a confirmed position."""
    assert frozen.confirmed is not None
    producers = sorted(frozen.producers)
    properties = {
        _escaped(producer): str(highest) if unfinished is None else _inside(highest, unfinished)
        for producer, highest, unfinished, _ in producers
    }
    about = {
        "layout": LAYOUT,
        "incarnation": frozen.incarnation,
        "position": frozen.confirmed,
        "taken_ms": taken_ms,
        "active_ms": [each.active_ms for each in producers],
    }
    properties[ABOUT] = json.dumps(about, separators=(",", ":"))
    return properties


def decode(properties: Mapping[str, str], *, now_ms: int) -> Snapshot:
    """The state in the properties. Without a recorded last activity, producers count as active now.

    Raises:
        UnreadableSnapshot: a property is in neither our form nor Pulsar's.
    """
    marks = sorted((_unescaped(name), mark) for name, mark in properties.items() if name != ABOUT)
    try:
        about = _about(properties.get(ABOUT), len(marks), now_ms)
        producers = [
            Persisted(producer, *_mark(mark), active)
            for (producer, mark), active in zip(marks, about.active_ms, strict=True)
        ]
    except (ValueError, TypeError, KeyError, InvalidChunkError) as error:
        raise UnreadableSnapshot(f"not a snapshot: {error}") from error
    return Snapshot(about.incarnation, about.position, producers, about.taken_ms)


class _About(NamedTuple):
    incarnation: int | None
    position: Position | None
    active_ms: list[int]
    taken_ms: int = 0


def _about(text: str | None, count: int, now_ms: int) -> _About:
    if text is None:
        if not count:
            raise ValueError("no properties")
        return _About(None, None, [now_ms] * count)
    about = json.loads(text)
    if about["layout"] != LAYOUT:
        raise ValueError(f"unknown layout {about['layout']}, want {LAYOUT}")
    position = Position(*(int(each) for each in about["position"]))
    active_ms = [int(each) for each in about["active_ms"]]
    return _About(int(about["incarnation"]), position, active_ms, int(about.get("taken_ms", 0)))


def _inside(sequence_id: int, chunk: Chunk) -> str:
    uuid, chunk_id, num_chunks, total_bytes = chunk
    return f"{sequence_id}/{chunk_id}/{num_chunks}/{total_bytes}/{quote(uuid, safe='')}"


def _mark(text: str) -> tuple[int, Chunk | None]:
    sequence_id, *inside = text.split("/")
    highest = _number(sequence_id)
    if not inside:
        return highest, None
    chunk_id, num_chunks, total_bytes, uuid = inside
    chunk = Chunk(unquote(uuid), _number(chunk_id), _number(num_chunks), _number(total_bytes))
    if check_chunk(chunk).is_last:
        raise ValueError("the last chunk of a message cannot be unfinished")
    return highest, chunk


def _number(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and int(text) <= SEQUENCE_ID_MAX):
        raise ValueError(f"{text!r} is not a sequence id")
    return int(text)


def _escaped(producer: str) -> str:
    return f"#{producer}" if producer.startswith("#") else producer


def _unescaped(name: str) -> str:
    return name.removeprefix("#")

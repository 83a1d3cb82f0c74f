"""An entry of an audit topic: some events of one subscription, as JSON that people can read.

    {"subscription": "billing", "instance": "10.0.0.7:7704", "lost": 0, "events": [
      {"at_ms": 1764000000000, "event": "DELIVERED", "ledger": 1, "entries": [[0, 499], 502],
       "consumer": "crew"}]}

`entries` are ids, or the first and the last id of a run: here 1:0 to 1:499, and 1:502. Of a RESET
it is the entry after which messages are delivered again, and of a TAKEN there is none. `lost`
counts events before these that were dropped. The details are those of core.history.DETAILS; a
failure whose consumer gave no reason has no text. Properties of the entry name the subscription,
and the first and the last position that the events may be about, so that a look-up opens few
entries.
"""

import json
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from seqgate.services.dispatcher.core.history import (
    DETAILS,
    Event,
    What,
    bounds,
    decoded,
)
from seqgate.services.dispatcher.ports import INTERNAL
from seqgate.types import Position, TopicName

PRODUCER: Final = f"{INTERNAL}audit/"
"""The prefix of the names of the producers of audit topics, which are reserved for services."""

SUFFIX: Final = "-AUDIT"
"""An audit topic has the name of its topic, with this suffix."""

SUBSCRIPTION: Final = f"{INTERNAL}audit.subscription"
FIRST: Final = f"{INTERNAL}audit.first"
LAST: Final = f"{INTERNAL}audit.last"

_NUMBERS: Final = frozenset({"attempts", "number", "filter_version", "delay_ms"})


class Page(NamedTuple):
    """The properties and the payload of an entry."""

    properties: dict[str, str]
    payload: bytes


class Told(NamedTuple):
    """What a page says of an entry: its events, and the number of events that were dropped."""

    events: list[Event]
    lost: int


def is_audit(topic: TopicName) -> bool:
    return topic.local.endswith(SUFFIX)


def page_of(subscription: str, instance: str, records: Sequence[bytes], lost: int) -> Page:
    limits = [bounds(each) for each in records] or [(Position(0, 0), Position(0, 0))]
    first, last = min(low for low, _ in limits), max(high for _, high in limits)
    events = list(map(_shown, records))
    said = {"subscription": subscription, "instance": instance, "lost": lost, "events": events}
    properties = {SUBSCRIPTION: subscription, FIRST: str(first), LAST: str(last)}
    return Page(properties, json.dumps(said, ensure_ascii=False, separators=(",", ":")).encode())


def _shown(record: bytes) -> dict[str, Any]:
    event, ledger_id, entries = decoded(record)
    found: dict[str, Any] = {"at_ms": event.at_ms, "event": event.what.name}
    if event.what is not What.TAKEN:
        found |= {"ledger": ledger_id, "entries": entries}
    for name, value in event.named.items():
        found[name] = int(value or 0) if name in _NUMBERS else value
    return found


def is_about(properties: Any, subscription: str, position: Position) -> bool:
    """Whether the page with these properties may have events of an entry."""
    first, last = _position(properties.get(FIRST, "")), _position(properties.get(LAST, ""))
    if first is None or last is None or properties.get(SUBSCRIPTION) != subscription:
        return False
    return first <= position <= last


def told(payload: bytes, position: Position) -> Told:
    """Raises ValueError if it is no page."""
    try:
        said = json.loads(payload)
        events = [_parsed(each) for each in said["events"] if _concerns(each, position)]
        return Told(events, int(said["lost"]))
    except (LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError("not a page of an audit topic") from error


def _parsed(shown: dict[str, Any]) -> Event:
    what = What[shown["event"]]
    names = [each for each in DETAILS[what] if each != "text" or each in shown]
    return Event(what, int(shown["at_ms"]), tuple(str(shown[name]) for name in names))


def _concerns(shown: dict[str, Any], position: Position) -> bool:
    what = What[shown["event"]]
    if what is What.TAKEN:
        return True
    ledger_id, entries = int(shown["ledger"]), shown["entries"]
    if what is What.RESET:
        return (ledger_id, int(entries[0])) < position
    if ledger_id != position.ledger_id:
        return False
    entry_id = position.entry_id
    return entry_id in entries or any(
        each[0] <= entry_id <= each[1] for each in entries if isinstance(each, list)
    )


def _position(text: str) -> Position | None:
    ledger_id, _, entry_id = text.partition(":")
    if not all(each.isascii() and each.isdecimal() and len(each) <= 20 for each in text.split(":")):
        return None
    return Position(int(ledger_id), int(entry_id)) if entry_id else None

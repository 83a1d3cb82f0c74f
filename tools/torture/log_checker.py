"""Checks a log against its producers' and its reader's journals.

LOST        acknowledged, and not in the log
MISPLACED   acknowledged at another position than it has
CONFLICT    sent again, and told that another message is stored under its id
TWICE       a message, a producer's sequence id, or a chunk of an attempt at two positions
REORDERED   behind a higher id of its producer, of its entry, or of its key
INVENTED    in the log, and never sent
DAMAGED     not what was sent
NOT_STALE   refused as stale, although its producer sends in order
APPEND_TIME appended at an earlier time than the entry before it
SKIPPED     the reader did not get it
READ_AGAIN  the reader got it twice, or after a later message
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import chain, pairwise

from seqgate.types import Position
from tools.stack.journal import Line
from tools.torture.evidence import Journals, Log, Place, Stored, place_of
from tools.torture.roles import ProducerRole
from tools.torture.violation import Found, Violation, violations

TRIMMED = "TRIMMED"
"""The refusal's reason after a trim. Whether the message was stored is then unknown."""


def check_log(
    log: Log, producers: Mapping[str, ProducerRole], journals: Journals
) -> list[Violation]:
    """All violations of a log, given the roles that publish to it and their journals, by name."""
    places: dict[str, list[Place]] = defaultdict(list)
    for stored in log.messages:
        places[stored.uid].append(stored.place)
    found = chain(
        _told_wrongly(places, producers, journals),
        _stored_wrongly(log, places, producers, journals),
        _twice(log),
        _reordered(log.messages),
        _times(log),
    )
    return violations(log.topic, found)


def _told_wrongly(
    places: Mapping[str, Sequence[Place]], producers: Mapping[str, ProducerRole], journals: Journals
) -> Found:
    for name, role in producers.items():
        for line in journals.get(name, ()):
            uid = f"{name}.{line.get('n')}"
            if line["e"] == "receipt":
                told = place_of(line["id"])
                kind = "a duplicate" if line["dup"] else "stored"
                if line.get("differs"):
                    yield "CONFLICT", f"{uid} (id {line['s']}), receipt: at {told}", line["t"]
                if not places.get(uid):
                    yield "LOST", f"{uid} (id {line['s']}), receipt: {kind} at {told}", line["t"]
                elif told not in places[uid]:
                    where = ", ".join(map(str, places[uid]))
                    yield "MISPLACED", f"{uid}, receipt: {kind} at {told}; is at {where}", line["t"]
            elif line["e"] == "refused" and role.ids and line["why"] != TRIMMED:
                yield "NOT_STALE", f"{uid} was refused with {line['why']}", line["t"]


def _stored_wrongly(
    log: Log,
    places: Mapping[str, Sequence[Place]],
    producers: Mapping[str, ProducerRole],
    journals: Journals,
) -> Found:
    sent = {
        f"{name}.{line['n']}"
        for name in producers
        for line in journals.get(name, ())
        if line["e"] == "sent"
    }
    for uid, where in places.items():
        if uid not in sent:
            yield "INVENTED", f"{uid} at {where[0]}", None
        if len(where) > 1:
            yield "TWICE", f"{uid} at {', '.join(map(str, where))}", None
    for each in log.damaged:
        yield "DAMAGED", each, None


def _twice(log: Log) -> Found:
    ids: dict[tuple[str, int], Place] = {}
    for stored in log.messages:
        identity = (stored.producer, stored.sequence_id)
        before = ids.setdefault(identity, stored.place)
        if before != stored.place:
            what = f"{stored.producer}#{stored.sequence_id} at {before}, {stored.place}"
            yield "TWICE", what, None
    chunks: dict[tuple[str, int, str, int], Position] = {}
    for entry in log.entries:
        if entry.uuid:
            chunk = (entry.producer, entry.sequence_id, entry.uuid, entry.chunk_id)
            first = chunks.setdefault(chunk, entry.position)
            if first != entry.position:
                yield "TWICE", f"chunk {chunk} at {first} and {entry.position}", None


def _reordered(stored: Sequence[Stored]) -> Found:
    """Batching by key stores a flush as several entries with interleaved ids, ordered by their
    highest ids. So entries are compared by these, and messages within an entry and a key."""
    entries: dict[tuple[str, Position], list[Stored]] = defaultdict(list)
    keys: dict[tuple[str, str], Stored] = {}
    for each in stored:
        entry = entries[each.producer, each.place.position]
        if entry and entry[-1].sequence_id >= each.sequence_id:
            yield _behind(each, entry[-1], "in its entry")
        entry.append(each)
        before = keys.get((each.producer, each.key))
        if before is not None and before.sequence_id >= each.sequence_id:
            yield _behind(each, before, f"of key {each.key}")
        keys[each.producer, each.key] = each
    last: dict[str, Stored] = {}
    for (producer, _), of_entry in entries.items():
        highest = max(of_entry, key=lambda each: each.sequence_id)
        before = last.get(producer)
        if before is not None and before.sequence_id >= highest.sequence_id:
            yield _behind(highest, before, "of its producer")
        last[producer] = highest


def _behind(each: Stored, before: Stored, among: str) -> tuple[str, str, int | None]:
    what = f"{each.uid}#{each.sequence_id} at {each.place} is behind"
    return "REORDERED", f"{what} #{before.sequence_id} at {before.place} {among}", None


def _times(log: Log) -> Found:
    for before, entry in pairwise(log.entries):
        if entry.append_ms < before.append_ms:
            early = before.append_ms - entry.append_ms
            yield "APPEND_TIME", f"{entry.position} is {early} ms before {before.position}", None


def check_reader(log: Log, read: Sequence[Line]) -> list[Violation]:
    """All violations of a reader of the whole topic."""
    known = {stored.place: stored.uid for stored in log.messages}
    last: Place | None = None
    seen: set[Place] = set()
    found = []
    for line in read:
        if line["e"] != "read":
            continue
        place = place_of(line["id"])
        if last is not None and place <= last:
            found.append(("READ_AGAIN", f"{line['u']} at {place} after {last}", line["t"]))
        if known.get(place) != line["u"]:
            what = f"{line['u']} was read at {place}, where the log has {known.get(place)}"
            found.append(("DAMAGED", what, line["t"]))
        seen.add(place)
        last = place if last is None else max(last, place)
    missing = [place for place in known if place not in seen]
    found += [("SKIPPED", f"{known[place]} at {place} was not read", None) for place in missing]
    return violations(log.topic, found)

"""Checks a subscription's deliveries: consumers' journals against the log and the cursor.

    UNSEEN       acknowledged, but by no consumer that received it
    FORGOTTEN    its acknowledgement was confirmed, and the cursor does not have it
    RESURRECTED  delivered again after its acknowledgement was confirmed
    REORDERED    first delivered after a later message of its key
    OVERTAKEN    a later message of its key was acknowledged before its own was requested
    SHARED_KEY   delivered while another consumer held a message of its key, which that consumer
                 then acknowledged
    ONE_TOKEN    delivered twice under one token
    UNWANTED     delivered although the subscription's filter rejects it
    INVENTED     delivered, or dead-lettered, and not in the log
    BURIED_TWICE in the dead letter topic more than once
    BURIED_DONE  in the dead letter topic, and its acknowledgement was confirmed
    DAMAGED      not what was sent

Every delivery has a token: the subscription's epoch, and a number that grows within it. Tokens give
the order of deliveries by the service, however late a process reads its stream. Delayed messages
take no part in the order of their key.
"""

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from seqgate.client import SubscriptionType
from seqgate.types import Position
from tools.stack.journal import Line
from tools.torture.evidence import Log, Place, Progress, Stored, place_of
from tools.torture.violation import Found, Violation, violations

NEVER = 2**63


class Token(NamedTuple):
    epoch: int
    delivery: int
    at: int


@dataclass(slots=True)
class Given:
    """A received message and its fate; times in nanoseconds."""

    token: Token
    consumer: str
    place: Place
    uid: str
    at_ns: int
    asked_ns: int | None = None
    done_ns: int | None = None
    through: bool = False


@dataclass
class Subscription:
    """The evidence on a subscription.

    Attributes:
        consumers: the journals of its consumers, by role.
        letters: the origins of the letters in its dead letter topic.
        wanted: the place that its filter accepts; None without a filter.
    """

    name: str
    type: SubscriptionType
    consumers: Mapping[str, Sequence[Line]]
    progress: Progress = Progress()
    letters: Sequence[str] = ()
    wanted: str | None = None
    given: list[Given] = field(default_factory=list)

    @property
    def done(self) -> dict[Place, Given]:
        """Messages whose acknowledgement was confirmed."""
        return {each.place: each for each in self.given if each.done_ns is not None}


def check_deliveries(log: Log, subscription: Subscription) -> list[Violation]:
    where = f"{log.topic} {subscription.name}"
    found: list[tuple[str, str, int | None]] = []
    subscription.given = []
    for role, lines in subscription.consumers.items():
        given, wrong = _given(role, lines)
        subscription.given += given
        found += wrong
    subscription.given.sort(key=lambda each: each.token)
    stored = {each.place: each for each in log.messages}
    buried = {_position(each) for each in subscription.letters if each}
    found += _not_what_was_sent(subscription, stored)
    found += _resurrected(subscription.given)
    found += _against_the_cursor(subscription, log.messages, buried)
    found += _letters(subscription, log, buried)
    if subscription.type is not SubscriptionType.SHARED:
        found += _of_keys(subscription, log.messages, buried)
    return violations(where, found)


def _given(role: str, lines: Sequence[Line]) -> tuple[list[Given], list[tuple[str, str, int]]]:
    """The deliveries in one consumer's journal. Each process that wrote it counts as a consumer."""
    given: dict[Token, Given] = {}
    wrong: list[tuple[str, str, int]] = []
    consumer = role
    for line in lines:
        event = line["e"]
        if event == "started":
            consumer = f"{role} ({line['pid']})"
        if event == "corrupt":
            wrong.append(("DAMAGED", f"{consumer} received {line['what']}", line["t"]))
        if "k" not in line:
            continue
        token = Token(*line["k"])
        if event == "given":
            if token in given:
                wrong.append(("ONE_TOKEN", f"{line['u']} under {token} at {consumer}", line["t"]))
            given[token] = Given(token, consumer, place_of(line["id"]), line["u"], line["t"])
            if line["key"] != line["key_is"]:
                wrong.append(("DAMAGED", f"{line['u']} has the key {line['key']}", line["t"]))
        elif event == "ask":
            given[token].asked_ns = line["t"]
            given[token].through = bool(line.get("through"))
        elif event == "done":
            given[token].done_ns = line["t"]
    return list(given.values()), wrong


def _not_what_was_sent(subscription: Subscription, stored: Mapping[Place, Stored]) -> Found:
    for each in subscription.given:
        message = stored.get(each.place)
        if message is None or message.uid != each.uid:
            yield "INVENTED", f"{each.uid} at {each.place}: the log has {message}", each.at_ns
        elif subscription.wanted not in (None, message.wanted_in):
            yield "UNWANTED", f"{each.uid} at {each.place} is of {message.wanted_in}", each.at_ns


def _resurrected(given: Sequence[Given]) -> Found:
    """`given` is sorted by token."""
    done: dict[Place, Given] = {}
    through: Given | None = None
    for each in given:
        before = done.get(each.place)
        if before is None and through is not None and each.place <= through.place:
            before = through
        if before is not None and before.token[:2] != each.token[:2]:
            what = f"{each.uid} at {each.place} by {each.token[:2]} to {each.consumer}"
            how = "through it " if before.through else ""
            what += f", {how}acknowledged by {before.token[:2]} at {before.consumer}"
            yield "RESURRECTED", what, each.at_ns
        if each.done_ns is not None:
            done[each.place] = each
            if each.through and (through is None or each.place > through.place):
                through = each


def _asked(given: Sequence[Given]) -> dict[Place, int]:
    """When a consumer that received a message first requested its acknowledgement."""
    asked: dict[Place, int] = {}

    def note(place: Place, at_ns: int) -> None:
        asked[place] = min(at_ns, asked.get(place, NEVER))

    through = [each for each in given if each.through and each.asked_ns is not None]
    for each in given:
        if each.asked_ns is not None:
            note(each.place, each.asked_ns)
        for other in through if each.asked_ns is None else ():
            if each.place <= other.place and each.at_ns <= (other.asked_ns or 0):
                note(each.place, other.asked_ns or 0)
    return asked


def _against_the_cursor(
    subscription: Subscription, messages: Sequence[Stored], buried: set[Position]
) -> Found:
    asked = _asked(subscription.given)
    seen = {each.place: each for each in subscription.given}
    done = subscription.done
    progress = subscription.progress
    for message in messages:
        place = message.place
        is_acknowledged = progress.has(place.position)
        is_wanted = subscription.wanted in (None, message.wanted_in)
        if is_acknowledged and is_wanted and place not in asked and place.position not in buried:
            last = seen.get(place)
            how = "not delivered" if last is None else f"delivered to {last.consumer}, not acked"
            yield "UNSEEN", f"{message.uid} at {place}: {how}", None if last is None else last.at_ns
        if place in done and not is_acknowledged and progress.is_whole:
            # The rest of a batch may be open; then the cursor does not count the entry.
            in_entry = [each for each in messages if each.place.position == place.position]
            if all(each.place in done for each in in_entry):
                each = done[place]
                yield "FORGOTTEN", f"{message.uid} at {place} by {each.consumer}", each.done_ns


def _letters(subscription: Subscription, log: Log, buried: set[Position]) -> Found:
    for origin, count in Counter(subscription.letters).items():
        if count > 1:
            yield "BURIED_TWICE", f"{origin or 'unknown origin'}: {count} letters", None
    places: dict[Position, list[Place]] = defaultdict(list)
    for message in log.messages:
        places[message.place.position].append(message.place)
    positions = {entry.position for entry in log.entries} | set(places)
    done = subscription.done
    for position in buried:
        if position not in positions:
            yield "INVENTED", f"a letter of {position}, which is not in the log", None
        of_entry = places.get(position, [])
        if of_entry and all(place in done for place in of_entry):
            each = done[of_entry[0]]
            yield "BURIED_DONE", f"{each.uid} at {each.place} by {each.consumer}", each.done_ns


def _of_keys(
    subscription: Subscription, messages: Sequence[Stored], buried: set[Position]
) -> Found:
    is_one_key = subscription.type is SubscriptionType.EXCLUSIVE
    key_of: dict[Place, str] = {}
    in_log: dict[str, list[Place]] = defaultdict(list)
    for message in messages:
        if message.is_delayed or subscription.wanted not in (None, message.wanted_in):
            continue
        key = "" if is_one_key else message.key
        key_of[message.place] = key
        in_log[key].append(message.place)
    keys: dict[str, list[Given]] = defaultdict(list)
    for each in subscription.given:
        if each.place in key_of:
            keys[key_of[each.place]].append(each)
    asked = _asked(subscription.given)
    for key, given in keys.items():
        name = key or "all keys"
        yield from _first_deliveries(name, given)
        yield from _overtaken(name, given, in_log[key], asked, buried)
        yield from _shared(name, given)


def _first_deliveries(key: str, given: Sequence[Given]) -> Found:
    """`given` is sorted by token."""
    highest: Place | None = None
    seen: set[Place] = set()
    for each in given:
        if each.place not in seen and highest is not None and each.place < highest:
            what = f"{each.uid} at {each.place} of {key} behind {highest}"
            yield "REORDERED", what, each.at_ns
        seen.add(each.place)
        highest = each.place if highest is None else max(highest, each.place)


def _overtaken(
    key: str,
    given: Sequence[Given],
    places: Sequence[Place],
    asked: Mapping[Place, int],
    buried: set[Position],
) -> Found:
    done = {each.place: each.done_ns for each in given if each.done_ns is not None}
    latest, latest_at = -1, None
    by: dict[Place, list[tuple[Place, int]]] = {}
    for place in places:
        done_ns = done.get(place)
        if done_ns is not None and latest_at is not None and latest > done_ns:
            by.setdefault(latest_at, []).append((place, done_ns))
        if place.position not in buried and asked.get(place, NEVER) > latest:
            latest, latest_at = asked.get(place, NEVER), place
    for place, later in by.items():
        first, done_ns = later[0]
        more = f" and {len(later) - 1} more" if len(later) > 1 else ""
        yield "OVERTAKEN", f"{place} of {key} by {first}{more}", done_ns


def _shared(key: str, given: Sequence[Given]) -> Found:
    by_time = sorted(given, key=lambda each: each.at_ns)
    times = [each.at_ns for each in by_time]
    for each in by_time:
        if each.done_ns is None or each.asked_ns is None:
            continue
        for at in range(bisect_right(times, each.at_ns), bisect_right(times, each.asked_ns)):
            other = by_time[at]
            if other.consumer != each.consumer and other.token[:2] > each.token[:2]:
                what = f"{key}: {each.uid} at {each.consumer}, {other.uid} at {other.consumer}"
                yield "SHARED_KEY", what, other.at_ns


def _position(text: str) -> Position:
    ledger_id, _, entry_id = text.partition(":")
    return Position(int(ledger_id), int(entry_id))

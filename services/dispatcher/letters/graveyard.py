"""A subscription's dead letters: each reaches the dead letter topic once, despite crashes.

    number it durably, with ──▶ publish it under ──▶ acknowledge ──▶ forget its
    the state of its key        that number          it              number

A large message is dead-lettered chunk by chunk, each under a number of its own. Until the last one
is acknowledged, the message is recorded with the latest number, so that the next owner completes
the letter: its chunks go where the first went.

The numbers and the states of keys are properties of the subscription's cursor. A letter published
again keeps its number, so the dead letter topic's deduplication discards the copy. Only the owner
assigns numbers; a new owner dead-letters every numbered entry and delivers none of them. Only a
letter's own key waits for the dead letter topic.

Letters are published in the order of their numbers, since the dead letter topic's deduplication
rejects a number below its last one. An owner's numbers are higher than those of all earlier owners.
A letter that cannot be published is skipped: its key waits, and the letter is retried, under its
number unless a higher one was published meanwhile. A letter refused for too long is given up, and
its entry passed.
"""

import asyncio
import base64
import json
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Container, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from hashlib import blake2b
from typing import Any, Final, NamedTuple, Protocol

import structlog

from seqgate.api.ledger.v1.ledger_pb2 import StoredEntry
from seqgate.message_id import MessageId
from seqgate.services.cursors import CursorsUnavailable
from seqgate.services.dispatcher.core.effects import (
    AfterDeadLetter,
    Because,
    DeadLetter,
    FailedDelivery,
    Gap,
    KeyState,
    Why,
)
from seqgate.services.dispatcher.core.positions import Acknowledged, Run, positions_of
from seqgate.services.dispatcher.core.settling import remembered
from seqgate.services.dispatcher.cursor.tenure import Tenure
from seqgate.services.dispatcher.entries import position_of
from seqgate.services.dispatcher.letters.lives import failures_of, fitting
from seqgate.services.dispatcher.ports import (
    GENERATION,
    INTERNAL,
    Cursor,
    DeadLetters,
    InvalidProperty,
    LedgerUnavailable,
    Letter,
    LetterRefused,
)
from seqgate.services.dispatcher.spans import MessageSpans
from seqgate.services.errors import DomainError
from seqgate.telemetry import names
from seqgate.telemetry.propagation import TRACEPARENT
from seqgate.types import InvalidNameError, Position, TopicName

log = structlog.get_logger()

_NEXT: Final = f"{INTERNAL}dead.next"
_TOPIC: Final = f"{INTERNAL}dead.topic"
_LETTER: Final = f"{INTERNAL}dead.letter."
_KEY: Final = f"{INTERNAL}dead.key."
_ABOUT: Final = f"{INTERNAL}dead.about."
_LARGE: Final = f"{INTERNAL}dead.large."

NUMBERS_AN_EPOCH: Final = 1_000_000
"""The least distance between the first numbers of two epochs."""

BURIED_MAX: Final = 10_000
"""The most published letters remembered, for Explain."""

LARGE_MAX: Final = 200
"""The most large letters on their way; beyond it, the one that waits longest for its next chunk is
forgotten: its producer may never finish it."""

RETRY_AFTER_S: Final = 0.5
"""The delay after which a failed letter is retried."""

REFUSED_MAX_S: Final = 86_400.0
"""The default time for which a refused letter is retried, in seconds."""

GENERATIONS_MAX: Final = 100
"""The most dead letter topics that a message passes through: in a cycle of them, a message that
always fails would be copied forever."""

REFUSALS_MIN: Final = 3
"""The fewest refusals before a letter is given up: its age alone may be time spent waiting behind
other letters."""


class _Open(NamedTuple):
    """A numbered letter whose entry is not acknowledged."""

    number: int
    attempts: int
    topic: TopicName
    since_ms: int
    line: str
    round: int

    @property
    def values(self) -> list[int | str]:
        return [*self[:2], str(self.topic), *self[3:]]

    @classmethod
    def of(cls, number: int, attempts: int, topic: str, *rest: Any) -> "_Open":
        return cls(number, attempts, TopicName.parse(topic), *rest)


class _Large(NamedTuple):
    """A large letter on its way: its attempt, its latest chunk, and the position of its last one,
    once that is numbered."""

    attempt: str
    latest: _Open
    last: Position | None

    def to_text(self) -> str:
        last = "" if self.last is None else _text(self.last)
        return json.dumps([self.attempt, last, *self.latest.values])

    @classmethod
    def from_text(cls, text: str) -> "_Large":
        attempt, last, *values = json.loads(text)
        return cls(attempt, _Open.of(*values), _parsed(last) if last else None)


class Contents(Protocol):
    """Where entries are fetched from: the log, or, for dead letters that came back, their dead
    letter topic."""

    async def fetch(
        self, topic: TopicName, positions: Sequence[Position], /
    ) -> Sequence[StoredEntry]: ...


class Graveyard:
    def __init__(
        self,
        tenure: Tenure,
        log: Contents,
        letters: DeadLetters,
        now_ms: Callable[[], int] = lambda: 0,
        refused_max_s: float = REFUSED_MAX_S,
    ) -> None:
        """`refused_max_s` is the time for which a refused letter is retried, in seconds."""
        self.dead_letter_topic = default_topic(tenure.topic, tenure.name)
        """Where new letters go."""
        self._last_topic: TopicName | None = None  # where the latest letter went, durably
        self.buried: dict[Position, TopicName] = {}
        """Where the latest letters went, for Explain."""
        self._topic = tenure.topic
        self._subscription = tenure.name
        self._tenure = tenure
        self._log = log
        self._letters = letters
        self._next = 1
        self._open: dict[Position, _Open] = {}
        self._large: dict[Position, _Large] = {}  # by the first chunk
        self._published: set[Position] = set()
        self._failed: dict[Position, DomainError] = {}
        self._refusals: Counter[Position] = Counter()
        self._given_up: dict[Position, Because] = {}
        self._now_ms = now_ms
        self._refused_max_s = refused_max_s
        self._highest = -1  # the highest number published by this instance
        self._line = ""
        self._done: set[Position] = set()
        self._about: dict[Position, DeadLetter] = {}
        self._told: dict[Position, tuple[Why | None, tuple[FailedDelivery, ...]]] = {}
        self._left: dict[Position, int] = {}  # of partly acknowledged batches, the rest (bits)
        self._overtaken: dict[Position, int] = {}  # `since_ms` of letters that lost their number
        self._one_by_one = asyncio.Lock()
        self._last_of: dict[str, int] = {}  # by a key's property, the last letter that wrote it
        self._writing = asyncio.Lock()
        named = {names.MESSAGING_DESTINATION_SUBSCRIPTION_NAME: tenure.name}
        self._spans = MessageSpans(names.DEAD_LETTER, str(tenure.topic), named)

    @property
    def has_done(self) -> bool:
        """Whether `tidy` has numbers to remove."""
        return bool(self._done)

    @property
    def begun(self) -> frozenset[Position]:
        """The numbered, unacknowledged entries: they are never delivered."""
        return frozenset(self._open.keys() - self._done)

    @property
    def large(self) -> dict[str, Position]:
        """The first chunk of each large letter on its way, by its attempt."""
        return {each.attempt: first for first, each in self._large.items()}

    @property
    def known_topic(self) -> TopicName:
        """Where the latest letter went; if there is none, where the next one would go. A new owner
        learns the subscription's dead letter topic only from the first consumer that joins."""
        return self._last_topic or self.dead_letter_topic

    async def load(
        self,
        cursor: Cursor,
        acknowledged: Acknowledged,
        returned: Container[Position] = (),
        left: Mapping[Position, int] = {},
    ) -> dict[bytes, KeyState]:
        """Replace the state by the cursor's durable one. `returned`: the acknowledged entries that
        come back as dead letters; `left`: of partly acknowledged batches, the messages left (bits).
        Returns the states of keys."""
        async with self._one_by_one:
            self._open, self._published, self._done = {}, set(), set()
            self._failed, self._told, self._large = {}, {}, {}
            self._left = dict(left)
            keys = {}
            for name, value in cursor.properties.items():
                if name.startswith(_LETTER):
                    self._open[_parsed(name.removeprefix(_LETTER))] = _Open.of(*json.loads(value))
                elif name.startswith(_ABOUT):
                    why, failures = json.loads(value)
                    self._told[_parsed(name.removeprefix(_ABOUT))] = (
                        Why(why),
                        failures_of(failures),
                    )
                elif name.startswith(_LARGE):
                    self._large[_parsed(name.removeprefix(_LARGE))] = _Large.from_text(value)
                elif name.startswith(_KEY):
                    key, state = _key_state(json.loads(value))
                    keys[key] = state
            if _TOPIC in cursor.properties:
                self._last_topic = TopicName.parse(cursor.properties[_TOPIC])
            known = [letter.number + 1 for letter in self._open.values()]
            self._next = max(
                self._next,
                int(cursor.properties.get(_NEXT, "1")),
                self._tenure.epoch * NUMBERS_AN_EPOCH,
                *known,
            )
            done = {
                position
                for position in self._open
                if position in acknowledged and position not in returned
            }
            self._published |= done
            self._done |= done
            for position in [each for each in self.buried if each not in acknowledged]:
                del self.buried[position]
        if self._done:
            await self.tidy()
        return keys

    async def bury(self, what: DeadLetter) -> Because | None:
        """Publish an entry to the dead letter topic. May be repeated. Returns why the entry is
        given up: refused for too long, or a cycle; None: it is stored."""
        async with self._one_by_one:
            position = what.position
            what = replace(what, failures=fitting(what.failures))
            self._about[position] = what
            if position not in self._open:
                await self._number(what)
            elif _key_name(remembered(what.key)) not in self._last_of:
                await self._hold_again(what)
            self._failed.pop(position, None)
            await self._publish_all()
            if position in self._published:
                self._refusals.pop(position, None)
                self._about.pop(position, None)
                return self._given_up.pop(position, None)
            error = self._failed.get(position)
            if isinstance(error, LetterRefused) and self._is_hopeless(position):
                self._refusals.pop(position, None)
                self._overtaken.pop(position, None)
                self._about.pop(position, None)
                return Because.LETTER_REFUSED
            raise error or LedgerUnavailable(
                "an earlier dead letter is still due", retry_after_s=RETRY_AFTER_S
            )

    def _is_hopeless(self, position: Position) -> bool:
        waited_ms = self._now_ms() - self._since_ms(position)
        is_long = waited_ms >= self._refused_max_s * 1000
        return is_long and self._refusals[position] >= REFUSALS_MIN

    def _since_ms(self, position: Position) -> int:
        letter = self._open.get(position)
        return self._overtaken.get(position, self._now_ms()) if letter is None else letter.since_ms

    async def _number(self, what: DeadLetter) -> None:
        number, self._next = self._next, self._next + 1
        since_ms = self._overtaken.pop(what.position, self._now_ms())
        topic, line = self.dead_letter_topic, self._line
        letter = self._beside_others(
            what, _Open(number, what.attempts, topic, since_ms, line, round=number)
        )
        put = {f"{_LETTER}{_text(what.position)}": json.dumps(letter.values)}
        put[_NEXT] = str(number + 1)
        large, surplus = self._large_with(what, letter)
        put |= {_large_name(each): record.to_text() for each, record in large.items()}
        if letter.topic != self._last_topic:
            put[_TOPIC] = str(letter.topic)
        key, put[key] = _key_property(what)
        put[f"{_ABOUT}{_text(what.position)}"] = _about_text(what)
        self._last_of[key] = number
        try:
            await self._put(put, *map(_large_name, surplus))
        except InvalidProperty as error:
            raise CursorsUnavailable(
                "too many held keys for the cursor's properties", retry_after_s=RETRY_AFTER_S
            ) from error
        self._open[what.position] = letter
        self._large |= large
        for each in surplus:
            self._large.pop(each, None)
        self._last_topic = letter.topic

    def _beside_others(self, what: DeadLetter, letter: _Open) -> _Open:
        """A letter that goes where the earlier chunks of its large message went. With the first
        chunk another large letter begins: a message may be dead-lettered again after a replay."""
        if what.large is None or what.position == what.large.first:
            return letter
        begun = self._large.get(what.large.first)
        if begun is None or begun.attempt != what.large.attempt:
            return letter
        latest = begun.latest
        return letter._replace(topic=latest.topic, line=latest.line, round=latest.round)

    def _large_with(
        self, what: DeadLetter, letter: _Open
    ) -> tuple[dict[Position, _Large], list[Position]]:
        """The record of a chunk's large letter, and of those beyond LARGE_MAX, the first chunks."""
        if what.large is None:
            return {}, []
        attempt, first, is_last = what.large
        large = {first: _Large(attempt, letter, what.position if is_last else None)}
        others = sorted(self._large.keys() - large.keys(), key=self._number_of_large, reverse=True)
        return large, others[LARGE_MAX - 1 :]

    def _number_of_large(self, first: Position) -> int:
        return self._large[first].latest.number

    async def _hold_again(self, what: DeadLetter) -> None:
        """Make the state of a key durable for a letter that another instance numbered, or whose
        key's state was removed since: by a reset, or because the key was released."""
        key, state = _key_property(what)
        self._last_of[key] = self._open[what.position].number  # it may be on its way to be removed
        await self._put({key: state})

    def letter_of(self, position: Position) -> tuple[int, TopicName]:
        """The number of an entry's letter, and its topic, while the entry is not acknowledged."""
        letter = self._open[position]
        return letter.number, letter.topic

    def acknowledged(self, runs: Iterable[Run]) -> None:
        """Let `tidy` remove the numbers of durably acknowledged entries."""
        if self._open:
            self._done.update(each for each in positions_of(runs) if each in self._open)

    async def tidy(self) -> None:
        """Remove the numbers of acknowledged entries."""
        done = list(self._done)
        names = [f"{kind}{_text(each)}" for each in done for kind in (_LETTER, _ABOUT)]
        ended = [first for first, each in self._large.items() if each.last in done]
        await self._put({}, *names, *map(_large_name, ended))
        for first in ended:
            self._large.pop(first, None)
        for position in done:
            self._done.discard(position)
            self._published.discard(position)
            self._open.pop(position, None)

    async def start_over(self) -> None:
        """Forget the gaps whose messages are delivered again after a reset: those that fail again
        get new letters, and until then their keys have no gap."""
        cursor = await self._tenure.get()
        gone: list[str] = []
        for name, value in cursor.properties.items():
            if name.startswith(_KEY):
                position = _key_state(json.loads(value))[1].gap.position
                is_again = cursor.mark_delete is None or cursor.mark_delete < position
                if is_again and position not in self._open:
                    gone.append(name)
        open_ = set(self._open.values())
        for first, large in self._large.items():
            is_again = cursor.mark_delete is None or cursor.mark_delete < first
            if is_again and large.latest not in open_:
                gone.append(_large_name(first))
        if gone:
            await self._put({}, *gone)
        for name in gone:
            self._last_of.pop(name, None)

    def forgetting(self, key: bytes) -> Callable[[], Awaitable[None]]:
        """Returns a function that durably forgets a key's state. It is idempotent, and does nothing
        if another letter of the key was numbered meanwhile."""
        name = _key_name(remembered(key))
        number = self._last_of.get(name)

        async def forget() -> None:
            async with self._writing:
                if self._last_of.get(name) == number:
                    await self._tenure.set_properties({}, [name])
                    self._last_of.pop(name, None)

        return forget

    async def _publish_all(self) -> None:
        """Publish unpublished letters in the order of their numbers, until one fails: the next may
        fail too. The failed one is skipped until its own retry, so that none waits for another. A
        letter whose number was overtaken loses it."""
        waiting = self._open.keys() - self._published - self._failed.keys()
        published = len(self._published)
        try:
            await self._publish_some(waiting)
        finally:
            if (count := len(self._published) - published) > 0:
                about = {"topic": str(self._topic), "subscription": self._subscription}
                log.warning("dead-lettered", **about, count=count)

    async def _publish_some(self, waiting: set[Position]) -> None:
        for position in sorted(waiting, key=lambda each: self._open[each].number):
            try:
                is_there = await self._publish(position)
            except LetterRefused as error:
                self._failed[position] = error
                self._refusals[position] += 1
                log.warning(
                    "dead letter refused",
                    topic=str(self._topic),
                    subscription=self._subscription,
                    position=_text(position),
                    **error.details,
                )
                return
            except LedgerUnavailable as error:
                self._failed[position] = error
                return
            if position in self._given_up:
                self._published.add(position)
            elif is_there:
                self._published.add(position)
                self._highest = max(self._highest, self._open[position].number)
                self._remember(position)
            else:
                self._record_overtaken(position)

    def _record_overtaken(self, position: Position) -> None:
        """Drop the number of a letter that a higher one overtook: its retry gets a new number. If
        no number published here was higher, another producer uses the name: take a random one."""
        letter = self._open.pop(position)
        self._overtaken[position] = letter.since_ms
        if letter.number > self._highest and letter.line == self._line:
            self._line = uuid.uuid4().hex[:16]
            log.warning(
                "dead letters published under a new producer name",
                topic=str(self._topic),
                subscription=self._subscription,
                line=self._line,
            )
        for first, large in self._large.items():
            if large.latest == letter:
                self._large[first] = large._replace(latest=letter._replace(line=self._line))

    def _remember(self, position: Position) -> None:
        self.buried[position] = self._open[position].topic
        if len(self.buried) > BURIED_MAX:
            del self.buried[next(iter(self.buried))]

    async def _publish(self, position: Position) -> bool:
        """Publish a letter. Returns false if its number was overtaken, and true if it is stored or
        never can be: the log no longer has the entry, or it is given up."""
        number, attempts, topic, _, line, round_ = self._open[position]
        for entry in await self._log.fetch(self._topic, [position]):
            generation = 1 + _generation(entry)
            if generation > GENERATIONS_MAX:
                self._given_up[position] = Because.CYCLE
                return True
            source = (self._topic, self._subscription)
            letter = Letter(topic, *source, number, attempts, entry, line, generation, round_)
            why, failures = self._told.get(position, (None, ()))
            if (what := self._about.get(position)) is not None:
                why, failures = why or what.why, failures or what.failures
                letter = letter._replace(acknowledged=what.acknowledged)
            elif position in self._left:
                whole = (1 << (entry.metadata.num_messages_in_batch or 1)) - 1
                letter = letter._replace(acknowledged=whole & ~self._left[position])
            return await self._put_letter(letter._replace(why=why, failures=failures))
        return True

    async def _put_letter(self, letter: Letter) -> bool:
        """As DeadLetters.put, with a span for each attempt if the message carries a trace."""
        properties = letter.entry.metadata.properties
        if not self._spans.is_on or TRACEPARENT not in properties:
            return await self._letters.put(letter)
        about: dict[str, str | int] = {
            names.MESSAGING_MESSAGE_ID: str(MessageId(*position_of(letter.entry))),
            names.ATTEMPTS: letter.attempts,
            names.DEAD_LETTER_TOPIC: str(letter.topic),
        }
        began_ns = time.time_ns()
        try:
            is_there = await self._letters.put(letter)
        except DomainError as error:
            self._spans.record(properties, began_ns, about, error.reason)
            raise
        self._spans.record(properties, began_ns, about, "" if is_there else "STALE")
        return is_there

    async def _put(self, put: dict[str, str], *remove: str) -> None:
        async with self._writing:
            await self._tenure.set_properties(put, remove)


def _generation(entry: StoredEntry) -> int:
    """How many dead letter topics an entry passed through, by its properties."""
    said = entry.metadata.properties.get(GENERATION, "0")
    return int(said) if said.isascii() and said.isdecimal() and len(said) < 10 else 0


def default_topic(topic: TopicName, subscription: str) -> TopicName:
    """The default dead letter topic: Pulsar's name, or, if that is no valid topic name, one with a
    digest in place of the invalid part."""
    digest = blake2b(f"{topic} {subscription}".encode(), digest_size=8).hexdigest()
    for name in (f"{topic}-{subscription}-DLQ", f"{topic}-{digest}-DLQ"):
        with suppress(InvalidNameError):
            return TopicName.parse(name)
    return TopicName(topic.tenant, topic.namespace_part, f"{digest}-DLQ")


def held_key(key: bytes) -> str:
    """The property that holds a lane's key, or names its gap."""
    return _key_name(remembered(key))


def _about_text(what: DeadLetter) -> str:
    failures = [each.to_json() for each in what.failures]
    return json.dumps([what.why.value, failures], ensure_ascii=False)


def _key_property(what: DeadLetter) -> tuple[str, str]:
    """The name and the value of the property with the state of a letter's key."""
    key = remembered(what.key)
    held = what.state or KeyState(what.after, Gap(what.position, what.attempts))
    state: dict[str, Any] = {
        "key": base64.b64encode(key).decode(),
        "after": what.after.name,
        "position": _text(held.gap.position),
        "attempts": held.gap.attempts,
    }
    if held.has_more:
        state["more"] = True
    return _key_name(key), json.dumps(state)


def _large_name(first: Position) -> str:
    return f"{_LARGE}{_text(first)}"


def _key_name(key: bytes) -> str:
    return _KEY + blake2b(key, digest_size=16).hexdigest()


def _key_state(value: dict[str, Any]) -> tuple[bytes, KeyState]:
    gap = Gap(_parsed(value["position"]), value["attempts"])
    return base64.b64decode(value["key"]), KeyState(
        AfterDeadLetter[value["after"]], gap, value.get("more", False)
    )


def _text(position: Position) -> str:
    return f"{position.ledger_id}:{position.entry_id}"


def _parsed(text: str) -> Position:
    ledger_id, _, entry_id = text.partition(":")
    return Position(int(ledger_id), int(entry_id))

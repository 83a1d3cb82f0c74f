"""A subscription's dead letters: each goes to the dead letter topic once, whatever dies meanwhile.

    number it, durably, with  ──▶ publish it under ──▶ acknowledge ──▶ forget its
    what becomes of its key       that number          it              number

The numbers and the keys are properties of the subscription's cursor. A letter that is published
again has its number, so the dead letter topic's deduplication finds it. Who takes the subscription
over finishes what has a number before anything else is delivered; and only who has the subscription
can give a letter a number.

Letters are published in the order of their numbers, since the dead letter topic takes no number
below one that it has. The numbers of a later owner are higher than those of all before it. A letter
that the dead letter topic refuses is passed over: its key waits, and the letter is tried again from
time to time, under its number as long as that is not overtaken.
"""

import asyncio
import base64
import json
import time
from collections.abc import Iterable
from contextlib import suppress
from hashlib import blake2b
from typing import Any, Final, NamedTuple

import structlog

from seqgate.message_id import MessageId
from seqgate.telemetry import names
from seqgate.telemetry.propagation import TRACEPARENT
from seqgate.types import InvalidNameError, Position, TopicName
from services.dispatcher.core.effects import AfterDeadLetter, DeadLetter, Gap, KeyState, Persist
from services.dispatcher.core.positions import Acknowledged
from services.dispatcher.entries import position_of
from services.dispatcher.ports import (
    INTERNAL,
    Cursor,
    Cursors,
    CursorsUnavailable,
    DeadLetters,
    InvalidProperty,
    LedgerUnavailable,
    Letter,
    LetterRefused,
    Log,
)
from services.dispatcher.spans import MessageSpans
from services.errors import DomainError

log = structlog.get_logger()

_NEXT: Final = f"{INTERNAL}dead.next"
_LETTER: Final = f"{INTERNAL}dead.letter."
_KEY: Final = f"{INTERNAL}dead.key."

KEY_BYTES_MAX: Final = 2_000
"""The longest key of which it is durable what becomes of it. Of a longer one it is forgotten when
the subscription goes to another instance."""


NUMBERS_AN_EPOCH: Final = 1_000_000
"""By how much the numbers of an epoch are higher, at least, than those of the one before."""

BURIED_MAX: Final = 10_000
"""Of how many letters that were published it is remembered for those who ask."""

RETRY_AFTER_S: Final = 0.5
"""How long a letter waits that could not be put."""


class _Open(NamedTuple):
    """A letter that has a number, and is not acknowledged."""

    number: int
    attempts: int
    topic: TopicName


class Graveyard:
    """See the module."""

    def __init__(
        self, topic: TopicName, subscription: str, cursors: Cursors, log: Log, letters: DeadLetters
    ) -> None:
        self.dead_letter_topic = default_topic(topic, subscription)
        """Where new letters go."""
        self.buried: dict[Position, TopicName] = {}
        """Where the last ones went."""
        self._topic = topic
        self._subscription = subscription
        self._cursors = cursors
        self._log = log
        self._letters = letters
        self._epoch = 0
        self._next = 1
        self._open: dict[Position, _Open] = {}
        self._published: set[Position] = set()
        self._refused: dict[Position, LetterRefused] = {}
        self._done: set[Position] = set()
        self._one_by_one = asyncio.Lock()
        named = {names.MESSAGING_DESTINATION_SUBSCRIPTION_NAME: subscription}
        self._spans = MessageSpans(names.DEAD_LETTER, str(topic), named)

    @property
    def has_done(self) -> bool:
        """Whether there are numbers to forget."""
        return bool(self._done)

    async def load(
        self, cursor: Cursor, epoch: int, acknowledged: Acknowledged
    ) -> dict[bytes, KeyState]:
        """Finish what was begun, which is noted as acknowledged, and return what is known of
        keys."""
        async with self._one_by_one:
            self._epoch = epoch
            self._open, self._published, self._done = {}, set(), set()
            self._refused = {}
            keys = {}
            for name, value in cursor.properties.items():
                if name.startswith(_LETTER):
                    number, attempts, to = json.loads(value)
                    position = _parsed(name.removeprefix(_LETTER))
                    self._open[position] = _Open(number, attempts, TopicName.parse(to))
                elif name.startswith(_KEY):
                    key, state = _key_state(json.loads(value))
                    keys[key] = state
            known = [letter.number + 1 for letter in self._open.values()]
            self._next = max(
                self._next,
                int(cursor.properties.get(_NEXT, "1")),
                epoch * NUMBERS_AN_EPOCH,
                *known,
            )
            done = {position for position in self._open if position in acknowledged}
            self._published |= done
            self._done |= done
            await self._publish_all()
            unfinished = self._published - done
            if unfinished:
                what = Persist(0, tuple(unfinished), (), ())
                await self._cursors.persist(self._topic, self._subscription, what, epoch)
                for position in unfinished:
                    acknowledged.add(position)
                self._done |= unfinished
        if self._done:
            await self.tidy()
        return keys

    async def bury(self, what: DeadLetter) -> None:
        """Put an entry into the dead letter topic. May be repeated."""
        async with self._one_by_one:
            if what.position not in self._open:
                await self._number(what)
            self._refused.pop(what.position, None)
            await self._publish_all()
            if what.position in self._refused:
                raise self._refused[what.position]
            if what.position not in self._published:
                raise LedgerUnavailable("it is not its turn", retry_after_s=RETRY_AFTER_S)

    async def _number(self, what: DeadLetter) -> None:
        number, self._next = self._next, self._next + 1
        letter = _Open(number, what.attempts, self.dead_letter_topic)
        put = {
            f"{_LETTER}{_text(what.position)}": json.dumps(
                [letter.number, letter.attempts, str(letter.topic)]
            ),
            _NEXT: str(number + 1),
        }
        if len(what.key) <= KEY_BYTES_MAX:
            state = {
                "key": base64.b64encode(what.key).decode(),
                "after": what.after.name,
                "position": _text(what.position),
                "attempts": what.attempts,
            }
            put[_key_name(what.key)] = json.dumps(state)
        try:
            await self._put(put)
        except InvalidProperty as error:
            raise CursorsUnavailable(
                "so many keys are held that no more can be remembered", retry_after_s=RETRY_AFTER_S
            ) from error
        self._open[what.position] = letter

    def acknowledged(self, positions: Iterable[Position]) -> None:
        """These entries are acknowledged durably."""
        if self._open:
            self._done.update(position for position in positions if position in self._open)

    async def tidy(self) -> None:
        """Forget the numbers of entries that are acknowledged."""
        done = list(self._done)
        await self._put({}, *(f"{_LETTER}{_text(position)}" for position in done))
        for position in done:
            self._done.discard(position)
            self._published.discard(position)
            self._open.pop(position, None)

    async def forget(self, key: bytes) -> None:
        """Nothing need be known of a key any more."""
        await self._put({}, _key_name(key))

    async def _publish_all(self) -> None:
        """Publish what is not, in the order of its numbers, until one is refused: the next may be
        as well. What cannot be published under its number any more has none."""
        waiting = self._open.keys() - self._published - self._refused.keys()
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
                self._refused[position] = error
                log.warning(
                    "dead letter refused",
                    topic=str(self._topic),
                    subscription=self._subscription,
                    position=_text(position),
                    **error.details,
                )
                return
            if is_there:
                self._published.add(position)
                self._remember(position)
            else:
                del self._open[position]

    def _remember(self, position: Position) -> None:
        self.buried[position] = self._open[position].topic
        if len(self.buried) > BURIED_MAX:
            del self.buried[next(iter(self.buried))]

    async def _publish(self, position: Position) -> bool:
        """Returns whether the letter is there, or the log has the entry no more."""
        number, attempts, topic = self._open[position]
        for entry in await self._log.fetch(self._topic, [position]):
            letter = Letter(topic, self._topic, self._subscription, number, attempts, entry)
            return await self._put_letter(letter)
        return True

    async def _put_letter(self, letter: Letter) -> bool:
        """See DeadLetters.put. A message that carries a trace has a span for each time that it is
        tried."""
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
            self._spans.note(properties, began_ns, about, error.reason)
            raise
        self._spans.note(properties, began_ns, about, "" if is_there else "STALE")
        return is_there

    async def _put(self, put: dict[str, str], *remove: str) -> None:
        await self._cursors.set_properties(
            self._topic, self._subscription, put, remove, epoch=self._epoch
        )


def default_topic(topic: TopicName, subscription: str) -> TopicName:
    """Where dead letters go unless the consumers say otherwise: Pulsar's name; where that cannot be
    a topic's, one with a digest in the place of what cannot be."""
    digest = blake2b(f"{topic} {subscription}".encode(), digest_size=8).hexdigest()
    for name in (f"{topic}-{subscription}-DLQ", f"{topic}-{digest}-DLQ"):
        with suppress(InvalidNameError):
            return TopicName.parse(name)
    return TopicName(topic.tenant, topic.namespace_part, f"{digest}-DLQ")


def _key_name(key: bytes) -> str:
    return _KEY + blake2b(key, digest_size=16).hexdigest()


def _key_state(value: dict[str, Any]) -> tuple[bytes, KeyState]:
    gap = Gap(_parsed(value["position"]), value["attempts"])
    return base64.b64decode(value["key"]), KeyState(AfterDeadLetter[value["after"]], gap)


def _text(position: Position) -> str:
    return f"{position.ledger_id}:{position.entry_id}"


def _parsed(text: str) -> Position:
    ledger_id, _, entry_id = text.partition(":")
    return Position(int(ledger_id), int(entry_id))

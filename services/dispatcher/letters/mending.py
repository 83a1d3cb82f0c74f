"""Mended letters: changed copies of letters, each beside its original in the dead letter topic.

    begin, durably ──▶ publish the copy ──▶ put it in the place of the original, durably

A copy counts once it has the original's place; until then, neither can be redriven. An original has
one copy: all attempts to publish it have the same producer and sequence id, so the dead letter
topic's deduplication keeps the first alone. A mend that was interrupted after that is completed by
the next mend of the original, which is refused: its content may be another than the copy's.
"""

import asyncio
import json
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final, NamedTuple, Protocol, TypeVar

import structlog

from seqgate.api.ledger.v1.ledger_pb2 import Entry, StoredEntry
from seqgate.services.dispatcher.core.positions import Acknowledged
from seqgate.services.dispatcher.cursor.tenure import Tenure
from seqgate.services.dispatcher.entries import position_of
from seqgate.services.dispatcher.errors import InvalidMend, LetterNotMendable, TooManyReturns
from seqgate.services.dispatcher.letters.listing import Listing, mend_of
from seqgate.services.dispatcher.letters.marks import (
    MENDING_MAX,
    NEXT_MEND,
    Begun,
    Fate,
    mending_name,
)
from seqgate.services.dispatcher.letters.operations import Action, Operation
from seqgate.services.dispatcher.letters.returns import Returns, too_many_settled
from seqgate.services.dispatcher.ports import (
    LETTER_BYTES_MAX,
    MEND,
    PRODUCER,
    PROPERTIES_MAX,
    DeadLetterTopics,
    InvalidProperty,
    LedgerUnavailable,
    LetterRefused,
    Log,
)
from seqgate.services.errors import DomainError
from seqgate.types import Position, TopicName

log = structlog.get_logger()

ATTEMPTS_MAX: Final = 3
"""How many sequence ids a mend takes, one after the other, if each is overtaken."""

T = TypeVar("T")


class Retrying(Protocol):
    """As Work.repeated."""

    def __call__(
        self, do: Callable[[], Awaitable[T]], *, unless: type[DomainError] | None = None
    ) -> Awaitable[T]: ...


class Amendment(NamedTuple):
    """What a mend changes; `payload` None: the payload stays."""

    payload: bytes | None
    put: Mapping[str, str]
    remove: Sequence[str]


class Mends:
    """The mends of one subscription's letters."""

    def __init__(
        self,
        tenure: Tenure,
        returns: Returns,
        letters: DeadLetterTopics,
        entries: Log,
        repeated: Retrying,
        changing: asyncio.Lock,
    ) -> None:
        """`changing` is held while the subscription's durable state is loaded again: what was read
        before a change must not replace it."""
        self._changing = changing
        self._names = {"topic": str(tenure.topic), "subscription": tenure.name}
        self._tenure = tenure
        self._returns = returns
        self._letters = letters
        self._log = entries
        self._repeated = repeated

    async def mend(
        self,
        listing: Listing,
        change: Amendment,
        operation: Operation,
        acknowledged: Acknowledged,
    ) -> Operation:
        """Mend the letter of an operation, which gets its number and the mended letter. One at a
        time. Once begun, it completes.

        Raises:
            LetterNotMendable, InvalidMend, TooManyReturns, LedgerUnavailable, EntryCorrupt: nothing
                changed.
            LetterRefused: the dead letter topic refuses messages, for the time being. The letter
                cannot be redriven until its mend is repeated.
        """
        (letter,) = operation.letters
        where = listing.dead_letter_topic
        begun = self._returns.marks.mending.get(mending_name(where, letter))
        if begun is not None and (found := await _copy(listing, letter, begun)) is not None:
            made = await self._complete(where, position_of(found), _told(operation, found))
            if made.request_id == operation.request_id:
                return made
            raise LetterNotMendable(
                f"letter {letter} cannot be mended: a request that was interrupted mended it",
                letter=letter,
                dead_letter_topic=where,
                successor=made.successor,
            )
        entry = await listing.get(letter)
        if because := self._why_not(listing, letter, entry, acknowledged):
            raise LetterNotMendable(
                f"letter {letter} cannot be mended: {because}",
                letter=letter,
                dead_letter_topic=where,
            )
        assert entry is not None
        copy = mended(entry, change, operation)
        self._check_room(where, letter)
        return await self._publish(listing, letter, copy, operation, begun)

    def _why_not(
        self,
        listing: Listing,
        letter: Position,
        entry: StoredEntry | None,
        acknowledged: Acknowledged,
    ) -> str:
        if entry is not None and entry.metadata.HasField("num_messages_in_batch"):
            return "it is a batch"
        if entry is not None and entry.metadata.num_chunks_from_msg > 1:
            return "it is a large message"
        return self._returns.why_settled(listing, letter, entry, acknowledged, is_mend=True)

    def _check_room(self, where: TopicName, letter: Position) -> None:
        marks = self._returns.marks
        if marks.are_full_with([(where, letter)], Fate.MENDED):
            raise too_many_settled()
        if mending_name(where, letter) not in marks.mending and len(marks.mending) >= MENDING_MAX:
            raise TooManyReturns(
                f"too many interrupted mends (limit {MENDING_MAX}): repeat them",
                retry_after_s=60.0,
                mending_max=MENDING_MAX,
            )

    async def _publish(
        self,
        listing: Listing,
        letter: Position,
        copy: Entry,
        operation: Operation,
        begun: Begun | None,
    ) -> Operation:
        where, is_new = listing.dead_letter_topic, begun is None
        for _ in range(ATTEMPTS_MAX):
            begun = begun or await self._begin(where, letter)
            copy.metadata.producer_name, copy.metadata.sequence_id = begun.producer, begun.number
            added = await self._repeated(
                lambda: self._letters.add(where, copy), unless=LetterRefused
            )
            if added.refused:
                if is_new:  # else an earlier attempt may be there
                    await self._forget(where, letter)
                raise InvalidMend(f"the dead letter topic refuses it: {added.refused}")
            place = added.position
            if place is None:  # an earlier attempt is there, or a higher number overtook it
                found = await _copy(listing, letter, begun)
                place = None if found is None else position_of(found)
            if place is not None:
                return await self._complete(where, place, operation)
            begun = None
        raise LedgerUnavailable("the mend is overtaken by others", retry_after_s=1.0)

    async def _begin(self, where: TopicName, letter: Position) -> Begun:
        """Make the number under which a letter is mended durable."""
        last = (await self._log.ends(where)).last
        marks = self._returns.marks

        async def begin() -> Begun:
            async with self._changing, self._returns.writing:
                new = f"{PRODUCER}mend/{uuid.uuid4().hex[:16]}"
                producer, number = marks.next_mend or (new, 1)
                begun, following = Begun(producer, number, last), (producer, number + 1)
                name = mending_name(where, letter)
                put = {name: begun.to_text(), NEXT_MEND: json.dumps(following)}
                await self._tenure.set_properties(put, ())
                marks.mending[name] = begun
                marks.next_mend = following
                return begun

        return await self._made(begin)

    async def _complete(
        self, where: TopicName, successor: Position, operation: Operation
    ) -> Operation:
        """Put a mended letter in the place of its original."""
        returns, marks = self._returns, self._returns.marks
        letter = operation.letters[0]

        async def complete() -> Operation:
            async with self._changing, returns.writing:
                made = returns.operations.numbered(operation)._replace(successor=successor)
                put, remove = returns.operations.change(made)
                pages = marks.with_letters([(where, letter)], Fate.MENDED, successor)
                name = mending_name(where, letter)
                await self._tenure.set_properties(put | pages.texts, [*remove, name])
                marks.apply(pages)
                marks.mending.pop(name, None)
                returns.operations.record(made)
                return made

        made = await self._made(complete)
        log.info(
            "dead letter mended",
            **self._names,
            letter=str(letter),
            successor=str(successor),
            caller=operation.caller,
        )
        return made

    async def _forget(self, where: TopicName, letter: Position) -> None:
        name = mending_name(where, letter)

        async def forget() -> None:
            async with self._changing, self._returns.writing:
                await self._tenure.set_properties({}, [name])
                self._returns.marks.mending.pop(name, None)

        await self._repeated(forget)

    async def _made(self, change: Callable[[], Awaitable[T]]) -> T:
        try:
            return await self._repeated(change, unless=InvalidProperty)
        except InvalidProperty as error:
            raise too_many_settled() from error


def mended(letter: StoredEntry, change: Amendment, operation: Operation) -> Entry:
    """A changed copy of a letter, without its producer and sequence id. Raises InvalidMend."""
    entry = Entry(payload=letter.payload)
    metadata = entry.metadata
    metadata.CopyFrom(letter.metadata)
    if change.payload is not None:
        entry.payload = change.payload
        for name in ("compression", "uncompressed_size", "payload_crc32c"):
            metadata.ClearField(name)
    properties = metadata.properties
    for name in change.remove:
        properties.pop(name, None)
    for name, value in change.put.items():
        properties[name] = value
    about = [str(position_of(letter)), operation.request_id, operation.caller, operation.at_ms]
    properties[MEND] = json.dumps(about, ensure_ascii=False)
    if len(properties) > PROPERTIES_MAX:
        raise InvalidMend(
            f"too many properties (limit {PROPERTIES_MAX}, with those of dead letters)", field="put"
        )
    if metadata.ByteSize() > LETTER_BYTES_MAX:
        raise InvalidMend(
            f"properties too large (limit {LETTER_BYTES_MAX:,} bytes of metadata)", field="put"
        )
    return entry


async def _copy(listing: Listing, letter: Position, begun: Begun) -> StoredEntry | None:
    """The published copy of a letter whose mend has begun; None: there is none. Raises
    LedgerUnavailable, EntryCorrupt."""

    def is_copy(entry: StoredEntry) -> bool:
        mend = mend_of(entry.metadata)
        return mend is not None and mend.original == letter

    after = begun.after
    while True:
        page = await listing.page(after, 1, is_copy)
        if page.letters:
            return page.letters[0]
        if page.last is None:
            return None
        after = page.last


def _told(operation: Operation, copy: StoredEntry) -> Operation:
    """The operation that published a copy of a letter, as the copy tells."""
    mend = mend_of(copy.metadata)
    assert mend is not None
    return operation._replace(
        action=Action.MEND, request_id=mend.request_id, caller=mend.caller, at_ms=mend.at_ms
    )

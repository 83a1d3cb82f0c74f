"""The admin client: topics, deduplication policies, subscriptions, cursors, and explanations."""

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple, TypeVar

from google.protobuf.duration_pb2 import Duration

from seqgate.api.cursor.v1 import cursor_pb2
from seqgate.api.dedup.v1 import dedup_pb2
from seqgate.api.dispatcher.v1 import dispatcher_pb2
from seqgate.api.ledger.v1 import ledger_pb2
from seqgate.client._calls import Calls
from seqgate.client._codec import decode_entry, position_of
from seqgate.client._letters import (
    DeadLetterLife,
    FailedDelivery,
    LetterCalls,
    LetterMend,
    failures_of,
    life_of,
    mend_of,
)
from seqgate.client._life import MessageEvent, MessageLife, SubscriptionLife, life
from seqgate.client._log import before, to_wire
from seqgate.client._message import Message
from seqgate.client._reader import EARLIEST, LATEST
from seqgate.client._redrives import (
    ESTIMATE_TIMEOUT_S,
    RedriveEstimate,
    RedriveInfo,
    redrive_estimate,
    redrive_info,
    selection,
)
from seqgate.client._subscribing import Place, start_to_wire
from seqgate.errors import InvalidRequestError
from seqgate.message_id import ChunkMessageId, MessageId
from seqgate.times import duration, milliseconds
from seqgate.types import Position, TopicName

PAGE: Final = 1_000
"""How many objects a listing asks for at once."""

V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class TopicInfo:
    """A topic.

    Attributes:
        name: tenant/namespace/name.
        created_at: when it was created.
        first, last: its first and its last entry; None: it has none.
        entries, messages, size_bytes: what its log has.
        connected_producers: how many are connected to the ledger that answers.
        entries_to_replay: about how many entries deduplication has yet to replay.
    """

    name: str
    created_at: datetime
    first: MessageId | None
    last: MessageId | None
    entries: int
    messages: int
    size_bytes: int
    connected_producers: int
    entries_to_replay: int


@dataclass(frozen=True, slots=True)
class Trimmed:
    """What a trim removed.

    Attributes:
        removed_entries: how many entries were removed.
        first: the first entry that is left; None: none is.
        held_back_by: the cursors that have not acknowledged more.
    """

    removed_entries: int
    first: MessageId | None
    held_back_by: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CursorInfo:
    """A cursor.

    Attributes:
        mark_delete: everything up to here is acknowledged; None: nothing is.
        acknowledged_entries: how many entries beyond it are.
        partial_batches: how many batches are acknowledged in part.
        properties: the cursor's own.
        revision: grows with each change of its position or properties.
        owner: who holds its lease; None: nobody ever did.
    """

    topic: str
    name: str
    mark_delete: Position | None
    acknowledged_entries: int
    partial_batches: int
    properties: Mapping[str, str]
    revision: int
    created_at: datetime
    owner: str | None


@dataclass(frozen=True, slots=True)
class SubscriptionInfo:
    """A subscription.

    Attributes:
        mark_delete: everything up to here is acknowledged; None: nothing is.
        acknowledged_entries: how many entries beyond it are.
        owner: the address of the dispatcher instance that owns it; None: none does.
    """

    topic: str
    name: str
    mark_delete: Position | None
    acknowledged_entries: int
    properties: Mapping[str, str]
    created_at: datetime
    owner: str | None


@dataclass(frozen=True, slots=True)
class PolicyValues:
    """Values of a deduplication policy; None: the level above decides.

    Attributes:
        enabled: whether topics deduplicate.
        producer_inactivity_timeout_s: seconds after which an inactive producer is forgotten, in
            whole minutes, at most 365 days; 0: never.
        max_producers: the most producers that a topic tracks: 1 to 100,000.
        evicts_when_full: on one more producer, forget the longest inactive one, instead of refusing
            it.
        snapshot_entries: a snapshot is taken after this many entries: at most 1,000,000; 0: not by
            count.
        snapshot_interval_s: a snapshot is taken this many seconds after a new entry, whole ones, at
            most a day; 0: not by time.
    """

    enabled: bool | None = None
    producer_inactivity_timeout_s: int | None = None
    max_producers: int | None = None
    evicts_when_full: bool | None = None
    snapshot_entries: int | None = None
    snapshot_interval_s: int | None = None


@dataclass(frozen=True, slots=True)
class DeduplicationInfo:
    """A topic's deduplication.

    Attributes:
        state: ACTIVE, REPLAYING, or as TopicState in dedup.proto names it.
        policy: the values in effect; none is None.
        confirmed: the state covers the log up to here; None: no entry.
        entries_to_replay: how many entries it lacks.
        producers: how many it tracks.
        duplicates: how many publications it judged duplicates, since Redis last lost the state.
        snapshot: the newest snapshot covers the log up to here; None: there is none, or
            `snapshot_unknown`.
        snapshot_unknown: whether it is unknown if there is a snapshot.
    """

    state: str
    policy: PolicyValues
    confirmed: Position | None
    entries_to_replay: int
    producers: int
    duplicates: int
    snapshot: Position | None
    snapshot_unknown: bool


@dataclass(frozen=True, slots=True)
class Verdict:
    """What would become of a message if it was sent now.

    Attributes:
        verdict: NEW, DUPLICATE, or as ClaimVerdict in dedup.proto names it.
        explanation: why, in one or two sentences.
        persisted_sequence_id: the producer's last one that is stored; None: none is known.
        pushed_sequence_id: its last one that was accepted; None: none is known.
    """

    verdict: str
    explanation: str
    persisted_sequence_id: int | None
    pushed_sequence_id: int | None


class Reason(NamedTuple):
    """One reason why messages are not delivered.

    Attributes:
        reason: as Reason in dispatcher.proto names it.
        text: the reason as a sentence.
        consumer: the consumer concerned.
        position: the entry concerned.
        since: when it began.
        until: when it ends by itself; None: only an event ends it.
    """

    reason: str
    text: str
    consumer: str | None
    position: Position | None
    since: datetime | None
    until: datetime | None


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A message that a subscription dead-lettered: an entry, which may be a batch or a chunk.

    Attributes:
        id: its id in the dead letter topic, which names the letter.
        topic: the dead letter topic.
        origin: the message's id in the subscription's topic.
        key: the message's key.
        producer, sequence_id: the message's; of a batch, the lowest sequence id.
        properties: the message's own.
        messages: how many messages the entry has.
        payload_bytes: the size of its payload, as stored.
        chunk: of a chunk of a large message, its number from 0; None: it is none.
        at: when it reached the dead letter topic.
        reason: REDELIVERIES, TAIL, LARGE_MESSAGE or GIVEN_UP, as DeadLetterReason in
            dispatcher.proto names them; UNSPECIFIED: not known.
        attempts: how many deliveries failed.
        failures: the latest of them, the oldest first.
        holds_key: whether later messages of its key wait until the key is released.
        waiting_entries: how many entries wait behind it in memory; with `lags`, more wait in the
            log.
        redriven: whether its message is on its way back, or was settled.
        redrives: how often its message was redriven before.
        state: what became of it: DEAD (nothing yet), RETURNING, REDRIVEN, DISCARDED, MENDED (its
            successor took its place), or MENDING (its mend was interrupted: mend it again).
        successor: the mended letter that took its place; None: it was not mended.
        mend: of a mended letter, what it was made of, by whom, and when; None: it is none.
        lives: the earlier lives of its message, the oldest first; the latest ones, if they are
            long.
        chunks: of a large message, how many chunks it has, each a letter; 0: it is none. Any of
            them names all; the last one is listed.
    """

    id: MessageId
    topic: str
    origin: MessageId
    key: bytes
    producer: str
    sequence_id: int
    properties: Mapping[str, str]
    messages: int
    payload_bytes: int
    chunk: int | None
    at: datetime
    reason: str
    attempts: int
    failures: tuple[FailedDelivery, ...]
    holds_key: bool
    waiting_entries: int
    lags: bool
    redriven: bool
    redrives: int
    state: str = "DEAD"
    successor: MessageId | None = None
    mend: LetterMend | None = None
    lives: tuple[DeadLetterLife, ...] = ()
    chunks: int = 0


@dataclass(frozen=True, slots=True)
class Redrive:
    """Dead letters that were taken back to their subscription.

    Attributes:
        number: counts the subscription's redrives; 0: a dry run.
        letters: how many letters it has.
        repeated: whether an earlier request with the same id made it.
    """

    number: int
    letters: int
    repeated: bool


class Admin(LetterCalls):
    """Manages topics, policies, subscriptions and cursors. Made by Client.admin; it needs no close.

    Topics are named as everywhere: tenant/namespace/name, or a name in public/default. Each method
    raises InvalidNameError for an invalid name, UnavailableError if the service does not answer in
    time, PermissionDeniedError without the right to administer, and ValueError if the client was
    not given the service's address.
    """

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    # ---- topics

    async def create_topic(self, topic: str) -> TopicInfo:
        """Create a topic; an existing one is left unchanged."""
        request = ledger_pb2.CreateTopicRequest(topic=_name(topic))
        return _topic((await self._calls.call(request)).topic)

    async def topic(self, topic: str) -> TopicInfo:
        """A topic. Raises NotFoundError."""
        request = ledger_pb2.GetTopicRequest(topic=_name(topic))
        return _topic((await self._calls.call(request)).topic)

    async def topics(self, prefix: str = "") -> AsyncIterator[TopicInfo]:
        """The topics whose full name has this prefix, sorted by name. A prefix without a slash is
        one of names in public/default."""
        if prefix and "/" not in prefix:
            prefix = f"public/default/{prefix}"
        request = ledger_pb2.ListTopicsRequest(prefix=prefix, page_size=PAGE)
        async for each in self._calls.pages(request):
            yield _topic(each)

    async def delete_topic(self, topic: str, *, force: bool = False) -> None:
        """Delete a topic with its entries, its deduplication state and its cursors.

        Args:
            force: also with connected producers, which fail.

        Raises:
            NotFoundError: there is no such topic, or no longer.
            InUseError: producers are connected.
        """
        request = ledger_pb2.DeleteTopicRequest(topic=_name(topic), force=force)
        await self._calls.call(request)

    async def trim_topic(self, topic: str, before: MessageId) -> Trimmed:
        """Remove a topic's messages before this one for good, as far as every cursor of the topic
        has acknowledged them. Raises NotFoundError."""
        first = before.first_chunk if isinstance(before, ChunkMessageId) else before
        request = ledger_pb2.TrimTopicRequest(topic=_name(topic), before=to_wire(first.position))
        answer = await self._calls.call(request)
        return Trimmed(
            answer.removed_entries, _id(_optional(answer, "first")), tuple(answer.held_back_by)
        )

    # ---- deduplication

    async def deduplication(self, topic: str) -> DeduplicationInfo:
        """A topic's deduplication and the policy in effect. Raises NotFoundError."""
        found = await self._calls.call(dedup_pb2.GetTopicStatusRequest(topic=_name(topic)))
        return DeduplicationInfo(
            state=_enum(dedup_pb2.TopicState, found.state),
            policy=_policy(found.policy),
            confirmed=_position(_optional(found, "confirmed")),
            entries_to_replay=found.entries_remaining,
            producers=found.producers,
            duplicates=found.counts.duplicate_claims,
            snapshot=_position(_optional(found, "snapshot")),
            snapshot_unknown=found.snapshot_unknown,
        )

    async def policy(self, level: str) -> PolicyValues:
        """The values that `set_policy` has set on a topic, or on a namespace: tenant/namespace."""
        found = await self._calls.call(dedup_pb2.GetPolicyRequest(**_level(level)))
        given = {field.name for field, _ in found.values.ListFields()}
        return _policy(found.values, given)

    async def set_policy(self, level: str, values: PolicyValues) -> None:
        """Set the policy of a topic or of a namespace, replacing what was set there before. When
        this returns, it is in effect on all instances. Without any value, the level's policy is
        removed. Raises InvalidRequestError if a value is out of bounds."""
        request = dedup_pb2.SetPolicyRequest(values=_policy_to_wire(values), **_level(level))
        await self._calls.call(request)

    async def take_snapshot(self, topic: str) -> Position | None:
        """Take a snapshot of the deduplication state now. Returns the last entry that it covers;
        None: there is nothing to keep."""
        answer = await self._calls.call(dedup_pb2.TakeSnapshotRequest(topic=_name(topic)))
        return _position(_optional(answer, "position"))

    async def explain_publication(self, topic: str, producer: str, sequence_id: int) -> Verdict:
        """What would become of a message if it was sent now, and why. Changes nothing."""
        request = dedup_pb2.ExplainRequest(
            topic=_name(topic), producer_name=producer, sequence_id=sequence_id
        )
        found = await self._calls.call(request)
        return Verdict(
            _enum(dedup_pb2.ClaimVerdict, found.verdict),
            found.explanation,
            _optional(found.producer, "persisted_sequence_id"),
            _optional(found.producer, "pushed_sequence_id"),
        )

    # ---- subscriptions

    async def create_subscription(
        self,
        topic: str,
        subscription: str,
        *,
        start: Place = EARLIEST,
        properties: Mapping[str, str] | None = None,
    ) -> SubscriptionInfo:
        """Create a subscription; an existing one is left unchanged.

        Args:
            start: where it starts: for a message in a batch, with the whole batch; for a large
                message, with its first chunk.
            properties: at most 64, of at most 4 KiB each.

        Raises:
            NotFoundError: there is no such topic.
            InvalidRequestError: an argument is invalid.
        """
        request = dispatcher_pb2.CreateSubscriptionRequest(
            topic=_name(topic),
            subscription=subscription,
            start=start_to_wire(start),
            properties=properties,
        )
        return _subscription((await self._calls.call(request)).subscription)

    async def subscription(self, topic: str, subscription: str) -> SubscriptionInfo:
        """A subscription. Raises NotFoundError."""
        request = dispatcher_pb2.GetSubscriptionRequest(
            topic=_name(topic), subscription=subscription
        )
        return _subscription((await self._calls.call(request)).subscription)

    async def subscriptions(self, topic: str) -> AsyncIterator[SubscriptionInfo]:
        """A topic's subscriptions, sorted by name."""
        request = dispatcher_pb2.ListSubscriptionsRequest(topic=_name(topic), page_size=PAGE)
        async for each in self._calls.pages(request):
            yield _subscription(each)

    async def reset_subscription(
        self, topic: str, subscription: str, to: Place
    ) -> SubscriptionInfo:
        """Move a subscription forwards or backwards. Acknowledgements beyond the place are
        discarded; consumers stay connected. Raises NotFoundError."""
        request = dispatcher_pb2.ResetSubscriptionRequest(
            topic=_name(topic), subscription=subscription, start=start_to_wire(to)
        )
        return _subscription((await self._calls.call(request)).subscription)

    async def update_subscription(
        self,
        topic: str,
        subscription: str,
        *,
        put: Mapping[str, str] | None = None,
        remove: tuple[str, ...] = (),
    ) -> SubscriptionInfo:
        """Set and remove properties of a subscription. Raises NotFoundError."""
        request = dispatcher_pb2.UpdateSubscriptionPropertiesRequest(
            topic=_name(topic), subscription=subscription, put=put, remove=remove
        )
        return _subscription((await self._calls.call(request)).subscription)

    async def delete_subscription(
        self, topic: str, subscription: str, *, force: bool = False
    ) -> None:
        """Delete a subscription and its acknowledgements.

        Args:
            force: also with connected consumers, which are disconnected.

        Raises:
            NotFoundError: there is no such subscription, or no longer.
            InUseError: consumers are connected.
        """
        request = dispatcher_pb2.DeleteSubscriptionRequest(
            topic=_name(topic), subscription=subscription, force=force
        )
        await self._calls.call(request)

    async def release_key(self, topic: str, subscription: str, key: str | bytes) -> None:
        """Deliver a key again that a dead letter holds up."""
        request = dispatcher_pb2.ReleaseKeyRequest(
            topic=_name(topic), subscription=subscription, key=_key(key)
        )
        await self._calls.call(request)

    async def dead_letters(
        self,
        topic: str,
        subscription: str,
        *,
        key: str | bytes | None = None,
        dead_letter_topic: str = "",
    ) -> AsyncIterator[DeadLetter]:
        """A subscription's dead letters, the oldest first.

        Args:
            key: only the letters of this key.
            dead_letter_topic: the topic to look in; empty: the one that the subscription uses.

        Raises:
            NotFoundError: there is no such subscription.
        """
        request = dispatcher_pb2.ListDeadLettersRequest(
            topic=_name(topic),
            subscription=subscription,
            key=None if key is None else _key(key),
            dead_letter_topic=dead_letter_topic and _name(dead_letter_topic),
            page_size=PAGE,
        )
        while True:
            page = await self._calls.call(request)
            for each in page.letters:
                yield _dead_letter(each, page.dead_letter_topic)
            if not page.next_page_token:
                return
            request.page_token = page.next_page_token

    async def dead_letter(
        self,
        topic: str,
        subscription: str,
        letter: MessageId,
        *,
        dead_letter_topic: str = "",
    ) -> tuple[DeadLetter, list[Message]]:
        """A dead letter, by its id in the dead letter topic, and its messages as they are stored
        there: one, or those of a batch. A chunk is part of a message, and has none.

        Raises:
            NotFoundError: there is no such subscription, or no such letter of it.
        """
        request = dispatcher_pb2.GetDeadLetterRequest(
            topic=_name(topic),
            subscription=subscription,
            position=to_wire(letter.position),
            dead_letter_topic=dead_letter_topic and _name(dead_letter_topic),
        )
        found = await self._calls.call(request)
        messages = (
            []
            if found.letter.HasField("chunk_id")
            else decode_entry(found.dead_letter_topic, found.entry)
        )
        return _dead_letter(found.letter, found.dead_letter_topic), messages

    async def redrive(
        self,
        topic: str,
        subscription: str,
        letters: Iterable[MessageId],
        *,
        request_id: str,
        dry_run: bool = False,
        dead_letter_topic: str = "",
    ) -> Redrive:
        """Take dead letters back to their subscription, all or none: each message is delivered and
        acknowledged once more, under the rules of its key.

        Args:
            letters: their ids in the dead letter topic: 1 to 100, each once. A chunk of a large
                message names all of its chunks.
            request_id: identifies the request, of 1 to 64 bytes: repeat a call with the same one.
            dry_run: check the letters and change nothing.

        Raises:
            InvalidRequestError: too many letters, or an invalid request id.
            InUseError: one of them cannot be redriven: it is missing, on its way back, was
                redriven, mended or discarded before, or is a large message that lacks chunks.
            LimitExceededError: too many letters are on their way back.
        """
        request = dispatcher_pb2.RedriveDeadLettersRequest(
            topic=_name(topic),
            subscription=subscription,
            dead_letter_topic=dead_letter_topic and _name(dead_letter_topic),
            positions=[to_wire(each.position) for each in letters],
            request_id=request_id,
            dry_run=dry_run,
        )
        made = await self._calls.call(request)
        return Redrive(made.redrive, made.letters, made.repeated)

    async def start_redrive(
        self,
        topic: str,
        subscription: str,
        *,
        request_id: str,
        key: str | bytes | None = None,
        expression: str = "",
        letters_per_s: int = 0,
        dead_letter_topic: str = "",
    ) -> RedriveInfo:
        """Start a redrive of many dead letters: of all, or those selected. It survives its caller
        and the instance that owns the subscription, and redrives each letter once.

        Args:
            request_id: identifies the request, of 1 to 64 bytes: repeat a call with the same one.
            key: only the letters of this key.
            expression: only the letters for which this is true: an expression as in a filter.
            letters_per_s: the most letters a second, up to 10,000; 0: as fast as consumers settle
                them.
            dead_letter_topic: where the letters are; empty: the topic that the subscription uses.

        Raises:
            InvalidRequestError: an argument is invalid.
            InUseError: another redrive of many runs.
            NotFoundError: there is no such subscription.
        """
        request = dispatcher_pb2.StartRedriveRequest(
            topic=_name(topic),
            subscription=subscription,
            dead_letter_topic=dead_letter_topic and _name(dead_letter_topic),
            selection=selection(_optional_key(key), expression),
            letters_per_second=letters_per_s,
            request_id=request_id,
        )
        return redrive_info((await self._calls.call(request)).redrive)

    async def estimate_redrive(
        self,
        topic: str,
        subscription: str,
        *,
        key: str | bytes | None = None,
        expression: str = "",
        dead_letter_topic: str = "",
        entries_max: int = 10_000,
    ) -> RedriveEstimate:
        """What `start_redrive` would redrive, and leave out and why. Changes nothing.

        Args:
            entries_max: look at no more entries than this, up to 100,000, and estimate the rest.

        Raises:
            InvalidRequestError: an argument is invalid.
            NotFoundError: there is no such subscription.
        """
        request = dispatcher_pb2.EstimateRedriveRequest(
            topic=_name(topic),
            subscription=subscription,
            dead_letter_topic=dead_letter_topic and _name(dead_letter_topic),
            selection=selection(_optional_key(key), expression),
            max_entries=entries_max,
        )
        return redrive_estimate(await self._calls.call(request, timeout_s=ESTIMATE_TIMEOUT_S))

    async def replay(
        self,
        topic: str,
        subscription: str,
        *,
        request_id: str,
        start: Place = EARLIEST,
        end: Place = LATEST,
        key: str | bytes | None = None,
        expression: str = "",
        letters_per_s: int = 0,
        create: bool = False,
    ) -> RedriveInfo:
        """Deliver a stretch of the topic once more to a subscription: messages that it has
        acknowledged. It is a redrive with a number, and touches no acknowledgement.

        Args:
            request_id, key, expression, letters_per_s: as for `start_redrive`.
            start, end: the first message, and the one after the last.
            create: create the subscription at the end of the log, unless it exists.

        Raises:
            InvalidRequestError: an argument is invalid.
            InUseError: another redrive of many runs.
            NotFoundError: there is no such topic, or no such subscription.
        """
        request = dispatcher_pb2.StartRedriveRequest(
            topic=_name(topic),
            subscription=subscription,
            selection=selection(_optional_key(key), expression, (start, end)),
            letters_per_second=letters_per_s,
            request_id=request_id,
            create_subscription=create,
        )
        return redrive_info((await self._calls.call(request)).redrive)

    async def estimate_replay(
        self,
        topic: str,
        subscription: str,
        *,
        start: Place = EARLIEST,
        end: Place = LATEST,
        key: str | bytes | None = None,
        expression: str = "",
        create: bool = False,
        entries_max: int = 10_000,
    ) -> RedriveEstimate:
        """What `replay` would deliver, and leave out and why. Changes nothing, and creates nothing.
        Arguments and errors are those of `replay` and `estimate_redrive`."""
        request = dispatcher_pb2.EstimateRedriveRequest(
            topic=_name(topic),
            subscription=subscription,
            selection=selection(_optional_key(key), expression, (start, end)),
            create_subscription=create,
            max_entries=entries_max,
        )
        return redrive_estimate(await self._calls.call(request, timeout_s=ESTIMATE_TIMEOUT_S))

    async def redrives(self, topic: str, subscription: str) -> list[RedriveInfo]:
        """The latest redrives and replays of a subscription, the newest first. Raises
        NotFoundError."""
        request = dispatcher_pb2.ListRedrivesRequest(topic=_name(topic), subscription=subscription)
        return [redrive_info(each) for each in (await self._calls.call(request)).redrives]

    async def redrive_info(self, topic: str, subscription: str, number: int) -> RedriveInfo:
        """A redrive or replay, by its number. Raises NotFoundError."""
        request = dispatcher_pb2.GetRedriveRequest(
            topic=_name(topic), subscription=subscription, number=number
        )
        return redrive_info((await self._calls.call(request)).redrive)

    async def stop_redrive(self, topic: str, subscription: str, number: int) -> RedriveInfo:
        """Stop a redrive or replay for good; one that has ended is left unchanged. Messages on
        their way stay on their way. Raises NotFoundError."""
        request = dispatcher_pb2.StopRedriveRequest(
            topic=_name(topic), subscription=subscription, number=number
        )
        return redrive_info((await self._calls.call(request)).redrive)

    async def explain_delivery(
        self,
        topic: str,
        subscription: str,
        *,
        key: str | bytes | None = None,
        message_id: MessageId | None = None,
    ) -> list[Reason]:
        """Why a key's messages, or one message, are not delivered: the nearest reason first.

        Raises:
            InvalidRequestError: neither or both of key and message_id are given.
            NotFoundError: there is no such subscription.
        """
        if (key is None) == (message_id is None):
            raise InvalidRequestError("give either a key or a message's id")
        request = dispatcher_pb2.ExplainRequest(topic=_name(topic), subscription=subscription)
        if key is not None:
            request.key = _key(key)
        if message_id is not None:
            request.position.CopyFrom(to_wire(message_id.position))
        return [_reason(each) for each in (await self._calls.call(request)).reasons]

    async def message_history(
        self, topic: str, subscription: str, message_id: MessageId
    ) -> SubscriptionLife:
        """What became of one message in one subscription, and what the subscription says of it now.
        Of a large message, its last chunk. Raises NotFoundError if there is no such subscription.
        """
        names = {"topic": _name(topic), "subscription": subscription}
        position = to_wire(message_id.position)
        found, why = await asyncio.gather(
            self._calls.call(dispatcher_pb2.GetMessageHistoryRequest(**names, position=position)),
            self.explain_delivery(topic, subscription, message_id=message_id),
        )
        since = _optional(found, "complete_since")
        return SubscriptionLife(
            subscription=subscription,
            events=tuple(map(_event, found.events)),
            complete_since=None if since is None else _time(since),
            letters=tuple(_dead_letter(each, found.dead_letter_topic) for each in found.letters),
            more_letters=found.more_letters,
            redrive=found.redrive or None,
            reasons=tuple(why),
            audit_topic=found.audit_topic or None,
            audit_missing=found.audit_missing,
        )

    async def message_life(
        self,
        topic: str,
        *,
        message_id: MessageId | None = None,
        producer: str | None = None,
        sequence_id: int | None = None,
        trace_id: str | None = None,
        since: datetime | None = None,
    ) -> MessageLife:
        """The life of one message: deduplication's verdict, its place in the log, and what became
        of it in each subscription that the caller may see. A service that does not answer, or
        refuses, leaves its part unknown; only the ledger must answer.

        Args:
            message_id: the message's id; or
            producer, sequence_id: its identity; or
            trace_id: the id of its producer's trace, as 32 hexadecimal digits. The first message of
                the trace is looked for among 20,000 entries.
            since: the time from which the trace is looked for; by default, the latest entries are.

        Raises:
            InvalidRequestError: none of these, or several, are given.
            NotFoundError: there is no such topic, or no such message yet, or no message of the
                trace among those entries.
        """
        return await life(
            self,
            self._calls,
            _name(topic),
            message_id=message_id,
            producer=producer,
            sequence_id=sequence_id,
            trace_id=trace_id,
            since=since,
        )

    # ---- cursors

    async def create_cursor(
        self,
        topic: str,
        cursor: str,
        *,
        start: Place = EARLIEST,
        properties: Mapping[str, str] | None = None,
    ) -> CursorInfo:
        """Create a cursor; an existing one is left unchanged.

        Args:
            start: everything before it counts as acknowledged.
            properties: at most 2,000, of at most 4 KiB each, and 4 MiB together.
        """
        name = _name(topic)
        place = await before(self._calls, name, start)
        request = cursor_pb2.CreateCursorRequest(
            topic=name, cursor=cursor, mark_delete=_wire(place), properties=properties
        )
        return _cursor((await self._calls.call(request)).cursor)

    async def cursor(self, topic: str, cursor: str) -> CursorInfo:
        """A cursor. Raises NotFoundError."""
        request = cursor_pb2.GetCursorRequest(topic=_name(topic), cursor=cursor)
        return _cursor((await self._calls.call(request)).cursor)

    async def cursors(self, topic: str = "") -> AsyncIterator[CursorInfo]:
        """The cursors of a topic, or of all topics, sorted by topic and name."""
        request = cursor_pb2.ListCursorsRequest(topic=topic and _name(topic), page_size=PAGE)
        async for each in self._calls.pages(request):
            yield _cursor(each)

    async def reset_cursor(self, topic: str, cursor: str, to: Place) -> CursorInfo:
        """Move a cursor forwards or backwards. What was acknowledged beyond the place is discarded.
        Raises NotFoundError, and InUseError if somebody holds its lease."""
        name = _name(topic)
        place = await before(self._calls, name, to)
        request = cursor_pb2.ResetCursorRequest(topic=name, cursor=cursor, mark_delete=_wire(place))
        return _cursor((await self._calls.call(request)).cursor)

    async def delete_cursor(self, topic: str, cursor: str) -> None:
        """Delete a cursor. Raises NotFoundError, and InUseError if somebody holds its lease."""
        await self._calls.call(cursor_pb2.DeleteCursorRequest(topic=_name(topic), cursor=cursor))


# ---- from the wire, and to it


def _name(topic: str) -> str:
    return str(TopicName.expand(topic))


def _level(text: str) -> dict[str, Any]:
    """A namespace (tenant/namespace), or else a topic."""
    if text.count("/") == 1:
        return {"namespace": TopicName.parse(f"{text}/a").namespace}
    return {"topic": _name(text)}


def _key(key: str | bytes) -> bytes:
    return key.encode() if isinstance(key, str) else key


def _optional_key(key: str | bytes | None) -> bytes | None:
    return None if key is None else _key(key)


def _optional(message: Any, field: str) -> Any:
    return getattr(message, field) if message.HasField(field) else None


def _position(wire: Any) -> Position | None:
    return None if wire is None else position_of(wire)


def _wire(place: Position | None) -> Any:
    return None if place is None else to_wire(place)


def _id(wire: Any) -> MessageId | None:
    return None if wire is None else MessageId(*position_of(wire))


def _time(wire: Any) -> datetime:
    return datetime.fromtimestamp(milliseconds(wire) / 1000, UTC)


def _enum(kind: Any, number: int) -> str:
    """An enum's value without the enum's name."""
    names = [each.name for each in kind.DESCRIPTOR.values]
    prefix = names[0].removesuffix("UNSPECIFIED")
    value = kind.DESCRIPTOR.values_by_number.get(number)
    return str(number) if value is None else value.name.removeprefix(prefix)


def _topic(wire: ledger_pb2.Topic) -> TopicInfo:
    return TopicInfo(
        name=wire.name,
        created_at=_time(wire.created),
        first=_id(_optional(wire, "first")),
        last=_id(_optional(wire, "last")),
        entries=wire.entries,
        messages=wire.messages,
        size_bytes=wire.bytes,
        connected_producers=wire.connected_producers,
        entries_to_replay=wire.entries_to_replay,
    )


def _cursor(wire: cursor_pb2.Cursor) -> CursorInfo:
    return CursorInfo(
        topic=wire.topic,
        name=wire.name,
        mark_delete=_position(_optional(wire, "mark_delete")),
        acknowledged_entries=wire.acknowledged_entries,
        partial_batches=wire.partial_batches,
        properties=dict(wire.properties),
        revision=wire.revision,
        created_at=_time(wire.created),
        owner=wire.lease.owner if wire.HasField("lease") else None,
    )


def _subscription(wire: dispatcher_pb2.Subscription) -> SubscriptionInfo:
    return SubscriptionInfo(
        topic=wire.topic,
        name=wire.name,
        mark_delete=_position(_optional(wire, "mark_delete")),
        acknowledged_entries=wire.acknowledged_entries,
        properties=dict(wire.properties),
        created_at=_time(wire.created),
        owner=wire.owner or None,
    )


def _reason(wire: dispatcher_pb2.Explanation) -> Reason:
    since, until = (_optional(wire, each) for each in ("since", "until"))
    return Reason(
        _enum(dispatcher_pb2.Reason, wire.reason),
        wire.text,
        wire.consumer or None,
        _position(_optional(wire, "position")),
        None if since is None else _time(since),
        None if until is None else _time(until),
    )


def _dead_letter(wire: dispatcher_pb2.DeadLetter, topic: str) -> DeadLetter:
    return DeadLetter(
        id=MessageId(*position_of(wire.position)),
        topic=topic,
        origin=MessageId(*position_of(wire.origin)),
        key=wire.key,
        producer=wire.producer_name,
        sequence_id=wire.sequence_id,
        properties=dict(wire.properties),
        messages=wire.num_messages,
        payload_bytes=wire.payload_bytes,
        chunk=_optional(wire, "chunk_id"),
        at=_time(wire.time),
        reason=_enum(dispatcher_pb2.DeadLetterReason, wire.reason),
        attempts=wire.attempts,
        failures=failures_of(wire.failures),
        holds_key=wire.holds_key,
        waiting_entries=wire.waiting_entries,
        lags=wire.lags,
        redriven=wire.redriven,
        redrives=wire.redrives,
        state=_enum(dispatcher_pb2.DeadLetterState, wire.state),
        successor=_id(_optional(wire, "successor")),
        mend=mend_of(wire.mend) if wire.HasField("mend") else None,
        lives=tuple(map(life_of, wire.lives)),
        chunks=wire.num_chunks,
    )


def _event(wire: dispatcher_pb2.MessageEvent) -> MessageEvent:
    until = _optional(wire, "until")
    return MessageEvent(
        kind=_enum(dispatcher_pb2.MessageEventKind, wire.kind),
        at=_time(wire.time),
        consumer=wire.consumer or None,
        failure=_enum(dispatcher_pb2.DeliveryFailure, wire.failure) if wire.failure else None,
        attempts=wire.attempts,
        filter=wire.filter or None,
        filter_version=wire.filter_version,
        number=wire.number,
        target=wire.target or None,
        until=None if until is None else _time(until),
        indexes=tuple(wire.indexes),
        text=wire.text,
        caller=wire.caller or None,
    )


_ON_FULL: Final = {
    True: dedup_pb2.FULL_TOPIC_ACTION_EVICT,
    False: dedup_pb2.FULL_TOPIC_ACTION_REFUSE,
    None: dedup_pb2.FULL_TOPIC_ACTION_UNSPECIFIED,
}

_POLICY_FIELDS: Final = {
    "producer_inactivity_timeout_s": "producer_inactivity_timeout",
    "evicts_when_full": "on_full",
    "snapshot_interval_s": "snapshot_interval",
}
"""The values whose fields on the wire have other names."""


def _policy(wire: Any, given: set[str] | None = None) -> PolicyValues:
    """The values of a policy; only those of the fields `given`, if it is."""
    values: dict[str, Any] = {}
    for field in fields(PolicyValues):
        name = _POLICY_FIELDS.get(field.name, field.name)
        if given is not None and name not in given:
            continue
        value = getattr(wire, name)
        if name == "on_full":
            value = value == dedup_pb2.FULL_TOPIC_ACTION_EVICT
        elif isinstance(value, Duration):
            value = value.seconds
        values[field.name] = value
    return PolicyValues(**values)


def _policy_to_wire(values: PolicyValues) -> dedup_pb2.PolicyValues:
    def span(seconds: int | None) -> Duration | None:
        return None if seconds is None else duration(seconds * 1000)

    return dedup_pb2.PolicyValues(
        enabled=values.enabled,
        producer_inactivity_timeout=span(values.producer_inactivity_timeout_s),
        max_producers=values.max_producers,
        on_full=_ON_FULL[values.evicts_when_full],
        snapshot_entries=values.snapshot_entries,
        snapshot_interval=span(values.snapshot_interval_s),
    )

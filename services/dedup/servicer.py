"""The wire of the dedup service: check, translate, call, translate back."""

from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import ExitStack
from typing import Any, Final

from google.protobuf.timestamp_pb2 import Timestamp
from grpc import aio
from opentelemetry.trace import get_current_span

from seqgate.api.dedup.v1 import dedup_pb2 as pb
from seqgate.api.dedup.v1 import dedup_pb2_grpc as pb_grpc
from seqgate.api.entry.v1 import entry_pb2
from seqgate.telemetry import names
from seqgate.telemetry.spans import asked, rpc_attributes
from seqgate.types import (
    SEQUENCE_ID_MAX,
    Chunk,
    InvalidChunkError,
    InvalidNameError,
    Position,
    TopicName,
    check_chunk,
    check_producer_name,
)
from services.dedup.core.policy import (
    EffectivePolicy,
    InvalidPolicy,
    OnFull,
    Policy,
    Source,
    check_namespace,
    check_number,
)
from services.dedup.core.sequence import NEVER, Claim, Marks, Verdict
from services.dedup.core.topic import (
    Applied,
    Behind,
    Changed,
    Confirmation,
    Judged,
    Persisted,
    ProducerClaims,
    ProducerEntries,
    Tracked,
    Withdrawal,
    Writer,
)
from services.dedup.policies import DurablePolicies, Level
from services.dedup.service import Deduplication, Disabled, Status, all_new
from services.errors import (
    DomainError,
    InvalidPage,
    InvalidProducerName,
    InvalidSequenceId,
    InvalidTopicName,
    Kind,
)
from services.runtime.drain import Drain
from services.runtime.load import weighed
from services.runtime.refusal_log import in_stream

CLAIMS_MAX: Final = 10_000
"""How many claims one Admit may hold."""

ENTRIES_MAX: Final = 10_000
"""How many entries one confirmation may list."""

ENTRY_COUNT_MAX: Final = 1_000_000_000
"""How many entries, markers included, one confirmation may cover."""

ENTRIES_REMAINING_MAX: Final = 2**53 - 1
"""The most entries that a confirmation may announce; Lua counts exactly up to here."""

APPEND_TIME_MAX_MS: Final = 253_402_300_799_999
"""The latest append time, in milliseconds since 1970: the end of the year 9999, as for a
google.protobuf.Timestamp."""

PRODUCERS_MAX: Final = 10_000
"""How many producers one request may name."""

LOADED_PRODUCERS_MAX: Final = 100_000
"""How many producers one LoadState may hold."""

PAGE_DEFAULT: Final = 1_000
PAGE_MAX: Final = 10_000
"""How many producers a page holds, unless asked otherwise, and at most."""

Context = aio.ServicerContext[Any, Any]


class InvalidClaim(DomainError):
    """Claims are too many, repeat a producer, or a range ends before it starts."""

    kind = Kind.INVALID
    reason = "INVALID_CLAIM"


class InvalidWriter(DomainError):
    """A writer or a confirmation is missing, or its positions or epochs cannot be."""

    kind = Kind.INVALID
    reason = "INVALID_WRITER"


class InvalidState(DomainError):
    """A state to be loaded has no beginning, two, a producer twice, or a value that cannot be."""

    kind = Kind.INVALID
    reason = "INVALID_STATE"


class DedupServicer(pb_grpc.DedupServiceServicer):
    """See dedup.proto."""

    def __init__(
        self, deduplication: Deduplication, policies: DurablePolicies, drain: Drain
    ) -> None:
        self._deduplication = deduplication
        self._policies = policies
        self._drain = drain

    async def Admit(self, request: pb.AdmitRequest, context: Context) -> pb.AdmitResponse:
        return await self._admit(request)

    async def Confirm(self, request: pb.ConfirmRequest, context: Context) -> pb.ConfirmResponse:
        return await self._confirm(request)

    async def Rollback(self, request: pb.RollbackRequest, context: Context) -> pb.RollbackResponse:
        return await self._rollback(request)

    # A coroutine that reads and writes on the context; grpc's stubs know only generators.
    async def Exchange(  # type: ignore[override]
        self, request_iterator: AsyncIterator[pb.ExchangeRequest], context: Context
    ) -> None:
        async for request in self._drain.requests(context):
            await context.write(await self._exchange(request))
        if self._drain.begun:
            await context.write(pb.ExchangeResponse(draining=pb.Draining()))

    async def KeepProducers(
        self, request: pb.KeepProducersRequest, context: Context
    ) -> pb.KeepProducersResponse:
        topic = _topic(request.topic)
        if len(request.producer_names) > PRODUCERS_MAX:
            raise InvalidProducerName(
                f"at most {PRODUCERS_MAX:,} producers at a time", field="producer_names"
            )
        names = [_producer(name) for name in request.producer_names]
        keep_within_s = await self._deduplication.keep(topic, names, only_due=request.only_due)
        return pb.KeepProducersResponse(keep_within_s=keep_within_s)

    async def GetProducer(
        self, request: pb.GetProducerRequest, context: Context
    ) -> pb.GetProducerResponse:
        name = _producer(request.producer_name)
        tracked = await self._deduplication.producer(_topic(request.topic), name)
        return pb.GetProducerResponse(producer=_to_producer(name, tracked))

    async def ListProducers(
        self, request: pb.ListProducersRequest, context: Context
    ) -> pb.ListProducersResponse:
        topic = _topic(request.topic)
        if not 0 <= request.page_size <= PAGE_MAX:
            raise InvalidPage(f"a page holds 1 to {PAGE_MAX:,} producers", field="page_size")
        page = await self._deduplication.producers(
            topic, size=request.page_size or PAGE_DEFAULT, token=request.page_token
        )
        return pb.ListProducersResponse(
            producers=[_to_producer(name, tracked) for name, tracked in page.producers],
            next_page_token=page.next_token,
        )

    async def GetTopicStatus(
        self, request: pb.GetTopicStatusRequest, context: Context
    ) -> pb.GetTopicStatusResponse:
        return _to_status(await self._deduplication.status(_topic(request.topic)))

    async def ForgetTopic(
        self, request: pb.ForgetTopicRequest, context: Context
    ) -> pb.ForgetTopicResponse:
        incarnation = _number("incarnation", request.incarnation)
        await self._deduplication.forget_topic(
            _topic(request.topic), incarnation, deleted=request.deleted
        )
        return pb.ForgetTopicResponse()

    async def TakeSnapshot(
        self, request: pb.TakeSnapshotRequest, context: Context
    ) -> pb.TakeSnapshotResponse:
        taken = await self._deduplication.snapshot(_topic(request.topic), let_go=request.let_go)
        if taken is None:
            return pb.TakeSnapshotResponse()
        return pb.TakeSnapshotResponse(
            position=_to_position(taken.position), producers=taken.producers
        )

    # A coroutine that reads on the context: it ends in good order when the caller goes away.
    async def LoadState(
        self, request_iterator: AsyncIterator[pb.LoadStateRequest], context: Context
    ) -> pb.LoadStateResponse:
        with ExitStack() as held:
            return await self._loaded(context, held)

    async def _loaded(self, context: Context, held: ExitStack) -> pb.LoadStateResponse:
        header: pb.LoadHeader | None = None
        producers: dict[str, Persisted] = {}
        while (request := await context.read()) is not aio.EOF:
            held.enter_context(weighed(request))
            if request.HasField("header") != (header is None):
                raise InvalidState("the first message has the header, no other", field="header")
            header = request.header if header is None else header
            _add_states(producers, request.producers)
        if header is None or not header.HasField("through"):
            raise InvalidState("a state covers the log up to somewhere", field="header.through")
        outcome = await self._deduplication.load(
            _topic(header.topic),
            _number("header.incarnation", header.incarnation),
            _position("header.through", header.through),
            list(producers.values()),
            replacing=header.replace,
        )
        return pb.LoadStateResponse(
            loaded=outcome.loaded,
            confirmed=_to_position(outcome.confirmed),
            left_out=outcome.left_out,
        )

    async def SetPolicy(
        self, request: pb.SetPolicyRequest, context: Context
    ) -> pb.SetPolicyResponse:
        level, policy = _level(request), _policy(request.values)
        await self._policies.set(level, policy)
        return pb.SetPolicyResponse()

    async def GetPolicy(
        self, request: pb.GetPolicyRequest, context: Context
    ) -> pb.GetPolicyResponse:
        policy = await self._policies.get(_level(request))
        return pb.GetPolicyResponse(values=_to_values(policy))

    async def Explain(self, request: pb.ExplainRequest, context: Context) -> pb.ExplainResponse:
        topic, name = _topic(request.topic), _producer(request.producer_name)
        sequence_id = _sequence_id("sequence_id", request.sequence_id)
        explanation, tracked, status = await self._deduplication.explain(topic, name, sequence_id)
        return pb.ExplainResponse(
            verdict=_TO_VERDICT[explanation.verdict],
            explanation=explanation.text,
            producer=None if tracked is None else _to_producer(name, tracked),
            status=_to_status(status),
        )

    async def _admit(self, request: pb.AdmitRequest) -> pb.AdmitResponse:
        claims = _claims(request.claims)
        writer = _writer(request)
        outcome = await self._deduplication.admit(
            _topic(request.topic), writer, _confirmation(request, writer), claims
        )
        match outcome:
            case Judged():
                _note_verdicts(outcome)
                return pb.AdmitResponse(verdicts=_to_verdicts(outcome, deduplicated=True))
            case Disabled():
                return pb.AdmitResponse(verdicts=_to_verdicts(all_new(claims), deduplicated=False))
            case Behind():
                return pb.AdmitResponse(behind=_to_behind(outcome))
            case Changed(revision):
                return pb.AdmitResponse(changed=pb.Changed(revision=revision))

    async def _confirm(self, request: pb.ConfirmRequest) -> pb.ConfirmResponse:
        writer = _writer(request)
        confirmation = _confirmation(request, writer)
        if confirmation is None:
            raise InvalidWriter("there is nothing to confirm", field="confirmation")
        outcome = await self._deduplication.confirm(_topic(request.topic), writer, confirmation)
        match outcome:
            case Applied(revision):
                return pb.ConfirmResponse(
                    confirmed=pb.Confirmed(deduplicated=True, revision=revision)
                )
            case Disabled():
                return pb.ConfirmResponse(confirmed=pb.Confirmed(deduplicated=False))
            case Behind():
                return pb.ConfirmResponse(behind=_to_behind(outcome))

    async def _rollback(self, request: pb.RollbackRequest) -> pb.RollbackResponse:
        writer = _writer(request)
        withdrawals = _withdrawals(request)
        outcome = await self._deduplication.rollback(
            _topic(request.topic), writer, _confirmation(request, writer), withdrawals
        )
        match outcome:
            case Applied(revision):
                return pb.RollbackResponse(
                    rolled_back=pb.RolledBack(deduplicated=True, revision=revision)
                )
            case Disabled():
                return pb.RollbackResponse(rolled_back=pb.RolledBack(deduplicated=False))
            case Behind():
                return pb.RollbackResponse(behind=_to_behind(outcome))

    async def _exchange(self, request: pb.ExchangeRequest) -> pb.ExchangeResponse:
        asked_for = request.WhichOneof("request")
        name = f"{_SERVICE}/{(asked_for or 'exchange').capitalize()}"
        with asked(name, request.trace, rpc_attributes(name)):
            return await self._exchanged(request, asked_for)

    async def _exchanged(
        self, request: pb.ExchangeRequest, asked_for: str | None
    ) -> pb.ExchangeResponse:
        request_id = request.request_id
        try:
            with weighed(request):
                match asked_for:
                    case "admit":
                        admitted = await self._admit(request.admit)
                        return pb.ExchangeResponse(request_id=request_id, admit=admitted)
                    case "confirm":
                        confirmed = await self._confirm(request.confirm)
                        return pb.ExchangeResponse(request_id=request_id, confirm=confirmed)
                    case "rollback":
                        rolled_back = await self._rollback(request.rollback)
                        return pb.ExchangeResponse(request_id=request_id, rollback=rolled_back)
                    case _:
                        raise InvalidClaim("an exchange asks for something", field="request")
        except DomainError as refusal:
            return pb.ExchangeResponse(request_id=request_id, error=in_stream(refusal))


_SERVICE: Final = pb.DESCRIPTOR.services_by_name["DedupService"].full_name


def _note_verdicts(judged: Judged) -> None:
    """Where the call is followed, its span says how many claims were judged how."""
    span = get_current_span()
    if span.is_recording():
        counted = Counter(verdict for each in judged.producers for verdict in each.verdicts)
        for verdict, count in counted.items():
            span.set_attribute(names.VERDICTS + verdict.name.lower(), count)


def _topic(text: str) -> TopicName:
    try:
        return TopicName.parse(text)
    except InvalidNameError as error:
        raise InvalidTopicName(str(error), field="topic") from error


def _producer(name: str) -> str:
    try:
        return check_producer_name(name)
    except InvalidNameError as error:
        raise InvalidProducerName(str(error), field="producer_name") from error


def _sequence_id(field: str, number: int) -> int:
    if number > SEQUENCE_ID_MAX:
        raise InvalidSequenceId("a sequence id is at most 2^63 - 1", field=field, given=number)
    return number


def _number(field: str, number: int, most: int = SEQUENCE_ID_MAX) -> int:
    if number > most:
        raise InvalidWriter(f"{field} is at most {most}", field=field, given=number)
    return number


def _position(field: str, position: entry_pb2.Position) -> Position:
    return Position(
        _number(f"{field}.ledger_id", position.ledger_id),
        _number(f"{field}.entry_id", position.entry_id),
    )


def _writer(request: pb.AdmitRequest | pb.ConfirmRequest | pb.RollbackRequest) -> Writer:
    if not request.HasField("writer"):
        raise InvalidWriter("a call names its writer", field="writer")
    writer = request.writer
    return Writer(
        incarnation=_number("writer.incarnation", writer.incarnation),
        epoch=_number("writer.epoch", writer.epoch),
        position=(
            _position("writer.position", writer.position) if writer.HasField("position") else None
        ),
        revision=writer.revision if writer.HasField("revision") else None,
    )


def _confirmation(
    request: pb.AdmitRequest | pb.ConfirmRequest | pb.RollbackRequest, writer: Writer
) -> Confirmation | None:
    if not request.HasField("confirmation"):
        return None
    given = request.confirmation
    if not given.HasField("through"):
        raise InvalidWriter("a confirmation says how far it goes", field="confirmation.through")
    through = _position("confirmation.through", given.through)
    after = _position("confirmation.after", given.after) if given.HasField("after") else None
    if after is not None and after > through:
        raise InvalidWriter("a confirmation ends after it starts", field="confirmation.through")
    if writer.position is None or through > writer.position:
        raise InvalidWriter("a confirmation ends where the log does", field="confirmation.through")
    producers = tuple(_entries(each) for each in given.producers)
    if sum(len(each.highest) for each in producers) > ENTRIES_MAX:
        raise InvalidWriter(
            f"a confirmation lists at most {ENTRIES_MAX:,} entries", field="confirmation.producers"
        )
    _once([each.producer for each in producers], "confirmation.producers")
    return Confirmation(
        after,
        through,
        producers,
        _number("confirmation.entry_count", given.entry_count, ENTRY_COUNT_MAX),
        _number("confirmation.entries_remaining", given.entries_remaining, ENTRIES_REMAINING_MAX),
    )


def _entries(entries: pb.ProducerEntries) -> ProducerEntries:
    highest = tuple(entries.highest_sequence_ids)
    if not highest:
        raise InvalidWriter("a confirmed producer has entries", field="confirmation.producers")
    _sequence_id("confirmation.producers.highest_sequence_ids", max(highest))
    return ProducerEntries(
        _producer(entries.producer_name),
        highest,
        _number(
            "confirmation.producers.last_append_time", entries.last_append_time, APPEND_TIME_MAX_MS
        ),
        _chunks("confirmation.producers.chunks", entries.chunks, len(highest), InvalidWriter),
    )


def _claims(given: Any) -> list[ProducerClaims]:
    claims = [_producer_claims(each) for each in given]
    if sum(len(each.claims) for each in claims) > CLAIMS_MAX:
        raise InvalidClaim(f"at most {CLAIMS_MAX:,} claims at a time", field="claims")
    _once([each.producer for each in claims], "claims")
    return claims


def _producer_claims(claims: pb.Claims) -> ProducerClaims:
    lowest, highest = claims.sequence_ids, claims.highest_sequence_ids or claims.sequence_ids
    if not lowest or len(lowest) != len(highest):
        raise InvalidClaim(
            "a producer claims at least one id, and a highest id for each or for none",
            field="claims.highest_sequence_ids",
        )
    _sequence_id("claims.highest_sequence_ids", max(highest))
    ranges = tuple(map(Claim, lowest, highest))
    for low, high, _ in ranges:
        if low > high:
            raise InvalidClaim(
                "a range ends before it starts",
                field="claims.highest_sequence_ids",
                sequence_id=low,
                highest_sequence_id=high,
            )
    if claims.chunks:
        chunks = _chunks("claims.chunks", claims.chunks, len(ranges), InvalidClaim)
        ranges = tuple(
            claim._replace(chunk=chunks.get(index)) for index, claim in enumerate(ranges)
        )
        if any(claim.chunk and claim.lowest != claim.highest for claim in ranges):
            raise InvalidClaim("a chunk claims one id", field="claims.highest_sequence_ids")
    return ProducerClaims(_producer(claims.producer_name), ranges)


def _chunks(
    field: str, given: Mapping[int, pb.Chunk], count: int, refusal: type[DomainError]
) -> dict[int, Chunk]:
    """Chunks by their place among `count` others."""
    chunks: dict[int, Chunk] = {}
    for place, chunk in given.items():
        if place >= count:
            raise refusal("a chunk has a place", field=field, given=place, count=count)
        try:
            chunks[place] = check_chunk(
                Chunk(chunk.uuid, chunk.chunk_id, chunk.num_chunks, chunk.total_bytes)
            )
        except InvalidChunkError as error:
            raise refusal(str(error), field=field) from error
    return chunks


def _add_states(producers: dict[str, Persisted], given: Iterable[pb.ProducerState]) -> None:
    for each in given:
        name = _producer(each.name)
        if name in producers:
            raise InvalidState("each producer is named once", field="producers", given=name)
        producers[name] = Persisted(
            name,
            _sequence_id("producers.highest_sequence_id", each.highest_sequence_id),
            _unfinished(each),
            _number("producers.last_active", each.last_active, APPEND_TIME_MAX_MS),
        )
    if len(producers) > LOADED_PRODUCERS_MAX:
        raise InvalidState(
            f"a state holds at most {LOADED_PRODUCERS_MAX:,} producers", field="producers"
        )


def _unfinished(state: pb.ProducerState) -> Chunk | None:
    if not state.HasField("unfinished"):
        return None
    field = "producers.unfinished"
    chunk = _chunks(field, {0: state.unfinished}, 1, InvalidState)[0]
    if chunk.is_last:
        raise InvalidState("the last chunk leaves nothing unfinished", field=field)
    return chunk


def _withdrawals(request: pb.RollbackRequest) -> list[Withdrawal]:
    if len(request.withdrawals) > PRODUCERS_MAX:
        raise InvalidClaim(f"at most {PRODUCERS_MAX:,} producers at a time", field="withdrawals")
    return [
        Withdrawal(
            _producer(each.producer_name),
            _sequence_id("withdrawals.keep_through_sequence_id", each.keep_through_sequence_id)
            if each.HasField("keep_through_sequence_id")
            else NEVER,
        )
        for each in request.withdrawals
    ]


def _once(producers: list[str], field: str) -> None:
    if len(set(producers)) < len(producers):
        raise InvalidClaim("each producer is named once", field=field)


def _level(request: pb.SetPolicyRequest | pb.GetPolicyRequest) -> Level:
    match request.WhichOneof("level"):
        case "topic":
            return Level.of_topic(_topic(request.topic))
        case "namespace":
            return Level.of_namespace(check_namespace(request.namespace, "namespace"))
        case _:
            raise InvalidPolicy("a policy is one of a namespace or a topic", field="level")


def _policy(values: pb.PolicyValues) -> Policy:
    def number(name: str) -> int | None:
        if not values.HasField(name):  # type: ignore[arg-type]
            return None
        return check_number(name, getattr(values, name), f"values.{name}")

    if values.on_full not in _ON_FULL:
        raise InvalidPolicy("an unknown action", field="values.on_full")
    return Policy(
        enabled=values.enabled if values.HasField("enabled") else None,
        producer_inactivity_timeout_minutes=number("producer_inactivity_timeout_minutes"),
        max_producers=number("max_producers"),
        on_full=_ON_FULL[values.on_full],
        snapshot_entries=number("snapshot_entries"),
        snapshot_interval_s=number("snapshot_interval_s"),
    )


_TO_VERDICT: Final = {
    Verdict.NEW: pb.VERDICT_NEW,
    Verdict.IN_FLIGHT: pb.VERDICT_IN_FLIGHT,
    Verdict.DUPLICATE: pb.VERDICT_DUPLICATE,
    Verdict.PARTIAL: pb.VERDICT_PARTIAL,
    Verdict.HELD: pb.VERDICT_HELD,
    Verdict.CHUNK_GAP: pb.VERDICT_CHUNK_GAP,
    Verdict.LAYOUT_CONFLICT: pb.VERDICT_LAYOUT_CONFLICT,
}

_TO_SOURCE: Final = {
    Source.DEFAULT: pb.POLICY_SOURCE_DEFAULT,
    Source.CLUSTER: pb.POLICY_SOURCE_CLUSTER,
    Source.NAMESPACE: pb.POLICY_SOURCE_NAMESPACE,
    Source.TOPIC: pb.POLICY_SOURCE_TOPIC,
    Source.SYSTEM_TOPIC: pb.POLICY_SOURCE_SYSTEM_TOPIC,
}

_TO_ACTION: Final = {
    OnFull.EVICT: pb.FULL_TOPIC_ACTION_EVICT,
    OnFull.REFUSE: pb.FULL_TOPIC_ACTION_REFUSE,
}


_ON_FULL: Final[Mapping[int, OnFull | None]] = {
    pb.FULL_TOPIC_ACTION_UNSPECIFIED: None,
    **{action: on_full for on_full, action in _TO_ACTION.items()},
}


def _to_verdicts(judged: Judged, *, deduplicated: bool) -> pb.Verdicts:
    return pb.Verdicts(
        deduplicated=deduplicated,
        revision=judged.revision,
        producers=[
            pb.ProducerVerdicts(
                verdicts=[_TO_VERDICT[verdict] for verdict in each.verdicts],
                persisted_sequence_id=_to_mark(each.decided),
                aborts=each.aborts,
            )
            for each in judged.producers
        ],
    )


def _to_mark(mark: int) -> int | None:
    return None if mark == NEVER else mark


def _to_position(position: Position | None) -> entry_pb2.Position | None:
    return (
        None
        if position is None
        else entry_pb2.Position(ledger_id=position.ledger_id, entry_id=position.entry_id)
    )


def _to_behind(behind: Behind) -> pb.Behind:
    return pb.Behind(confirmed=_to_position(behind.confirmed))


def _to_producer(name: str, tracked: Tracked) -> pb.Producer:
    last_active = Timestamp()
    last_active.FromMilliseconds(tracked.active_ms)
    marks = tracked.marks
    return pb.Producer(
        name=name,
        persisted_sequence_id=_to_mark(marks.decided),
        pushed_sequence_id=_to_mark(marks.pushed if marks.in_flight else marks.decided),
        last_active=last_active,
        unfinished=_to_unfinished(marks),
    )


def _to_unfinished(marks: Marks) -> pb.UnfinishedMessage | None:
    chunk = marks.persisted_chunk
    if chunk is None:
        return None
    last_chunk = pb.Chunk(
        uuid=chunk.uuid,
        chunk_id=chunk.chunk_id,
        num_chunks=chunk.num_chunks,
        total_bytes=chunk.total_bytes,
    )
    return pb.UnfinishedMessage(sequence_id=marks.persisted, last_chunk=last_chunk)


def _to_policy(policy: EffectivePolicy) -> pb.Policy:
    timeout = policy.producer_inactivity_timeout_minutes
    return pb.Policy(
        enabled=policy.enabled.value,
        enabled_source=_TO_SOURCE[policy.enabled.source],
        producer_inactivity_timeout_minutes=timeout.value,
        producer_inactivity_timeout_source=_TO_SOURCE[timeout.source],
        max_producers=policy.max_producers.value,
        max_producers_source=_TO_SOURCE[policy.max_producers.source],
        on_full=_TO_ACTION[policy.on_full.value],
        on_full_source=_TO_SOURCE[policy.on_full.source],
        snapshot_entries=policy.snapshot_entries.value,
        snapshot_entries_source=_TO_SOURCE[policy.snapshot_entries.source],
        snapshot_interval_s=policy.snapshot_interval_s.value,
        snapshot_interval_source=_TO_SOURCE[policy.snapshot_interval_s.source],
    )


def _to_values(policy: Policy) -> pb.PolicyValues:
    on_full = pb.FULL_TOPIC_ACTION_UNSPECIFIED
    if policy.on_full is not None:
        on_full = _TO_ACTION[policy.on_full]
    return pb.PolicyValues(
        enabled=policy.enabled,
        producer_inactivity_timeout_minutes=policy.producer_inactivity_timeout_minutes,
        max_producers=policy.max_producers,
        on_full=on_full,
        snapshot_entries=policy.snapshot_entries,
        snapshot_interval_s=policy.snapshot_interval_s,
    )


def _to_status(status: Status) -> pb.GetTopicStatusResponse:
    response = pb.GetTopicStatusResponse(
        policy=_to_policy(status.policy),
        policy_file_error=status.policy_error,
        snapshot_error=status.snapshot_error,
        snapshot_unknown=status.snapshot_unknown,
    )
    if status.snapshot is not None:
        response.snapshot.ledger_id, response.snapshot.entry_id = status.snapshot
    summary = status.summary
    if not status.policy.enabled.value:
        response.state = pb.TOPIC_STATE_DISABLED
    elif summary is None:
        response.state = pb.TOPIC_STATE_ABSENT
    elif summary.remaining:
        response.state = pb.TOPIC_STATE_RECOVERING
    else:
        response.state = pb.TOPIC_STATE_ACTIVE
    if summary is not None:
        response.epoch = summary.epoch
        if summary.confirmed is not None:
            response.confirmed.ledger_id, response.confirmed.entry_id = summary.confirmed
        response.entries_remaining = summary.remaining
        response.producers = summary.producers
        response.entries_since_snapshot = summary.unsaved
        if summary.saved.position is not None and summary.saved.taken_ms:  # and not let go
            response.snapshot.ledger_id, response.snapshot.entry_id = summary.saved.position
            response.snapshot_taken.FromMilliseconds(summary.saved.taken_ms)
        counts = summary.counts
        response.counts.confirmed_entries = counts.confirmed_entries
        response.counts.new_claims = counts.new
        response.counts.duplicate_claims = counts.duplicate
        response.counts.partial_claims = counts.partial
        response.counts.waiting_claims = counts.waiting
        response.counts.purged_producers = counts.purged
        response.counts.evicted_producers = counts.evicted
        response.counts.misplaced_chunk_claims = counts.misplaced
        response.counts.aborted_attempts = counts.aborted
    return response

"""The wire format of deduplication's calls. The ledger writes requests and reads responses; the
dedup service reads requests and writes responses:

    ledger                                                   dedup
    admit_request ──────────▶ AdmitRequest ────────────▶ read_admit
    read_admit_response ◀──── AdmitResponse ◀──────── admit_response

and likewise for Confirm and Rollback. Reading a request validates it, so code behind it does not
validate again.
"""

from collections.abc import Mapping, Sequence
from operator import gt
from typing import Any, Final

from seqgate.api.common.v1 import common_pb2
from seqgate.api.dedup.v1 import dedup_pb2
from seqgate.api.internal.dedup.v1 import writer_pb2 as pb
from seqgate.services.deduplication import (
    DISABLED,
    NEVER,
    Applied,
    Behind,
    Changed,
    Claim,
    Confirmation,
    Disabled,
    Judged,
    ProducerClaims,
    ProducerEntries,
    ProducerVerdicts,
    Verdict,
    Withdrawal,
    Writer,
    all_new,
)
from seqgate.services.errors import (
    DomainError,
    Kind,
)
from seqgate.services.runtime.positions import of_position, to_position
from seqgate.services.runtime.requests import (
    read_chunk,
    read_number,
    read_position,
    read_producer,
    read_sequence_id,
    read_time_ms,
    read_topic,
)
from seqgate.times import timestamp
from seqgate.types import (
    Chunk,
    TopicName,
)

CLAIMS_MAX: Final = 10_000
"""The most claims in one Admit."""

ENTRIES_MAX: Final = 10_000
"""The most entries that one confirmation lists."""

ENTRY_COUNT_MAX: Final = 1_000_000_000
"""The most entries, markers included, that one confirmation covers."""

ENTRIES_REMAINING_MAX: Final = 2**53 - 1
"""The most entries that a confirmation may report as remaining; Lua counts exactly up to here."""

PRODUCERS_MAX: Final = 10_000
"""The most producers that one request names."""

VERDICTS: Final = {
    Verdict.NEW: dedup_pb2.CLAIM_VERDICT_NEW,
    Verdict.IN_FLIGHT: dedup_pb2.CLAIM_VERDICT_IN_FLIGHT,
    Verdict.DUPLICATE: dedup_pb2.CLAIM_VERDICT_DUPLICATE,
    Verdict.PARTIAL: dedup_pb2.CLAIM_VERDICT_PARTIAL,
    Verdict.HELD: dedup_pb2.CLAIM_VERDICT_HELD,
    Verdict.CHUNK_GAP: dedup_pb2.CLAIM_VERDICT_CHUNK_GAP,
    Verdict.LAYOUT_CONFLICT: dedup_pb2.CLAIM_VERDICT_LAYOUT_CONFLICT,
}

_READ_VERDICTS: Final = {number: verdict for verdict, number in VERDICTS.items()}


class InvalidClaim(DomainError):
    """Too many claims, a repeated producer, or a range that ends before it starts."""

    kind = Kind.INVALID
    reason = "INVALID_CLAIM"


class InvalidWriter(DomainError):
    """The writer is missing, or its position, incarnation or epoch is out of range: `given`."""

    kind = Kind.INVALID
    reason = "INVALID_WRITER"


class InvalidConfirmation(DomainError):
    """The confirmation is missing, repeats a producer, lists too many entries, or does not end in
    the writer's log; or a number in it is out of range: `given`."""

    kind = Kind.INVALID
    reason = "INVALID_CONFIRMATION"


# ---- requests, written by the ledger


def admit_request(
    topic: TopicName,
    writer: Writer,
    confirmation: Confirmation | None,
    claims: Sequence[ProducerClaims],
) -> pb.AdmitRequest:
    return pb.AdmitRequest(
        topic=str(topic),
        writer=_to_writer(writer),
        confirmation=_to_confirmation(confirmation),
        claims=[
            pb.Claims(
                producer_name=producer,
                sequence_ids=[lowest for lowest, _, _ in ranges],
                highest_sequence_ids=[highest for _, highest, _ in ranges],
                chunks={
                    place: to_chunk(chunk)
                    for place, (_, _, chunk) in enumerate(ranges)
                    if chunk is not None
                },
            )
            for producer, ranges in claims
        ],
    )


def confirm_request(
    topic: TopicName, writer: Writer, confirmation: Confirmation
) -> pb.ConfirmRequest:
    return pb.ConfirmRequest(
        topic=str(topic), writer=_to_writer(writer), confirmation=_to_confirmation(confirmation)
    )


def rollback_request(
    topic: TopicName, writer: Writer, confirmation: Confirmation | None
) -> pb.RollbackRequest:
    return pb.RollbackRequest(
        topic=str(topic), writer=_to_writer(writer), confirmation=_to_confirmation(confirmation)
    )


def _to_writer(writer: Writer) -> pb.Writer:
    return pb.Writer(
        incarnation=writer.incarnation,
        epoch=writer.epoch,
        position=to_position(writer.position),
        revision=writer.revision,
    )


def _to_confirmation(confirmation: Confirmation | None) -> pb.Confirmation | None:
    if confirmation is None:
        return None
    return pb.Confirmation(
        after=to_position(confirmation.after),
        through=to_position(confirmation.through),
        producers=[
            pb.ProducerEntries(
                producer_name=producer,
                highest_sequence_ids=highest,
                last_append_time=timestamp(last_append_ms),
                chunks={place: to_chunk(chunk) for place, chunk in chunks.items()},
            )
            for producer, highest, last_append_ms, chunks in confirmation.producers
        ],
        entry_count=confirmation.entry_count,
        entries_remaining=confirmation.remaining,
    )


# ---- requests, read by the dedup service


def read_admit(
    request: pb.AdmitRequest,
) -> tuple[TopicName, Writer, Confirmation | None, list[ProducerClaims]]:
    """The arguments of an Admit.

    Raises:
        InvalidTopicName, InvalidProducerName, InvalidSequenceId, InvalidClaim, InvalidWriter,
        InvalidConfirmation: the request is invalid.
    """
    claims = _read_claims(request.claims)
    writer = _read_writer(request)
    return read_topic(request.topic), writer, _read_confirmation(request, writer), claims


def read_confirm(request: pb.ConfirmRequest) -> tuple[TopicName, Writer, Confirmation]:
    """The arguments of a Confirm. Raises the errors of `read_admit`."""
    writer = _read_writer(request)
    confirmation = _read_confirmation(request, writer)
    if confirmation is None:
        raise InvalidConfirmation("confirmation is required", field="confirmation")
    return read_topic(request.topic), writer, confirmation


def read_rollback(
    request: pb.RollbackRequest,
) -> tuple[TopicName, Writer, Confirmation | None, list[Withdrawal]]:
    """The arguments of a Rollback. Raises the errors of `read_admit`."""
    writer = _read_writer(request)
    withdrawals = _read_withdrawals(request)
    return read_topic(request.topic), writer, _read_confirmation(request, writer), withdrawals


def _read_writer(
    request: pb.AdmitRequest | pb.ConfirmRequest | pb.RollbackRequest,
) -> Writer:
    if not request.HasField("writer"):
        raise InvalidWriter("writer is required", field="writer")
    writer = request.writer
    return Writer(
        incarnation=read_number("writer.incarnation", writer.incarnation, InvalidWriter),
        epoch=read_number("writer.epoch", writer.epoch, InvalidWriter),
        position=(
            read_position("writer.position", writer.position, InvalidWriter)
            if writer.HasField("position")
            else None
        ),
        revision=writer.revision if writer.HasField("revision") else None,
    )


def _read_confirmation(
    request: pb.AdmitRequest | pb.ConfirmRequest | pb.RollbackRequest,
    writer: Writer,
) -> Confirmation | None:
    if not request.HasField("confirmation"):
        return None
    given, wrong = request.confirmation, InvalidConfirmation
    if not given.HasField("through"):
        raise wrong("through is required", field="confirmation.through")
    through = read_position("confirmation.through", given.through, wrong)
    after = None
    if given.HasField("after"):
        after = read_position("confirmation.after", given.after, wrong)
    if after is not None and after > through:
        raise wrong("through must not be before after", field="confirmation.through")
    if writer.position is None or through > writer.position:
        raise wrong(
            "through must not be after the end of the writer's log", field="confirmation.through"
        )
    producers = tuple(_read_entries(each) for each in given.producers)
    if sum(len(each.highest) for each in producers) > ENTRIES_MAX:
        raise wrong(
            f"too many entries in a confirmation (limit {ENTRIES_MAX:,})",
            field="confirmation.producers",
        )
    _check_once([each.producer for each in producers], "confirmation.producers", wrong)
    return Confirmation(
        after,
        through,
        producers,
        read_number("confirmation.entry_count", given.entry_count, wrong, ENTRY_COUNT_MAX),
        read_number(
            "confirmation.entries_remaining",
            given.entries_remaining,
            wrong,
            ENTRIES_REMAINING_MAX,
        ),
    )


def _read_entries(entries: pb.ProducerEntries) -> ProducerEntries:
    field, highest = "confirmation.producers", tuple(entries.highest_sequence_ids)
    if not highest:
        raise InvalidConfirmation("a producer is listed without entries", field=field)
    read_sequence_id(f"{field}.highest_sequence_ids", max(highest))
    return ProducerEntries(
        read_producer(entries.producer_name),
        highest,
        read_time_ms(f"{field}.last_append_time", entries.last_append_time, InvalidConfirmation),
        _read_chunks(f"{field}.chunks", entries.chunks, len(highest), InvalidConfirmation),
    )


def _read_claims(given: Any) -> list[ProducerClaims]:
    claims = [_read_producer_claims(each) for each in given]
    if sum(len(each.claims) for each in claims) > CLAIMS_MAX:
        raise InvalidClaim(f"too many claims (limit {CLAIMS_MAX:,})", field="claims")
    _check_once([each.producer for each in claims], "claims", InvalidClaim)
    return claims


def _read_producer_claims(claims: pb.Claims) -> ProducerClaims:
    lowest, highest = claims.sequence_ids, claims.highest_sequence_ids or claims.sequence_ids
    if not lowest or len(lowest) != len(highest):
        raise InvalidClaim(
            "a producer must claim at least one id, with a highest id for each or for none",
            field="claims.highest_sequence_ids",
        )
    read_sequence_id("claims.highest_sequence_ids", max(highest))
    if any(map(gt, lowest, highest)):
        low, high = next(each for each in zip(lowest, highest, strict=True) if gt(*each))
        raise InvalidClaim(
            "a range ends before it starts",
            field="claims.highest_sequence_ids",
            sequence_id=low,
            highest_sequence_id=high,
        )
    ranges = tuple(map(Claim, lowest, highest))
    if claims.chunks:
        chunks = _read_chunks("claims.chunks", claims.chunks, len(ranges), InvalidClaim)
        ranges = tuple(
            claim._replace(chunk=chunks.get(index)) for index, claim in enumerate(ranges)
        )
        if any(claim.chunk and claim.lowest != claim.highest for claim in ranges):
            raise InvalidClaim(
                "a chunk must claim exactly one id", field="claims.highest_sequence_ids"
            )
    return ProducerClaims(read_producer(claims.producer_name), ranges)


def _read_withdrawals(request: pb.RollbackRequest) -> list[Withdrawal]:
    if len(request.withdrawals) > PRODUCERS_MAX:
        raise InvalidClaim(f"too many producers (limit {PRODUCERS_MAX:,})", field="withdrawals")
    field = "withdrawals.keep_through_sequence_id"
    return [
        Withdrawal(
            read_producer(each.producer_name),
            read_sequence_id(field, each.keep_through_sequence_id)
            if each.HasField("keep_through_sequence_id")
            else NEVER,
        )
        for each in request.withdrawals
    ]


def _read_chunks(
    field: str, given: Mapping[int, common_pb2.Chunk], count: int, refusal: type[DomainError]
) -> dict[int, Chunk]:
    chunks: dict[int, Chunk] = {}
    for place, chunk in given.items():
        if place >= count:
            raise refusal(
                f"chunk index must be below {count}", field=field, given=place, count=count
            )
        chunks[place] = read_chunk(field, chunk, refusal)
    return chunks


def _check_once(producers: Sequence[str], field: str, refusal: type[DomainError]) -> None:
    if len(set(producers)) < len(producers):
        raise refusal("duplicate producer", field=field)


# ---- responses, written by the dedup service


def admit_response(
    outcome: Judged | Behind | Changed | Disabled, claims: Sequence[ProducerClaims]
) -> pb.AdmitResponse:
    match outcome:
        case Judged():
            return pb.AdmitResponse(verdicts=_to_verdicts(outcome, deduplicated=True))
        case Disabled():
            return pb.AdmitResponse(verdicts=_to_verdicts(all_new(claims), deduplicated=False))
        case Behind():
            return pb.AdmitResponse(behind=_to_behind(outcome))
        case Changed(revision):
            return pb.AdmitResponse(changed=pb.Changed(revision=revision))


def confirm_response(outcome: Applied | Behind | Disabled) -> pb.ConfirmResponse:
    match outcome:
        case Applied(revision):
            return pb.ConfirmResponse(confirmed=pb.Confirmed(deduplicated=True, revision=revision))
        case Disabled():
            return pb.ConfirmResponse(confirmed=pb.Confirmed(deduplicated=False))
        case Behind():
            return pb.ConfirmResponse(behind=_to_behind(outcome))


def rollback_response(outcome: Applied | Behind | Disabled) -> pb.RollbackResponse:
    match outcome:
        case Applied(revision):
            done = pb.RolledBack(deduplicated=True, revision=revision)
            return pb.RollbackResponse(rolled_back=done)
        case Disabled():
            return pb.RollbackResponse(rolled_back=pb.RolledBack(deduplicated=False))
        case Behind():
            return pb.RollbackResponse(behind=_to_behind(outcome))


def _to_verdicts(judged: Judged, *, deduplicated: bool) -> pb.Verdicts:
    return pb.Verdicts(
        deduplicated=deduplicated,
        revision=judged.revision,
        producers=[
            pb.ProducerVerdicts(
                verdicts=[VERDICTS[verdict] for verdict in verdicts],
                persisted_sequence_id=to_mark(decided),
                aborts=aborts,
            )
            for verdicts, decided, aborts in judged.producers
        ],
        refuse_conflicts=judged.refuses_conflicts,
    )


def _to_behind(behind: Behind) -> pb.Behind:
    return pb.Behind(confirmed=to_position(behind.confirmed))


# ---- responses, read by the ledger


def read_admit_response(response: pb.AdmitResponse) -> Judged | Behind | Changed | Disabled:
    match response.WhichOneof("outcome"):
        case "verdicts":
            verdicts = response.verdicts
            return _read_verdicts(verdicts) if verdicts.deduplicated else DISABLED
        case "behind":
            return _read_behind(response.behind)
        case _:
            return Changed(response.changed.revision)


def read_confirm_response(response: pb.ConfirmResponse) -> Applied | Behind | Disabled:
    if response.HasField("behind"):
        return _read_behind(response.behind)
    done = response.confirmed
    return Applied(done.revision) if done.deduplicated else DISABLED


def read_rollback_response(response: pb.RollbackResponse) -> Applied | Behind | Disabled:
    if response.HasField("behind"):
        return _read_behind(response.behind)
    done = response.rolled_back
    return Applied(done.revision) if done.deduplicated else DISABLED


def _read_verdicts(verdicts: pb.Verdicts) -> Judged:
    return Judged(
        verdicts.revision,
        [
            ProducerVerdicts(
                [_READ_VERDICTS[verdict] for verdict in each.verdicts],
                each.persisted_sequence_id if each.HasField("persisted_sequence_id") else NEVER,
                dict(each.aborts),
            )
            for each in verdicts.producers
        ],
        refuses_conflicts=verdicts.refuse_conflicts,
    )


def _read_behind(behind: pb.Behind) -> Behind:
    if not behind.HasField("confirmed"):
        return Behind(None)
    return Behind(of_position(behind.confirmed))


# ---- parts of messages


def to_chunk(chunk: Chunk) -> common_pb2.Chunk:
    uuid, chunk_id, num_chunks, total_bytes = chunk
    return common_pb2.Chunk(
        uuid=uuid, chunk_id=chunk_id, num_chunks=num_chunks, total_bytes=total_bytes
    )


def to_mark(mark: int) -> int | None:
    """A mark on the wire; None leaves the field unset: nothing is stored."""
    return None if mark == NEVER else mark

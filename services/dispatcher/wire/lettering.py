"""Dead letters on the wire."""

from collections.abc import Iterable, Iterator
from typing import Final

from seqgate.api.dispatcher.v1 import dispatcher_pb2 as pb
from seqgate.api.ledger.v1.ledger_pb2 import StoredEntry
from seqgate.keys import sticky_key
from seqgate.services.dispatcher.core.effects import AfterDeadLetter, FailedDelivery
from seqgate.services.dispatcher.entries import position_of
from seqgate.services.dispatcher.letters.listing import mend_of, origin_of
from seqgate.services.dispatcher.letters.lives import Life, failures_of, lives_of
from seqgate.services.dispatcher.letters.marks import mending_name
from seqgate.services.dispatcher.letters.operations import Operation
from seqgate.services.dispatcher.letters.returns import redrives_of
from seqgate.services.dispatcher.ports import ATTEMPTS, FAILURES, INTERNAL, ORIGIN, REASON
from seqgate.services.dispatcher.shell.live import Live
from seqgate.services.runtime.positions import to_position
from seqgate.times import TIME_MAX_MS, timestamp
from seqgate.types import Position, TopicName

_UINT32_MAX: Final = 2**32 - 1
_UINT64_MAX: Final = 2**64 - 1

_SETTLED: Final = frozenset(
    {
        pb.DEAD_LETTER_STATE_REDRIVEN,
        pb.DEAD_LETTER_STATE_DISCARDED,
        pb.DEAD_LETTER_STATE_MENDED,
    }
)
"""The states of letters that hold no key any more."""


def letter(
    live: Live, where: TopicName, entry: StoredEntry, first: Position | None
) -> pb.DeadLetter:
    """A letter in the dead letter topic `where`, and what waits behind it. `first`: the position at
    which its message begins; None: not known. Publishers may forge properties: what they cannot
    mean is left out."""
    metadata, properties = entry.metadata, entry.metadata.properties
    origin = origin_of(metadata)
    assert origin is not None
    key = sticky_key(metadata)
    found = pb.DeadLetter(
        position=entry.position,
        origin=to_position(origin),
        key=key,
        producer_name=properties.get(f"{ORIGIN}producer", ""),
        sequence_id=_number(properties.get(f"{ORIGIN}sequence_id", ""), _UINT64_MAX),
        properties={
            name: value for name, value in properties.items() if not name.startswith(INTERNAL)
        },
        num_messages=metadata.num_messages_in_batch or 1,
        payload_bytes=metadata.total_chunk_msg_size or entry.payload_bytes or len(entry.payload),
        time=entry.append_time,
        attempts=_number(properties.get(ATTEMPTS, ""), _UINT32_MAX),
        failures=_failures(failures_of(properties.get(FAILURES, ""))),
        redriven=live.returns.is_redriven(where, position_of(entry)),
        redrives=redrives_of(entry),
    )
    found.state = _state(live, where, entry)
    successor = live.returns.marks.successor(where, position_of(entry))
    if successor is not None:
        found.successor.CopyFrom(to_position(successor))
    mend = mend_of(metadata)
    if mend is not None and 0 <= mend.at_ms <= TIME_MAX_MS:
        found.mend.original.CopyFrom(to_position(mend.original))
        found.mend.caller = mend.caller
        found.mend.time.CopyFrom(timestamp(mend.at_ms))
    found.reason = _reason(properties.get(REASON, ""))
    found.lives.extend(_life(each) for each in lives_of(properties))
    if metadata.num_chunks_from_msg > 1:
        found.chunk_id = metadata.chunk_id
        found.num_chunks = metadata.num_chunks_from_msg
    machine = live.machine
    own = machine.lane_key(key)
    state = machine.gaps.state(own)
    if (
        found.state in _SETTLED
        or state is None
        or state.after is AfterDeadLetter.CONTINUE
        or state.gap.position != first
    ):
        return found
    found.holds_key = True
    lane, slot = machine.lanes.get(own), machine.slot_of(own)
    found.waiting_entries = 0 if lane is None else lane.parked
    lags = slot is not None and slot.lag is not None
    found.lags = lags or (lane is not None and lane.lag is not None)
    return found


def _state(live: Live, where: TopicName, entry: StoredEntry) -> pb.DeadLetterState.ValueType:
    letter, marks = position_of(entry), live.returns.marks
    if live.returns.is_returning(where, letter):
        return pb.DEAD_LETTER_STATE_RETURNING
    if (fate := marks.fate(where, letter)) is not None:
        return pb.DeadLetterState.Value(f"DEAD_LETTER_STATE_{fate.value}")
    mend = mend_of(entry.metadata)
    is_astray = mend is not None and marks.successor(where, mend.original) != letter
    if is_astray or mending_name(where, letter) in marks.mending:
        return pb.DEAD_LETTER_STATE_MENDING
    return pb.DEAD_LETTER_STATE_DEAD


def operation(made: Operation) -> pb.LetterOperation:
    """A redrive, a mend or a discard."""
    return pb.LetterOperation(
        number=made.number,
        action=pb.LetterAction.Value(f"LETTER_ACTION_{made.action.value}"),
        request_id=made.request_id,
        caller=made.caller,
        time=timestamp(made.at_ms),
        dead_letter_topic=str(made.topic),
        positions=map(to_position, made.letters),
        letters=made.size,
        reason=made.reason,
        successor=to_position(made.successor),
    )


def _life(each: Life) -> pb.DeadLetterLife:
    return pb.DeadLetterLife(
        letter=to_position(each.letter),
        time=timestamp(each.at_ms),
        reason=_reason("" if each.why is None else each.why.value),
        attempts=min(max(0, each.attempts), _UINT32_MAX),
        failures=_failures(each.failures),
    )


def _reason(why: str) -> pb.DeadLetterReason.ValueType:
    reason = f"DEAD_LETTER_REASON_{why}"
    if reason in pb.DeadLetterReason.keys():  # noqa: SIM118 (an enum is no mapping)
        return pb.DeadLetterReason.Value(reason)
    return pb.DEAD_LETTER_REASON_UNSPECIFIED


def _failures(failures: Iterable[FailedDelivery]) -> Iterator[pb.FailedDelivery]:
    for how, at_ms, consumer, reason in failures:
        failure = pb.DeliveryFailure.Value(f"DELIVERY_FAILURE_{how.value}")
        if 0 <= at_ms <= TIME_MAX_MS:
            yield pb.FailedDelivery(
                failure=failure, time=timestamp(at_ms), consumer=consumer, reason=reason
            )


def _number(text: str, most: int) -> int:
    """A number in a property; 0 if it is none, or too high."""
    found = int(text) if text.isascii() and text.isdecimal() and len(text) <= 20 else 0
    return found if found <= most else 0

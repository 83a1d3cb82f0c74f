"""Dead letters on the wire."""

import json
from collections.abc import Iterator
from typing import Final

from seqgate.api.dispatcher.v1 import dispatcher_pb2 as pb
from seqgate.api.ledger.v1.ledger_pb2 import StoredEntry
from seqgate.keys import sticky_key
from seqgate.services.dispatcher.core.effects import AfterDeadLetter
from seqgate.services.dispatcher.entries import position_of
from seqgate.services.dispatcher.letters.listing import origin_of
from seqgate.services.dispatcher.letters.returns import redrives_of
from seqgate.services.dispatcher.ports import ATTEMPTS, FAILURES, INTERNAL, ORIGIN, REASON
from seqgate.services.dispatcher.shell.live import Live
from seqgate.services.runtime.positions import to_position
from seqgate.times import TIME_MAX_MS, timestamp
from seqgate.types import TopicName

_UINT32_MAX: Final = 2**32 - 1
_UINT64_MAX: Final = 2**64 - 1


def letter(live: Live, where: TopicName, entry: StoredEntry) -> pb.DeadLetter:
    """A letter in the dead letter topic `where`, and what waits behind it. Publishers may forge
    properties: what they cannot mean is left out."""
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
        payload_bytes=entry.payload_bytes or len(entry.payload),
        time=entry.append_time,
        attempts=_number(properties.get(ATTEMPTS, ""), _UINT32_MAX),
        failures=_failures(properties.get(FAILURES, "")),
        redriven=live.returns.is_redriven(where, position_of(entry)),
        redrives=redrives_of(entry),
    )
    reason = f"DEAD_LETTER_REASON_{properties.get(REASON, '')}"
    if reason in pb.DeadLetterReason.keys():  # noqa: SIM118 (an enum is no mapping)
        found.reason = pb.DeadLetterReason.Value(reason)
    if metadata.num_chunks_from_msg > 1:
        found.chunk_id = metadata.chunk_id
    machine = live.machine
    own = machine.lane_key(key)
    state = machine.gaps.state(own)
    if state is None or state.after is AfterDeadLetter.CONTINUE or state.gap.position != origin:
        return found
    found.holds_key = True
    lane, slot = machine.lanes.get(own), machine.slot_of(own)
    found.waiting_entries = 0 if lane is None else lane.parked
    lags = slot is not None and slot.lag is not None
    found.lags = lags or (lane is not None and lane.lag is not None)
    return found


def _failures(text: str) -> Iterator[pb.FailedDelivery]:
    try:
        failures = json.loads(text) if text else []
        for how, at_ms, consumer in failures:
            failure = pb.DeliveryFailure.Value(f"DELIVERY_FAILURE_{how}")
            if 0 <= at_ms <= TIME_MAX_MS:
                yield pb.FailedDelivery(failure=failure, time=timestamp(at_ms), consumer=consumer)
    except (TypeError, ValueError, RecursionError):
        return


def _number(text: str, most: int) -> int:
    """A number in a property; 0 if it is none, or too high."""
    found = int(text) if text.isascii() and text.isdecimal() and len(text) <= 20 else 0
    return found if found <= most else 0

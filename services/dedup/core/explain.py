"""Explains how a sequence id would be judged."""

from typing import NamedTuple

from seqgate.services.dedup.core.policy import EffectivePolicy, Source
from seqgate.services.dedup.core.sequence import Marks, admit
from seqgate.services.deduplication import NEVER, Claim, Verdict
from seqgate.types import Position

_LEVELS = {
    Source.DEFAULT: "by default",
    Source.CLUSTER: "by the cluster's policy",
    Source.NAMESPACE: "by the namespace's policy",
    Source.TOPIC: "by the topic's policy",
    Source.SYSTEM_TOPIC: "because this is a system topic",
}


class Explanation(NamedTuple):
    verdict: Verdict
    text: str


def explain(
    policy: EffectivePolicy,
    marks: Marks | None,
    sequence_id: int,
    *,
    known_topic: bool,
    snapshot: Position | None = None,
) -> Explanation:
    """`snapshot` is the position of the topic's newest one, if it is known to have one."""
    enabled, source = policy.enabled
    if not enabled:
        return Explanation(
            Verdict.NEW,
            f"Deduplication is off {_LEVELS[source]}: every message is stored.",
        )
    if marks is None:
        return Explanation(Verdict.NEW, _unknown(snapshot, known_topic=known_topic))

    _, (verdict,), aborts = admit(marks, [Claim(sequence_id, sequence_id)])
    persisted, pushed = marks.decided, marks.pushed
    match verdict:
        case Verdict.NEW if sequence_id == pushed:
            why = (
                f"{_unfinished(marks)} Sent again, in one piece or from its first chunk, it takes "
                "the place of that attempt."
            )
        case Verdict.NEW if aborts:
            why = (
                f"{sequence_id} is above every admitted id (highest: {pushed}). "
                f"{_unfinished(marks)} That attempt ends, incomplete, when this is stored."
            )
        case Verdict.NEW:
            if pushed == NEVER:
                why = f"No id was admitted before {sequence_id}."
            else:
                why = f"{sequence_id} is above every admitted id (highest: {pushed})."
            if pushed > persisted:
                why += (
                    f" What is above {_mark(persisted)} is still being written: should that have "
                    "to be sent again, this is held until then."
                )
        case Verdict.IN_FLIGHT:
            why = (
                f"{sequence_id} is not above {_mark(pushed)}, the highest admitted id, but above "
                f"{_mark(persisted)}, the last id that is known to be durable: an earlier copy is "
                "being written."
            )
        case Verdict.DUPLICATE:
            why = (
                f"{sequence_id} is not above {_mark(persisted)}, the last durable id of this "
                "producer: it was stored before, or overtaken by a higher id and never stored. "
                "The log knows which."
            )
        case _:
            raise AssertionError(f"a single id cannot be {verdict}")
    return Explanation(verdict, why)


def _unknown(snapshot: Position | None, *, known_topic: bool) -> str:
    if known_topic:
        return (
            "This producer is unknown: it has stored nothing, or was dropped after inactivity or "
            "eviction."
        )
    parts = "the log" if snapshot is None else f"the snapshot at {snapshot} and the log after it"
    return (
        f"This topic has no deduplication state: it is rebuilt from {parts} when a producer "
        "connects, and the verdict may differ then."
    )


def _unfinished(marks: Marks) -> str:
    chunk = marks.pushed_chunk
    assert chunk is not None
    return (
        f"{marks.pushed} is a large message of {chunk.num_chunks} chunks, admitted up to chunk "
        f"{chunk.chunk_id}."
    )


def _mark(sequence_id: int) -> str:
    return "nothing" if sequence_id == NEVER else str(sequence_id)

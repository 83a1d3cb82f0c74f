"""Explanations agree with verdicts, and give the cause."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqgate.services.dedup.core.explain import explain
from seqgate.services.dedup.core.policy import EffectivePolicy, Source, Sourced
from seqgate.services.dedup.core.sequence import Marks, admit
from seqgate.services.deduplication import Claim, Verdict
from seqgate.types import Chunk, Position

ON = EffectivePolicy()
OFF = EffectivePolicy(enabled=Sourced(value=False, source=Source.NAMESPACE))
FIRST, SECOND = (Chunk("a", each, 3, 90) for each in range(2))
INSIDE = Marks(7, 7, SECOND, SECOND)
"""Chunks 0 and 1 of message 7 are durable."""


@pytest.mark.parametrize(
    ("policy", "marks", "known_topic", "sequence_id", "verdict", "words"),
    [
        (ON, Marks(4, 7), True, 8, Verdict.NEW, "above every admitted id (highest: 7)"),
        (ON, Marks(4, 7), True, 5, Verdict.IN_FLIGHT, "an earlier copy is being written"),
        (ON, Marks(4, 7), True, 4, Verdict.DUPLICATE, "The log knows which"),
        (ON, None, True, 4, Verdict.NEW, "This producer is unknown"),
        (ON, Marks(), True, 4, Verdict.NEW, "No id was admitted before 4"),
        (ON, None, False, 4, Verdict.NEW, "This topic has no deduplication state"),
        (ON, INSIDE, True, 6, Verdict.DUPLICATE, "6 is not above 6, the last durable id"),
        (ON, INSIDE, True, 7, Verdict.NEW, "7 is a large message of 3 chunks, admitted up to"),
        (ON, INSIDE, True, 7, Verdict.NEW, "from its first chunk, it takes the place of that"),
        (ON, INSIDE, True, 8, Verdict.NEW, "That attempt ends, incomplete, when this is stored"),
        (ON, Marks(4, 7, None, SECOND), True, 8, Verdict.NEW, "admitted up to chunk 1"),
        (ON, Marks(4, 7, None, SECOND), True, 7, Verdict.IN_FLIGHT, "an earlier copy is being"),
        (ON, Marks(7, 8, SECOND), True, 9, Verdict.NEW, "(highest: 8)"),
        (OFF, Marks(4, 7), True, 4, Verdict.NEW, "off by the namespace's policy"),
    ],
)
def test_a_verdict_is_explained(
    policy: EffectivePolicy,
    marks: Marks | None,
    known_topic: bool,
    sequence_id: int,
    verdict: Verdict,
    words: str,
) -> None:
    explanation = explain(policy, marks, sequence_id, known_topic=known_topic)
    assert explanation.verdict is verdict
    assert words in explanation.text


def test_a_lost_state_is_explained_with_the_snapshot_it_is_rebuilt_from() -> None:
    text = explain(ON, None, 4, known_topic=False, snapshot=Position(1, 9)).text
    assert "rebuilt from the snapshot at 1:9 and the log after it" in text
    assert "rebuilt from the log when" in explain(ON, None, 4, known_topic=False).text


CHUNKS = st.sampled_from([None, FIRST, SECOND, FIRST._replace(uuid="b")])


@given(st.integers(-1, 9), st.integers(0, 5), CHUNKS, CHUNKS, st.integers(0, 20))
def test_an_explanation_judges_as_admit_does(
    persisted: int, ahead: int, stored: Chunk | None, reached: Chunk | None, asked: int
) -> None:
    inside = stored if persisted >= 0 else None
    marks = Marks(persisted, persisted + ahead, inside, reached)
    _, (verdict,), _ = admit(marks, [Claim(asked, asked)])
    assert explain(ON, marks, asked, known_topic=True).verdict is verdict

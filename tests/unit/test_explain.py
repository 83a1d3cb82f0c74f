"""Explanations agree with verdicts, and say why."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.dedup.core.explain import explain
from services.dedup.core.policy import EffectivePolicy, Source, Sourced
from services.dedup.core.sequence import Claim, Marks, Verdict, admit

ON = EffectivePolicy()
OFF = EffectivePolicy(enabled=Sourced(value=False, source=Source.NAMESPACE))


@pytest.mark.parametrize(
    ("policy", "marks", "known_topic", "sequence_id", "verdict", "words"),
    [
        (ON, Marks(4, 7), True, 8, Verdict.NEW, "above everything that was let through so far (7)"),
        (ON, Marks(4, 7), True, 5, Verdict.IN_FLIGHT, "an earlier copy is being written"),
        (ON, Marks(4, 7), True, 4, Verdict.DUPLICATE, "The log knows which"),
        (ON, None, True, 4, Verdict.NEW, "Nothing is remembered of this producer"),
        (ON, None, False, 4, Verdict.NEW, "Nothing is remembered of this topic"),
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


@given(st.integers(-1, 9), st.integers(0, 5), st.integers(0, 20))
def test_an_explanation_judges_as_admit_does(persisted: int, ahead: int, asked: int) -> None:
    marks = Marks(persisted, persisted + ahead)
    _, (verdict,), _ = admit(marks, [Claim(asked, asked)])
    assert explain(ON, marks, asked, known_topic=True).verdict is verdict

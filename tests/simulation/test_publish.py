"""P1 to P3 over many seeded histories of the publish path."""

import inspect
import sys
import textwrap
from itertools import chain
from typing import Any

import pytest

from seqgate.client._chunking import LargeMessage
from seqgate.client._outbox import Outbox
from seqgate.services import deduplication
from seqgate.services.dedup.core import sequence
from seqgate.services.dedup.core import topic as dedup
from seqgate.services.dedup.core.sequence import _judge_chunk
from seqgate.services.dedup.core.topic import TopicState
from seqgate.services.ledger.core import receipt
from seqgate.services.ledger.core.writer import TopicWriter
from tests.simulation import publish
from tests.simulation.publish import World
from tests.support.depth import times

HISTORIES = times(quick=120, full=3_000)
SWITCHING_HISTORIES = times(quick=60, full=1_000)
MUTANT_HISTORIES = 3_000
MISSING = {
    "state.withdraw_all()\n        return state, True": 1_253,
    "if unit.session not in self._sessions:\n                continue": 578,
    "under_way = (self._admitting, self._ready, self._writing)": 249,
    "if held and verdict is not Verdict.DUPLICATE:": 140,
}
"""Mutants that few histories notice, each with a seed that does, where the search starts."""


def test_every_message_is_stored_once_in_order_despite_faults(seed: int) -> None:
    for each in range(seed, seed + HISTORIES):
        try:
            World(each).run()
        except Exception as error:
            raise AssertionError(f"World({each}).run()") from error


def test_switching_deduplication_on_under_load_leaves_no_hole(seed: int) -> None:
    for each in range(seed, seed + SWITCHING_HISTORIES):
        try:
            World(each, enabled=False).run()
        except Exception as error:
            raise AssertionError(f"World({each}, enabled=False).run()") from error


# Each rule of the publish path, removed: the simulation must notice.
RULES: list[tuple[Any, str, str]] = [
    # publications after a failure are held back
    (TopicWriter, "if unit.session in self._on_hold:", "if False:"),
    (TopicWriter, "if not self._on_hold:", "if True:"),
    (TopicWriter, "if unit.session not in self._sessions:\n                continue", "pass"),
    # claims admitted and not written are withdrawn before the next question to dedup
    (
        TopicWriter,
        "self.phase = Phase.ALIGNING\n        self._reopen = self._reopen or not outcome_known",
        "self._reopen = self._reopen or not outcome_known",
    ),
    # a duplicate of a publication in flight waits
    (TopicWriter, "case Verdict.IN_FLIGHT | Verdict.HELD:", "case Verdict.HELD:"),
    (TopicWriter, "case Verdict.DUPLICATE:", "case Verdict.DUPLICATE | Verdict.IN_FLIGHT:"),
    # nothing overtakes a waiting publication
    (sequence.admit, "if held and verdict is not Verdict.DUPLICATE:", "if False:"),
    # a partly stored batch is not stored whole
    (sequence._judge, "if claim.lowest > marks.pushed", "if claim.highest > marks.pushed"),
    # the revision reveals lost claims
    (
        TopicState,
        "if writer.revision is not None and writer.revision != self.revision:",
        "if False:",
    ),
    # positions reveal lost entries
    (TopicState, "if _ends_before(self.confirmed, position):", "if False:"),
    (TopicState, "if _ends_before(self.confirmed, after):", "if False:"),
    # a snapshot contains durable marks, not claims
    (TopicState, "marks.persisted, marks.persisted_chunk", "marks.pushed, marks.pushed_chunk"),
    (TopicState, "Marks(highest, highest, unfinished, unfinished)", "Marks(highest, highest)"),
    # a replaced state gets a new revision
    (TopicState, "state.withdraw_all()\n        return state, True", "return state, True"),
    # a producer connects once nothing of it is pending
    (TopicWriter, "under_way = (self._admitting, self._ready, self._writing)", "under_way = ()"),
    # the client resumes only after every receipt
    (Outbox, "if self._paused and not self._parcels_out", "if self._paused"),
    # a chunk follows the previous one, of its own layout
    (_judge_chunk, "Verdict.LAYOUT_CONFLICT if chunk.chunk_id else Verdict.NEW", "Verdict.NEW"),
    (_judge_chunk, "if reached.layout == chunk.layout:", "if True:"),
    (_judge_chunk, "and stored.layout == chunk.layout", ""),
    # the id of a large message counts with its last chunk
    (deduplication.advance, "None if chunk.is_last else chunk", "None"),
    # an entry that ends an attempt names it
    (TopicWriter, "(about_chunks and _ended_by(unit, attempts)) or aborted", '""'),
    # an attempt has a unique name, and one that cannot continue is over
    (LargeMessage, "uuid.uuid4().hex", "str(self.message.sequence_id)"),
    (Outbox, "parcel.large.broken = True", "pass"),
]


@pytest.mark.deep
@pytest.mark.parametrize(("owner", "right", "wrong"), RULES)
def test_a_missing_rule_is_found(
    monkeypatch: pytest.MonkeyPatch, seed: int, owner: Any, right: str, wrong: str
) -> None:
    source = textwrap.dedent(inspect.getsource(owner))
    mutated = source.replace(textwrap.dedent(right), wrong).replace(right, wrong)
    assert mutated != source, f"{owner.__name__} has no {right!r}"
    home = sys.modules[owner.__module__]
    scope = vars(home).copy()
    exec(compile(mutated, "mutant", "exec"), scope)
    mutant = scope[owner.__name__]
    name = owner.__name__
    for module in (publish, dedup, sequence, deduplication, receipt):
        if getattr(module, name, None) is owner:
            monkeypatch.setattr(module, name, mutant)

    for each in chain((MISSING.get(right, seed),), range(seed, seed + MUTANT_HISTORIES)):
        try:
            World(each).run()
        except Exception:
            return
    pytest.fail(f"every history passes without {right!r}")

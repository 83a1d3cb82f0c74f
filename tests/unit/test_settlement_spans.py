"""Spans that last until a consumer's settlement is durable, and spans of dead letters."""

from collections.abc import Sequence
from typing import Any

import pytest
from opentelemetry.sdk.trace.sampling import ALWAYS_ON

from seqgate.api.common.v1.common_pb2 import Position as WirePosition
from seqgate.api.dispatcher.v1 import dispatcher_pb2 as pb
from seqgate.api.entry.v1.entry_pb2 import EntryMetadata
from seqgate.api.ledger.v1.ledger_pb2 import StoredEntry
from seqgate.services.dispatcher import spans as message_spans
from seqgate.services.dispatcher.adapters.memory import MemoryCursors
from seqgate.services.dispatcher.core.effects import AfterDeadLetter, DeadLetter, Delivery
from seqgate.services.dispatcher.core.positions import Acknowledged
from seqgate.services.dispatcher.cursor.tenure import Tenure
from seqgate.services.dispatcher.letters.graveyard import Graveyard
from seqgate.services.dispatcher.ports import Letter, LetterRefused
from seqgate.services.dispatcher.shell.answers import Answers, settled_response
from seqgate.services.errors import Fenced
from seqgate.telemetry import inject, names
from seqgate.types import Position, TopicName
from tests.support.recorded import Recorded, links

TOPIC = TopicName.parse("test/spans/topic")
REFUSED = LetterRefused("it is full", retry_after_s=1, dead_letter_topic=TOPIC)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "otlp")
    recorded = Recorded(ALWAYS_ON)
    monkeypatch.setattr(message_spans, "_TRACER", recorded.tracer)
    return recorded


class Told:
    """A consumer's stream: its responses, and its end."""

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.error: Exception | None = None

    def put(self, response: pb.ConsumeResponse) -> None:
        self.told.append(response)

    def deliver(self, deliveries: Sequence[Delivery]) -> None:
        self.told += deliveries

    def finish(self, error: Exception | None = None, *, at_once: bool = True) -> None:
        del at_once
        self.error = error


def ended(recorded: Recorded) -> list[str]:
    return [span.name for span in recorded.spans]


def test_a_span_ends_when_its_settlement_is_durable(recorded: Recorded) -> None:
    answers, told = Answers(), Told()
    spans = {name: recorded.tracer.start_span(name) for name in ("now", "1", "2", "2, too")}
    for number, name in ((0, "now"), (1, "1"), (2, "2"), (2, "2, too")):
        answers.give(told, settled_response(number), number, span=spans[name])
    answers.give(told, settled_response(9), 2)
    assert ended(recorded) == ["now"]
    assert answers.followed(2) == [spans[name].get_span_context() for name in ("2", "2, too")]
    answers.durable(1)
    assert ended(recorded) == ["now", "1"]
    answers.durable(2)
    assert ended(recorded) == ["now", "1", "2", "2, too"]
    assert answers.followed(1) == answers.followed(2) == []
    assert told.told == [settled_response(number) for number in (0, 1, 2, 2, 9)]


def test_a_span_records_that_its_settlement_was_lost(recorded: Recorded) -> None:
    answers, told = Answers(), Told()
    answers.give(told, pb.ConsumeResponse(), 1, span=recorded.tracer.start_span("settle"))
    answers.stop(Fenced("another instance has it"))
    assert isinstance(told.error, Fenced)
    settle = recorded.one("settle")
    assert (settle.attributes or {})[names.ERROR_TYPE] == Fenced.reason


class OneEntry:
    def __init__(self, properties: dict[str, str]) -> None:
        metadata = EntryMetadata(properties=properties)
        self.entry = StoredEntry(position=WirePosition(ledger_id=1, entry_id=0), metadata=metadata)

    async def fetch(self, *_: object) -> Sequence[StoredEntry]:
        return [self.entry]


class Letters:
    """A dead letter topic that refuses the first letter."""

    def __init__(self) -> None:
        self.tries = 0

    async def put(self, letter: Letter) -> bool:
        del letter
        self.tries += 1
        if self.tries == 1:
            raise REFUSED
        return True


@pytest.mark.parametrize("is_followed", [True, False])
async def test_a_dead_letter_has_a_span_for_each_attempt(
    recorded: Recorded, is_followed: bool
) -> None:
    properties: dict[str, str] = {}
    message = recorded.tracer.start_span("message")
    if is_followed:
        inject(message.get_span_context(), properties)
    log: Any = OneEntry(properties)
    cursors = MemoryCursors()
    await cursors.create(TOPIC, "s", None, {})
    lease = await cursors.acquire(TOPIC, "s", "me", 60_000)
    tenure = Tenure(cursors, TOPIC, "s", "me", lease.epoch, 60_000)
    graveyard = Graveyard(tenure, log, Letters())
    await graveyard.load(await cursors.get(TOPIC, "s"), Acknowledged(None))
    what = DeadLetter(Position(1, 0), b"k", 3, AfterDeadLetter.CONTINUE)
    with pytest.raises(LetterRefused):
        await graveyard.bury(what)
    await graveyard.bury(what)
    found = [span for span in recorded.spans if span.name == f"dead_letter {TOPIC}"]
    assert [span.status.is_ok for span in found] == ([False, True] if is_followed else [])
    for span in found:
        origin = message.get_span_context()
        assert span.parent is not None
        assert span.parent.span_id == origin.span_id
        assert links(span) == [(origin.trace_id, origin.span_id)]
        assert (span.attributes or {})[names.ATTEMPTS] == 3
        to = (span.attributes or {})[names.DEAD_LETTER_TOPIC]
        assert to == str(graveyard.dead_letter_topic)
    assert recorded.spans == found

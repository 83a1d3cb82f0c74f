"""services/ledger/core/writer.py, told as stories: tests/data/writer/*.txt.

A line of a story is an event, and the indented lines below it are the writer's effects.
SEQGATE_TEST_REWRITE=1 writes the current effects into the stories, to be reviewed in the diff.

Streams are called by their producer's name; p' is another stream of producer p, and p'' a third. A
unit is called by its stream and its ids: p5 is a message, p4-8 a batch, p0,3,4 a batch with gaps,
p{1,2|0,3,4} a flush by key, p[5|7|8-9] a run, p7! a marker, p8#a0/3 the first of the three chunks
of attempt a.
`resume` before a unit ends a hold, and ^a after an entry aborts attempt a.

Positions are ledger:entry, and - is the position before the first one. (1:0..1:2] are the entries
after 1:0, through 1:2.

    take 2 after 1:4          a new writer, without streams; take 1: of an empty topic
    limit NAME=NUMBER ...     before `take`: see Limits
    open p, close p           a stream opens, or closes: the units that it drops are shown
    left-unfinished p a       the newest entry of the stream's producer is a chunk of this attempt
    ask-policy                does the topic deduplicate now? `state` shows an unanswered question
    submit p5 resume p6 ...   units arrive together
    judged new in-flight ...  verdicts, one per claim; persisted ids as duplicate@5, partial@5; an
                              aborted attempt as new^a
    aligned, confirmed, changed, disabled, behind 1:3
    dedup-failed REASON       a refusal by its reason
    dedup-busy REASON         a refusal before anything was done
    appended, append-failed REASON, append-lost REASON (the outcome is not known)
    log-read 1:0=p5 1:1=!     entries of the log, ! for a marker; `more 3` at the end: 3 more
    log-trimmed, log-failed REASON, look-up-failed p5 REASON
    reopened 2 after 1:4, reopen-failed REASON
    pause-over, rested
    state                     the properties that the shell reads

A confirmation lists ids, and ! for every entry of which it names none: a marker, or an entry that
another of its unit follows.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Final

import pytest

from seqgate.services.deduplication import (
    NEVER,
    Confirmation,
    Judged,
    ProducerVerdicts,
    TooManyProducers,
    Verdict,
)
from seqgate.services.errors import DomainError, Draining, Fenced, StoreFull, StoreUnavailable
from seqgate.services.ledger.core.attempts import OpenAttempt
from seqgate.services.ledger.core.entry import Entry, Unit, run_of, unit_of
from seqgate.services.ledger.core.receipt import Status
from seqgate.services.ledger.core.writer import (
    Admit,
    Answer,
    Append,
    Confirm,
    Effect,
    Limits,
    Logged,
    LookUp,
    Pause,
    ReadLog,
    Reopen,
    Rest,
    Rollback,
    Stop,
    TopicWriter,
)
from seqgate.services.ledger.live import Recovering
from seqgate.services.ledger.ports import DedupUnavailable, EntryCorrupt
from seqgate.types import Position
from tests.support.entries import batch, chunk, marker, single

STORIES: Final = Path(__file__).resolve().parents[1] / "data" / "writer"

REWRITE: Final = "SEQGATE_TEST_REWRITE" in os.environ

INDENT: Final = "    "

_ERRORS: Final = {
    each.reason: each
    for each in (
        DedupUnavailable,
        Draining,
        EntryCorrupt,
        Fenced,
        Recovering,
        StoreFull,
        StoreUnavailable,
        TooManyProducers,
    )
}


@pytest.mark.parametrize("story", sorted(each.stem for each in STORIES.glob("*.txt")))
def test_the_writer_follows_its_golden_transcript(story: str) -> None:
    file = STORIES / f"{story}.txt"
    written = file.read_text()
    told = tell(written)
    if REWRITE:
        file.write_text(told)
    assert told == written


def test_golden_transcripts_exist() -> None:
    assert len(list(STORIES.glob("*.txt"))) >= 12


def test_unfinished_attempts_of_closed_streams_are_forgotten() -> None:
    """Even if none of their messages was stored."""
    teller = Teller()
    for line in (
        "take 2 after 1:1",
        "open p",
        "open q",
        "left-unfinished p5#a0/3",
        "left-unfinished q5#b0/3",
        "aligned",
        "submit p6 q7",
        "close p",
        "close q",
        "judged duplicate@6 new",
        "append-failed STORE_FULL",
    ):
        teller.hear(line.split())
    assert not teller.left_unfinished


def tell(story: str) -> str:
    """The story with the writer's current effects."""
    teller = Teller()
    lines = []
    for line in story.splitlines():
        if line.startswith(INDENT):
            continue
        lines.append(line)
        if line and not line.startswith("#"):
            lines += [INDENT + each for each in teller.hear(line.split())]
    return "".join(f"{line}\n" for line in lines)


@dataclass
class _Answer:
    """The answer to the claims of one producer."""

    verdicts: list[Verdict] = field(default_factory=list)
    decided: int = NEVER
    aborts: dict[int, str] = field(default_factory=dict)


class Teller:
    """Parses lines into events, and formats effects as lines."""

    def __init__(self) -> None:
        self._limits = Limits()
        self._revision = 0
        self._requests = 0
        self._streams: list[str] = []
        self._units: dict[str, Unit] = {}
        self._questions: list[int] = []

    @property
    def left_unfinished(self) -> dict[int, OpenAttempt]:
        """The unfinished attempts that the writer remembers, by stream."""
        return self._writer._unfinished

    def hear(self, words: Sequence[str]) -> list[str]:
        event, *rest = words
        known: dict[str, Callable[[list[str]], list[str] | list[Effect]]] = {
            "limit": self._limit,
            "take": self._take,
            "open": self._open,
            "close": self._close,
            "left-unfinished": self._left_unfinished,
            "ask-policy": self._ask_policy,
            "submit": self._submit,
            "judged": self._judged,
            "aligned": lambda _: self._writer.aligned(self._new_revision()),
            "confirmed": lambda _: self._writer.confirmed(),
            "changed": lambda _: self._writer.changed(),
            "disabled": lambda _: self._writer.disabled(),
            "behind": lambda given: self._writer.behind(_position(given[0])),
            "dedup-failed": lambda given: self._writer.dedup_failed(_error(given[0])),
            "dedup-busy": lambda given: self._writer.dedup_failed(
                _error(given[0]), outcome_known=True
            ),
            "appended": lambda _: self._writer.appended(0),
            "append-failed": lambda given: self._append_failed(given, known=True),
            "append-lost": lambda given: self._append_failed(given, known=False),
            "log-read": self._log_read,
            "log-trimmed": lambda _: self._writer.log_trimmed(),
            "log-failed": lambda given: self._writer.log_failed(_error(given[0])),
            "look-up-failed": lambda given: self._writer.look_up_failed(
                self._units[given[0]], _error(given[1])
            ),
            "reopened": lambda given: self._writer.reopened(int(given[0]), _after(given)),
            "reopen-failed": lambda given: self._writer.reopen_failed(_error(given[0])),
            "pause-over": lambda _: self._writer.pause_over(),
            "rested": lambda _: self._writer.rested(),
            "state": self._state,
        }
        told: list[str] = []
        for each in known[event](rest):
            told += [each] if isinstance(each, str) else self._say(each)
        return told

    # ---- events

    def _limit(self, given: list[str]) -> list[str]:
        pairs = (each.split("=") for each in given)
        self._limits = self._limits._replace(**{name: int(value) for name, value in pairs})
        return []

    def _take(self, given: list[str]) -> list[Effect]:
        self._streams, self._questions = [], []
        self._writer = TopicWriter(1, int(given[0]), _after(given), self._limits)
        return self._writer.start()

    def _open(self, given: list[str]) -> list[str]:
        (stream,) = given
        assert stream not in self._streams
        self._streams.append(stream)
        self._writer.open_session(self._streams.index(stream))
        return []

    def _close(self, given: list[str]) -> list[str]:
        dropped = self._writer.close_session(self._streams.index(given[0]))
        return [f"drop {self._names(dropped)}"] if dropped else []

    def _left_unfinished(self, given: list[str]) -> list[str]:
        word, *torn = given
        unit = self._unit(word, resume=False)
        assert unit.chunk is not None
        attempt = OpenAttempt(unit.highest, unit.chunk, is_whole=not torn)
        self._writer.left_unfinished(unit.session, attempt)
        return []

    def _ask_policy(self, given: list[str]) -> list[Effect]:
        number, effects = self._writer.ask_policy()
        self._questions.append(number)
        return effects

    def _submit(self, given: list[str]) -> list[Effect]:
        units, resume = [], False
        for word in given:
            if word == "resume":
                resume = True
                continue
            units.append(self._unit(word, resume=resume))
            resume = False
        return self._writer.submit(units)

    def _judged(self, given: list[str]) -> list[Effect]:
        call = self._writer._call
        assert isinstance(call, Admit)
        answers: dict[str, _Answer] = {}
        for unit, word in zip(call.units, given, strict=True):
            answer = answers.setdefault(unit.producer, _Answer())
            word, _, uuid = word.partition("^")
            if uuid:
                answer.aborts[len(answer.verdicts)] = uuid
            name, _, decided = word.partition("@")
            answer.verdicts.append(Verdict[name.upper().replace("-", "_")])
            answer.decided = int(decided or answer.decided)
        # Admitted claims change the state, and with it the revision.
        is_new = any(Verdict.NEW in each.verdicts for each in answers.values())
        revision = self._new_revision() if is_new else self._revision
        producers = [
            ProducerVerdicts(each.verdicts, each.decided, each.aborts) for each in answers.values()
        ]
        return self._writer.judged(Judged(revision, producers))

    def _append_failed(self, given: list[str], *, known: bool) -> list[Effect]:
        return self._writer.append_failed(_error(given[0]), outcome_known=known)

    def _log_read(self, given: list[str]) -> list[Effect]:
        remaining = 0
        if "more" in given:
            given, (_, count) = given[:-2], given[-2:]
            remaining = int(count)
        logged = []
        for word in given:
            where, _, what = word.partition("=")
            position = _position(where)
            assert position is not None
            producer, highest = (None, 0) if what == "!" else (what[0], int(what[1:]))
            logged.append(Logged(position, producer, highest, 0))
        return self._writer.log_read(logged, remaining)

    def _state(self, given: list[str]) -> list[str]:
        writer = self._writer
        names = sorted({_producer(stream) for stream in self._streams})
        busy = [name for name in names if writer.busy(name)]
        tail = _where(writer.tail)
        told = [f"{writer.phase.name}, ledger {writer.ledger_id}, tail {tail}"]
        told += [f"busy: {' '.join(busy)}"] if busy else []
        told += ["idle"] if writer.idle else []
        told += [] if writer.deduplicating else ["not deduplicating"]
        asked = [each for each in self._questions if not writer.knows_policy(each)]
        told += [f"unanswered {' '.join(map(str, asked))}"] if asked else []
        told += [f"last error {writer.last_error.reason}"] if writer.last_error else []
        return told

    # ---- effects

    def _say(self, effect: Effect) -> Iterator[str]:
        match effect:
            case Answer(unit, receipt):
                what = [receipt.status.name]
                what += [] if receipt.position is None else [_where(receipt.position)]
                what += [] if receipt.error is None else [receipt.error.reason]
                yield f"answer {self._names([unit])}: {' '.join(what)}"
            case LookUp(units):
                for unit, first_new, _ in units:
                    new = "" if first_new is None else f", new from {first_new}"
                    yield f"look up {self._names([unit])}{new}"
            case Admit(position, revision, confirmation, claims):
                at = f"at {_where(position)}, revision {'-' if revision is None else revision}"
                yield f"admit {self._names(claims)} {at}"
                yield from _confirming(confirmation)
            case Confirm(position, confirmation):
                yield f"confirm at {_where(position)}"
                yield from _confirming(confirmation)
            case Rollback(position, confirmation):
                yield f"roll back at {_where(position)}"
                yield from _confirming(confirmation)
            case Append(tail, entries):
                yield f"append {' '.join(map(_entry, entries))} after {_where(tail)}"
            case ReadLog(after, _):
                yield f"read the log after {_where(after)}"
            case Reopen():
                yield "reopen"
            case Pause(seconds):
                yield f"pause {seconds:g} s"
            case Rest():
                yield "rest"
            case Stop(error):
                yield f"stop: {error.reason}"

    # ---- names

    def _unit(self, word: str, *, resume: bool) -> Unit:
        stream = word.partition("#")[0].rstrip("!0123456789,-|{}[]")
        producer = _producer(stream)
        ids = word.removeprefix(stream)
        if ids.endswith("!"):
            entries = [marker(int(ids[:-1]), producer)]
        else:
            entries = [_parse_entry(each, producer) for each in ids.strip("{}[]").split("|")]
        make, count = (run_of, len(entries)) if ids.startswith("[") else (unit_of, 1)
        unit = make(self._streams.index(stream), self._requests + 1, entries, resume=resume)
        self._requests += count
        self._units[word] = unit
        return unit

    def _names(self, units: Sequence[Unit]) -> str:
        return " ".join(self._name(unit) for unit in units) or "nothing"

    def _name(self, unit: Unit) -> str:
        ids = [_entry(entry).removeprefix(unit.producer) for entry in unit.entries]
        text = "|".join(ids)
        if len(ids) > 1:
            text = f"[{text}]" if unit.publications > 1 else "{" + text + "}"
        return f"{self._streams[unit.session]}{text}"

    def _new_revision(self) -> int:
        self._revision += 1
        return self._revision


def _producer(stream: str) -> str:
    return stream.rstrip("'")


def _parse_entry(ids: str, producer: str) -> Entry:
    if "#" in ids:
        sequence_id, _, place = ids.partition("#")
        chunk_id, _, chunks = place[1:].partition("/")
        return chunk(int(sequence_id), place[0], int(chunk_id), int(chunks), producer)
    if "," in ids:
        return batch([int(each) for each in ids.split(",")], producer)
    if "-" in ids:
        lowest, highest = map(int, ids.split("-"))
        return batch(range(lowest, highest + 1), producer)
    return single(int(ids), producer)


def _entry(entry: Entry) -> str:
    ids = list(entry.sequence_ids)
    if entry.messages is None:
        text = str(ids[0])
    elif len(ids) > 1 and all(later == earlier + 1 for earlier, later in pairwise(ids)):
        text = f"{ids[0]}-{ids[-1]}"
    else:
        text = ",".join(map(str, ids))
    if entry.chunk is not None:
        text += f"#{entry.chunk.uuid}{entry.chunk.chunk_id}/{entry.chunk.num_chunks}"
    ended = f"^{entry.aborts}" if entry.aborts else ""
    return f"{entry.producer}{text}{'!' if entry.marker else ''}{ended}"


def _confirming(confirmation: Confirmation | None) -> Iterator[str]:
    if confirmation is None:
        return
    listed = [
        f"{each.producer}{highest}" for each in confirmation.producers for highest in each.highest
    ]
    entries = " ".join(listed + ["!"] * (confirmation.entry_count - len(listed)))
    more = f", {confirmation.remaining} more" if confirmation.remaining else ""
    span = f"({_where(confirmation.after)}..{_where(confirmation.through)}]"
    yield f"  confirming {span}: {entries}{more}"


def _where(position: Position | None) -> str:
    return "-" if position is None else str(position)


def _position(text: str) -> Position | None:
    return None if text == "-" else Position(*map(int, text.split(":")))


def _after(given: Sequence[str]) -> Position | None:
    return _position(given[2]) if len(given) > 1 else None


def _error(reason: str) -> DomainError:
    return _ERRORS[reason]("no")


def test_a_run_is_refused_as_its_publications_are() -> None:
    writer = TopicWriter(1, 1, None, Limits())
    writer.open_session(1)
    run = run_of(1, 7, [single(1, "p"), single(2, "p"), single(3, "p")], resume=True)
    answers = writer.refuse([run], StoreFull("no room"))
    assert [
        (each.unit.request_id, each.receipt.status) for each in answers if isinstance(each, Answer)
    ] == [(7, Status.FAILED), (8, Status.SKIPPED), (9, Status.SKIPPED)]

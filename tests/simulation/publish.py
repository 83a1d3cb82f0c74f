"""The publish path in one thread, from one seed: clients, ledger processes, deduplication.

Everything that decides is real: the client's Outbox, the servicer's translation, TopicWriter,
TopicState. Calls between them wait in a list, and the seed picks which one happens next and how:
done; refused; done with its reply lost; lost, and done later, after its sender gave up. Snapshots
are taken at any time and loaded where a state ends before them, and so are states that a job folded
from part of the log.

Processes crash, or are replaced and live on as zombies. Streams break. Applications restart and
resend what has no receipt. Redis forgets everything, or returns to an older state.

After every step:

    P1  a message with a receipt is in the log at the receipt's position, and stays there
    P2  no (producer, sequence id) is in the log twice
    P3  a receipt says STORED only if the message is stored
        and the log is in order per producer

At the end, without faults, every message of every application is stored, a reader of the log gets
each of them once, byte for byte, and the dedup state equals the fold over the log.

Some applications cut their messages into chunks, and into different ones after a restart. For
these, each chunk directly follows the previous one among its producer's entries, no chunk is stored
twice, and the entry that ends an attempt names it.
"""

import copy
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random
from typing import Any

from seqgate.api.common.v1 import common_pb2
from seqgate.api.entry.v1 import entry_pb2
from seqgate.api.ledger.v1 import ledger_pb2
from seqgate.api.ledger.v1 import ledger_pb2 as pb
from seqgate.client._assembler import Assembler, AssemblyLimits, DropReason, Headless
from seqgate.client._chunking import LargeMessage
from seqgate.client._codec import (
    Compression,
    OutgoingMessage,
    decode_entry,
    encode_batch,
    encode_single,
    piece_of,
    position_of,
)
from seqgate.client._outbox import Outbox, Receipt, Resolved
from seqgate.errors import StaleSequenceIdError
from seqgate.message_id import ChunkMessageId
from seqgate.services.dedup.core import snapshot
from seqgate.services.dedup.core import topic as dedup
from seqgate.services.dedup.core.sequence import Marks, advance
from seqgate.services.deduplication import (
    Applied,
    Behind,
    Changed,
    Judged,
    Writer,
)
from seqgate.services.errors import Fenced, StoreFull, StoreUnavailable
from seqgate.services.ledger.core.attempts import OpenAttempt
from seqgate.services.ledger.core.entry import Entry, StoredEntry, Unit, places
from seqgate.services.ledger.core.find import Finder
from seqgate.services.ledger.core.marks import last_open
from seqgate.services.ledger.core.receipt import Fate, Missing, Status, receipt_of, repeated_ids
from seqgate.services.ledger.core.runs import Runs
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
    Phase,
    ReadLog,
    Reopen,
    Rest,
    Rollback,
    Stop,
    TopicWriter,
    claims_of,
)
from seqgate.services.ledger.live import Answered
from seqgate.services.ledger.ports import DedupUnavailable
from seqgate.services.ledger.servicer import (
    EntryLimits,
    LedgerServicer,
    _to_each_receipt,
    _to_receipts,
)
from seqgate.types import Chunk, Position

INCARNATION = 1
PAGE = 3
"""Entries in a page of a replay."""

COPY, STRAY = 0, 2**40
"""Request ids of extra publications that duplicate or contradict an application's own."""

DedupCall = Admit | Confirm | Rollback

STEPS_TO_SETTLE_MAX = 20_000
"""The limit of steps without failures until everything is stored."""


@dataclass
class Log:
    """The durable log."""

    ledger_id: int = 0
    tail: Position | None = None
    entries: list[tuple[Position, Entry]] = field(default_factory=list)

    def take(self) -> tuple[int, Position | None]:
        self.ledger_id += 1
        return self.ledger_id, self.tail

    def append(self, ledger_id: int, expected: Position | None, entries: tuple[Entry, ...]) -> None:
        if ledger_id != self.ledger_id or expected != self.tail:
            raise Fenced("another writer has the topic")
        same = self.tail is not None and self.tail.ledger_id == ledger_id
        entry_id = self.tail.entry_id + 1 if same and self.tail else 0
        for entry in entries:
            self.tail = Position(ledger_id, entry_id)
            self.entries.append((self.tail, entry))
            entry_id += 1

    def decided(self, producer: str) -> int:
        mine = [entry for _, entry in self.entries if entry.producer == producer]
        return mine[-1].highest - mine[-1].unfinished if mine else -1

    def unfinished(self, producer: str) -> OpenAttempt | None:
        return last_open(entry for _, entry in reversed(self.entries) if entry.producer == producer)

    def find(self, producer: str, ids: list[int]) -> list[Fate]:
        finder = Finder(producer, ids)
        for position, entry in self.entries:
            finder.show(StoredEntry(position, 0, entry, len(entry.payload)))
        return [finder.place(each) or Missing.STALE for each in ids]


class State:
    """The state in Redis, with older copies of it."""

    def __init__(self, *, enabled: bool) -> None:
        self.enabled = enabled
        self.state: dedup.TopicState | None = None
        self.copies: list[dedup.TopicState | None] = [None]
        self.snapshot: tuple[Position, dict[str, str]] | None = None

    def run(self, epoch: int, call: Admit | Confirm | Rollback) -> Any:
        if not self.enabled:
            return None
        revision = call.revision if isinstance(call, Admit) else None
        writer = Writer(INCARNATION, epoch, call.position, revision)
        self.state = state = dedup.TopicState.entered_by(self.state, writer)
        match call:
            case Admit():
                outcome = state.admit(
                    writer,
                    call.confirmation,
                    claims_of(call.units),
                    now_ms=0,
                    max_producers=100,
                )
                return self.restored(writer, outcome)
            case Confirm():
                return self.restored(writer, state.confirm(writer, call.confirmation))
            case Rollback():
                return self.restored(writer, state.rollback(writer, call.confirmation, []))

    def restored(self, writer: Writer, outcome: Any) -> Any:
        """The service's answer: if the state lacks entries, it first loads the snapshot."""
        if not isinstance(outcome, Behind) or self.snapshot is None:
            return outcome
        position, properties = self.snapshot
        if not snapshot.covers_more(position, writer, outcome.confirmed):
            return outcome
        read = snapshot.decode(properties, now_ms=0)
        assert read.is_of(INCARNATION, position)
        self.load(position, read.producers, taken_ms=0)
        assert self.state is not None
        return Behind(self.state.confirmed)

    def load(
        self,
        through: Position,
        producers: list[dedup.Persisted],
        *,
        replacing: bool = False,
        taken_ms: int | None = None,
    ) -> None:
        self.state, _ = dedup.TopicState.loaded_by(
            self.state, INCARNATION, through, producers, replacing=replacing, taken_ms=taken_ms
        )

    def take_snapshot(self) -> None:
        """Take a snapshot as the cursor service does: never an older one."""
        frozen = None if self.state is None else self.state.frozen()
        if frozen is None or frozen.confirmed is None:
            return
        if self.snapshot is None or self.snapshot[0] <= frozen.confirmed:
            self.snapshot = frozen.confirmed, snapshot.encode(frozen, taken_ms=0)

    def remember(self) -> None:
        self.copies.append(copy.deepcopy(self.state))


class Process:
    """A ledger process that holds the topic, or believes so."""

    def __init__(self, world: "World") -> None:
        self.world = world
        self.epoch, tail = world.log.take()
        limits = Limits(group_entries_max=world.random.choice((1, 2, 5)), patience=3)
        self.limits = limits
        self.writer = TopicWriter(INCARNATION, self.epoch, tail, limits)
        self.under_way: list[Effect] = []
        self.sessions: dict[int, Application] = {}
        self.stopped = False
        self.perform(self.writer.start())

    def perform(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Answer(unit, receipt):
                    application = self.sessions.get(unit.session)
                    if application is not None:
                        application.take(Answered(unit.request_ids, receipt))
                case Stop():
                    self.stop()
                case _:
                    self.under_way.append(effect)

    def stop(self) -> None:
        self.stopped = True
        for application in self.sessions.values():
            application.disconnect()
        self.sessions.clear()

    def finish(self, effect: Effect, *, failing: bool) -> None:
        """Complete a pending effect."""
        random, writer = self.world.random, self.writer
        match effect:
            case Admit() | Confirm() | Rollback():
                self.perform(self._ask(effect, failing=failing))
            case Append():
                self.perform(self._append(effect, failing=failing))
            case LookUp(units):
                for repeated in units:
                    unit = repeated.unit
                    if failing and random.random() < 0.2:
                        error = StoreUnavailable("lost")
                        self.perform(writer.look_up_failed(unit, error))
                        continue
                    fates = self.world.log.find(unit.producer, repeated_ids(repeated))
                    self.perform([Answer(unit, receipt_of(repeated, fates))])
            case ReadLog(after, _):
                if failing and random.random() < 0.2:
                    self.perform(writer.log_failed(StoreUnavailable("lost")))
                    return
                rest = [each for each in self.world.log.entries if not after or each[0] > after]
                page = [
                    Logged(at, each.producer, each.highest, 0, each.chunk)
                    for at, each in rest[:PAGE]
                ]
                self.perform(writer.log_read(page, len(rest) - len(page)))
            case Reopen():
                if failing and random.random() < 0.3:
                    self.perform(writer.reopen_failed(StoreUnavailable("lost")))
                elif self.world.log.ledger_id != self.epoch:
                    self.perform(writer.reopen_failed(Fenced("another writer has the topic")))
                else:
                    self.epoch, tail = self.world.log.take()
                    self.perform(writer.reopened(self.epoch, tail))
            case Pause():
                self.perform(writer.pause_over())
            case Rest():
                self.perform(writer.rested())

    def _ask(self, call: Admit | Confirm | Rollback, *, failing: bool) -> list[Effect]:
        writer, world = self.writer, self.world
        chance = world.random.random() if failing else 1.0
        lost = DedupUnavailable("lost")
        if chance < 0.1:
            return writer.dedup_failed(lost)
        if chance < 0.2:
            world.late.append((self.epoch, call))  # its sender gave up, and it still arrives
            return writer.dedup_failed(lost)
        try:
            outcome = world.state.run(self.epoch, call)
        except Fenced as error:
            return writer.dedup_failed(error)
        if chance < 0.3:
            return writer.dedup_failed(lost)
        match outcome:
            case None:
                return writer.disabled()
            case Behind(confirmed):
                return writer.behind(confirmed)
            case Changed():
                return writer.changed()
            case Applied(revision):
                confirmed_only = isinstance(call, Confirm)
                return writer.confirmed() if confirmed_only else writer.aligned(revision)
            case Judged():
                return writer.judged(outcome)
        raise AssertionError(outcome)

    def _append(self, append: Append, *, failing: bool) -> list[Effect]:
        chance = self.world.random.random() if failing else 1.0
        if chance < 0.1:
            return self.writer.append_failed(StoreFull("full"), outcome_known=True)
        if chance < 0.15:
            return self.writer.append_failed(StoreUnavailable("lost"), outcome_known=False)
        try:
            self.world.log.append(self.epoch, append.expected_tail, append.entries)
        except Fenced as error:
            return self.writer.append_failed(error, outcome_known=True)
        if chance < 0.2:
            return self.writer.append_failed(StoreUnavailable("lost"), outcome_known=False)
        return self.writer.appended(0)


class Application:
    """Publishes messages of one producer in order, and restarts now and then.

    One kind numbers its messages itself, and resends those without a receipt after a restart. The
    other continues with new messages after the last id that the service knows.
    """

    def __init__(self, world: "World", name: str) -> None:
        self.world = world
        self.name = name
        self.numbers_itself = world.random.random() < 0.7
        self.ids: list[int] = []
        next_id = world.random.choice((0, 0, 2**53))
        for _ in range(world.random.randint(1, 14)):
            self.ids.append(next_id)
            next_id += world.random.choice((1, 1, 1, 2, 7))
        self.cuts = world.random.random() < world.cutting
        self._choose()
        self.acknowledged: dict[int, Any] = {}
        self.next = 0
        self.next_id: int | None = None
        self.run = 0
        self.copies = 0
        self.outbox = Outbox(self._encode, 0, 0)
        self.inbox: list[pb.Receipt | pb.ReceiptRun] = []
        self.process: Process | None = None
        self.session = 0

    @property
    def done(self) -> bool:
        if self.copies:
            return False
        if self.numbers_itself:
            return len(self.acknowledged) == len(self.ids)
        return self.next >= len(self.ids) and not self.outbox.pending

    def disconnect(self) -> None:
        self.process = None
        self.copies = 0
        self.inbox.clear()

    def restart(self) -> None:
        """Restart without memory, at or before the first message without a receipt, with other
        batches."""
        self._close()
        self.run += 1
        self.next_id = None
        if self.numbers_itself:
            known = self.acknowledged
            unsure = next((i for i, each in enumerate(self.ids) if each not in known), 0)
            self.next = self.world.random.randint(0, unsure)
        self._choose()
        self.outbox = Outbox(self._encode, 0, 0)

    def _choose(self) -> None:
        """Choose batches or chunks for this run."""
        random = self.world.random
        self.batching = 1 if self.cuts else random.choice((1, 1, 2, 3, 5))
        self.by_key = random.random() < 0.3
        self.chunk_bytes = random.choice((5, 8, 11, 30)) if self.cuts else 0

    def break_stream(self) -> None:
        self._close()

    def _close(self) -> None:
        if self.process is not None:
            self.process.sessions.pop(self.session, None)
            self.process.writer.close_session(self.session)
        self.disconnect()

    def step(self) -> None:
        """Perform one possible step."""
        if self.process is None:
            self._connect()
        elif self.inbox and self.world.random.random() < 0.7:
            for resolved in self._receive():
                self._note(resolved.message, resolved.outcome)
        elif self.outbox.resume_after_s is not None:
            self.outbox.resume()
        elif self.next < len(self.ids) and self.world.random.random() < 0.5:
            self._hand_over([self._message(each) for each in self._take_ids()])
        else:
            publications = self.outbox.to_send(self.world.random.choice((1, 300, 10_000)))
            if publications is not None:
                units = self._units(publications)
                if self.world.state.enabled and self.world.random.random() < 0.1:
                    # A client that duplicates publications without a receipt.
                    copied = self.world.random.choice(self.world.random.choice(units).divided())
                    units.append(copied._replace(request_id=COPY, resume=False))
                    self.copies += 1
                    if copied.chunk is not None and self.world.random.random() < 0.5:
                        units.append(self._stray(copied, copied.chunk))
                        self.copies += 1
                self.process.perform(self.process.writer.submit(units))

    def take(self, answered: Answered) -> None:
        """Queue receipts, those of a run perhaps in one."""
        short = answered.receipt.status is Status.STORED and self.world.random.random() < 0.5
        for receipts in (_to_receipts if short else _to_each_receipt)([answered]):
            self.inbox += [*receipts.receipts, *receipts.runs]

    def _receive(self) -> list[Resolved]:
        receipt = self.inbox.pop(self.world.random.randrange(len(self.inbox)))
        self.copies -= receipt.request_id in (COPY, STRAY)
        if isinstance(receipt, pb.ReceiptRun):
            return self.outbox.receive_run(receipt)
        if receipt.request_id == COPY:
            assert receipt.status != pb.RECEIPT_STATUS_STALE, "a copy is no stale message"
        return self.outbox.receive(receipt)

    def _stray(self, unit: Unit, chunk: Chunk) -> Unit:
        """A chunk of another attempt at the same message, which never continues."""
        self.world.strays += 1
        stray = Chunk(
            f"stray {self.world.strays}",
            self.world.random.randrange(chunk.num_chunks),
            chunk.num_chunks,
            chunk.total_bytes,
        )
        entry = unit.entries[0]
        metadata = entry_pb2.EntryMetadata.FromString(entry.metadata)
        metadata.uuid, metadata.chunk_id = stray.uuid, stray.chunk_id
        entry = entry._replace(chunk=stray, metadata=metadata.SerializeToString())
        return unit._replace(request_id=STRAY, resume=False, entries=(entry,))

    def _connect(self) -> None:
        process = self.world.process
        if process.stopped or self.world.waiting_to_open.get(self.name) != process.epoch:
            # Opening waits until the topic is live and the producer has nothing pending.
            self.world.waiting_to_open[self.name] = process.epoch
            return
        if process.writer.phase is not Phase.LIVE or process.writer.busy(self.name):
            return
        if process.epoch != self.world.log.ledger_id:
            process.stop()
            return
        if self.next_id is None:
            self.next_id = self.world.log.decided(self.name) + 1
        self.world.sessions += 1
        self.process, self.session = process, self.world.sessions
        process.sessions[self.session] = self
        process.writer.open_session(self.session)
        if attempt := self.world.log.unfinished(self.name):
            process.writer.left_unfinished(self.session, attempt)
        smaller = self.world.random.choice((0, 0, 6))  # the service's limit may have shrunk
        self.outbox.opened(self.world.random.choice((1, 3, 100)), 10_000, smaller)

    def _message(self, sequence_id: int) -> OutgoingMessage:
        run = 0 if self.numbers_itself else self.run
        payload = f"{sequence_id} in run {run}".encode() * (1 + sequence_id % 3)
        return OutgoingMessage(sequence_id, payload, f"k{sequence_id % 2}")

    def _hand_over(self, messages: list[OutgoingMessage]) -> None:
        payload = messages[0].payload
        if self.cuts and len(payload) > self.chunk_bytes:
            metadata = self._encode(messages)[0].metadata
            metadata.ClearField("payload_crc32c")
            large = LargeMessage(messages[0], metadata, payload, self.chunk_bytes)
            self.outbox.add_large(large, 0.0)
        else:
            self.outbox.add(messages, self._encode(messages), 0.0)

    def _take_ids(self) -> list[int]:
        count = min(self.batching, len(self.ids) - self.next)
        ids = self.ids[self.next : self.next + count]
        if not self.numbers_itself:
            assert self.next_id is not None
            ids = list(range(self.next_id, self.next_id + count))
            self.next_id += count
        self.next += count
        return ids

    def _note(self, message: OutgoingMessage, outcome: Any) -> None:
        sequence_id = message.sequence_id
        if isinstance(outcome, Receipt):
            self.acknowledged[sequence_id] = outcome.message_id
            self.world.check_stored(self.name, message, outcome)
        else:
            assert isinstance(outcome, StaleSequenceIdError), outcome
            raise AssertionError(f"{self.name} lost {sequence_id}, though it sent in order")

    def _units(self, publications: pb.Publications) -> list[Unit]:
        """The publications as units, perhaps in runs."""
        assert self.process is not None
        runs = Runs(self.session, self.process.limits)
        alone = self.world.random.random() < 0.5
        for each in publications.publications:
            entries = _PARSER._entries(self.name, each.entries)
            runs.add(each.request_id, entries, resume=each.resume, alone=alone)
        return runs.end()

    def _encode(self, messages: Any) -> list[pb.Entry]:
        groups: dict[str | None, list[OutgoingMessage]] = {}
        for message in messages:
            groups.setdefault(message.key if self.by_key else None, []).append(message)
        ordered = sorted(groups.values(), key=lambda group: group[-1].sequence_id)
        plain: Any = {"compression": Compression.NONE, "publish_time_ms": 0}
        return [
            encode_single(self.name, group[0], **plain)
            if len(group) == 1
            else encode_batch(self.name, group, **plain)
            for group in ordered
        ]


_PARSER = LedgerServicer(None, None, EntryLimits(1_000_000, 1_000_000, 100))  # type: ignore[arg-type]


class World:
    """All processes, applications and stores of a history, with the checks."""

    def __init__(
        self, seed: int, *, steps: int = 150, enabled: bool = True, cutting: float = 0.4
    ) -> None:
        self.random = Random(seed)
        self.steps = steps
        self.cutting = cutting
        self.log = Log()
        self.state = State(enabled=enabled)
        self.late: list[tuple[int, Admit | Confirm | Rollback]] = []
        self.sessions = self.strays = 0
        self.waiting_to_open: dict[str, int] = {}
        self.zombies: list[Process] = []
        self.process = Process(self)
        names = ("a", "b", "c")[: self.random.randint(1, 3)]
        self.applications = [Application(self, name) for name in names]
        self._checked = 0
        self._highest: dict[str, int] = {}
        self._seen: set[tuple[str, int]] = set()
        self._open: dict[str, Entry] = {}
        self._begun: set[str] = set()
        self._aborted: set[str] = set()
        self._forgotten: set[str] = set()

    def run(self) -> None:
        self.prepare()
        for _ in range(self.steps):
            self.step(failing=True)
            self.check()
        self.settle()

    def settle(self) -> None:
        """Run without failures until everything is stored."""
        for _ in range(STEPS_TO_SETTLE_MAX):
            self.step(failing=False)
            self.check()
            if all(application.done for application in self.applications):
                break
        else:
            raise AssertionError("not everything was stored in the end")
        self.check_state()
        read = self.read_back()
        assert read.keys() == self._seen
        for application in self.applications:
            if application.numbers_itself:
                payloads = {
                    sequence_id: payload
                    for (name, sequence_id), payload in read.items()
                    if name == application.name
                }
                assert payloads == {
                    each: application._message(each).payload for each in application.ids
                }

    def prepare(self) -> None:
        """If deduplication is off at first, publish without failures, then switch it on. From then
        on nothing may be stored twice, including messages stored before."""
        if not self.state.enabled:
            for _ in range(self.random.randint(0, 60)):
                self.step(failing=False)
            self.state.enabled = True

    def step(self, *, failing: bool) -> None:
        random = self.random
        if failing and random.random() < 0.1:
            self._misfortune()
            return
        if self.process.stopped:
            self.process = Process(self)
        processes = [self.process, *self.zombies]
        under_way = [
            (process, effect)
            for process in processes
            if not process.stopped
            for effect in process.under_way
        ]
        if self.late and random.random() < 0.1:
            epoch, call = self.late.pop(random.randrange(len(self.late)))
            with suppress(Fenced):
                self.state.run(epoch, call)
        elif under_way and random.random() < 0.6:
            process, effect = random.choice(under_way)
            process.under_way.remove(effect)
            process.finish(effect, failing=failing)
        else:
            random.choice(self.applications).step()

    def _misfortune(self) -> None:
        random = self.random
        redis = ("forget", "go back", "remember", "snapshot", "snapshot", "load")
        match random.choice(("crash", "replace", "restart", "restart", "break", *redis)):
            case "crash":
                self.ledger_dies()
            case "replace":
                self.ledger_is_replaced()
            case "restart":
                random.choice(self.applications).restart()
            case "break":
                random.choice(self.applications).break_stream()
            case "forget":
                self.redis_forgets()
            case "go back":
                self.redis_goes_back()
            case "remember":
                self.state.remember()
            case "snapshot":
                self.state.take_snapshot()
            case "load":
                self.job_loads()
        self.check_state()

    def ledger_dies(self) -> None:
        self._crash(self.process)
        self.process = Process(self)

    def ledger_is_replaced(self) -> None:
        """Replace the process by another. The old one does not know, and continues."""
        self.zombies.append(self.process)
        self.process = Process(self)

    def redis_forgets(self) -> None:
        self.state.state = None

    def redis_goes_back(self) -> None:
        self.state.state = copy.deepcopy(self.random.choice(self.state.copies))

    def redis_forgets_a_producer(self) -> bool:
        """Have policy forget a producer with nothing in flight and only part of a message in the
        log: for any other it would be unknown afterwards what is stored."""
        state = self.state.state
        if state is None:
            return False
        whole = {producer for producer, _ in self._seen}
        for name in sorted((self._open.keys() - whole) & state.producers.keys()):
            if state.forget([(name, state.producers[name].active_ms)]):
                self._forgotten.add(name)
                return True
        return False

    def job_loads(self) -> None:
        """Load a state that a job folded from a prefix of the log."""
        if self.log.entries:
            through, _ = self.random.choice(self.log.entries)
            marks = self.fold(through)
            producers = [
                dedup.Persisted(name, each.persisted, each.persisted_chunk, 0)
                for name, each in marks.items()
            ]
            self.state.load(through, producers, replacing=self.random.random() < 0.3)

    def fold(self, through: Position) -> dict[str, Marks]:
        """The fold over the log up to a position."""
        marks: dict[str, Marks] = {}
        for position, entry in self.log.entries:
            if position <= through:
                before = marks.get(entry.producer, Marks())
                marks[entry.producer] = advance(before, entry.highest, entry.chunk)
        return marks

    def check_state(self) -> None:
        """The state equals the fold over the log it covers, however often it was lost."""
        state = self.state.state
        if state is not None and state.confirmed is not None:
            frozen = {
                each.producer: (each.highest, each.unfinished) for each in state.frozen().producers
            }
            assert frozen == {
                name: (each.persisted, each.persisted_chunk)
                for name, each in self.fold(state.confirmed).items()
                if name in frozen or name not in self._forgotten
            }

    def dedup_dies(self) -> None:
        """Fail the calls in progress, with unknown outcome."""
        for process in [self.process, *self.zombies]:
            calls = [each for each in process.under_way if isinstance(each, DedupCall)]
            for call in calls:
                process.under_way.remove(call)
                if self.random.random() < 0.5:
                    with suppress(Fenced):
                        self.state.run(process.epoch, call)
                process.perform(process.writer.dedup_failed(DedupUnavailable("lost")))

    def _crash(self, process: Process) -> None:
        """Crash a process. Pending effects may happen or not, those of deduplication later."""
        for effect in process.under_way:
            match effect:
                case Admit() | Confirm() | Rollback() if self.random.random() < 0.6:
                    self.late.append((process.epoch, effect))
                case Append() if self.random.random() < 0.5:
                    with suppress(Fenced):
                        self.log.append(process.epoch, effect.expected_tail, effect.entries)
        process.stop()

    def check(self) -> None:
        for _, entry in self.log.entries[self._checked :]:
            self._check_chunk(entry)
            assert entry.highest > self._highest.get(entry.producer, -1), "out of order"
            if entry.unfinished:
                continue
            self._highest[entry.producer] = entry.highest
            for sequence_id, _ in places(entry):
                identity = (entry.producer, sequence_id)
                assert identity not in self._seen, f"{identity} is stored twice"
                self._seen.add(identity)
        self._checked = len(self.log.entries)

    def _check_chunk(self, entry: Entry) -> None:
        before, chunk = self._open.pop(entry.producer, None), entry.chunk
        if chunk is not None and chunk.chunk_id > 0:
            assert before is not None, "a chunk follows nothing"
            assert before.chunk is not None
            assert before.lowest == entry.lowest
            assert before.chunk._replace(chunk_id=chunk.chunk_id - 1) == before.chunk
            assert before.chunk.layout == chunk.layout
            assert not entry.aborts
        else:
            open_attempt = before.chunk.uuid if before and before.chunk else ""
            forgotten = entry.producer in self._forgotten
            if chunk is not None and forgotten and chunk.uuid == open_attempt:
                open_attempt = ""  # its producer, unaware that it is stored, restarts it
            assert entry.aborts == open_attempt
            if chunk is not None:
                # An attempt that another one ended may start anew, if it was a stray.
                ended = forgotten or chunk.uuid in self._aborted
                assert ended or chunk.uuid not in self._begun, "a chunk is stored twice"
                self._begun.add(chunk.uuid)
            if entry.aborts:
                self._aborted.add(entry.aborts)
        if entry.unfinished:
            self._open[entry.producer] = entry

    @property
    def unfinished(self) -> bool:
        """True if the log has an unfinished message that may continue."""
        return bool(self._open)

    def read_back(self) -> dict[tuple[str, int], bytes]:
        """The messages that a reader gets."""
        read: dict[tuple[str, int], bytes] = {}
        assembler = Assembler(AssemblyLimits())
        for at, entry in self.log.entries:
            stored = _stored(at, entry)
            if entry.aborts:
                assert assembler.abort(entry.producer, entry.aborts) is not None
            if entry.chunk is None:
                found = [(each.sequence_id, each.payload) for each in decode_entry("t", stored)]
            else:
                added = assembler.add(piece_of(stored), 0)
                if entry.producer in self._forgotten:
                    assert {each.reason for each in added.dropped} <= {DropReason.RESTARTED}
                else:
                    assert not added.dropped
                assert not isinstance(added.outcome, Headless)
                found = [(entry.lowest, added.outcome.body)] if added.outcome else []
            for sequence_id, payload in found:
                assert (entry.producer, sequence_id) not in read, "delivered twice"
                read[entry.producer, sequence_id] = payload
        return read

    def check_stored(self, producer: str, message: OutgoingMessage, receipt: Receipt) -> None:
        said = receipt.message_id
        first = said.first_chunk if isinstance(said, ChunkMessageId) else said
        pieces: list[ledger_pb2.StoredEntry] = [
            _stored(at, entry)
            for at, entry in self.log.entries
            if first.position <= at <= said.position and entry.producer == producer
        ]
        assert pieces, f"{producer} was told that {message.sequence_id} is at {said}"
        assert position_of(pieces[0].position) == first.position
        assert position_of(pieces[-1].position) == said.position
        if isinstance(said, ChunkMessageId):
            (uuid,) = {piece.metadata.uuid for piece in pieces}
            assert {piece.metadata.sequence_id for piece in pieces} == {message.sequence_id}
            if producer in self._forgotten:  # chunk 0 may have restarted the attempt
                pieces = list({piece.metadata.chunk_id: piece for piece in pieces}.values())
            assert b"".join(piece.payload for piece in pieces) == message.payload
            assert uuid
            return
        found = {each.id: each for each in decode_entry("t", pieces[0])}[said]
        assert found.producer_name == producer
        assert found.sequence_id == message.sequence_id
        assert found.payload == message.payload


def _stored(at: Position, entry: Entry) -> ledger_pb2.StoredEntry:
    return ledger_pb2.StoredEntry(
        position=common_pb2.Position(ledger_id=at.ledger_id, entry_id=at.entry_id),
        metadata=entry_pb2.EntryMetadata.FromString(entry.metadata),
        payload=entry.payload,
    )

"""The spans of a topic's publications that carry a trace, of its recoveries and of its readers.

    publish   from a publication's arrival to its answer; a child of the span that sent it
      admit     deduplication judges a group: a child of the first publication, linked to the others
      append    one per traced publication; linked to the first, which has the transaction's work
      look_up   the fate of messages that are not new
      confirm   deduplication records stored entries: a child of the first, linked to the others;
                in an Admit, no span, but links from the publications that it judges
    read      a page of the log that is sent to a reader
    recover   from the loss of agreement with deduplication until it is restored

If OTEL_* enable no spans, nothing is inspected. Otherwise an entry without a trace costs one search
of its metadata.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import islice
from typing import Final, NamedTuple

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Link, Span, SpanContext, SpanKind
from opentelemetry.util.types import AttributeValue

from seqgate.api.entry.v1.entry_pb2 import EntryMetadata
from seqgate.services.errors import DomainError
from seqgate.services.ledger.core.entry import Entry, StoredEntry, Unit
from seqgate.telemetry import extract, names, spans
from seqgate.telemetry.propagation import TRACEPARENT
from seqgate.telemetry.setup import NONE, exporter_asked_for
from seqgate.types import TopicName

_TRACER: Final = trace.get_tracer("seqgate.services.ledger")

_MARK: Final = TRACEPARENT.encode()
"""Bytes in the serialized metadata of every entry that carries a trace, and of few others."""

_Key = tuple[str, int, int]
"""The key of an entry: its producer, its highest id, and its chunk or -1."""


class _TracedPublication(NamedTuple):
    """A pending publication."""

    span: Span
    keys: Sequence[_Key]


class TopicTracing:
    def __init__(self, topic: TopicName) -> None:
        self.is_on = exporter_asked_for("TRACES") != NONE
        self._topic = str(topic)
        self._messaging: dict[str, AttributeValue] = {
            names.MESSAGING_SYSTEM: names.SEQGATE,
            names.MESSAGING_DESTINATION_NAME: self._topic,
        }
        self._units: dict[tuple[int, int], _TracedPublication] = {}
        self._entries: dict[_Key, Span] = {}
        self._stored: list[SpanContext] = []
        self._recovery: Span | None = None

    # ---- publications

    def follows(self, entries: Sequence[Entry]) -> bool:
        """Whether a publication of these entries may get spans; then it must be a unit alone."""
        return any(_MARK in entry.metadata for entry in entries)

    def arrived(self, units: Sequence[Unit]) -> None:
        if not self.is_on:
            return
        for unit in units:
            for entry in unit.entries:
                if _MARK in entry.metadata:
                    self._begin(unit, entry)
                    break

    def _begin(self, unit: Unit, entry: Entry) -> None:
        context = extract(EntryMetadata.FromString(entry.metadata).properties)
        if not context.trace_flags.sampled:
            return
        span = _TRACER.start_span(
            f"{names.PUBLISH} {self._topic}",
            spans.below(context),
            kind=SpanKind.SERVER,
            attributes={
                **self._messaging,
                names.MESSAGING_OPERATION_NAME: names.PUBLISH,
                names.PRODUCER_NAME: unit.producer,
                names.SEQUENCE_ID: unit.highest,
            },
        )
        keys = [_key(each) for each in unit.entries]
        self._units[unit.session, unit.request_id] = _TracedPublication(span, keys)
        self._entries.update(dict.fromkeys(keys, span))

    def answered(self, unit: Unit, receipt: str) -> None:
        """End a publication's span; `receipt` is the status of its receipt."""
        if self._units and (found := self._taken(unit)) is not None:
            found.set_attribute(names.RECEIPT, receipt)
            found.end()

    def dropped(self, unit: Unit, reason: str) -> None:
        """End the span of a publication that gets no receipt."""
        if self._units and (found := self._taken(unit)) is not None:
            spans.fail(found, reason)
            found.end()

    def stopped(self, reason: str) -> None:
        """End all spans: the topic stopped for this reason."""
        for span, _ in self._units.values():
            spans.fail(span, reason)
            span.end()
        self._units.clear()
        self._entries.clear()
        if self._recovery is not None:
            spans.fail(self._recovery, reason)
            self._recovery.end()
            self._recovery = None

    def _taken(self, unit: Unit) -> Span | None:
        found = self._units.pop((unit.session, unit.request_id), None)
        if found is None:
            return None
        for key in found.keys:
            if self._entries.get(key) is found.span:  # not replaced by a resent publication
                del self._entries[key]
        return found.span

    # ---- the work on publications

    def asking(
        self, operation: str, units: Sequence[Unit], *, confirms: bool
    ) -> AbstractContextManager[Span]:
        """The span of a call to deduplication.

        Args:
            operation: the first word of the span's name.
            units: the units to judge.
            confirms: whether it confirms the entries stored since the last confirmation.
        """
        if not (self._units or self._stored or trace.get_current_span().is_recording()):
            return spans.NOTHING
        contexts = self._contexts_of(units)
        if confirms:
            if contexts or operation != names.ADMIT:
                contexts = (contexts + self._stored)[: spans.LINKS_MAX + 1]
            self._stored = []
        name = f"{operation} {self._topic}"
        about = self._messaging | {names.MESSAGING_OPERATION_NAME: operation}
        if units:
            about[names.ENTRIES] = len(units)
        return spans.shared(name, contexts, about) if contexts else spans.part(name, about)

    @contextmanager
    def looking_up(self, units: Sequence[Unit]) -> Iterator[None]:
        """The span of the look-up of publications that are not new."""
        name = f"{names.LOOK_UP} {self._topic}"
        about = self._messaging | {names.MESSAGING_OPERATION_NAME: names.LOOK_UP}
        with spans.shared(name, self._contexts_of(units), about):
            yield

    def appending(self, entries: Sequence[Entry]) -> AbstractContextManager[object]:
        """The spans of storing a group. On success, its entries wait for confirmation."""
        return self._appending(entries) if self._entries else spans.NOTHING

    @contextmanager
    def _appending(self, entries: Sequence[Entry]) -> Iterator[None]:
        followed = [span for key in map(_key, entries) if (span := self._entries.get(key))]
        if not followed:
            yield
            return
        first, *others = followed
        with spans.within(self._append(first, len(entries), [])) as lead:
            linked = [Link(lead.get_span_context())]
            rest = [self._append(each, len(entries), linked) for each in others]
            try:
                yield
            except DomainError as error:
                for each in rest:
                    spans.fail(each, error.reason)
                raise
            finally:
                for each in rest:
                    each.end()
        self._stored += _contexts(followed)[: spans.LINKS_MAX + 1 - len(self._stored)]

    def _append(self, publish: Span, entries: int, links: Sequence[Link]) -> Span:
        return _TRACER.start_span(
            f"{names.APPEND} {self._topic}",
            trace.set_span_in_context(publish, Context()),
            attributes={
                **self._messaging,
                names.MESSAGING_OPERATION_NAME: names.APPEND,
                names.GROUP_ENTRIES: entries,
            },
            links=links,
        )

    def _contexts_of(self, units: Sequence[Unit]) -> list[SpanContext]:
        if not self._units:
            return []
        keys = ((unit.session, unit.request_id) for unit in units)
        return _contexts(self._units[key].span for key in keys if key in self._units)

    # ---- recoveries

    def aligned(self, cause: str, *, is_aligning: bool) -> None:
        """Begin or end a recovery's span if the writer began or stopped to align."""
        if not self.is_on:
            return
        if is_aligning and self._recovery is None:
            self._recovery = _TRACER.start_span(
                f"{names.RECOVER} {self._topic}",
                Context(),
                attributes={names.TOPIC: self._topic, names.CAUSE: cause},
            )
        elif self._recovery is not None and not is_aligning:
            self._recovery.end()
            self._recovery = None

    def recovering(self) -> AbstractContextManager[object]:
        """Makes the recovery's span current, if a recovery is running."""
        if self._recovery is None:
            return spans.NOTHING
        return trace.use_span(self._recovery, record_exception=False, set_status_on_exception=False)

    @contextmanager
    def replaying(self) -> Iterator[Span]:
        with spans.part(f"{names.REPLAY} {self._topic}", {names.TOPIC: self._topic}) as span:
            yield span


class ReadTracing:
    """A reader's spans: one per page, below its first traced message and linked to the others."""

    def __init__(self, topic: TopicName) -> None:
        self._is_on = exporter_asked_for("TRACES") != NONE
        self._topic = str(topic)

    def read(self, entries: Sequence[StoredEntry], began_ns: int) -> None:
        """Record a page; `began_ns` is when its read began, in nanoseconds since 1970."""
        if not self._is_on:
            return
        marked = (each.entry.metadata for each in entries if _MARK in each.entry.metadata)
        contexts = spans.followed(EntryMetadata.FromString(each).properties for each in marked)
        about: dict[str, AttributeValue] = {
            names.MESSAGING_SYSTEM: names.SEQGATE,
            names.MESSAGING_DESTINATION_NAME: self._topic,
            names.MESSAGING_OPERATION_NAME: names.READ,
            names.ENTRIES: len(entries),
        }
        with spans.shared(f"{names.READ} {self._topic}", contexts, about, began_ns=began_ns):
            pass


def _key(entry: Entry) -> _Key:
    return entry.producer, entry.highest, -1 if entry.chunk is None else entry.chunk.chunk_id


def _contexts(of: Iterable[Span]) -> list[SpanContext]:
    """The contexts of recorded spans, as many as one span can have as parent and links."""
    recorded = (each.get_span_context() for each in of if each.is_recording())
    return list(islice(recorded, spans.LINKS_MAX + 1))

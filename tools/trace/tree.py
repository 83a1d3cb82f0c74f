"""A message's trace as a tree, in the order of time, with the spans that link to it."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Final

from tools.trace.receiver import Span, Value

SHOWN: Final = (
    "rpc.response.status_code",
    "messaging.message.id",
    "messaging.batch.message_count",
    "seqgate.sequence_id",
    "seqgate.group.entries",
    "seqgate.entries",
    "seqgate.attempts",
    "error.type",
)
SHOWN_BELOW: Final = "seqgate.verdicts."
"""The names and the prefix of attributes to show."""


def journey(spans: Iterable[Span], trace_id: str) -> list[str]:
    """The lines of a trace's tree. A span of another trace with a link to a span of this one, such
    as work for several messages, stands below that span, after an arrow, with its own children."""
    return list(_Tree(list(spans)).lines(trace_id))


def write_spans(file: Path, spans: Sequence[Span]) -> None:
    """Write spans to a file, one JSON object per line, by their start."""
    with file.open("w") as out:
        for span in sorted(spans, key=lambda span: span.start_ns):
            out.write(json.dumps(asdict(span)) + "\n")


class _Tree:
    def __init__(self, spans: list[Span]) -> None:
        self._spans = sorted(spans, key=lambda span: span.start_ns)
        self._ids = {(span.trace_id, span.span_id) for span in spans}
        self._shown: set[tuple[str, str]] = set()

    def lines(self, trace_id: str) -> Iterator[str]:
        own = [span for span in self._spans if span.trace_id == trace_id]
        if not own:
            return
        began_ns = own[0].start_ns
        for span in own:
            if (trace_id, span.parent_id) not in self._ids:
                yield from self._below(span, began_ns, "", "")

    def _below(self, span: Span, began_ns: int, indent: str, arrow: str) -> Iterator[str]:
        place = span.trace_id, span.span_id
        if place in self._shown:
            return
        self._shown.add(place)
        yield indent + arrow + _line(span, began_ns)
        for event in span.events:
            at_ms = (event.time_ns - began_ns) / 1e6
            yield f"{indent}  . {at_ms:.1f} ms {event.name}{_some(event.attributes)}"
        for each in self._spans:
            if each.trace_id == span.trace_id and each.parent_id == span.span_id:
                yield from self._below(each, began_ns, indent + "  ", "")
            elif place in each.links and each.trace_id != span.trace_id:
                yield from self._below(each, began_ns, indent + "  ", "=> ")


def _line(span: Span, began_ns: int) -> str:
    at_ms, took_ms = (span.start_ns - began_ns) / 1e6, (span.end_ns - span.start_ns) / 1e6
    said: dict[str, Value] = {
        name: value
        for name, value in sorted(span.attributes.items())
        if name in SHOWN or name.startswith(SHOWN_BELOW)
    }
    failed = " FAILED" if span.failed else ""
    return f"{span.service}: {span.name} at {at_ms:.1f} ms, {took_ms:.1f} ms{failed}{_some(said)}"


def _some(attributes: Mapping[str, Value]) -> str:
    said = [f"{name.rpartition('.')[2]} {value}" for name, value in attributes.items()]
    return f" ({', '.join(said)})" if said else ""

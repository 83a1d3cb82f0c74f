"""`seqgate filter`: checks filter expressions, and evaluates them on entries."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from functools import partial
from io import FileIO
from typing import Annotated, Any, Final

from seqgate.api.entry.v1.entry_pb2 import EntryMetadata
from seqgate.api.filter.v1 import filter_pb2 as pb
from seqgate.cli._arguments import properties_of, topic_name
from seqgate.cli._command import Run, command, group
from seqgate.cli._declared import argument, option
from seqgate.cli._failure import DONE, REFUSED, InvalidInput
from seqgate.cli._lines import STANDARD_STREAM, numbered_lines, open_input, whole
from seqgate.cli._message import parse_entry
from seqgate.cli._output import Columns, Output, shown, table
from seqgate.cli._service import reaching
from seqgate.cli._wire import enum_name, record
from seqgate.client._channel import translated
from seqgate.client._status import Asked, error_of_status
from seqgate.errors import UnavailableError
from seqgate.times import milliseconds

BATCH_MAX: Final = 1_000

app = group("Check and try out filter expressions.")

Expression = Annotated[str, argument("EXPR", "An expression in CEL.")]
File = Annotated[str, argument("FILE", "Input file; - for standard input.", is_bytes=True)]
Topic = Annotated[str | None, option("TOPIC", "The value of `topic`.", parse=topic_name)]
Subscription = Annotated[
    dict[str, str] | None,
    option(
        "NAME=VALUE",
        "A property of `subscription`; repeatable.",
        "--subscription-property",
        parse=partial(properties_of, "--subscription-property"),
        raw=list[str],
    ),
]


@command(app, "check")
async def check(run: Run, expression: Expression) -> int:
    """Check that an expression is a valid filter, and show what it reads and costs.

    A filter returns a bool (false rejects the entry) or a duration (above zero, the entry is
    evaluated again after it). If it is invalid, shows the position of the error and exits with 1.
    """
    found: pb.CompileResponse = await run.services.call(pb.CompileRequest(expression=expression))
    if found.HasField("faults"):
        faults = found.faults.faults
        shown_ = {"valid": False, "faults": [record(each) for each in faults]}
        run.output.result(shown_, "\n".join(_fault(expression, each) for each in faults))
        return REFUSED
    compiled, reads = found.compiled, found.compiled.reads
    properties = None if reads.all_properties else list(reads.properties)
    subscription = None if reads.all_subscription else list(reads.subscription)
    kind = enum_name(pb.Type, compiled.type)
    run.output.result(
        {
            "valid": True,
            "type": kind,
            "variables": list(reads.variables),
            "properties": properties,
            "subscription": subscription,
            "cost": compiled.cost,
            "iterations": compiled.iterations,
        },
        [
            ("Type", kind.lower()),
            ("Reads", ", ".join(reads.variables)),
            ("Properties", _names_shown(properties)),
            ("Properties of the subscription", _names_shown(subscription)),
            ("Cost at most", f"{compiled.cost:,} steps"),
            ("Iterations at most", f"{compiled.iterations:,}"),
        ],
    )
    return DONE


@command(app, "test")
async def on_entries(
    run: Run,
    expression: Expression,
    file: File = STANDARD_STREAM,
    *,
    topic: Topic = None,
    subscription: Subscription = None,
) -> int:
    """Evaluate an expression on entries: one JSON object per line, as `read -o json` prints them.

    {"key": "...", "properties": {"name": "value"}, "producer": "...", "sequence_id": 7,
    "publish_time_ms": 1700000000000, "num_messages": 10}

    All fields are optional; num_messages marks a batch. Exits with 1 if an entry gets no verdict.
    """
    chain = pb.Chain(
        filters=[pb.Filter(name="test", expression=expression)],
        topic=topic or "",
        subscription=subscription,
    )
    listing = _Listing(run.output)
    with _opened(run, file) as opened:
        async with _judge(run, chain) as judge, aclosing(_batches(opened)) as batches:
            async for batch in run.waits.each(f"lines of {_input(file)}", batches):
                verdicts = await judge([metadata for _, metadata in batch])
                for (line, _), place in zip(batch, verdicts.which, strict=True):
                    listing.add(line, verdicts.outcomes[place])
    return REFUSED if listing.failed else DONE


@command(app, "explain")
async def explain(
    run: Run,
    expression: Expression,
    file: File = STANDARD_STREAM,
    *,
    topic: Topic = None,
    subscription: Subscription = None,
) -> int:
    """Evaluate an expression on one entry, and show the value of each of its parts.

    The entry is a JSON object, as for `test`. Exits with 1 if it gets no verdict.
    """
    with _opened(run, file) as opened:
        pieces = run.waits.each(_input(file), whole(opened.fileno()))
        (metadata,) = [_entry(text, "") async for _, text in pieces]
    request = pb.ExplainRequest(
        expression=expression, topic=topic or "", subscription=subscription, metadata=metadata
    )
    found: pb.ExplainResponse = await run.services.call(request)
    said = outcome_record(found.outcome)
    steps = [
        {
            "expression": expression[each.start : each.end],
            "start": each.start,
            "end": each.end,
            "depth": each.depth,
            "type": each.type,
            "value": None if each.failed else each.value,
            "failure": each.value if each.failed else None,
        }
        for each in found.steps
    ]
    columns: Columns = {
        "EXPRESSION": lambda each: "  " * each["depth"] + " ".join(each["expression"].split()),
        "TYPE": "type",
        "VALUE": lambda each: (
            each["value"] if each["failure"] is None else f"fails: {each['failure']}"
        ),
    }
    fields = [("Verdict", (said["verdict"] or "none").lower()), ("Why", _why(said))]
    run.output.result({**said, "steps": steps}, fields, table(columns, steps))
    return REFUSED if found.outcome.HasField("failure") else DONE


def _input(file: str) -> str:
    return "standard input" if file == STANDARD_STREAM else file


def _opened(run: Run, file: str) -> FileIO:
    with run.waits.on(f"a writer to open {file}"):
        return open_input(file)


def _names_shown(names: list[str] | None) -> str:
    return "any" if names is None else ", ".join(names)


def _fault(expression: str, fault: pb.Fault) -> str:
    line = expression.split("\n")[fault.line - 1].replace("\t", " ")
    said = f"line {fault.line}, column {fault.column}: {shown(fault.message)}"
    return f"{said}\n  {shown(line)}\n  {' ' * (fault.column - 1)}^"


# ---- test


Numbered = tuple[int, EntryMetadata]
"""A line's number, and the entry on it."""


async def _batches(file: FileIO) -> AsyncGenerator[list[Numbered], None]:
    """The entries of a file, in batches of those that have arrived."""
    waiting: asyncio.Queue[Numbered | None] = asyncio.Queue(BATCH_MAX)

    async def read() -> None:
        try:
            async with aclosing(numbered_lines(file.fileno())) as lines:
                async for number, line in lines:
                    await waiting.put((number, _entry(line, f"line {number}: ")))
        finally:
            await waiting.put(None)

    reading = asyncio.create_task(read())
    try:
        batch: list[Numbered] = []
        while (each := await waiting.get()) is not None:
            batch.append(each)
            if waiting.empty() or len(batch) == BATCH_MAX:
                yield batch
                batch = []
        if batch:
            yield batch
        await reading  # raises the error of the input
    finally:
        if not reading.done():
            reading.cancel()
            while not waiting.empty():
                waiting.get_nowait()
            await asyncio.wait([reading])


Judge = Any


@asynccontextmanager
async def _judge(run: Run, chain: pb.Chain) -> AsyncIterator[Judge]:
    asked = Asked("filter", run.settings.filter.value)
    timeout_s = run.settings.timeout_s
    call = run.services.stub("filter").Evaluate()

    async def ask(request: pb.EvaluateRequest) -> pb.EvaluateResponse:
        what = f"the filter service at {asked.address} to answer"
        with reaching(*asked), run.waits.on(what):
            try:
                async with asyncio.timeout(timeout_s):
                    await translated(call.write(request), asked)
                    answer = await translated(call.read(), asked)
            except TimeoutError:
                raise UnavailableError("the filter service did not answer in time") from None
        if not isinstance(answer, pb.EvaluateResponse) or answer.HasField("draining"):
            raise UnavailableError("the filter service is shutting down", reason="DRAINING")
        if answer.HasField("error"):
            raise error_of_status(answer.error)
        return answer

    async def judge(metadata: Sequence[EntryMetadata]) -> pb.Verdicts:
        batch = pb.Batch(metadata=metadata)
        return (await ask(pb.EvaluateRequest(batch=batch))).verdicts

    try:
        await ask(pb.EvaluateRequest(set_chain=pb.SetChain(chain=chain)))
        yield judge
    finally:
        call.cancel()


class _Listing:
    def __init__(self, output: Output) -> None:
        self.failed = 0
        self._output = output
        self._begun = False

    def add(self, line: int, outcome: pb.FilterOutcome) -> None:
        self.failed += outcome.HasField("failure")
        said = outcome_record(outcome)
        if self._output.json:
            self._output.record({"line": line, **said})
            return
        if not self._begun:
            self._begun = True
            self._output.line(f"{'LINE':>8}  {'VERDICT':<10}  WHY")
        text = f"{line:>8}  {(said['verdict'] or 'none').lower():<10}  {_why(said)}"
        self._output.line(text.rstrip())


def outcome_record(outcome: pb.FilterOutcome) -> dict[str, Any]:
    is_failure = outcome.HasField("failure")
    return {
        "verdict": None if is_failure else enum_name(pb.FilterVerdict, outcome.verdict),
        "delay_ms": milliseconds(outcome.delay) or None,
        "reason": (enum_name(pb.FailureReason, outcome.failure.reason) if is_failure else None),
        "message": outcome.failure.message if is_failure else None,
    }


def _why(said: dict[str, Any]) -> str:
    if said["reason"]:
        return f"{shown(said['message'])} ({said['reason']})"
    return f"again after {said['delay_ms']:,} ms" if said["delay_ms"] else ""


def _entry(line: bytes, where: str) -> EntryMetadata:
    try:
        return parse_entry(line)
    except InvalidInput as error:
        raise InvalidInput(f"{where}{error}") from error

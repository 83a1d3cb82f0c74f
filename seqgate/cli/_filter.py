"""`seqgate filter`: whether an expression can be a filter, and what it says of entries."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Sequence
from contextlib import aclosing, asynccontextmanager
from io import FileIO
from typing import Annotated, Any, Final

import typer
from grpc import aio

from seqgate.api.entry.v1.entry_pb2 import EntryMetadata
from seqgate.api.filter.v1 import filter_pb2 as pb
from seqgate.cli._command import Run, command, group, option_properties, topic_name
from seqgate.cli._failure import DONE, REFUSED, InvalidInput
from seqgate.cli._lines import numbered_lines, open_input, whole
from seqgate.cli._message import parse_entry
from seqgate.cli._output import Output, shown
from seqgate.cli._service import Service, filter_service, reaching
from seqgate.cli._wire import enum_name, record
from seqgate.client._channel import translated
from seqgate.client._status import error_of_status
from seqgate.errors import UnavailableError

BATCH_MAX: Final = 1_000
"""How many entries are sent at a time, at most: as many as there are."""

app = group("Check and try out filter expressions.")

Expression = Annotated[
    str, typer.Argument(metavar="EXPR", help="An expression in CEL.", show_default=False)
]
File = Annotated[
    str,
    typer.Argument(metavar="FILE", help="Input file; - for standard input.", show_default=False),
]
Topic = Annotated[
    str | None, typer.Option("--topic", metavar="TOPIC", help="The value of `topic`.")
]
Subscription = Annotated[
    list[str] | None,
    typer.Option(
        "--subscription-property",
        metavar="NAME=VALUE",
        help="A property of `subscription`; repeatable.",
    ),
]


@command(app, "check")
def check(run: Run, expression: Expression) -> Coroutine[Any, Any, int]:
    """Check that an expression is a valid filter, and show what it reads and costs.

    A filter returns a bool (false rejects the entry) or a duration (above zero, the entry is
    evaluated again after it). Exits with 1 and the place of the error if it is invalid.
    """
    return _check(run, expression)


@command(app, "test")
def on_entries(
    run: Run,
    expression: Expression,
    file: File = "-",
    *,
    topic: Topic = None,
    subscription: Subscription = None,
) -> Coroutine[Any, Any, int]:
    """Evaluate an expression on entries: one JSON object per line, as `read -o json` prints them.

    {"key": "...", "properties": {"name": "value"}, "producer": "...", "sequence_id": 7,
    "publish_time_ms": 1700000000000, "num_messages": 10}

    All fields are optional; num_messages marks a batch. Exits with 1 if an entry gets no verdict.
    """
    chain = pb.Chain(
        filters=[pb.Filter(name="test", expression=expression)],
        topic="" if topic is None else str(topic_name(topic)),
        subscription=option_properties("--subscription-property", subscription),
    )
    return _test(run, chain, open_input(file))


@command(app, "explain")
def explain(
    run: Run,
    expression: Expression,
    file: File = "-",
    *,
    topic: Topic = None,
    subscription: Subscription = None,
) -> Coroutine[Any, Any, int]:
    """Evaluate an expression on one entry, and show the value of each of its parts.

    The entry is a JSON object, as for `test`. Exits with 1 if it gets no verdict.
    """
    request = pb.ExplainRequest(
        expression=expression,
        topic="" if topic is None else str(topic_name(topic)),
        subscription=option_properties("--subscription-property", subscription),
    )
    return _explain(run, request, open_input(file))


# ---- check


async def _check(run: Run, expression: str) -> int:
    async with filter_service(run.settings) as service:
        found: pb.CompileResponse = await service.call(
            "Compile", pb.CompileRequest(expression=expression)
        )
    if found.HasField("faults"):
        _say_faults(run.output, expression, found.faults.faults)
        return REFUSED
    compiled, reads = found.compiled, found.compiled.reads
    if run.output.json:
        run.output.record(
            {
                "valid": True,
                "type": enum_name(pb.Type, compiled.type),
                "variables": list(reads.variables),
                "properties": None if reads.all_properties else list(reads.properties),
                "subscription": None if reads.all_subscription else list(reads.subscription),
                "cost": compiled.cost,
                "iterations": compiled.iterations,
            }
        )
        return DONE
    run.output.fields(
        [
            ("Type", enum_name(pb.Type, compiled.type).lower()),
            ("Reads", ", ".join(reads.variables)),
            ("Properties", "any" if reads.all_properties else ", ".join(reads.properties)),
            (
                "Properties of the subscription",
                "any" if reads.all_subscription else ", ".join(reads.subscription),
            ),
            ("Cost at most", f"{compiled.cost:,} steps"),
            ("Iterations at most", f"{compiled.iterations:,}"),
        ]
    )
    return DONE


def _say_faults(output: Output, expression: str, faults: Sequence[pb.Fault]) -> None:
    if output.json:
        output.record(
            {
                "valid": False,
                "faults": [record(each) for each in faults],
            }
        )
        return
    lines = expression.split("\n")
    for each in faults:
        output.line(f"line {each.line}, column {each.column}: {shown(each.message)}")
        output.line(f"  {shown(lines[each.line - 1].replace(chr(9), ' '))}")
        output.line(f"  {' ' * (each.column - 1)}^")


# ---- test


async def _test(run: Run, chain: pb.Chain, file: FileIO) -> int:
    listing = _Listing(run.output)
    with file:
        async with (
            filter_service(run.settings) as service,
            _judge(run, service, chain) as judge,
            aclosing(_batches(file)) as batches,
        ):
            async for batch in batches:
                verdicts = await judge([metadata for _, metadata in batch])
                for (line, _), place in zip(batch, verdicts.which, strict=True):
                    listing.add(line, verdicts.outcomes[place])
    return REFUSED if listing.failed else DONE


Numbered = tuple[int, EntryMetadata]
"""An entry, and the number of its line."""


async def _batches(file: FileIO) -> AsyncGenerator[list[Numbered], None]:
    """The entries of a file, as many at a time as have come meanwhile."""
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
        await reading  # what was wrong with the input
    finally:
        if not reading.done():
            reading.cancel()
            while not waiting.empty():
                waiting.get_nowait()
            await asyncio.wait([reading])


Judge = Any
"""Sends a batch, and returns what the service says of it."""


@asynccontextmanager
async def _judge(run: Run, service: Service, chain: pb.Chain) -> AsyncIterator[Judge]:
    """A stream that knows the chain."""
    target, timeout_s = run.settings.filter.value, run.settings.timeout_s
    call = service.stub.Evaluate()

    async def ask(request: pb.EvaluateRequest) -> pb.EvaluateResponse:
        with reaching("filter", target):
            try:
                async with asyncio.timeout(timeout_s):
                    await translated(call.write(request))
                    answer = await translated(call.read())
            except TimeoutError:
                raise UnavailableError("the filter service did not answer in time") from None
        if answer is aio.EOF or answer.HasField("draining"):
            raise UnavailableError("the filter service is shutting down", reason="DRAINING")
        if answer.HasField("refused"):
            raise error_of_status(answer.refused)
        response: pb.EvaluateResponse = answer
        return response

    async def judge(metadata: Sequence[EntryMetadata]) -> pb.Verdicts:
        batch = pb.Batch(metadata=metadata)
        return (await ask(pb.EvaluateRequest(batch=batch))).verdicts

    try:
        await ask(pb.EvaluateRequest(set_chain=pb.SetChain(chain=chain)))
        yield judge
    finally:
        call.cancel()


class _Listing:
    """Outcomes as they come."""

    def __init__(self, output: Output) -> None:
        self.failed = 0
        self._output = output
        self._begun = False

    def add(self, line: int, outcome: pb.Outcome) -> None:
        """Write one more."""
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


def outcome_record(outcome: pb.Outcome) -> dict[str, Any]:
    """What was said of an entry, for a program."""
    is_failure = outcome.HasField("failure")
    return {
        "verdict": None if is_failure else enum_name(pb.Verdict, outcome.verdict),
        "delay_ms": outcome.delay_ms or None,
        "reason": (enum_name(pb.FailureReason, outcome.failure.reason) if is_failure else None),
        "message": outcome.failure.message if is_failure else None,
    }


def _why(said: dict[str, Any]) -> str:
    if said["reason"]:
        return f"{shown(said['message'])} ({said['reason']})"
    return f"again after {said['delay_ms']:,} ms" if said["delay_ms"] else ""


# ---- explain


async def _explain(run: Run, request: pb.ExplainRequest, file: FileIO) -> int:
    with file:
        async with aclosing(whole(file.fileno())) as pieces:
            async for _, text in pieces:
                request.metadata.CopyFrom(_entry(text, ""))
    async with filter_service(run.settings) as service:
        found: pb.ExplainResponse = await service.call("Explain", request)
    said, expression = outcome_record(found.outcome), request.expression
    if run.output.json:
        run.output.record(
            {
                **said,
                "steps": [
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
                ],
            }
        )
    else:
        run.output.fields([("Verdict", (said["verdict"] or "none").lower()), ("Why", _why(said))])
        run.output.line("")
        run.output.table(
            ("EXPRESSION", "TYPE", "VALUE"),
            [
                (
                    "  " * each.depth + " ".join(expression[each.start : each.end].split()),
                    each.type,
                    f"fails: {each.value}" if each.failed else each.value,
                )
                for each in found.steps
            ],
        )
    return REFUSED if found.outcome.HasField("failure") else DONE


def _entry(line: bytes, where: str) -> EntryMetadata:
    try:
        return parse_entry(line)
    except InvalidInput as error:
        raise InvalidInput(f"{where}{error}") from error

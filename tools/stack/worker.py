"""A process that calls one function: python -m tools.stack.worker MODULE

It calls MODULE.run with the arguments pickled on its standard input, and pickles the result to its
standard output. The bench runs its clients in workers, to separate their processor time from that
of the services.
"""

import asyncio
import importlib
import os
import pickle
import sys
from asyncio.subprocess import PIPE
from collections.abc import Mapping
from typing import Any, Final

from tools.stack.child import ChildFailed, python_process

WITHIN_S: Final = 600.0  # how long a worker may take
ERRORS_SHOWN: Final = 2_000  # how many bytes of a failed worker's errors are shown


async def in_worker(
    module: str,
    *arguments: object,
    environment: Mapping[str, str] | None = None,
    within_s: float = WITHIN_S,
) -> Any:
    """Call the module's `run` in its own process, and return the result. Raises ChildFailed if it
    fails, or takes longer than `within_s`."""
    running = python_process(__name__, module, environment=environment, stderr=PIPE)
    async with running as process:
        try:
            async with asyncio.timeout(within_s):
                answer, errors = await process.communicate(pickle.dumps(arguments))
        except TimeoutError:
            raise ChildFailed(f"{module} did not end within {within_s:g} s") from None
    if process.returncode:
        end = errors[-ERRORS_SHOWN:].decode(errors="replace")
        raise ChildFailed(f"{module} ended with {process.returncode}: {end}")
    return pickle.loads(answer)  # noqa: S301 - from our own child


def main() -> None:
    run = importlib.import_module(sys.argv[1]).run
    with os.fdopen(os.dup(1), "wb") as answer:
        os.dup2(2, 1)  # prints must not corrupt the result
        answer.write(pickle.dumps(run(*pickle.load(sys.stdin.buffer))))  # noqa: S301 - our parent


if __name__ == "__main__":
    main()

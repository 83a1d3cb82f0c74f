"""Ending streams whose peer does not read."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

Cut = Callable[[Exception], None]
"""Ends a stream with an error; no effect once the stream is over."""


@asynccontextmanager
async def until_cut() -> AsyncIterator[Cut]:
    """Run the body until `cut` is called, which cancels whatever the body awaits.

    Raises:
        Exception: the error given to `cut`.
    """
    loop = asyncio.get_running_loop()
    patience = asyncio.timeout(None)
    causes: list[Exception] = []
    is_over = False

    def cut(error: Exception) -> None:
        if not (is_over or causes):
            causes.append(error)
            patience.reschedule(loop.time())

    try:
        async with patience:
            try:
                yield cut
            finally:
                is_over = True
    except TimeoutError as error:
        if not patience.expired():
            raise
        raise causes[0] from error

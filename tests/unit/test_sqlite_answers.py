"""A caller that has left when the database answers leaves nothing behind."""

import asyncio
import gc
from typing import Any

from seqgate.services.errors import DomainError
from seqgate.services.runtime.sqlite import _resolve, _Task


class Refused(DomainError):
    """The refusal of the work."""


async def test_an_unawaited_refusal_is_not_logged_as_an_exception() -> None:
    loop = asyncio.get_running_loop()
    unheard: list[dict[str, Any]] = []
    loop.set_exception_handler(lambda _, context: unheard.append(context))
    task = _Task[object](lambda _: None, loop.create_future(), lambda: None)
    _resolve([task], [Refused("no")])
    del task
    gc.collect()
    loop.set_exception_handler(None)
    assert unheard == []

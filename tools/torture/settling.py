"""Faults have stopped. Is everything stored, delivered and acknowledged within a bound?

UNFINISHED  a producer has messages without a receipt
STUCK       a subscription has messages that are not acknowledged, and nothing moves any more
LAGGING     a reader has not read everything
ENDED       a process ended that nobody had ended
SURPRISED   an application failed in a way that nobody foresaw
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from google.protobuf.json_format import MessageToDict
from grpc import aio

from seqgate.api.dispatcher.v1 import dispatcher_pb2 as pb
from seqgate.api.dispatcher.v1.dispatcher_pb2_grpc import DispatcherServiceStub
from seqgate.api.entry.v1 import entry_pb2
from seqgate.api.ledger.v1.ledger_pb2_grpc import LedgerServiceStub
from seqgate.types import Position
from tools.torture.evidence import Log, Progress, last_position
from tools.torture.shown import At, asking
from tools.torture.violation import Violation

if TYPE_CHECKING:
    from seqgate.api.dispatcher.v1.dispatcher_pb2_grpc import DispatcherServiceAsyncStub

LOOK_S: Final = 0.5

STANDS_STILL_S: Final = 60.0
"""After how long without progress nothing moves any more: longer than any time-out, lease or retry
that a subscription of ours waits for."""

SHOWN_MAX: Final = 3
"""Of how many messages that are stuck it is asked why."""

Progresses = Callable[[str, str], Awaitable[Progress]]


async def all_acknowledged(
    ledger: At,
    subscriptions: Sequence[tuple[str, str]],
    progress: Progresses,
    note: Callable[[str, str], None],
) -> list[tuple[str, str]]:
    """Wait until everything is; which subscriptions have more when nothing moves any more. While
    anything does, they are slow, and not stuck: what is acknowledged only grows, up to the log.

    Args:
        note: is told of each subscription that has everything behind it.
    """
    async with asking(ledger, LedgerServiceStub) as stub:
        return await while_it_moves(subscriptions, partial(last_position, stub), progress, note)


async def while_it_moves(
    subscriptions: Sequence[tuple[str, str]],
    last_of: Callable[[str], Awaitable[Position | None]],
    progress: Progresses,
    note: Callable[[str, str], None],
) -> list[tuple[str, str]]:
    """See all_acknowledged; `last_of` says where a topic ends."""
    loop = asyncio.get_running_loop()
    waiting = dict.fromkeys(subscriptions, Progress())
    moved_s = loop.time()
    while waiting and loop.time() - moved_s <= STANDS_STILL_S:
        for topic, subscription in list(waiting):
            try:
                last = await last_of(topic)
                now = await progress(topic, subscription)
            except aio.AioRpcError:
                continue
            if last is None or (now.mark_delete is not None and now.mark_delete >= last):
                del waiting[topic, subscription]
                note(topic, subscription)
                moved_s = loop.time()
            elif now != waiting[topic, subscription]:
                waiting[topic, subscription] = now
                moved_s = loop.time()
        await asyncio.sleep(LOOK_S)
    return list(waiting)


async def explained(
    dispatcher: At, log: Log, subscription: str, progress: Progress
) -> Violation | None:
    """Why a subscription has messages that are not acknowledged, as the dispatcher says. None: it
    has none of which the log knows."""
    left = [entry.position for entry in log.entries if not progress.has(entry.position)]
    if not left:
        return None
    keys = {stored.place.position: stored.key for stored in log.messages}
    async with asking(dispatcher, DispatcherServiceStub) as stub:
        said = [
            await _explain(stub, log.topic, subscription, position, keys)
            for position in left[:SHOWN_MAX]
        ]
        names: dict[str, Any] = {"topic": log.topic, "subscription": subscription}
        report = await _asked(stub.Report, pb.ReportRequest(**names, keys_max=3))
    what = f"{len(left)} entries are not acknowledged, the first at {left[0]}; " + "; ".join(said)
    return Violation("STUCK", f"{log.topic} {subscription}", f"{what}; Report: {report}")


async def _explain(
    stub: "DispatcherServiceAsyncStub",
    topic: str,
    subscription: str,
    position: Position,
    keys: dict[Position, str],
) -> str:
    names: dict[str, Any] = {"topic": topic, "subscription": subscription}
    wire = entry_pb2.Position(ledger_id=position.ledger_id, entry_id=position.entry_id)
    of_entry = await _asked(stub.Explain, pb.ExplainRequest(**names, position=wire))
    key = keys.get(position)
    if key is None:
        return f"{position}, a part of a message: {of_entry}"
    of_key = await _asked(stub.Explain, pb.ExplainRequest(**names, key=key.encode()))
    return f"{position} of {key}: {of_entry}; {key}: {of_key}"


async def _asked(call: Any, request: Any) -> str:
    try:
        answer = await call(request, timeout=10)
    except aio.AioRpcError as error:
        return f"{error.code().name} {error.details()}"
    if isinstance(answer, pb.ExplainResponse):
        return ", then ".join(each.text for each in answer.reasons)
    for consumer in answer.consumers:
        del consumer.ranges[:]  # hundreds
    return json.dumps(MessageToDict(answer))

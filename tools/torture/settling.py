"""After the last fault: is everything stored, delivered and acknowledged within a limit?

UNFINISHED  a producer has messages without a receipt
STUCK       a subscription has unacknowledged messages and makes no progress
LAGGING     a reader has not read everything
ENDED       a process ended unexpectedly
SURPRISED   an application raised an unexpected exception
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from google.protobuf.json_format import MessageToDict
from grpc import aio

from seqgate.api.common.v1 import common_pb2
from seqgate.api.dispatcher.v1 import dispatcher_pb2 as pb
from seqgate.api.dispatcher.v1.dispatcher_pb2_grpc import DispatcherServiceStub
from seqgate.types import Position
from tools.torture.evidence import Log, Progress
from tools.torture.shown import At, asking
from tools.torture.violation import Violation

if TYPE_CHECKING:
    from seqgate.api.dispatcher.v1.dispatcher_pb2_grpc import DispatcherServiceAsyncStub

LOOK_S: Final = 0.5

STANDS_STILL_S: Final = 60.0
"""The time without progress after which subscriptions count as stuck: longer than any time-out,
lease or retry that they may wait for."""

SHOWN_MAX: Final = 3
"""How many stuck messages of a subscription are explained."""


async def all_acknowledged(
    subscriptions: Sequence[tuple[str, str]],
    last_of: Callable[[str], Awaitable[Position | None]],
    progress: Callable[[str, str], Awaitable[Progress]],
    note: Callable[[str, str], None],
) -> list[tuple[str, str]]:
    """Wait until every subscription has acknowledged everything, or none makes progress any more.
    Returns those with messages left. As long as one progresses, the others may be slow rather than
    stuck, since progress is bounded by the log.

    Args:
        last_of: returns the end of a topic.
        note: called with each subscription that has acknowledged everything.
    """
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
    """A STUCK violation with the dispatcher's explanations; None if no entry is left."""
    left = [entry.position for entry in log.entries if not progress.has(entry.position)]
    if not left:
        return None
    keys = {stored.place.position: stored.key for stored in log.messages}
    names: dict[str, Any] = {"topic": log.topic, "subscription": subscription}
    async with asking(dispatcher, DispatcherServiceStub) as stub:
        said = [
            await _explain(stub, names, position, keys.get(position))
            for position in left[:SHOWN_MAX]
        ]
        report = await _asked(stub.Report, pb.ReportRequest(**names, max_keys=3))
    what = f"{len(left)} entries are not acknowledged, the first at {left[0]}; " + "; ".join(said)
    return Violation("STUCK", f"{log.topic} {subscription}", f"{what}; Report: {report}")


async def _explain(
    stub: "DispatcherServiceAsyncStub", names: dict[str, Any], position: Position, key: str | None
) -> str:
    wire = common_pb2.Position(ledger_id=position.ledger_id, entry_id=position.entry_id)
    of_entry = await _asked(stub.Explain, pb.ExplainRequest(**names, position=wire))
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

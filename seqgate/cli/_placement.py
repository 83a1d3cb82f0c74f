"""Where topics are, and how they move: what `seqgate topic` and `seqgate cursor` share.

A topic's log and its cursors are placed apart, each on an instance of its own service; so each is
moved by itself.
"""

from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Annotated, Any, Final

import typer
from grpc import StatusCode, aio

from seqgate.api.placement.v1 import placement_pb2 as pb
from seqgate.cli._command import Run
from seqgate.cli._failure import DONE
from seqgate.cli._service import Placing, Service, placement_service
from seqgate.errors import NotFoundError, SeqgateError
from seqgate.types import TopicName

PAGE_SIZE: Final = 1_000
"""How many places a page holds."""

To = Annotated[
    str,
    typer.Option("--to", metavar="ADDRESS", help="The instance, as `where` shows it."),
]


async def move(run: Run, service: Placing, topic: TopicName, to: str) -> int:
    """Move what an instance of a service has of a topic to another one."""
    request = pb.MoveTopicRequest(topic=str(topic), to=to)
    async with placement_service(run.settings, service) as placement:
        with several(service):
            answer = await placement.call("MoveTopic", request)
    record = _record(answer.placement) | {"moved": answer.moved}
    if run.output.json:
        run.output.record(record)
        return DONE
    moved = "yes" if answer.moved else "no, it was there"
    run.output.fields(
        [("Topic", record["topic"]), ("Instance", record["instance"]), ("Moved", moved)]
    )
    return DONE


async def where(run: Run, service: Placing, prefix: str) -> int:
    """Show which instance of a service has which topics."""
    rows = []
    async with placement_service(run.settings, service) as placement:
        async for each in _placements(placement, service, prefix):
            record = _record(each)
            if run.output.json:
                run.output.record(record)
            else:
                rows.append((record["topic"], record["instance"], record["version"]))
    if not run.output.json:
        run.output.table(("TOPIC", "INSTANCE", "VERSION"), rows)
    return DONE


async def _placements(
    placement: Service, service: Placing, prefix: str
) -> AsyncIterator[pb.Placement]:
    request = pb.ListPlacementsRequest(page_size=PAGE_SIZE, prefix=prefix)
    while True:
        with several(service):
            page = await placement.call("ListPlacements", request)
        for each in page.placements:
            yield each
        if not page.next_page_token:
            return
        request.page_token = page.next_page_token


@contextmanager
def several(service: Placing) -> Iterator[None]:
    """Say so where a service has one instance only, and knows nothing of places."""
    try:
        yield
    except SeqgateError as error:
        cause = error.__cause__
        if isinstance(cause, aio.AioRpcError) and cause.code() is StatusCode.UNIMPLEMENTED:
            message = f"the {service} service has one instance, which has all topics"
            raise NotFoundError(message, reason="ONE_INSTANCE") from error
        raise


def _record(placement: pb.Placement) -> dict[str, Any]:
    return {
        "topic": placement.topic,
        "instance": placement.owner,
        "version": placement.version,
    }

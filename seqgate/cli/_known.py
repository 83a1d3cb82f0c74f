"""Unknown topics: an error where a service would answer with nothing.

The dedup and cursor services also serve logs of applications, so they know no topics. A topic is
unknown if the ledger service says so; if that does not answer, the topic may be of such a log.
"""

from collections.abc import AsyncIterator
from typing import Annotated, Any

from seqgate.api.dedup.v1 import dedup_pb2
from seqgate.api.ledger.v1 import ledger_pb2
from seqgate.cli._command import Run
from seqgate.cli._declared import flag
from seqgate.errors import NotFoundError, SeqgateError

OwnLog = Annotated[bool, flag("The topic's log is not in the ledger service.", "--own-log")]


async def check_known(run: Run, topic: str) -> None:
    """Raise NotFoundError for a topic that the ledger service does not have."""
    try:
        await run.services.call(ledger_pb2.GetTopicRequest(topic=topic))
    except NotFoundError:
        raise
    except SeqgateError:
        return


async def check_deduplicated(run: Run, topic: str) -> None:
    """Raise NotFoundError for a topic that the ledger service does not have, and that has no
    deduplication state."""
    status = await run.services.call(dedup_pb2.GetTopicStatusRequest(topic=topic))
    if not has_state(status):
        await check_known(run, topic)


def has_state(status: dedup_pb2.GetTopicStatusResponse) -> bool:
    """Whether a topic has deduplication state, or had some."""
    return status.state != dedup_pb2.TOPIC_STATE_ABSENT or status.HasField("snapshot")


async def known(run: Run, topic: str, records: AsyncIterator[Any]) -> AsyncIterator[Any]:
    """The records of a topic. Raises NotFoundError if there are none, since it is unknown."""
    is_empty = True
    async for each in records:
        is_empty = False
        yield each
    if is_empty:
        await check_known(run, topic)

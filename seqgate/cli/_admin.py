"""`seqgate admin`: work on a whole installation."""

from collections import defaultdict
from collections.abc import Mapping
from typing import Any, Final

from seqgate.api.cursor.v1 import cursor_pb2
from seqgate.api.dedup.v1 import dedup_pb2
from seqgate.api.ledger.v1 import ledger_pb2 as pb
from seqgate.cli._command import Run, command, group
from seqgate.cli._jobs import copy
from seqgate.cli._output import Columns
from seqgate.cli._wire import position
from seqgate.types import Position

NOWHERE: Final = Position(0, 0)
"""Before the first entry of any log."""

app = group("Move an installation, or renew it after its logs were restored.")

command(app, "copy")(copy)


@command(app, "renew")
async def renew(run: Run) -> None:
    """Renew all topics, after the logs were restored from an older copy.

    New entries get ids that nobody has seen, and deduplication begins anew from the logs, so that
    what the copy lacks can be published again. Lists cursors beyond the end of their log: they have
    acknowledged messages that are gone. Safe to repeat, and while producers and consumers work;
    but restart the dispatchers with the ledgers, since they remember entries that are gone.
    """
    cursors: dict[str, dict[str, Position]] = defaultdict(dict)
    async for each in run.services.pages(cursor_pb2.ListCursorsRequest()):
        if each.HasField("mark_delete"):
            cursors[each.topic][each.name] = position(each.mark_delete)
    names = [each.name async for each in run.services.pages(pb.ListTopicsRequest())]
    columns: Columns = {
        "TOPIC": "topic",
        "LEDGER": "ledger_id",
        "LAST": "last",
        "CURSORS BEYOND": lambda each: ", ".join(each["cursors_beyond"]),
    }
    topics = sorted({*names, *cursors})
    await run.output.listing(columns, (await _renewed(run, each, cursors[each]) for each in topics))


async def _renewed(run: Run, topic: str, cursors: Mapping[str, Position]) -> dict[str, Any]:
    """Renew a topic above all that is known of it. Returns its record."""
    status = await run.services.call(dedup_pb2.GetTopicStatusRequest(topic=topic))
    seen = [status.epoch, status.confirmed.ledger_id, status.snapshot.ledger_id]
    above = max(seen + [each.ledger_id for each in cursors.values()])
    answer = await run.services.call(pb.RenewTopicRequest(topic=topic, above=above))
    last = position(answer.topic.last) if answer.topic.HasField("last") else NOWHERE
    return {
        "topic": topic,
        "ledger_id": answer.topic.ledger_id or None,
        "last": None if last == NOWHERE else f"{last.ledger_id}:{last.entry_id}",
        "cursors_beyond": sorted(name for name, place in cursors.items() if place > last),
    }

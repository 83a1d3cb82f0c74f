"""The admin client's calls about topics."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import datetime

from seqgate.api.ledger.v1 import ledger_pb2
from seqgate.client._arguments import flag, message_id, text
from seqgate.client._calls import PAGE, Calls
from seqgate.client._fields import full_name, optional, optional_id, time_of
from seqgate.client._log import to_wire
from seqgate.message_id import ChunkMessageId, MessageId


@dataclass(frozen=True, slots=True)
class TopicInfo:
    """A topic.

    Attributes:
        name: tenant/namespace/name.
        created_at: when it was created.
        first, last: its first and its last entry; None: it has none.
        entries, messages, size_bytes: what its log has.
        connected_producers: how many are connected to the ledger that answers.
        entries_to_replay: about how many entries deduplication has yet to replay.
    """

    name: str
    created_at: datetime
    first: MessageId | None
    last: MessageId | None
    entries: int
    messages: int
    size_bytes: int
    connected_producers: int
    entries_to_replay: int


@dataclass(frozen=True, slots=True)
class Trimmed:
    """What a trim removed.

    Attributes:
        removed_entries: how many entries were removed.
        first: the first entry that is left; None: none is.
        held_back_by: the cursors that have not acknowledged more.
    """

    removed_entries: int
    first: MessageId | None
    held_back_by: tuple[str, ...]


class TopicCalls:
    """The part of Admin for topics."""

    _calls: Calls

    async def create_topic(self, topic: str) -> TopicInfo:
        """Create a topic; an existing one is left unchanged."""
        request = ledger_pb2.CreateTopicRequest(topic=full_name(topic))
        return _topic((await self._calls.call(request)).topic)

    async def topic(self, topic: str) -> TopicInfo:
        """A topic. Raises NotFoundError."""
        request = ledger_pb2.GetTopicRequest(topic=full_name(topic))
        return _topic((await self._calls.call(request)).topic)

    async def topics(self, prefix: str = "") -> AsyncIterator[TopicInfo]:
        """The topics whose full name has this prefix, sorted by name. A prefix without a slash is
        one of names in public/default."""
        prefix = text("prefix", prefix)
        if prefix and "/" not in prefix:
            prefix = f"public/default/{prefix}"
        request = ledger_pb2.ListTopicsRequest(prefix=prefix, page_size=PAGE)
        async for each in self._calls.pages(request):
            yield _topic(each)

    async def delete_topic(self, topic: str, *, force: bool = False) -> None:
        """Delete a topic with its entries, its deduplication state and its cursors.

        Args:
            force: also with connected producers, which fail.

        Raises:
            NotFoundError: there is no such topic, or no longer.
            InUseError: producers are connected.
        """
        request = ledger_pb2.DeleteTopicRequest(topic=full_name(topic), force=flag("force", force))
        await self._calls.call(request)

    async def trim_topic(self, topic: str, before: MessageId) -> Trimmed:
        """Remove a topic's messages before this one for good, as far as every cursor of the topic
        has acknowledged them. Raises NotFoundError."""
        at = message_id("before", before, least=0)
        first = at.first_chunk if isinstance(at, ChunkMessageId) else at
        request = ledger_pb2.TrimTopicRequest(
            topic=full_name(topic), before=to_wire(first.position)
        )
        answer = await self._calls.call(request)
        return Trimmed(
            answer.removed_entries,
            optional_id(optional(answer, "first")),
            tuple(answer.held_back_by),
        )


def _topic(wire: ledger_pb2.Topic) -> TopicInfo:
    return TopicInfo(
        name=wire.name,
        created_at=time_of(wire.created),
        first=optional_id(optional(wire, "first")),
        last=optional_id(optional(wire, "last")),
        entries=wire.entries,
        messages=wire.messages,
        size_bytes=wire.bytes,
        connected_producers=wire.connected_producers,
        entries_to_replay=wire.entries_to_replay,
    )

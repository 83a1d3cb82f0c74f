"""The admin client for threads."""

from collections.abc import AsyncIterator, Callable
from typing import ParamSpec, TypeVar

from seqgate.client._admin import Admin as AsyncioAdmin
from seqgate.client._cursors import CursorInfo
from seqgate.client._letters import DeadLetter
from seqgate.client._subscriptions import SubscriptionInfo
from seqgate.client._topics import TopicInfo
from seqgate.client.blocking._portal import Held, crossing

P = ParamSpec("P")
T = TypeVar("T")


class Admin(Held[AsyncioAdmin]):
    """Manages topics, policies, subscriptions and cursors: `seqgate.client.Admin` for threads.

    Made by Client.admin; it needs no close. Threads may share it. Listings are lists."""

    create_topic = crossing(AsyncioAdmin.create_topic)
    topic = crossing(AsyncioAdmin.topic)
    delete_topic = crossing(AsyncioAdmin.delete_topic)
    trim_topic = crossing(AsyncioAdmin.trim_topic)
    deduplication = crossing(AsyncioAdmin.deduplication)
    policy = crossing(AsyncioAdmin.policy)
    set_policy = crossing(AsyncioAdmin.set_policy)
    take_snapshot = crossing(AsyncioAdmin.take_snapshot)
    explain_publication = crossing(AsyncioAdmin.explain_publication)
    create_subscription = crossing(AsyncioAdmin.create_subscription)
    subscription = crossing(AsyncioAdmin.subscription)
    reset_subscription = crossing(AsyncioAdmin.reset_subscription)
    update_subscription = crossing(AsyncioAdmin.update_subscription)
    delete_subscription = crossing(AsyncioAdmin.delete_subscription)
    release_key = crossing(AsyncioAdmin.release_key)
    redrive = crossing(AsyncioAdmin.redrive)
    start_redrive = crossing(AsyncioAdmin.start_redrive)
    estimate_redrive = crossing(AsyncioAdmin.estimate_redrive)
    replay = crossing(AsyncioAdmin.replay)
    estimate_replay = crossing(AsyncioAdmin.estimate_replay)
    redrives = crossing(AsyncioAdmin.redrives)
    redrive_info = crossing(AsyncioAdmin.redrive_info)
    stop_redrive = crossing(AsyncioAdmin.stop_redrive)
    discard = crossing(AsyncioAdmin.discard)
    mend = crossing(AsyncioAdmin.mend)
    letter_operations = crossing(AsyncioAdmin.letter_operations)
    dead_letter = crossing(AsyncioAdmin.dead_letter)
    explain_delivery = crossing(AsyncioAdmin.explain_delivery)
    message_history = crossing(AsyncioAdmin.message_history)
    message_life = crossing(AsyncioAdmin.message_life)
    create_cursor = crossing(AsyncioAdmin.create_cursor)
    cursor = crossing(AsyncioAdmin.cursor)
    reset_cursor = crossing(AsyncioAdmin.reset_cursor)
    delete_cursor = crossing(AsyncioAdmin.delete_cursor)

    def topics(self, prefix: str = "") -> list[TopicInfo]:
        """See the asyncio Admin."""
        return self._portal.run(_all, self._held.topics, prefix)

    def subscriptions(self, topic: str) -> list[SubscriptionInfo]:
        """See the asyncio Admin."""
        return self._portal.run(_all, self._held.subscriptions, topic)

    def dead_letters(
        self,
        topic: str,
        subscription: str,
        *,
        key: str | bytes | None = None,
        dead_letter_topic: str = "",
    ) -> list[DeadLetter]:
        """See the asyncio Admin."""
        return self._portal.run(
            _all,
            self._held.dead_letters,
            topic,
            subscription,
            key=key,
            dead_letter_topic=dead_letter_topic,
        )

    def cursors(self, topic: str = "") -> list[CursorInfo]:
        """See the asyncio Admin."""
        return self._portal.run(_all, self._held.cursors, topic)


async def _all(
    listing: Callable[P, AsyncIterator[T]], *args: P.args, **kwargs: P.kwargs
) -> list[T]:
    return [each async for each in listing(*args, **kwargs)]

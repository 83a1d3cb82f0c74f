"""The memory budgets that all subscriptions of an instance share."""

from dataclasses import dataclass

from seqgate.services.dispatcher.auditing.publishing import Auditing
from seqgate.services.dispatcher.config import DispatcherConfig
from seqgate.services.dispatcher.core.delays import DelayedBytes
from seqgate.services.dispatcher.core.history import Histories, History
from seqgate.services.dispatcher.shell.cache import Caches
from seqgate.services.dispatcher.shell.work import WAITING_CHANGES_BYTES_MAX
from seqgate.services.runtime.budget import Budget
from seqgate.services.runtime.room import Room
from seqgate.types import TopicName


@dataclass(frozen=True, slots=True)
class Shared:
    """The budgets: of streams, of entry caches, of delayed entries, of changes that wait, and of
    histories; and what publishes histories, if anything does."""

    streams: Room
    caches: Caches
    delayed: DelayedBytes
    changes: Budget
    histories: Histories
    auditing: Auditing | None = None

    @classmethod
    def of(cls, config: DispatcherConfig, auditing: Auditing | None = None) -> "Shared":
        """Unused budgets of the configured sizes."""
        return cls(
            Room(config.streams_bytes_max, slow_s=config.slow_consumer_s),
            Caches(config.caches_bytes_max),
            DelayedBytes(config.all_delayed_bytes_max),
            Budget(WAITING_CHANGES_BYTES_MAX),
            Histories(config.history_bytes_max),
            auditing,
        )

    def history(self, topic: TopicName, name: str) -> History | None:
        """The history of a subscription; None: nothing is recorded."""
        audit = None if self.auditing is None else self.auditing.queue(topic, name)
        if audit is None and not self.histories.bytes_max:
            return None
        history = self.histories.of(topic, name)
        history.audit = audit
        return history

    def audit_topic(self, topic: TopicName) -> TopicName | None:
        """The audit topic of a topic; None: it is not audited."""
        return None if self.auditing is None else self.auditing.topic_of(topic)

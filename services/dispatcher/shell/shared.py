"""The memory budgets that all subscriptions of an instance share."""

from dataclasses import dataclass

from seqgate.services.dispatcher.config import DispatcherConfig
from seqgate.services.dispatcher.core.delays import DelayedBytes
from seqgate.services.dispatcher.core.history import Histories
from seqgate.services.dispatcher.shell.cache import Caches
from seqgate.services.dispatcher.shell.work import WAITING_CHANGES_BYTES_MAX
from seqgate.services.runtime.budget import Budget
from seqgate.services.runtime.room import Room


@dataclass(frozen=True, slots=True)
class Shared:
    """The budgets: of streams, of entry caches, of delayed entries, of changes that wait, and of
    histories, if there are any."""

    streams: Room
    caches: Caches
    delayed: DelayedBytes
    changes: Budget
    histories: Histories | None = None

    @classmethod
    def of(cls, config: DispatcherConfig) -> "Shared":
        """Unused budgets of the configured sizes."""
        return cls(
            Room(config.streams_bytes_max, slow_s=config.slow_consumer_s),
            Caches(config.caches_bytes_max),
            DelayedBytes(config.all_delayed_bytes_max),
            Budget(WAITING_CHANGES_BYTES_MAX),
            Histories(config.history_bytes_max) if config.history_bytes_max else None,
        )

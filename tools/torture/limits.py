"""The services' limits and time-outs: default or tiny."""

from random import Random
from typing import Final

LIMITS: Final = ("default", "tiny", "mixed")
"""The defaults; tiny limits; or one of the two, drawn for each process."""

TINY: Final = {
    "DISPATCHER_KEY_PARKED_MAX": "3",
    "DISPATCHER_CONSUMER_PARKED_MAX": "12",
    "DISPATCHER_DELAYED_MAX": "3",
    "DISPATCHER_READ_ENTRIES_MAX": "7",
    "DISPATCHER_CACHE_BYTES_MAX": "3000",
    "DISPATCHER_CALL_TIMEOUT_S": "1",
    "DISPATCHER_IDLE_TIMEOUT_S": "2",
    "DISPATCHER_FILTER_TIMEOUT_S": "0.2",
    "LEDGER_GROUP_ENTRIES_MAX": "3",
    "LEDGER_FAILURES_MAX": "1",
    "LEDGER_STORE_READERS": "1",
    "LEDGER_STORE_WRITERS": "1",
    "LEDGER_DEDUP_TIMEOUT_S": "0.7",
    "LEDGER_OPEN_TIMEOUT_S": "8",
    "LEDGER_IDLE_TIMEOUT_S": "2",
    "LEDGER_KEEP_INTERVAL_S": "1",
    "LEDGER_WINDOW_MESSAGES": "60",
    "LEDGER_MAX_MESSAGE_BYTES": "20000",
    "DEDUP_REDIS_TIMEOUT_S": "0.4",
    "DEDUP_CURSOR_TIMEOUT_S": "0.7",
    "DEDUP_PURGE_INTERVAL_S": "2",
    "CURSOR_STORE_READERS": "1",
    "CURSOR_STORE_WRITERS": "1",
}
"""Settings, without the prefix SEQGATE_."""

QUICK: Final = {"KEEPALIVE_S": "2", "DRAIN_TIMEOUT_S": "5", "STOP_GRACE_S": "3"}
"""Settings of every service, shortened because a torture lasts minutes."""


RATE: Final = 25.0
TINY_RATE: Final = 8.0
"""The default rates of each producer, in messages per second. Tiny limits have a lower one: they
cost a round trip for every few messages."""


def settings_of(service: str, limits: str, random: Random) -> dict[str, str]:
    """The limit settings of one process, by full names."""
    is_tiny = limits == "tiny" or (limits == "mixed" and random.random() < 0.5)
    prefix = f"{service.upper()}_"
    tiny = {name: value for name, value in TINY.items() if name.startswith(prefix)}
    own = {f"{prefix}{name}": value for name, value in QUICK.items()} | (tiny if is_tiny else {})
    return {f"SEQGATE_{name}": value for name, value in own.items()}

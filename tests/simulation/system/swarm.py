"""The settings of a history, drawn from its seed.

Each history enables some features and faults and disables the others, so that what masks a mistake
in one history is absent in another. A limit is tiny about as often as it is the operators' default.
A share of the histories has a mix of mixes.py instead, for what seldom meets by chance.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any, Final, NamedTuple

from tests.simulation.system.mixes import MIXES, REDRIVES, Mix

FEATURES: Final = (
    "batching", "batching by key", "chunking", "delays", "filters", "dead letters", "nacks",
    "partial acks", "cumulative acks", "stuck consumers", "consumers come and go",
    "producers restart", "resends", "readers", "policies", "evictions", "trims", "resets",
    "explains", "ack timeouts", "two topics", "snapshots", "deletions", "seeks",
    "long keys", "shared names", "sqlite", "late starts", "compression", "process by key",
    "circuit breaker", "incomplete acknowledged", "producers start over", "idle producers",
    "filters are mended", "imported cursors", "letters in circles", "silent streams",
    "limits shrink", "properties",
)  # fmt: skip
"""Features that a history may use."""

LATER: Final = ("redrives",)
"""Features that are drawn apart: the histories of seeds without them stayed as they were."""

FAULTS: Final = (
    "delays", "losses", "partitions", "half-open", "store fails", "store full", "store slow",
    "redis loses all", "redis goes back", "redis loses one", "clocks", "kills", "stops",
    "rolling restarts", "instances leave", "applications die",
)  # fmt: skip
"""Faults that a history may have."""

MIX_SHARE: Final = 0.3
"""The share of seeds with a mix."""

REDRIVES_SHARE: Final = 0.05
REDRIVEN_SHARE: Final = 0.3
"""The share of seeds with the mix REDRIVES, and of the others without a mix, with redrives."""

TINY_SHARE: Final = 0.5
"""The usual share of limits that are tiny."""

K: Final = 1024


class Size(NamedTuple):
    """The extent of a history: ranges to draw from."""

    share: float
    """The share of histories."""
    messages: Sequence[int]
    """The most messages of each producer."""
    seconds: Sequence[float]
    """Virtual time until faults stop."""


SIZES: Final[Mapping[str, Size]] = {
    "small": Size(0.75, (2, 4, 6, 10), (0.5, 1.0, 2.0, 3.0)),
    "middle": Size(0.2, (5, 10, 20, 40), (3.0, 6.0, 12.0)),
    "large": Size(0.04, (40, 80), (6.0, 12.0, 30.0)),
    "long": Size(0.01, (20, 40, 160), (30.0, 90.0)),
}
"""Most histories are small, because most mistakes need little: one long history costs as much as a
hundred small ones."""

LIMITS: Final[Mapping[str, Mapping[str, Sequence[Any]]]] = {
    "ledger": {
        "group_entries_max": (1, 3),
        "group_bytes_max": (K, 2 * K),
        "window_messages": (1, 3, 60),
        "window_bytes": (K, 4 * K),
        "max_message_bytes": (K, 2 * K),
        "failures_max": (1, 2),
        "dedup_timeout_s": (0.7,),
        "open_timeout_s": (3.0, 8.0),
        "idle_timeout_s": (1.0, 2.0),
        "keep_interval_s": (1.0,),
        "follow_poll_s": (0.2,),
        "unanswered_bytes_max": (64 * K,),
        "read_bytes_max": (64 * K,),
        "publish_streams_max": (8,),
        "read_streams_max": (8,),
        "calls_max": (2, 5),
        "streams_max": (24,),
    },
    "dedup": {
        "cursor_timeout_s": (0.7,),
        "purge_interval_s": (2.0,),
        "snapshot_check_interval_s": (0.5, 2.0),
    },
    "cursor": {},
    "dispatcher": {
        "lease_s": (0.5, 1.0, 3.0),
        "idle_timeout_s": (1.0, 2.0),
        "read_entries_max": (1, 2, 7),
        "key_parked_max": (1, 3),
        "consumer_parked_max": (1, 3, 12),
        "delayed_max": (1, 3),
        "delayed_bytes_max": (1, 4_000),
        "all_delayed_bytes_max": (1, 4_000),
        "cache_bytes_max": (0, 1_500, 3_000, 6_000),
        "caches_bytes_max": (1_500, 6_000),
        "stream_bytes_max": (600, 4_000),
        "streams_bytes_max": (1_500, 6_000),
        "call_timeout_s": (1.0, 2.0),
        "filter_timeout_s": (0.2,),
        "calls_max": (2, 5),
        "streams_max": (12, 24),
    },
    "filter": {
        "programs_max": (1, 2),
        "decisions_max": (0, 1, 2),
        "decision_bytes_max": (0, K),
        "chain_bytes_max": (4 * K, 64 * K),
        "streams_max": (4, 8),
    },
    "producer": {
        "max_pending_messages": (1, 3),
        "send_timeout_s": (2.0, 5.0),
    },
    "consumer": {
        "receiver_queue": (1, 2, 5, 20),
        "receiver_queue_bytes": (1, K),
        "assembly_messages_max": (1, 2),
        "assembly_bytes_max": (K, 8 * K),
    },
    "constants": {
        "seqgate.services.ledger.service.READ_ENTRIES_MAX": (1, 2),
        "seqgate.services.ledger.service.READ_BYTES_MAX": (1, K),
        "seqgate.services.ledger.core.runs.RUN_ENTRIES_MAX": (1, 2),
        "seqgate.services.ledger.core.writer.REPLAY_PAGE_ENTRIES": (1, 2),
        "seqgate.services.runtime.cursors.PAGE_SIZE": (1, 2),
        "seqgate.services.dispatcher.adapters.cursors.PAGE_SIZE": (1, 2),
        "seqgate.services.dispatcher.shell.sending.RESPONSE_ENTRIES_MAX": (1, 2),
        "seqgate.services.dispatcher.shell.sending.RESPONSE_BYTES_MAX": (1, K),
        "seqgate.services.dispatcher.core.lags.SCAN_ENTRIES": (1, 3),
        "seqgate.services.dispatcher.core.large.FINISHED_MAX": (1, 2),
        "seqgate.services.dispatcher.core.lane.BEYOND_ROOM_MAX": (1, 10),
        "seqgate.services.dispatcher.core.delays.KEPT_LEAST": (1, 2),
        "seqgate.services.dispatcher.core.delivering.KEPT_BACK_MAX": (1, 5),
        "seqgate.services.dispatcher.core.delays.STRETCH_ENTRIES": (1, 4),
        "seqgate.services.dispatcher.core.delays.HELD_KEYS_MAX": (1,),
        "seqgate.services.dispatcher.core.settling.UNSETTLED_MAX": (2, 10),
        "seqgate.services.dispatcher.core.delivering.TURN_ENTRIES": (1, 2),
        "seqgate.services.dispatcher.core.verdicts.JUDGE_ENTRIES": (1, 2),
        "seqgate.services.dispatcher.adapters.filters.BATCH_ENTRIES_MAX": (1, 2),
        "seqgate.services.cursor.servicer.HOLES_STEP": (1, 2),
        "seqgate.services.dedup.service.SCAN_PAGE": (1, 2),
        "seqgate.client._requests.ACKS_MAX": (1, 3),
        "seqgate.client._requests.UNANSWERED_MAX": (1, 2),
        "seqgate.client._requests.ITEMS_MAX": (1, 3),
        "seqgate.services.dispatcher.filtering.chains.PIECE_BYTES": (64,),
        "seqgate.services.dispatcher.filtering.shadow.WAITING_MAX": (1, 3),
    },
}
"""Tiny values of each limit. Limits that are not drawn keep their defaults."""


@dataclass(frozen=True)
class Swarm:
    """The settings of one history.

    Attributes:
        size: one of SIZES, or "mixed".
        limits: the tiny ones, by part and name.
        instances: the number of instances of each service.
        seconds: virtual time until faults stop.
        messages: the most messages of each producer.
        mix: the name of its mix; empty for none.
        more: settings of the workload that replace the usual ones. Sequences to choose from:
            "sizes" (bytes of messages), "consumers" (of a subscription), "rest_s" (between
            messages), "kinds" (of subscriptions), "nack_share", "max_redeliveries", "after" (a
            dead letter), "drain_deadline_s", "chunk_bytes", "batch" (messages), "cursor_latency_s",
            "state_latency_s" (of stores), "expressions" and "policies" (of filters). Numbers:
            "acts" of administrators and "faults" (how many), "redrives" and "amends" (how much
            likelier), "batch_share", "chunk_share" (of producers), "delay_share",
            "long_key_share" (of messages), "work_s" (the most that consumers take), "late_s" (when
            the first one connects at the latest). Others: "retry_s" (first and longest), "own_ids",
            "filter_first", "deletes_topics" (set or not).
    """

    seed: int
    features: frozenset[str]
    faults: frozenset[str]
    limits: Mapping[str, Mapping[str, Any]]
    instances: Mapping[str, int]
    producers: int
    subscriptions: int
    messages: int
    seconds: float
    size: str
    network_s: float = 0.002
    mix: str = ""
    more: Mapping[str, Any] = field(default_factory=dict)

    def one_of(self, name: str, rng: Random, usual: Sequence[Any]) -> Any:
        """Draw a setting from the mix's values or, without any, from the usual ones."""
        return rng.choice(self.more.get(name, usual))

    def has(self, feature: str) -> bool:
        """True if the history uses a feature."""
        return feature in self.features

    def fails(self, fault: str) -> bool:
        """True if the history may have a fault."""
        return fault in self.faults

    @property
    def divides_topics(self) -> bool:
        """True if several ledgers in memory divide the topics, as on PostgreSQL, and do not only
        fence each other."""
        return self.instances["ledger"] > 1 and Random(f"divides {self.seed}").random() < 0.5

    @property
    def ignores_owners(self) -> bool:
        """True if ledgers that divide topics take them from one another: safety must not depend on
        who should own a topic."""
        return self.divides_topics and Random(f"ignores {self.seed}").random() < 0.3

    @property
    def tiny(self) -> list[str]:
        """The names of the tiny limits."""
        return sorted(f"{part}.{name}" for part, of in self.limits.items() for name in of)

    def describe(self) -> str:
        """A description for readers of a violation."""
        tiny = [f"{part}.{name}={value}" for part, all_ in sorted(self.limits.items())
                for name, value in sorted(all_.items())]  # fmt: skip
        instances = [f"{n} {name}" for name, n in sorted(self.instances.items())]
        return "\n".join(
            [
                f"seed {self.seed}, {self.size}: {self.producers} producers "
                f"of {self.messages} messages, "
                f"{self.subscriptions} subscriptions, {self.seconds:.1f} s",
                *([f"mix: {self.mix}"] if self.mix else []),
                f"features: {', '.join(sorted(self.features)) or 'none'}",
                f"faults: {', '.join(sorted(self.faults)) or 'none'}",
                f"instances: {', '.join(instances)}",
                f"tiny: {', '.join(tiny) or 'nothing'}",
            ]
        )


def draw(seed: int) -> Swarm:
    """Draw the settings of a seed."""
    rng = Random(f"redrives {seed}")
    if rng.random() < REDRIVES_SHARE:
        return mixed(seed, REDRIVES)
    swarm = _drawn(seed)
    if swarm.mix or rng.random() >= REDRIVEN_SHARE:
        return swarm
    return replace(swarm, features=swarm.features | {"redrives"})


def _drawn(seed: int) -> Swarm:
    rng = Random(f"swarm {seed}")
    if rng.random() < MIX_SHARE:
        return mixed(seed, rng.choice(MIXES))
    features = _some(rng, FEATURES)
    faults = _some(rng, FAULTS) if rng.random() < 0.8 else frozenset()
    tiny_share = rng.choice([0.0, TINY_SHARE, TINY_SHARE, 1.0])
    limits = {
        part: {name: rng.choice(values) for name, values in of.items() if rng.random() < tiny_share}
        for part, of in LIMITS.items()
    }
    instances = {
        name: 2 if rng.random() < 0.3 else 1
        for name in ("ledger", "dedup", "cursor", "dispatcher", "filter")
    }
    size = rng.choices(list(SIZES), [SIZES[each].share for each in SIZES])[0]
    producers = rng.choice([1, 2, 2, 3])
    subscriptions = rng.choice([0, 1, 1, 1, 2, 2])
    return Swarm(
        seed,
        features,
        faults,
        limits,
        instances,
        producers=producers,
        subscriptions=subscriptions,
        messages=rng.choice(SIZES[size].messages),
        seconds=rng.choice(SIZES[size].seconds),
        size=size,
    )


def mixed(seed: int, mix: Mix) -> Swarm:
    """Draw the settings of a seed within a mix."""
    rng = Random(f"mix {seed}")
    perhaps = [each for each in mix.perhaps if rng.random() < 0.5]
    has = {*mix.features, *mix.faults, *perhaps}
    tiny_share = rng.choice([0.0, 0.0, 0.2])
    limits = {
        part: {name: rng.choice(values) for name, values in of.items() if rng.random() < tiny_share}
        for part, of in LIMITS.items()
    }
    for part, of in mix.limits.items():
        limits[part].update({name: rng.choice(values) for name, values in of.items()})
    instances = {
        name: rng.choice(mix.instances.get(name, (1,)))
        for name in ("ledger", "dedup", "cursor", "dispatcher", "filter")
    }
    producers, subscriptions = rng.choice(mix.producers), rng.choice(mix.subscriptions)
    return Swarm(
        seed,
        frozenset(has.intersection((*FEATURES, *LATER))),
        frozenset(has.intersection(FAULTS)),
        limits,
        instances,
        producers=producers,
        subscriptions=subscriptions,
        messages=rng.choice(mix.messages),
        seconds=rng.choice(mix.seconds),
        size="mixed",
        mix=mix.name,
        more={"kinds": mix.kinds, **mix.more},
    )


def _some(rng: Random, of: Sequence[str]) -> frozenset[str]:
    share = rng.choice([0.1, 0.3, 0.5])
    return frozenset(each for each in of if rng.random() < share)

"""Named mixes: combinations of use and faults that seldom meet by chance.

A share of the seeds has one. Settings that a mix leaves open are drawn as for every history, from
small ranges: a history stays cheap, and the mix dominates it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

K: Final = 1024

NO_LIMITS: Final[Mapping[str, Mapping[str, Sequence[Any]]]] = {}


@dataclass(frozen=True)
class Mix:
    """A named combination of settings.

    Attributes:
        features, faults: those of every history of the mix.
        perhaps: those of about half of its histories.
        limits: tiny values by part and name; one is drawn of each.
        kinds: the types of subscriptions.
        more: settings of the workload that replace the usual ones: see Swarm.more.
    """

    name: str
    features: Sequence[str] = ()
    faults: Sequence[str] = ()
    perhaps: Sequence[str] = ()
    limits: Mapping[str, Mapping[str, Sequence[Any]]] = field(default_factory=dict)
    instances: Mapping[str, Sequence[int]] = field(default_factory=dict)
    producers: Sequence[int] = (2,)
    subscriptions: Sequence[int] = (1,)
    messages: Sequence[int] = (20, 40)
    seconds: Sequence[float] = (4.0,)
    kinds: Sequence[str] = ("KEY_SHARED", "SHARED", "EXCLUSIVE")
    more: Mapping[str, Any] = field(default_factory=dict)


MIXES: Final[Sequence[Mix]] = (
    Mix(
        "memory pressure: small caches, and slow consumers",
        perhaps=("stuck consumers", "nacks", "consumers come and go", "store slow", "store fails"),
        limits={
            "dispatcher": {
                "cache_bytes_max": (600, 1_500, 3_000),
                "caches_bytes_max": (1_500, 6_000),
                "stream_bytes_max": (600, 1_500, 4_000),
                "streams_bytes_max": (1_500, 6_000),
                "read_entries_max": (1, 3, 7),
                "key_parked_max": (2, 12),
                "consumer_parked_max": (3, 12),
            },
            "consumer": {"receiver_queue": (20, 50)},
        },
        subscriptions=(2,),
        messages=(40, 60),
        more={"sizes": (40, 150, 400), "consumers": (2, 3), "rest_s": (0.0, 0.01)},
    ),
    Mix(
        "floods: more is sent and read than there is room for",
        perhaps=("store slow", "readers", "delays", "batching"),
        limits={
            "ledger": {
                "unanswered_bytes_max": (64 * K,),
                "read_bytes_max": (64 * K,),
                "slow_reader_s": (1.0,),
                "group_entries_max": (3, 20),
            },
            "dispatcher": {"slow_consumer_s": (1.0,), "calls_max": (2, 5)},
        },
        faults=("store slow",),
        producers=(3,),
        messages=(60,),
        more={"sizes": (4_000, 6_000), "rest_s": (0.0,)},
    ),
    Mix(
        "takeovers: names, leases and topics change hands",
        features=("shared names",),
        faults=("kills", "half-open", "partitions"),
        perhaps=("stops", "rolling restarts", "losses"),
        limits={
            "dispatcher": {"lease_s": (0.5, 1.0)},
            "ledger": {"idle_timeout_s": (1.0,)},
        },
        instances={"ledger": (1, 2), "dispatcher": (1, 2)},
        producers=(2, 3),
        messages=(10, 20),
        more={"rest_s": (0.1, 0.5), "batch_share": 0.0},
    ),
    Mix(
        "chunks interleaved: large messages of many producers, with little room for them",
        features=("chunking",),
        perhaps=("late starts", "nacks", "filters"),
        limits={
            "consumer": {
                "assembly_messages_max": (1, 2),
                "receiver_queue": (5, 20, 50),
            },
            "ledger": {"max_message_bytes": (K,), "window_messages": (1, 3)},
        },
        producers=(4, 6),
        messages=(8, 12),
        seconds=(3.0,),
        kinds=("EXCLUSIVE", "EXCLUSIVE", "KEY_SHARED"),
        more={
            "sizes": (3_000,),
            "rest_s": (0.0, 0.02),
            "late_s": 0.3,
            "chunk_share": 1.0,
            "chunk_bytes": (0, 1_000),
        },
    ),
    Mix(
        "permits: few at a time, for large messages and batches",
        features=("chunking", "consumers come and go"),
        perhaps=("nacks", "batching"),
        limits={
            "consumer": {"receiver_queue": (1, 2, 3)},
            "ledger": {"max_message_bytes": (K,)},
        },
        producers=(3,),
        messages=(10, 20),
        kinds=("KEY_SHARED", "SHARED"),
        more={
            "sizes": (40, 2_000),
            "consumers": (3,),
            "rest_s": (0.0,),
            "chunk_share": 0.7,
            "chunk_bytes": (0, 500),
        },
    ),
    Mix(
        "dead letters: many failures, and failing dispatchers",
        features=("dead letters",),
        perhaps=(
            "long keys",
            "kills",
            "rolling restarts",
            "chunking",
            "consumers come and go",
            "explains",
            "two topics",
            "letters in circles",
        ),
        limits={"dispatcher": {"lease_s": (0.5,)}},
        messages=(20,),
        more={
            "nack_share": (0.3, 0.6),
            "max_redeliveries": (0, 1),
            "after": ("HOLD", "CONTINUE", "TAIL"),
            "long_key_share": 0.5,
            "faults": 20,
        },
    ),
    Mix(
        "circles: dead letter topics that feed one another",
        features=("dead letters", "two topics", "letters in circles"),
        limits={
            "constants": {"seqgate.services.dispatcher.letters.graveyard.GENERATIONS_MAX": (2, 3)}
        },
        subscriptions=(2,),
        messages=(5,),
        seconds=(8.0,),
        kinds=("SHARED",),
        more={
            "nack_share": (0.9,),
            "max_redeliveries": (0,),
            "after": ("CONTINUE",),
            "batch_share": 0.0,
        },
    ),
    Mix(
        "joins: keys move from busy consumers to new ones",
        features=("dead letters", "consumers come and go"),
        messages=(40,),
        kinds=("KEY_SHARED",),
        more={
            "consumers": (3,),
            "max_redeliveries": (0,),
            "nack_share": (0.0, 0.05),
            "drain_deadline_s": (0.1, 0.3),
            "work_s": 1.0,
            "rest_s": (0.01, 0.05),
        },
    ),
    Mix(
        "policies: deduplication is switched, producers start over, and Redis forgets",
        features=("policies", "producers start over", "trims"),
        faults=("redis loses all",),
        perhaps=("chunking", "snapshots", "producers restart", "evictions"),
        messages=(40,),
        subscriptions=(0,),
        seconds=(12.0,),
        more={"acts": 40, "own_ids": True, "rest_s": (0.1, 0.2)},
    ),
    Mix(
        "trims amid messages: the log is trimmed while large messages are written",
        features=("chunking", "trims"),
        perhaps=("redis loses all", "store slow", "late starts"),
        limits={
            "ledger": {
                "max_message_bytes": (K,),
                "window_messages": (1,),
                "group_entries_max": (1,),
            }
        },
        producers=(2,),
        subscriptions=(0, 0, 1),
        messages=(10,),
        more={
            "sizes": (4_000,),
            "acts": 60,
            "chunk_share": 1.0,
            "rest_s": (0.0, 0.05),
            "chunk_bytes": (0, 800),
        },
    ),
    Mix(
        "two on one store: one ledger reads what the other trims, and Redis forgets",
        features=("trims", "producers restart", "resends"),
        faults=("redis loses all", "kills", "store slow"),
        limits={
            "constants": {"seqgate.services.ledger.core.writer.REPLAY_PAGE_ENTRIES": (1, 2)},
            "ledger": {"open_timeout_s": (8.0,)},
        },
        instances={"ledger": (2,)},
        producers=(2,),
        subscriptions=(0,),
        messages=(20,),
        seconds=(8.0,),
        more={
            "state_latency_s": (0.02, 0.1),
            "acts": 40,
            "own_ids": True,
            "faults": 30,
            "batch_share": 0.0,
        },
    ),
    Mix(
        "clocks: clocks jump, and instances die",
        faults=("clocks", "kills", "instances leave"),
        perhaps=("rolling restarts", "redis loses all"),
        limits={"dispatcher": {"lease_s": (1.0, 3.0)}},
        instances={"cursor": (1, 2), "dispatcher": (2,)},
        producers=(1,),
        messages=(40,),
        seconds=(6.0,),
        more={"faults": 40, "rest_s": (0.1, 0.2)},
    ),
    Mix(
        "batches in part: part of a batch is acknowledged, and the rest refused after it",
        features=("batching", "nacks", "partial acks"),
        perhaps=("process by key", "store slow", "kills"),
        limits={"consumer": {"receiver_queue": (20,)}},
        messages=(40,),
        more={
            "batch": (3, 10),
            "batch_share": 1.0,
            "nack_share": (0.3,),
            "rest_s": (0.0,),
            "cursor_latency_s": (0.02, 0.1, 0.3),
        },
    ),
    Mix(
        "changes under way: filters and positions change while messages wait for their time",
        features=("filters", "nacks"),
        perhaps=("resets", "seeks", "delays", "filters are mended", "store slow"),
        limits={
            "constants": {"seqgate.services.dispatcher.shell.work.WAITING_CHANGES_MAX": (1, 2, 100)}
        },
        messages=(10, 20),
        more={
            "acts": 30,
            "nack_share": (0.4,),
            "cursor_latency_s": (0.1, 0.5),
            "retry_s": (0.1, 0.6),
        },
    ),
    Mix(
        "timers: a change is in progress when a message falls due, and little else happens",
        features=("properties", "nacks"),
        perhaps=("delays", "store slow"),
        producers=(1,),
        messages=(2, 4),
        seconds=(3.0,),
        more={
            "rest_s": (0.5,),
            "acts": 20,
            "nack_share": (0.9,),
            "retry_s": (0.2, 0.8),
            "cursor_latency_s": (0.3, 0.8),
            "consumers": (1,),
        },
    ),
    Mix(
        "mended filters: a filter fails, messages wait for it, and it is mended",
        features=("filters", "filters are mended"),
        perhaps=("nacks", "kills", "chunking"),
        messages=(10, 20),
        more={
            "acts": 4,
            "expressions": ("int(properties['tag']) == 1",),
            "policies": ("PARK",),
            "filter_first": True,
        },
    ),
    Mix(
        "held keys: keys wait after a dead letter until they are released",
        features=("dead letters", "explains"),
        perhaps=("kills", "long keys", "consumers come and go"),
        messages=(10,),
        kinds=("EXCLUSIVE", "KEY_SHARED"),
        more={"nack_share": (0.3,), "max_redeliveries": (0,), "after": ("HOLD",)},
    ),
    Mix(
        "moved back: subscriptions move back to trimmed positions",
        features=("trims", "resets", "seeks"),
        perhaps=("kills", "batching", "chunking"),
        limits={"ledger": {"idle_timeout_s": (1.0,)}},
        instances={"ledger": (1, 2)},
        messages=(20,),
        seconds=(6.0,),
        more={"acts": 40, "rest_s": (0.05, 0.2)},
    ),
    Mix(
        "deletions: subscriptions are created, deleted and recreated, some by imports",
        features=("deletions", "imported cursors"),
        perhaps=("kills", "store slow", "late starts"),
        limits={"dispatcher": {"lease_s": (0.5,)}},
        messages=(20,),
        seconds=(6.0,),
        more={"acts": 12, "deletes_topics": False, "rest_s": (0.1, 0.2)},
    ),
    Mix(
        "idle producers: producers rest for almost as long as policy allows, and return",
        features=("evictions", "idle producers", "producers restart"),
        limits={"dedup": {"purge_interval_s": (2.0,)}},
        producers=(1, 2),
        subscriptions=(0,),
        messages=(10,),
        seconds=(150.0,),
        more={"acts": 2, "own_ids": True},
    ),
    Mix(
        "for later: more delayed messages than there is room for",
        features=("delays",),
        perhaps=("kills", "trims", "filters", "cumulative acks", "store slow", "dead letters"),
        limits={
            "dispatcher": {
                "delayed_max": (1, 3, 10),
                "read_entries_max": (1, 3, 7),
                "key_parked_max": (1, 3, 12),
                "consumer_parked_max": (1, 3, 12),
            },
            "constants": {
                "seqgate.services.dispatcher.core.delays.STRETCH_ENTRIES": (4, 16),
                "seqgate.services.dispatcher.core.delays.KEPT_LEAST": (1,),
                "seqgate.services.dispatcher.core.lags.SCAN_ENTRIES": (1, 3, 10),
            },
        },
        kinds=("KEY_SHARED", "KEY_SHARED", "SHARED"),
        more={"delay_share": 0.8, "rest_s": (0.0, 0.02)},
    ),
    Mix(
        "rejections: filters reject almost everything while nothing becomes durable",
        features=("filters",),
        faults=("store slow",),
        limits={
            "constants": {
                "seqgate.services.dispatcher.core.settling.UNSETTLED_MAX": (3, 6),
                "seqgate.services.dispatcher.core.verdicts.UNJUDGED_MAX": (3, 6),
                "seqgate.services.dispatcher.core.lags.SCAN_ENTRIES": (3,),
                "seqgate.services.dispatcher.core.lane.BEYOND_ROOM_MAX": (1, 3),
            },
            "dispatcher": {"read_entries_max": (1, 3), "consumer_parked_max": (1, 3)},
        },
        messages=(60,),
        more={"cursor_latency_s": (0.3, 1.0), "filter_first": True, "rest_s": (0.0,)},
    ),
    Mix(
        "smaller limits: the ledger restarts with a smaller limit",
        faults=("store slow",),
        features=("chunking", "limits shrink"),
        producers=(2,),
        subscriptions=(0, 1),
        messages=(40,),
        seconds=(3.0,),
        more={
            "sizes": (40, 1_500),
            "chunk_share": 1.0,
            "rest_s": (0.02, 0.05),
            "chunk_bytes": (0,),
        },
    ),
    Mix(
        "silent callers: streams that send nothing",
        features=("silent streams",),
        messages=(5,),
        seconds=(4.0,),
        more={"acts": 12},
    ),
)
"""All mixes, drawn with equal probability."""


REDRIVES: Final = Mix(
    "redrives: dead letters come back, are mended and discarded, and topics are replayed while "
    "dispatchers die",
    features=("dead letters", "redrives"),
    faults=("kills",),
    perhaps=(
        "batching",
        "chunking",
        "consumers come and go",
        "explains",
        "filters",
        "instances leave",
        "partial acks",
        "resets",
        "rolling restarts",
        "store fails",
        "store slow",
        "stuck consumers",
        "trims",
    ),
    limits={
        "dispatcher": {"lease_s": (0.5, 1.0)},
        "constants": {
            "seqgate.services.dispatcher.letters.chunks.NEAR_FIRST": (1, 100),
            "seqgate.services.dispatcher.letters.chunks.PAGE_ENTRIES": (1, 3, 1_000),
            "seqgate.services.dispatcher.redrives.redriving.PAGE_ENTRIES": (1, 3, 1_000),
            "seqgate.services.dispatcher.redrives.redriving.STEP_LETTERS": (1, 2, 100),
            "seqgate.services.dispatcher.redrives.redriving.ON_THEIR_WAY_MAX": (1, 3, 400),
        },
    },
    instances={"dispatcher": (1, 2), "cursor": (1, 2)},
    messages=(10, 20),
    seconds=(4.0, 8.0),
    more={
        "acts": 30,
        "redrives": 5,
        "amends": 5,
        "nack_share": (0.3,),
        "max_redeliveries": (0, 1),
        "after": ("HOLD", "CONTINUE", "TAIL"),
        "faults": 15,
    },
)
"""Drawn apart from MIXES, so that their histories stayed as they were."""

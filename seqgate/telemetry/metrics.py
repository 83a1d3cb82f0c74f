"""Every metric of every process: the one list that instruments, dashboards, alerts and tests share.

    Metric ──Metrics.counter, .gauge, .histogram (services/runtime/metrics.py)──▶ an instrument
       └── .prometheus ──▶ its name in a scrape: rpc_server_call_duration_seconds

Cardinality is bounded: each attribute has a closed set of values, or a maximum number of them. No
attribute is a producer, a key, a consumer, a subscription or a message. The topic attribute has the
topics that the operator lists in `metrics_topics`; all others count together under OTHER.

Each replica or instance of a service reports its own values: sum over them. Only metrics with
`is_shared`, the state in the Redis that dedup's replicas share, are reported in full by each
replica: take the maximum.

Names and attributes of `rpc.`, `http.` and `process.` are OpenTelemetry's conventions (RPC as of
v1.40).
"""

import re
from enum import Enum
from typing import Final, NamedTuple

OTHER: Final = "_other"
"""Stands for all topics not in `metrics_topics`."""

TOPICS_MAX: Final = 100
"""The most topics that a service reports by name; all others count under OTHER."""

METHODS_MAX: Final = 100
"""Exceeds the methods of all services together, health and reflection included."""

ROUTES_MAX: Final = 40
"""Exceeds the paths of the console."""

DURATIONS_S: Final = (
    *(0.005, 0.01, 0.025, 0.05, 0.075),
    *(0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0),
)
"""The conventions' bounds for calls."""

STEPS_S: Final = (0.0005, 0.001, 0.0025, *DURATIONS_S)
"""For work shorter than a call."""

WAITS_S: Final = (0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0, 300.0, 1_800.0)
"""For waits of up to minutes."""

ENTRIES: Final = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1_000.0, 2_000.0, 5_000.0)
SIZES: Final = tuple(float(4**power) for power in range(4, 13))
"""From 256 bytes to 16 MiB."""


class Kind(Enum):
    COUNTER = "counter"
    """Only grows while the process lives."""
    UP_DOWN = "up-down counter"
    """A part of a whole: sums make sense. Prometheus has it as a gauge."""
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Attribute(NamedTuple):
    """An attribute of a metric.

    Attributes:
        values: all its values; empty: not known beforehand.
        values_max: the most values that it has.
    """

    name: str
    values: tuple[str, ...]
    values_max: int

    @property
    def label(self) -> str:
        return re.sub(r"[^a-zA-Z0-9]+", "_", self.name)


class Metric(NamedTuple):
    """One metric.

    Attributes:
        unit: in UCUM, with counted things in braces.
        services: the services that report it.
        bounds: the bounds of a histogram's buckets.
        is_optional: whether it may be missing, depending on use or settings.
        is_shared: whether each replica reports the state that all share.
    """

    name: str
    kind: Kind
    unit: str
    description: str
    services: tuple[str, ...]
    attributes: tuple[Attribute, ...] = ()
    bounds: tuple[float, ...] = ()
    is_optional: bool = False
    is_shared: bool = False

    @property
    def prometheus(self) -> str:
        """Its name in a scrape, by OpenTelemetry's rules. A histogram's samples have `_bucket`,
        `_count` and `_sum` after it."""
        name = re.sub(r"[^a-zA-Z0-9:]+", "_", self.name)
        unit = _UNITS.get(self.unit, "")
        if unit and not name.endswith(f"_{unit}"):
            name = f"{name}_{unit}"
        return f"{name}_total" if self.kind is Kind.COUNTER else name


_UNITS: Final = {"s": "seconds", "By": "bytes"}


def _closed(name: str, *values: str) -> Attribute:
    return Attribute(name, values, len(values))


SERVICES: Final = ("ledger", "dedup", "cursor", "dispatcher", "filter")
PROCESSES: Final = (*SERVICES, "console")
"""The services, and their client in the browser."""

_LEDGER: Final = ("ledger",)
_DEDUP: Final = ("dedup",)
_CURSOR: Final = ("cursor",)
_DISPATCHER: Final = ("dispatcher",)
_FILTER: Final = ("filter",)
_CONSOLE: Final = ("console",)

STATUS_CODES: Final = (
    *("OK", "CANCELLED", "UNKNOWN", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "NOT_FOUND"),
    *("ALREADY_EXISTS", "PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION"),
    *("ABORTED", "OUT_OF_RANGE", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS"),
    "UNAUTHENTICATED",
)

SERVER_ERRORS: Final = (
    *("UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS"),
)
"""The codes that are a server's failure by the conventions; for a client, all but OK are one."""

# ---- attributes

TOPIC: Final = Attribute("topic", (), TOPICS_MAX + 1)
"""A topic listed in `metrics_topics`, or OTHER."""

RPC_SYSTEM: Final = _closed("rpc.system.name", "grpc")
RPC_METHOD: Final = Attribute("rpc.method", (), METHODS_MAX)
"""A method that the service has or calls, as seqgate.api.ledger.v1.LedgerService/Publish."""
RPC_CODE: Final = _closed("rpc.response.status_code", *STATUS_CODES)
SERVER_ERROR: Final = _closed("error.type", *SERVER_ERRORS)
"""Only on failed calls."""
CLIENT_ERROR: Final = _closed("error.type", *STATUS_CODES[1:])
CPU_MODE: Final = _closed("cpu.mode", "user", "system")
DENIAL: Final = _closed(
    "reason",
    *("PERMISSION_DENIED", "MISSING_CREDENTIALS", "INVALID_TOKEN", "TOKEN_EXPIRED"),
    *("TOKEN_NOT_YET_VALID", "WRONG_AUDIENCE", "WRONG_ISSUER"),
)

BUSY_LIMIT: Final = _closed(
    "limit",
    *("calls_max", "streams_max", "calls_bytes_max", "WAITING_MAX", "WAITING_CHANGES_MAX"),
)

STATUS: Final = _closed(
    "status",
    *("STORED", "DUPLICATE", "STALE", "PARTIAL", "REFUSED", "FAILED", "SKIPPED"),
    *("CHUNK_GAP", "LAYOUT_CONFLICT"),
)
CONTENT: Final = _closed("content", "same", "differs", "not_compared")
"""How the content of a message that was sent again compares with what is stored under its id."""
APPEND_OUTCOME: Final = _closed("outcome", "stored", "failed")
TOPIC_STATE: Final = _closed("state", "live", "aligning", "waiting_for_rebuild")
CAUSE: Final = _closed(
    "cause",
    *("takeover", "behind", "changed", "dedup_failed", "switched_on", "append_failed"),
    "lost_claim",
)
"""Why a topic's writer aligns: it took the topic; deduplication lacks entries, has another state,
failed to answer, or was switched on; an append failed; or a claim of a lost publication is open."""

VERDICT: Final = _closed(
    "verdict",
    *("NEW", "IN_FLIGHT", "DUPLICATE", "PARTIAL", "HELD", "CHUNK_GAP", "LAYOUT_CONFLICT"),
)
OPERATION: Final = _closed("operation", "admit", "confirm", "rollback")
CALL_OUTCOME: Final = _closed(
    "outcome", "judged", "applied", "behind", "changed", "disabled", "full", "failed"
)
FORGOTTEN: Final = _closed("cause", "inactive", "evicted")
SNAPSHOT_OUTCOME: Final = _closed("outcome", "taken", "nothing", "too_large", "failed")
RESTORE_OUTCOME: Final = _closed("outcome", "loaded", "nothing", "unavailable")
WORK: Final = _closed("work", "snapshot", "purge", "policies")
LOAD_OUTCOME: Final = _closed("outcome", "loaded", "kept")
AUDIT_OUTCOME: Final = _closed("outcome", "published", "dropped")

SUBSCRIPTION_STATE: Final = _closed(
    "state", "delivering", "idle", "unacked_limit", "waiting_for_filters"
)
CONSUMER_STATE: Final = _closed("state", "ready", "no_permits", "unacked_limit")
KEY_REASON: Final = _closed(
    "reason",
    *("READY", "DRAINING", "IN_FLIGHT_LIMIT", "RETRY_DELAY", "RETRY", "RECORDING", "DELAYED"),
    *("DEAD_LETTERING", "HELD", "JOINING", "SUBSCRIPTION_LIMIT", "RETURNED_LIMIT", "FILTERING"),
    *("FILTER_FAILED", "RESCHEDULED"),
)
"""The reasons of dispatcher.proto; READY: the key is not withheld."""
WITHHELD_REASON: Final = _closed("reason", *KEY_REASON.values[1:])
WAITING: Final = _closed("cause", "delayed", "unjudged", "filter_failed", "rescheduled")
REDELIVERY: Final = _closed(
    "cause", "negative_acknowledgement", "timed_out", "lost_consumer", "returned", "drained"
)
MODE: Final = _closed("mode", "applied", "shadow")
SAID: Final = _closed("verdict", "accepted", "rejected", "rescheduled", "failed")
LOOKUP: Final = _closed("result", "remembered", "asked")
ANSWER_OUTCOME: Final = _closed("outcome", "answered", "failed")
NO_VERDICT: Final = _closed(
    "reason",
    *("PROPERTY_ABSENT", "EVALUATION_FAILED", "INVALID_DELAY", "INVALID_METADATA"),
    *("UNSPECIFIED", "UNAVAILABLE", "NOT_ASKED"),
)

FILTER_VERDICT: Final = _closed("verdict", "ACCEPT", "REJECT", "RESCHEDULE", "FAILED")
FAILURE: Final = _closed(
    "reason", "PROPERTY_ABSENT", "EVALUATION_FAILED", "INVALID_DELAY", "INVALID_METADATA"
)
SOURCE: Final = _closed("source", "remembered", "evaluated")
CACHE: Final = _closed("cache", "decisions", "programs")
COMPILATION: Final = _closed("outcome", "compiled", "remembered", "refused")

HTTP_METHOD: Final = _closed("http.request.method", "GET", "POST", "_OTHER")
HTTP_ROUTE: Final = Attribute("http.route", (), ROUTES_MAX)
"""The path of a page or of a form of the console."""
HTTP_STATUS: Final = Attribute("http.response.status_code", (), 15)
HTTP_SCHEME: Final = Attribute("url.scheme", ("http", "https"), 1)
"""A process has one of them."""

# ---- every service

SERVER_CALLS: Final = Metric(
    "rpc.server.call.duration",
    Kind.HISTOGRAM,
    "s",
    "Duration of calls, from first byte to end; of streams, while they are open",
    SERVICES,
    (RPC_SYSTEM, RPC_METHOD, RPC_CODE, SERVER_ERROR),
    DURATIONS_S,
)
CLIENT_CALLS: Final = Metric(
    "rpc.client.call.duration",
    Kind.HISTOGRAM,
    "s",
    "Duration of calls to other services",
    ("ledger", "dedup", "dispatcher", "console"),
    (RPC_SYSTEM, RPC_METHOD, RPC_CODE, CLIENT_ERROR),
    DURATIONS_S,
    is_optional=True,  # dedup may run without a cursor service
)
CPU_TIME: Final = Metric(
    "process.cpu.time",
    Kind.COUNTER,
    "s",
    "CPU time of the process, all threads",
    PROCESSES,
    (CPU_MODE,),
)
MEMORY: Final = Metric(
    "process.memory.usage",
    Kind.UP_DOWN,
    "By",
    "Resident memory of the process",
    PROCESSES,
)
OPEN_FILES: Final = Metric(
    "process.unix.file_descriptor.count",
    Kind.UP_DOWN,
    "{file_descriptor}",
    "Open files and sockets of the process",
    PROCESSES,
)
OPEN_FILES_MAX: Final = Metric(
    "seqgate.process.file_descriptor.limit",
    Kind.GAUGE,
    "{file_descriptor}",
    "Limit of open files and sockets",
    PROCESSES,
)
UPTIME: Final = Metric(
    "process.uptime", Kind.GAUGE, "s", "Time since the process started serving", PROCESSES
)
LOOP_LAG: Final = Metric(
    "seqgate.process.event_loop.lag",
    Kind.HISTOGRAM,
    "s",
    "Delay of a timer on the event loop, sampled once a second",
    PROCESSES,
    bounds=STEPS_S,
)
STREAMS: Final = Metric("seqgate.streams", Kind.UP_DOWN, "{stream}", "Open streams", SERVICES)
BUSY: Final = Metric(
    "seqgate.busy",
    Kind.COUNTER,
    "{refusal}",
    "Calls, streams and stream messages refused with SERVICE_BUSY, by limit",
    SERVICES,
    (BUSY_LIMIT,),
)
DENIALS: Final = Metric(
    "seqgate.denials",
    Kind.COUNTER,
    "{denial}",
    "Calls and stream messages denied by authentication or access rules, by reason",
    SERVICES,
    (DENIAL, RPC_METHOD),
    is_optional=True,
)

# ---- ledger

RECEIPTS: Final = Metric(
    "seqgate.ledger.receipts",
    Kind.COUNTER,
    "{receipt}",
    "Receipts sent to producers, by status",
    _LEDGER,
    (TOPIC, STATUS),
)
REPEATED_MESSAGES: Final = Metric(
    "seqgate.ledger.repeated.messages",
    Kind.COUNTER,
    "{message}",
    "Messages sent again under a stored id, by whether they are the stored ones",
    _LEDGER,
    (TOPIC, CONTENT),
)
APPENDED_ENTRIES: Final = Metric(
    "seqgate.ledger.appended.entries",
    Kind.COUNTER,
    "{entry}",
    "Entries appended",
    _LEDGER,
    (TOPIC,),
)
APPENDED_MESSAGES: Final = Metric(
    "seqgate.ledger.appended.messages",
    Kind.COUNTER,
    "{message}",
    "Messages appended; each chunk counts as one",
    _LEDGER,
    (TOPIC,),
)
APPENDED_SIZE: Final = Metric(
    "seqgate.ledger.appended.size",
    Kind.COUNTER,
    "By",
    "Bytes appended: payloads and metadata",
    _LEDGER,
    (TOPIC,),
)
GROUP_ENTRIES: Final = Metric(
    "seqgate.ledger.group.entries",
    Kind.HISTOGRAM,
    "{entry}",
    "Entries per group commit of a topic",
    _LEDGER,
    bounds=ENTRIES,
)
GROUP_SIZE: Final = Metric(
    "seqgate.ledger.group.size",
    Kind.HISTOGRAM,
    "By",
    "Bytes per group commit of a topic",
    _LEDGER,
    bounds=SIZES,
)
APPEND_DURATION: Final = Metric(
    "seqgate.ledger.append.duration",
    Kind.HISTOGRAM,
    "s",
    "Duration of group commits: the commit and the wait for the previous one",
    _LEDGER,
    (APPEND_OUTCOME,),
    STEPS_S,
)
JUDGE_DURATION: Final = Metric(
    "seqgate.ledger.dedup.duration",
    Kind.HISTOGRAM,
    "s",
    "Round trip of a request to the dedup service, which travels on a stream",
    _LEDGER,
    (OPERATION, ANSWER_OUTCOME),
    STEPS_S,
)
TOPICS: Final = Metric(
    "seqgate.ledger.topics",
    Kind.UP_DOWN,
    "{topic}",
    "Topics open for writing, by state; waiting_for_rebuild refuses with RECOVERING",
    _LEDGER,
    (TOPIC_STATE,),
)
PRODUCERS: Final = Metric(
    "seqgate.ledger.producers",
    Kind.UP_DOWN,
    "{producer}",
    "Connected producers",
    _LEDGER,
    (TOPIC,),
)
PRODUCERS_MAX: Final = Metric(
    "seqgate.ledger.producers.limit",
    Kind.GAUGE,
    "{producer}",
    "Limit of connected producers, all topics (publish_streams_max)",
    _LEDGER,
)
UNANSWERED: Final = Metric(
    "seqgate.ledger.unanswered.messages",
    Kind.UP_DOWN,
    "{message}",
    "Messages received from producers without a receipt yet",
    _LEDGER,
    (TOPIC,),
)
RECOVERIES: Final = Metric(
    "seqgate.ledger.recoveries",
    Kind.COUNTER,
    "{recovery}",
    "Recoveries: times that a topic stopped to align deduplication state with its log",
    _LEDGER,
    (CAUSE,),
)
RECOVERY_DURATION: Final = Metric(
    "seqgate.ledger.recovery.duration",
    Kind.HISTOGRAM,
    "s",
    "Duration of finished recoveries",
    _LEDGER,
    (CAUSE,),
    WAITS_S,
)
TOPIC_FAILURES: Final = Metric(
    "seqgate.ledger.topic.failures",
    Kind.COUNTER,
    "{failure}",
    "Internal errors of a topic, which ended its streams with TOPIC_FAILED and reopened it",
    _LEDGER,
    (TOPIC,),
)
LACKING: Final = Metric(
    "seqgate.ledger.replay.distance",
    Kind.UP_DOWN,
    "{entry}",
    "Entries left to replay for recovering topics, estimated",
    _LEDGER,
    (TOPIC,),
)
REPLAYED: Final = Metric(
    "seqgate.ledger.replayed.entries",
    Kind.COUNTER,
    "{entry}",
    "Entries replayed into deduplication state",
    _LEDGER,
)
READ_ENTRIES: Final = Metric(
    "seqgate.ledger.read.entries",
    Kind.COUNTER,
    "{entry}",
    "Entries read by Read and ReadEntries",
    _LEDGER,
    (TOPIC,),
)
TRIMMED_ENTRIES: Final = Metric(
    "seqgate.ledger.trimmed.entries",
    Kind.COUNTER,
    "{entry}",
    "Entries trimmed after every cursor acknowledged them",
    _LEDGER,
)


def _store_size(service: str) -> Metric:
    return Metric(
        f"seqgate.{service}.store.size",
        Kind.UP_DOWN,
        "By",
        "Size of the database: with SQLite's write-ahead log, or of the service's tables in "
        "PostgreSQL, which all instances report",
        (service,),
    )


def _store_free(service: str) -> Metric:
    return Metric(
        f"seqgate.{service}.store.free",
        Kind.GAUGE,
        "By",
        "Space left: of the size limit or the disk, whichever is less. Not for PostgreSQL, which "
        "does not tell",
        (service,),
    )


LEDGER_STORE_SIZE: Final = _store_size("ledger")
LEDGER_STORE_FREE: Final = _store_free("ledger")

# ---- dedup

VERDICTS: Final = Metric(
    "seqgate.dedup.verdicts",
    Kind.COUNTER,
    "{verdict}",
    "Deduplication verdicts on claims: publications, or runs of publications",
    _DEDUP,
    (TOPIC, VERDICT),
)
DEDUP_CALLS: Final = Metric(
    "seqgate.dedup.calls",
    Kind.COUNTER,
    "{call}",
    "Calls of topic writers, by operation and outcome",
    _DEDUP,
    (OPERATION, CALL_OUTCOME),
)
STATE_DURATION: Final = Metric(
    "seqgate.dedup.store.duration",
    Kind.HISTOGRAM,
    "s",
    "Duration of Redis scripts",
    _DEDUP,
    (OPERATION,),
    STEPS_S,
)
DEDUP_TOPICS: Final = Metric(
    "seqgate.dedup.topics",
    Kind.GAUGE,
    "{topic}",
    "Topics with deduplication state",
    _DEDUP,
    is_shared=True,
)
TRACKED: Final = Metric(
    "seqgate.dedup.producers",
    Kind.GAUGE,
    "{producer}",
    "Tracked producers",
    _DEDUP,
    (TOPIC,),
    is_shared=True,
)
TRACKED_MAX: Final = Metric(
    "seqgate.dedup.producers.limit",
    Kind.GAUGE,
    "{producer}",
    "Limit of tracked producers by policy; sum over topics",
    _DEDUP,
    (TOPIC,),
    is_shared=True,
)
TRACKED_SHARE: Final = Metric(
    "seqgate.dedup.producers.utilization",
    Kind.GAUGE,
    "1",
    "Tracked producers divided by their limit; maximum over topics",
    _DEDUP,
    (TOPIC,),
    is_shared=True,
)
FORGOTTEN_PRODUCERS: Final = Metric(
    "seqgate.dedup.producers.forgotten",
    Kind.COUNTER,
    "{producer}",
    "Producers dropped after inactivity or evicted to make room, by cause",
    _DEDUP,
    (FORGOTTEN,),
)
SNAPSHOTS: Final = Metric(
    "seqgate.dedup.snapshots",
    Kind.COUNTER,
    "{snapshot}",
    "Attempts at snapshots; nothing: there was no state; too_large: it exceeds the limit",
    _DEDUP,
    (SNAPSHOT_OUTCOME,),
)
SNAPSHOT_DURATION: Final = Metric(
    "seqgate.dedup.snapshot.duration",
    Kind.HISTOGRAM,
    "s",
    "Duration of attempts at snapshots",
    _DEDUP,
    (SNAPSHOT_OUTCOME,),
    STEPS_S,
)
SNAPSHOT_AGE: Final = Metric(
    "seqgate.dedup.snapshot.age",
    Kind.GAUGE,
    "s",
    "Age of the newest snapshot of topics with entries confirmed since, maximum over topics; 0: no "
    "such topic. Without a snapshot, the time since the service noticed",
    _DEDUP,
    (TOPIC,),
    is_shared=True,
)
REPLAY_DISTANCE: Final = Metric(
    "seqgate.dedup.replay.distance",
    Kind.GAUGE,
    "{entry}",
    "Entries confirmed since the newest snapshot, to be replayed if Redis loses the state; maximum "
    "over topics",
    _DEDUP,
    (TOPIC,),
    is_shared=True,
)
RESTORES: Final = Metric(
    "seqgate.dedup.restores",
    Kind.COUNTER,
    "{restore}",
    "Attempts to restore state from a snapshot, by outcome",
    _DEDUP,
    (RESTORE_OUTCOME,),
)
LOADS: Final = Metric(
    "seqgate.dedup.loads",
    Kind.COUNTER,
    "{load}",
    "States loaded by rebuilds; kept: the existing state was newer",
    _DEDUP,
    (LOAD_OUTCOME,),
)
DEDUP_FAILURES: Final = Metric(
    "seqgate.dedup.failures",
    Kind.COUNTER,
    "{failure}",
    "Internal errors of background work (snapshots, purges, policies), which is retried",
    _DEDUP,
    (WORK,),
)
POLICY_FAILING: Final = Metric(
    "seqgate.dedup.policy.failing",
    Kind.GAUGE,
    "1",
    "1 while policies cannot be read and the previous ones stay in effect, else 0",
    _DEDUP,
)

# ---- dispatcher

SUBSCRIPTIONS: Final = Metric(
    "seqgate.dispatcher.subscriptions",
    Kind.UP_DOWN,
    "{subscription}",
    "Subscriptions of this instance, by state; idle: no consumer is connected",
    _DISPATCHER,
    (TOPIC, SUBSCRIPTION_STATE),
)
CONSUMERS: Final = Metric(
    "seqgate.dispatcher.consumers",
    Kind.UP_DOWN,
    "{consumer}",
    "Connected consumers, by whether they can receive",
    _DISPATCHER,
    (TOPIC, CONSUMER_STATE),
)
PERMITS: Final = Metric(
    "seqgate.dispatcher.permits",
    Kind.UP_DOWN,
    "{message}",
    "Outstanding permits: messages that consumers are ready to receive",
    _DISPATCHER,
    (TOPIC,),
)
UNACKED: Final = Metric(
    "seqgate.dispatcher.unacked.messages",
    Kind.UP_DOWN,
    "{message}",
    "Messages delivered and not durably acknowledged",
    _DISPATCHER,
    (TOPIC,),
)
KEYS: Final = Metric(
    "seqgate.dispatcher.keys",
    Kind.UP_DOWN,
    "{key}",
    "Keys with pending entries, by why they are withheld; READY: not withheld",
    _DISPATCHER,
    (TOPIC, KEY_REASON),
)
WITHHELD_AGE: Final = Metric(
    "seqgate.dispatcher.key.withheld.age",
    Kind.GAUGE,
    "s",
    "Age of the longest withheld key; 0: none is withheld",
    _DISPATCHER,
    (TOPIC, WITHHELD_REASON),
)
PARKED: Final = Metric(
    "seqgate.dispatcher.parked.entries",
    Kind.UP_DOWN,
    "{entry}",
    "Entries waiting in memory",
    _DISPATCHER,
    (TOPIC,),
)
PARKED_MAX: Final = Metric(
    "seqgate.dispatcher.parked.limit",
    Kind.GAUGE,
    "{entry}",
    "Limit of entries waiting in memory, all consumers and unassigned keys; entries beyond it are "
    "read again later",
    _DISPATCHER,
    (TOPIC,),
)
LAGGING: Final = Metric(
    "seqgate.dispatcher.lagging",
    Kind.UP_DOWN,
    "{place}",
    "Keys and slots with entries dropped from memory, to be read again",
    _DISPATCHER,
    (TOPIC,),
)
WAITING_ENTRIES: Final = Metric(
    "seqgate.dispatcher.waiting.entries",
    Kind.UP_DOWN,
    "{entry}",
    "Entries waiting for a delivery time, a filter verdict, or a repaired filter, by cause",
    _DISPATCHER,
    (TOPIC, WAITING),
)
CACHE_SIZE: Final = Metric(
    "seqgate.dispatcher.cache.size",
    Kind.UP_DOWN,
    "By",
    "Entries read and not sent yet",
    _DISPATCHER,
)
CACHE_MAX: Final = Metric(
    "seqgate.dispatcher.cache.limit",
    Kind.GAUGE,
    "By",
    "Size limit of the entry caches of all subscriptions",
    _DISPATCHER,
)
HISTORY_SIZE: Final = Metric(
    "seqgate.dispatcher.history.size",
    Kind.UP_DOWN,
    "By",
    "Histories of messages in memory, of all subscriptions",
    _DISPATCHER,
)
HISTORY_MAX: Final = Metric(
    "seqgate.dispatcher.history.limit",
    Kind.GAUGE,
    "By",
    "Size limit of the histories of messages",
    _DISPATCHER,
)
AUDIT_EVENTS: Final = Metric(
    "seqgate.dispatcher.audit.events",
    Kind.COUNTER,
    "{event}",
    "Events of histories for audit topics; dropped: the ledger did not take them in time",
    _DISPATCHER,
    (AUDIT_OUTCOME,),
)
LAG: Final = Metric(
    "seqgate.dispatcher.lag",
    Kind.UP_DOWN,
    "{entry}",
    "Entries from the mark-delete position to the last known end of the log, subscriptions of this "
    "instance",
    _DISPATCHER,
    (TOPIC,),
)
DELIVERED_ENTRIES: Final = Metric(
    "seqgate.dispatcher.delivered.entries",
    Kind.COUNTER,
    "{entry}",
    "Entries sent to consumers, redeliveries included",
    _DISPATCHER,
    (TOPIC,),
)
DELIVERED_MESSAGES: Final = Metric(
    "seqgate.dispatcher.delivered.messages",
    Kind.COUNTER,
    "{message}",
    "Unacknowledged messages in the entries sent to consumers",
    _DISPATCHER,
    (TOPIC,),
)
ACKNOWLEDGED: Final = Metric(
    "seqgate.dispatcher.acknowledged.entries",
    Kind.COUNTER,
    "{entry}",
    "Entries durably acknowledged",
    _DISPATCHER,
    (TOPIC,),
)
REDELIVERIES: Final = Metric(
    "seqgate.dispatcher.redeliveries",
    Kind.COUNTER,
    "{entry}",
    "Deliveries that came back for redelivery or a dead letter topic, by cause: refused, timed "
    "out, in flight at a lost consumer, returned unprocessed, or revoked after the key moved",
    _DISPATCHER,
    (TOPIC, REDELIVERY),
)
DEAD_LETTERS: Final = Metric(
    "seqgate.dispatcher.dead_letters",
    Kind.COUNTER,
    "{entry}",
    "Entries published to a dead letter topic",
    _DISPATCHER,
    (TOPIC,),
)
STALE: Final = Metric(
    "seqgate.dispatcher.stale",
    Kind.COUNTER,
    "{item}",
    "Acknowledgements, refusals and returns of stale deliveries",
    _DISPATCHER,
    (TOPIC,),
)
SCANNED: Final = Metric(
    "seqgate.dispatcher.scanned.entries",
    Kind.COUNTER,
    "{entry}",
    "Entries read again after they were dropped from memory",
    _DISPATCHER,
    (TOPIC,),
)
PASSED: Final = Metric(
    "seqgate.dispatcher.passed.entries",
    Kind.COUNTER,
    "{entry}",
    "Entries acknowledged without delivery because they cannot be delivered",
    _DISPATCHER,
    (TOPIC,),
)
SUBSCRIPTION_FAILURES: Final = Metric(
    "seqgate.dispatcher.subscription.failures",
    Kind.COUNTER,
    "{failure}",
    "Internal errors of a subscription, which ended its streams with SUBSCRIPTION_FAILED and "
    "reloaded it",
    _DISPATCHER,
    (TOPIC,),
)
HANDOVER_DURATION: Final = Metric(
    "seqgate.dispatcher.handover.duration",
    Kind.HISTOGRAM,
    "s",
    "Time that a moved key waited for deliveries in flight at its previous consumer",
    _DISPATCHER,
    bounds=WAITS_S,
)
FILTERED: Final = Metric(
    "seqgate.dispatcher.filter.verdicts",
    Kind.COUNTER,
    "{entry}",
    "Entries by verdict of the subscription's filters; failed: no verdict",
    _DISPATCHER,
    (TOPIC, MODE, SAID),
    is_optional=True,
)
NO_VERDICTS: Final = Metric(
    "seqgate.dispatcher.filter.failures",
    Kind.COUNTER,
    "{entry}",
    "Entries without a filter verdict, by reason",
    _DISPATCHER,
    (MODE, NO_VERDICT),
    is_optional=True,
)
LOOKUPS: Final = Metric(
    "seqgate.dispatcher.filter.lookups",
    Kind.COUNTER,
    "{entry}",
    "Entries by source of their verdict: the cache or the filter service",
    _DISPATCHER,
    (LOOKUP,),
)
ANSWER_DURATION: Final = Metric(
    "seqgate.dispatcher.filter.answer.duration",
    Kind.HISTOGRAM,
    "s",
    "Duration of requests to the filter service",
    _DISPATCHER,
    (ANSWER_OUTCOME,),
    STEPS_S,
    is_optional=True,
)
OUTAGES: Final = Metric(
    "seqgate.dispatcher.filter.outages",
    Kind.UP_DOWN,
    "{subscription}",
    "Subscriptions whose filter requests are failing",
    _DISPATCHER,
)

# ---- filter

FILTER_VERDICTS: Final = Metric(
    "seqgate.filter.verdicts",
    Kind.COUNTER,
    "{entry}",
    "Entries evaluated, by verdict",
    _FILTER,
    (FILTER_VERDICT,),
)
FILTER_FAILURES: Final = Metric(
    "seqgate.filter.failures",
    Kind.COUNTER,
    "{entry}",
    "Entries that a filter failed on, by reason",
    _FILTER,
    (FAILURE,),
)
DECISIONS: Final = Metric(
    "seqgate.filter.decisions",
    Kind.COUNTER,
    "{entry}",
    "Entries by source of the decision: the cache or an evaluation",
    _FILTER,
    (SOURCE,),
)
BATCH_ENTRIES: Final = Metric(
    "seqgate.filter.batch.entries",
    Kind.HISTOGRAM,
    "{entry}",
    "Entries per batch",
    _FILTER,
    bounds=ENTRIES,
    is_optional=True,
)
BATCH_DURATION: Final = Metric(
    "seqgate.filter.batch.duration",
    Kind.HISTOGRAM,
    "s",
    "Duration of batches",
    _FILTER,
    bounds=STEPS_S,
    is_optional=True,
)
CACHED: Final = Metric(
    "seqgate.filter.cache.entries",
    Kind.UP_DOWN,
    "{item}",
    "Cached decisions and compiled expressions",
    _FILTER,
    (CACHE,),
)
CACHED_MAX: Final = Metric(
    "seqgate.filter.cache.entries.limit",
    Kind.GAUGE,
    "{item}",
    "Limit of cached items",
    _FILTER,
    (CACHE,),
)
CACHED_SIZE: Final = Metric(
    "seqgate.filter.cache.size",
    Kind.UP_DOWN,
    "By",
    "Memory of cached items, estimated",
    _FILTER,
    (CACHE,),
)
CACHED_SIZE_MAX: Final = Metric(
    "seqgate.filter.cache.size.limit",
    Kind.GAUGE,
    "By",
    "Memory limit of cached items",
    _FILTER,
    (CACHE,),
)
COMPILATIONS: Final = Metric(
    "seqgate.filter.compilations",
    Kind.COUNTER,
    "{expression}",
    "Requests to compile an expression; remembered: it was cached",
    _FILTER,
    (COMPILATION,),
)

# ---- cursor

CURSORS: Final = Metric(
    "seqgate.cursor.cursors", Kind.UP_DOWN, "{cursor}", "Cursors", _CURSOR, (TOPIC,)
)
LEASED: Final = Metric(
    "seqgate.cursor.leased",
    Kind.UP_DOWN,
    "{cursor}",
    "Leased cursors",
    _CURSOR,
    (TOPIC,),
)
AHEAD: Final = Metric(
    "seqgate.cursor.acknowledged.entries",
    Kind.UP_DOWN,
    "{entry}",
    "Entries acknowledged beyond mark-delete positions",
    _CURSOR,
    (TOPIC,),
)
PARTIAL: Final = Metric(
    "seqgate.cursor.partial.entries",
    Kind.UP_DOWN,
    "{entry}",
    "Partially acknowledged batches",
    _CURSOR,
    (TOPIC,),
)
HOLES: Final = Metric(
    "seqgate.cursor.holes",
    Kind.UP_DOWN,
    "{entry}",
    "Unacknowledged entries between a mark-delete position and an acknowledged entry of the same "
    "ledger",
    _CURSOR,
    (TOPIC,),
)
CURSOR_STORE_SIZE: Final = _store_size("cursor")
CURSOR_STORE_FREE: Final = _store_free("cursor")

# ---- console

HTTP_REQUESTS: Final = Metric(
    "http.server.request.duration",
    Kind.HISTOGRAM,
    "s",
    "Duration of HTTP requests; those for no path of the console have the route _other",
    _CONSOLE,
    (HTTP_METHOD, HTTP_ROUTE, HTTP_STATUS, HTTP_SCHEME),
    DURATIONS_S,
)

CATALOGUE: Final = tuple(each for each in globals().copy().values() if isinstance(each, Metric))


def of_service(service: str) -> tuple[Metric, ...]:
    return tuple(each for each in CATALOGUE if service in each.services)

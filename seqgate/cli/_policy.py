"""`seqgate dedup policy`: shows and sets the policy of a topic or a namespace."""

from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Annotated, Any, Final

from google.protobuf.duration_pb2 import Duration

from seqgate.api.dedup.v1 import dedup_pb2 as pb
from seqgate.cli._arguments import Topic, topic_name
from seqgate.cli._command import Run, command, group
from seqgate.cli._declared import argument, choice, option
from seqgate.cli._failure import WrongUsage
from seqgate.cli._known import OwnLog, check_deduplicated, check_known, has_state
from seqgate.cli._output import Table, words
from seqgate.cli._wire import enum_name
from seqgate.times import duration
from seqgate.types import InvalidNameError, TopicName

INACTIVITY_TIMEOUT_MINUTES_MAX: Final = 525_600
PRODUCERS_MAX: Final = 100_000
SNAPSHOT_ENTRIES_MAX: Final = 1_000_000
SNAPSHOT_INTERVAL_MAX_S: Final = 86_400
"""The largest values that the service takes: see PolicyValues in dedup.proto."""

VALUES: Final[Mapping[str, tuple[str, Callable[[Any], Any]]]] = {
    "enabled": ("enabled", bool),
    "producer_inactivity_timeout_minutes": (
        "producer_inactivity_timeout",
        lambda value: value.seconds // 60,
    ),
    "max_producers": ("max_producers", int),
    "on_full": ("on_full", lambda value: enum_name(pb.FullTopicAction, value).lower()),
    "snapshot_entries": ("snapshot_entries", int),
    "snapshot_interval_s": ("snapshot_interval", lambda value: value.seconds),
    "on_conflict": ("on_conflict", lambda value: enum_name(pb.ConflictAction, value).lower()),
}
"""All values by their names in the policy file, in the order of output: the field on the wire, and
its form on the command line."""

app = group("Show and set the deduplication policy of a topic or a namespace.")


class OnFull(StrEnum):
    """What to do with one more producer on a full topic."""

    EVICT = "evict"
    REFUSE = "refuse"


class OnConflict(StrEnum):
    """What to do with a message whose sequence id is stored with other content."""

    REPORT = "report"
    REFUSE = "refuse"


def _namespace(text: str) -> str:
    try:
        return TopicName.parse(f"{text}/a").namespace
    except InvalidNameError as error:
        raise WrongUsage(
            "the namespace must be tenant/namespace",
            reason="INVALID_POLICY",
            details={"namespace": text},
        ) from error


def _action(given: OnFull) -> "pb.FullTopicAction.ValueType":
    return pb.FullTopicAction.Value(f"FULL_TOPIC_ACTION_{given.name}")


def _conflict_action(given: OnConflict) -> "pb.ConflictAction.ValueType":
    return pb.ConflictAction.Value(f"CONFLICT_ACTION_{given.name}")


Namespace = Annotated[
    str,
    option(
        "TENANT/NAMESPACE",
        "Apply to all topics of a namespace instead of one topic.",
        show_default=False,
        parse=_namespace,
    ),
]


@command(app, "show")
async def show(
    run: Run,
    name: str = argument("TOPIC_OR_NAMESPACE", "A topic, or tenant/namespace."),
) -> None:
    """Show the effective policy of a topic, and the level that sets each value; for a namespace,
    the values that `policy set` has set there.
    """
    if name.count("/") == 1:
        level = {"namespace": _namespace(name)}
        found = await run.services.call(pb.GetPolicyRequest(**level))
        _tell(run, level, found.values)
        return
    topic = topic_name(name)
    status = await run.services.call(pb.GetTopicStatusRequest(topic=topic))
    if not has_state(status):
        await check_known(run, topic)
    values = policy_record(status.policy)
    rows = [(key, each["value"], words(each["source"])) for key, each in values.items()]
    run.output.result({"topic": topic, **values}, Table(("POLICY", "VALUE", "SET BY"), rows))


@command(app, "set")
async def set_(
    run: Run,
    topic: Topic = "",
    *,
    namespace: Namespace = "",
    enabled: bool | None = choice(
        "Turn deduplication on or off.", "--enabled/--disabled", show_default=False
    ),
    max_producers: int | None = option(
        "N", "Maximum number of producers that a topic tracks.", min=1, max=PRODUCERS_MAX
    ),
    on_full: "pb.FullTopicAction.ValueType | None" = choice(
        "On one more producer: evict the longest inactive one, or refuse.",
        parse=_action,
        raw=OnFull,
    ),
    inactivity_timeout: Duration | None = option(
        "MINUTES",
        "Drop a producer after this time without a message; 0: never.",
        "--producer-inactivity-timeout-minutes",
        parse=lambda minutes: duration(minutes * 60_000),
        raw=int,
        min=0,
        max=INACTIVITY_TIMEOUT_MINUTES_MAX,
    ),
    snapshot_entries: int | None = option(
        "N",
        "Take a snapshot after this many entries; 0: not by count.",
        min=0,
        max=SNAPSHOT_ENTRIES_MAX,
    ),
    snapshot_interval: Duration | None = option(
        "SECONDS",
        "Take a snapshot this long after a new entry; 0: not by time.",
        "--snapshot-interval-s",
        parse=lambda seconds: duration(seconds * 1000),
        raw=int,
        min=0,
        max=SNAPSHOT_INTERVAL_MAX_S,
    ),
    on_conflict: "pb.ConflictAction.ValueType | None" = choice(
        "On other content under a stored sequence id: report it in the receipt, or refuse it.",
        parse=_conflict_action,
        raw=OnConflict,
    ),
    own_log: OwnLog = False,
) -> None:
    """Set the policy of a topic or a namespace, replacing everything set there before.

    Values that are not given come from the level above. The policy is in effect on all replicas
    when the command ends, and overrides the policy file on the same level.
    """
    values = pb.PolicyValues(
        enabled=enabled,
        producer_inactivity_timeout=inactivity_timeout,
        max_producers=max_producers,
        on_full=on_full or pb.FULL_TOPIC_ACTION_UNSPECIFIED,
        snapshot_entries=snapshot_entries,
        snapshot_interval=snapshot_interval,
        on_conflict=on_conflict or pb.CONFLICT_ACTION_UNSPECIFIED,
    )
    if values == pb.PolicyValues():
        raise WrongUsage("no value given; use `policy rm` to remove a policy")
    await _set(run, topic, namespace, values, own_log=own_log)


@command(app, "rm")
async def rm(
    run: Run, topic: Topic = "", *, namespace: Namespace = "", own_log: OwnLog = False
) -> None:
    """Remove the values that `policy set` has set. The policy file applies again."""
    await _set(run, topic, namespace, pb.PolicyValues(), own_log=own_log)


async def _set(
    run: Run, topic: str, namespace: str, values: pb.PolicyValues, *, own_log: bool
) -> None:
    if bool(topic) == bool(namespace):
        raise WrongUsage("give either TOPIC or --namespace")
    if topic and not own_log:
        await check_deduplicated(run, topic)
    level = {"namespace": namespace} if namespace else {"topic": topic}
    await run.services.call(pb.SetPolicyRequest(values=values, **level))
    _tell(run, level, values)


def _tell(run: Run, level: dict[str, str], values: pb.PolicyValues) -> None:
    """Show the values of a level; null: the level above decides."""
    given = {field.name: value for field, value in values.ListFields()}
    found = {
        name: shown(given[field]) if field in given else None
        for name, (field, shown) in VALUES.items()
    }
    rows = [(name, value) for name, value in found.items() if value is not None]
    run.output.result({**level, **found}, Table(("POLICY", "VALUE"), rows))


def policy_record(found: pb.Policy) -> dict[str, Any]:
    """The effective policy as JSON: each value with the level that sets it."""
    return {
        name: {
            "value": shown(getattr(found, field)),
            "source": enum_name(pb.PolicySource, getattr(found, f"{field}_source")),
        }
        for name, (field, shown) in VALUES.items()
    }

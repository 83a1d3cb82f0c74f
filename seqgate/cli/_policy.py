"""`seqgate dedup policy`: which policy counts, and setting it for a topic or a namespace."""

from collections.abc import Coroutine
from enum import StrEnum
from typing import Annotated, Any, Final

import typer

from seqgate.api.dedup.v1 import dedup_pb2 as pb
from seqgate.cli._command import Run, Topic, command, group, topic_name
from seqgate.cli._failure import DONE, WrongUsage
from seqgate.cli._service import dedup_service
from seqgate.cli._wire import enum_name
from seqgate.types import InvalidNameError, TopicName

INACTIVITY_TIMEOUT_MINUTES_MAX: Final = 525_600
PRODUCERS_MAX: Final = 100_000
SNAPSHOT_ENTRIES_MAX: Final = 1_000_000
SNAPSHOT_INTERVAL_MAX_S: Final = 86_400
"""The highest values that the service takes, see PolicyValues in dedup.proto."""

ACTION: Final = "FULL_TOPIC_ACTION_"

FIELDS: Final = (
    "enabled",
    "producer_inactivity_timeout_minutes",
    "max_producers",
    "snapshot_entries",
    "snapshot_interval_s",
)
"""The values that may be absent: everywhere by these names, which options have with dashes."""

KEYS: Final = (
    "enabled",
    "producer_inactivity_timeout_minutes",
    "max_producers",
    "on_full",
    "snapshot_entries",
    "snapshot_interval_s",
)
"""All values, in the order in which they are shown."""

app = group("Show and set the deduplication policy of a topic or a namespace.")


class OnFull(StrEnum):
    """What happens to one more producer on a full topic."""

    EVICT = "evict"
    REFUSE = "refuse"


Namespace = Annotated[
    str,
    typer.Option(
        "--namespace",
        metavar="TENANT/NAMESPACE",
        help="Apply to all topics of a namespace instead of one topic.",
        show_default=False,
    ),
]


@command(app, "show")
def show(
    run: Run,
    name: Annotated[
        str,
        typer.Argument(
            metavar="TOPIC_OR_NAMESPACE",
            help="A topic, or tenant/namespace.",
            show_default=False,
        ),
    ],
) -> Coroutine[Any, Any, int]:
    """Show the effective policy of a topic, and the level that sets each value. For a namespace,
    show what `policy set` has set there.
    """
    if name.count("/") == 1:
        return _show_level(run, {"namespace": _namespace(name)})
    return _show(run, topic_name(name))


@command(app, "set")
def set_(
    run: Run,
    topic: Topic = "",
    *,
    namespace: Namespace = "",
    enabled: Annotated[
        bool | None,
        typer.Option(
            "--enabled/--disabled", help="Turn deduplication on or off.", show_default=False
        ),
    ] = None,
    max_producers: Annotated[
        int | None,
        typer.Option(
            "--max-producers",
            metavar="N",
            min=1,
            max=PRODUCERS_MAX,
            help="Maximum number of producers that a topic tracks.",
        ),
    ] = None,
    on_full: Annotated[
        OnFull | None,
        typer.Option(
            "--on-full", help="On one more producer: evict the longest inactive one, or refuse."
        ),
    ] = None,
    inactivity_timeout: Annotated[
        int | None,
        typer.Option(
            "--producer-inactivity-timeout-minutes",
            metavar="MINUTES",
            min=0,
            max=INACTIVITY_TIMEOUT_MINUTES_MAX,
            help="Drop a producer after this time without a message; 0: never.",
        ),
    ] = None,
    snapshot_entries: Annotated[
        int | None,
        typer.Option(
            "--snapshot-entries",
            metavar="N",
            min=0,
            max=SNAPSHOT_ENTRIES_MAX,
            help="Take a snapshot after this many entries; 0: not by count.",
        ),
    ] = None,
    snapshot_interval: Annotated[
        int | None,
        typer.Option(
            "--snapshot-interval-s",
            metavar="SECONDS",
            min=0,
            max=SNAPSHOT_INTERVAL_MAX_S,
            help="Take a snapshot this long after a new entry; 0: not by time.",
        ),
    ] = None,
) -> Coroutine[Any, Any, int]:
    """Set the policy of a topic or a namespace, replacing everything set there before.

    Values that are not given come from the level above. The policy is in effect on all replicas
    when the command ends, and overrides the policy file on the same level.
    """
    values = pb.PolicyValues(
        enabled=enabled,
        producer_inactivity_timeout_minutes=inactivity_timeout,
        max_producers=max_producers,
        on_full=pb.FULL_TOPIC_ACTION_UNSPECIFIED
        if on_full is None
        else pb.FullTopicAction.Value(f"{ACTION}{on_full.name}"),
        snapshot_entries=snapshot_entries,
        snapshot_interval_s=snapshot_interval,
    )
    if values == pb.PolicyValues():
        raise WrongUsage("no value given; use `policy unset` to remove a policy")
    return _set(run, _level(topic, namespace), values)


@command(app, "unset")
def unset(run: Run, topic: Topic = "", *, namespace: Namespace = "") -> Coroutine[Any, Any, int]:
    """Remove what `policy set` has set. The policy file applies again."""
    return _set(run, _level(topic, namespace), pb.PolicyValues())


async def _show(run: Run, name: TopicName) -> int:
    async with dedup_service(run.settings) as service:
        request = pb.GetTopicStatusRequest(topic=str(name))
        values = policy_record((await service.call("GetTopicStatus", request)).policy)
    if run.output.json:
        run.output.record({"topic": str(name), **values})
        return DONE
    run.output.table(
        ("POLICY", "VALUE", "SET BY"),
        [(key, each["value"], level_shown(each["source"])) for key, each in values.items()],
    )
    return DONE


async def _show_level(run: Run, level: dict[str, str]) -> int:
    async with dedup_service(run.settings) as service:
        found = await service.call("GetPolicy", pb.GetPolicyRequest(**level))
    _put(run, level, found.values)
    return DONE


async def _set(run: Run, level: dict[str, str], values: pb.PolicyValues) -> int:
    async with dedup_service(run.settings) as service:
        await service.call("SetPolicy", pb.SetPolicyRequest(values=values, **level))
    _put(run, level, values)
    return DONE


def _put(run: Run, level: dict[str, str], values: pb.PolicyValues) -> None:
    """Say what is set on a level."""
    record = _values_record(values)
    if run.output.json:
        run.output.record({**level, **record})
        return
    run.output.table(
        ("POLICY", "VALUE"), [(key, value) for key, value in record.items() if value is not None]
    )


def _level(topic: str, namespace: str) -> dict[str, str]:
    if bool(topic) == bool(namespace):
        raise WrongUsage("give either TOPIC or --namespace")
    return {"namespace": _namespace(namespace)} if namespace else {"topic": str(topic_name(topic))}


def _namespace(text: str) -> str:
    try:
        return TopicName.parse(f"{text}/a").namespace
    except InvalidNameError as error:
        raise WrongUsage(
            "the namespace must be tenant/namespace",
            reason="INVALID_POLICY",
            details={"namespace": text},
        ) from error


def _values_record(values: pb.PolicyValues) -> dict[str, Any]:
    """What one level sets, for a program; null: it is left to the level above."""
    record = {key: getattr(values, key) if values.HasField(key) else None for key in FIELDS}
    if values.on_full:
        record["on_full"] = _action(values.on_full)
    return {key: record.get(key) for key in KEYS}


def policy_record(found: pb.Policy) -> dict[str, Any]:
    """The policy in effect, for a program: each value with the level that set it."""
    values = (
        (found.enabled, found.enabled_source),
        (found.producer_inactivity_timeout_minutes, found.producer_inactivity_timeout_source),
        (found.max_producers, found.max_producers_source),
        (_action(found.on_full), found.on_full_source),
        (found.snapshot_entries, found.snapshot_entries_source),
        (found.snapshot_interval_s, found.snapshot_interval_source),
    )
    return {
        key: {"value": value, "source": enum_name(pb.PolicySource, source)}
        for key, (value, source) in zip(KEYS, values, strict=True)
    }


def level_shown(source: str) -> str:
    """A level, for people."""
    return source.lower().replace("_", " ")


def _action(number: int) -> str:
    return enum_name(pb.FullTopicAction, number).lower()

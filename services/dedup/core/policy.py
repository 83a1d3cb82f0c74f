"""Whether a topic deduplicates, and within which limits.

Each value may be set for the cluster, for a namespace and for a topic. The most specific level that
sets it wins, value by value (PIP-6, and the precedence of Pulsar's topic policies). On one level, a
value set by a call wins over one in the policy file:

    topic, by a call > topic, in the file
        > namespace, by a call > namespace, in the file
            > cluster, in the file > built in

A system topic never deduplicates, whatever the levels say (apache/pulsar#22582).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import Enum, auto
from typing import Any, Final, Generic, NamedTuple, TypeVar

from seqgate.services.errors import DomainError, Kind
from seqgate.types import InvalidNameError, TopicName

T = TypeVar("T")
E = TypeVar("E", bound=Enum)

PRODUCERS_MAX: Final = 100_000
"""The highest max_producers, about 15 MB in Redis: a snapshot holds as many, a property each."""

INACTIVITY_TIMEOUT_MINUTES_MAX: Final = 525_600
"""The highest value of producer_inactivity_timeout_minutes: a year."""

SNAPSHOT_ENTRIES_MAX: Final = 1_000_000
"""The highest value of snapshot_entries. If a state is lost just before the next snapshot, this
many entries are read again, which takes at most about a minute."""

SNAPSHOT_INTERVAL_MAX_S: Final = 86_400
"""The highest value of snapshot_interval_s, in seconds: a day."""


class InvalidPolicy(DomainError):
    """A policy names an unknown value, level or topic, or has a value out of range."""

    kind = Kind.INVALID
    reason = "INVALID_POLICY"


class Source(Enum):
    """The level on which a value was set."""

    DEFAULT = auto()
    CLUSTER = auto()
    NAMESPACE = auto()
    TOPIC = auto()
    SYSTEM_TOPIC = auto()


class OnFull(Enum):
    """What a full topic does about one more producer."""

    EVICT = "evict"
    REFUSE = "refuse"


class OnConflict(Enum):
    """The reaction to a message whose sequence id is stored with other content."""

    REPORT = "report"
    REFUSE = "refuse"


@dataclass(frozen=True, slots=True)
class Policy:
    """The values of one level; None leaves a value to the next level."""

    enabled: bool | None = None
    producer_inactivity_timeout_minutes: int | None = None
    max_producers: int | None = None
    on_full: OnFull | None = None
    snapshot_entries: int | None = None
    snapshot_interval_s: int | None = None
    on_conflict: OnConflict | None = None

    @property
    def values(self) -> dict[str, bool | int | str]:
        """The values that are set, by name, as `parse` reads them."""
        named = ((each.name, getattr(self, each.name)) for each in fields(self))
        return {
            name: value.value if isinstance(value, Enum) else value
            for name, value in named
            if value is not None
        }

    @classmethod
    def parse(cls, level: str, values: Any) -> "Policy":
        """Read a table of a policy file, or the values of a call.

        Raises:
            InvalidPolicy: a value is unknown, of the wrong type, or out of bounds.
        """
        if not isinstance(values, Mapping):
            raise InvalidPolicy(f"{level} must be a table", field=level)
        unknown = set(values) - {each.name for each in fields(cls)}
        if unknown:
            name = min(unknown)
            raise InvalidPolicy(f"{level} has an unknown key: {name}", field=f"{level}.{name}")
        return cls(
            enabled=_boolean(level, values, "enabled"),
            on_full=_choice(level, values, "on_full", OnFull),
            on_conflict=_choice(level, values, "on_conflict", OnConflict),
            **{name: _number(level, values, name) for name in BOUNDS},
        )


BOUNDS: Final[Mapping[str, tuple[int, int]]] = {
    "producer_inactivity_timeout_minutes": (0, INACTIVITY_TIMEOUT_MINUTES_MAX),
    "max_producers": (1, PRODUCERS_MAX),
    "snapshot_entries": (0, SNAPSHOT_ENTRIES_MAX),
    "snapshot_interval_s": (0, SNAPSHOT_INTERVAL_MAX_S),
}
"""The lowest and highest value of each number."""

NOTHING: Final = Policy()
"""A policy that sets nothing."""


class Sourced(NamedTuple, Generic[T]):
    """A value and the level that set it."""

    value: T
    source: Source


@dataclass(frozen=True, slots=True)
class EffectivePolicy:
    enabled: Sourced[bool] = Sourced(value=True, source=Source.DEFAULT)
    producer_inactivity_timeout_minutes: Sourced[int] = Sourced(360, Source.DEFAULT)
    max_producers: Sourced[int] = Sourced(10_000, Source.DEFAULT)
    on_full: Sourced[OnFull] = Sourced(OnFull.EVICT, Source.DEFAULT)
    snapshot_entries: Sourced[int] = Sourced(1_000, Source.DEFAULT)
    """A snapshot is taken after this many confirmed entries; 0: not by count."""
    snapshot_interval_s: Sourced[int] = Sourced(120, Source.DEFAULT)
    """A snapshot is taken after this many seconds with new entries; 0: not by time."""
    on_conflict: Sourced[OnConflict] = Sourced(OnConflict.REPORT, Source.DEFAULT)


@dataclass(frozen=True, slots=True)
class Policies:
    """The policies of all levels in a policy file."""

    cluster: Policy = field(default_factory=Policy)
    namespaces: Mapping[str, Policy] = field(default_factory=dict)
    topics: Mapping[TopicName, Policy] = field(default_factory=dict)

    @classmethod
    def parse(cls, document: Mapping[str, Any]) -> "Policies":
        """Read a policy document: a table `cluster`, tables `namespace."tenant/namespace"` and
        `topic."tenant/namespace/name"`.

        Raises:
            InvalidPolicy: as from Policy.parse; also for an unknown level or an invalid name.
        """
        unknown = set(document) - {"cluster", "namespace", "topic"}
        if unknown:
            raise InvalidPolicy(f"unknown level {min(unknown)}", field=min(unknown))
        return cls(
            cluster=Policy.parse("cluster", document.get("cluster", {})),
            namespaces={
                check_namespace(name, name): Policy.parse(f'namespace."{name}"', values)
                for name, values in _tables(document, "namespace")
            },
            topics={
                _topic(name): Policy.parse(f'topic."{name}"', values)
                for name, values in _tables(document, "topic")
            },
        )

    def effective(
        self, topic: TopicName, *, for_topic: Policy = NOTHING, for_namespace: Policy = NOTHING
    ) -> EffectivePolicy:
        """The values in effect for a topic; the arguments are the policies set by calls."""
        levels = (
            (Source.TOPIC, for_topic),
            (Source.TOPIC, self.topics.get(topic, NOTHING)),
            (Source.NAMESPACE, for_namespace),
            (Source.NAMESPACE, self.namespaces.get(topic.namespace, NOTHING)),
            (Source.CLUSTER, self.cluster),
        )
        chosen: dict[str, Sourced[Any]] = {}
        for name in _NAMES:
            for source, policy in levels:
                value = getattr(policy, name)
                if value is not None:
                    chosen[name] = Sourced(value, source)
                    break
        if topic.is_system:
            chosen["enabled"] = Sourced(value=False, source=Source.SYSTEM_TOPIC)
        return EffectivePolicy(**chosen)


_NAMES: Final = tuple(each.name for each in fields(Policy))


def check_namespace(name: str, field: str) -> str:
    """The name, if it is a valid namespace.

    Raises:
        InvalidPolicy: it is not tenant/namespace; the error names `field`.
    """
    try:
        TopicName.parse(f"{name}/a")
    except InvalidNameError as error:
        raise InvalidPolicy(
            f"invalid namespace, want tenant/namespace: {name}", field=field
        ) from error
    return name


def check_number(name: str, value: Any, field: str) -> int:
    """The value, if it is within its BOUNDS.

    Raises:
        InvalidPolicy: it is out of bounds or not a number; the error names `field`.
    """
    lowest, highest = BOUNDS[name]
    if isinstance(value, bool) or not isinstance(value, int) or not lowest <= value <= highest:
        raise InvalidPolicy(f"{field} must be a number from {lowest:,} to {highest:,}", field=field)
    return value


def _tables(document: Mapping[str, Any], level: str) -> list[tuple[str, Any]]:
    tables = document.get(level, {})
    if not isinstance(tables, Mapping):
        raise InvalidPolicy(f"{level} must be a table of tables", field=level)
    return list(tables.items())


def _topic(name: str) -> TopicName:
    try:
        return TopicName.parse(name)
    except InvalidNameError as error:
        raise InvalidPolicy(f"invalid topic name: {name}", field=name) from error


def _boolean(level: str, values: Mapping[str, Any], name: str) -> bool | None:
    value = values.get(name)
    if value is not None and not isinstance(value, bool):
        raise InvalidPolicy(f"{level}.{name} must be true or false", field=f"{level}.{name}")
    return value


def _number(level: str, values: Mapping[str, Any], name: str) -> int | None:
    value = values.get(name)
    return None if value is None else check_number(name, value, f"{level}.{name}")


def _choice(level: str, values: Mapping[str, Any], name: str, choices: type[E]) -> E | None:
    value = values.get(name)
    if value is None:
        return None
    texts = [each.value for each in choices]
    if value not in texts:
        allowed = " or ".join(f'"{each}"' for each in texts)
        raise InvalidPolicy(f"{level}.{name} must be {allowed}", field=f"{level}.{name}")
    return choices(value)

"""Does this topic deduplicate, and within which limits?

Each value may be set for the cluster, for a namespace and for a topic; the most specific level that
sets it wins, value by value (PIP-6, and the precedence of Pulsar's topic policies). A system topic
never deduplicates, whatever the levels say (apache/pulsar#22582).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import Enum, auto
from typing import Any, Final, Generic, NamedTuple, TypeVar

from seqgate.types import InvalidNameError, TopicName
from services.errors import DomainError, Kind

T = TypeVar("T")

PRODUCERS_MAX: Final = 1_000_000
"""The highest value of max_producers: about 150 MB of Redis memory for one topic."""

INACTIVITY_TIMEOUT_MINUTES_MAX: Final = 525_600
"""The highest value of producer_inactivity_timeout_minutes: a year."""


class InvalidPolicy(DomainError):
    """A policy names an unknown value, level or topic, or a value out of its bounds."""

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
    """What happens to one more producer on a full topic."""

    EVICT = "evict"
    REFUSE = "refuse"


@dataclass(frozen=True, slots=True)
class Policy:
    """What one level sets; None leaves a value to the level above."""

    enabled: bool | None = None
    producer_inactivity_timeout_minutes: int | None = None
    max_producers: int | None = None
    on_full: OnFull | None = None

    @classmethod
    def parse(cls, level: str, values: Any) -> "Policy":
        """Read one table of a policy file.

        Raises:
            InvalidPolicy: a value is unknown, of the wrong type, or out of its bounds.
        """
        if not isinstance(values, Mapping):
            raise InvalidPolicy(f"{level} must be a table", field=level)
        unknown = set(values) - {each.name for each in fields(cls)}
        if unknown:
            name = min(unknown)
            raise InvalidPolicy(f"{level} sets an unknown value: {name}", field=f"{level}.{name}")
        return cls(
            enabled=_boolean(level, values, "enabled"),
            producer_inactivity_timeout_minutes=_number(
                level,
                values,
                "producer_inactivity_timeout_minutes",
                lowest=0,
                highest=INACTIVITY_TIMEOUT_MINUTES_MAX,
            ),
            max_producers=_number(level, values, "max_producers", lowest=1, highest=PRODUCERS_MAX),
            on_full=_on_full(level, values),
        )


class Sourced(NamedTuple, Generic[T]):
    """A value and the level that set it."""

    value: T
    source: Source


@dataclass(frozen=True, slots=True)
class EffectivePolicy:
    """The values in effect for one topic."""

    enabled: Sourced[bool] = Sourced(value=True, source=Source.DEFAULT)
    producer_inactivity_timeout_minutes: Sourced[int] = Sourced(360, Source.DEFAULT)
    max_producers: Sourced[int] = Sourced(10_000, Source.DEFAULT)
    on_full: Sourced[OnFull] = Sourced(OnFull.EVICT, Source.DEFAULT)


@dataclass(frozen=True, slots=True)
class Policies:
    """All levels."""

    cluster: Policy = field(default_factory=Policy)
    namespaces: Mapping[str, Policy] = field(default_factory=dict)
    topics: Mapping[TopicName, Policy] = field(default_factory=dict)

    @classmethod
    def parse(cls, document: Mapping[str, Any]) -> "Policies":
        """Read a policy document: a table `cluster`, tables `namespace."tenant/namespace"` and
        `topic."tenant/namespace/name"`.

        Raises:
            InvalidPolicy: see Policy.parse; also for an unknown level or a name that cannot be one.
        """
        unknown = set(document) - {"cluster", "namespace", "topic"}
        if unknown:
            raise InvalidPolicy(f"unknown level: {min(unknown)}", field=min(unknown))
        return cls(
            cluster=Policy.parse("cluster", document.get("cluster", {})),
            namespaces={
                _namespace(name): Policy.parse(f'namespace."{name}"', values)
                for name, values in _tables(document, "namespace")
            },
            topics={
                _topic(name): Policy.parse(f'topic."{name}"', values)
                for name, values in _tables(document, "topic")
            },
        )

    def effective(self, topic: TopicName) -> EffectivePolicy:
        """The values in effect for a topic."""
        levels = (
            (Source.TOPIC, self.topics.get(topic)),
            (Source.NAMESPACE, self.namespaces.get(topic.namespace)),
            (Source.CLUSTER, self.cluster),
        )
        chosen: dict[str, Sourced[Any]] = {}
        for each in fields(Policy):
            for source, policy in levels:
                value = getattr(policy, each.name, None)
                if value is not None:
                    chosen[each.name] = Sourced(value, source)
                    break
        if topic.is_system:
            chosen["enabled"] = Sourced(value=False, source=Source.SYSTEM_TOPIC)
        return EffectivePolicy(**chosen)


def _tables(document: Mapping[str, Any], level: str) -> list[tuple[str, Any]]:
    tables = document.get(level, {})
    if not isinstance(tables, Mapping):
        raise InvalidPolicy(f"{level} must be a table of tables", field=level)
    return list(tables.items())


def _namespace(name: str) -> str:
    _topic(f"{name}/any")
    return name


def _topic(name: str) -> TopicName:
    try:
        return TopicName.parse(name)
    except InvalidNameError as error:
        raise InvalidPolicy(f"no such topic or namespace can be: {name}", field=name) from error


def _boolean(level: str, values: Mapping[str, Any], name: str) -> bool | None:
    value = values.get(name)
    if value is not None and not isinstance(value, bool):
        raise InvalidPolicy(f"{level}.{name} must be true or false", field=f"{level}.{name}")
    return value


def _number(
    level: str, values: Mapping[str, Any], name: str, *, lowest: int, highest: int
) -> int | None:
    value = values.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not lowest <= value <= highest:
        raise InvalidPolicy(
            f"{level}.{name} must be a number from {lowest:,} to {highest:,}",
            field=f"{level}.{name}",
        )
    return value


def _on_full(level: str, values: Mapping[str, Any]) -> OnFull | None:
    value = values.get("on_full")
    if value is None:
        return None
    if value not in {each.value for each in OnFull}:
        raise InvalidPolicy(
            f'{level}.on_full must be "evict" or "refuse"', field=f"{level}.on_full"
        )
    return OnFull(value)

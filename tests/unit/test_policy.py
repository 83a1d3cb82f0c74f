"""Policies: the most specific level wins, value by value (PIP-6)."""

import tomllib
from dataclasses import fields, replace
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqgate.services.dedup.core.policy import (
    BOUNDS,
    NOTHING,
    EffectivePolicy,
    InvalidPolicy,
    OnFull,
    Policies,
    Policy,
    Source,
    Sourced,
    check_namespace,
)
from seqgate.types import TopicName

ORDERS = TopicName.parse("public/default/orders")


def policies(text: str) -> Policies:
    return Policies.parse(tomllib.loads(text))


def test_without_any_policy_a_topic_deduplicates() -> None:
    policy = Policies().effective(ORDERS)
    assert policy.enabled == Sourced(value=True, source=Source.DEFAULT)
    assert policy.producer_inactivity_timeout_minutes == Sourced(360, Source.DEFAULT)
    assert policy.max_producers == Sourced(10_000, Source.DEFAULT)
    assert policy.on_full == Sourced(OnFull.EVICT, Source.DEFAULT)
    assert policy.snapshot_entries == Sourced(1_000, Source.DEFAULT)
    assert policy.snapshot_interval_s == Sourced(120, Source.DEFAULT)


LEVELS = {
    "cluster": "[cluster]\nenabled = {}\n",
    "namespace": '[namespace."public/default"]\nenabled = {}\n',
    "topic": '[topic."public/default/orders"]\nenabled = {}\n',
}


@pytest.mark.parametrize(
    ("settings", "enabled", "source"),
    [
        ({"cluster": "false"}, False, Source.CLUSTER),
        ({"cluster": "false", "namespace": "true"}, True, Source.NAMESPACE),
        ({"cluster": "true", "namespace": "false"}, False, Source.NAMESPACE),
        ({"cluster": "false", "namespace": "false", "topic": "true"}, True, Source.TOPIC),
        ({"cluster": "false", "topic": "true"}, True, Source.TOPIC),
        ({"namespace": "true", "topic": "false"}, False, Source.TOPIC),
    ],
)
def test_the_most_specific_level_wins(
    settings: dict[str, str], enabled: bool, source: Source
) -> None:
    text = "".join(LEVELS[level].format(value) for level, value in settings.items())
    assert policies(text).effective(ORDERS).enabled == Sourced(enabled, source)


def test_levels_are_taken_value_by_value() -> None:
    effective = policies(
        """
        [cluster]
        max_producers = 5
        on_full = "refuse"
        [topic."public/default/orders"]
        max_producers = 7
        """
    ).effective(ORDERS)
    assert effective.max_producers == Sourced(7, Source.TOPIC)
    assert effective.on_full == Sourced(OnFull.REFUSE, Source.CLUSTER)


LAYERS = (
    ("a call for the topic", Source.TOPIC),
    ("the file's topic", Source.TOPIC),
    ("a call for the namespace", Source.NAMESPACE),
    ("the file's namespace", Source.NAMESPACE),
    ("the file's cluster", Source.CLUSTER),
)
"""The layers that may set a value, the strongest first."""


def effective_of(layers: list[Policy], topic: TopicName = ORDERS) -> EffectivePolicy:
    """A topic's policy when LAYERS set these."""
    by_call, in_file, by_namespace_call, in_namespace_file, in_cluster = layers
    given = Policies(in_cluster, {topic.namespace: in_namespace_file}, {topic: in_file})
    return given.effective(topic, for_topic=by_call, for_namespace=by_namespace_call)


@pytest.mark.parametrize("setting", list(product([False, True], repeat=len(LAYERS))))
def test_a_call_wins_over_the_file_on_its_level_and_on_no_more_specific_one(
    setting: tuple[bool, ...],
) -> None:
    """Each of the 32 combinations of set and unset levels."""
    layers = [Policy(max_producers=i + 1) if sets else NOTHING for i, sets in enumerate(setting)]
    expected = Sourced(10_000, Source.DEFAULT)
    if True in setting:
        first = setting.index(True)
        expected = Sourced(first + 1, LAYERS[first][1])
    assert effective_of(layers).max_producers == expected


NUMBERS = {name: st.none() | st.integers(*bounds) for name, bounds in BOUNDS.items()}
POLICIES = st.builds(
    Policy,
    enabled=st.none() | st.booleans(),
    on_full=st.none() | st.sampled_from(OnFull),
    **NUMBERS,
)
TOPICS = st.sampled_from([ORDERS, TopicName.parse("public/default/__changes")])


@given(st.lists(POLICIES, min_size=len(LAYERS), max_size=len(LAYERS)), TOPICS)
def test_each_value_comes_from_the_last_writer(layers: list[Policy], topic: TopicName) -> None:
    """Against the plain algorithm: each layer overwrites the values, the strongest last."""
    expected = EffectivePolicy()
    for policy, (_, source) in reversed(list(zip(layers, LAYERS, strict=True))):
        for name, value in as_set(policy).items():
            expected = replace(expected, **{name: Sourced(value, source)})
    if topic.is_system:
        expected = replace(expected, enabled=Sourced(value=False, source=Source.SYSTEM_TOPIC))
    assert effective_of(layers, topic) == expected


def as_set(policy: Policy) -> dict[str, Any]:
    values = {each.name: getattr(policy, each.name) for each in fields(policy)}
    return {name: value for name, value in values.items() if value is not None}


@given(POLICIES)
def test_a_policy_is_read_as_written(policy: Policy) -> None:
    assert Policy.parse("level", policy.values) == policy
    assert policy.values.keys() == as_set(policy).keys()


def test_a_policy_does_not_affect_other_topics() -> None:
    text = '[topic."public/default/orders"]\nenabled = false\n'
    other = TopicName.parse("public/default/orders2")
    assert policies(text).effective(other).enabled.value


def test_a_system_topic_never_deduplicates() -> None:
    text = '[topic."public/default/__changes"]\nenabled = true\n'
    effective = policies(text).effective(TopicName.parse("public/default/__changes"))
    assert effective.enabled == Sourced(value=False, source=Source.SYSTEM_TOPIC)


@pytest.mark.parametrize(
    "text",
    [
        "[broker]\nenabled = true",
        "[cluster]\nenable = true",
        '[cluster]\nenabled = "yes"',
        "cluster = 3",
        "namespace = 3",
        "[cluster]\nmax_producers = 0",
        "[cluster]\nmax_producers = 100001",
        "[cluster]\nsnapshot_entries = -1",
        "[cluster]\nsnapshot_entries = 1000001",
        "[cluster]\nsnapshot_entries = 1.5",
        "[cluster]\nsnapshot_interval_s = -1",
        "[cluster]\nsnapshot_interval_s = 86401",
        "[cluster]\nsnapshot_interval_s = false",
        "[cluster]\nmax_producers = true",
        "[cluster]\nproducer_inactivity_timeout_minutes = -1",
        "[cluster]\nproducer_inactivity_timeout_minutes = 525601",
        '[cluster]\non_full = "explode"',
        "[cluster]\non_full = []",
        "[cluster]\non_full = {}",
        '[namespace."no-slash"]\nenabled = true',
        '[topic."public/default"]\nenabled = true',
        '[topic."public/default/or{ders"]\nenabled = true',
    ],
)
def test_an_invalid_policy_is_refused(text: str) -> None:
    with pytest.raises(InvalidPolicy) as refusal:
        policies(text)
    assert refusal.value.field is not None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_producers", 1),
        ("max_producers", 100_000),
        ("producer_inactivity_timeout_minutes", 0),
        ("producer_inactivity_timeout_minutes", 525_600),
        ("snapshot_entries", 0),
        ("snapshot_entries", 1_000_000),
        ("snapshot_interval_s", 0),
        ("snapshot_interval_s", 86_400),
    ],
)
def test_bounds_are_inclusive(name: str, value: int) -> None:
    effective = policies(f"[cluster]\n{name} = {value}").effective(ORDERS)
    assert getattr(effective, name).value == value


@pytest.mark.parametrize("name", ["a/b", "public/default", "_/0", "a" * 126 + "/" + "b" * 126])
def test_a_namespace_is_tenant_and_namespace(name: str) -> None:
    assert check_namespace(name, "field") == name


@pytest.mark.parametrize(
    "name",
    ["", "a", "a/", "/b", "a/b/c", "a/b/", "a/@", "a/ü", "a/b\n", "persistent://a/b", "a/" * 99],
)
def test_an_invalid_namespace_is_refused_with_its_field(name: str) -> None:
    with pytest.raises(InvalidPolicy) as refusal:
        check_namespace(name, "namespace")
    assert refusal.value.field == "namespace"

"""Policies: the most specific level wins, value by value (PIP-6; scenarios 56, 57)."""

import tomllib

import pytest

from seqgate.types import TopicName
from services.dedup.core.policy import InvalidPolicy, OnFull, Policies, Source, Sourced

ORDERS = TopicName.parse("public/default/orders")


def policies(text: str) -> Policies:
    return Policies.parse(tomllib.loads(text))


def test_without_any_policy_a_topic_deduplicates() -> None:
    policy = Policies().effective(ORDERS)
    assert policy.enabled == Sourced(value=True, source=Source.DEFAULT)
    assert policy.producer_inactivity_timeout_minutes == Sourced(360, Source.DEFAULT)
    assert policy.max_producers == Sourced(10_000, Source.DEFAULT)
    assert policy.on_full == Sourced(OnFull.EVICT, Source.DEFAULT)


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


def test_other_topics_are_not_concerned() -> None:
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
        "[cluster]\nmax_producers = 1000001",
        "[cluster]\nmax_producers = true",
        "[cluster]\nproducer_inactivity_timeout_minutes = -1",
        "[cluster]\nproducer_inactivity_timeout_minutes = 525601",
        '[cluster]\non_full = "explode"',
        '[namespace."no-slash"]\nenabled = true',
        '[topic."public/default"]\nenabled = true',
        '[topic."public/default/or{ders"]\nenabled = true',
    ],
)
def test_a_wrong_policy_is_refused(text: str) -> None:
    with pytest.raises(InvalidPolicy) as refusal:
        policies(text)
    assert refusal.value.field is not None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_producers", 1),
        ("max_producers", 1_000_000),
        ("producer_inactivity_timeout_minutes", 0),
        ("producer_inactivity_timeout_minutes", 525_600),
    ],
)
def test_bounds_are_inside(name: str, value: int) -> None:
    effective = policies(f"[cluster]\n{name} = {value}").effective(ORDERS)
    assert getattr(effective, name).value == value

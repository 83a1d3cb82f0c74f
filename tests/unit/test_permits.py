"""Permits keep to a budget in bytes, although they count messages."""

import pytest

from seqgate.client._inbox import EXPECTED_BYTES, Permits, ReceiverLimits

MIB = 1024 * 1024


@pytest.mark.parametrize("budget", [1, MIB, 64 * MIB])
def test_what_comes_before_any_size_is_known_is_bounded(budget: int) -> None:
    """By the budget, where messages are as large as they are thought to be; one always comes."""
    permits = Permits(ReceiverLimits(messages=1_000, size_bytes=budget))
    granted = permits.grant(0, 0)
    assert granted == max(1, budget // EXPECTED_BYTES)


@pytest.mark.parametrize("budget", [1_000, 64 * MIB])
def test_small_messages_get_all_permits_once_one_has_come(budget: int) -> None:
    permits = Permits(ReceiverLimits(messages=1_000, size_bytes=budget))
    permits.grant(0, 0)
    permits.use(1, 100)
    permits.grant(0, 0)
    assert permits.outstanding == min(1_000, budget // 100)


@pytest.mark.parametrize("large", [2 * MIB, 5 * MIB])
def test_messages_that_become_large_count_at_once(large: int) -> None:
    """Nothing more is granted than fits if all are as large as the largest one of late."""
    budget = 64 * MIB
    permits = Permits(ReceiverLimits(messages=1_000, size_bytes=budget))
    for _ in range(50):
        permits.use(1, 100)
    permits.clear()
    permits.use(1, large)
    permits.clear()
    assert permits.grant(0, 0) * large <= budget

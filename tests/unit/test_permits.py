"""Permits stay within a budget in bytes, although they count messages."""

import pytest

from seqgate.client._inbox import EXPECTED_BYTES, Permits, ReceiverLimits

MIB = 1024 * 1024


@pytest.mark.parametrize("budget", [1, MIB, 64 * MIB])
def test_permits_before_the_first_message_are_bounded_by_the_budget(budget: int) -> None:
    """The budget, for messages of the assumed size; one is always delivered."""
    permits = Permits(ReceiverLimits(messages=1_000, size_bytes=budget))
    granted = permits.grant(0, 0)
    assert granted == max(1, budget // EXPECTED_BYTES)


@pytest.mark.parametrize("budget", [1_000, 64 * MIB])
def test_small_messages_get_all_permits_after_the_first_one(budget: int) -> None:
    permits = Permits(ReceiverLimits(messages=1_000, size_bytes=budget))
    permits.grant(0, 0)
    permits.use(1, 100)
    permits.grant(0, 0)
    assert permits.outstanding == min(1_000, budget // 100)


@pytest.mark.parametrize("large", [2 * MIB, 5 * MIB])
def test_larger_messages_count_at_once(large: int) -> None:
    """The messages granted fit even if all are as large as the largest recent one."""
    budget = 64 * MIB
    permits = Permits(ReceiverLimits(messages=1_000, size_bytes=budget))
    for _ in range(50):
        permits.use(1, 100)
    permits.clear()
    permits.use(1, large)
    permits.clear()
    assert permits.grant(0, 0) * large <= budget

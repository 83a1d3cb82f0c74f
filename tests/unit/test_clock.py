"""Clocks that neither go back nor jump."""

import time

import pytest

from seqgate.services.runtime.clock import CautiousClock, SteadyClock


@pytest.mark.parametrize("jump_s", [-3_600.0, 3_600.0])
def test_a_steady_clock_starts_at_the_system_time_and_ignores_jumps(
    monkeypatch: pytest.MonkeyPatch, jump_s: float
) -> None:
    clock = SteadyClock()
    began_ms = clock()
    assert abs(began_ms - time.time() * 1000) < 1_000
    before = time.time
    monkeypatch.setattr(time, "time", lambda: before() + jump_s)
    assert began_ms <= clock() < began_ms + 60_000
    assert abs(SteadyClock()() - began_ms - jump_s * 1000) < 60_000


@pytest.mark.parametrize("jump_ms", [-3_600_000, 0, 3_600_000])
def test_a_cautious_clock_never_overstates_age(
    monkeypatch: pytest.MonkeyPatch, jump_ms: int
) -> None:
    clock = CautiousClock()
    began_ms = clock()
    before = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: before() + jump_ms * 1_000_000)
    assert abs(clock() - began_ms - min(0, jump_ms)) < 60_000

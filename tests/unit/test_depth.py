"""The depth of tests that prove by repetition."""

import pytest

from tests.support.depth import SETTING, deep, is_deep, some_of, times


@pytest.fixture(autouse=True)
def nothing_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SETTING, raising=False)
    monkeypatch.delenv("SEQGATE_TEST_SEED", raising=False)


def test_tests_are_quick_by_default() -> None:
    assert not is_deep()
    assert times(quick=3, full=100) == 3
    assert deep(quick="a", full="b") == "a"


@pytest.mark.parametrize(
    ("depth", "count"), [("full", 100), ("1", 100), ("2.5", 250), ("0.1", 10), ("0.001", 1)]
)
def test_full_depth_is_multiplied(monkeypatch: pytest.MonkeyPatch, depth: str, count: int) -> None:
    monkeypatch.setenv(SETTING, depth)
    assert is_deep()
    assert times(quick=3, full=100) == count
    assert deep(quick="a", full="b") == "b"


@pytest.mark.parametrize("depth", ["0", "-1", "deep"])
def test_an_invalid_depth_is_refused(monkeypatch: pytest.MonkeyPatch, depth: str) -> None:
    monkeypatch.setenv(SETTING, depth)
    with pytest.raises(ValueError, match=r"above 0|convert"):
        times(quick=3, full=100)


def test_every_case_has_its_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = list(range(10))
    seen: list[int] = []
    for seed in range(3):
        monkeypatch.setenv("SEQGATE_TEST_SEED", str(seed))
        seen += some_of(cases, every=3)
    assert sorted(seen) == cases
    monkeypatch.setenv(SETTING, "full")
    assert some_of(cases, every=3) == cases

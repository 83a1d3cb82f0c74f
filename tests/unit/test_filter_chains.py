"""The chain that applies to an entry, the storage of chains, and the removal of unneeded ones."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqgate.services.dispatcher.filtering import chains as limits
from seqgate.services.dispatcher.filtering.chains import (
    CHANGES_MAX,
    NO_FILTERS,
    PIECE_BYTES,
    PREFIX,
    STRETCHES_MAX,
    Chain,
    Chains,
    Policy,
    Stretch,
    TooManyFilters,
    UnknownFormat,
    from_properties,
    to_properties,
)
from seqgate.services.dispatcher.ports import Filter
from seqgate.types import Position

PROPERTY_BYTES_MAX = 4 * 1024
"""The limits of a cursor."""


def at(entry_id: int, ledger_id: int = 1) -> Position:
    return Position(ledger_id, entry_id)


def chain(name: str, expression: str = "true", policy: Policy = Policy.PARK) -> Chain:
    return Chain((Filter(name, 1, expression),), policy)


A, B, C = chain("a"), chain("b"), chain("c", policy=Policy.REJECT)


def changed(
    chains: Chains, start: Position | None, new: Chain, *, is_shadow: bool = False
) -> Chains:
    return chains.changed(
        Stretch(start, new), is_shadow=is_shadow, now_ms=7, epoch=3, caller="ipv4:192.0.2.1:1"
    )


def made(*changes: tuple[Position | None, Chain]) -> Chains:
    chains = Chains()
    for start, new in changes:
        chains = changed(chains, start, new)
    return chains


def test_positions_without_a_chain_are_unfiltered() -> None:
    assert Chains().at(at(0)) == NO_FILTERS
    assert not Chains().filters_any
    chains = made((at(5), A))
    assert (chains.at(at(4)), chains.at(at(5)), chains.at(at(0, 2))) == (NO_FILTERS, A, A)
    assert chains.filters_any


def test_a_chain_applies_from_its_start_and_its_predecessor_before_it() -> None:
    chains = made((None, A), (at(5), B), (at(2, 3), C))
    assert chains.at(at(4)) == A
    assert chains.at(at(5)) == chains.at(at(999, 2)) == chains.at(at(1, 3)) == B
    assert chains.at(at(2, 3)) == C


def test_a_change_replaces_all_chains_from_its_start_on() -> None:
    chains = made((None, A), (at(5), B), (at(9), C))
    assert [each.chain for each in changed(chains, at(5), C).applied] == [A, C]
    assert [each.chain for each in changed(chains, at(4), NO_FILTERS).applied] == [A, NO_FILTERS]
    assert [each.chain for each in changed(chains, None, B).applied] == [B]


def test_setting_the_same_chain_is_no_change() -> None:
    """A request is repeated when its answer was lost, or by a periodic job."""
    chains = made((None, A), (at(5), B))
    for start in (at(5), at(6)):
        assert changed(chains, start, B) is chains
    assert changed(chains, None, A) != chains
    assert changed(chains, at(5), B._replace(policy=Policy.REJECT)) != chains
    assert changed(Chains(), at(5), NO_FILTERS) == Chains()
    shadowed = changed(chains, at(5), C, is_shadow=True)
    for start in (at(5), at(6)):
        assert changed(shadowed, start, C, is_shadow=True) is shadowed
    starts: tuple[Position | None, ...] = (None, at(4))
    for earlier in starts:
        assert changed(shadowed, earlier, C, is_shadow=True).shadow == Stretch(earlier, C)
    assert changed(chains, None, NO_FILTERS, is_shadow=True) is chains


def test_a_version_has_one_expression() -> None:
    chains = changed(made((None, A), (at(5), B)), None, C, is_shadow=True)
    assert chains.other_than(Chain((*B.filters, *A.filters)), is_shadow=False) is None
    other = chain("a", "false")
    assert chains.other_than(Chain((*B.filters, *other.filters)), is_shadow=False) == Filter(
        "a", 1, "false"
    )
    assert chains.other_than(chain("c", "false"), is_shadow=True) is not None
    assert chains.other_than(chain("c", "false"), is_shadow=False) is None  # counted separately
    gone = chains.needed_after(at(7))
    assert gone.other_than(other, is_shadow=False) is None


@pytest.mark.parametrize(
    "text",
    [
        '{"format":2,"applied":[],"shadow":null,"changes":[]}',
        '{"format":1,"applied":[[null,"LATER",[]]],"shadow":null,"changes":[]}',
        '{"format":1,"applied":[[null]],"shadow":null,"changes":[]}',
        '{"format":1}',
        "[]",
        '{"format":1,"app',
    ],
)
def test_unreadable_chains_are_reported(text: str) -> None:
    with pytest.raises(UnknownFormat):
        from_properties({f"{PREFIX}0000": text})


def test_chains_of_acknowledged_entries_only_are_forgotten() -> None:
    chains = made((at(3), A), (at(5), B), (at(9), C))
    assert chains.needed_after(None) == chains
    assert chains.needed_after(at(1)) == chains
    starts = {
        at(2): [(None, A), (at(5), B), (at(9), C)],
        at(3): [(None, A), (at(5), B), (at(9), C)],
        at(4): [(None, B), (at(9), C)],
        at(8): [(None, C)],
        at(0, 2): [(None, C)],
    }
    for mark_delete, expected in starts.items():
        assert list(chains.needed_after(mark_delete).applied) == expected


def test_filters_without_entries_are_removed() -> None:
    chains = made((None, A), (at(5), NO_FILTERS))
    assert chains.needed_after(at(3)).filters_any
    gone = chains.needed_after(at(4))
    assert (gone.applied, gone.filters_any) == ((), False)
    assert len(gone.changes) == 2


def test_a_shadow_chain_is_independent_of_the_others() -> None:
    chains = changed(made((None, A)), at(5), B, is_shadow=True)
    assert chains.at(at(9)) == A
    assert chains.shadow == Stretch(at(5), B)
    assert chains.needed_after(at(9)).shadow == chains.shadow
    assert changed(chains, at(7), C).shadow == chains.shadow
    assert changed(chains, None, NO_FILTERS, is_shadow=True).shadow is None
    assert [each.is_shadow for each in chains.changes] == [True, False]


def test_the_latest_changes_are_kept() -> None:
    chains = Chains()
    for number in range(CHANGES_MAX + 3):
        chains = changed(chains, None, chain(f"f{number}"))
    assert len(chains.changes) == CHANGES_MAX
    newest = chains.changes[0]
    assert newest.filters == ((f"f{CHANGES_MAX + 2}", 1),)
    assert (newest.time_ms, newest.epoch, newest.policy) == (7, 3, Policy.PARK)
    assert newest.caller == "ipv4:192.0.2.1:1"


def test_chains_beyond_the_limit_are_refused() -> None:
    chains = made(*((at(number), chain(str(number))) for number in range(STRETCHES_MAX)))
    with pytest.raises(TooManyFilters):
        changed(chains, at(STRETCHES_MAX), A)
    assert changed(chains, at(STRETCHES_MAX - 1), A).at(at(99)) == A
    fewer = chains.needed_after(at(STRETCHES_MAX - 2))
    assert changed(fewer, at(STRETCHES_MAX), A).at(at(99)) == A


def test_chains_above_the_size_limit_are_refused_and_the_history_shrinks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "STATE_BYTES_MAX", 2_000)
    chains = made(*((None, chain(f"f{number}")) for number in range(CHANGES_MAX)))
    assert len(chains.changes) == CHANGES_MAX
    fuller = changed(chains, at(1), chain("long", "x" * 1_200))
    assert 0 < len(fuller.changes) < CHANGES_MAX
    assert fuller.changes[0].filters == (("long", 1),)
    assert sum(map(len, to_properties(fuller, {})[0].values())) <= 2_000
    with pytest.raises(TooManyFilters) as caught:
        changed(fuller, at(2), chain("longer", "x" * 800))
    assert caught.value.details == {"bytes_max": 2_000}
    assert changed(fuller, at(1), chain("longer", "x" * 800)).at(at(1)).filters[0].name == "longer"


def test_the_longest_chains_fit_with_a_change_and_a_shadow_chain() -> None:
    filters = [Filter(f"{number}" * 100, 2**64 - 1, "\u00fc" * 2_048) for number in range(16)]
    long = Chain(tuple(filters))
    chains = made((None, long), (at(1), long._replace(policy=Policy.REJECT)))
    chains = changed(chains, None, long, is_shadow=True)
    assert from_properties(to_properties(chains, {})[0]) == chains


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=50)
POSITIONS = st.none() | st.builds(Position, st.integers(1, 9), st.integers(0, 2**63 - 1))
FILTERS = st.lists(st.builds(Filter, TEXTS, st.integers(0, 2**64 - 1), TEXTS), max_size=3)
CHAINS = st.builds(Chain, FILTERS.map(tuple), st.sampled_from(Policy))
CHANGES = st.lists(st.tuples(POSITIONS, CHAINS, st.booleans()), max_size=6)


@given(CHANGES)
def test_chains_are_read_back_unchanged(changes: list[tuple[Position | None, Chain, bool]]) -> None:
    chains = Chains()
    properties = {"mine": "1", f"{PREFIX}9999": "old"}
    for start, new, is_shadow in changes:
        chains = changed(chains, start, new, is_shadow=is_shadow)
    put, remove = to_properties(chains, properties)
    for name in remove:
        del properties[name]
    properties |= put
    assert from_properties(properties) == chains
    assert properties["mine"] == "1"
    assert all(each.startswith(PREFIX) for each in (*put, *remove))
    assert bool(put) == (chains != Chains())


def test_long_chains_are_split_into_cursor_properties() -> None:
    chains = made((None, chain("long", "'ü' == \"\n\"" * 900)))
    put, remove = to_properties(chains, {})
    assert len(put) > 1
    assert remove == []
    assert all(len(name) + len(value) <= PROPERTY_BYTES_MAX for name, value in put.items())
    assert max(map(len, put.values())) == PIECE_BYTES
    assert from_properties(dict(reversed(put.items()))) == chains
    shorter, remove = to_properties(made((None, A)), put)
    assert len(shorter) == 1
    assert set(remove) == set(put) - set(shorter)
    assert to_properties(Chains(), put) == ({}, list(put))

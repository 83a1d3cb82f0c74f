"""Chains of filters: verdicts, their cache, and batches judged in parts."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqgate.api.entry.v1.entry_pb2 import EntryMetadata
from seqgate.services.filter.adapters.cel import CelEngine
from seqgate.services.filter.core.chain import (
    DELAY_MAX_MS,
    Chain,
    Decision,
    Verdict,
    weight_of,
)
from seqgate.services.filter.core.cost import PROPERTIES_MAX, TEXT_BYTES_MAX
from seqgate.services.filter.core.judging import REMEMBERED_STEPS, Judging
from seqgate.services.filter.core.memo import KEY_BYTES, Memo
from seqgate.services.filter.core.program import Failure, FailureReason
from seqgate.services.filter.metadata import reader_of
from seqgate.services.filter.service import Filters, chain_of

ACCEPT, REJECT, RESCHEDULE = Verdict.ACCEPT, Verdict.REJECT, Verdict.RESCHEDULE
EU, US = {"properties": {"region": "eu"}}, {"properties": {"region": "us"}}

FILTERS = Filters(
    CelEngine(), Memo(0, 0), programs_max=1_000, program_bytes_max=10**9, chain_bytes_max=2**20
)


def chain(*texts: str, topic: str = "", **subscription: str) -> Chain:
    return chain_of([FILTERS.program(each) for each in texts], topic, subscription)


def entry(**fields: object) -> EntryMetadata:
    return EntryMetadata(**fields)  # type: ignore[arg-type]


def decide(judged: Chain, **fields: object) -> Decision:
    key = reader_of(judged)(entry(**fields))
    return judged.decide(key, weight_of(key))


def outcome(decision: Decision) -> tuple[object, int | None, int]:
    result = decision.result
    return (
        result.reason if isinstance(result, Failure) else result,
        decision.filter,
        decision.delay_ms,
    )


# ---- verdicts

IN_EU = "properties.region == 'eu'"
LATER = "properties.region == 'eu' ? duration('0s') : duration('2s')"


@pytest.mark.parametrize(
    ("texts", "fields", "expected"),
    [
        ([], EU, (ACCEPT, None, 0)),
        ([IN_EU], EU, (ACCEPT, None, 0)),
        ([IN_EU], US, (REJECT, 0, 0)),
        ([LATER], EU, (ACCEPT, None, 0)),
        ([LATER], US, (RESCHEDULE, 0, 2_000)),
        # The first verdict other than ACCEPT ends the chain.
        (["true", "false"], EU, (REJECT, 1, 0)),
        (["false", "true"], EU, (REJECT, 0, 0)),
        (["false", "1 / (sequence_id - 1) == 1"], {"sequence_id": 1}, (REJECT, 0, 0)),
        ([IN_EU, LATER], US, (REJECT, 0, 0)),
        ([LATER, IN_EU], US, (RESCHEDULE, 0, 2_000)),
        (["true", LATER, IN_EU], EU, (ACCEPT, None, 0)),
        # A failure is no verdict, and ends the chain.
        ([IN_EU], {}, (FailureReason.PROPERTY_ABSENT, 0, 0)),
        (["true", IN_EU, "false"], {}, (FailureReason.PROPERTY_ABSENT, 1, 0)),
        (["has(properties.region) && " + IN_EU], {}, (REJECT, 0, 0)),
        (["!has(properties.region) || " + IN_EU], {}, (ACCEPT, None, 0)),
        # Absent differs from empty.
        (["properties.region == ''"], {"properties": {"region": ""}}, (ACCEPT, None, 0)),
        (["'region' in properties"], {"properties": {"region": ""}}, (ACCEPT, None, 0)),
        (["'region' in properties"], {"properties": {"other": ""}}, (REJECT, 0, 0)),
        (
            ["int(properties.n) > 1"],
            {"properties": {"n": "x"}},
            (FailureReason.EVALUATION_FAILED, 0, 0),
        ),
        # Variables.
        (["key == 'k'"], {"partition_key": "k"}, (ACCEPT, None, 0)),
        (["key == ''"], {}, (ACCEPT, None, 0)),
        (["producer == 'p'"], {"producer_name": "p"}, (ACCEPT, None, 0)),
        (["sequence_id == 9223372036854775807"], {"sequence_id": 2**63 - 1}, (ACCEPT, None, 0)),
        (["publish_time_ms == 5"], {"publish_time": 5}, (ACCEPT, None, 0)),
        (["num_messages == 1"], {}, (ACCEPT, None, 0)),
        (["num_messages == 7"], {"num_messages_in_batch": 7}, (ACCEPT, None, 0)),
        (["topic == 'a/b/c' && subscription.mine == 'yes'"], {}, (ACCEPT, None, 0)),
        (["subscription.other == 'yes'"], {}, (FailureReason.PROPERTY_ABSENT, 0, 0)),
        (["size(subscription) == 2"], {}, (ACCEPT, None, 0)),
        (["properties == {}"], {}, (ACCEPT, None, 0)),
        (
            ["properties == {'a': 'b', 'c': ''}"],
            {"properties": {"c": "", "a": "b"}},
            (ACCEPT, None, 0),
        ),
        # A batch without properties passes filters that read them, and only those.
        ([IN_EU], {"num_messages_in_batch": 2}, (ACCEPT, None, 0)),
        (["properties.all(k, false) && false"], {"num_messages_in_batch": 1}, (ACCEPT, None, 0)),
        ([IN_EU, "num_messages < 2"], {"num_messages_in_batch": 2}, (REJECT, 1, 0)),
        (["num_messages < 2"], {"num_messages_in_batch": 2}, (REJECT, 0, 0)),
        ([IN_EU], {"num_messages_in_batch": 2, **US}, (REJECT, 0, 0)),
        (
            [IN_EU],
            {"num_messages_in_batch": 2, "properties": {"other": ""}},
            (FailureReason.PROPERTY_ABSENT, 0, 0),
        ),
        (
            ["properties.a == properties.b"],
            {"num_messages_in_batch": 2, "properties": {"c": ""}},
            (FailureReason.PROPERTY_ABSENT, 0, 0),
        ),
        (["properties.a == properties.b"], {"num_messages_in_batch": 2}, (ACCEPT, None, 0)),
        # Delays.
        (["duration('0s')"], {}, (ACCEPT, None, 0)),
        (["duration('1us')"], {}, (RESCHEDULE, 0, 1)),
        (["duration('1001us')"], {}, (RESCHEDULE, 0, 2)),
        (["duration('24h')"], {}, (RESCHEDULE, 0, DELAY_MAX_MS)),
        (["duration('24h') + duration('1us')"], {}, (FailureReason.INVALID_DELAY, 0, 0)),
        (["duration('0s') - duration('1us')"], {}, (FailureReason.INVALID_DELAY, 0, 0)),
    ],
)
def test_a_chain_has_this_verdict(
    texts: list[str], fields: dict[str, object], expected: tuple[object, int | None, int]
) -> None:
    judged = chain(*texts, topic="a/b/c", mine="yes", unread="")
    assert outcome(decide(judged, **fields)) == expected


@pytest.mark.parametrize(
    ("text", "fields", "is_judged"),
    [
        ("key == ''", {"partition_key": "x" * TEXT_BYTES_MAX}, True),
        ("key == ''", {"partition_key": "x" * (TEXT_BYTES_MAX + 1)}, False),
        ("key == ''", {"partition_key": "é" * (TEXT_BYTES_MAX // 2)}, True),
        ("key == ''", {"partition_key": "é" * (TEXT_BYTES_MAX // 2 + 1)}, False),
        ("producer == key", {"partition_key": "x" * TEXT_BYTES_MAX, "producer_name": "p"}, False),
        ("producer == ''", {"partition_key": "x" * (TEXT_BYTES_MAX + 1)}, True),
        ("properties.a == ''", {"properties": {"a": "", "b": "x" * TEXT_BYTES_MAX}}, True),
        ("size(properties) > 9", {"properties": {"a": "", "b": "x" * TEXT_BYTES_MAX}}, False),
        ("size(properties) > 9", {"properties": {str(n): "" for n in range(PROPERTIES_MAX)}}, True),
        (
            "size(properties) > 9",
            {"properties": {str(n): "" for n in range(PROPERTIES_MAX + 1)}},
            False,
        ),
        (
            "properties['1'] == ''",
            {"properties": {str(n): "" for n in range(PROPERTIES_MAX + 1)}},
            True,
        ),
        ("sequence_id > 1", {"sequence_id": 2**63}, False),
        ("publish_time_ms > 1", {"publish_time": 2**64 - 1}, False),
        ("num_messages > 1", {"num_messages_in_batch": -1}, False),
        ("key == ''", {"sequence_id": 2**63}, True),
    ],
)
def test_the_data_read_from_an_entry_is_bounded(
    text: str, fields: dict[str, object], is_judged: bool
) -> None:
    result, index, _ = outcome(decide(chain(text), **fields))
    assert (result is not FailureReason.INVALID_METADATA) == is_judged
    if not is_judged:
        assert index is None


def test_only_the_subscription_properties_read_are_passed() -> None:
    named = chain("subscription.mine == 'yes'", mine="yes", other="x")
    assert named.values(reader_of(named)(entry()))["subscription"] == {"mine": "yes"}


# ---- keys


@pytest.mark.parametrize(
    ("texts", "one", "other", "are_alike"),
    [
        ([IN_EU], {"sequence_id": 1, **EU}, {"sequence_id": 2, "publish_time": 9, **EU}, True),
        ([IN_EU], EU, US, False),
        ([IN_EU], {"properties": {"region": ""}}, {}, False),
        ([IN_EU], {}, {"num_messages_in_batch": 2}, False),
        ([IN_EU], {**EU}, {"num_messages_in_batch": 2, **EU}, True),
        ([IN_EU], {"properties": {"region": "eu", "other": "1"}}, EU, True),
        (
            ["size(properties) > 1"],
            {"properties": {"a": "1", "b": "2"}},
            {"properties": {"b": "2", "a": "1"}},
            True,
        ),
        (["size(properties) > 1"], {"properties": {"a": "1"}}, {"properties": {"a": "2"}}, False),
        (["sequence_id > 1"], {"sequence_id": 1}, {"sequence_id": 2}, False),
        (["sequence_id > 1"], {"sequence_id": 1}, {"sequence_id": 1, **EU}, True),
        (
            ["key == ''", "producer == ''"],
            {"partition_key": "a", "producer_name": "b"},
            {"partition_key": "b", "producer_name": "a"},
            False,
        ),
        (["num_messages > 1"], {}, {"num_messages_in_batch": 1}, True),
        (["true"], EU, {"num_messages_in_batch": 2, "sequence_id": 2**64 - 1}, True),
    ],
)
def test_entries_with_equal_reads_share_a_key(
    texts: list[str], one: dict[str, object], other: dict[str, object], are_alike: bool
) -> None:
    read = reader_of(chain(*texts))
    assert (read(entry(**one)) == read(entry(**other))) == are_alike


def test_reading_changes_nothing() -> None:
    metadata = entry(partition_key="k")
    before = metadata.SerializeToString()
    for text in (IN_EU, "properties.a == properties.b", "size(properties) > 1", "num_messages > 1"):
        reader_of(chain(text))(metadata)
    assert metadata.SerializeToString() == before


def test_chains_of_different_content_have_different_keys() -> None:
    chains = [
        chain(IN_EU),
        chain(IN_EU, IN_EU),
        chain(f"{IN_EU} "),
        chain(IN_EU, topic="a/b/c"),
        chain(IN_EU, a="b"),
        chain(IN_EU, ab=""),
        chain("true", "false"),
        chain("false", "true"),
    ]
    keys = [reader_of(each)(entry(**EU)) for each in chains]
    assert len(set(keys)) == len(keys)
    assert reader_of(chain(IN_EU))(entry(**EU)) == keys[0]


# ---- memory


def decision_of(number: int) -> Decision:
    return Decision(REJECT, number)


def test_used_verdicts_stay_cached_and_others_are_evicted() -> None:
    memo = Memo(10, 10**6)
    wanted = (b"", ("wanted",))
    memo.put(wanted, decision_of(0), 6)
    for number in range(100):
        memo.put((b"", (str(number),)), decision_of(number), 2)
        assert memo.get(wanted) is not None
        assert len(memo) <= 10
    assert memo.get((b"", ("0",))) is None
    assert memo.get((b"", ("99",))) is not None


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 2_000)), max_size=200))
def test_the_cache_stays_within_its_bounds(asked: Sequence[tuple[int, int]]) -> None:
    bytes_max = 20 * KEY_BYTES
    memo = Memo(16, bytes_max)
    for number, size in asked:
        key = (b"", ("x" * size, number))
        found = memo.get(key)
        assert found is None or found.filter == number
        if found is None:
            memo.put(key, decision_of(number), weight_of(key))
        assert len(memo) <= 16
        assert memo.size_bytes <= bytes_max
        kept = [*memo.young, *memo._old]
        assert memo.size_bytes == sum(KEY_BYTES + weight_of(each) for each in kept)


def test_a_cache_of_size_zero_remembers_nothing() -> None:
    for memo in (Memo(0, 10**6), Memo(10**6, 0), Memo(1, 1)):
        memo.put((b"", ("a",)), decision_of(0), 1)
        assert len(memo) == 0


# ---- batches


def judged_in_turns(
    judged: Chain, memo: Memo, steps: int, *entries: EntryMetadata
) -> tuple[Judging, int]:
    judging = Judging(judged, reader_of(judged), memo, entries)
    turns = 1
    while judging.go_on(steps):
        turns += 1
    return judging, turns


def test_a_batch_lists_each_decision_once() -> None:
    judging, _ = judged_in_turns(
        chain(IN_EU), Memo(100, 10**6), 10**9, *[entry(**EU), entry(**US)] * 50, entry()
    )
    decisions, which = judging.outcomes()
    assert which == [0, 1] * 50 + [2]
    assert [outcome(each)[0] for each in decisions] == [
        ACCEPT,
        REJECT,
        FailureReason.PROPERTY_ABSENT,
    ]


def test_equal_decisions_are_merged() -> None:
    """Those of different entries, and of a chain that was compiled again."""
    memo = Memo(100, 10**6)
    for remembered in (0, 1):
        judged = chain("sequence_id < 0 && false || int(properties.n) > sequence_id")
        entries = [entry(sequence_id=number, properties={"n": "x"}) for number in range(10)]
        entries += [entry(sequence_id=9, properties={"n": str(n)}) for n in range(5 + remembered)]
        judging, _ = judged_in_turns(judged, memo, 10**9, *entries)
        decisions, which = judging.outcomes()
        assert [outcome(each)[0] for each in decisions] == [
            FailureReason.EVALUATION_FAILED,
            REJECT,
        ]
        assert which == [0] * 10 + [1] * (5 + remembered)


def test_an_empty_batch_has_no_decisions() -> None:
    judging, turns = judged_in_turns(chain(IN_EU), Memo(100, 10**6), 1)
    assert (judging.outcomes(), turns) == (([], []), 1)


def test_a_long_batch_yields_after_a_number_of_steps() -> None:
    judged = chain("key != 'x'")
    distinct = [entry(partition_key=str(number)) for number in range(100)]
    memo = Memo(1_000, 10**6)
    each = judged.steps + REMEMBERED_STEPS
    assert judged_in_turns(judged, memo, 10 * each, *distinct)[1] == 10
    # A cached verdict costs less, but never nothing.
    assert judged_in_turns(judged, memo, 10 * REMEMBERED_STEPS, *distinct)[1] == 10
    # At least one entry is judged.
    assert judged_in_turns(judged, Memo(0, 0), 1, *distinct)[1] == 100


@given(
    st.lists(st.sampled_from(["eu", "us", ""]), max_size=30),
    st.integers(1, 200),
    st.integers(0, 6),
)
def test_yielding_and_caching_change_no_verdict(regions: list[str], steps: int, kept: int) -> None:
    judged = chain(IN_EU)
    entries = [entry(properties={"region": each} if each else {}) for each in regions]
    judging, _ = judged_in_turns(judged, Memo(kept, 10**6), steps, *entries)
    expected = {"eu": ACCEPT, "us": REJECT, "": FailureReason.PROPERTY_ABSENT}
    decisions, which = judging.outcomes()
    found = [outcome(decisions[place])[0] for place in which]
    assert found == [expected[each] for each in regions]


# ---- programs


def test_programs_are_cached_by_text_and_the_oldest_is_evicted() -> None:
    filters = Filters(
        CelEngine(), Memo(0, 0), programs_max=3, program_bytes_max=10**9, chain_bytes_max=2**20
    )
    first = filters.program("sequence_id > 0")
    for number in range(1, 3):
        filters.program(f"sequence_id > {number}")
    assert filters.program("sequence_id > 0") is first
    filters.program("sequence_id > 3")
    assert filters.kept[0] == 3
    assert filters.program("sequence_id > 0") is first
    assert filters.program("sequence_id > 3") is not filters.program("sequence_id > 1")


def test_the_memory_of_programs_is_bounded() -> None:
    size = FILTERS.program("sequence_id > 0").compiled.size_bytes
    filters = Filters(
        CelEngine(), Memo(0, 0), programs_max=100, program_bytes_max=3 * size, chain_bytes_max=2**20
    )
    for number in range(10):
        filters.program(f"sequence_id > {number}")
    assert filters.kept == (3, 3 * size)
    huge = Filters(
        CelEngine(), Memo(0, 0), programs_max=100, program_bytes_max=1, chain_bytes_max=2**20
    )
    assert huge.program("true").compiled.evaluate({}) is True
    assert huge.kept == (0, 0)

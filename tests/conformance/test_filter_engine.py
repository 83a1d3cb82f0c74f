"""The contract of every filter engine: types, values, positions of faults, and bounds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqgate.services.filter.adapters.cel import CelEngine
from seqgate.services.filter.core.cost import DEPTH_MAX, ITERATIONS_MAX
from seqgate.services.filter.core.faults import Fault, InvalidExpression
from seqgate.services.filter.core.program import Failure, FailureReason, Type, check_text
from seqgate.services.filter.core.syntax import Loop, depth, walk
from seqgate.services.filter.ports import Engine

ENTRY: dict[str, object] = {
    "properties": {"region": "eu", "n": "7", "empty": "", "ü": "é"},
    "key": "customer-17",
    "producer": "checkout",
    "sequence_id": 2**53 + 1,
    "publish_time_ms": 1_700_000_000_000,
    "num_messages": 3,
    "topic": "public/default/orders",
    "subscription": {"region": "eu"},
}


ENGINE = CelEngine()


@pytest.fixture(params=[ENGINE], ids=["cel"])
def engine(request: pytest.FixtureRequest) -> Engine:
    engine: Engine = request.param
    return engine


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("true", True),
        ("properties.region == 'eu'", True),
        ("properties['region'] != \"eu\"", False),
        ("properties.region in ['us', 'eu']", True),
        ("'absent' in properties", False),
        ("has(properties.absent)", False),
        ("has(properties.empty) && properties.empty == ''", True),
        ("properties['ü'] == 'é'", True),
        ("int(properties.n) > 5 && double(properties.n) < 7.5", True),
        ("key.startsWith('customer-') && key.endsWith('17') && key.contains('mer')", True),
        ("key.matches('^customer-[0-9]+$')", True),
        ("size('é') == 1 && 'é'.size() == 1", True),
        ("sequence_id == 9007199254740993", True),
        ("sequence_id % 2 == 1 && -sequence_id < 0", True),
        ("timestamp(publish_time_ms / 1000).getFullYear() == 2023", True),
        ("num_messages >= 2 ? producer == 'checkout' : false", True),
        ("topic == 'public/default/orders'", True),
        ("properties.region == subscription.region", True),
        ("properties.exists(k, properties[k] == '7')", True),
        ("properties.all(k, k != '')", True),
        ("properties.filter(k, k == 'n').map(k, properties[k]) == ['7']", True),
        ("['a', 'b'].exists_one(x, x == 'a')", True),
        ("{'a': 1}['a'] == 1", True),
        ("duration('1.5s')", 1_500_000),
        ("duration('-1s')", -1_000_000),
        ("duration('0s')", 0),
        ("properties.region == 'eu' ? duration('24h') : duration('0s')", 86_400_000_000),
        # As in CEL, an operand that decides alone hides the other one's failure.
        ("false && properties.absent == ''", False),
        ("properties.absent == '' && false", False),
        ("properties.absent == '' || true", True),
    ],
)
def test_an_expression_has_a_value(engine: Engine, text: str, value: bool | int) -> None:
    compiled = engine.compile(text)
    found = compiled.evaluate(ENTRY)
    assert (type(found), found) == (type(value), value)
    assert compiled.type is (Type.BOOL if isinstance(value, bool) else Type.DURATION)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("properties.absent == ''", FailureReason.PROPERTY_ABSENT),
        ("properties['absent'] == ''", FailureReason.PROPERTY_ABSENT),
        ("true && properties.absent == ''", FailureReason.PROPERTY_ABSENT),
        ("subscription.absent == ''", FailureReason.PROPERTY_ABSENT),
        ("int(properties.region) > 1", FailureReason.EVALUATION_FAILED),
        ("sequence_id / (num_messages - 3) > 1", FailureReason.EVALUATION_FAILED),
        ("sequence_id + 9223372036854775807 > 1", FailureReason.EVALUATION_FAILED),
        ("duration(properties.region)", FailureReason.EVALUATION_FAILED),
    ],
)
def test_a_failure_has_no_value(engine: Engine, text: str, reason: FailureReason) -> None:
    found = engine.compile(text).evaluate(ENTRY)
    assert isinstance(found, Failure)
    assert found.reason is reason
    assert found.message
    assert "\n" not in found.message


@pytest.mark.parametrize(
    ("text", "line", "column"),
    [
        ("", 1, 1),
        ("properties.region = 'eu'", 1, 19),
        ("properties.region == 'eu' &&", 1, 29),
        ("region == 'eu'", 1, 1),
        ("sequence_id > '5'", 1, 13),
        ("'é' + 1 == 'é'", 1, 5),
        ("true &&\n\n  nothing", 3, 3),
        ("key.lowerAscii() == 'a'", 1, 15),
        ("key", 1, 1),
        ("1", 1, 1),
        ("[true]", 1, 1),
        ("null", 1, 1),
    ],
)
def test_a_fault_has_a_position(engine: Engine, text: str, line: int, column: int) -> None:
    with pytest.raises(InvalidExpression) as caught:
        engine.compile(text)
    first = caught.value.faults[0]
    assert (first.line, first.column) == (line, column)
    assert text.split("\n")[line - 1][: column - 1] == text[: first.offset].split("\n")[-1]
    assert first.message


def test_every_fault_is_reported(engine: Engine) -> None:
    with pytest.raises(InvalidExpression) as caught:
        engine.compile("one == 1 || two == 2")
    assert [each.column for each in caught.value.faults] == [1, 13]


@pytest.mark.parametrize(
    "text",
    [
        "duration('soon') == duration('1s')",
        "key.matches('(')",
        "matches(key, '[')",
        "1 / 0 == sequence_id",
        "sequence_id == int('one')",
        "timestamp('today') < timestamp(publish_time_ms)",
    ],
)
def test_a_constant_part_that_always_fails_is_refused(engine: Engine, text: str) -> None:
    compiled = engine.compile(text)
    with pytest.raises(InvalidExpression) as caught:
        compiled.check_constants()
    assert caught.value.faults[0].message


@pytest.mark.parametrize(
    "text", ["key.matches('^a$') && duration('1s') < duration('2s')", "1 / 1 == sequence_id"]
)
def test_a_valid_constant_part_is_accepted(engine: Engine, text: str) -> None:
    engine.compile(text).check_constants()


def test_nesting_beyond_the_limit_is_refused(engine: Engine) -> None:
    for deep in ("(" * 200 + "true" + ")" * 200, " + ".join(["1"] * 200) + " > 1"):
        with pytest.raises(InvalidExpression):
            engine.compile(deep)
    wide = engine.compile(" && ".join(["sequence_id > 1"] * 200))
    assert depth(wide.tree) <= DEPTH_MAX


def test_macros_are_loops_in_the_tree(engine: Engine) -> None:
    tree = engine.compile("properties.all(k, [1].exists(x, x > 0))").tree
    assert sum(isinstance(each, Loop) for each in walk(tree)) == 2


def test_the_engine_itself_bounds_iterations(engine: Engine) -> None:
    """Behind the check before evaluation, which has the same limit."""
    many = {str(number): "" for number in range(ITERATIONS_MAX + 1)}
    found = engine.compile("properties.all(k, true)").evaluate({"properties": many})
    assert isinstance(found, Failure)
    assert found.reason is FailureReason.EVALUATION_FAILED


def test_each_part_has_a_value_of_its_own(engine: Engine) -> None:
    compiled = engine.compile("properties.region == 'eu' && int(properties.absent) > 1")
    shown = [
        compiled.show(each, ENTRY) for each in walk(compiled.tree) if each.id != compiled.tree.id
    ]
    assert [(each.text, each.is_failure) for each in shown[:2]] == [
        ("true", False),
        ('"eu"', False),
    ]
    assert any(each.is_failure and "absent" in each.text for each in shown)


PIECES = st.sampled_from(
    [
        *("properties", "key", "subscription", ".a", "['a']", "(", ")", "[", "]", "{", "}", ","),
        *("&&", "||", "!", "==", "<", "+", "-", "*", "/", "%", "?", ":", "in", "has", "size"),
        *("1", "2u", "1.5", "'x'", '"y"', "b'z'", "r'\\d'", "true", "null", "duration('1s')"),
        *(".all(k, ", ".map(k, ", ".matches('a+')", "\n", "// c\n", "é", "\\", "'", '"', "$"),
    ]
)


@given(st.one_of(st.lists(PIECES, max_size=30).map(" ".join), st.text(max_size=60)))
def test_any_text_is_an_expression_or_is_refused(text: str) -> None:
    faults: tuple[Fault, ...] = ()
    try:
        check_text(text)
        compiled = ENGINE.compile(text)
        compiled.check_constants()
        compiled.evaluate(ENTRY)
    except InvalidExpression as error:
        faults = error.faults
    assert all(0 <= each.offset <= len(text) for each in faults)

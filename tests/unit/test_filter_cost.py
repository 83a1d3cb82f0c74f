"""The cost of expressions, and proof of its bound: no expression can keep a worker busy."""

import re
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqgate.services.filter.adapters.cel import CelEngine
from seqgate.services.filter.core.cost import (
    COST_MAX,
    ITERATIONS_MAX,
    LOOPS_MAX,
    PROPERTIES_MAX,
    REGEX_SIZE_MAX,
    SUBSCRIPTION_PROPERTIES_MAX,
    TEXT_BYTES_MAX,
    Cost,
)
from seqgate.services.filter.core.faults import InvalidExpression
from seqgate.services.filter.core.program import (
    EXPRESSION_BYTES_MAX,
    Program,
    check_text,
    program_of,
)
from seqgate.services.filter.core.reads import Reads
from seqgate.services.filter.core.regex import program_size

ENGINE = CelEngine()


def program(text: str) -> Program:
    check_text(text)
    return program_of(text, ENGINE.compile(text))


def cost(text: str) -> Cost:
    return program(text).cost


def refusal(text: str) -> str:
    with pytest.raises(InvalidExpression) as caught:
        program(text)
    return caught.value.faults[0].message


# ---- allowed expressions


@pytest.mark.parametrize(
    "text",
    [
        "true",
        "properties.region == 'eu'",
        "has(properties.region) && properties.region in ['eu', 'us']",
        "properties.exists(k, properties[k] == 'x')",
        "properties.exists(k, k.startsWith('x-') && properties[k].matches('^[a-z]{3}-[0-9]+$'))",
        "properties.filter(k, k.startsWith('x')).map(k, properties[k]).exists(v, v == '1')",
        "subscription.all(k, k in properties && properties[k] == subscription[k])",
        "key.matches('^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$')",
        "key.contains('needle')",
        "properties.map(k, k + '=' + properties[k]).exists(p, p == 'a=b')",
        "key in [" + ", ".join(f"'{number}'" for number in range(500)) + "]",
        " || ".join(f"properties.r == '{number}'" for number in range(150)),
    ],
)
def test_typical_filters_are_cheap(text: str) -> None:
    found = cost(text)
    assert 0 < found.steps <= COST_MAX
    assert found.iterations <= ITERATIONS_MAX


def test_iterations_are_counted_for_the_largest_entry() -> None:
    assert cost("key == ''").iterations == 0
    assert cost("properties.all(k, true)").iterations == PROPERTIES_MAX
    assert cost("subscription.all(k, true)").iterations == SUBSCRIPTION_PROPERTIES_MAX
    assert cost("properties.all(k, [1, 2].all(n, true))").iterations == PROPERTIES_MAX * 3
    assert cost("properties.map(k, k).all(k, true)").iterations == PROPERTIES_MAX * 2


def test_the_texts_of_a_loop_total_at_most_the_entrys() -> None:
    once = cost("properties.x.matches('^a+$')").steps
    assert cost("properties.exists(k, properties[k].matches('^a+$'))").steps < 2 * once + 40_000


# ---- refused expressions


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("properties.all(a, properties.all(b, true))", "macros may visit"),
        ("subscription.all(a, [1, 2, 3, 4, 5].all(b, true))", "macros may visit"),
        ("key.contains(properties.x)", "expression may cost"),
        ("properties.map(a, key + key + key + key).size() > 1", "expression may cost"),
        ("properties.exists(a, key.matches('^a+$'))", "expression may cost"),
        (" && ".join(["key.matches('^[a-z]+-[0-9]+$')"] * 30), "expression may cost"),
        ("key.matches(properties.pattern)", "the regular expression must be a literal"),
        ("key.matches('a' + 'b')", "the regular expression must be a literal"),
        ("key.matches('(a{1000}){1000}')", "regular expression needs"),
        ("key.matches('((a{50}){50}){50}')", "regular expression needs"),
        ("key.matches('" + r"\\pL" * 10 + "')", "regular expression needs"),
        (r"key.matches('\\Qa\\E')", "\\Q is not supported"),
        ("['x'].exists(key, key == 'x')", "'key' is already defined here"),
        ("properties.exists(k, [k].exists(k, k == ''))", "'k' is already defined here"),
        (
            "properties.exists(k, [subscription].exists(properties, properties[k] == ''))",
            "'properties' is already defined here",
        ),
        ("type(key) == string", "'type' is not supported in filters"),
        ("dyn(key) == 1", "'dyn' is not supported in filters"),
        (
            "timestamp(publish_time_ms).getHours('Europe/Berlin') > 1",
            "'getHours' is not supported in filters",
        ),
        ("google.protobuf.Int32Value{value: 1} == 1", "not supported in filters (struct_expr)"),
    ],
)
def test_expensive_expressions_are_refused(text: str, message: str) -> None:
    assert refusal(text).startswith(message)


def test_the_nesting_of_macros_is_bounded() -> None:
    def nested(times: int) -> str:
        return "".join(f"[1].all(v{n}, " for n in range(times)) + "true" + ")" * times

    assert cost(nested(LOOPS_MAX)).iterations == LOOPS_MAX
    assert refusal(nested(LOOPS_MAX + 1)) == "macros nested too deeply (limit 3)"


def test_the_length_of_an_expression_is_bounded() -> None:
    for filling in ("x", "é"):
        size = len(filling.encode())
        literal = filling * ((EXPRESSION_BYTES_MAX - len("key == ''")) // size)
        assert cost(f"key == '{literal}'")
        assert refusal(f"key == '{literal}{filling}{filling}'").endswith("bytes long (limit 4,096)")


def test_control_characters_other_than_white_space_are_refused() -> None:
    assert cost("key\t==\r\n''")
    for wrong in "\x00\x01\x1b\x7f":
        assert refusal(f"key == '{wrong}'") == "control character in expression"


def test_the_size_of_a_regular_expression_is_bounded() -> None:
    assert cost(f"topic.matches('a{{{REGEX_SIZE_MAX // 20}}}')")
    assert "instructions (limit 2,000)" in refusal(
        f"topic.matches('(?:a{{{REGEX_SIZE_MAX // 2}}}){{3}}')"
    )


# ---- regular expressions


@pytest.mark.parametrize(
    ("pattern", "size"),
    [
        ("", 0),
        ("abc", 3),
        ("a{5}", 5),
        ("a{2,5}", 5),
        ("a{5,}", 5),
        ("a{0}", 1),
        ("(ab){5}", 20),
        ("(a{3}b){5}", 30),
        ("[a-f0-9]{8}", 16),
        ("[]a]{2}", 4),
        ("[^a]", 24),
        ("[[:alpha:]x]", 14),
        (r"\d+", 13),
        (r"\pL", 600),
        (r"\{2}", 1),
        ("(?i)ab", 8),
        ("a|b", 3),
        ("x{,5}", 5),
    ],
)
def test_counted_repetitions_add_to_the_cost(pattern: str, size: int) -> None:
    found = program_size(pattern)
    assert found >= size
    assert found <= 3 * size + 12


Made = tuple[str, int]
"""A pattern, and the number of letters that it has with repetitions written out."""


def _larger(inner: st.SearchStrategy[Made]) -> st.SearchStrategy[Made]:
    return st.one_of(
        st.tuples(inner, st.integers(1, 6)).map(
            lambda drawn: (f"(?:{drawn[0][0]}){{{drawn[1]}}}", drawn[0][1] * drawn[1])
        ),
        st.tuples(inner, inner).map(
            lambda drawn: (drawn[0][0] + drawn[1][0], drawn[0][1] + drawn[1][1])
        ),
        st.tuples(inner, inner).map(
            lambda drawn: (f"({drawn[0][0]}|{drawn[1][0]})", drawn[0][1] + drawn[1][1])
        ),
    )


PATTERNS = st.recursive(
    st.sampled_from(["a", "b", "[ab]", "[^b]", "."]).map(lambda text: (text, 1)),
    _larger,
    max_leaves=12,
)


@given(PATTERNS)
def test_the_size_of_a_pattern_is_never_underestimated(made: Made) -> None:
    pattern, letters = made
    re.compile(pattern)
    assert program_size(pattern) >= letters


# ---- data that is read


@pytest.mark.parametrize(
    ("text", "reads"),
    [
        ("true", Reads()),
        ("key == 'a' && sequence_id > 1", Reads(frozenset({"key", "sequence_id"}))),
        (
            "properties.a == properties['b'] && 'c' in properties || has(properties.d)",
            Reads(frozenset({"properties"}), frozenset("abcd")),
        ),
        ("size(properties) > 1", Reads(frozenset({"properties"}), None)),
        ("properties[key] == ''", Reads(frozenset({"properties", "key"}), None)),
        (
            "properties.a == '' || properties.all(k, k != 'b')",
            Reads(frozenset({"properties"}), None),
        ),
        (
            "subscription.region == properties.region",
            Reads(
                frozenset({"properties", "subscription"}),
                frozenset({"region"}),
                frozenset({"region"}),
            ),
        ),
        ("['x'].exists(key, key == 'x')", Reads()),
        ("[key].exists(key, key == 'x')", Reads(frozenset({"key"}))),
        ("[{'a': 'b'}].exists(properties, properties.a == '')", Reads()),
    ],
)
def test_the_data_read_by_an_expression_is_bounded(text: str, reads: Reads) -> None:
    assert Reads.of(ENGINE.compile(text).tree) == reads


# ---- the bound holds, by counting instead of the clock


@pytest.mark.parametrize(
    "text",
    [
        "properties.all(k, k != '')",
        "properties.all(k, [1, 2, 3].all(n, n > 0))",
        "properties.map(k, properties[k]).all(v, v != '')",
        "properties.filter(k, k != '').exists_one(k, k == '')",
        "properties.all(k, properties.map(j, j).size() > 0)",
    ],
)
def test_the_engine_stays_within_the_counted_iterations(text: str) -> None:
    """The engine's own budget does the counting: with exactly as many elements as it allows,
    nothing fails."""
    tree = ENGINE.compile(text)
    properties = {f"{number:03}": "v" for number in range(PROPERTIES_MAX)}
    try:
        iterations = cost(text).iterations
    except InvalidExpression:
        iterations = ITERATIONS_MAX + 1
    is_within = isinstance(tree.evaluate({"properties": properties}), bool)
    assert is_within == (iterations <= ITERATIONS_MAX)


@pytest.mark.parametrize(
    "make",
    [
        lambda n: f"key.matches('(a|b)*a(a|b){{{n}}}c')",
        lambda n: " && ".join(["key.matches('^a+$')"] * n),
        lambda n: "properties.map(k, " + " + ".join(["key"] * n) + ").size() > 0",
        lambda n: "".join(f"[1, 2].all(v{i}, " for i in range(n)) + "true" + ")" * n,
        lambda n: "key == " + " + ".join(["key"] * n),
        lambda n: "[" * n + "key" + "]" * n + " == " + "[" * n + "key" + "]" * n,
        lambda n: "properties.exists(k, k in [" + ", ".join(["key"] * n) + "])",
    ],
)
def test_growing_expressions_are_refused_before_they_are_expensive(
    make: Callable[[int], str],
) -> None:
    """For any size, accepted expressions are within the limits."""
    for size in (1, 2, 3, 5, 10, 20, 40, 80, 160, 320, 640, 1280):
        try:
            found = cost(make(size))
        except InvalidExpression:
            return
        assert found.steps <= COST_MAX
        assert found.iterations <= ITERATIONS_MAX
    raise AssertionError("it is never refused")


def test_the_largest_text_is_priced() -> None:
    assert cost("key == properties.x").steps >= TEXT_BYTES_MAX / 64

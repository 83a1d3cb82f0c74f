"""Positions of sub-expressions, and their displayed values."""

import pytest

from seqgate.services.filter.adapters.cel import CelEngine
from seqgate.services.filter.core.explain import STEPS_MAX, steps_of
from seqgate.services.filter.core.program import program_of

ENGINE = CelEngine()


def shown(text: str, **values: object) -> list[tuple[int, str, str]]:
    """The steps: depth, text, value."""
    known = {"properties": {}, "subscription": {}, "key": "", "sequence_id": 1, **values}
    program = program_of(text, ENGINE.compile(text))
    return [
        (step.depth, text[step.span.start : step.span.end], step.value.text)
        for step in steps_of(program, known)
    ]


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("true", []),
        ("key == 'a'", ["key == 'a'", "key"]),
        ("( key )== ( 'a' )", ["( key )== ( 'a' )", "key"]),
        ("!(key == '')", ["!(key == '')", "key == ''", "key"]),
        (
            "(key == 'é' || sequence_id > 1) && key != ''",
            [
                "(key == 'é' || sequence_id > 1) && key != ''",
                *("key == 'é' || sequence_id > 1", "key == 'é'", "key"),
                *("sequence_id > 1", "sequence_id", "key != ''", "key"),
            ],
        ),
        (
            "has(properties.a) ? -sequence_id < - 5 : key.startsWith( 'x' )",
            [
                "has(properties.a) ? -sequence_id < - 5 : key.startsWith( 'x' )",
                *("has(properties.a)", "properties", "-sequence_id < - 5", "-sequence_id"),
                *("sequence_id", "key.startsWith( 'x' )", "key"),
            ],
        ),
        (
            "properties [ 'a' ] == properties . b // why",
            [
                "properties [ 'a' ] == properties . b",
                *("properties [ 'a' ]", "properties", "properties . b", "properties"),
            ],
        ),
        (
            "properties.exists(k, k == ')') && size(key) in [1, (2)]",
            [
                "properties.exists(k, k == ')') && size(key) in [1, (2)]",
                *("properties.exists(k, k == ')')", "properties", "size(key) in [1, (2)]"),
                *("size(key)", "key", "[1, (2)]"),
            ],
        ),
        (
            'properties.map(k,\n  k + \'"\')[0] == "x"',
            [
                'properties.map(k,\n  k + \'"\')[0] == "x"',
                *("properties.map(k,\n  k + '\"')[0]", "properties.map(k,\n  k + '\"')"),
                "properties",
            ],
        ),
        (
            "{'a': {'b': key}}['a']['b'] == '''\n'''",
            [
                "{'a': {'b': key}}['a']['b'] == '''\n'''",
                *("{'a': {'b': key}}['a']['b']", "{'a': {'b': key}}['a']", "{'a': {'b': key}}"),
                *("{'b': key}", "key"),
            ],
        ),
        (
            "duration('1s') + duration('2s')",
            ["duration('1s') + duration('2s')", "duration('1s')", "duration('2s')"],
        ),
    ],
)
def test_each_part_has_its_source_position(text: str, parts: list[str]) -> None:
    assert [part for _, part, _ in shown(text)] == parts


def test_each_part_is_shown_with_its_value() -> None:
    text = "properties.n == '7' && int(properties.n) > sequence_id + 1 && has(properties.x)"
    found = {part: value for _, part, value in shown(text, properties={"n": "7", "é": '"\\'})}
    assert found == {
        text: "false",
        "properties.n == '7' && int(properties.n) > sequence_id + 1": "true",
        "properties.n == '7'": "true",
        "properties.n": '"7"',
        "properties": '{"n": "7", "é": "\\"\\\\"}',
        "int(properties.n) > sequence_id + 1": "true",
        "int(properties.n)": "7",
        "sequence_id + 1": "2",
        "sequence_id": "1",
        "has(properties.x)": "false",
    }


def test_depth_gives_the_nesting_of_parts() -> None:
    assert [(depth, part) for depth, part, _ in shown("!(key == '')")] == [
        (0, "!(key == '')"),
        (1, "key == ''"),
        (2, "key"),
    ]


def test_outer_parts_are_shown_first_when_there_are_many() -> None:
    text = " || ".join(f"key == '{number}'" for number in range(150))
    found = shown(text)
    assert len(found) == STEPS_MAX
    assert found[0] == (0, text, "false")
    assert max(depth for depth, _, _ in found) == 7

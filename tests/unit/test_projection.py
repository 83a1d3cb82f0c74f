"""The properties that a batch shows of its messages."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from seqgate.client import Batching
from seqgate.client._projection import PROJECTION_BYTES_MAX, Projection, listed
from seqgate.errors import InvalidRequestError

NAMES = ("origin", "carrier")
VALUES = {"origin": ["EWR", "JFK", ""], "carrier": ["UA"]}


@pytest.mark.parametrize(
    ("given", "properties", "expected"),
    [
        (NAMES, {}, {}),
        (NAMES, {"tail": "N1"}, {}),
        (NAMES, {"tail": "N1", "origin": "EWR"}, {"origin": "EWR"}),
        (NAMES, {"carrier": "UA", "origin": "EWR"}, {"origin": "EWR", "carrier": "UA"}),
        (NAMES, {"origin": ""}, {"origin": ""}),
        (NAMES, {"Origin": "EWR"}, {}),
        (VALUES, {"origin": "EWR", "carrier": "UA"}, {"origin": "EWR", "carrier": "UA"}),
        (VALUES, {"origin": "LGA", "carrier": "UA"}, {"carrier": "UA"}),
        (VALUES, {"origin": "LGA", "carrier": "AA"}, {}),
        (VALUES, {"origin": ""}, {"origin": ""}),
        (VALUES, {"carrier": ""}, {}),
    ],
)
def test_listed_properties_are_projected(
    given: Sequence[str] | Mapping[str, list[str]],
    properties: dict[str, str],
    expected: dict[str, str],
) -> None:
    projection = Projection(listed(given))
    for _ in range(2):
        assert projection.of(properties) == expected
        assert projection.of({}) == {}


def test_messages_with_equal_projections_share_it() -> None:
    projection = Projection(listed(NAMES))
    first = projection.of({"origin": "EWR", "tail": "N1"})
    assert projection.of({"tail": "N2", "origin": "EWR"}) is first
    assert projection.of({"origin": "JFK"}) == {"origin": "JFK"}
    assert first == {"origin": "EWR"}


@pytest.mark.parametrize("letter", ["x", "ä"])
def test_the_size_of_a_projection_is_bounded(letter: str) -> None:
    projection = Projection(listed(["origin"]))
    room = (PROJECTION_BYTES_MAX - len("origin")) // len(letter.encode())
    for _ in range(2):  # a refused projection is not cached
        with pytest.raises(InvalidRequestError) as error:
            projection.of({"origin": letter * (room + 1)})
        assert error.value.reason == "INVALID_ENTRY"
    assert projection.of({"origin": letter * room, "tail": "x" * 100_000})


@pytest.mark.parametrize(
    "given",
    [
        (),
        {},
        ["a"] * 65,
        [str(each) for each in range(64)],
        ["x" * 255, "ä" * 127],
        {"a": [""]},
        {"a": [str(each) for each in range(1_000)]},
        {"a": ["x" * 32_768, "x"]},
    ],
)
def test_lists_at_their_bounds_are_accepted(given: Any) -> None:
    batching = Batching(filter_properties=given)
    assert list(batching.filter_properties) == list(dict.fromkeys(given))
    assert (batching.projection is None) == (not given)
    assert hash(batching) == hash(Batching(filter_properties=given))


@pytest.mark.parametrize(
    "given",
    [
        "origin",
        "",
        [str(each) for each in range(65)],
        [""],
        ["x" * 256],
        ["ä" * 128],
        ["\ud800"],
        [7],
        [None],
        {"": ["x"]},
        {"origin": []},
        {"origin": "EWR"},
        {"origin": [7]},
        {"origin": ["\ud800"]},
        {"origin": ["x" * 32_769]},
        {"origin": [str(each) for each in range(1_001)]},
    ],
)
def test_invalid_lists_are_refused(given: Any) -> None:
    with pytest.raises(ValueError, match=r"filter[_ ]propert"):
        Batching(filter_properties=given)


def test_a_list_is_copied() -> None:
    names, values = ["origin"], {"origin": ["EWR"]}
    by_name, by_value = Batching(filter_properties=names), Batching(filter_properties=values)
    names.append("carrier")
    values["origin"].append("JFK")
    assert by_name == Batching(filter_properties=("origin",))
    assert by_value == Batching(filter_properties={"origin": {"EWR"}})

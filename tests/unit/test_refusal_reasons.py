"""Why a consumer refuses a message, as the client sends it."""

import pytest

from seqgate.client._subscribing import reason_to_wire
from seqgate.errors import InvalidRequestError
from seqgate.types import NACK_REASON_BYTES_MAX


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("it says nothing")


@pytest.mark.parametrize("text", ["", "no stock", "a\nb\0", "é" * (NACK_REASON_BYTES_MAX // 2)])
def test_a_text_is_sent_as_it_is(text: str) -> None:
    assert reason_to_wire(text) == text


@pytest.mark.parametrize(
    "text", ["r" * (NACK_REASON_BYTES_MAX + 1), "é" * (NACK_REASON_BYTES_MAX // 2) + "e", "\ud800"]
)
def test_a_text_that_is_too_long_or_not_utf_8_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequestError, match="reason") as refused:
        reason_to_wire(text)
    assert refused.value.reason == "INVALID_SETTLEMENT"


@pytest.mark.parametrize(
    ("failure", "text"),
    [
        (ValueError("no stock"), "ValueError: no stock"),
        (ValueError(), "ValueError"),
        (Mute(), "Mute"),
        (KeyError("\ud800"), "KeyError: '\\ud800'"),
        (ValueError("\ud800"), "ValueError: ?"),
    ],
)
def test_an_exception_is_its_type_and_message(failure: Exception, text: str) -> None:
    assert reason_to_wire(failure) == text


@pytest.mark.parametrize("letter", ["r", "é", "名", "🚀"])
def test_a_long_exception_is_cut_between_characters(letter: str) -> None:
    text = reason_to_wire(ValueError(letter * NACK_REASON_BYTES_MAX))
    assert text.startswith(f"ValueError: {letter}")
    assert text.endswith(f"{letter}…")
    assert NACK_REASON_BYTES_MAX - 4 < len(text.encode()) <= NACK_REASON_BYTES_MAX

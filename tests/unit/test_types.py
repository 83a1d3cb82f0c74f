"""Names of topics and producers."""

import pytest

from seqgate.types import InvalidNameError, TopicName, check_producer_name


@pytest.mark.parametrize(
    ("text", "full"),
    [
        ("orders", "public/default/orders"),
        ("acme/shop/orders", "acme/shop/orders"),
        ("persistent://acme/shop/orders-partition-0", "acme/shop/orders-partition-0"),
        ("__system", "public/default/__system"),
    ],
)
def test_valid_topic_names_are_parsed(text: str, full: str) -> None:
    assert str(TopicName.expand(text)) == full


@pytest.mark.parametrize(
    "text",
    [
        *["", "a", "a/b", "a/b/", "/b/c", "a//c", "a/b/c/d", "a/b/c d", "a/b/{c}", "a/b/-c"],
        *["a/b/..", "a/b/c\n", "a/b/ü", "a/b/" + "c" * 252],
    ],
)
def test_invalid_topic_names_are_refused(text: str) -> None:
    with pytest.raises(InvalidNameError):
        TopicName.parse(text)


def test_the_longest_topic_name_is_255_bytes_long() -> None:
    assert TopicName.parse("a/b/" + "c" * 251).namespace == "a/b"


@pytest.mark.parametrize("name", ["p", "naïve 📈", "a" * 255, "{x}", "with space"])
def test_valid_producer_names_are_accepted(name: str) -> None:
    assert check_producer_name(name) == name


@pytest.mark.parametrize("name", ["", "a" * 256, "ü" * 128, "a\nb", "a\x00", "a\x7f", "\ud800"])
def test_invalid_producer_names_are_refused(name: str) -> None:
    with pytest.raises(InvalidNameError):
        check_producer_name(name)

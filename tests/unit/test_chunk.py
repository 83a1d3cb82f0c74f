"""Valid and invalid chunks of large messages."""

import pytest

from seqgate.types import (
    CHUNK_UUID_BYTES_MAX,
    LARGE_MESSAGE_BYTES_MAX,
    Chunk,
    InvalidChunkError,
    check_chunk,
)

RIGHT = Chunk("uuid", 0, 2, 10)
MOST = LARGE_MESSAGE_BYTES_MAX


@pytest.mark.parametrize(
    "chunk",
    [
        RIGHT,
        RIGHT._replace(chunk_id=1),
        RIGHT._replace(total_bytes=2),  # each of its chunks has a byte
        RIGHT._replace(uuid="u" * CHUNK_UUID_BYTES_MAX),
        RIGHT._replace(uuid="é" * (CHUNK_UUID_BYTES_MAX // 2)),
        RIGHT._replace(uuid="a b/%2F\u2028"),
        Chunk("uuid", MOST - 1, MOST, MOST),
    ],
)
def test_valid_chunks_are_accepted(chunk: Chunk) -> None:
    assert check_chunk(chunk) is chunk


@pytest.mark.parametrize(
    "chunk",
    [
        RIGHT._replace(uuid=""),
        RIGHT._replace(uuid="a\nb"),
        RIGHT._replace(uuid="a\x00"),
        RIGHT._replace(uuid="a\x7f"),
        RIGHT._replace(uuid="a\x85"),
        RIGHT._replace(uuid="\ud800"),
        RIGHT._replace(uuid="u" * (CHUNK_UUID_BYTES_MAX + 1)),
        RIGHT._replace(uuid="é" * (CHUNK_UUID_BYTES_MAX // 2) + "u"),  # its bytes are counted
        RIGHT._replace(chunk_id=-1),
        RIGHT._replace(chunk_id=2),
        RIGHT._replace(num_chunks=1),  # a message of one chunk is a message
        RIGHT._replace(num_chunks=0),
        RIGHT._replace(num_chunks=-2),
        RIGHT._replace(num_chunks=11),  # one of them would be empty
        RIGHT._replace(total_bytes=1),
        RIGHT._replace(total_bytes=-1),
        RIGHT._replace(total_bytes=MOST + 1),
        Chunk("uuid", 0, MOST + 1, MOST + 1),
    ],
)
def test_invalid_chunks_are_refused(chunk: Chunk) -> None:
    with pytest.raises(InvalidChunkError):
        check_chunk(chunk)


def test_the_chunks_of_an_attempt_differ_only_in_their_index() -> None:
    assert RIGHT.layout == RIGHT._replace(chunk_id=1).layout
    for other in ({"uuid": "other"}, {"num_chunks": 3}, {"total_bytes": 11}):
        assert RIGHT.layout != RIGHT._replace(**other).layout


def test_a_message_is_complete_with_its_last_chunk() -> None:
    assert [RIGHT._replace(chunk_id=each).is_last for each in (0, 1)] == [False, True]

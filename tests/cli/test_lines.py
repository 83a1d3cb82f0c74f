"""Lines, returned as they arrive."""

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqgate.cli import _lines
from seqgate.cli._failure import InvalidInput
from seqgate.cli._lines import numbered_lines, whole


async def collected(lines: AsyncIterator[tuple[int, bytes]]) -> list[tuple[int, bytes]]:
    return [each async for each in lines]


async def from_pipe(*chunks: bytes) -> list[tuple[int, bytes]]:
    reading, writing = os.pipe()
    try:
        for chunk in chunks:
            os.write(writing, chunk)
        os.close(writing)
        return await collected(numbered_lines(reading))
    finally:
        os.close(reading)


async def test_blank_lines_are_counted_and_skipped() -> None:
    assert await from_pipe(b"\na\n \r\nb\n\n") == [(2, b"a"), (4, b"b")]


async def test_the_last_line_needs_no_end() -> None:
    assert await from_pipe(b"a\nb") == [(1, b"a"), (2, b"b")]
    assert await from_pipe() == []


async def test_a_line_is_returned_before_the_input_ends() -> None:
    reading, writing = os.pipe()
    lines = numbered_lines(reading)
    os.write(writing, b"a\nb")
    assert await anext(lines) == (1, b"a")
    os.write(writing, b"c\n")
    assert await anext(lines) == (2, b"bc")
    os.close(writing)
    assert await anext(lines, None) is None
    os.close(reading)


@given(text=st.binary(max_size=200).map(lambda text: text.replace(b"\r", b"\n")))
async def test_blocks_of_any_size_give_the_same_lines(text: bytes) -> None:
    expected = [(n, line) for n, line in enumerate(text.split(b"\n"), start=1) if line.strip()]
    with pytest.MonkeyPatch.context() as patch:
        for block_bytes in (1, 3, 7, 1000):
            patch.setattr(_lines, "_BLOCK_BYTES", block_bytes)
            assert await from_pipe(text) == expected


async def test_a_file_is_read_like_a_pipe(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_bytes(b"line\n" * 50_000)
    with path.open("rb", buffering=0) as file:
        assert len(await collected(numbered_lines(file.fileno()))) == 50_000


async def test_the_length_of_a_line_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_lines, "LINE_BYTES_MAX", 10)
    monkeypatch.setattr(_lines, "_BLOCK_BYTES", 4)
    assert await from_pipe(b"0123456789\n") == [(1, b"0123456789")]
    with pytest.raises(InvalidInput, match=r"line too long \(limit 10 bytes\)"):
        await from_pipe(b"0123456789" * 2)


async def test_the_input_can_be_read_as_one_piece(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(_lines, "WHOLE_BYTES_MAX", 10)
    monkeypatch.setattr(_lines, "_BLOCK_BYTES", 4)
    path = tmp_path / "file"
    for content in (b"", b"\n \n", b"0123456\n\xff\n"):
        path.write_bytes(content)
        with path.open("rb", buffering=0) as file:
            assert [each async for each in whole(file.fileno())] == [(None, content)]
    path.write_bytes(bytes(11))
    with path.open("rb", buffering=0) as file, pytest.raises(InvalidInput, match="10 bytes"):
        await anext(whole(file.fileno()))


async def test_an_unreadable_input_is_refused(tmp_path: Path) -> None:
    with (tmp_path / "lines").open("wb", buffering=0) as file, pytest.raises(InvalidInput):
        await collected(numbered_lines(file.fileno()))

"""Whether a message that is sent again is the stored one, by what the metadata says."""

import pytest

from seqgate.services.ledger.core.content import Comparison, Content, compared

A, B = b"digest-a", b"digest-b"
ZSTD = 3


def whole(digest: bytes = b"", size: int = 5, crc: int | None = 1, compression: int = 0) -> Content:
    return Content(digest, 0, None, compression, False, size, crc)


def batch(
    count: int, digest: bytes = b"", size: int = 50, crc: int | None = 1, place: int = 0
) -> Content:
    return Content(digest, place, count, 0, False, size, crc)


def large(digest: bytes = b"", size: int = 500, crc: int | None = 1) -> Content:
    return Content(digest, 0, None, 0, True, size, crc)


@pytest.mark.parametrize(
    ("given", "stored", "outcome"),
    [
        # by digests, however the messages are compressed and cut
        (whole(A), whole(A, size=9, crc=2, compression=ZSTD), Comparison.SAME),
        (whole(A), whole(B), Comparison.DIFFERS),
        (whole(A), large(A), Comparison.SAME),
        (large(A), large(B), Comparison.DIFFERS),
        (batch(1, A), whole(B), Comparison.DIFFERS),
        # by checksums and sizes
        (whole(), whole(A), Comparison.SAME),
        (whole(A), whole(crc=2), Comparison.DIFFERS),
        (whole(size=6), whole(), Comparison.DIFFERS),
        (whole(size=6, crc=None), whole(), Comparison.DIFFERS),
        (whole(crc=None), whole(), Comparison.NOT_COMPARED),
        (whole(compression=ZSTD), whole(compression=ZSTD), Comparison.SAME),
        (whole(compression=ZSTD), whole(), Comparison.NOT_COMPARED),
        (large(), large(A), Comparison.SAME),
        (large(), large(crc=2), Comparison.DIFFERS),
        (large(), whole(), Comparison.NOT_COMPARED),
        (batch(3), batch(3), Comparison.SAME),
        (batch(3), batch(3, crc=2), Comparison.NOT_COMPARED),  # which of the three?
        (batch(3), batch(3, size=51), Comparison.NOT_COMPARED),
        (batch(1), batch(1, crc=2), Comparison.DIFFERS),
        (batch(3), batch(4), Comparison.NOT_COMPARED),
        (batch(1), whole(), Comparison.NOT_COMPARED),
        (batch(3, place=1), batch(3, place=2), Comparison.NOT_COMPARED),
        (batch(3, A, place=1), batch(3, A, place=2), Comparison.SAME),
    ],
)
def test_contents_are_compared_as_far_as_they_are_known(
    given: Content, stored: Content, outcome: Comparison
) -> None:
    assert compared(given, stored) is outcome
    assert compared(stored, given) is outcome

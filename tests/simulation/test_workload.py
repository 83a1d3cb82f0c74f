"""The reactions of applications in histories."""

from collections.abc import Mapping

import pytest

from tests.simulation.system.seen import NUMBER, Sent
from tests.simulation.system.workload import COMPRESSED_LETTER, LETTER_OF, sent_as

SENT = Sent(7, "t/n/topic", "p", 0, None, "red", 0.0, size_bytes=10)
OF_CHUNK = {NUMBER: "7", LETTER_OF: "2 of 3"}


@pytest.mark.parametrize(
    ("payload", "properties", "is_sent"),
    [
        (b"<7>.......", {NUMBER: "7"}, True),
        (b"<7>......", {NUMBER: "7"}, False),
        (b"....", OF_CHUNK, True),
        (b"....!", OF_CHUNK, False),
        (b"\x28\xb5\x2f", OF_CHUNK | {COMPRESSED_LETTER: "ZSTD"}, True),
    ],
)
def test_a_dead_letter_may_be_a_chunk_without_its_predecessors(
    payload: bytes, properties: Mapping[str, str], is_sent: bool
) -> None:
    assert sent_as({7: SENT}, payload, properties) == (7, is_sent)

"""Services stay within their memory budgets under every kind of load."""

from collections.abc import Awaitable, Callable, Mapping
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.integration.services import Services, running
from tests.support.depth import some_of
from tests.support.memory_loads import (
    MIB,
    delayed_messages,
    flooding_producers,
    idle_streams,
    peak_of,
    stopped_consumer,
)

SMALL = {
    "SEQGATE_DISPATCHER_CACHE_BYTES_MAX": str(2 * MIB),
    "SEQGATE_DISPATCHER_CACHES_BYTES_MAX": str(4 * MIB),
    "SEQGATE_DISPATCHER_DELAYED_MAX": "5000",
    "SEQGATE_DISPATCHER_STREAM_BYTES_MAX": str(2 * MIB),
    "SEQGATE_DISPATCHER_STREAMS_BYTES_MAX": str(4 * MIB),
    "SEQGATE_LEDGER_UNANSWERED_BYTES_MAX": str(8 * MIB),
    "SEQGATE_LEDGER_GROUP_BYTES_MAX": str(2 * MIB),
}

TOPIC = "public/default/memory"


@pytest.mark.parametrize(
    ("grown_max_bytes", "load"),
    some_of(
        [
            # 100 MiB are delivered. An entry is held up to three times while it is sent, and gRPC
            # buffers one message of each stream.
            pytest.param(
                {"dispatcher": 60 * MIB},
                lambda services: stopped_consumer(services, TOPIC, messages=100, size_bytes=MIB),
                id="a consumer stops reading",
            ),
            # 160 MiB are published. gRPC's own buffers come on top: a window and one message for
            # each of 20 streams.
            pytest.param(
                {"ledger": 110 * MIB},
                lambda services: flooding_producers(
                    services, TOPIC, producers=20, messages=8, size_bytes=MIB
                ),
                id="producers flood",
            ),
            # 1.2 kB each would be 35 MiB; the budget admits 5,000 of them.
            pytest.param(
                {"dispatcher": 30 * MIB},
                lambda services: delayed_messages(services, TOPIC, messages=30_000),
                id="messages are delayed",
            ),
            pytest.param(
                {"ledger": 60 * MIB, "dispatcher": 60 * MIB},
                lambda services: idle_streams(services, TOPIC, streams=200),
                id="producers and consumers are idle",
            ),
        ],
        every=2,
    ),
)
async def test_a_service_stays_within_its_memory_budgets(
    tmp_path: Path,
    grown_max_bytes: Mapping[str, int],
    load: Callable[[Services], Awaitable[None]],
) -> None:
    async with running(tmp_path / "stack", **SMALL) as services:
        with ExitStack() as measuring:
            peaks = {
                process: measuring.enter_context(peak_of(services, process))
                for process in grown_max_bytes
            }
            await load(services)
        for process, peak in peaks.items():
            assert peak.grown_bytes < grown_max_bytes[process], process

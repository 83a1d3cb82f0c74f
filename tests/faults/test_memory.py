"""Services stay within their memory budgets under every kind of load."""

from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from tests.integration.services import Services, running
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
    ("process", "load", "grown_max_bytes"),
    [
        # 100 MiB are delivered. An entry is held up to three times while it is sent, and gRPC
        # buffers one message of each stream.
        (
            "dispatcher",
            lambda services: stopped_consumer(services, TOPIC, messages=100, size_bytes=MIB),
            60 * MIB,
        ),
        # 160 MiB are published. gRPC's own buffers come on top: a window and one message for each
        # of 20 streams.
        (
            "ledger",
            lambda services: flooding_producers(
                services, TOPIC, producers=20, messages=8, size_bytes=MIB
            ),
            110 * MIB,
        ),
        # 1.2 kB each would be 35 MiB; the budget admits 5,000 of them.
        (
            "dispatcher",
            lambda services: delayed_messages(services, TOPIC, messages=30_000),
            30 * MIB,
        ),
        ("ledger", lambda services: idle_streams(services, TOPIC, streams=200), 60 * MIB),
        ("dispatcher", lambda services: idle_streams(services, TOPIC, streams=200), 60 * MIB),
    ],
    ids=[
        "a consumer stops reading",
        "producers flood",
        "messages are delayed",
        "producers are idle",
        "consumers are idle",
    ],
)
async def test_a_service_stays_within_its_memory_budgets(
    tmp_path: Path,
    process: str,
    load: Callable[[Services], Awaitable[None]],
    grown_max_bytes: int,
) -> None:
    async with running(tmp_path / "stack", **SMALL) as services:
        with peak_of(services, process) as peak:
            await load(services)
        assert peak.grown_bytes < grown_max_bytes

"""What a client says while it is not connected, and how long it waits."""

import asyncio
import logging

import pytest

from seqgate.client import connect
from seqgate.client._reconnecting import (
    BACKOFF_FIRST_S,
    BACKOFF_MAX_S,
    LOG_INTERVAL_S,
    Reconnecting,
)
from seqgate.dev.ports import free_ports
from seqgate.errors import InUseError, UnavailableError
from tests.simulation.ground import run

LOST = UnavailableError("it is gone", reason="DRAINING")


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records]


def test_an_outage_is_logged_at_once_then_rarely_and_when_it_is_over(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "seqgate.client")

    async def outage() -> None:
        it = Reconnecting("producer 'p'")
        it.succeeded()
        assert not lines(caplog)
        began_s = asyncio.get_running_loop().time()
        while asyncio.get_running_loop().time() - began_s < 2.5 * LOG_INTERVAL_S:
            wait_s = it.failed(LOST)
            assert BACKOFF_FIRST_S / 2 <= wait_s <= BACKOFF_MAX_S
            await asyncio.sleep(wait_s)
        it.succeeded()
        it.succeeded()
        it.failed(LOST)

    run(outage, seed=1)
    lost = "producer 'p' is not connected, and tries again: it is gone"
    first, second, third, over, again = lines(caplog)
    assert [first, second, third, again] == [lost] * 4
    assert over.startswith("producer 'p' is connected again after ")
    assert "attempts in 7" in over


async def test_a_service_decides_how_long_to_wait_at_least_and_clients_do_not_return_together() -> (
    None
):
    error = UnavailableError("busy", retry_after_s=60)
    waits_s = [Reconnecting("it").failed(error) for _ in range(100)]
    assert 60 <= min(waits_s) < 65 < 85 < max(waits_s) <= 90


async def test_the_error_of_a_refused_connection_is_that_of_the_service() -> None:
    it = Reconnecting("it")
    refusal = InUseError("the name is in use")
    it.failed(refusal)
    assert it.given_up("ledger:1", 30) is refusal
    assert "no answer from ledger:1 within 30 s" in str(Reconnecting("it").given_up("ledger:1", 30))


async def test_an_unavailable_service_is_named_with_the_attempts() -> None:
    (port,) = free_ports(1)
    address = f"127.0.0.1:{port}"
    async with connect(address, dispatcher=address) as client:
        for opened in (
            client.producer("t", open_timeout_s=0.5),
            client.consumer("t", "s", open_timeout_s=0.5),
        ):
            with pytest.raises(
                UnavailableError, match=f"no connection to {address}: .* attempts? in"
            ):
                async with opened:
                    pass

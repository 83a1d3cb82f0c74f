"""The lease on a subscription's cursor: renewed in time, or lost."""

import asyncio
from collections.abc import Callable
from typing import Final

import structlog

from services.dispatcher.cursor.tenure import Tenure
from services.dispatcher.ports import SubscriptionNotFound
from services.errors import DomainError, Fenced

log = structlog.get_logger()

RENEWALS: Final = 6
"""How often a lease is renewed in its time."""


async def keep(
    tenure: Tenure, name: str, lease_s: float, lost_s: float, stop: Callable[[DomainError], None]
) -> None:
    """Renew a lease that was just acquired; when it is lost, or may be, stop everything. `lost_s`
    is until when it is ours, by the loop's clock: it began not later than it was asked for, however
    late the answer came."""
    loop = asyncio.get_running_loop()
    while True:
        await asyncio.sleep(min(lease_s / RENEWALS, max(0.0, lost_s - loop.time())))
        asked_s = loop.time()
        try:
            async with asyncio.timeout_at(lost_s):
                await tenure.renew()
            lost_s = asked_s + lease_s
        except (Fenced, SubscriptionNotFound) as error:
            stop(error)
            return
        except (DomainError, TimeoutError) as error:
            log.warning("lease not renewed", subscription=name, why=str(error))
            if loop.time() >= lost_s:
                stop(Fenced("the lease on the subscription was lost"))
                return

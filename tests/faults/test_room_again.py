"""The disk fills up under load, and has space again later. The ledger is not restarted, and needs
no operator."""

import asyncio
import resource
from functools import partial

from tests.faults.world import World
from tests.support.waiting import eventually

MESSAGES = 120


async def test_a_ledger_resumes_by_itself_when_its_disk_has_space(world: World, seed: int) -> None:
    application, stack = world.application(seed), world.stack
    await application.publish(MESSAGES)
    await application.check_state()

    def stored() -> int:
        return sum(not each.duplicate for each in application.history.acknowledged)

    def refused(before: int) -> bool:
        return log.read_text().count("append failed") > before

    pid, log = world.pid("ledger"), stack.folder / "logs" / "ledger.log"
    limits = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    for _ in range(3):
        # SQLite's next write fails: Python ignores SIGXFSZ, so that the kernel answers EFBIG.
        journal = stack.folder / "ledger" / "ledger.db-wal"
        before, refusals = stored(), log.read_text().count("append failed")
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (journal.stat().st_size, limits[1]))
        publishing = asyncio.create_task(application.publish(MESSAGES))
        try:
            await eventually(partial(refused, refusals))
            assert stored() == before
            assert not publishing.done()
        finally:
            resource.prlimit(pid, resource.RLIMIT_FSIZE, limits)
        await publishing
        await application.check_log()
    assert world.pid("ledger") == pid
    await application.check_state()

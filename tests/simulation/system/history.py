"""One history: everything starts, is used and disturbed for a while; then faults stop, and all
pending work must finish."""

import asyncio
import signal
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Final

from tests.simulation.ground import Network, installed, run, virtual_loop
from tests.simulation.system.administrators import Administrator, explain_stuck
from tests.simulation.system.databases import databases
from tests.simulation.system.faults import Faults
from tests.simulation.system.swarm import Swarm, draw
from tests.simulation.system.workload import (
    consume,
    publish,
    publishing,
    read,
    subscribed,
)
from tests.simulation.system.world import World, listening_to_services, patched

SETTLE_MAX_S: Final = 400.0
"""The limit for pending work to finish after faults stop, in virtual seconds."""

LOOK_S: Final = 0.5
"""The interval of checks for that, in virtual seconds."""

LIMIT_S: Final = 3_600.0
"""The limit of a whole history, in virtual seconds."""

PROCESSOR_MAX_S: Final = 120.0
"""The limit of a history's processor time. The longest take a few seconds; a loop that never lets
virtual time pass would run forever."""


class _Endless(KeyboardInterrupt):
    """The history exceeded its processor time. No Exception, because services contain those."""


@dataclass
class Outcome:
    """The result of a history."""

    seed: int
    violations: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    tail: Sequence[str] = ()
    digest: str = ""
    virtual_s: float = 0.0
    handles: int = 0
    swarm: Swarm | None = None


def play(seed: int, swarm: Swarm | None = None) -> Outcome:
    """Play a seed's history."""
    swarm = swarm or draw(seed)
    outcome = Outcome(seed, swarm=swarm)
    stack = ExitStack()

    async def main() -> None:
        loop = virtual_loop()
        network = Network(loop, loop.random)
        world = World(swarm, loop, network)
        with stack:
            stack.enter_context(installed(network))
            stack.enter_context(patched(world))
            if swarm.has("sqlite"):
                world.databases = stack.enter_context(databases(Random(f"sqlite {seed}")))
            try:
                await _happen(world)
            finally:
                world.is_over = True
                outcome.violations = world.seen.violations
                outcome.counts = world.seen.counts
                outcome.tail = list(world.seen.tail)
                outcome.digest = world.seen.digest
                outcome.virtual_s = loop.now
                outcome.handles = loop.handles

    try:
        with listening_to_services(), _at_most(PROCESSOR_MAX_S):
            run(main, seed=seed, limit_s=LIMIT_S)
    except _Endless as endless:
        frames = traceback.extract_tb(endless.__traceback__)[-3:]
        where = ", ".join(f"{frame.name} ({frame.filename}:{frame.lineno})" for frame in frames)
        outcome.violations = [*outcome.violations, f"ENDLESS: {where}"]
    finally:
        stack.close()  # an interrupted history did not leave it
    return outcome


@contextmanager
def _at_most(processor_s: float) -> Iterator[None]:
    """Raise _Endless after this much processor time."""

    def over(signal_number: int, frame: object) -> None:
        raise _Endless

    before = signal.signal(signal.SIGVTALRM, over)
    signal.setitimer(signal.ITIMER_VIRTUAL, processor_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


async def _happen(world: World) -> None:
    rng, swarm = world.rng, world.swarm
    world.start_services()
    for number in range(swarm.producers):
        application = publishing(world, number)
        world.publishings.append(application)
        name = f"app-{number}"
        chance = Random(rng.getrandbits(64))
        world.run(
            name,
            lambda application=application, chance=chance: publish(world, application, chance),  # type: ignore[misc]
        )
    for number in range(swarm.subscriptions):
        of = subscribed(world, number)
        world.subscribeds.append(of)
        world.describe(of)
        for each in range(of.consumers):
            name = f"{of.name}-c{each}"
            chance = Random(rng.getrandbits(64))
            world.run(
                name,
                lambda of=of, name=name, chance=chance: consume(world, of, name, chance),  # type: ignore[misc]
            )
    if swarm.has("readers"):
        chance = Random(rng.getrandbits(64))
        world.run("reader", lambda: read(world, world.topics[0], chance))
    administrator = Administrator(world, Random(rng.getrandbits(64)))
    world.run("administrator", administrator.go_on)
    faults = Faults(world)
    going_wrong = asyncio.create_task(faults.go_on())
    looking = asyncio.create_task(world.look_inside())
    try:
        async with asyncio.timeout(swarm.seconds):
            await world.failed.wait()
    except TimeoutError:
        pass
    _end(going_wrong)
    if not world.seen.violations:
        faults.end()
        world.calm_down()
        await _settle(world)
    _end(looking)
    if not world.seen.violations:
        _check_end(world)


def _end(task: asyncio.Task[None]) -> None:
    """Cancel a background task. Raise its error if it failed, since its work then stopped early."""
    if not task.cancel():
        task.result()


async def _settle(world: World) -> None:
    until_s = world.loop.now + SETTLE_MAX_S
    while world.loop.now < until_s and not world.seen.violations:
        missing = unsettled(world)
        if not missing:
            return
        await asyncio.sleep(LOOK_S)
    if not world.seen.violations and not world.is_cramped:
        found = unsettled(world)
        await explain_stuck(world)
        for each in found:
            world.seen.violate("STUCK", each)


def unsettled(world: World) -> list[str]:
    """Describe all pending work."""
    missing = [
        f"{each.name} has {each.left} messages to send, and pending "
        f"{[sent.number for sent in each.todo]}"
        for each in world.publishings
        if not each.is_done
    ]
    if any(each.is_alive for each in world.silent_streams):
        missing.append("a silent stream does not end")
    for of in world.subscribeds:
        subscription = world.seen.subscription(of.topic, of.name)
        log = world.seen.log(of.topic)
        waiting = [
            each
            for each in subscription.waiting
            if not log.is_trimmed(each)
            and not world.seen.is_forsaken(of.topic, each)
            and not (each in subscription.kept_back and not log.is_whole(log.at[each]))
        ]
        back = [each for each in subscription.returns if not log.is_trimmed(each)]
        if back:
            missing.append(f"{of.topic} {of.name} ({of.type.name}) does not redeliver {back[:5]}")
        if subscription.is_redriving:
            missing.append(f"{of.topic} {of.name} does not end a redrive")
        if waiting:
            missing.append(f"{of.topic} {of.name} ({of.type.name}) does not deliver {waiting[:5]}")
    return missing


def _check_end(world: World) -> None:
    for topic, state in world.stores.state.states.items():
        world.checker.folds.check(str(topic), state, is_all=True)

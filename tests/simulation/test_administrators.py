"""Administrators of histories undo their changes at the end."""

from contextlib import suppress
from random import Random
from types import SimpleNamespace
from typing import Any

from grpc import StatusCode, aio

from tests.simulation.ground import OutOfTime, run
from tests.simulation.system.administrators import Administrator

MADE, NEVER_MADE = "t/n/topic", "t/n/never-made"


def test_an_administrator_undoes_its_changes_despite_a_missing_topic() -> None:
    done = set()

    class Acting(Administrator):
        async def _set_policy(self, services: Any, topic: str, **values: Any) -> None:
            done.add(("policy", topic))

        async def _set_filters(self, services: Any, topic: str, *_: Any, **how: Any) -> None:
            if topic == NEVER_MADE:
                raise aio.AioRpcError(StatusCode.NOT_FOUND, aio.Metadata(), aio.Metadata())
            done.add(("filters", topic))

        async def _release(self, services: Any) -> None:
            done.add(("keys", ""))

        async def _try(self, act: Any) -> bool:
            with suppress(aio.AioRpcError):
                await act(None)
                return True
            return False

    async def go_on() -> None:
        async def until_quiet() -> None:
            return

        swarm = SimpleNamespace(has=lambda _: False, seconds=1.0, more={})
        world: Any = SimpleNamespace(
            swarm=swarm,
            publishings=[],
            subscribeds=["one"],
            until_quiet=until_quiet,
            is_quiet=True,
            is_over=False,
        )
        administrator = Acting(
            world,
            Random(0),
            policies={MADE: {"max_producers": 1}},
            has_filters={(MADE, "s"), (NEVER_MADE, "s")},
        )
        await administrator.go_on()

    with suppress(OutOfTime):
        run(go_on, seed=0, limit_s=60)
    assert done == {("policy", MADE), ("filters", MADE), ("keys", "")}

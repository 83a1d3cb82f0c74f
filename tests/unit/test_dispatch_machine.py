"""The subscription's machine, led through its world step by step (tests/simulation/dispatch.py)."""

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.simulation.dispatch import World
from tests.support.depth import times

ENTRIES_MAX = 60


class Dispatching(RuleBasedStateMachine):
    """Consumers join and leave, work and fail. The kind of each step is chosen here; its subject is
    drawn from the world's seed."""

    @initialize(seed=st.integers(0, 2**20))
    def begin(self, seed: int) -> None:
        self.world = World(seed)

    @precondition(lambda self: len(self.world.log) < ENTRIES_MAX)
    @rule(count=st.integers(1, 6))
    def some_are_published(self, count: int) -> None:
        self.world.publish(count)

    @precondition(lambda self: len(self.world.peers) < 4)
    @rule()
    def somebody_connects(self) -> None:
        self.world.join()

    @precondition(lambda self: self.world.pending)
    @rule()
    def an_effect_is_carried_out(self) -> None:
        self.world.complete(self.world.random.choice(self.world.pending))

    @rule()
    def everything_comes_to_rest(self) -> None:
        self.world.settle()

    @rule(ms=st.sampled_from([1, 20, 100, 400]))
    def time_goes_by(self, ms: int) -> None:
        self.world.advance(ms)

    @precondition(lambda self: self.world.peers)
    @rule(messages=st.integers(1, 20))
    def somebody_takes_more(self, messages: int) -> None:
        self.world.permit(self.world.random.choice(list(self.world.peers)), messages)

    @precondition(lambda self: self.world.peers)
    @rule(dies=st.booleans())
    def somebody_goes(self, dies: bool) -> None:
        number = self.world.random.choice(list(self.world.peers))
        (self.world.leave if dies else self.world.close)(number)

    @precondition(lambda self: self.world.where)
    @rule(what=st.sampled_from(["settle", "negative_acknowledge", "give back", "renew"]))
    def somebody_answers(self, what: str) -> None:
        number, held = self.world.random.choice(list(self.world.where.values()))
        match what:
            case "settle":
                self.world.settle_some(number)
            case "negative_acknowledge":
                self.world.negative_acknowledge(number, [held])
            case "give back":
                self.world.give_back(number, [held])
            case _:
                self.world.renew(number, [held])

    @precondition(lambda self: self.world.filters)
    @rule()
    def filters_fail_or_change(self) -> None:
        self.world.change_filters()

    @rule()
    def dead_tokens_are_used(self) -> None:
        self.world.stale()

    @rule()
    def the_machine_is_lost(self) -> None:
        self.world.restart()

    @invariant()
    def promises_are_kept(self) -> None:
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.settle()
            self.world.drain()


TestDispatching = Dispatching.TestCase
TestDispatching.settings = settings(
    max_examples=times(quick=40, full=100),
    stateful_step_count=20,
    derandomize=True,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)

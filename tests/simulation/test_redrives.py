"""Histories of one machine with dead letters that come back, with a crash at any point.

Consumers fail messages until they are dead-lettered, their keys are held, and letters are redriven,
mended and discarded; the process dies between any two effects, and between an effect and its
outcome. Every message is acknowledged by a consumer once and no more than that, in the order of its
key, unless its letter is discarded: then it is never delivered again.
"""

from collections import Counter
from collections.abc import Iterable
from random import Random

import pytest

from seqgate.services.dispatcher.core.effects import (
    AfterDeadLetter,
    DeadLetter,
    Deliver,
    Delivery,
    Effect,
    Entry,
    ForgetKey,
    Gap,
    KeyState,
    Options,
    Passed,
    Persist,
    Read,
    Record,
    Revoke,
    Scan,
)
from seqgate.services.dispatcher.core.lane import Chunk
from seqgate.services.dispatcher.core.positions import Acknowledged
from seqgate.services.dispatcher.core.selectors import Ring
from seqgate.services.dispatcher.core.settling import Durable
from seqgate.services.dispatcher.core.subscription import Ack, Nack, Subscription
from seqgate.types import Position
from tests.support.depth import times

KEYS = (b"a", b"b", b"c")
STEPS = 120
PAGE = 4


class World:
    """A log, the durable state of a subscription, and a machine that starts from it.

    Attributes:
        letters: the messages whose letters are not redriven.
        mending: those whose mend has begun and is not completed.
        discarded: those whose letters were discarded.
        lives: how often they were redriven.
        returns: those on their way back, and how often deliveries of them failed since.
        numbered: numbered letters of unsettled messages, and whether they are published.
        large: large letters on their way, by their first chunk: the attempt, and the last chunk
            once it is numbered.
        dead: by a key that is held, the messages whose letters hold it.
        acknowledged: how often a consumer's acknowledgement of a message became durable.
        holding: by key, the first message that it is held behind, as its letter is neither redriven
            and acknowledged, nor discarded.
    """

    def __init__(self, random: Random, largest: int) -> None:
        """`largest` is the number of chunks of a large message; 1: there is none."""
        self.random = random
        self.options = Options(
            redeliveries_max=random.randint(0, 1),
            after_dead_letter=AfterDeadLetter.HOLD,
            retry_first_ms=0,
            retry_max_ms=0,
            key_parked_max=random.choice((1, 2, 1_000)),
            consumer_parked_max=random.choice((2, 6, 20_000)),
        )
        self.log: list[Entry] = []
        for number in range(random.randint(4, 14)):
            self.append(number, random.choice(KEYS), random.choice((1, 1, 1, largest)))
        self.done: set[Position] = set()
        self.attempts: dict[Position, int] = {}
        self.keys: dict[bytes, KeyState] = {}
        self.letters: set[Position] = set()
        self.mending: set[Position] = set()
        self.discarded: set[Position] = set()
        self.lives: Counter[Position] = Counter()
        self.returns: dict[Position, int] = {}
        self.numbered: dict[Position, bool] = {}
        self.large: dict[Position, tuple[str, Position | None]] = {}
        self.dead: dict[bytes, set[Position]] = {}
        self.acknowledged: Counter[Position] = Counter()
        self.holding: dict[bytes, Position] = {}
        self.restart()

    def append(self, number: int, key: bytes, chunks: int) -> None:
        """Append a message."""
        for each in range(chunks):
            chunk = Chunk(f"{number}", each == chunks - 1, each) if chunks > 1 else None
            self.log.append(Entry(Position(1, len(self.log)), key, chunk=chunk))

    def entry(self, position: Position) -> Entry:
        return self.log[position.entry_id]

    def whole(self, position: Position) -> list[Position]:
        """All entries of a message."""
        chunk = self.entry(position).chunk
        if chunk is None:
            return [position]
        return [
            each.position
            for each in self.log
            if each.chunk is not None and each.chunk.attempt == chunk.attempt
        ]

    def returned(self, positions: Iterable[Position]) -> list[Entry]:
        """Messages as their letters are: an attempt of its own for each life."""
        found = []
        for position in positions:
            entry, lives = self.entry(position), self.lives[position]
            if entry.chunk is not None:
                chunk = entry.chunk._replace(attempt=f"{entry.chunk.attempt} {lives}")
                entry = entry._replace(chunk=chunk)
            found.append(entry)
        return found

    def restart(self) -> None:
        self.pending: list[Effect] = []
        self.held: dict[Position, Delivery] = {}
        self.settling: set[int] = set()
        done = Acknowledged(None)
        for position in self.done:
            done.add(position)
        self.sub = Subscription(
            self.options,
            Ring(),
            Durable(
                done,
                attempts=self.attempts | {each: n for each, n in self.returns.items() if n},
                keys=self.keys,
                doomed=frozenset(self.numbered),
                returned=frozenset(self.returns),
                large_letters={attempt: first for first, (attempt, _) in self.large.items()},
            ),
        )
        self.do(self.sub.join(1, name="c", now_ms=0))
        self.do(self.sub.permit(1, 1_000, 0))
        if self.returns:
            self.do(self.sub.redrive(self.returned(self.returns), 0))

    def do(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Deliver(_, deliveries):
                    for each in deliveries:
                        self.delivered(each)
                case Revoke(_, numbers):
                    for position, each in list(self.held.items()):
                        if each.delivery in numbers:
                            del self.held[position]
                case Persist() | Record() | DeadLetter() | Read() | Scan():
                    self.pending.append(effect)
                case ForgetKey(key):
                    self.forget(key)
                case Passed():
                    raise AssertionError("a message is passed")

    def forget(self, key: bytes) -> None:
        self.keys.pop(key, None)
        own = (each for each in self.numbered if self.entry(each).key == key)
        self.dead[key] = {self.whole(each)[0] for each in own}  # these hold it again

    def hold(self, effect: DeadLetter) -> None:
        """Make the state of a letter's key durable."""
        position, key = effect.position, effect.key
        self.keys[key] = effect.state or KeyState(effect.after, Gap(position, effect.attempts))
        self.holding[key] = min(position, self.holding.get(key, position))
        self.dead.setdefault(key, set()).add(self.whole(position)[0])
        if self.keys[key].has_more:
            assert len(self.dead[key]) > 1, f"{position} makes an operator release its key"

    def number(self, effect: DeadLetter) -> None:
        """Number a letter, in one change with the record of its large message."""
        self.numbered[effect.position] = False
        if (large := effect.large) is not None:
            last = effect.position if large.is_last else None
            self.large[large.first] = large.attempt, last

    def publish(self, position: Position) -> None:
        """Publish a letter; a chunk after those before it."""
        assert position not in self.letters
        chunks = self.whole(position)
        assert self.letters.issuperset(chunks[: chunks.index(position)]), "it follows no chunk"
        self.letters.add(position)
        self.numbered[position] = True

    def delivered(self, delivery: Delivery) -> None:
        position = delivery.position
        assert position not in self.numbered, "it is on its way to the dead letter topic"
        assert position not in self.done or position in self.returns, "it is settled"
        assert not self.acknowledged[position], "it is acknowledged already"
        assert position not in self.mending, "its letter is being mended"
        assert position not in self.discarded, "its letter is discarded"
        key = self.entry(position).key
        assert key is not None
        holding = self.holding.get(key, position)
        is_rest = position in self.whole(holding)
        assert position <= holding or is_rest, f"{position} is held behind {holding}"
        limit = self.options.redeliveries_max
        assert limit is not None
        assert delivery.attempts <= limit
        for each in self.log[: position.entry_id]:
            if each.key == self.entry(position).key:
                known = self.acknowledged[each.position] or each.position in self.held
                known = known or each.position in self.discarded
                assert known, f"{position} overtakes {each.position}"
        self.held[position] = delivery

    def complete(self, effect: Effect, *, dies: bool) -> None:
        """Perform an effect; if the process dies, its outcome is lost."""
        self.pending.remove(effect)
        outcome: list[Effect] = []
        match effect:
            case Read(after):
                start = 0 if after is None else after.entry_id + 1
                page = self.log[start : start + self.random.randint(1, PAGE)]
                if page and not dies:
                    outcome = self.sub.read(page, 0)
            case Scan(at, after, limit):
                start = at.entry_id if at else 0 if after is None else after.entry_id + 1
                if not dies:
                    outcome = self.sub.scanned(self.log[start : start + limit], 0)
            case Record(recorded):
                for position, failed, _ in recorded:
                    if position in self.returns:
                        self.returns[position] = failed
                    elif position not in self.done:
                        self.attempts[position] = failed
                if not dies:
                    outcome = self.sub.recorded(0)
            case DeadLetter(position, key):
                self.hold(effect)
                if position not in self.numbered:
                    self.number(effect)
                    if dies and self.random.random() < 0.5:
                        return
                if not self.numbered[position]:
                    self.publish(position)
                if not dies:
                    outcome = self.sub.dead_lettered(position, key, 0)
            case Persist():
                outcome = self.persist(effect, dies=dies)
        self.do(outcome)

    def persist(self, effect: Persist, *, dies: bool) -> list[Effect]:
        # First the returns, in one change with the keys held behind them; then the cursor.
        for position in effect.entries:
            if position not in self.numbered:
                self.acknowledged[position] += 1
                assert self.acknowledged[position] == 1
            if position in self.returns:
                del self.returns[position]
                if position not in self.numbered:
                    self.resume(position)
                if (key := self.sub.held_behind(position)) is not None:
                    self.forget(key)
                self.numbered.pop(position, None)
            else:
                self.done.add(position)
                self.attempts.pop(position, None)
                self.numbered.pop(position, None)
            self.held.pop(position, None)
            for first in [each for each, (_, last) in self.large.items() if last == position]:
                del self.large[first]
        return [] if dies else self.sub.persisted(None, 0)

    def resume(self, position: Position) -> None:
        """A message holds its key no more."""
        key = self.entry(position).key
        assert key is not None
        if self.holding.get(key) == position:
            del self.holding[key]

    def chosen(self, letters: set[Position]) -> list[Position]:
        """One of these letters, whole, whose message is durably acknowledged, and not on its way
        back; empty: there is none."""
        ready = {
            each for each in letters if each in self.sub.acknowledged and each not in self.returns
        }
        whole = [each for each in sorted(ready) if ready.issuperset(self.whole(each))]
        return self.whole(self.random.choice(whole)) if whole else []

    def redrive(self, *, dies: bool) -> None:
        positions = self.chosen(self.letters - self.mending)
        if positions:
            self.letters.difference_update(positions)
            self.returns |= dict.fromkeys(positions, 0)
            self.lives.update(positions)
            if not dies:
                self.do(self.sub.redrive(self.returned(positions), 0))

    def mend(self, *, dies: bool) -> None:
        """Begin a mend, and complete it unless the process dies, or complete an interrupted one.
        The machine knows nothing of it."""
        positions = self.chosen(self.letters)
        if len(positions) == 1:
            self.mending.update(positions)
            if not dies:
                self.mending.difference_update(positions)

    def discard(self, *, dies: bool) -> None:
        """Discard a letter, in one change with the key that is held behind it."""
        positions = self.chosen(self.letters - self.mending)
        if positions:
            key = self.entry(positions[0]).key
            assert key is not None
            self.letters.difference_update(positions)
            self.discarded.update(positions)
            self.resume(positions[0])
            for position in positions:
                if (held := self.sub.held_by(position, key)) is not None:
                    self.forget(held)
            if not dies:
                self.do(self.sub.discarded([(each, key) for each in positions], 0))

    def release(self) -> None:
        """Release keys that are held behind several letters once all of these are redriven that can
        be: a numbered letter behind the first waits for the release itself."""
        settling = self.sub.settling
        unsettled = set(settling.unsettled)
        settled = {each for each in self.letters if settling.is_settled(each)}
        whole = (each for each in settled if settled.issuperset(self.whole(each)))
        ready = (each for each in whole if each not in self.returns or each in unsettled)
        waiting = {self.entry(each).key for each in ready}
        for key, state in list(self.sub.keys.items()):
            assert not state.has_more or len(self.dead[key]) > 1, "no operator is needed"
            lane = self.sub.lanes.get(key)
            is_dying = lane is not None and lane.dead is not None  # it would be released, too
            if state.has_more and key not in waiting and not is_dying:
                self.holding.pop(key, None)
                self.do(self.sub.release_key(key, 0))

    def step(self, *, fails: float) -> None:
        random = self.random
        choice = random.random()
        dies = random.random() < 0.08 if fails else False
        if choice < 0.5 and self.pending:
            self.complete(random.choice(self.pending), dies=dies)
        elif choice < 0.65:
            self.redrive(dies=dies)
        elif choice < 0.7:
            self.mend(dies=dies)
        elif choice < 0.72 and fails:
            self.discard(dies=dies)
        elif self.held:
            one = random.choice(list(self.held.values()))
            whole = [self.held[each] for each in self.whole(one.position) if each in self.held]
            if len(whole) < len(self.whole(one.position)):
                return  # its consumer waits for the rest
            numbers = [each.delivery for each in whole]
            if self.settling.isdisjoint(numbers) and random.random() < fails:
                failed = random.choice((whole, whole[:1], [one]))  # refused, lost, timed out
                for each in failed:
                    self.held.pop(each.position)
                nacks = [Nack(each.delivery, 0) for each in failed]
                effects, _ = self.sub.negative_acknowledge(1, nacks, 0)
            else:
                self.settling.update(numbers)
                effects, _, _ = self.sub.acknowledge(1, [*map(Ack, numbers)], 0)
            self.do(effects)
            self.do(self.sub.tick(0))
        if dies:
            self.restart()


@pytest.mark.parametrize("seed", range(times(quick=100, full=20_000)))
def test_redriven_messages_are_acknowledged_once_more_and_in_order(seed: int) -> None:
    random = Random(seed)
    world = World(random, largest=random.choice((1, 1, 3)))
    for _ in range(STEPS):
        world.step(fails=0.4)
    world.restart()
    for _ in range(40 * STEPS):
        world.step(fails=0.0)
        world.release()
        is_settled = len(world.acknowledged) + len(world.discarded) == len(world.log)
        if is_settled and not world.returns:
            break
    left = [each.position for each in world.log if each.position not in world.discarded]
    assert world.acknowledged == Counter(left)
    assert not world.letters
    assert not world.returns
    assert not world.large

"""Dead letters that come back after a start from durable state (shell/live.py)."""

from collections.abc import Sequence
from random import Random

from seqgate.api.ledger.v1.ledger_pb2 import StoredEntry
from seqgate.services.dispatcher.letters.returns import Return
from seqgate.services.dispatcher.ports import EntryCorrupt
from seqgate.types import Position, TopicName
from tests.support.shells import NAME, TOPIC, Shell, Stingy, positions, shell, until, virtually

LETTERS = TopicName.parse("test/shells/letters")
FIRST, SECOND = Position(1, 0), Position(1, 1)


class Damaged(Stingy):
    """A log whose dead letter topic has a damaged entry, until it is repaired."""

    damaged: int = 0  # how often it is still read damaged

    async def fetch(
        self, topic: TopicName, positions: Sequence[Position], *, metadata_only: bool = False
    ) -> Sequence[StoredEntry]:
        if topic == LETTERS and FIRST in positions and self.damaged:
            self.damaged -= 1
            raise EntryCorrupt("damaged", ledger_id=1, entry_id=0)
        return await super().fetch(topic, positions, metadata_only=metadata_only)


async def _brought_back(sub: Shell, log: Damaged) -> None:
    put = {
        f"seqgate.return.{each}": Return(LETTERS, each, 1, 1).to_text() for each in (FIRST, SECOND)
    }
    await sub.cursors.set_properties(TOPIC, NAME, put, (), epoch=None)
    peer = await sub.join(redeliveries_max=3)  # other options: it starts from durable state
    peer.session.permit(9)
    await until(peer, lambda: len(peer.got) == 1)
    assert positions(peer.got) == [1]
    await until(peer, lambda: len(peer.got) == 2)
    assert positions(peer.got) == [1, 0]
    assert not log.damaged


def test_a_damaged_letter_comes_back_once_it_is_repaired() -> None:
    """Until then it holds up nothing but its key."""

    async def main() -> None:
        random = Random(1)
        log = Damaged(random)
        for key in (b"a", b"b"):
            log.append(key)
        log.damaged = 3
        async with shell(random, start=SECOND, log=log) as sub:
            await _brought_back(sub, log)

    virtually(main)


async def _brought_again(sub: Shell) -> None:
    live, back = sub.live, Return(TOPIC, FIRST, 1, 1)
    await sub.cursors.set_properties(
        TOPIC, NAME, {f"seqgate.return.{FIRST}": back.to_text()}, (), epoch=None
    )
    peer = await sub.join(redeliveries_max=3)  # other options: it starts from durable state
    peer.session.permit(9)
    await until(peer, lambda: len(peer.got) == 1)
    live.returns.settled.clear()
    peer.acknowledge(*peer.got)
    await live.returns.settled.wait()
    assert live.machine.is_bringing([FIRST])  # the cursor is yet to have it
    found = live.returns.back(TOPIC, sub.log.entries[0], FIRST, FIRST)
    async with live.changing:
        await live.bring({FIRST: found}, lambda returns: live.returns.begin(returns, "again"))
    await until(peer, lambda: len(peer.got) == 2)
    live.returns.settled.clear()
    peer.acknowledge(peer.got[-1])
    await live.returns.settled.wait()
    assert not live.returns.open


def test_a_message_comes_back_again_while_its_acknowledgement_becomes_durable() -> None:
    """By another letter: a message that died before and after a reset has two."""

    async def main() -> None:
        random = Random(1)
        log = Stingy(random)
        log.append(b"a")
        async with shell(random, start=FIRST, log=log) as sub:
            await _brought_again(sub)

    virtually(main)

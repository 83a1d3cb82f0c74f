"""Defects of deliveries."""

from collections.abc import Iterable
from typing import Any

from seqgate.client._assembler import Assembler, _Context
from seqgate.services.dispatcher.core.effects import Effect, How, Outcome
from seqgate.services.dispatcher.core.flights import Flights
from seqgate.services.dispatcher.core.judging import Judging
from seqgate.services.dispatcher.core.lane import Chunk, Lane
from seqgate.services.dispatcher.core.large import LargeMessages
from seqgate.services.dispatcher.core.subscription import Subscription
from seqgate.services.runtime.silence import Spoken
from seqgate.types import Position
from tests.simulation.defects import defect


@defect("A6", "a chunk without the first one of its message is delivered, and refused for ever")
def deliver_headless_chunks(patch: Any) -> None:
    def is_headless(self: LargeMessages, chunk: Chunk, position: Position) -> bool:
        return False

    patch.setattr(LargeMessages, "is_headless", is_headless)


@defect("A7", "with too many large messages the oldest one is evicted, and counts as failed")
def let_the_oldest_go(patch: Any) -> None:
    def oldest(self: Assembler, grown: _Context) -> _Context:
        return self._oldest()

    give_back = Subscription.give_back

    def fail(
        self: Subscription,
        consumer: int,
        deliveries: Iterable[int],
        now_ms: int,
        *,
        no_room: bool = False,
    ) -> tuple[list[Effect], list[Outcome]]:
        return give_back(self, consumer, deliveries, now_ms)

    patch.setattr(Assembler, "_newest_beside", oldest)
    patch.setattr(Subscription, "give_back", fail)
    patch.setattr("seqgate.client._chunk_deliveries._NOT_NOW", frozenset())


@defect("F5", "the rest of a large message whose start filters rejected waits for ever")
def deliver_rests_of_rejected_messages(patch: Any) -> None:
    deliver_headless_chunks(patch)


@defect("F6", "a delivery revoked at the drain deadline counts as failed")
def count_drained_as_failed(patch: Any) -> None:
    drain_over = Flights.drain_over

    def fail(self: Flights, lane: Lane, now_ms: int) -> None:
        before = sorted(lane.flights.values(), key=lambda flight: flight.position)
        drain_over(self, lane, now_ms)
        for flight in [each for each in before if each.position not in lane.flights][:1]:
            self._settling.record_failure(flight, How.TIMED_OUT, "", now_ms)

    patch.setattr(Flights, "drain_over", fail)


@defect("F7", "in an exclusive subscription, a held key is not released by a message's key")
def release_the_lane_alone(patch: Any) -> None:
    def lane_key(self: Subscription, key: bytes) -> bytes:
        return key

    patch.setattr(Subscription, "lane_key", lane_key)


@defect("F8", "a mended filter does not judge entries that wait because it failed")
def judge_only_what_is_unread(patch: Any) -> None:
    patch.setattr(Judging, "first_failed", lambda self: None)


@defect("F10", "a stream that never sends its first message stays open")
def wait_for_the_first_message_for_ever(patch: Any) -> None:
    patch.setattr(Spoken, "read", lambda self: self._context.read())
    patch.setattr(
        "seqgate.services.runtime.interceptors.spoken", lambda messages, drain, timeout_s: messages
    )

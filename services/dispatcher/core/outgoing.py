"""What is to be done, in the order in which the shell is to do it."""

from services.dispatcher.core.effects import Deliver, Delivery, Effect, Revoke
from services.dispatcher.core.lane import Flight


class Outgoing:
    """Effects of one event. A consumer is told what counts no more before it is sent more, and
    either in one message."""

    def __init__(self) -> None:
        self._effects: list[Effect] = []
        self._revoked: dict[int, list[int]] = {}
        self._deliveries: dict[int, list[Delivery]] = {}

    def add(self, *effects: Effect | None) -> None:
        """Do these, after all that were added before; None: nothing."""
        self._effects += [effect for effect in effects if effect is not None]

    def revoke(self, flight: Flight) -> None:
        """Tell its consumer that a delivery counts no more."""
        self._revoked.setdefault(flight.consumer, []).append(flight.delivery)

    def deliver(self, consumer: int, delivery: Delivery) -> None:
        """Send a consumer this, after all that it was sent before."""
        deliveries = self._deliveries.get(consumer)
        if deliveries is None:
            self._deliveries[consumer] = [delivery]
        else:
            deliveries.append(delivery)

    def tell(self) -> dict[int, list[Delivery]]:
        """Add what consumers are to be told. Returns who is sent what."""
        for consumer, revoked in self._revoked.items():
            self._effects.append(Revoke(consumer, tuple(revoked)))
        sent, self._deliveries, self._revoked = self._deliveries, {}, {}
        for consumer, deliveries in sent.items():
            self._effects.append(Deliver(consumer, tuple(deliveries)))
        return sent

    def take(self) -> list[Effect]:
        """Everything that is to be done."""
        effects, self._effects = self._effects, []
        return effects

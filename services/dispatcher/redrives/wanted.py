"""What a caller wants redriven, and a subscription that does not exist yet."""

from typing import NamedTuple

from seqgate.services.dispatcher.core.positions import Acknowledged
from seqgate.services.dispatcher.cursor.tenure import Tenure
from seqgate.services.dispatcher.filtering.chains import NO_FILTERS, Chain, Chains
from seqgate.services.dispatcher.filtering.chains import Stretch as ChainStretch
from seqgate.services.dispatcher.filtering.trial import Trial
from seqgate.services.dispatcher.letters.graveyard import default_topic
from seqgate.services.dispatcher.letters.listing import Listing
from seqgate.services.dispatcher.letters.record import Selection
from seqgate.services.dispatcher.letters.returns import Returns
from seqgate.services.dispatcher.ports import Ports
from seqgate.services.runtime.requests import Start
from seqgate.types import Position, TopicName


class Wanted(NamedTuple):
    """The messages of a redrive.

    Attributes:
        dead_letter_topic: where its letters are; None: in the one that the subscription uses.
        stretch: the places of the first entry and after the last one, of a replay; None: it is of
            dead letters.
        creates: whether the subscription is created if it does not exist.
    """

    dead_letter_topic: TopicName | None
    selection: Selection
    stretch: tuple[Start, Start] | None
    creates: bool


class Unborn:
    """A subscription that would be created at the end of the log: everything is acknowledged."""

    def __init__(self, topic: TopicName, name: str, last: Position | None, ports: Ports) -> None:
        self.topic = topic
        tenure = Tenure(ports.cursors, topic, name, ports.owner, 0, 0)
        self.returns = Returns(tenure, ports.log)
        self.acknowledged = Acknowledged(last)
        self.chain: Chain = NO_FILTERS
        self._name = name
        self._ports = ports

    def letters(self, dead_letter_topic: TopicName | None) -> Listing:
        """It has none."""
        where = dead_letter_topic or default_topic(self.topic, self._name)
        return Listing(self._ports.log, where, self.topic, self._name)

    def trial(self, chain: Chain) -> Trial:
        """See Live.trial."""
        chains = Chains((ChainStretch(None, chain),))
        return Trial(self._ports.filters.line(), self.topic, chains, {})

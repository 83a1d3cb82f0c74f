"""Who does what: plain values that go from the torture to its applications as JSON."""

from dataclasses import asdict, dataclass, field
from typing import Any, Final

from seqgate.client import (
    AfterDeadLetter,
    Placement,
    SubscriptionOptions,
    SubscriptionType,
)
from tools.torture.shown import Shown

PRODUCER: Final = "producer"
CONSUMER: Final = "consumer"
READER: Final = "reader"


@dataclass(frozen=True, slots=True)
class ProducerRole:
    """Publishes to a topic.

    Attributes:
        name: the role's; also the producer's unless `producer` says otherwise.
        producer: the producer's name: several roles with one name are rivals.
        ids: whether it numbers its messages itself, and sends again after a crash what it has no
            receipt for; otherwise the client does, and what has no receipt is left alone.
        way: "single", "batch", "by_key" or "chunks".
        rate: how many messages a second, about.
        pending_max: how many messages wait for their receipt at most.
        messages_max: after how many it makes no more.
        send_timeout_s: after how long a message without a receipt fails.
    """

    name: str
    topic: str
    producer: str = ""
    ids: bool = True
    way: str = "single"
    rate: float = 30.0
    pending_max: int = 100
    messages_max: int = 50_000
    send_timeout_s: float = 20.0
    keys: int = 20
    bytes_max: int = 200
    large_share: float = 0.0
    delays: bool = False
    home: int = 0
    kind: str = PRODUCER


@dataclass(frozen=True, slots=True)
class ConsumerRole:
    """Takes part in a subscription.

    Attributes:
        type, placement, after: names of SubscriptionType, Placement and AfterDeadLetter.
        redeliveries_max: after so many a message is dead-lettered; None: as options have it.
        refused_share: how many messages it refuses, for no reason.
        is_strict: whether it refuses poison each time.
        through_share: how many messages it acknowledges together with all before; of EXCLUSIVE.
        concurrency: how many messages it works on at a time.
        queue: how many messages are taken before they are handed out.
        assembled_max: of how many large messages a part is held at most.
    """

    name: str
    topic: str
    subscription: str
    type: str = SubscriptionType.KEY_SHARED.name
    placement: str = Placement.CONSISTENT_HASHING.name
    after: str = AfterDeadLetter.CONTINUE.name
    redeliveries_max: int | None = None
    drain_deadline_s: float | None = None
    refused_share: float = 0.02
    is_strict: bool = False
    through_share: float = 0.0
    concurrency: int = 8
    queue: int = 100
    assembled_max: int = 100
    work_s: float = 0.002
    home: int = 0
    kind: str = CONSUMER

    @property
    def subscription_type(self) -> SubscriptionType:
        """What kind of subscription it is."""
        return SubscriptionType[self.type]

    @property
    def options(self) -> SubscriptionOptions:
        """How the subscription behaves."""
        given: dict[str, Any] = {
            "placement": Placement[self.placement],
            "after_dead_letter": AfterDeadLetter[self.after],
        }
        if self.redeliveries_max is not None:
            given["max_redeliveries"] = self.redeliveries_max
        if self.drain_deadline_s is not None:
            given["drain_deadline_s"] = self.drain_deadline_s
        return SubscriptionOptions(**given)


@dataclass(frozen=True, slots=True)
class ReaderRole:
    """Reads a topic from its beginning, and goes on from its journal after a crash."""

    name: str
    topic: str
    home: int = 0
    kind: str = READER


Role = ProducerRole | ConsumerRole | ReaderRole

_KINDS: Final = {PRODUCER: ProducerRole, CONSUMER: ConsumerRole, READER: ReaderRole}


@dataclass(frozen=True, slots=True)
class Application:
    """A process, and what it does.

    Attributes:
        shown: what it shows to services.
        ledgers, dispatchers: where the services are, by `home`: who has the same home prefers the
            same instance.
        journals: the folder of the roles' journals.
    """

    name: str
    ledgers: list[str]
    dispatchers: list[str]
    journals: str
    seed: str
    roles: list[Role] = field(default_factory=list)
    shown: Shown = Shown()

    def to_json(self) -> dict[str, Any]:
        """As a process is told."""
        return asdict(self)

    @staticmethod
    def from_json(given: dict[str, Any]) -> "Application":
        """Back."""
        roles = [_KINDS[each["kind"]](**each) for each in given["roles"]]
        return Application(**{**given, "roles": roles, "shown": Shown(*given["shown"])})

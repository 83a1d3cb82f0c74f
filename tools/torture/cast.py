"""The applications and their roles.

    orders   keyed; single messages and batches by key, some delayed
             workers  KEY_SHARED, three consumers
             strict   KEY_SHARED, AUTO_SPLIT; poison goes to the dead letter topic
             held     KEY_SHARED; after a dead letter its key is held until it is released
             tail     KEY_SHARED; after a dead letter the rest of its key follows it
    events   batches
             pool     SHARED, three consumers, filtered
             audit    EXCLUSIVE, often acknowledged cumulatively
    files    large messages in chunks, and small ones
             loaders  KEY_SHARED
             whole    EXCLUSIVE
    rivals   two producers that take one name from each other; the client numbers messages
             all      SHARED
    trimmed  trimmed up to its reader's position
             tail     KEY_SHARED
    crowd-0 ... any number of topics, each with a producer
             all      SHARED

Each topic has a reader. A process has roles in several topics, so a kill affects them all.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NamedTuple

from seqgate.client import AfterDeadLetter, Placement, SubscriptionOptions, SubscriptionType
from tools.torture.messages import PLACES
from tools.torture.roles import Assignment, ConsumerRole, ProducerRole, ReaderRole, Role, reader_of
from tools.torture.shown import NOTHING, Shown

NAMESPACE: Final = "torture/all"

ORDERS: Final = "orders"
EVENTS: Final = "events"
FILES: Final = "files"
RIVALS: Final = "rivals"
TRIMMED: Final = "trimmed"

TOPICS: Final = (ORDERS, EVENTS, FILES, RIVALS, TRIMMED)

CROWD_RATE: Final = 10.0
"""The messages per second of all producers of the crowd together, for each one of another's."""

TOPICS_MAX: Final = 900
"""The most topics in the crowd: a dispatcher owns `subscriptions_max` subscriptions."""

SINGLE: Final = 2_000
"""The largest single message, in bytes."""

LARGE: Final = 30_000
"""The largest message cut into chunks, in bytes."""


class Cast(NamedTuple):
    """All applications.

    Attributes:
        assignments: by process.
        topics: the topics in use.
        subscriptions: (topic, subscription).
        filtered: subscriptions with a filter, and the place that it accepts. (A filter sees only
            properties shared by a whole batch, so batches are cut by place.)
        holding: subscriptions whose held keys are released.
        trimmed: the topic that is trimmed.
    """

    assignments: dict[str, Assignment]
    topics: list[str]
    subscriptions: list[tuple[str, str]]
    filtered: dict[tuple[str, str], str]
    holding: list[tuple[str, str]]
    trimmed: str

    @property
    def roles(self) -> list[Role]:
        return [role for each in self.assignments.values() for role in each.roles]


def cast(
    journals: Path,
    ledgers: list[str],
    dispatchers: list[str],
    *,
    rate: float,
    is_tiny: bool = False,
    shown: Shown = NOTHING,
    namespace: str = NAMESPACE,
    crowd: int = 0,
) -> Cast:
    """Make all applications. `ledgers` and `dispatchers` are addresses by home; `rate` is in
    messages per second of each producer; `shown` has the applications' credentials; `is_tiny` gives
    consumers tiny queues; `namespace` is the topics' tenant/namespace; `crowd` is the number of
    topics in the crowd."""

    def inside(topic: str) -> str:
        return f"{namespace}/{topic}"

    def assigned(roles: Sequence[Role]) -> Assignment:
        moved = [replace(each, topic=inside(each.topic)) for each in roles]
        return Assignment(ledgers, dispatchers, journals, moved, shown)

    crowded = [f"crowd-{number}" for number in range(crowd)]
    topics = [*TOPICS, *crowded]
    readers = [ReaderRole(reader_of(each), each, place % 2) for place, each in enumerate(topics)]
    assignments = {
        **{
            f"producers-{number}": assigned(
                [
                    *_producers(number, rate),
                    *_crowd_producers(crowded[number::2], rate / (crowd or 1)),
                ]
            )
            for number in range(2)
        },
        **{
            f"consumers-{number}": assigned(
                [*_consumers(number, is_tiny=is_tiny), *_crowd_consumers(crowded[number::3])]
            )
            for number in range(3)
        },
        "readers": assigned(readers),
    }
    subscriptions = {
        (role.topic, role.subscription)
        for each in assignments.values()
        for role in each.roles
        if isinstance(role, ConsumerRole)
    }
    return Cast(
        assignments,
        list(map(inside, topics)),
        sorted(subscriptions),
        filtered={(inside(EVENTS), "pool"): PLACES[0]},
        holding=[(inside(ORDERS), name) for name in ("held", "tail")],
        trimmed=inside(TRIMMED),
    )


def _home(topic: str) -> int:
    return TOPICS.index(topic) % 2


def _producers(number: int, rate: float) -> list[Role]:
    def role(topic: str, share: float = 1.0, **more: Any) -> ProducerRole:
        return ProducerRole(
            f"{topic}-{number}", topic, rate=rate * share, home=_home(topic), **more
        )

    orders = {"way": "by_key"} if number else {"large_share": 0.1, "bytes_max": SINGLE}
    return [
        role(ORDERS, delays=not number, **orders),
        role(EVENTS, way="batch" if number else "single"),
        role(FILES, 0.3, way="chunks", bytes_max=LARGE, large_share=0.5, pending_max=40),
        role(RIVALS, 0.5, producer="rival", ids=False),
        *([] if number else [role(TRIMMED)]),
    ]


def _crowd_producers(topics: Sequence[str], rate: float) -> list[Role]:
    return [
        ProducerRole(f"{topic}-p", topic, rate=CROWD_RATE * rate, home=place % 2)
        for place, topic in enumerate(topics)
    ]


def _crowd_consumers(topics: Sequence[str]) -> list[Role]:
    return [
        ConsumerRole(f"{topic}-c", topic, "all", type=SubscriptionType.SHARED, home=place % 2)
        for place, topic in enumerate(topics)
    ]


def _consumers(number: int, *, is_tiny: bool) -> list[Role]:
    # One refused message stops everything behind it, so refusals are rare.
    alone = {"type": SubscriptionType.EXCLUSIVE, "refused_share": 0.003, "work_s": 0.001}
    shared = SubscriptionType.SHARED

    def role(topic: str, subscription: str, **more: Any) -> ConsumerRole:
        given = {"queue": 5 if is_tiny else 100, "home": number % 2, **more}
        return ConsumerRole(f"{topic}-{subscription}-{number}", topic, subscription, **given)

    def burying(subscription: str, **how: Any) -> ConsumerRole:
        options = SubscriptionOptions(max_redeliveries=3, **how)
        return role(ORDERS, subscription, options=options, is_strict=True, refused_share=0.01)

    roles: list[Role] = [role(ORDERS, "workers"), role(EVENTS, "pool", type=shared)]
    assembled_max = 2 if is_tiny else 100
    if number < 2:
        roles += [
            burying("strict", placement=Placement.AUTO_SPLIT),
            burying("held", after_dead_letter=AfterDeadLetter.HOLD),
            burying("tail", after_dead_letter=AfterDeadLetter.TAIL),
            role(FILES, "loaders", assembled_max=assembled_max),
        ]
    if number == 1:
        roles += [role(RIVALS, "all", type=shared), role(TRIMMED, "tail")]
    if number == 2:
        roles += [
            role(EVENTS, "audit", through_share=0.1, **alone),
            role(FILES, "whole", assembled_max=assembled_max, **alone),
        ]
    return roles

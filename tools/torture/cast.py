"""Which applications there are, and what they do.

    orders   keyed; single messages and batches by key, some delayed
             workers  KEY_SHARED, three consumers
             strict   KEY_SHARED, AUTO_SPLIT; poison goes to the dead letter topic
             held     KEY_SHARED; so it does, and its key is held until somebody releases it
             tail     KEY_SHARED; so it does, and what follows in its key after it
    events   batches
             pool     SHARED, three consumers, filtered
             audit    EXCLUSIVE, often acknowledged through
    files    large messages in chunks, and small ones
             loaders  KEY_SHARED
             whole    EXCLUSIVE
    rivals   two producers with one name, who take it from each other; ids of the client's
             all      SHARED
    trimmed  what everybody has is trimmed away
             tail     KEY_SHARED

Each topic has a reader. An application has a role in many of them: a kill is felt everywhere.
"""

from dataclasses import replace
from typing import Final, NamedTuple

from seqgate.client import AfterDeadLetter, Placement, SubscriptionType
from tools.torture.messages import PLACES
from tools.torture.roles import Application, ConsumerRole, ProducerRole, ReaderRole, Role
from tools.torture.shown import NOTHING, Shown

NAMESPACE: Final = "torture/all"

ORDERS: Final = f"{NAMESPACE}/orders"
EVENTS: Final = f"{NAMESPACE}/events"
FILES: Final = f"{NAMESPACE}/files"
RIVALS: Final = f"{NAMESPACE}/rivals"
TRIMMED: Final = f"{NAMESPACE}/trimmed"

TOPICS: Final = (ORDERS, EVENTS, FILES, RIVALS, TRIMMED)

FILTERED: Final = {(EVENTS, "pool"): PLACES[0]}
"""Subscriptions that want messages of one place only. (A filter sees what all messages of a batch
share, so batches are cut by place.)"""

HELD: Final = (ORDERS, "held")
TAILING: Final = (ORDERS, "tail")
"""Subscriptions of which somebody releases keys."""

SINGLE: Final = 2_000
"""How large single messages are at most, in bytes."""

LARGE: Final = 30_000
"""The same of those that are cut into chunks."""


class Cast(NamedTuple):
    """Everybody.

    Attributes:
        applications: by their names.
        topics: that they use.
        subscriptions: (topic, subscription).
    """

    applications: dict[str, Application]
    topics: list[str]
    subscriptions: list[tuple[str, str]]


def cast(
    seed: str,
    journals: str,
    ledgers: list[str],
    dispatchers: list[str],
    *,
    rate: float,
    is_tiny: bool = False,
    shown: Shown = NOTHING,
    namespace: str = NAMESPACE,
) -> Cast:
    """Everybody.

    Args:
        ledgers, dispatchers: where these are, by home.
        rate: how many messages a second each producer publishes.
        shown: what applications show to services.
        is_tiny: whether applications take and hold next to nothing.
        namespace: of the topics: tenant/namespace.
    """
    roles: dict[str, list[Role]] = {
        **{f"producers-{number}": _producers(number, rate) for number in range(2)},
        **{f"consumers-{number}": _consumers(number, is_tiny=is_tiny) for number in range(3)},
        "readers": [
            ReaderRole(f"reader-{topic.rpartition('/')[2]}", topic, home=at % 2)
            for at, topic in enumerate(TOPICS)
        ],
    }
    applications = {
        name: Application(
            name,
            ledgers,
            dispatchers,
            journals,
            seed,
            [_moved(each, namespace) for each in some],
            shown,
        )
        for name, some in roles.items()
    }
    subscriptions = {
        (role.topic, role.subscription)
        for each in applications.values()
        for role in each.roles
        if isinstance(role, ConsumerRole)
    }
    topics = [_in(namespace, topic) for topic in TOPICS]
    return Cast(applications, topics, sorted(subscriptions))


def _in(namespace: str, topic: str) -> str:
    return f"{namespace}/{topic.rpartition('/')[2]}"


def _moved(role: Role, namespace: str) -> Role:
    """The role, in another namespace."""
    return replace(role, topic=_in(namespace, role.topic))


def _producers(number: int, rate: float) -> list[Role]:
    def role(name: str, topic: str, share: float = 1.0, **more: object) -> ProducerRole:
        return ProducerRole(f"{name}-{number}", topic, rate=rate * share, **more)  # type: ignore[arg-type]

    home = {topic: at % 2 for at, topic in enumerate(TOPICS)}
    orders = {"way": "by_key"} if number else {"large_share": 0.1, "bytes_max": SINGLE}
    return [
        role("orders", ORDERS, delays=not number, home=home[ORDERS], **orders),
        role("events", EVENTS, way="batch" if number else "single", home=home[EVENTS]),
        role(
            "files",
            FILES,
            0.3,
            way="chunks",
            bytes_max=LARGE,
            large_share=0.5,
            pending_max=40,
            home=home[FILES],
        ),
        role("rivals", RIVALS, 0.5, producer="rival", ids=False, home=home[RIVALS]),
        *([] if number else [role("trimmed", TRIMMED, home=home[TRIMMED])]),
    ]


def _consumers(number: int, *, is_tiny: bool) -> list[Role]:
    queue = 5 if is_tiny else 100
    # What one fails at, all that follows waits for.
    alone = {"type": SubscriptionType.EXCLUSIVE.name, "refused_share": 0.003, "work_s": 0.001}
    shared = SubscriptionType.SHARED.name

    def role(topic: str, subscription: str, **more: object) -> ConsumerRole:
        short = topic.rpartition("/")[2]
        given = {"queue": queue, "home": number % 2, **more}
        return ConsumerRole(f"{short}-{subscription}-{number}", topic, subscription, **given)  # type: ignore[arg-type]

    dead = {"is_strict": True, "redeliveries_max": 3, "refused_share": 0.01}
    roles: list[Role] = [
        role(ORDERS, "workers"),
        role(EVENTS, "pool", type=shared),
    ]
    if number < 2:
        roles += [
            role(ORDERS, "strict", placement=Placement.AUTO_SPLIT.name, **dead),
            role(ORDERS, "held", after=AfterDeadLetter.HOLD.name, **dead),
            role(ORDERS, "tail", after=AfterDeadLetter.TAIL.name, **dead),
            role(FILES, "loaders", assembled_max=2 if is_tiny else 100),
        ]
    if number == 1:
        roles += [
            role(RIVALS, "all", type=shared),
            role(TRIMMED, "tail"),
        ]
    if number == 2:
        roles += [
            role(EVENTS, "audit", through_share=0.1, **alone),
            role(FILES, "whole", assembled_max=2 if is_tiny else 100, **alone),
        ]
    return roles

"""What messages say: everything by which they can be judged.

A message is known by its uid, `<role>.<number>`: who made it and which one it is, whatever its
sequence id. Its key, size and place follow from the uid, so that an application that was killed
sends the same again, and whoever reads it knows whether it is what was sent.
"""

from random import Random
from typing import Final, NamedTuple

PLACES: Final = ("here", "there")
"""The property `place`, which filters see."""

POISON_SHARE: Final = 0.004
"""How many messages fail whenever they are processed."""

DELAYED_SHARE: Final = 0.01
"""How many are to be delivered later, where a role delays any."""

DELAY_MAX_S: Final = 2.0


class Making(NamedTuple):
    """How a role makes messages.

    Attributes:
        role: whose they are.
        keys: how many keys there are; the roles of a topic share them.
        bytes_max: how large a payload is at most.
        large_share: how many are that large, about; the others are small.
        delays: whether some are to be delivered later.
    """

    role: str
    keys: int = 20
    bytes_max: int = 200
    large_share: float = 0.0
    delays: bool = False


class Made(NamedTuple):
    """A message."""

    uid: str
    key: str
    place: str
    payload: bytes
    delay_s: float | None


def make(making: Making, number: int) -> Made:
    """One message, always the same."""
    uid = f"{making.role}.{number}"
    random = Random(uid)
    key, place = f"k{random.randrange(making.keys)}", random.choice(PLACES)
    is_large = random.random() < making.large_share
    size = random.randrange(making.bytes_max // 2, making.bytes_max) if is_large else 0
    is_delayed = making.delays and random.random() < DELAYED_SHARE
    delay_s = round(random.uniform(0.05, DELAY_MAX_S), 3) if is_delayed else None
    flags = ("p" if random.random() < POISON_SHARE else "") + ("d" if is_delayed else "")
    return Made(uid, key, place, _payload(uid, key, place, flags, size), delay_s)


class Said(NamedTuple):
    """What a payload says."""

    uid: str
    key: str
    place: str
    is_poison: bool
    is_delayed: bool


def read(payload: bytes) -> Said:
    """What a payload says.

    Raises:
        ValueError: it is none that was made here.
    """
    head, _, filler = payload.partition(b"\n")
    try:
        uid, key, place, flags = head.decode().split("|")
    except (UnicodeDecodeError, ValueError):
        raise ValueError(f"no message: {head[:80]!r}") from None
    if payload != _payload(uid, key, place, flags, len(filler)):
        raise ValueError(f"{uid} is damaged")
    return Said(uid, key, place, "p" in flags, "d" in flags)


def _payload(uid: str, key: str, place: str, flags: str, size: int) -> bytes:
    head = f"{uid}|{key}|{place}|{flags}\n".encode()
    return head + (head * (size // len(head) + 1))[:size]

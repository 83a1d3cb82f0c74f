"""The content of messages, from which they can be verified.

A message is identified by its uid, `<role>.<number>`, whatever its sequence id. Its key, size and
place follow from the uid, so a killed application resends the same message, and a reader can verify
it.
"""

from random import Random
from typing import Final, NamedTuple

from tools.torture.roles import ProducerRole

PLACES: Final = ("here", "there")
"""The values of the property `place`, which filters read."""

POISON_SHARE: Final = 0.004
"""The share of messages that are poison: strict consumers always refuse them."""

DELAYED_SHARE: Final = 0.01
"""The share of delayed messages, for roles that delay any."""

DELAY_MAX_S: Final = 2.0


class Made(NamedTuple):
    uid: str
    key: str
    place: str
    payload: bytes
    delay_s: float | None


def make(role: ProducerRole, number: int) -> Made:
    """A role's message with a number, always the same."""
    uid = f"{role.name}.{number}"
    random = Random(uid)
    key, place = f"k{random.randrange(role.keys)}", random.choice(PLACES)
    is_large = random.random() < role.large_share
    size = random.randrange(role.bytes_max // 2, role.bytes_max) if is_large else 0
    is_delayed = role.delays and random.random() < DELAYED_SHARE
    delay_s = round(random.uniform(0.05, DELAY_MAX_S), 3) if is_delayed else None
    flags = ("p" if random.random() < POISON_SHARE else "") + ("d" if is_delayed else "")
    return Made(uid, key, place, _payload(uid, key, place, flags, size), delay_s)


class Said(NamedTuple):
    uid: str
    key: str
    place: str
    is_poison: bool
    is_delayed: bool


def read(payload: bytes) -> Said:
    """Parse a payload. Raises ValueError if it is damaged, or not the torture's."""
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

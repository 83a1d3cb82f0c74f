"""The values that every part of Seqgate shares: names, positions, ids, limits.

Nothing here knows a service, a store or the wire.
"""

import re
from dataclasses import dataclass
from typing import Final, NamedTuple, Self

SEQUENCE_ID_MAX: Final = 2**63 - 1
"""The highest sequence id, ledger id and entry id. Pulsar's ids are signed 64-bit integers; one
that is 2^63 or more on the wire compares as negative there (PIP-6), so it is refused here."""

TOPIC_NAME_BYTES_MAX: Final = 255
"""The longest topic name, in bytes."""

PRODUCER_NAME_BYTES_MAX: Final = 255
"""The longest producer name, in bytes of UTF-8."""

_TOPIC_PART: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:=-]*", re.ASCII)
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")


class InvalidNameError(ValueError):
    """A topic or producer name that cannot be one."""


@dataclass(frozen=True, slots=True, order=True)
class TopicName:
    """tenant/namespace/name, the unit of order and of ownership.

    Each part is made of ASCII letters, digits and _.:=- and does not start with punctuation other
    than an underscore; the whole is at most 255 bytes long.
    """

    tenant: str
    namespace_part: str
    local: str

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read a full name.

        Raises:
            InvalidNameError: it is not tenant/namespace/name.
        """
        parts = text.split("/")
        if (
            len(text) > TOPIC_NAME_BYTES_MAX
            or len(parts) != 3
            or not all(_TOPIC_PART.fullmatch(part) for part in parts)
        ):
            raise InvalidNameError(
                "a topic is tenant/namespace/name: ASCII letters, digits and _.:=- in each part, "
                f"at most {TOPIC_NAME_BYTES_MAX} bytes"
            )
        return cls(*parts)

    @classmethod
    def expand(cls, text: str) -> Self:
        """Read a name as people write it: `name` alone means public/default/name, and Pulsar's
        persistent:// is understood.

        Raises:
            InvalidNameError: it is neither of these.
        """
        text = text.removeprefix("persistent://")
        return cls.parse(text if "/" in text else f"public/default/{text}")

    @property
    def namespace(self) -> str:
        """tenant/namespace."""
        return f"{self.tenant}/{self.namespace_part}"

    @property
    def is_system(self) -> bool:
        """Whether a system keeps its own records in it: the last part starts with two underscores,
        as in Pulsar. A system topic never deduplicates."""
        return self.local.startswith("__")

    def __str__(self) -> str:
        return f"{self.tenant}/{self.namespace_part}/{self.local}"


def check_producer_name(name: str) -> str:
    """The name itself, if it can be one.

    Raises:
        InvalidNameError: it is empty, longer than 255 bytes, or holds control characters.
    """
    if not name or _CONTROL.search(name) or len(name.encode()) > PRODUCER_NAME_BYTES_MAX:
        raise InvalidNameError(
            f"a producer name is 1 to {PRODUCER_NAME_BYTES_MAX} bytes of UTF-8 "
            "without control characters"
        )
    return name


class Position(NamedTuple):
    """An entry's place in its topic. Before the first entry there is None."""

    ledger_id: int
    entry_id: int

    def __str__(self) -> str:
        return f"{self.ledger_id}:{self.entry_id}"


@dataclass(frozen=True, slots=True, order=True)
class MessageId:
    """A message's place: its entry and, in a batch, its index.

    Ordered like Pulsar's: ledger, entry, partition, batch index; -1 stands for "not partitioned"
    and "not in a batch" (`compareTo` of Pulsar's MessageIdImpl).
    """

    ledger_id: int
    entry_id: int
    partition: int = -1
    batch_index: int = -1

    @property
    def position(self) -> Position:
        """The entry that holds the message."""
        return Position(self.ledger_id, self.entry_id)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read what str() writes: ledger:entry:partition, or with :batch-index; ledger:entry alone
        is understood too.

        Raises:
            ValueError: it is none of these.
        """
        parts = text.split(":")
        if not 2 <= len(parts) <= 4:
            raise ValueError(f"not a message id: {text!r}")
        try:
            numbers = [int(part) for part in parts]
        except ValueError:
            raise ValueError(f"not a message id: {text!r}") from None
        if not all(-1 <= number <= SEQUENCE_ID_MAX for number in numbers):
            raise ValueError(f"not a message id: {text!r}")
        return cls(*numbers)

    def __str__(self) -> str:
        text = f"{self.ledger_id}:{self.entry_id}:{self.partition}"
        return text if self.batch_index < 0 else f"{text}:{self.batch_index}"

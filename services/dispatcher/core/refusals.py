"""What a consumer that joins is refused for."""

from services.errors import DomainError, Kind


class RangeConflict(DomainError):
    """Another consumer, who is connected, has some of these slots: `consumer` is its name, and it
    has those from `first` to `last`."""

    kind = Kind.IN_USE
    reason = "RANGE_CONFLICT"


class InvalidKeyRange(DomainError):
    """A consumer that says which slots it takes names none, or names one twice, or a range ends
    before it begins or is not within 0 to 65535."""

    kind = Kind.INVALID
    reason = "INVALID_KEY_RANGE"


class NoSlotsLeft(DomainError):
    """There are as many consumers as there are slots to share among them."""

    kind = Kind.EXHAUSTED
    reason = "NO_SLOTS_LEFT"

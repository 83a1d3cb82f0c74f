"""A subscription's chains of filters, and where in the log each applies.

    ── chain A ──┬──── chain B ────┬──── chain C ──▶
                 │  acknowledged ──┤
                 └ dropped: no unacknowledged entry needs A

A change applies from a position on, so an entry has the same chain whenever it is read or
redelivered. The chains are durable in properties of the subscription's cursor, which change
together: one text, in pieces, since the size of a property is limited.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any, Final, NamedTuple

from seqgate.services.dispatcher.ports import Filter
from seqgate.services.errors import DomainError, Kind
from seqgate.types import Position

PREFIX: Final = "seqgate.filter."
"""The prefix of the properties' names."""

PIECE_BYTES: Final = 4_000
"""The length of a piece, in bytes: with its name below the limit of a property."""

STRETCHES_MAX: Final = 8
"""The most chains that unacknowledged entries may need."""

CHANGES_MAX: Final = 20
"""The most changes recorded."""

STATE_BYTES_MAX: Final = 1024 * 1024
"""The limit of the stored text of all chains, in bytes."""

_FORMAT: Final = 1


class TooManyFilters(DomainError):
    """Unacknowledged entries need too many different filter chains, or chains that are too
    large."""

    kind = Kind.EXHAUSTED
    reason = "TOO_MANY_FILTERS"


class UnknownFormat(DomainError):
    """The stored filters are damaged, or were written by a newer version."""

    kind = Kind.DATA_LOSS
    reason = "FILTERS_UNREADABLE"


class Policy(Enum):
    """The treatment of an entry without a verdict; see dispatcher.proto."""

    PARK = auto()
    ACCEPT = auto()
    REJECT = auto()


class Chain(NamedTuple):
    """Filters in their order, and the policy for entries without a verdict."""

    filters: tuple[Filter, ...] = ()
    policy: Policy = Policy.PARK


NO_FILTERS: Final = Chain()


class Stretch(NamedTuple):
    """A chain, and the first entry to which it applies; None: the start of the log."""

    start: Position | None
    chain: Chain

    def covers(self, position: Position) -> bool:
        """Whether the chain applies at a position, unless a later one does."""
        return self.start is None or position >= self.start

    def begins_before(self, other: "Stretch") -> bool:
        """Whether it starts before the other one does."""
        if other.start is None:
            return False
        return self.start is None or self.start < other.start


class Change(NamedTuple):
    """A recorded change: the filters' names and versions, the epoch of the owner that made it, and
    the principal that requested it, if known."""

    time_ms: int
    is_shadow: bool
    start: Position | None
    filters: tuple[tuple[str, int], ...]
    policy: Policy
    epoch: int
    caller: str


@dataclass(frozen=True, slots=True)
class Chains:
    """The chains of a subscription.

    Attributes:
        applied: in the order of the log; each applies up to the start of the next. Entries before
            the first are not filtered.
        shadow: the chain whose verdicts are only counted.
        changes: the latest ones, newest first.
    """

    applied: tuple[Stretch, ...] = ()
    shadow: Stretch | None = None
    changes: tuple[Change, ...] = ()

    def at(self, position: Position) -> Chain:
        """The chain that applies to an entry."""
        for stretch in reversed(self.applied):
            if stretch.covers(position):
                return stretch.chain
        return NO_FILTERS

    @property
    def filters_any(self) -> bool:
        """Whether any entry may be filtered."""
        return any(stretch.chain.filters for stretch in self.applied)

    def needed_after(self, mark_delete: Position | None) -> "Chains":
        """Without the chains that only acknowledged entries need. The first remaining one then
        applies from the start of the log: a reset may move the subscription back."""
        if mark_delete is None:
            return self
        after = Position(mark_delete.ledger_id, mark_delete.entry_id + 1)
        covering = [i for i, each in enumerate(self.applied) if each.covers(after)]
        if not covering:
            return self
        first, *others = self.applied[covering[-1] :]
        applied = (first._replace(start=None), *others)
        if not others and not first.chain.filters:
            applied = ()
        return replace(self, applied=applied)

    def changed(
        self, stretch: Stretch, *, is_shadow: bool, now_ms: int, epoch: int, caller: str
    ) -> "Chains":
        """Replace all chains from a position on by this one. If the same chain applies there,
        nothing changes: a repeated request is recorded once. Raises TooManyFilters above
        STRETCHES_MAX or STATE_BYTES_MAX."""
        if is_shadow:
            changed = replace(self, shadow=self._shadow_after(stretch))
        else:
            changed = replace(self, applied=self._applied_after(stretch))
        if changed == self:
            return self
        names = tuple((each.name, each.version) for each in stretch.chain.filters)
        policy = stretch.chain.policy
        change = Change(now_ms, is_shadow, stretch.start, names, policy, epoch, caller)
        return _fitting(replace(changed, changes=(change, *self.changes)[:CHANGES_MAX]))

    def other_than(self, chain: Chain, *, is_shadow: bool) -> Filter | None:
        """A filter of a chain whose version is stored with another expression: the counts of that
        version would mix the verdicts of both."""
        shadow = () if self.shadow is None else (self.shadow,)
        kept = {
            (each.name, each.version): each.expression
            for stretch in (shadow if is_shadow else self.applied)
            for each in stretch.chain.filters
        }
        for each in chain.filters:
            if kept.get((each.name, each.version), each.expression) != each.expression:
                return each
        return None

    def _applied_after(self, stretch: Stretch) -> tuple[Stretch, ...]:
        before = [each for each in self.applied if each.begins_before(stretch)]
        is_same = stretch.chain == (before[-1].chain if before else NO_FILTERS)
        applied = (*before, *(() if is_same else (stretch,)))
        if len(applied) > STRETCHES_MAX:
            raise TooManyFilters(
                f"too many chains for unacknowledged entries (limit {STRETCHES_MAX})",
                chains_max=STRETCHES_MAX,
            )
        return applied

    def _shadow_after(self, stretch: Stretch) -> Stretch | None:
        before = self.shadow
        if before is not None and before.chain == stretch.chain and before.begins_before(stretch):
            return before
        return stretch if stretch.chain.filters else None


def from_properties(properties: Mapping[str, str]) -> Chains:
    """The chains in a cursor's properties. Raises UnknownFormat if they are unreadable."""
    pieces = sorted(name for name in properties if name.startswith(PREFIX))
    if not pieces:
        return Chains()
    try:
        kept = json.loads("".join(properties[name] for name in pieces))
        if kept["format"] == _FORMAT:
            return Chains(
                tuple(_stretch(each) for each in kept["applied"]),
                None if kept["shadow"] is None else _stretch(kept["shadow"]),
                tuple(_change(each) for each in kept["changes"]),
            )
        because = "stored by another version"
    except (ValueError, TypeError, KeyError) as error:
        because = f"{type(error).__name__}: {error}"
    raise UnknownFormat("the subscription's stored filters are unreadable", because=because)


def to_properties(
    chains: Chains, properties: Mapping[str, str]
) -> tuple[dict[str, str], list[str]]:
    """The properties to put, and the names to remove, for a cursor to store the chains."""
    text = "" if chains == Chains() else _text(chains)
    put = {
        f"{PREFIX}{start // PIECE_BYTES:04}": text[start : start + PIECE_BYTES]
        for start in range(0, len(text), PIECE_BYTES)
    }
    remove = [name for name in properties if name.startswith(PREFIX) and name not in put]
    return put, remove


def _fitting(chains: Chains) -> Chains:
    """The chains with as many of the latest changes as fit into STATE_BYTES_MAX."""
    while len(_text(chains)) > STATE_BYTES_MAX:
        if not chains.changes:
            raise TooManyFilters(
                f"chains too large (limit {STATE_BYTES_MAX:,} bytes)", bytes_max=STATE_BYTES_MAX
            )
        chains = replace(chains, changes=chains.changes[:-1])
    return chains


def _text(chains: Chains) -> str:
    """In ASCII, so that it can be cut anywhere."""
    kept = {
        "format": _FORMAT,
        "applied": [_kept(each) for each in chains.applied],
        "shadow": None if chains.shadow is None else _kept(chains.shadow),
        "changes": [
            [*each[:4], each.policy.name, each.epoch, each.caller] for each in chains.changes
        ],
    }
    return json.dumps(kept, separators=(",", ":"))


def _kept(stretch: Stretch) -> list[object]:
    return [stretch.start, stretch.chain.policy.name, stretch.chain.filters]


def _stretch(kept: Sequence[Any]) -> Stretch:
    start, policy, filters = kept
    chain = Chain(tuple(Filter(*each) for each in filters), Policy[policy])
    return Stretch(_position(start), chain)


def _change(kept: Sequence[Any]) -> Change:
    time_ms, is_shadow, start, filters, policy, epoch, caller = kept
    names = tuple((name, version) for name, version in filters)
    return Change(time_ms, is_shadow, _position(start), names, Policy[policy], epoch, caller)


def _position(kept: Sequence[int] | None) -> Position | None:
    return None if kept is None else Position(*kept)

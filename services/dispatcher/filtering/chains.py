"""A subscription's chains of filters, and where in the log each applies.

    ── chain A ──┬──── chain B ────┬──── chain C ──▶
                 │  acknowledged ──┤
                 └ forgotten: nothing that is left needs A

A change applies from a position on, so an entry has the chain that was meant for it whenever it is
read or delivered again. Which chains there are is durable in properties of the subscription's
cursor, all of which change at once: one text, in pieces, since a property is bounded.
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
"""How the names of the properties begin."""

PIECE_BYTES: Final = 4_000
"""How long a piece is, in bytes: with its name less than a property may be."""

STRETCHES_MAX: Final = 8
"""How many chains entries may need that are not acknowledged."""

CHANGES_MAX: Final = 20
"""How many changes are kept."""

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
    """Filters in their order, and the policies for lack of a verdict."""

    filters: tuple[Filter, ...] = ()
    policy: Policy = Policy.PARK


NO_FILTERS: Final = Chain()


class Stretch(NamedTuple):
    """A chain, and from which entry on it applies; None: from the beginning."""

    start: Position | None
    chain: Chain

    def covers(self, position: Position) -> bool:
        """Whether it applies there, unless a later one does."""
        return self.start is None or position >= self.start

    def begins_before(self, other: "Stretch") -> bool:
        """Whether it applies to entries that come before all of another one."""
        if other.start is None:
            return False
        return self.start is None or self.start < other.start


class Change(NamedTuple):
    """A change that was made.

    Attributes:
        filters: names and versions.
        epoch: of the owner that made it.
        caller: the principal that requested it, if known.
    """

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
        """Without those that only entries need that are acknowledged. The first that is left
        applies from the beginning: a subscription may be moved back."""
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
        nothing changes: a repeated request is recorded once.

        Raises:
            TooManyFilters: the chains exceed the limit of their stored text.
        """
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
        """A filter of a chain that is stored with the same version and another expression: the
        counts of that version would mix the verdicts of both."""
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
    """The chains in a cursor's properties.

    Raises:
        UnknownFormat: the properties hold no chains, or in an unknown format.
    """
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
    """Which of a cursor's properties to put, and which to remove, so that they hold the chains."""
    text = "" if chains == Chains() else _text(chains)
    put = {
        f"{PREFIX}{start // PIECE_BYTES:04}": text[start : start + PIECE_BYTES]
        for start in range(0, len(text), PIECE_BYTES)
    }
    remove = [name for name in properties if name.startswith(PREFIX) and name not in put]
    return put, remove


def _fitting(chains: Chains) -> Chains:
    """With as many changes as there is room for."""
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

"""The filters applied to a subscription: verdicts on its entries, and policies for lack of one.

    a page of the log ─▶ the fields that the chain reads ──▶ cached? ──▶ a verdict each
    returned entries ──▶                                       │ no
                                                               ▼
                                                        the filter service

Entries with equal values of the fields that their chain reads have the same verdict, so verdicts
are cached by these: most entries need no request, and while the filter service is down, entries
with a cached verdict are still delivered.

Without a verdict the chain's policy decides. With PARK the machine keeps the entry as unjudged and
requests its verdict again until there is one. While the filter service does not answer, requests to
it back off, and a page that is read meanwhile does not wait for it.

A change of filters never comes between a page's verdicts and the machine: `changing` is held.
Verdicts of replaced chains are dropped.
"""

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Hashable, Iterable, Mapping, Sequence
from typing import Final, NamedTuple, Protocol, TypeVar

import structlog
from opentelemetry.trace import Span

from seqgate.api.entry.v1.entry_pb2 import EntryMetadata
from seqgate.api.ledger.v1.ledger_pb2 import StoredEntry
from seqgate.services.dispatcher.core.effects import ACCEPT, FILTER_FAILED, REJECT, UNJUDGED
from seqgate.services.dispatcher.core.history import History
from seqgate.services.dispatcher.core.positions import Acknowledged
from seqgate.services.dispatcher.cursor.tenure import Tenure
from seqgate.services.dispatcher.entries import position_of
from seqgate.services.dispatcher.filtering.active import UNFILTERED, ActiveChain, Known, prepared
from seqgate.services.dispatcher.filtering.chains import (
    Chain,
    Chains,
    Stretch,
    TooManyFilters,
    to_properties,
)
from seqgate.services.dispatcher.filtering.shadow import Shadow, Spawn
from seqgate.services.dispatcher.filtering.tallies import ACCEPTED, REJECTED, RESCHEDULED, Tallies
from seqgate.services.dispatcher.filtering.trial import Trial
from seqgate.services.dispatcher.ports import (
    Cursor,
    Failure,
    Filters,
    FiltersUnavailable,
    InvalidChain,
    InvalidProperty,
    Line,
)
from seqgate.services.errors import DomainError, ServiceBusy
from seqgate.services.runtime.backoff import Backoff
from seqgate.services.runtime.metrics import Recorder, nowhere
from seqgate.telemetry import names, spans
from seqgate.telemetry.setup import NONE, exporter_asked_for
from seqgate.types import Position

log = structlog.get_logger()

T = TypeVar("T")

FAILED_MAX: Final = 10_000
"""The most entries with a failed filter whose reason is remembered, for Explain."""

BACKOFF_FIRST_S: Final = 0.05
BACKOFF_MAX_S: Final = 1.0
"""The backoff while the filter service does not answer, doubling from the first to the longest."""


class Repeated(Protocol):
    """See Work.repeated."""

    def __call__(
        self, do: Callable[[], Awaitable[T]], *, unless: type[DomainError] | None = None
    ) -> Awaitable[T]: ...


class Failed(NamedTuple):
    """The filter that failed on an entry, the failure, and when the entry began to wait."""

    filter: str
    version: int
    failure: Failure
    since_ms: int


class Outage(NamedTuple):
    """The start and the cause of an outage of the filter service."""

    since_ms: int
    because: str


class Filtering:
    """The filters of one subscription.

    Attributes:
        is_on: whether there are any filters, applied or shadow.
        changing: held while a page is judged, or the chains change.
        outage: the filter service's current outage; None: it answers, as far as known.
        answers, answers_s, answer_max_s, unanswered: the number of answered requests, their total
            and longest duration, and the number of requests not answered in time.
        lookups: the numbers of entries whose verdict was cached, and those whose was requested.
    """

    def __init__(
        self,
        tenure: Tenure,
        filters: Filters,
        now_ms: Callable[[], int],
        spawn: Spawn,
        answered: Recorder = nowhere,
        history: History | None = None,
    ) -> None:
        """`spawn` starts background work; `answered` is called with the duration of each request to
        the filter service, in seconds, and whether it was answered; `history` gets the verdicts."""
        self.chains = Chains()
        self.is_on = False
        self.changing = asyncio.Lock()
        self.outage: Outage | None = None
        self.answers = 0
        self.answers_s = 0.0
        self.answer_max_s = 0.0
        self.unanswered = 0
        self.lookups = {"remembered": 0, "asked": 0}
        self.tallies = Tallies()
        self._topic = tenure.topic
        self._name = tenure.name
        self._filters = filters
        self._tenure = tenure
        self._now_ms = now_ms
        self._spawn = spawn
        self._answered = answered
        self._history = history
        self._line = filters.line()
        self._properties: dict[str, str] = {}
        self._active: dict[Chain, ActiveChain] = {}
        self._shadow: Shadow | None = None
        self._failed: OrderedDict[Position, Failed] = OrderedDict()
        self._version = 0
        self._news = asyncio.Event()
        self._ask_after_s = 0.0
        self._backoff = Backoff(BACKOFF_FIRST_S, BACKOFF_MAX_S)
        self._is_traced = exporter_asked_for("TRACES") != NONE
        self._evaluate: dict[str, str] = {
            names.MESSAGING_SYSTEM: names.SEQGATE,
            names.MESSAGING_OPERATION_NAME: names.EVALUATE,
            names.MESSAGING_DESTINATION_NAME: str(tenure.topic),
            names.MESSAGING_DESTINATION_SUBSCRIPTION_NAME: tenure.name,
        }

    # ---- chains

    @property
    def has_a_say(self) -> bool:
        """Whether a page must be judged: there are filters, or a change may be adding some."""
        return self.is_on or self.changing.locked()

    def use(self, chains: Chains, properties: Mapping[str, str]) -> bool:
        """Judge by these chains and own properties of the subscription from now on. Returns whether
        any verdict may have changed."""
        before = self._active
        stay = before
        if properties != self._properties:
            stay = {chain: each for chain, each in before.items() if each.stays(properties)}
        is_same = chains.applied == self.chains.applied and stay == before
        self._properties = dict(properties)
        self.chains = chains
        self.is_on = chains.filters_any or chains.shadow is not None
        if not chains.filters_any:
            self.outage = None  # nothing is asked any more
        self._active = {
            chain: stay.get(chain) or ActiveChain(chain, self.tallies, is_shadow=False)
            for chain in (stretch.chain for stretch in chains.applied)
            if chain.filters
        }
        self._use_shadow(chains.shadow)
        judging = {(False, each.names) for each in self._active.values()}
        if self._shadow is not None:
            judging.add((True, self._shadow.names))
        self.tallies.trim(judging)
        if not is_same:
            self._failed.clear()
            self._ask_after_s = 0.0
            self._version += 1
            self._news.set()
        return not is_same

    def _use_shadow(self, stretch: Stretch | None) -> None:
        before = self._shadow
        if before is not None:
            if before.stays(stretch, self._properties):
                return
            self._shadow = None
            self._spawn(before.close)
        if stretch is not None:
            self._shadow = Shadow(
                stretch, self._properties, self._topic, self._filters, self.tallies, self._spawn
            )

    async def check(self, chain: Chain) -> None:
        """Raises InvalidExpression, InvalidChain or FiltersUnavailable, as `prepared`."""
        await self._check([chain], self._properties)

    async def check_properties(self, properties: Mapping[str, str]) -> None:
        """As `check`, for the chains that read any changed property of the subscription."""
        chains = [chain for chain, each in self._active.items() if not each.stays(properties)]
        shadow = self._shadow
        if shadow is not None and not shadow.stays(shadow.stretch, properties):
            chains.append(shadow.stretch.chain)
        await self._check(chains, properties)

    async def _check(self, chains: Iterable[Chain], properties: Mapping[str, str]) -> None:
        """Check on a separate line. If the service has no room for more chains, check on the line
        that judges, where each replaces another one for a while."""
        given = [chain for chain in chains if chain.filters]
        line = self._filters.line()
        try:
            await self._prepare(line, given, properties)
        except FiltersUnavailable as error:
            if error.details.get("because") != ServiceBusy.reason:
                raise
            await self._prepare(self._line, given, properties)
        finally:
            await line.close()

    async def _prepare(
        self, line: Line, chains: Iterable[Chain], properties: Mapping[str, str]
    ) -> None:
        for chain in chains:
            await prepared(line, chain, self._topic, properties)

    async def change(
        self, stretch: Stretch, repeated: Repeated, *, is_shadow: bool, caller: str
    ) -> tuple[Cursor, bool]:
        """Make a change durable and apply it; the caller holds `changing`. Returns the cursor, and
        whether any verdict may have changed. If it raises TooManyFilters or InvalidChain, nothing
        changed."""
        assert self.changing.locked()
        cursor = await repeated(self._tenure.get)
        kept = self.chains if is_shadow else self.chains.needed_after(cursor.mark_delete)
        other = kept.other_than(stretch.chain, is_shadow=is_shadow)
        if other is not None:
            raise InvalidChain(
                f"version {other.version} of filter {other.name!r} has another expression",
                field="filters",
                filter=other.name,
                version=other.version,
            )
        chains = kept.changed(
            stretch,
            is_shadow=is_shadow,
            now_ms=self._now_ms(),
            epoch=self._tenure.epoch,
            caller=caller,
        )
        if chains is kept:
            return cursor, self.use(kept, cursor.own)
        put, remove = to_properties(chains, cursor.properties)
        try:
            cursor = await repeated(
                lambda: self._tenure.set_properties(put, remove),
                unless=InvalidProperty,
            )
        except InvalidProperty as error:
            raise TooManyFilters("filters too large for the cursor's properties") from error
        log.info(
            "filters changed",
            topic=str(self._topic),
            subscription=self._name,
            mode="SHADOW" if is_shadow else "APPLIED",
            start=None if stretch.start is None else str(stretch.start),
            policy=stretch.chain.policy.name,
            filters=[f"{each.name} {each.version}" for each in stretch.chain.filters],
            caller=caller,
        )
        return cursor, self.use(chains, cursor.own)

    def trial(self, chain: Chain | None) -> Trial:
        """A trial of a chain; None: of the applied chains."""
        chains = self.chains if chain is None else Chains((Stretch(None, chain),))
        return Trial(self._filters.line(), self._topic, chains, self._properties)

    async def close(self) -> None:
        await self._line.close()
        if self._shadow is not None:
            await self._shadow.close()

    # ---- verdicts

    async def page(
        self, entries: Sequence[StoredEntry], acknowledged: Acknowledged
    ) -> Sequence[int]:
        """A verdict for each entry of a page, as in core.effects; markers and acknowledged entries
        are not judged. The caller passes the verdicts to the machine before it waits again."""
        if not entries:
            return []
        first, highest = position_of(entries[0]), acknowledged.highest
        is_new = highest is None or first > highest
        wanted = [
            place
            for place, each in enumerate(entries)
            if not each.metadata.HasField("marker_type")
            and (is_new or position_of(each) not in acknowledged)
        ]
        asked = entries if len(wanted) == len(entries) else [entries[each] for each in wanted]
        while True:
            version = self._version
            found = await self._verdicts(asked)
            async with self.changing:
                if version == self._version:
                    self._count(asked, found)
                    if self._shadow is not None:
                        self._shadow.count(asked)
                    if len(wanted) == len(entries):
                        return [known.verdict for known in found]
                    verdicts = [ACCEPT] * len(entries)
                    for place, known in zip(wanted, found, strict=True):
                        verdicts[place] = known.verdict
                    return verdicts

    async def again(self, entries: Sequence[StoredEntry]) -> dict[Position, int]:
        """Verdicts on entries that wait for one. Entries without a verdict are left out, for the
        caller to retry: all of them if the chains change meanwhile. If none has a verdict, this
        returns after the backoff."""
        version = self._version
        found = await self._verdicts(entries)
        some = [place for place, known in enumerate(found) if known.verdict != UNJUDGED]
        if version != self._version:
            return {}
        if not some and entries:
            await self._pause()
            return {}
        judged = [entries[place] for place in some]
        known = [found[place] for place in some]
        self._count(judged, known)
        return {position_of(each): of.verdict for each, of in zip(judged, known, strict=True)}

    def why(self, position: Position) -> Failed | None:
        """Why a filter failed on an entry; None: none did, or it is forgotten."""
        return self._failed.get(position)

    async def _verdicts(self, entries: Sequence[StoredEntry]) -> Sequence[Known]:
        applied = self.chains.applied
        if not applied:
            return [UNFILTERED] * len(entries)
        if len(applied) == 1 and applied[0].start is None:
            return await self._verdicts_by(self._active.get(applied[0].chain), entries)
        places: dict[Chain, list[int]] = {}
        for place, each in enumerate(entries):
            places.setdefault(self.chains.at(position_of(each)), []).append(place)
        found: dict[int, Known] = {}
        for chain, some in places.items():
            known = await self._verdicts_by(self._active.get(chain), [entries[i] for i in some])
            found.update(zip(some, known, strict=True))
        return [found[place] for place in range(len(entries))]

    async def _verdicts_by(
        self, active: ActiveChain | None, entries: Sequence[StoredEntry]
    ) -> Sequence[Known]:
        if active is None:
            return [UNFILTERED] * len(entries)
        if active.projection is None and not await self._prepared(active):
            return [active.unanswered] * len(entries)
        assert active.projection is not None
        key_of, remembered = active.projection.key_of, active.known
        keys = [key_of(each.metadata) for each in entries]
        asked = {
            key: each.metadata
            for key, each in zip(keys, entries, strict=True)
            if key not in remembered
        }
        if not asked:
            self.lookups["remembered"] += len(keys)
            return [remembered[key] for key in keys]
        known = {key: remembered[key] for key in keys if key in remembered}
        hits = sum(key in known for key in keys)
        self.lookups["remembered"] += hits
        self.lookups["asked"] += len(keys) - hits
        fresh = await self._asked(active, asked, keys, entries)
        known.update(fresh or {})
        return [known.get(key, active.unanswered) for key in keys]

    async def _asked(
        self,
        active: ActiveChain,
        asked: Mapping[Hashable, EntryMetadata],
        keys: Sequence[Hashable],
        entries: Sequence[StoredEntry],
    ) -> Mapping[Hashable, Known] | None:
        """Verdicts of the filter service on the keys in `asked`; None: it did not answer. `keys`
        and `entries` are for the span."""

        def ask() -> Awaitable[Mapping[Hashable, Known]]:
            return active.ask(self._line, asked)

        if not self._is_traced:
            return await self._answer(ask)
        about = [at for at, key in enumerate(keys) if key in asked]
        contexts = spans.followed(entries[at].metadata.properties for at in about)
        with spans.shared(f"{names.EVALUATE} {self._topic}", contexts, self._evaluate) as span:
            fresh = await self._answer(ask)
            if span.is_recording():
                _set_verdicts(span, None if fresh is None else [fresh[keys[at]] for at in about])
            return fresh

    async def _prepared(self, active: ActiveChain) -> bool:
        async def prepare() -> bool:
            await active.prepare(self._line, self._topic, self._properties)
            return True

        return await self._answer(prepare) is not None

    async def _answer(self, ask: Callable[[], Awaitable[T]]) -> T | None:
        """The filter service's answer; None: it does not answer, or the backoff is not over."""
        loop = asyncio.get_running_loop()
        asked_s = loop.time()
        if asked_s < self._ask_after_s:
            return None
        try:
            answer = await ask()
        except DomainError as error:
            self.unanswered += 1
            self._answered(loop.time() - asked_s, "failed")
            self._ask_after_s = loop.time() + self._backoff.next_s()
            if self.outage is None and self.chains.filters_any:
                log.warning(
                    "filter service unavailable",
                    topic=str(self._topic),
                    subscription=self._name,
                    why=error.message,
                )
                self.outage = Outage(self._now_ms(), error.message)
            return None
        took_s = loop.time() - asked_s
        self.answers += 1
        self._answered(took_s, "answered")
        self.answers_s += took_s
        self.answer_max_s = max(self.answer_max_s, took_s)
        self._backoff.reset()
        if self.outage is not None:
            log.info(
                "filter service available again", topic=str(self._topic), subscription=self._name
            )
            self.outage = None
        return answer

    async def _pause(self) -> None:
        """Wait until the backoff ends or the chains change."""
        self._news.clear()
        try:
            async with asyncio.timeout_at(self._ask_after_s):
                await self._news.wait()
        except TimeoutError:
            pass

    # ---- counting

    def _count(self, entries: Sequence[StoredEntry], found: Sequence[Known]) -> None:
        failed = self._failed
        for each, known in zip(entries, found, strict=True):
            tally = known.tally
            tally.entries += 1
            tally.messages += each.metadata.num_messages_in_batch or 1
            if known.verdict == FILTER_FAILED:
                self._record_failed(position_of(each), known)
            elif failed:
                failed.pop(position_of(each), None)
        if self._history is not None:
            self._record(self._history, entries, found)

    def _record(
        self, history: History, entries: Sequence[StoredEntry], found: Sequence[Known]
    ) -> None:
        """Record verdicts, each for all its entries at once."""
        by: dict[Known, list[Position]] = {}
        for each, known in zip(entries, found, strict=True):
            if known.event is not None:
                by.setdefault(known, []).append(position_of(each))
        for known, positions in by.items():
            assert known.event is not None
            what, details = known.event
            history.record(what, self._now_ms(), positions, *details)

    def _record_failed(self, position: Position, known: Known) -> None:
        decision, chain = known.decision, self.chains.at(position)
        assert decision is not None
        assert decision.failure is not None
        if decision.filter is None or decision.filter >= len(chain.filters):
            name, version = "", 0
        else:
            name, version, _ = chain.filters[decision.filter]
        before = self._failed.pop(position, None)
        since_ms = self._now_ms() if before is None else before.since_ms
        self._failed[position] = Failed(name, version, decision.failure, since_ms)
        if len(self._failed) > FAILED_MAX:
            self._failed.popitem(last=False)


def _set_verdicts(span: Span, found: Sequence[Known] | None) -> None:
    if found is None:
        spans.fail(span, FiltersUnavailable.reason, "the filter service did not answer")
        return
    verdicts = Counter(names.VERDICTS + _verdict_name(known) for known in found)
    span.set_attributes({names.ENTRIES: len(found), **verdicts})


def _verdict_name(known: Known) -> str:
    if known.decision is not None:
        return "failed"
    if known.verdict > 0:
        return RESCHEDULED
    return REJECTED if known.verdict == REJECT else ACCEPTED

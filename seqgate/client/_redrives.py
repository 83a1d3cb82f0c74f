"""The admin client's calls about redrives and replays, and what it shows of them."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, NamedTuple

from seqgate.api.dispatcher.v1 import dispatcher_pb2 as pb
from seqgate.client._arguments import UINT32_MAX, flag, text, whole
from seqgate.client._calls import Calls
from seqgate.client._codec import position_of
from seqgate.client._fields import full_name, optional_key, optional_name, stored_positions
from seqgate.client._reader import EARLIEST, LATEST
from seqgate.client._subscribing import Place, start_to_wire
from seqgate.message_id import MessageId
from seqgate.times import moment_of
from seqgate.types import Position

ESTIMATE_TIMEOUT_S: Final = 15.0
"""How long an estimate may take, in seconds: the service ends it after ten."""

_STATE, _OUTCOME = "REDRIVE_STATE_", "REDRIVE_OUTCOME_"


@dataclass(frozen=True, slots=True)
class RedriveInfo:
    """A redrive, or a replay, as it is now.

    Attributes:
        number: counts the subscription's redrives.
        request_id: its caller's id for it.
        state: RUNNING, DONE, STOPPED or FAILED, as RedriveState in dispatcher.proto names them.
        failure: why it failed; empty: it did not.
        waits_for: what it waits for while it runs; empty: for nothing.
        dead_letter_topic: where its letters are; None: it is a replay, or of letters named one by
            one.
        after, through: of a replay, the entries after this one (None: from the first) through this
            one (None: there are none).
        key, expression: which messages it redrives; None and empty: all.
        letters_per_s: the most messages a second; 0: no limit.
        started_at, ended_at: None of a redrive of letters named one by one.
        entries: how many entries there were to read when it started, about.
        entries_read: how many of them it has read.
        outcomes: the number of messages by outcome: REDRIVEN, or why they are left out, as
            RedriveOutcome in dispatcher.proto names it.
        returning: how many of its messages are on their way, and not settled.
        caller: who started it, if known.
    """

    number: int
    request_id: str
    state: str
    failure: str
    waits_for: str
    dead_letter_topic: str | None
    after: Position | None
    through: Position | None
    key: bytes | None
    expression: str
    letters_per_s: int
    started_at: datetime | None
    ended_at: datetime | None
    entries: int
    entries_read: int
    outcomes: Mapping[str, int]
    returning: int
    caller: str

    @property
    def is_running(self) -> bool:
        """Whether it has not ended."""
        return self.state == "RUNNING"


class Estimated(NamedTuple):
    """How many messages would have an outcome.

    Attributes:
        entries, messages: the number of entries looked at with it, and of their messages.
        about, low, high: the estimated number of entries in all, and its bounds at 95 % confidence.
    """

    entries: int
    messages: int
    about: int
    low: int
    high: int


@dataclass(frozen=True, slots=True)
class RedriveEstimate:
    """What a redrive would redrive, and leave out.

    Attributes:
        entries: how many entries there are to read, about.
        entries_read: how many were looked at: all, or blocks spread evenly over them.
        is_complete: whether all were: the estimates are then exact.
        outcomes: by outcome, as in RedriveInfo.
    """

    entries: int
    entries_read: int
    is_complete: bool
    outcomes: Mapping[str, Estimated]


@dataclass(frozen=True, slots=True)
class Redrive:
    """Dead letters that were taken back to their subscription.

    Attributes:
        number: counts the subscription's redrives; 0: a dry run.
        letters: how many letters it has.
        repeated: whether an earlier request with the same id made it.
    """

    number: int
    letters: int
    repeated: bool


class RedriveCalls:
    """The part of Admin for redrives and replays."""

    _calls: Calls

    async def redrive(
        self,
        topic: str,
        subscription: str,
        letters: Iterable[MessageId],
        *,
        request_id: str,
        dry_run: bool = False,
        dead_letter_topic: str = "",
    ) -> Redrive:
        """Take dead letters back to their subscription, all or none: each message is delivered and
        acknowledged once more, under the rules of its key.

        Args:
            letters: their ids in the dead letter topic: 1 to 100, each once. A chunk of a large
                message names all of its chunks.
            request_id: identifies the request, of 1 to 64 bytes: repeat a call with the same one.
            dry_run: check the letters and change nothing.

        Raises:
            InvalidRequestError: too many letters, or an invalid request id.
            InUseError: one of them cannot be redriven: it is missing, on its way back, was
                redriven, mended or discarded before, or is a large message that lacks chunks.
            LimitExceededError: too many letters are on their way back.
        """
        request = pb.RedriveDeadLettersRequest(
            topic=full_name(topic),
            subscription=text("subscription", subscription),
            dead_letter_topic=optional_name(dead_letter_topic),
            positions=stored_positions("letters", letters),
            request_id=text("request_id", request_id),
            dry_run=flag("dry_run", dry_run),
        )
        made = await self._calls.call(request)
        return Redrive(made.redrive, made.letters, made.repeated)

    async def start_redrive(
        self,
        topic: str,
        subscription: str,
        *,
        request_id: str,
        key: str | bytes | None = None,
        expression: str = "",
        letters_per_s: int = 0,
        dead_letter_topic: str = "",
    ) -> RedriveInfo:
        """Start a redrive of many dead letters: of all, or those selected. It survives its caller
        and the instance that owns the subscription, and redrives each letter once.

        Args:
            request_id: identifies the request, of 1 to 64 bytes: repeat a call with the same one.
            key: only the letters of this key.
            expression: only the letters for which this is true: an expression as in a filter.
            letters_per_s: the most letters a second, up to 10,000; 0: as fast as consumers settle
                them.
            dead_letter_topic: where the letters are; empty: the topic that the subscription uses.

        Raises:
            InvalidRequestError: an argument is invalid.
            InUseError: another redrive of many runs.
            NotFoundError: there is no such subscription.
        """
        request = pb.StartRedriveRequest(
            topic=full_name(topic),
            subscription=text("subscription", subscription),
            dead_letter_topic=optional_name(dead_letter_topic),
            selection=selection(optional_key(key), expression),
            letters_per_second=whole("letters_per_s", letters_per_s, 0, UINT32_MAX),
            request_id=text("request_id", request_id),
        )
        return redrive_info((await self._calls.call(request)).redrive)

    async def estimate_redrive(
        self,
        topic: str,
        subscription: str,
        *,
        key: str | bytes | None = None,
        expression: str = "",
        dead_letter_topic: str = "",
        entries_max: int = 10_000,
    ) -> RedriveEstimate:
        """What `start_redrive` would redrive, and leave out and why. Changes nothing.

        Args:
            entries_max: look at no more entries than this, up to 100,000, and estimate the rest.

        Raises:
            InvalidRequestError: an argument is invalid.
            NotFoundError: there is no such subscription.
        """
        request = pb.EstimateRedriveRequest(
            topic=full_name(topic),
            subscription=text("subscription", subscription),
            dead_letter_topic=optional_name(dead_letter_topic),
            selection=selection(optional_key(key), expression),
            max_entries=whole("entries_max", entries_max, 0, UINT32_MAX),
        )
        return redrive_estimate(await self._calls.call(request, timeout_s=ESTIMATE_TIMEOUT_S))

    async def replay(
        self,
        topic: str,
        subscription: str,
        *,
        request_id: str,
        start: Place = EARLIEST,
        end: Place = LATEST,
        key: str | bytes | None = None,
        expression: str = "",
        letters_per_s: int = 0,
        create: bool = False,
    ) -> RedriveInfo:
        """Deliver a stretch of the topic once more to a subscription: messages that it has
        acknowledged. It is a redrive with a number, and touches no acknowledgement.

        Args:
            request_id, key, expression, letters_per_s: as for `start_redrive`.
            start, end: the first message, and the one after the last.
            create: create the subscription at the end of the log, unless it exists.

        Raises:
            InvalidRequestError: an argument is invalid.
            InUseError: another redrive of many runs.
            NotFoundError: there is no such topic, or no such subscription.
        """
        request = pb.StartRedriveRequest(
            topic=full_name(topic),
            subscription=text("subscription", subscription),
            selection=selection(optional_key(key), expression, (start, end)),
            letters_per_second=whole("letters_per_s", letters_per_s, 0, UINT32_MAX),
            request_id=text("request_id", request_id),
            create_subscription=flag("create", create),
        )
        return redrive_info((await self._calls.call(request)).redrive)

    async def estimate_replay(
        self,
        topic: str,
        subscription: str,
        *,
        start: Place = EARLIEST,
        end: Place = LATEST,
        key: str | bytes | None = None,
        expression: str = "",
        create: bool = False,
        entries_max: int = 10_000,
    ) -> RedriveEstimate:
        """What `replay` would deliver, and leave out and why. Changes nothing, and creates nothing.
        Arguments and errors are those of `replay` and `estimate_redrive`."""
        request = pb.EstimateRedriveRequest(
            topic=full_name(topic),
            subscription=text("subscription", subscription),
            selection=selection(optional_key(key), expression, (start, end)),
            create_subscription=flag("create", create),
            max_entries=whole("entries_max", entries_max, 0, UINT32_MAX),
        )
        return redrive_estimate(await self._calls.call(request, timeout_s=ESTIMATE_TIMEOUT_S))

    async def redrives(self, topic: str, subscription: str) -> list[RedriveInfo]:
        """The latest redrives and replays of a subscription, the newest first. Raises
        NotFoundError."""
        request = pb.ListRedrivesRequest(
            topic=full_name(topic), subscription=text("subscription", subscription)
        )
        return [redrive_info(each) for each in (await self._calls.call(request)).redrives]

    async def redrive_info(self, topic: str, subscription: str, number: int) -> RedriveInfo:
        """A redrive or replay, by its number. Raises NotFoundError."""
        request = pb.GetRedriveRequest(
            topic=full_name(topic),
            subscription=text("subscription", subscription),
            number=whole("number", number, 0),
        )
        return redrive_info((await self._calls.call(request)).redrive)

    async def stop_redrive(self, topic: str, subscription: str, number: int) -> RedriveInfo:
        """Stop a redrive or replay for good; one that has ended is left unchanged. Messages on
        their way stay on their way. Raises NotFoundError."""
        request = pb.StopRedriveRequest(
            topic=full_name(topic),
            subscription=text("subscription", subscription),
            number=whole("number", number, 0),
        )
        return redrive_info((await self._calls.call(request)).redrive)


def selection(
    key: bytes | None, expression: str, stretch: tuple[Place, Place] | None = None
) -> pb.RedriveSelection:
    """The messages of a redrive. Raises InvalidRequestError."""
    found = pb.RedriveSelection(key=key, expression=text("expression", expression))
    if stretch is not None:
        start, end = map(start_to_wire, stretch)
        found.stretch.CopyFrom(pb.TopicStretch(start=start, end=end))
    return found


def redrive_info(wire: pb.Redrive) -> RedriveInfo:
    stretch = wire.selection.stretch
    return RedriveInfo(
        number=wire.number,
        request_id=wire.request_id,
        state=pb.RedriveState.Name(wire.state).removeprefix(_STATE),
        failure=wire.failure,
        waits_for=wire.waits_for,
        dead_letter_topic=wire.dead_letter_topic or None,
        after=_after(stretch, "start"),
        through=_after(stretch, "end"),
        key=wire.selection.key if wire.selection.HasField("key") else None,
        expression=wire.selection.expression,
        letters_per_s=wire.letters_per_second,
        started_at=_time(wire, "started"),
        ended_at=_time(wire, "ended"),
        entries=wire.total_entries,
        entries_read=wire.scanned_entries,
        outcomes={_outcome(each.outcome): each.entries for each in wire.counts},
        returning=wire.returning_entries,
        caller=wire.caller,
    )


def redrive_estimate(wire: pb.EstimateRedriveResponse) -> RedriveEstimate:
    return RedriveEstimate(
        wire.total_entries,
        wire.scanned_entries,
        wire.complete,
        {
            _outcome(each.outcome): Estimated(
                each.entries,
                each.messages,
                each.estimated_entries,
                each.estimated_entries_low,
                each.estimated_entries_high,
            )
            for each in wire.outcomes
        },
    )


def _outcome(number: Any) -> str:
    value = pb.RedriveOutcome.DESCRIPTOR.values_by_number.get(number)
    return str(number) if value is None else value.name.removeprefix(_OUTCOME)


def _after(stretch: pb.TopicStretch, field: str) -> Position | None:
    place = getattr(stretch, field)
    return position_of(place.after) if place.HasField("after") else None


def _time(wire: pb.Redrive, field: str) -> datetime | None:
    if not wire.HasField(field):  # type: ignore[arg-type]
        return None
    return moment_of(getattr(wire, field))

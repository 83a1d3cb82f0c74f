"""What each page shows: the services' answers, in the form that its template needs.

A page is a coroutine of a request's query that returns a template's values. It asks the services as
the reader, and changes nothing.
"""

import asyncio
import base64
import hashlib
import secrets
import socket
import time
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any, Final, NamedTuple, TypeVar
from urllib.parse import urlencode

from grpc import aio
from grpc_health.v1 import health_pb2

from seqgate.api.dedup.v1 import dedup_pb2
from seqgate.api.dispatcher.v1 import dispatcher_pb2
from seqgate.api.ledger.v1 import ledger_pb2
from seqgate.channels import open_channel
from seqgate.client._calls import Calls
from seqgate.client._frames import Sample, Sampler, frame_of
from seqgate.errors import InvalidRequestError, NotFoundError, SeqgateError
from seqgate.keys import sticky_key
from seqgate.message_id import MessageId
from seqgate.payloads import PayloadDamaged, open_batch, unpack
from seqgate.services.console import searching
from seqgate.services.console.charts import line_chart
from seqgate.services.console.config import ConsoleConfig
from seqgate.services.console.history import History, latest, levels, rates
from seqgate.services.console.payloads import key_text, shown
from seqgate.services.console.searching import Search, position_of, to_wire
from seqgate.services.runtime.channels import health_check
from seqgate.tls import TLS
from seqgate.types import Position, TopicName

T = TypeVar("T")

TOPICS_MAX: Final = 100
"""The most topics that a page lists, by name; a prefix selects others."""

SUBSCRIPTIONS_MAX: Final = 100
"""The most subscriptions that a topic's page lists."""

PRODUCERS_MAX: Final = 100
"""The most producers that a topic's page lists."""

KEYS_MAX: Final = 50
"""The most withheld keys that a subscription's page lists, the longest waiting first."""

MESSAGES_MAX: Final = 50
"""The most messages of a batch that its page lists."""

RANGES_MAX: Final = 6
"""The most ranges of slots shown of a consumer; the number of further ones is shown."""

LETTERS_MAX: Final = 50
"""The most dead letters that a page lists, the oldest first."""

INSTANCES_MAX: Final = 50
"""The most instances of a service that are asked for their health."""

READERS_MAX: Final = 200
"""The most readers whose last sample of all topics is kept, for rates."""

Query = Mapping[str, str]
Values = dict[str, Any]


class Reader(NamedTuple):
    """Who looks: a digest of the token, which keeps readers' histories apart."""

    name: str

    @classmethod
    def of(cls, token: str) -> "Reader":
        return cls(hashlib.sha256(token.encode()).hexdigest())


class Pages:
    def __init__(self, config: ConsoleConfig, calls: Calls) -> None:
        self._config = config
        self._calls = calls
        self._history = History()
        self._samples: dict[Reader, Sample] = {}

    # ---- overview

    async def overview(self, reader: Reader, query: Query) -> Values:
        """Rates, verdicts, lag and withheld keys of all topics that a prefix selects."""
        prefix = query.get("prefix", "")
        sample = await Sampler(self._calls, f"{_without_wildcards(prefix)}*").sample()
        if prefix == "":
            if len(self._samples) >= READERS_MAX:
                self._samples.pop(next(iter(self._samples)))
            before = self._samples.pop(reader, None)
            self._samples[reader] = sample
        else:
            before = None
        denied = sample.away.get("ledger")
        if denied is not None and not sample.topics:
            raise denied
        frame = frame_of(sample, before, "name")
        rows = [_totals(each) for each in sample.topics.values()]
        sums: dict[str, float] = {
            name: sum(each[name] for each in rows)
            for name in ("messages", "delivered", "new", "duplicate", "other", "lag", "withheld")
        }
        points = self._history.add((reader.name, "overview", prefix), sample.at_s, sums)
        into, out = rates(points, "messages"), rates(points, "delivered")
        verdicts = {name: rates(points, name) for name in ("new", "duplicate", "other")}
        lag, withheld = levels(points, "lag"), levels(points, "withheld")
        waiting = [
            {"topic": topic["topic"], **subscription}
            for topic in frame["topics"]
            for subscription in topic["subscriptions"] or ()
            if subscription["blocked_keys"]
        ]
        return {
            "frame": frame,
            "prefix": prefix,
            "waiting": sorted(waiting, key=lambda each: -each["blocked_keys"])[:KEYS_MAX],
            "tiles": [
                ("messages in", latest(into), "/s"),
                ("messages out", latest(out), "/s"),
                ("duplicates", latest(verdicts["duplicate"]), "/s"),
                ("lag, all subscriptions", sums["lag"], ""),
                ("withheld keys", sums["withheld"], ""),
            ],
            "charts": [
                line_chart("Messages", {"in": into, "out": out}, "per second"),
                line_chart("Verdicts", verdicts, "per second"),
                line_chart("Lag", {"entries": lag}, "entries"),
                line_chart("Withheld keys", {"keys": withheld}, "keys"),
            ],
        }

    # ---- topics

    async def topics(self, reader: Reader, query: Query) -> Values:
        """Topics, by prefix."""
        prefix = query.get("prefix", "")
        page = await self._calls.call(
            ledger_pb2.ListTopicsRequest(
                prefix=prefix, page_size=TOPICS_MAX, page_token=query.get("after", "")
            )
        )
        return {"topics": page.topics, "prefix": prefix, "next": page.next_page_token}

    async def topic(self, reader: Reader, query: Query) -> Values:
        """A topic: its log, its deduplication, its producers and its subscriptions."""
        name = _topic(query)
        found = (await self._calls.call(ledger_pb2.GetTopicRequest(topic=name))).topic
        status, producers, subscriptions = await asyncio.gather(
            _part(self._calls.call(dedup_pb2.GetTopicStatusRequest(topic=name))),
            _part(
                self._calls.call(
                    dedup_pb2.ListProducersRequest(
                        topic=name, page_size=PRODUCERS_MAX, page_token=query.get("after", "")
                    )
                )
            ),
            _part(
                self._calls.call(
                    dispatcher_pb2.ListSubscriptionsRequest(topic=name, page_size=SUBSCRIPTIONS_MAX)
                )
            ),
        )
        counts = {} if isinstance(status, SeqgateError) else _verdicts(status)
        values = {"messages": found.messages, **counts}
        points = self._history.add((reader.name, "topic", name), time.monotonic(), values)
        lines = {each: rates(points, each) for each in ("new", "duplicate", "other")}
        return {
            "topic": found,
            "status": status,
            "state": _known(status, lambda it: _enum(dedup_pb2.TopicState, it.state)),
            "sources": _known(status, lambda it: _policy(it.policy)),
            "producers": producers,
            "subscriptions": subscriptions,
            "charts": [
                line_chart("Messages stored", {"in": rates(points, "messages")}, "per second"),
                line_chart("Verdicts", lines, "per second"),
            ],
        }

    # ---- messages

    async def messages(self, reader: Reader, query: Query) -> Values:
        """A page of a topic's log, or a search through it."""
        name = _topic(query)
        topic = (await self._calls.call(ledger_pb2.GetTopicRequest(topic=name))).topic
        last = position_of(topic.last) if topic.HasField("last") else None
        key = query.get("key", "")
        wanted = Search(
            topic=name,
            start=_start(query),
            key=_key(query) if key or query.get("key64") else None,
            producer=query.get("producer", ""),
            sequence_id=_number(query, "sequence_id"),
            expression=query.get("expression", "").strip(),
        )
        if last is not None and wanted.start is None and not wanted.is_narrow:
            newest = Position(last.ledger_id, last.entry_id + 1)
            start = await searching.steps_back(self._calls, name, newest, searching.ROWS_MAX)
            wanted = wanted._replace(start=start)
        fault = ""
        found = searching.Found()
        try:
            found = await searching.search(self._calls, wanted)
        except InvalidRequestError as error:
            fault = str(error)
        first = position_of(found.entries[0].position) if found.entries else None
        older = None
        if not wanted.is_narrow and first is not None and first > position_of(topic.first):
            older = await searching.steps_back(self._calls, name, first, searching.ROWS_MAX)
        further = found.last if found.stopped_by and found.last != last else None
        if further is not None:
            further = Position(further.ledger_id, further.entry_id + 1)
        fate = None
        if wanted.producer and wanted.sequence_id is not None:
            fate = await _part(
                self._calls.call(
                    ledger_pb2.FindMessageRequest(
                        topic=name, producer_name=wanted.producer, sequence_id=wanted.sequence_id
                    )
                )
            )
        return {
            "topic": topic,
            "wanted": wanted,
            "query": dict(query),
            "rows": [_row(each) for each in found.entries],
            "found": found,
            "fault": fault,
            "older": older,
            "further": further,
            "fate": None if fate is None or isinstance(fate, SeqgateError) else _fate(fate.fate),
            "limits": {
                "entries": searching.SCAN_ENTRIES_MAX,
                "seconds": searching.SCAN_S,
                "judged": searching.EXPRESSION_ENTRIES_MAX,
                "rows": searching.ROWS_MAX,
            },
        }

    async def message(self, reader: Reader, query: Query) -> Values:
        """An entry, its messages, and a payload as JSON, text or hex."""
        name = _topic(query)
        at = _position(query.get("position", ""))
        entry = await searching.entry_at(self._calls, name, at)
        if entry is None:
            raise NotFoundError(f"{name} has no entry {at}", reason="NO_ENTRY")
        index = _number(query, "index") or 0
        messages: list[Any] = []
        damage = ""
        payload = entry.payload
        try:
            if entry.metadata.HasField("num_messages_in_batch"):
                messages = list(open_batch(entry.metadata, entry.payload))
                payload = messages[index].payload if index < len(messages) else b""
            elif not entry.metadata.HasField("chunk_id"):
                payload = unpack(entry.metadata, entry.payload)
        except PayloadDamaged as error:
            damage = str(error)
        subscriptions = await _part(
            self._calls.call(
                dispatcher_pb2.ListSubscriptionsRequest(topic=name, page_size=SUBSCRIPTIONS_MAX)
            )
        )
        return {
            "topic": name,
            "row": _row(entry),
            "entry": entry,
            "properties": sorted(entry.metadata.properties.items()),
            "messages": [_single(each) for each in messages[:MESSAGES_MAX]],
            "messages_in_all": len(messages),
            "index": index,
            "size_bytes": len(payload),
            "payload": shown(payload, query.get("as", "")),
            "damage": damage,
            "subscriptions": subscriptions,
        }

    # ---- subscriptions

    async def subscriptions(self, reader: Reader, query: Query) -> Values:
        """The subscriptions of all topics that a prefix selects."""
        prefix = query.get("prefix", "")
        sample = await Sampler(self._calls, f"{_without_wildcards(prefix)}*").sample()
        denied = sample.away.get("ledger") or sample.away.get("dispatcher")
        if denied is not None and not any(each.subscriptions for each in sample.topics.values()):
            raise denied
        frame = frame_of(sample, None, "name")
        rows = [
            {"topic": topic["topic"], **subscription}
            for topic in frame["topics"]
            for subscription in topic["subscriptions"] or ()
        ]
        return {"rows": rows[: 2 * TOPICS_MAX], "in_all": len(rows), "prefix": prefix}

    async def subscription(self, reader: Reader, query: Query) -> Values:
        """A subscription: consumers, withheld keys, lag, filters."""
        name, subscription = _topic(query), query.get("subscription", "")
        names = {"topic": name, "subscription": subscription}
        found = (
            await self._calls.call(dispatcher_pb2.GetSubscriptionRequest(**names))
        ).subscription
        # A report would make an instance take a subscription that none owns.
        report: Any = None
        if found.owner:
            report = await _part(
                self._calls.call(dispatcher_pb2.ReportRequest(**names, max_keys=KEYS_MAX))
            )
        topic, filters = await asyncio.gather(
            _part(self._calls.call(ledger_pb2.GetTopicRequest(topic=name))),
            _part(self._calls.call(dispatcher_pb2.GetFiltersRequest(**names))),
        )
        values: dict[str, float] = {}
        if not isinstance(topic, SeqgateError):
            sampler = Sampler(self._calls, name)
            lag = await _part(sampler.lag(topic.topic, found))
            if not isinstance(lag, SeqgateError):
                values["lag"] = lag
        is_known = isinstance(report, dispatcher_pb2.ReportResponse)
        if is_known:
            values |= {
                "delivered": report.totals.delivered_messages,
                "acknowledged": report.totals.acknowledged_entries,
                "unacked": report.unacked_messages,
                "withheld": sum(each.keys for each in report.withheld),
            }
        points = self._history.add(
            (reader.name, "subscription", name, subscription), time.monotonic(), values
        )
        return {
            **names,
            "found": found,
            "report": report if is_known else None,
            "report_error": report if isinstance(report, SeqgateError) else None,
            "lag": values.get("lag"),
            "type": is_known and _enum(dispatcher_pb2.SubscriptionType, report.options.type),
            "after": is_known
            and _enum(dispatcher_pb2.AfterDeadLetter, report.options.after_dead_letter),
            "consumers": [_consumer(each) for each in report.consumers] if is_known else [],
            "withheld": [
                (_enum(dispatcher_pb2.Reason, each.reason), each.keys, _time(each, "oldest"))
                for each in report.withheld
            ]
            if is_known
            else [],
            "keys": [_key_row(each) for each in report.keys] if is_known else [],
            "filters": _known(filters, lambda it: it.filters),
            "filter_rows": _filters(report) if is_known else [],
            "charts": [
                line_chart("Lag", {"entries": levels(points, "lag")}, "entries"),
                line_chart(
                    "Delivered, acknowledged",
                    {each: rates(points, each) for each in ("delivered", "acknowledged")},
                    "per second",
                ),
                line_chart(
                    "In flight, withheld",
                    {
                        "messages": levels(points, "unacked"),
                        "withheld keys": levels(points, "withheld"),
                    },
                    "",
                ),
            ],
        }

    async def why(self, reader: Reader, query: Query) -> Values:
        """Why a key's messages, or one message, are not delivered."""
        name, subscription = _topic(query), query.get("subscription", "")
        request = dispatcher_pb2.ExplainRequest(topic=name, subscription=subscription)
        at = query.get("position", "")
        if at:
            request.position.CopyFrom(to_wire(_position(at)))
        else:
            request.key = _key(query)
        answer = await self._calls.call(request)
        key = answer.key if answer.HasField("key") else (None if at else request.key)
        return {
            "topic": name,
            "subscription": subscription,
            "position": at,
            "key": None if key is None else key_text(key),
            "key_query": None if key is None else _key_query(key),
            "reasons": [
                {
                    "reason": _enum(dispatcher_pb2.Reason, each.reason),
                    "text": each.text,
                    "consumer": each.consumer,
                    "position": position_of(each.position) if each.HasField("position") else None,
                    "since": _time(each, "since"),
                    "until": _time(each, "until"),
                    "letters": each.dead_letter_topic,
                }
                for each in answer.reasons
            ],
            "row": _key_row(answer.key_report) if answer.HasField("key_report") else None,
        }

    async def letters(self, reader: Reader, query: Query) -> Values:
        """A page of a subscription's dead letters, the oldest first."""
        names = _names(query)
        wanted = dispatcher_pb2.ListDeadLettersRequest(
            topic=names["topic"],
            subscription=names["subscription"],
            page_size=LETTERS_MAX,
            page_token=query.get("from", ""),
        )
        found = await self._calls.call(wanted)
        return {
            **names,
            "letters": found.dead_letter_topic,
            "rows": [_letter(each) for each in found.letters],
            "next": found.next_page_token,
        }

    async def letter(self, reader: Reader, query: Query) -> Values:
        """A dead letter: why it is one, its failed deliveries, and what waits behind it."""
        names, position = _names(query), _position(query.get("position", ""))
        found = await self._calls.call(
            dispatcher_pb2.GetDeadLetterRequest(**names, position=to_wire(position))
        )
        return {**names, "letters": found.dead_letter_topic, "row": _letter(found.letter)}

    async def redrive(self, reader: Reader, query: Query) -> Values:
        """What a redrive of a dead letter would do: its dry run."""
        request = redrive_of(query, request_id=secrets.token_urlsafe(16), dry_run=True)
        await self._calls.call(request)
        return {**_names(query), "position": query["position"], "request_id": request.request_id}

    # ---- cluster

    async def cluster(self, reader: Reader, query: Query) -> Values:
        """The services' instances and their health, and who owns subscriptions."""
        names = list(self._config.targets)
        rows = await asyncio.gather(*(self._instances(name) for name in names))
        sample = await Sampler(self._calls, "*").sample()
        owners: dict[str, int] = {}
        for topic in sample.topics.values():
            for each in topic.subscriptions or ():
                owners[each.owner] = owners.get(each.owner, 0) + 1
        return {
            "instances": [each for row in rows for each in row],
            "owners": sorted(owners.items()),
            "away": frame_of(sample, None, "name")["away"],
            "version": version("seqgate"),
        }

    async def _instances(self, service: str) -> list[Values]:
        target = self._config.targets[service]
        addresses = await addresses_of(target)

        async def of(address: str) -> Values:
            return {
                "service": service,
                "target": target,
                "address": address,
                **await self._health(address, target),
            }

        return list(await asyncio.gather(*(of(each) for each in addresses[:INSTANCES_MAX])))

    async def _health(self, address: str, target: str) -> Values:
        tls = self._config.tls
        if tls is not None:  # the certificate is for the name, not for the address
            host = target.rpartition("/")[2].rpartition(":")[0]
            tls = TLS(tls.ca_file, tls.certificate_file, tls.key_file, server_name=host)
        started_s = time.monotonic()
        async with open_channel(address, options=[], hooks=[], tls=tls) as channel:
            try:
                reply = await health_check(channel)(
                    health_pb2.HealthCheckRequest(), timeout=self._config.call_timeout_s
                )
            except aio.AioRpcError as error:
                return {"state": "UNREACHABLE", "why": error.code().name, "took_ms": None}
        took_ms = (time.monotonic() - started_s) * 1000
        state = "READY" if reply.status == health_pb2.HealthCheckResponse.SERVING else "NOT READY"
        return {"state": state, "why": "", "took_ms": took_ms}


# ---- parts of pages


async def _part(call: Awaitable[T]) -> T | SeqgateError:
    """An answer that a page can do without: the refusal, if there is none."""
    try:
        return await call
    except SeqgateError as error:
        return error


def _known(answer: Any, read: Callable[[Any], T]) -> T | None:
    return None if isinstance(answer, SeqgateError) else read(answer)


async def addresses_of(target: str) -> list[str]:
    """The addresses behind a target."""
    if target.startswith(("ipv4:", "ipv6:")):
        return target.partition(":")[2].split(",")
    if target.startswith("unix"):
        return [target]
    host, _, port = target.rpartition("/")[2].rpartition(":")
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError:
        return [f"{host}:{port}"]
    hosts = sorted({str(each[4][0]) for each in found})
    return [f"[{each}]:{port}" if ":" in each else f"{each}:{port}" for each in hosts]


def _totals(topic: Any) -> dict[str, float]:
    reports = [each.report for each in topic.subscriptions or () if each.report is not None]
    counts = {"new": 0.0, "duplicate": 0.0, "other": 0.0}
    if topic.status is not None:
        counts |= _verdicts(topic.status)
    return {
        "messages": topic.topic.messages,
        "delivered": sum(each.totals.delivered_messages for each in reports),
        "lag": sum(each.lag or 0 for each in topic.subscriptions or ()),
        "withheld": sum(keys.keys for each in reports for keys in each.withheld),
        **counts,
    }


def _verdicts(status: dedup_pb2.GetTopicStatusResponse) -> dict[str, float]:
    counts = status.counts
    return {
        "new": counts.new_claims,
        "duplicate": counts.duplicate_claims,
        "other": counts.partial_claims + counts.waiting_claims + counts.misplaced_chunk_claims,
    }


def _policy(policy: dedup_pb2.Policy) -> list[tuple[str, str, str]]:
    """(value's name, value, the level that set it)."""

    def source(name: str) -> str:
        return _enum(dedup_pb2.PolicySource, getattr(policy, f"{name}_source")).lower()

    timeout_s = policy.producer_inactivity_timeout.seconds
    interval_s = policy.snapshot_interval.seconds
    values = {
        "enabled": "yes" if policy.enabled else "no",
        "producer_inactivity_timeout": f"{timeout_s:,} s" if timeout_s else "never",
        "max_producers": f"{policy.max_producers:,}",
        "on_full": _enum(dedup_pb2.FullTopicAction, policy.on_full).lower(),
        "snapshot_entries": f"{policy.snapshot_entries:,}" if policy.snapshot_entries else "never",
        "snapshot_interval": f"{interval_s:,} s" if interval_s else "never",
    }
    return [(name.replace("_", " "), value, source(name)) for name, value in values.items()]


def _row(entry: ledger_pb2.StoredEntry) -> Values:
    metadata = entry.metadata
    notes = []
    if metadata.HasField("chunk_id"):
        notes.append(f"chunk {metadata.chunk_id + 1} of {metadata.num_chunks_from_msg}")
    if metadata.HasField("marker_type"):
        notes.append("marker")
    if metadata.HasField("deliver_at_time"):
        notes.append("delayed")
    if entry.aborts:
        notes.append("aborts an attempt")
    has_key = metadata.HasField("partition_key") or metadata.HasField("ordering_key")
    highest = metadata.highest_sequence_id
    return {
        "position": position_of(entry.position),
        "time": entry.append_time.ToDatetime(UTC),
        "producer": metadata.producer_name,
        "sequence_id": metadata.sequence_id,
        "to_sequence_id": highest if highest > metadata.sequence_id else None,
        "key": key_text(sticky_key(metadata)) if has_key else None,
        "key_query": _key_query(sticky_key(metadata)),
        "messages": metadata.num_messages_in_batch or 1,
        "is_batch": metadata.HasField("num_messages_in_batch"),
        "bytes": entry.payload_bytes or len(entry.payload),
        "notes": notes,
    }


def _single(message: Any) -> Values:
    metadata = message.metadata
    return {
        "key": metadata.partition_key if metadata.HasField("partition_key") else None,
        "sequence_id": metadata.sequence_id,
        "bytes": len(message.payload),
        "properties": sorted(metadata.properties.items()),
    }


def _letter(each: dispatcher_pb2.DeadLetter) -> Values:
    return {
        "position": position_of(each.position),
        "origin": position_of(each.origin),
        "key": key_text(each.key),
        "key_query": _key_query(each.key),
        "producer": each.producer_name,
        "sequence_id": each.sequence_id,
        "properties": sorted(each.properties.items()),
        "messages": each.num_messages,
        "bytes": each.payload_bytes,
        "chunk": each.chunk_id if each.HasField("chunk_id") else None,
        "time": _time(each, "time"),
        "reason": _enum(dispatcher_pb2.DeadLetterReason, each.reason),
        "attempts": each.attempts,
        "failures": [
            (_enum(dispatcher_pb2.DeliveryFailure, it.failure), _time(it, "time"), it.consumer)
            for it in each.failures
        ],
        "holds_key": each.holds_key,
        "waiting": each.waiting_entries,
        "lags": each.lags,
        "redriven": each.redriven,
        "redrives": each.redrives,
    }


def _consumer(each: dispatcher_pb2.ConsumerReport) -> Values:
    ranges = [f"{part.first} to {part.last}" for part in each.ranges[:RANGES_MAX]]
    more = len(each.ranges) - len(ranges)
    slots = sum(min(part.last, 65_535) - part.first + 1 for part in each.ranges)
    return {
        "name": each.name,
        "ranges": ", ".join(ranges) + (f" and {more:,} more" if more > 0 else ""),
        "slots": slots,
        "permits": each.permits,
        "unacked": each.unacked_messages,
        "is_blocked": each.blocked_on_unacked,
        "draining": each.draining_keys,
        "parked": each.parked_entries,
        "oldest": _time(each, "oldest_delivery"),
        "connected": _time(each, "connected"),
    }


def _key_row(each: dispatcher_pb2.KeyReport) -> Values:
    return {
        "key": key_text(each.key),
        "key_query": _key_query(each.key),
        "slot": each.slot,
        "reason": _enum(dispatcher_pb2.Reason, each.reason),
        "since": _time(each, "since"),
        "holder": each.holder,
        "owner": each.owner,
        "oldest": position_of(each.oldest) if each.HasField("oldest") else None,
        "attempts": each.attempts,
        "in_flight": each.in_flight_entries,
        "parked": each.parked_entries,
        "next_retry": _time(each, "next_retry"),
    }


def _filters(report: dispatcher_pb2.ReportResponse) -> list[Values]:
    return [
        {
            "mode": _enum(dispatcher_pb2.FilterMode, each.mode),
            "name": each.name,
            "version": each.version,
            **{
                name: getattr(each, name).messages
                for name in ("processed", "accepted", "rejected", "rescheduled", "failed")
            },
        }
        for each in report.filtering.filters
    ]


def _fate(fate: ledger_pb2.MessageFate) -> Values:
    return {
        "fate": _enum(ledger_pb2.Fate, fate.fate),
        "position": position_of(fate.position) if fate.HasField("position") else None,
        "index": fate.batch_index if fate.HasField("batch_index") else None,
    }


def _enum(kind: Any, number: int) -> str:
    """An enum's value without the enum's name; the number, if this version does not know it."""
    names = kind.DESCRIPTOR.values_by_number
    prefix = names[0].name.removesuffix("UNSPECIFIED")
    return names[number].name.removeprefix(prefix) if number in names else str(number)


def _time(message: Any, field: str) -> datetime | None:
    return getattr(message, field).ToDatetime(UTC) if message.HasField(field) else None


# ---- queries


def redrive_of(
    query: Query, *, request_id: str, dry_run: bool = False
) -> dispatcher_pb2.RedriveDeadLettersRequest:
    """The redrive of the dead letter that a query names."""
    return dispatcher_pb2.RedriveDeadLettersRequest(
        **_names(query),
        positions=[to_wire(_position(query.get("position", "")))],
        request_id=request_id,
        dry_run=dry_run,
    )


def _names(query: Query) -> dict[str, str]:
    return {"topic": _topic(query), "subscription": query.get("subscription", "")}


def _topic(query: Query) -> str:
    return str(TopicName.expand(query.get("topic", "")))


def _position(text: str) -> Position:
    try:
        found = MessageId.parse(text)
    except ValueError as error:
        raise InvalidRequestError(f"a position is LEDGER:ENTRY, not {text!r}") from error
    return found.position


def _number(query: Query, name: str) -> int | None:
    text = query.get(name, "").strip()
    if not text:
        return None
    if not text.isascii() or not text.isdecimal() or len(text) > 19 or int(text) >= 2**63:
        raise InvalidRequestError(f"{name} must be 0 to 2^63 - 1")
    return int(text)


def _start(query: Query) -> Position | datetime | None:
    at, moment = query.get("at", "").strip(), query.get("time", "").strip()
    if at:
        return _position(at)
    if not moment:
        return None
    try:
        parsed = datetime.fromisoformat(moment)
    except ValueError as error:
        raise InvalidRequestError(f"time must be like 2026-05-31T12:30, not {moment!r}") from error
    parsed = parsed if parsed.tzinfo else parsed.replace(tzinfo=UTC)
    if parsed.timestamp() < 0:
        raise InvalidRequestError("time must be 1970 or later")
    return parsed


def _key(query: Query) -> bytes:
    coded = query.get("key64", "")
    if not coded:
        return query.get("key", "").encode()
    try:
        return base64.b64decode(coded, altchars=b"-_", validate=True)
    except ValueError as error:
        raise InvalidRequestError("key64 must be base64url") from error


def _key_query(key: bytes) -> str:
    """A key as a part of a URL."""
    try:
        return urlencode({"key": key.decode()})
    except UnicodeDecodeError:
        return urlencode({"key64": base64.urlsafe_b64encode(key).decode()})


def _without_wildcards(prefix: str) -> str:
    return "".join(f"[{each}]" if each in "*?[" else each for each in prefix)

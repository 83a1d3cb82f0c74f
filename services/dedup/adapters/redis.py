"""The state of topics in Redis or Valkey: one hash per topic, one script per operation. One server,
a master behind Sentinels and a cluster are alike here (connect.py, cluster.py): each command has
one key.

No command is retried here. After a lost reply it is unknown whether a script ran, and a blind
second run would take the first run's claims for duplicates. The caller gets StateUnavailable, and
its next call detects the outcome by position and revision.
"""

import asyncio
import hashlib
import re
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import resources
from random import Random
from typing import Any, Final

import msgpack
from redis.asyncio import Redis
from redis.exceptions import NoScriptError, RedisError, ResponseError

from seqgate.services.dedup.adapters.cluster import ClusterRedis
from seqgate.services.dedup.adapters.keys import (
    META,
    POLICIES,
    PREFIX,
    PRODUCER,
    SUFFIX,
    decode_mark,
    decode_persisted,
    decode_position,
    decode_producer,
    encode_id,
    encode_mark,
    encode_position,
    topic_key,
    topic_of,
)
from seqgate.services.dedup.core.topic import (
    Counts,
    Frozen,
    Full,
    Loaded,
    Persisted,
    Saved,
    Tracked,
)
from seqgate.services.dedup.ports import (
    OUTDATED,
    Outdated,
    ProducerPage,
    StateUnavailable,
    Summary,
)
from seqgate.services.deduplication import (
    Applied,
    Behind,
    Changed,
    Claim,
    Confirmation,
    Judged,
    ProducerClaims,
    ProducerVerdicts,
    Verdict,
    Withdrawal,
    Writer,
)
from seqgate.services.errors import Fenced, InvalidPage
from seqgate.services.runtime.limiter import NotSent
from seqgate.services.runtime.load import busy
from seqgate.telemetry import names, spans
from seqgate.types import SEQUENCE_ID_MAX, Chunk, Position, TopicName

RETRY_AFTER_S: Final = 0.2
"""RetryInfo for a caller when Redis does not answer."""

CLOCK_AGE_MAX_S: Final = 10.0
"""How long a reading of Redis's clock is extrapolated by the local monotonic clock."""

LEAP_MAX: Final = 2**40
"""The bound of a revision's leaps. Revisions wrap at 2^52, since Lua's numbers are doubles."""

_RANDOM: Final = Random()
"""Seeded by the system, whose own generator costs a system call per number. Leaps must differ, but
may be guessed."""

_CURSOR: Final = re.compile(r"[0-9]{0,20}")
"""Redis's scan cursors are 64-bit numbers."""

_CONDITION: Final = re.compile(r"(?!ERR|WRONGTYPE)[A-Z]+ ")
"""Matches Redis's errors about its own condition: MISCONF, OOM, CLUSTERDOWN and so on. Errors about
mistakes begin with ERR, which the client library cuts off."""

_VERDICTS: Final = {
    "N": Verdict.NEW,
    "I": Verdict.IN_FLIGHT,
    "D": Verdict.DUPLICATE,
    "P": Verdict.PARTIAL,
    "H": Verdict.HELD,
    "G": Verdict.CHUNK_GAP,
    "C": Verdict.LAYOUT_CONFLICT,
}


def script_text(name: str) -> str:
    folder = resources.files("seqgate.services.dedup.adapters") / "lua"
    text = (folder / f"{name}.lua").read_text()
    if name in ("admit", "confirm", "rollback", "load"):
        text = (folder / "topic.lua").read_text() + text
    return text


class Script:
    def __init__(self, redis: Any, name: str) -> None:
        self._redis = redis
        self._name = name
        self._text = script_text(name)
        self._digest = hashlib.sha1(self._text.encode(), usedforsecurity=False).hexdigest()

    async def __call__(self, topic: TopicName, *args: str | bytes, keys: Sequence[str] = ()) -> Any:
        """Run the script on a topic, and on further keys of the same server. A server that does not
        know it has run nothing, and gets the full text as a command like any other: a cluster's
        other nodes are not contacted.

        Raises:
            StateUnavailable: it is unknown whether the script ran.
        """
        on = (1 + len(keys), topic_key(topic), *keys, *args)
        with spans.database(names.REDIS, "EVALSHA", self._name), _translated():
            try:
                return await self._redis.execute_command("EVALSHA", self._digest, *on)
            except NoScriptError:
                return await self._redis.execute_command("EVAL", self._text, *on)


def _random_leap() -> int:
    return _RANDOM.randrange(LEAP_MAX)


class RedisStateStore:
    """See seqgate.services.dedup.ports.StateStore."""

    def __init__(
        self, redis: Redis | ClusterRedis, *, leap: Callable[[], int] = _random_leap
    ) -> None:
        """`leap` draws the random number by which a withdrawal moves the revision further than by
        one: see topic.lua."""
        self._redis: Any = redis  # its types mix text and bytes, depending on decode_responses
        self._is_cluster = isinstance(redis, ClusterRedis)
        self._admit = Script(redis, "admit")
        self._confirm = Script(redis, "confirm")
        self._rollback = Script(redis, "rollback")
        self._load = Script(redis, "load")
        self._record_snapshot = Script(redis, "record_snapshot")
        self._keep = Script(redis, "keep")
        self._forget = Script(redis, "forget")
        self._forget_topic = Script(redis, "forget_topic")
        self._summary = Script(redis, "summary")
        self._leap = leap
        self._clock_ms = 0
        self._clock_read_at = float("-inf")
        self._reading_clock = asyncio.Lock()

    async def admit(
        self,
        topic: TopicName,
        writer: Writer,
        confirmation: Confirmation | None,
        claims: Sequence[ProducerClaims],
        *,
        now_ms: int,
        max_producers: int,
        policies: str | None = None,
    ) -> Judged | Behind | Changed | Full | Outdated:
        keys: tuple[str, ...] = ()
        if policies is not None and self._is_cluster:  # where another node may have the token
            if await self.policy_token() != policies:
                return OUTDATED
        elif policies is not None:
            keys = (POLICIES,)
        call = self._call(writer, confirmation)
        call["revision"] = False if writer.revision is None else writer.revision
        call["claims"] = [[producer, *_claims(ranges)] for producer, ranges in claims]
        call["now_ms"] = now_ms
        call["max_producers"] = max_producers
        call["policies"] = policies or ""
        reply = await self._run(self._admit, topic, call, keys)
        match reply:
            case ["judged", revision, producers, unsaved]:
                return Judged(revision, [_verdicts(each) for each in producers], unsaved)
            case ["full", tracked, wanted]:
                return Full(tracked, wanted)
            case ["changed", revision]:
                return Changed(revision)
            case ["outdated"]:
                return OUTDATED
            case _:
                return _gate(reply)

    async def confirm(
        self, topic: TopicName, writer: Writer, confirmation: Confirmation
    ) -> Applied | Behind:
        reply = await self._run(self._confirm, topic, self._call(writer, confirmation))
        return Applied(*reply[1:]) if reply[0] == "applied" else _gate(reply)

    async def rollback(
        self,
        topic: TopicName,
        writer: Writer,
        confirmation: Confirmation | None,
        withdrawals: Sequence[Withdrawal],
    ) -> Applied | Behind:
        call = self._call(writer, confirmation)
        call["withdrawals"] = [
            [each.producer, encode_id(each.keep_through)] for each in withdrawals
        ]
        reply = await self._run(self._rollback, topic, call)
        return Applied(*reply[1:]) if reply[0] == "applied" else _gate(reply)

    async def keep(
        self, topic: TopicName, producers: Sequence[str], now_ms: int, slack_ms: int = 0
    ) -> None:
        await self._keep(topic, _pack([now_ms, list(producers), slack_ms]))

    async def producer(self, topic: TopicName, name: str) -> Tracked | None:
        meta, value = await self._command("HMGET", topic_key(topic), META, PRODUCER + name.encode())
        if meta is None or value is None:
            return None
        return decode_producer(value.decode(), _unpack(meta)["term"])

    async def producers(self, topic: TopicName, *, size: int, token: str) -> ProducerPage:
        if not _CURSOR.fullmatch(token) or int(token or 0) >= 2**64:
            raise InvalidPage("invalid page_token", field="page_token")
        key = topic_key(topic)
        meta = await self._command("HGET", key, META)
        if meta is None:
            return ProducerPage([], "")
        cursor, fields = await self._command("HSCAN", key, int(token or 0), "COUNT", size)
        term = _unpack(meta)["term"]
        listed = [
            (field.removeprefix(PRODUCER).decode(), decode_producer(value.decode(), term))
            for field, value in fields.items()
            if field != META
        ]
        return ProducerPage(listed, str(cursor) if cursor else "")

    async def summary(self, topic: TopicName) -> Summary | None:
        meta, fields = await self._summary(topic)
        if meta is None:
            return None
        state = _unpack(meta)
        return Summary(
            incarnation=int(state["incarnation"]),
            epoch=int(state["epoch"]),
            confirmed=decode_position(state["confirmed"]),
            revision=state["revision"],
            remaining=state["remaining"],
            producers=fields - 1,
            counts=Counts(**{name: state[name] for name in Counts.__slots__}),
            saved=Saved(decode_position(state["saved"]), state["saved_entries"], state["saved_ms"]),
        )

    async def freeze(self, topic: TopicName) -> Frozen | None:
        fields: dict[bytes, bytes] = await self._command("HGETALL", topic_key(topic))
        meta = fields.pop(META, None)
        if meta is None:
            return None
        state = _unpack(meta)
        return Frozen(
            int(state["incarnation"]),
            decode_position(state["confirmed"]),
            state["confirmed_entries"],
            [
                persisted
                for field, value in fields.items()
                if (persisted := decode_persisted(field, value)) is not None
            ],
        )

    async def record_snapshot(self, topic: TopicName, incarnation: int, saved: Saved) -> None:
        packed = _pack(
            [
                encode_id(incarnation),
                encode_position(saved.position),
                saved.entries,
                saved.taken_ms,
            ]
        )
        await self._record_snapshot(topic, packed)

    async def load(
        self,
        topic: TopicName,
        incarnation: int,
        through: Position,
        producers: Sequence[Persisted],
        *,
        replacing: bool,
        taken_ms: int | None,
    ) -> Loaded:
        call = {
            "incarnation": encode_id(incarnation),
            "leap": self._leap(),
            "through": encode_position(through),
            "replacing": replacing,
            "taken_ms": False if taken_ms is None else taken_ms,
            "producers": [
                part
                for producer, highest, unfinished, active_ms in producers
                for part in (producer, encode_mark(highest, unfinished), active_ms)
            ],
        }
        reply = await self._run(self._load, topic, call)
        if reply[0] != "loaded":
            _gate(reply)
        confirmed = decode_position(reply[2])
        assert confirmed is not None
        return Loaded(bool(reply[1]), confirmed)

    async def forget_producers(
        self,
        topic: TopicName,
        *,
        purge: Sequence[tuple[str, int]],
        evict: Sequence[tuple[str, int]],
    ) -> int:
        dropped: int = await self._forget(topic, _pack([list(purge), list(evict)]))
        return dropped

    async def forget_topic(self, topic: TopicName, incarnation: int | None) -> None:
        newest = SEQUENCE_ID_MAX if incarnation is None else incarnation
        await self._forget_topic(topic, encode_id(newest))

    async def topics(self) -> AsyncIterator[TopicName]:
        with _translated():  # without a span, which would be current in the caller's loop
            async for key in self._redis.scan_iter(match=f"{PREFIX}*{SUFFIX}", count=1000):
                yield topic_of(key.decode())

    async def policy_token(self) -> str:
        token = await self._command("GET", POLICIES)
        if token is None:
            await self._command("SET", POLICIES, secrets.token_hex(16), "NX")
            token = await self._command("GET", POLICIES)
        if token is None:
            raise StateUnavailable(
                "Redis dropped a key that was just written", retry_after_s=RETRY_AFTER_S
            )
        return str(token, "ascii", "replace")

    async def set_policy_token(self, token: str) -> None:
        await self._command("SET", POLICIES, token)

    async def now_ms(self) -> int:
        if time.monotonic() - self._clock_read_at > CLOCK_AGE_MAX_S:
            async with self._reading_clock:
                await self._read_clock()
        return self._clock_ms + int((time.monotonic() - self._clock_read_at) * 1000)

    async def _read_clock(self) -> None:
        """Read Redis's clock, unless another call has just read it."""
        if time.monotonic() - self._clock_read_at <= CLOCK_AGE_MAX_S:
            return
        with spans.database(names.REDIS, "TIME"), _translated():
            seconds, microseconds = await self._redis.time()
        self._clock_ms = seconds * 1000 + microseconds // 1000
        self._clock_read_at = time.monotonic()

    async def check(self) -> None:
        with spans.database(names.REDIS, "PING"), _translated():
            await self._redis.ping()

    def _call(self, writer: Writer, confirmation: Confirmation | None) -> dict[str, Any]:
        return {
            "incarnation": encode_id(writer.incarnation),
            "epoch": encode_id(writer.epoch),
            "leap": self._leap(),
            "position": encode_position(writer.position),
            "confirmation": False if confirmation is None else _confirmation(confirmation),
        }

    async def _command(self, *args: Any) -> Any:
        """Run a command as a step of the current operation. Its span has no key and no value."""
        with spans.database(names.REDIS, args[0]), _translated():
            return await self._redis.execute_command(*args)

    async def _run(
        self, script: Script, topic: TopicName, call: dict[str, Any], keys: Sequence[str] = ()
    ) -> list[Any]:
        packed: bytes = await script(topic, _pack(call), keys=keys)
        reply: list[Any] = _unpack(packed)
        return reply


def _confirmation(confirmation: Confirmation) -> list[Any]:
    after, through, producers, entry_count, remaining = confirmation
    return [
        encode_position(after),
        encode_position(through),
        entry_count,
        remaining,
        [
            [producer, last_append_ms, *_entries(highest, chunks)]
            for producer, highest, last_append_ms, chunks in producers
        ],
    ]


def _claims(ranges: Sequence[Claim]) -> list[str]:
    texts = []
    for lowest, highest, chunk in ranges:
        texts.append(f"{lowest:019d}")
        texts.append(f"{highest:019d}" if chunk is None else encode_mark(highest, chunk))
    return texts


def _entries(highest: Sequence[int], chunks: Mapping[int, Chunk]) -> list[str]:
    entries = [f"{each:019d}" for each in highest]
    for index, chunk in chunks.items():
        entries[index] = encode_mark(highest[index], chunk)
    return entries


def _verdicts(reply: list[Any]) -> ProducerVerdicts:
    letters, persisted, aborts = reply
    sequence_id, unfinished = decode_mark(persisted)
    ended = {
        place - 1: chunk.uuid
        for place, mark in zip(aborts[::2], aborts[1::2], strict=True)
        if (chunk := decode_mark(mark)[1]) is not None
    }
    return ProducerVerdicts(
        [_VERDICTS[letter] for letter in letters],
        sequence_id if unfinished is None else sequence_id - 1,
        ended,
    )


def _gate(reply: list[Any]) -> Behind:
    match reply:
        case ["behind", confirmed]:
            return Behind(decode_position(confirmed))
        case ["fenced", epoch]:
            raise Fenced("a newer writer owns the topic", epoch=int(epoch))
        case _:
            raise AssertionError(f"a script answered {reply!r}")


def _pack(value: object) -> bytes:
    packed: bytes = msgpack.packb(value)
    return packed


def _unpack(packed: bytes) -> Any:
    return msgpack.unpackb(packed)


@contextmanager
def _translated() -> Iterator[None]:
    """Translate errors of Redis and of the connection, not a script's fault, which is our bug."""
    try:
        yield
    except NotSent as error:
        if error.is_silent:
            raise _silent() from error
        raise busy("too many calls wait for Redis", limit="WAITING_MAX") from error
    except (RedisError, OSError, TimeoutError) as error:
        if type(error) is ResponseError and not _CONDITION.match(str(error)):
            raise
        raise _silent() from error


def _silent() -> StateUnavailable:
    return StateUnavailable("Redis does not answer", retry_after_s=RETRY_AFTER_S)

"""Policies set by SetPolicy: durable, and in effect on every replica when the call returns.

The cursor service stores each as a property of a cursor of the system topic
`<tenant>/<namespace>/__dedup_policies`. That topic has no log, so its cursors hold no trims back.
The cursor's name is the last part of the topic's name, or NAMESPACE.

    SetPolicy ──▶ cursor service: the property ──▶ state store: a new token ──▶ the answer

    any call  ──▶ state store: the token ──▶ cached under this token? ── yes ──▶ use it
                                                      └─ no ──▶ cursor service: the property

An Admit, the most frequent call, carries the token under which its policy is cached, and the state
store compares it in the same step, where it has both (not in a Redis Cluster).

A replica caches a policy under the token that it saw before it read the policy, and uses it as long
as the state store has that token. Each token is random and set once, so a replaced token never
comes back. It follows:

- A call after SetPolicy has returned sees its token or a later one. Policies cached under that
  token were read after the property was written.
- A replica that reads the old value between the two writes caches it under the old token, and
  reads again at the next call. So no new token is needed before the property is written.
- If a replica or the state store dies between the two writes, SetPolicy has not returned, and its
  outcome is unknown. The policy takes effect after REREAD_S at the latest, when cached policies are
  read again; retrying the call puts it in effect at once.
- If the state store loses the token, the first replica to notice sets another, and all replicas
  read again.
- Only a state store that returns to an earlier state, as a Redis replica may when it takes over,
  can show a replaced token again. That, too, ends after REREAD_S.

While the cursor service is unavailable, policies cached under the current token are used. Without a
cached policy the call is refused, since deduplication may be switched off: a verdict would treat a
topic without deduplication as if it had it, and no verdict would store a message twice. A retry
loses nothing.
"""

import asyncio
import json
import secrets
from collections import OrderedDict
from functools import partial
from typing import Final, NamedTuple

import structlog

from seqgate.services.cursors import CursorsUnavailable
from seqgate.services.dedup.core.policy import NOTHING, EffectivePolicy, InvalidPolicy, Policy
from seqgate.services.dedup.metrics import DedupMetrics
from seqgate.services.dedup.ports import Cursors, GivenPolicies, KnownPolicy, StateStore
from seqgate.services.runtime import deadline
from seqgate.types import InvalidNameError, TopicName

log = structlog.get_logger()

LOCAL: Final = "__dedup_policies"
"""The last part of the names of topics whose cursors hold policies."""

NAMESPACE: Final = "@namespace"
"""The name of the cursor with the namespace's own policy; no topic's name contains an @."""

PROPERTY: Final = "#seqgate.internal.policy"
"""The property with the policy: a JSON object, with names and values as in a policy file."""

CACHED_MAX: Final = 10_000
"""The most levels cached, those without a policy included: about 5 MB. The least recently used is
evicted."""

REREAD_S: Final = 60.0
"""The interval at which all cached policies are read again, in seconds."""

RETRY_AFTER_S: Final = 0.5
"""RetryInfo for a caller whose policy cannot be determined."""


class Level(NamedTuple):
    """A level that may have a policy: its tenant/namespace, and the name of its cursor."""

    namespace: str
    name: str

    @classmethod
    def of_topic(cls, topic: TopicName) -> "Level":
        return cls(topic.namespace, topic.local)

    @classmethod
    def of_namespace(cls, namespace: str) -> "Level":
        return cls(namespace, NAMESPACE)

    @property
    def is_of_system_topic(self) -> bool:
        """Whether it is a system topic, which never deduplicates."""
        return self.name.startswith("__")

    @property
    def place(self) -> TopicName | None:
        """The topic of the level's cursor; None: the namespace's name is too long for one."""
        try:
            return TopicName.parse(f"{self.namespace}/{LOCAL}")
        except InvalidNameError:
            return None


class DurablePolicies:
    """See dedup.ports.PolicySource: policies set by calls, which override the policy file."""

    def __init__(
        self,
        file: GivenPolicies,
        cursors: Cursors,
        store: StateStore,
        metrics: DedupMetrics | None = None,
    ) -> None:
        self._file = file
        self._cursors = cursors
        self._store = store
        self._metrics = metrics or DedupMetrics()
        self._token = ""
        self._cached: OrderedDict[Level, Policy] = OrderedDict()
        self._reading: dict[tuple[str, Level], asyncio.Task[Policy]] = {}

    def known(self, topic: TopicName) -> KnownPolicy | None:
        if self._is_never_set(topic):
            return KnownPolicy(self._file.policies.effective(topic), None)
        for_topic = self._used(Level.of_topic(topic))
        for_namespace = self._used(Level.of_namespace(topic.namespace))
        if for_topic is None or for_namespace is None:
            return None
        policy = self._file.policies.effective(
            topic, for_topic=for_topic, for_namespace=for_namespace
        )
        return KnownPolicy(policy, self._token)

    async def effective(self, topic: TopicName) -> EffectivePolicy:
        if self._is_never_set(topic):
            return self._file.policies.effective(topic)
        token = await self._store.policy_token()
        for_topic = await self._cached_or_read(token, Level.of_topic(topic))
        for_namespace = await self._cached_or_read(token, Level.of_namespace(topic.namespace))
        return self._file.policies.effective(
            topic, for_topic=for_topic, for_namespace=for_namespace
        )

    @property
    def error(self) -> str:
        return self._file.error

    async def set(self, level: Level, policy: Policy) -> None:
        """Replace a level's policy; NOTHING removes it.

        Raises:
            InvalidPolicy: the level is a system topic, or its namespace's name is too long.
            CursorsUnavailable, StateUnavailable: the outcome is unknown.
        """
        place = level.place
        if place is None:
            field = "namespace" if level.name == NAMESPACE else "topic"
            raise InvalidPolicy(f"{field} is too long for a policy", field=field)
        if level.is_of_system_topic:
            raise InvalidPolicy("system topics cannot have a policy", field="topic")
        try:
            if policy == NOTHING:
                await self._cursors.delete(place, level.name)
            else:
                value = json.dumps(policy.values)
                await self._cursors.put_property(place, level.name, PROPERTY, value)
        finally:  # even if the outcome is unknown: cached policies may be outdated
            await self._store.set_policy_token(new_token())

    async def get(self, level: Level) -> Policy:
        """The policy set on a level.

        Raises:
            CursorsUnavailable: it cannot be read.
        """
        return await self._read(level)

    async def forget(self, topic: TopicName) -> None:
        """Remove a deleted topic's policy. Without one the token stays, to spare rereads."""
        if topic.is_system:
            return
        level = Level.of_topic(topic)
        place = level.place
        if place is None or await self._cursors.get(place, level.name, whole=False) is None:
            return
        await self.set(level, NOTHING)

    async def reread_forever(self, interval_s: float = REREAD_S) -> None:
        """Periodically read all cached policies again, which makes up for a lost token."""
        while True:
            await asyncio.sleep(interval_s)
            try:
                with self._metrics.unforeseen("policies"):
                    await self.reread()
            except CursorsUnavailable as error:
                log.warning("policies not refreshed", error=str(error))

    async def reread(self) -> None:
        """Read all cached policies again, until a new token clears the cache. If a stored policy is
        unreadable, the cached one stays and the others are still read.

        Raises:
            CursorsUnavailable: the remaining cached policies stay.
        """
        token = self._token
        for level in list(self._cached):
            policy = await self._readable(level)
            if token != self._token:
                return
            if policy is not None and level in self._cached:
                self._cached[level] = policy

    def _is_never_set(self, topic: TopicName) -> bool:
        """Whether no call can have set the topic's policy."""
        return topic.is_system or not self._cursors.configured

    def _used(self, level: Level) -> Policy | None:
        """A cached policy, which becomes the most recently used."""
        policy = self._cached.get(level)
        if policy is not None:
            self._cached.move_to_end(level)
        return policy

    async def _cached_or_read(self, token: str, level: Level) -> Policy:
        """The policy set on a level, for a caller that has just seen `token`."""
        if token != self._token:
            self._token = token
            self._cached.clear()
        policy = self._used(level)
        if policy is not None:
            return policy
        policy = await self._read_once(token, level)
        if token == self._token:
            self._cached[level] = policy
            if len(self._cached) > CACHED_MAX:
                self._cached.popitem(last=False)
        return policy

    async def _read_once(self, token: str, level: Level) -> Policy:
        """Read a policy for all callers that saw this token and want it now: a namespace's is
        wanted for all its topics."""
        reading = self._reading.get((token, level))
        if reading is None:
            reading = asyncio.create_task(self._read_for_all(level))
            self._reading[token, level] = reading
            reading.add_done_callback(partial(self._has_read, (token, level)))
        return await asyncio.shield(reading)

    async def _read_for_all(self, level: Level) -> Policy:
        deadline.set_remaining_s(None)  # not that of the first caller
        return await self._read(level)

    def _has_read(self, what: tuple[str, Level], reading: "asyncio.Task[Policy]") -> None:
        del self._reading[what]
        if not reading.cancelled():
            reading.exception()  # mark it as retrieved: its callers may be cancelled right now

    async def _read(self, level: Level) -> Policy:
        policy = await self._readable(level)
        if policy is None:
            raise CursorsUnavailable(
                "the stored policy is unreadable; set it again", retry_after_s=RETRY_AFTER_S
            )
        return policy

    async def _readable(self, level: Level) -> Policy | None:
        place = level.place
        if place is None:
            return NOTHING
        cursor = await self._cursors.get(place, level.name, whole=False)
        text = None if cursor is None else cursor.properties.get(PROPERTY)
        if text is None:
            return NOTHING
        policy = _parsed(text)
        if policy is None:
            log.error("stored policy unreadable", level="/".join(level))
        return policy


def new_token() -> str:
    """A random token, never used before."""
    return secrets.token_hex(16)


def _parsed(text: str) -> Policy | None:
    """The policy in a property; None: it is unreadable. Unknown values are ignored: a newer release
    set them."""
    try:
        values = json.loads(text)
        if isinstance(values, dict):
            values = {name: values[name] for name in Policy.__slots__ if name in values}
        return Policy.parse(PROPERTY, values)
    except (ValueError, InvalidPolicy):
        return None

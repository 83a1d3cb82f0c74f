"""Policies that are set by a call: durable, and in effect on every replica when the call returns.

They are kept with the cursor service, each as a property of a cursor of the system topic
`<tenant>/<namespace>/__dedup_policies`. That is a topic without a log, so its cursors hold nothing
back. The cursor's name is the last part of the topic's name, or NAMESPACE.

    SetPolicy ──▶ cursor service: the property ──▶ state store: a new token ──▶ the answer

    any call  ──▶ state store: the token ──▶ cached under this token? ── yes ──▶ use it
                                                      └─ no ──▶ cursor service: the property

A replica keeps what it read under the token that it saw before it read, and uses it as long as the
state store has that token. Each token is random and put in place once, so one that was replaced
does not come back, and the rest follows:

- Who asks after SetPolicy has returned sees its token or a later one. What is cached under that was
  read after the property was written.
- Who reads the old value between the property and the token has it under the old token, and reads
  again at the next call. So no token is needed before the property.
- When the property is written and the token is not, because a replica or the state store died
  between, SetPolicy has not returned, and it is not known whether the policy counts. It counts at
  the latest when what is cached is read again (REREAD_S); the same call, made again, ends it.
- A state store that lost the token is given another by the first replica that misses it, and all
  read again.
- Only a state store that goes back to an earlier state of its own, as a Redis replica that takes
  over may, can show a token again that was replaced. That, too, ends after REREAD_S.

While the cursor service is away, what is cached under the current token is used. Where nothing is
cached, the call is refused: whether deduplication was switched off cannot be told then. Judging all
the same would answer a topic that is not deduplicated as if it were, and not judging would store a
message twice; a caller that tries again loses nothing.
"""

import asyncio
import json
import secrets
from collections import OrderedDict
from typing import Final, NamedTuple

import structlog

from seqgate.services.cursors import CursorsUnavailable
from seqgate.services.dedup.core.policy import NOTHING, EffectivePolicy, InvalidPolicy, Policy
from seqgate.services.dedup.metrics import DedupMetrics
from seqgate.services.dedup.ports import Cursors, GivenPolicies, StateStore
from seqgate.types import InvalidNameError, TopicName

log = structlog.get_logger()

LOCAL: Final = "__dedup_policies"
"""The last part of the names of the topics whose cursors hold policies."""

NAMESPACE: Final = "@namespace"
"""The cursor of the namespace's own policy; no topic's name has an @."""

PROPERTY: Final = "#seqgate.internal.policy"
"""The property: a JSON object, its names and values as in a policy file."""

CACHED_MAX: Final = 10_000
"""How many levels are cached, those that set nothing included: about 5 MB. The least recently used
goes."""

REREAD_S: Final = 60.0
"""How often everything that is cached is read again, in seconds."""

RETRY_AFTER_S: Final = 0.5
"""What a caller is told to wait when a policy cannot be told."""


class Level(NamedTuple):
    """Where a policy is set: tenant/namespace, and the cursor's name."""

    namespace: str
    name: str

    @classmethod
    def of_topic(cls, topic: TopicName) -> "Level":
        """A topic's own level."""
        return cls(topic.namespace, topic.local)

    @classmethod
    def of_namespace(cls, namespace: str) -> "Level":
        """A namespace's own level."""
        return cls(namespace, NAMESPACE)

    @property
    def is_of_system_topic(self) -> bool:
        """Whether it is of a topic that never deduplicates."""
        return self.name.startswith("__")

    @property
    def place(self) -> TopicName | None:
        """The topic of its cursor; None: the namespace's name leaves no room for it."""
        try:
            return TopicName.parse(f"{self.namespace}/{LOCAL}")
        except InvalidNameError:
            return None


class DurablePolicies:
    """See dedup.ports.PolicySource: what was set by calls, over the policy file."""

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

    async def effective(self, topic: TopicName) -> EffectivePolicy:
        if topic.is_system or not self._cursors.configured:  # nothing can have been set
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
        """Set a level's policy in place of what was set there; NOTHING removes it.

        Raises:
            InvalidPolicy: it is of a system topic; or the name of its namespace is too long to
                keep policies.
            CursorsUnavailable, StateUnavailable: it is not known whether it was set.
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
        finally:  # also when the outcome is not known: what is cached may be old then
            await self._store.set_policy_token(new_token())

    async def get(self, level: Level) -> Policy:
        """What was set on a level.

        Raises:
            CursorsUnavailable: that cannot be told.
        """
        return await self._read(level)

    async def forget(self, topic: TopicName) -> None:
        """Remove a deleted topic's policy. Where there is none, the token stays: topics that come
        and go cause no rereads."""
        if topic.is_system:
            return
        level = Level.of_topic(topic)
        place = level.place
        if place is None or await self._cursors.get(place, level.name, whole=False) is None:
            return
        await self.set(level, NOTHING)

    async def reread_forever(self, interval_s: float = REREAD_S) -> None:
        """Read what is cached again and again, for as long as the task lives: a token that was lost
        is made up for."""
        while True:
            await asyncio.sleep(interval_s)
            try:
                with self._metrics.unforeseen("policies"):
                    await self.reread()
            except CursorsUnavailable as error:
                log.warning("policies not refreshed", error=str(error))

    async def reread(self) -> None:
        """Read what is cached again; what a new token drops meanwhile need not be. Of a level that
        cannot be read now what was read before stays, and holds no others back.

        Raises:
            CursorsUnavailable: the rest stays as it is.
        """
        token = self._token
        for level in list(self._cached):
            policy = await self._readable(level)
            if token != self._token:
                return
            if policy is not None and level in self._cached:
                self._cached[level] = policy

    async def _cached_or_read(self, token: str, level: Level) -> Policy:
        """What is set on a level, for a caller who has just seen the token."""
        if token != self._token:
            self._token = token
            self._cached.clear()
        policy = self._cached.get(level)
        if policy is not None:
            self._cached.move_to_end(level)
            return policy
        policy = await self._read(level)
        if token == self._token:
            self._cached[level] = policy
            if len(self._cached) > CACHED_MAX:
                self._cached.popitem(last=False)
        return policy

    async def _read(self, level: Level) -> Policy:
        policy = await self._readable(level)
        if policy is None:
            raise CursorsUnavailable(
                "the stored policy is unreadable; set it again", retry_after_s=RETRY_AFTER_S
            )
        return policy

    async def _readable(self, level: Level) -> Policy | None:
        """What is set on a level; None: something that cannot be read."""
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
    """A token that never was."""
    return secrets.token_hex(16)


def _parsed(text: str) -> Policy | None:
    """The policy of a property; None: it is none. What a newer release has set, and is not known
    here, is left out."""
    try:
        values = json.loads(text)
        if isinstance(values, dict):
            values = {name: values[name] for name in Policy.__slots__ if name in values}
        return Policy.parse(PROPERTY, values)
    except (ValueError, InvalidPolicy):
        return None

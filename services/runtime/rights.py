"""The rights that methods need; each service lists its methods in its rights.py.

Needs are derived from the caller's messages. Each message of a stream is checked before the handler
receives it. A message that names no resource passes only after one that did.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from seqgate.services.runtime.access import EVERY, Need, Part, Role, Topics, Verb
from seqgate.services.runtime.requests import read_topic

NeedsOf = Callable[[Any], Sequence[Need]]
"""The rights that a message needs; empty: it names no resource."""


class Shown(NamedTuple):
    """A list's answer: the field with its items, and the needs to read one. Items that the caller
    may not read are left out: a right to all of a topic's cursors does not cover the system's."""

    field: str
    needs: NeedsOf


class Right(NamedTuple):
    """The rights that a method needs."""

    needs: NeedsOf
    roles: frozenset[Role] = frozenset()
    """The roles that may call the method for any topic."""
    shown: Shown | None = None
    """For a list: which items the caller may read."""


Rights = Mapping[str, Right]
"""By full method name."""

ANY_VERB: Final = frozenset(Verb)

NOBODY: Final = Need(frozenset(), None, None)
"""A need that no rule satisfies."""

SOMEBODY: Final = Need(ANY_VERB, None, None)
"""A need that any rule for the caller satisfies."""


def roles(*given: Role) -> frozenset[Role]:
    return frozenset(given)


def the_topic(text: str) -> Topics:
    """A single topic. Raises InvalidTopicName."""
    name = read_topic(text)
    return Part(name.tenant), Part(name.namespace_part), Part(name.local)


def topics_from(prefix: str) -> Topics:
    given = prefix.split("/", 2)
    parts = [Part(text) for text in given[:-1]] + [Part(given[-1], is_open=True)]
    tenant, namespace, local = (*parts, EVERY, EVERY)[:3]
    return tenant, namespace, local


def of_topic(*verbs: Verb) -> NeedsOf:
    """Any of these verbs on `topic` itself, not only on some of its subscriptions."""
    wanted = frozenset(verbs)
    return lambda request: [Need(wanted, the_topic(request.topic))]


def of_topic_somehow(*verbs: Verb) -> NeedsOf:
    """Any of these verbs on `topic`, or on any of its subscriptions."""
    wanted = frozenset(verbs)
    return lambda request: [Need(wanted, the_topic(request.topic), None)]


def of_subscription(*verbs: Verb) -> NeedsOf:
    """Any of these verbs on `subscription` of `topic`."""
    wanted = frozenset(verbs)
    return lambda request: [Need(wanted, the_topic(request.topic), Part(request.subscription))]


def of_cursor(*verbs: Verb) -> NeedsOf:
    """Any of these verbs on the cursor `cursor` of `topic`."""
    wanted = frozenset(verbs)
    return lambda request: [Need(wanted, the_topic(request.topic), Part(request.cursor))]


def of_listed(*verbs: Verb) -> NeedsOf:
    """Any of these verbs on a listed cursor or subscription."""
    wanted = frozenset(verbs)
    return lambda listed: [Need(wanted, the_topic(listed.topic), Part(listed.name))]


def always(*needs: Need) -> NeedsOf:
    return lambda _: needs


def table(service: str, rights: Mapping[str, Right], methods: Iterable[str]) -> dict[str, Right]:
    """The rights of a service by full method name, /service/method.

    Raises:
        AssertionError: a method is missing, or is not one of the service.
    """
    assert set(rights) == set(methods), set(rights) ^ set(methods)
    return {f"/{service}/{method}": right for method, right in rights.items()}

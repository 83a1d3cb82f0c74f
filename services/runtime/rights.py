"""What each method needs, said by each service in its rights.py: a table by the method's name.

A need is found in the messages that a caller sends. Each message of a stream is asked, before the
handler sees it; one that names nothing goes through once something was named, and not before.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from seqgate.services.errors import InvalidTopicName
from seqgate.services.runtime.access import EVERY, Need, Part, Role, Topics, Verb
from seqgate.types import InvalidNameError, TopicName

NeedsOf = Callable[[Any], Sequence[Need]]
"""What a message needs; nothing: it names nothing."""


class Shown(NamedTuple):
    """What a list answers with: in which field, and what reading one of its items needs. Whoever
    may list sees what he may read: a right to all of a topic's cursors is none to the system's."""

    field: str
    needs: NeedsOf


class Right(NamedTuple):
    """What a method needs."""

    needs: NeedsOf
    roles: frozenset[Role] = frozenset()
    """Who may call it for any topic."""
    shown: Shown | None = None
    """Of a list: what is left out of the answer."""


Rights = Mapping[str, Right]
"""By the method's name."""

ANY_VERB: Final = frozenset(Verb)

NOBODY: Final = Need(frozenset(), None, None)
"""What no rule allows."""

SOMEBODY: Final = Need(ANY_VERB, None, None)
"""What everybody may for whom there is a rule at all."""


def roles(*given: Role) -> frozenset[Role]:
    """Those."""
    return frozenset(given)


def the_topic(text: str) -> Topics:
    """One topic.

    Raises:
        InvalidTopicName: the name cannot be one.
    """
    try:
        name = TopicName.parse(text)
    except InvalidNameError as error:
        raise InvalidTopicName(str(error), field="topic") from error
    return Part(name.tenant), Part(name.namespace_part), Part(name.local)


def topics_from(prefix: str) -> Topics:
    """All topics whose names begin so."""
    given = prefix.split("/", 2)
    parts = [Part(text) for text in given[:-1]] + [Part(given[-1], is_open=True)]
    tenant, namespace, local = (*parts, EVERY, EVERY)[:3]
    return tenant, namespace, local


def of_topic(*verbs: Verb) -> NeedsOf:
    """One of these verbs for `topic`, whatever the subscriptions."""
    wanted = frozenset(verbs)
    return lambda request: [Need(wanted, the_topic(request.topic))]


def of_topic_somehow(*verbs: Verb) -> NeedsOf:
    """One of these verbs for `topic`, be it for a single subscription."""
    wanted = frozenset(verbs)
    return lambda request: [Need(wanted, the_topic(request.topic), None)]


def of_subscription(*verbs: Verb) -> NeedsOf:
    """One of these verbs for `subscription` of `topic`."""
    wanted = frozenset(verbs)
    return lambda request: [Need(wanted, the_topic(request.topic), Part(request.subscription))]


def of_cursor(*verbs: Verb) -> NeedsOf:
    """One of these verbs for the cursor `name` of `topic`."""
    wanted = frozenset(verbs)
    return lambda request: [Need(wanted, the_topic(request.topic), Part(request.name))]


def always(*needs: Need) -> NeedsOf:
    """The same, whatever is asked."""
    return lambda _: needs


def table(service: str, rights: Mapping[str, Right], methods: Iterable[str]) -> dict[str, Right]:
    """The rights of a service by the full names of its methods, /service/method.

    Raises:
        AssertionError: a method is missing, or is none of the service's.
    """
    assert set(rights) == set(methods), set(rights) ^ set(methods)
    return {f"/{service}/{method}": right for method, right in rights.items()}

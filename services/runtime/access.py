"""Access rules, as written in the access file. A right that no rule grants is denied.

    [services]                                     # the services' own identities, by their role
    ledger = ["uri:spiffe://example/ns/seqgate/sa/ledger"]

    [[rules]]
    principals = ["uri:spiffe://example/ns/shop/*", "sub:alice"]
    verbs = ["publish", "consume"]
    topics = ["shop/prod/*"]
    subscriptions = ["billing-*"]                  # of consume, administer and keep; absent: all

In patterns * matches any characters and ? matches one; in topics they stop at a slash. A topic
whose name begins with __, or a cursor whose name begins with "seqgate.", belongs to the system: as
with a shell's dot files, only a pattern that begins the same way matches it. Producers whose names
begin with "seqgate." are reserved for services: no rule grants them.

    publish      write to a topic
    consume      take part in a subscription: create it, receive, settle, seek, query it
    read         read a topic
    administer   create, trim and delete topics; subscriptions, their filters; policies
    keep         keep a log of your own under these topics: the calls between services. Do not grant
                 it on topics of the ledger service: confirming entries that are not stored breaks
                 their deduplication

A role grants the calls that its service makes to other services, on any topic, and nothing else.
No rule grants a role.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final, NamedTuple

from seqgate.services.runtime.globs import matches
from seqgate.services.runtime.identity import KINDS, Principal

DECISIONS_MAX: Final = 10_000
"""The most decisions that are cached."""

RULES_MAX: Final = 10_000
"""The most rules in a file."""

SYSTEM_TOPIC: Final = "__"
SYSTEM_CURSOR: Final = "seqgate."
SYSTEM_PRODUCER: Final = "seqgate."
"""The prefixes of the system's names."""


class Verb(Enum):
    """A right that a rule grants."""

    PUBLISH = "publish"
    CONSUME = "consume"
    READ = "read"
    ADMINISTER = "administer"
    KEEP = "keep"


class Role(Enum):
    """A service or a job that calls services."""

    LEDGER = "ledger"
    DEDUP = "dedup"
    DISPATCHER = "dispatcher"
    JOBS = "jobs"
    """The rebuild job and the audit job."""


_WITH_SUBSCRIPTIONS: Final = frozenset({Verb.CONSUME, Verb.ADMINISTER, Verb.KEEP})


class InvalidAccess(ValueError):
    """The access file is invalid."""


class Part(NamedTuple):
    """A name or, with `is_open`, all names with a prefix."""

    text: str
    is_open: bool = False


EVERY: Final = Part("", is_open=True)

Topics = tuple[Part, Part, Part]
"""A set of topics: tenant, namespace and name."""


class Need(NamedTuple):
    """A required right: any of these verbs, on these topics and subscriptions."""

    verbs: frozenset[Verb]
    topics: Topics | None
    """None: a rule for any topics suffices."""
    subscriptions: Part | None = EVERY
    """None: a rule for any subscriptions suffices. EVERY: the right is on the topic itself."""


@dataclass(frozen=True, slots=True)
class Rule:
    principals: tuple[str, ...]
    verbs: frozenset[Verb]
    topics: tuple[tuple[str, str, str], ...]
    subscriptions: tuple[str, ...]

    def allows(self, need: Need) -> bool:
        if self.verbs.isdisjoint(need.verbs):
            return False
        if need.topics is not None and not any(
            _covers_topics(patterns, need.topics) for patterns in self.topics
        ):
            return False
        return need.subscriptions is None or any(
            _covers(pattern, need.subscriptions, SYSTEM_CURSOR) for pattern in self.subscriptions
        )


@dataclass(frozen=True, slots=True)
class Access:
    services: Mapping[Role, tuple[str, ...]] = field(default_factory=dict)
    rules: tuple[Rule, ...] = ()
    _decisions: dict[tuple[Principal, Need], bool] = field(
        default_factory=dict, repr=False, compare=False
    )

    @classmethod
    def parse(cls, document: Mapping[str, Any]) -> "Access":
        """The rules of a parsed TOML file.

        Raises:
            InvalidAccess: a key is unknown or missing, or has an invalid value.
        """
        _known("", document, {"services", "rules"})
        services = document.get("services", {})
        if not isinstance(services, Mapping):
            raise InvalidAccess("services must be a table")
        _known("services.", services, {role.value for role in Role})
        rules = document.get("rules", [])
        if not isinstance(rules, list) or len(rules) > RULES_MAX:
            raise InvalidAccess(f"rules must be tables, [[rules]] (limit {RULES_MAX:,})")
        return cls(
            {Role(name): _principals(f"services.{name}", it) for name, it in services.items()},
            tuple(_rule(f"rules[{index}]", rule) for index, rule in enumerate(rules)),
        )

    def has_role(self, principal: Principal, roles: frozenset[Role]) -> bool:
        return any(
            matches(pattern, name)
            for role in roles
            for pattern in self.services.get(role, ())
            for name in principal.names
        )

    def allows(self, principal: Principal, need: Need) -> bool:
        asked = principal, need
        decision = self._decisions.get(asked)
        if decision is None:
            if len(self._decisions) >= DECISIONS_MAX:
                self._decisions.clear()
            decision = self._decisions[asked] = any(
                rule.allows(need)
                and any(
                    matches(pattern, name)
                    for pattern in rule.principals
                    for name in principal.names
                )
                for rule in self.rules
            )
        return decision


def _covers(pattern: str, part: Part, system: str) -> bool:
    """Whether a pattern matches every name of a part. A pattern that ends in * and matches a prefix
    matches every name with that prefix."""
    if part.text.startswith(system) and not pattern.startswith(system):
        return False
    if part.is_open and not pattern.endswith("*"):
        return False
    return matches(pattern, part.text)


def _covers_topics(patterns: tuple[str, str, str], topics: Topics) -> bool:
    systems = ("\0", "\0", SYSTEM_TOPIC)  # no tenant or namespace belongs to the system
    return all(map(_covers, patterns, topics, systems))


def _rule(name: str, rule: Any) -> Rule:
    if not isinstance(rule, Mapping):
        raise InvalidAccess(f"{name} must be a table")
    _known(f"{name}.", rule, {"principals", "verbs", "topics", "subscriptions"})
    verbs = frozenset(_texts(f"{name}.verbs", rule.get("verbs"), _verb))
    if "subscriptions" in rule and not verbs <= _WITH_SUBSCRIPTIONS:
        only = ", ".join(sorted(verb.value for verb in _WITH_SUBSCRIPTIONS))
        raise InvalidAccess(f"{name}.subscriptions: only the verbs {only} take subscriptions")
    return Rule(
        _principals(f"{name}.principals", rule.get("principals")),
        verbs,
        tuple(_texts(f"{name}.topics", rule.get("topics"), _topics)),
        tuple(_texts(f"{name}.subscriptions", rule.get("subscriptions", ["*"]), str)),
    )


def _principals(name: str, given: Any) -> tuple[str, ...]:
    return tuple(_texts(name, given, _principal))


def _principal(text: str) -> str:
    kind, _, rest = text.partition(":")
    if kind not in KINDS or not rest:
        raise InvalidAccess(f"principal {text!r} must begin with {':, '.join(KINDS)}:")
    return text


def _verb(text: str) -> Verb:
    try:
        return Verb(text)
    except ValueError:
        known = ", ".join(verb.value for verb in Verb)
        raise InvalidAccess(f"unknown verb {text!r}, expected one of {known}") from None


def _topics(text: str) -> tuple[str, str, str]:
    parts = text.split("/")
    if len(parts) != 3 or not all(parts):
        raise InvalidAccess(f"topic {text!r} is not a pattern of tenant/namespace/name")
    return parts[0], parts[1], parts[2]


def _texts(name: str, given: Any, read: Callable[[str], Any]) -> Sequence[Any]:
    if not isinstance(given, list) or not given or not all(isinstance(it, str) for it in given):
        raise InvalidAccess(f"{name} must be a non-empty list of strings")
    if not all(given):
        raise InvalidAccess(f"{name} has an empty string")
    try:
        return [read(text) for text in given]
    except InvalidAccess as error:
        raise InvalidAccess(f"{name}: {error}") from None


def _known(where: str, values: Mapping[str, Any], known: set[str]) -> None:
    unknown = set(values) - known
    if unknown:
        raise InvalidAccess(f"unknown key {where}{min(unknown)}")

"""Access rules: their meaning, and invalid files."""

import time
import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqgate.services.runtime.access import (
    EVERY,
    Access,
    InvalidAccess,
    Need,
    Part,
    Role,
    Verb,
)
from seqgate.services.runtime.globs import matches
from seqgate.services.runtime.identity import Principal
from seqgate.services.runtime.rights import the_topic, topics_from

ALICE = Principal(("sub:alice",))
READ = frozenset({Verb.READ})
CONSUME = frozenset({Verb.CONSUME})


def access(text: str) -> Access:
    return Access.parse(tomllib.loads(text))


def rule(**values: object) -> Access:
    given: dict[str, object] = {
        "principals": ["sub:alice"],
        "verbs": ["read"],
        "topics": ["acme/shop/orders"],
    }
    return Access.parse({"rules": [{**given, **values}]})


def test_without_rules_everything_is_denied() -> None:
    need = Need(frozenset(Verb), None, None)
    assert not Access().allows(ALICE, need)
    assert not access("").allows(ALICE, need)


@pytest.mark.parametrize(
    ("pattern", "text", "does"),
    [
        ("", "", True),
        ("", "a", False),
        ("*", "", True),
        ("*", "anything/at all", True),
        ("a*", "a", True),
        ("a*", "ba", False),
        ("*a", "ba", True),
        ("a*c*e", "abcde", True),
        ("a*c*e", "abcd", False),
        ("a?c", "abc", True),
        ("a?c", "ac", False),
        ("?", "", False),
        ("**", "x", True),
        ("[ab]", "a", False),
        ("[ab]", "[ab]", True),
        ("a.c", "abc", False),
        ("*ab", "aab", True),
        ("A", "a", False),
    ],
)
def test_a_pattern_matches_its_names_only(pattern: str, text: str, does: bool) -> None:
    assert matches(pattern, text) is does


def test_every_pattern_is_matched_quickly() -> None:
    began = time.process_time()
    assert matches("a*" * 200, "a" * 1_000)
    assert not matches("*a" * 200 + "b", "a" * 1_000)
    assert time.process_time() - began < 5


TEXT = st.text("ab/", max_size=6)


@given(TEXT, TEXT, TEXT)
def test_a_prefix_pattern_covers_longer_prefixes(head: str, tail: str, part: str) -> None:
    pattern = f"{head}*"
    if matches(pattern, part):
        assert matches(pattern, part + tail)


@pytest.mark.parametrize(
    ("topics", "asked", "does"),
    [
        ("acme/shop/orders", "acme/shop/orders", True),
        ("acme/shop/orders", "acme/shop/order", False),
        ("acme/shop/*", "acme/shop/orders", True),
        ("acme/*/*", "acme/shop/orders", True),
        ("*/*/*", "acme/shop/orders", True),
        ("acme/*/orders", "acme/shop/orders", True),
        ("ac*/shop/orders", "acme/shop/orders", True),
        ("acme/*/*", "other/shop/orders", False),
        ("*/*/*", "acme/shop/__dedup_policies", False),
        ("acme/shop/__*", "acme/shop/__dedup_policies", True),
        ("acme/shop/_*", "acme/shop/__dedup_policies", False),
        ("acme/shop/_*", "acme/shop/_mine", True),
    ],
)
def test_topic_patterns_match_tenant_namespace_and_name(
    topics: str, asked: str, does: bool
) -> None:
    assert rule(topics=[topics]).allows(ALICE, Need(READ, the_topic(asked))) is does


@pytest.mark.parametrize(
    ("topics", "prefix", "does"),
    [
        ("*/*/*", "", True),
        ("acme/*/*", "", False),
        ("acme/*/*", "acme/", True),
        ("acme/*/*", "acme", False),
        ("ac*/*/*", "acme", True),
        ("acme/shop/*", "acme/shop/", True),
        ("acme/shop/*", "acme/shop", False),
        ("acme/shop/or*", "acme/shop/orders", True),
        ("acme/shop/orders", "acme/shop/orders", False),
        ("acme/shop/*rs", "acme/shop/orders", False),
        ("acme/shop/*", "acme/shop/a/b", True),
        ("acme/shop/*", "other/shop/", False),
    ],
)
def test_listing_requires_a_right_to_everything_listed(
    topics: str, prefix: str, does: bool
) -> None:
    assert rule(topics=[topics]).allows(ALICE, Need(READ, topics_from(prefix))) is does


@pytest.mark.parametrize(
    ("patterns", "asked", "does"),
    [
        (None, Part("billing"), True),
        (None, EVERY, True),
        (None, None, True),
        (["billing"], Part("billing"), True),
        (["billing"], Part("other"), False),
        (["bill*", "x"], Part("x"), True),
        (["billing"], EVERY, False),
        (["*"], EVERY, True),
        (["billing"], None, True),
        (["*"], Part("seqgate.dedup"), False),
        (["seqgate.*"], Part("seqgate.dedup"), True),
    ],
)
def test_subscription_patterns_match_names(
    patterns: list[str] | None, asked: Part | None, does: bool
) -> None:
    values = {} if patterns is None else {"subscriptions": patterns}
    held = rule(verbs=["consume"], **values)
    assert held.allows(ALICE, Need(CONSUME, the_topic("acme/shop/orders"), asked)) is does


def test_a_rule_gives_its_verbs_to_its_principals_and_no_others() -> None:
    held = rule(verbs=["read", "publish"], principals=["sub:alice", "dns:*.shop"])
    topic = the_topic("acme/shop/orders")
    for verb in Verb:
        given = held.allows(ALICE, Need(frozenset({verb}), topic))
        assert given is (verb in (Verb.READ, Verb.PUBLISH))
    for name, does in (
        ("dns:a.shop", True),
        ("dns:a.shop.example", False),
        ("sub:bob", False),
        ("cn:alice", False),
        ("uri:sub:alice", False),
    ):
        assert held.allows(Principal((name,)), Need(READ, topic)) is does
    two = Principal(("dns:other", "dns:a.shop"))
    assert held.allows(two, Need(READ, topic))


def test_verbs_and_topics_of_different_rules_do_not_combine() -> None:
    held = access(
        """
        [[rules]]
        principals = ["sub:alice"]
        verbs = ["read"]
        topics = ["a/b/c"]
        [[rules]]
        principals = ["sub:alice"]
        verbs = ["publish"]
        topics = ["d/e/f"]
        """
    )
    assert not held.allows(ALICE, Need(READ, the_topic("d/e/f")))
    assert not held.allows(ALICE, Need(frozenset({Verb.PUBLISH}), the_topic("a/b/c")))


def test_roles_are_granted_only_by_their_table() -> None:
    held = access(
        """
        [services]
        ledger = ["uri:spiffe://x/ledger", "dns:ledger-*.x"]
        [[rules]]
        principals = ["sub:*", "uri:*"]
        verbs = ["publish", "consume", "read", "administer", "keep"]
        topics = ["*/*/*"]
        """
    )
    ledger = Principal(("uri:spiffe://x/ledger",))
    assert held.has_role(ledger, frozenset({Role.LEDGER, Role.JOBS}))
    assert held.has_role(Principal(("dns:ledger-0.x",)), frozenset({Role.LEDGER}))
    assert not held.has_role(ledger, frozenset({Role.DISPATCHER}))
    assert not held.has_role(ledger, frozenset())
    assert not held.has_role(ALICE, frozenset(Role))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rule = []", "unknown key rule"),
        ("rules = 3", "rules must be tables"),
        ("rules = [3]", r"rules\[0\] must be a table"),
        ("services = []", "services must be a table"),
        ("[services]\nfilter = ['uri:x']", "unknown key services.filter"),
        ("[services]\nledger = 'uri:x'", "services.ledger must be a non-empty list"),
        ("[services]\nledger = []", "services.ledger must be a non-empty list"),
        (
            "[services]\nledger = ['spiffe://x']",
            "services.ledger: principal 'spiffe://x' must begin with",
        ),
        ("[[rules]]", r"rules\[0\].verbs must be a non-empty list"),
        ("[[rules]]\nverbs = ['read']\ntopics = ['a/b/c']", r"rules\[0\].principals must be"),
        ("[[rules]]\nverbs = ['read']\nprincipals = ['sub:x']", r"rules\[0\].topics must be"),
        (
            "[[rules]]\nverbs = ['write']",
            r"rules\[0\].verbs: unknown verb 'write', expected one of publish, consume",
        ),
        ("[[rules]]\nverbs = ['read']\nprincipals = ['sub:']", "must begin with uri:"),
        ("[[rules]]\nverbs = ['read']\nprincipals = ['*']", "must begin with uri:"),
        ("[[rules]]\nverbs = ['read']\nprincipals = ['']", "has an empty string"),
        (
            "[[rules]]\nverbs = ['read']\nprincipals = ['sub:x']\ntopics = ['a/b']",
            "is not a pattern of tenant/namespace/name",
        ),
        (
            "[[rules]]\nverbs = ['read']\nprincipals = ['sub:x']\ntopics = ['a//b']",
            "is not a pattern of tenant/namespace/name",
        ),
        ("[[rules]]\nverbs = ['read']\nsubscription = ['x']", "unknown key rules.*subscription"),
        (
            "[[rules]]\nverbs = ['read', 'consume']\nsubscriptions = ['x']",
            "only the verbs administer, consume, keep take subscriptions",
        ),
        (
            "[[rules]]\nverbs = ['consume']\nsubscriptions = []\nprincipals = ['sub:x']\n"
            "topics = ['a/b/c']",
            "subscriptions must be a non-empty list",
        ),
    ],
)
def test_an_invalid_file_is_refused_with_the_position_of_its_fault(text: str, message: str) -> None:
    with pytest.raises(InvalidAccess, match=message):
        access(text)


def test_decisions_are_remembered_and_their_number_is_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("seqgate.services.runtime.access.DECISIONS_MAX", 10)
    held = rule(topics=["acme/shop/*"])
    for number in range(100):
        assert held.allows(ALICE, Need(READ, the_topic(f"acme/shop/t{number}")))
        assert not held.allows(ALICE, Need(READ, the_topic(f"acme/shops/t{number}")))

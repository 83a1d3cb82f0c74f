"""The rights that each method of each service needs."""

from typing import Any

import pytest
from google.protobuf.message_factory import GetMessageClass

from seqgate.api.cursor.v1 import cursor_pb2, managed_pb2
from seqgate.api.dedup.v1 import dedup_pb2
from seqgate.api.dispatcher.v1 import dispatcher_pb2
from seqgate.api.filter.v1 import filter_pb2
from seqgate.api.internal.dedup.v1 import writer_pb2
from seqgate.api.ledger.v1 import ledger_pb2
from seqgate.services.cursor.rights import RIGHTS as CURSOR
from seqgate.services.dispatcher.rights import RIGHTS as DISPATCHER
from seqgate.services.errors import InvalidTopicName
from seqgate.services.ledger.rights import RIGHTS as LEDGER
from seqgate.services.runtime.access import Access, Role
from seqgate.services.runtime.guard import Guard
from seqgate.services.runtime.identity import Principal
from seqgate.services.runtime.rights import Right
from tests.support.rpcs import ALLOWED, ROLES, TABLES, VERBS, Rpc, rpcs

ALICE = Principal(("sub:alice",))

by_rpc = pytest.mark.parametrize("rpc", list(rpcs()), ids=lambda rpc: rpc.name)


def rules(verb: str, topics: str = "acme/shop/*", subscriptions: str | None = None) -> Access:
    rule: dict[str, object] = {
        "principals": ["sub:alice"],
        "verbs": [verb],
        "topics": [topics],
    }
    if subscriptions is not None:
        rule["subscriptions"] = [subscriptions]
    return Access.parse({"rules": [rule]})


_ABOUT_NONE = ("ledger.ListTopics", "filter.Compile", "filter.Explain")


def allows(access: Access, right: Right, request: object) -> bool:
    needs = right.needs(request)
    return bool(needs) and all(access.allows(ALICE, need) for need in needs)


def test_every_method_has_a_right() -> None:
    named = {rpc.path for rpc in rpcs()}
    assert named == {path for table in TABLES.values() for path in table}
    assert {rpc.name for rpc in rpcs()} == {
        f"{service}.{method}" for service, methods in ALLOWED.items() for method in methods
    }


@by_rpc
def test_a_verb_grants_only_its_methods(rpc: Rpc) -> None:
    granting = {verb for verb in VERBS if allows(rules(verb), rpc.right, rpc.request())}
    assert granting == {*VERBS} & {*rpc.verbs}


@by_rpc
def test_a_verb_grants_nothing_in_another_namespace(rpc: Rpc) -> None:
    if rpc.service == "filter" and rpc.descriptor.name != "Evaluate":
        return  # methods without a topic
    elsewhere = rpc.request("acme/shops/orders")
    for verb in VERBS:
        assert not allows(rules(verb), rpc.right, elsewhere), verb
        assert not allows(rules(verb, "acme/shop/order"), rpc.right, rpc.request()), verb


@by_rpc
def test_a_right_to_a_subscription_covers_no_other_and_not_the_topic(rpc: Rpc) -> None:
    if rpc.name == "ledger.GetTopic" or rpc.service == "filter":
        return  # any right on the topic suffices
    fields = {field.name for field in rpc.descriptor.input_type.fields}
    one = fields & {"subscription", "subscribe"} or "cursor" in fields
    for verb in ("consume", "administer", "keep"):
        given = rules(verb, subscriptions="billing")
        is_granted = bool(one) and verb in rpc.verbs
        assert allows(given, rpc.right, rpc.request()) is is_granted, verb
        assert not allows(given, rpc.right, rpc.request(subscription="another")), verb


@by_rpc
def test_a_role_grants_the_calls_of_its_service(rpc: Rpc) -> None:
    for role in ROLES:
        access = Access.parse({"services": {role: ["sub:alice"]}})
        assert access.has_role(ALICE, rpc.right.roles) is (role in rpc.roles), role


@by_rpc
def test_invalid_topics_are_never_allowed(rpc: Rpc) -> None:
    everything = Access.parse(
        {"rules": [{"principals": ["sub:*"], "verbs": list(VERBS), "topics": ["*/?*/?*"]}]}
    )
    if rpc.name in _ABOUT_NONE:
        return  # methods without a topic
    for topic in ("", "orders", "a/b", "a/b/c/d", "a/b/", "*/*/*", "a/b/*"):
        if rpc.name == "cursor.ListCursors" and not topic:
            continue  # lists the cursors of all topics
        try:
            allowed = allows(everything, rpc.right, rpc.request(topic))
        except InvalidTopicName:
            allowed = False
        assert not allowed, topic


def test_system_topics_and_cursors_need_an_explicit_rule() -> None:
    moved = cursor_pb2.MarkDeleteRequest(topic="acme/shop/orders", cursor="seqgate.dedup")
    for verb in VERBS:
        create = cursor_pb2.CreateCursorRequest(topic="acme/shop/__dedup_policies", cursor="x")
        assert not allows(rules(verb), CURSOR[path("cursor", "CreateCursor")], create)
        assert not allows(rules(verb), CURSOR[path("cursor", "MarkDelete")], moved)
    explicit = rules("keep", subscriptions="seqgate.*")
    assert allows(explicit, CURSOR[path("cursor", "MarkDelete")], moved)


LISTS = {
    # by list: its field, the method that reads one item, and the fields that name it in both
    "cursor.ListCursors": ("cursors", "cursor.GetCursor", "topic", "name"),
    "dispatcher.ListSubscriptions": (
        "subscriptions", "dispatcher.GetSubscription", "topic", "name"
    ),
    "ledger.ListTopics": ("topics", "ledger.GetTopic", "name", None),
}  # fmt: skip

WITHIN = {
    "dispatcher.ListDeadLetters", "dispatcher.ListLetterOperations", "dispatcher.ListRedrives",
    "cursor.ListAcknowledged", "cursor.ListAttempts", "dedup.ListProducers", "ledger.ListLedgers",
    "ledger.ListTrimmedProducers",
}  # fmt: skip
"""Lists within one topic or cursor, which the request names."""

PLACES = [
    ("acme/shop/orders", "billing"),
    ("acme/shop/orders", "seqgate.dedup"),
    ("acme/shop/__dedup_policies", "billing"),
    ("acme/shop/__dedup_policies", "seqgate.dedup"),
    ("acme/shops/orders", "billing"),
]

GIVEN = [
    ("*/*/*", None),
    ("acme/shop/*", None),
    ("acme/shop/__*", None),
    ("*/*/*", "*"),
    ("*/*/*", "seqgate.*"),
    ("acme/shop/orders", "billing"),
]


class Called:
    """The context of a call of Alice's."""

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return (("authorization", "Bearer alice"),)

    def peer(self) -> str:
        return "test"


class Tokens:
    def principal(self, token: str) -> Principal:
        assert token == "alice"
        return ALICE


class Fixed:
    def __init__(self, access: Access) -> None:
        self._access = access

    def get(self) -> Access:
        return self._access


def test_every_list_is_filtered() -> None:
    lists = {rpc.name for rpc in rpcs() if rpc.descriptor.name.startswith("List")}
    assert lists == LISTS.keys() | WITHIN
    assert {rpc.name for rpc in rpcs() if rpc.right.shown is not None} == LISTS.keys()


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize(("topics", "subscriptions"), GIVEN)
@pytest.mark.parametrize("name", LISTS)
def test_a_list_shows_only_items_that_its_caller_may_get(
    name: str, topics: str, subscriptions: str | None, verb: str
) -> None:
    if subscriptions is not None and verb not in ("consume", "administer", "keep"):
        return  # no such rule exists
    by_name = {rpc.name: rpc for rpc in rpcs()}
    listing, (field, single, topic_field, name_field) = by_name[name], LISTS[name]
    access = rules(verb, topics, subscriptions)
    guard = Guard(Fixed(access), Tokens(), {"m": listing.right}, certificates=False)  # type: ignore[arg-type]
    reply = GetMessageClass(listing.descriptor.output_type)()
    items = [
        {topic_field: topic} | ({} if name_field is None else {name_field: cursor})
        for topic, cursor in PLACES
    ]
    for item in items:
        getattr(reply, field).add(**item)
    shown = guard.begin("m", Called()).shown(reply)
    expected = [
        item
        for item, (topic, cursor) in zip(items, PLACES, strict=True)
        if allows(access, by_name[single].right, by_name[single].request(topic, cursor))
    ]
    found = [{each: getattr(item, each) for each in items[0]} for item in getattr(shown, field)]
    assert found == expected


def test_services_see_complete_lists() -> None:
    right = CURSOR[path("cursor", "ListCursors")]
    access = Access.parse({"services": {"ledger": ["sub:alice"]}})
    guard = Guard(Fixed(access), Tokens(), {"m": right}, certificates=False)  # type: ignore[arg-type]
    reply = cursor_pb2.ListCursorsResponse()
    reply.cursors.add(topic="acme/shop/orders", name="seqgate.dedup")
    assert len(guard.begin("m", Called()).shown(reply).cursors) == 1


@pytest.mark.parametrize("name", ["seqgate.dead.letter.1:2", "#seqgate.internal.x"])
def test_internal_properties_are_written_only_by_services(name: str) -> None:
    info = managed_pb2.ManagedCursorInfo(
        cursor_properties=[managed_pb2.ManagedStringProperty(name=name, value="v")]
    )
    where: dict[str, Any] = {"topic": "acme/shop/orders", "cursor": "billing"}
    requests = {
        "CreateCursor": cursor_pb2.CreateCursorRequest(**where, properties={name: "v"}),
        "UpdateCursorProperties": cursor_pb2.UpdateCursorPropertiesRequest(
            **where, put={name: "v"}
        ),
        "ImportManagedCursor": cursor_pb2.ImportManagedCursorRequest(
            **where, managed_cursor_info=info.SerializeToString()
        ),
    }
    removing = cursor_pb2.UpdateCursorPropertiesRequest(**where, remove=[name])
    everything = rules("keep", subscriptions="*")
    for method, request in [*requests.items(), ("UpdateCursorProperties", removing)]:
        assert not allows(everything, CURSOR[path("cursor", method)], request)
    harmless = cursor_pb2.UpdateCursorPropertiesRequest(**where, put={"mine": "v"})
    assert allows(everything, CURSOR[path("cursor", "UpdateCursorProperties")], harmless)


def test_a_dead_letter_topic_requires_the_right_to_publish_there() -> None:
    consume = DISPATCHER[path("dispatcher", "Consume")]
    subscribe = dispatcher_pb2.Subscribe(topic="acme/shop/orders", subscription="billing")
    subscribe.options.dead_letter_topic = "acme/shop/secrets"
    request = dispatcher_pb2.ConsumeRequest(subscribe=subscribe)
    assert not allows(rules("consume"), consume, request)
    both = {"principals": ["sub:alice"], "verbs": ["consume", "publish"]}
    assert allows(Access.parse({"rules": [{**both, "topics": ["acme/shop/*"]}]}), consume, request)
    assert not allows(
        Access.parse({"rules": [{**both, "topics": ["acme/shop/orders"]}]}), consume, request
    )


@pytest.mark.parametrize(
    "method",
    [
        "ListDeadLetters",
        "GetDeadLetter",
        "RedriveDeadLetters",
        "DiscardDeadLetters",
        "StartRedrive",
        "EstimateRedrive",
    ],
)
def test_another_dead_letter_topic_requires_the_right_to_read_it(method: str) -> None:
    needed = DISPATCHER[path("dispatcher", method)]
    where = {"topic": "acme/shop/orders", "subscription": "billing"}
    request = getattr(dispatcher_pb2, f"{method}Request")(**where)
    assert allows(rules("consume", "acme/shop/orders"), needed, request)
    request.dead_letter_topic = "acme/shop/secrets"
    assert not allows(rules("consume", "acme/shop/orders"), needed, request)
    assert allows(rules("consume"), needed, request)


def test_a_mend_requires_the_right_to_publish_to_the_dead_letter_topic() -> None:
    needed = DISPATCHER[path("dispatcher", "MendDeadLetter")]
    request = dispatcher_pb2.MendDeadLetterRequest(topic="acme/shop/orders", subscription="billing")
    administer = {"principals": ["sub:alice"], "verbs": ["administer"], "topics": ["acme/shop/*"]}
    for topic, named in (
        ("acme/shop/orders-billing-DLQ", ""),
        ("acme/shop/letters", "acme/shop/letters"),
    ):
        request.dead_letter_topic = named
        publish = {"principals": ["sub:alice"], "verbs": ["publish"], "topics": [topic]}
        assert not allows(Access.parse({"rules": [administer]}), needed, request)
        assert not allows(Access.parse({"rules": [publish]}), needed, request)
        assert allows(Access.parse({"rules": [administer, publish]}), needed, request)
        request.dead_letter_topic = "acme/shop/elsewhere"
        assert not allows(Access.parse({"rules": [administer, publish]}), needed, request)


def test_producer_names_of_services_are_reserved() -> None:
    publish = LEDGER[path("ledger", "Publish")]
    opening = ledger_pb2.Open(topic="acme/shop/orders-billing-DLQ")
    for name in ("seqgate.dead/acme/shop/orders/billing", "seqgate.", "seqgate.x"):
        opening.producer_name = name
        request = ledger_pb2.PublishRequest(open=opening)
        assert not any(allows(rules(verb), publish, request) for verb in VERBS)
    assert Role.DISPATCHER in publish.roles
    for name in ("", "seqgate", "my-seqgate.dead"):
        opening.producer_name = name
        assert allows(rules("publish"), publish, ledger_pb2.PublishRequest(open=opening))


@pytest.mark.parametrize(
    ("method", "request_"),
    [
        ("ledger.Publish", ledger_pb2.PublishRequest()),
        ("ledger.Publish", ledger_pb2.PublishRequest(publications=ledger_pb2.Publications())),
        ("dedup.Exchange", writer_pb2.ExchangeRequest(request_id=1)),
        ("dedup.LoadState", writer_pb2.LoadStateRequest()),
        ("dedup.SetPolicy", dedup_pb2.SetPolicyRequest()),
        ("dispatcher.Consume", dispatcher_pb2.ConsumeRequest()),
        ("dispatcher.Consume", dispatcher_pb2.ConsumeRequest(seek=dispatcher_pb2.Seek())),
        ("filter.Evaluate", filter_pb2.EvaluateRequest(batch=filter_pb2.Batch())),
    ],
)
def test_a_request_without_a_topic_needs_no_right_of_its_own(method: str, request_: object) -> None:
    (rpc,) = [rpc for rpc in rpcs() if rpc.name == method]
    assert list(rpc.right.needs(request_)) == []


@pytest.mark.parametrize("which", ["admit", "confirm", "rollback"])
def test_each_request_of_an_exchange_needs_a_right_to_its_topic(which: str) -> None:
    (rpc,) = [rpc for rpc in rpcs() if rpc.name == "dedup.Exchange"]
    request = writer_pb2.ExchangeRequest()
    getattr(request, which).topic = "acme/shop/orders"
    assert allows(rules("keep"), rpc.right, request)
    getattr(request, which).topic = "acme/other/orders"
    assert not allows(rules("keep"), rpc.right, request)


def test_a_namespace_policy_needs_a_right_to_all_its_topics() -> None:
    (rpc,) = [rpc for rpc in rpcs() if rpc.name == "dedup.SetPolicy"]
    request = dedup_pb2.SetPolicyRequest(namespace="acme/shop")
    assert allows(rules("administer", "acme/shop/*"), rpc.right, request)
    assert allows(rules("administer", "acme/*/*"), rpc.right, request)
    assert not allows(rules("administer", "acme/shop/o*"), rpc.right, request)
    assert not allows(rules("administer", "acme/shops/*"), rpc.right, request)


def path(service: str, method: str) -> str:
    return f"/seqgate.api.{service}.v1.{service.capitalize()}Service/{method}"

"""The console, over a real stack: its pages, its readers' rights, and a browser that uses it."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from html import unescape
from importlib.metadata import version
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
import pytest_asyncio
from playwright.async_api import Browser as Chromium
from playwright.async_api import Page, async_playwright
from prometheus_client.parser import text_string_to_metric_families

from seqgate.api.dispatcher.v1 import dispatcher_pb2
from seqgate.api.dispatcher.v1.dispatcher_pb2_grpc import DispatcherServiceStub
from seqgate.api.filter.v1 import filter_pb2
from seqgate.client import (
    AfterDeadLetter,
    Batching,
    Chunking,
    Client,
    Consumer,
    SubscriptionOptions,
    connect,
)
from seqgate.client._channel import Security, open_channel
from seqgate.dev.ports import free_ports
from seqgate.dev.stack import CONSOLE, SERVICES, Stack
from seqgate.services.console.app import Console
from seqgate.services.console.calls import calls_of
from seqgate.services.console.config import ConsoleConfig
from seqgate.services.console.pages import ACTIONS
from seqgate.services.console.serving import serving
from seqgate.telemetry.metrics import CLIENT_CALLS, HTTP_REQUESTS, ROUTES_MAX, of_service
from tests.support.browser import chromium
from tests.support.console import Answer, Browser
from tests.support.depth import some_of
from tests.support.secured_stack import SecuredStack
from tests.support.waiting import eventually

TOPIC = "acme/shop/orders"
BATCHED = "acme/shop/batched"
HOSTILE = "acme/shop/hostile"
LARGE = "acme/shop/large"
SUBSCRIPTION = "billing"
IDLE = "idle"
"""A subscription of BATCHED to which nobody connects."""

STUCK = "customer-13"
"""The key whose first message is a dead letter, and holds back the others."""

NAMES = {"topic": TOPIC, "subscription": SUBSCRIPTION}

MINE = "/topics?prefix=acme/shop/"
"""A list that rights in acme/shop cover."""

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
"""The trace of a message of BATCHED."""

SCRIPT = "<script>document.title = 'taken'</script>"

PAGE_BYTES_MAX = 100_000

SHOTS = Path(__file__).parents[2] / "build" / "console"

PAGES = {
    "overview": "/",
    "topics": "/topics",
    "topic": f"/topic?topic={TOPIC}",
    "messages": f"/messages?topic={TOPIC}",
    "search": "/messages?"
    + urlencode({"topic": TOPIC, "expression": 'properties["kind"] == "refund"'}),
    "message": f"/message?topic={TOPIC}&position=1:0",
    "huge": f"/message?topic={HOSTILE}&position=1:1",
    "batch": f"/message?topic={BATCHED}&position=1:0&index=1",
    "life": f"/life?topic={TOPIC}&position=1:13",
    "subscriptions": "/subscriptions",
    "subscription": f"/subscription?{urlencode(NAMES)}",
    "why": f"/why?{urlencode({**NAMES, 'key': STUCK})}",
    "letters": f"/letters?{urlencode(NAMES)}",
    "letter": f"/letter?{urlencode({**NAMES, 'position': '1:0'})}",
    "redrive": f"/redrive?{urlencode({**NAMES, 'position': '1:0'})}",
    "mend": f"/mend?{urlencode({**NAMES, 'position': '1:0'})}",
    "discard": f"/discard?{urlencode({**NAMES, 'position': '1:0'})}",
    "operations": f"/operations?{urlencode(NAMES)}",
    "redrive_many": f"/redrive-many?{urlencode(NAMES)}",
    "replay": f"/replay?{urlencode({**NAMES, 'estimate': 'yes', 'until_at': '1:30'})}",
    "redrives": f"/redrives?{urlencode(NAMES)}",
    "cluster": "/cluster",
}
"""Every page, by name."""


@pytest.fixture(scope="module")
def metrics_address() -> str:
    return f"127.0.0.1:{free_ports(1)[0]}"


@pytest_asyncio.fixture(scope="module")
async def stack(
    tmp_path_factory: pytest.TempPathFactory, metrics_address: str
) -> AsyncIterator[Stack]:
    settings = {
        "SEQGATE_CONSOLE_METRICS_LISTEN": metrics_address,
        "SEQGATE_CONSOLE_REFRESH_S": "0.6",
        "SEQGATE_DISPATCHER_LEASE_S": "600",
    }
    folder = tmp_path_factory.mktemp("console")
    services = (*SERVICES, CONSOLE)
    async with (
        Stack(folder, services=services, environment=settings) as stack,
        shop(stack, stack.address),
    ):
        yield stack


@asynccontextmanager
async def shop(stack: Stack, address: Any, security: Security | None = None) -> AsyncIterator[None]:
    """A shop's topics, whose billing refuses one order for good."""
    given = security or Security()
    client = connect(
        address("ledger"),
        address("dispatcher"),
        dedup=address("dedup"),
        cursor=address("cursor"),
        tls=given.tls,
        token=given.token,
    )
    async with client:
        await client.admin().create_topic(TOPIC)
        await client.admin().create_subscription(TOPIC, SUBSCRIPTION)
        await client.admin().create_topic(BATCHED)
        await client.admin().create_subscription(BATCHED, IDLE)
        channel = open_channel(address("dispatcher"), given)
        await shadow(DispatcherServiceStub(channel))
        await publish(client)
        options = SubscriptionOptions(max_redeliveries=0, after_dead_letter=AfterDeadLetter.HOLD)
        async with client.consumer(TOPIC, SUBSCRIPTION, name="till-1", options=options) as till:
            for _ in range(40):
                message = await till.receive(30)
                if message.key == STUCK:
                    await till.nack(message, delay_s=0, reason=f"no such card {SCRIPT}")
                elif message.sequence_id % 3:
                    await till.ack(message)
            await eventually(lambda: held(channel), "the key is held")
            await channel.close()
            yield


async def publish(client: Client) -> None:
    async with client.producer(TOPIC, name="checkout") as producer:
        for number in range(120):
            kind = "refund" if number % 10 == 0 else "sale"
            await producer.send(
                b'{"order": %d, "total": "12.50"}' % number,
                key=f"customer-{number % 20}",
                properties={"kind": kind},
            )
    batching = Batching(messages_max=3, delay_s=60)
    async with client.producer(BATCHED, name="batches", batching=batching) as producer:
        traced = [{}, {"traceparent": f"00-{TRACE}-{'1' * 16}-01"}, {}]
        await asyncio.gather(
            *(
                producer.send(b"part %d" % number, key="b", properties=properties)
                for number, properties in enumerate(traced)
            )
        )
    async with client.producer(LARGE, name="scanner", chunking=Chunking(1_000)) as producer:
        await producer.send(json.dumps({"scan": "x" * 3_000}).encode(), key="l")
    async with client.producer(HOSTILE, name=SCRIPT) as producer:
        await producer.send(SCRIPT.encode(), key=SCRIPT, properties={SCRIPT: SCRIPT})
        many = {f"{number}{SCRIPT}": SCRIPT * 10 for number in range(60)}
        await producer.send(SCRIPT.encode() * 1_000, properties=many)


async def shadow(stub: Any) -> None:
    """Set a chain whose verdicts are only counted."""
    refunds = filter_pb2.Filter(
        name="no-refunds", version=1, expression='properties["kind"] != "refund"'
    )
    await stub.SetFilters(
        dispatcher_pb2.SetFiltersRequest(
            topic=TOPIC,
            subscription=SUBSCRIPTION,
            filters=[refunds],
            mode=dispatcher_pb2.FILTER_MODE_SHADOW,
        )
    )


async def held(channel: Any) -> bool:
    request = dispatcher_pb2.ReportRequest(topic=TOPIC, subscription=SUBSCRIPTION)
    report = await DispatcherServiceStub(channel).Report(request)
    return any(each.reason == dispatcher_pb2.REASON_HELD for each in report.withheld)


@pytest.fixture
def reader(stack: Stack) -> Browser:
    return Browser(stack.address(CONSOLE))


# ---- pages


@pytest.mark.parametrize("page", PAGES)
async def test_every_page_is_small_and_loads_nothing_from_elsewhere(
    reader: Browser, page: str
) -> None:
    answer = await reader.send("GET", PAGES[page])
    assert answer.status == 200, answer.words
    assert len(answer.text.encode()) < PAGE_BYTES_MAX
    assert "<script>" not in answer.text
    assert " style=" not in answer.text
    assert re.findall(r'(?:src|href|action)="(?!/|#)[^"]*"', answer.text) == []
    policy = answer.headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; style-src 'self'; script-src 'self'")
    assert "unsafe" not in policy
    assert answer.headers["Cache-Control"] == "no-store"
    assert answer.headers["X-Content-Type-Options"] == "nosniff"


async def test_the_overview_has_what_happens_and_what_waits(reader: Browser) -> None:
    words = (await reader.get("/")).words
    assert TOPIC in words
    assert re.search(r"\b1 withheld keys", words)
    assert "held 1" in words
    for each in (
        f"1 key held behind dead letters {SUBSCRIPTION} of {TOPIC}",
        f"1 dead letter is neither redriven nor given up {SUBSCRIPTION}",
        f"no consumer, and a backlog of 1 entry {IDLE} of {BATCHED}",
    ):
        assert each in words


async def test_a_topic_has_its_log_its_deduplication_and_its_producers(reader: Browser) -> None:
    words = (await reader.get("/topic", topic=TOPIC)).words
    for each in (
        "120 in 120 entries",
        "State active",
        "Replay distance 0 entries",
        "Snapshot taken",
        "120 new, 0 duplicate",
        "checkout 119 119",
    ):
        assert each in words


@pytest.mark.parametrize(
    ("query", "positions"),
    [
        ({"key": "customer-7"}, range(7, 120, 20)),
        ({"producer": "checkout", "sequence_id": 5}, [5]),
        ({"expression": 'properties["kind"] == "refund"'}, range(0, 120, 10)),
        (
            {"expression": 'properties["kind"] == "refund"', "key": "customer-10"},
            range(10, 120, 20),
        ),
        ({"at": "1:118"}, [118, 119]),
        ({"time": "2100-01-01T00:00:00"}, []),
        ({"time": "1970-01-02T00:00:00"}, range(50)),
        ({}, range(70, 120)),
        ({"producer": "nobody"}, []),
    ],
)
async def test_messages_are_found(
    reader: Browser, query: dict[str, object], positions: range | list[int]
) -> None:
    answer = await reader.get("/messages", topic=TOPIC, **query)
    body = answer.text.partition("<tbody>")[2]
    assert re.findall(r">1:(\d+)</a>", body) == [str(each) for each in positions]


async def test_a_search_stops_at_its_limits_and_goes_on_from_there(reader: Browser) -> None:
    first = await reader.get("/messages", topic=TOPIC, expression="true")
    assert "50 entries read, up to the limit of 50 entries a page" in first.words
    (further,) = re.findall(r'rel="next"[^>]*href="([^"]+)"', first.text)
    second = await reader.send("GET", further.replace("&amp;", "&"))
    assert ">1:50</a>" in second.text
    assert ">1:49</a>" not in second.text


async def test_pages_of_a_log_lead_back_to_its_start(reader: Browser) -> None:
    answer = await reader.get("/messages", topic=TOPIC)
    assert 'rel="next"' not in answer.text
    for first in (20, 0):
        (older,) = re.findall(r'rel="prev"[^>]*href="([^"]+)"', answer.text)
        answer = await reader.send("GET", older.replace("&amp;", "&"))
        assert f">1:{first}</a>" in answer.text
    assert 'rel="prev"' not in answer.text


async def test_a_key_is_found_in_batches(reader: Browser) -> None:
    assert ">1:0</a>" in (await reader.get("/messages", topic=BATCHED, key="b")).text
    assert "No entry matches" in (await reader.get("/messages", topic=BATCHED, key="c")).words


@pytest.mark.parametrize(
    ("query", "fault"),
    [
        ({"expression": "nope("}, "Syntax error"),
        ({"expression": "x" * 5_000}, "too long"),
    ],
)
async def test_a_fault_in_an_expression_is_shown_beside_it(
    reader: Browser, query: dict[str, object], fault: str
) -> None:
    answer = await reader.get("/messages", topic=TOPIC, **query)
    assert answer.status == 200
    assert fault in answer.words


@pytest.mark.parametrize(
    ("path", "query", "status"),
    [
        ("/messages", {"topic": TOPIC, "sequence_id": "-1"}, 400),
        ("/messages", {"topic": TOPIC, "at": "somewhere"}, 400),
        ("/messages", {"topic": TOPIC, "time": "soon"}, 400),
        ("/messages", {"topic": TOPIC, "time": "1800-01-01"}, 400),
        ("/message", {"topic": TOPIC, "position": "9:9"}, 404),
        ("/topic", {"topic": "acme/shop/none"}, 404),
        ("/topic", {"topic": "//"}, 400),
        ("/subscription", {"topic": TOPIC, "subscription": "none"}, 404),
        ("/why", {**NAMES, "key64": "!"}, 400),
        ("/letters", {**NAMES, "from": "!"}, 400),
        ("/letter", {**NAMES, "position": "9:9"}, 404),
        ("/redrive", {**NAMES, "position": "9:9"}, 409),
        ("/redrive", NAMES, 400),
        ("/mend", {**NAMES, "position": "9:9"}, 404),
        ("/replay", {**NAMES, "subscription": "none"}, 404),
        ("/nothing", {}, 404),
    ],
)
async def test_a_wrong_request_is_answered_as_such(
    reader: Browser, path: str, query: dict[str, object], status: int
) -> None:
    assert (await reader.get(path, **query)).status == status


async def test_a_payload_is_shown_as_json_text_and_hex(reader: Browser) -> None:
    at: dict[str, object] = {"topic": TOPIC, "position": "1:3"}
    assert '{ "order": 3, "total": "12.50" }' in (await reader.get("/message", **at)).words
    assert '{"order": 3,' in (await reader.get("/message", **at, as_="text")).words
    assert "7b 22 6f 72 64 65 72" in (await reader.get("/message", **at, as_="hex")).words
    batch = await reader.get("/message", topic=BATCHED, position="1:0", index=2)
    assert "part 2" in batch.words


async def test_a_large_message_is_shown_whole(
    reader: Browser,
) -> None:
    for position in ("1:0", "1:3"):
        answer = await reader.get("/message", topic=LARGE, position=position)
        assert "Of the whole message: its 4 chunks together." in answer.words
        assert '{ "scan": "xxx' in answer.words
        (life,) = re.findall(r'href="([^"]+)">The life of its message', answer.text)
        found = await reader.send("GET", unescape(life))
        assert "stored at 1:3" in found.words


async def test_a_subscription_has_consumers_keys_and_shadow_verdicts(reader: Browser) -> None:
    words = (await reader.get("/subscription", **NAMES)).words
    for each in (
        "Type KEY_SHARED",
        "After a dead letter hold",
        "till-1 65,5",
        f"{STUCK} held",
        "shadow no-refunds 1 120 108 12 0 0",
    ):
        assert each in words


async def test_a_dead_letter_has_its_reason_its_failures_and_what_waits(reader: Browser) -> None:
    words = (await reader.get("/letters", **NAMES)).words
    assert f"{TOPIC}-{SUBSCRIPTION}-DLQ" in words
    assert f"{STUCK} 1:13 redeliveries 1 refused by till-1: no such card {SCRIPT}" in words
    answer = await reader.send("GET", PAGES["letter"])
    for each in (
        "State holds its key",
        "Reason redeliveries",
        "Producer checkout, sequence id 13",
        f"refused till-1 no such card {SCRIPT}",
        "kind sale",
    ):
        assert each in answer.words
    assert re.search(r"Waiting behind it \d", answer.words)
    assert ">Redrive</a>" in answer.text


async def test_looking_makes_no_instance_take_a_subscription_unless_the_reader_agrees(
    reader: Browser,
) -> None:
    names = {"topic": BATCHED, "subscription": IDLE}
    for path, query in (
        ("/letters", {}),
        ("/letter", {"position": "1:0"}),
        ("/why", {"key": "b"}),
        ("/life", {"position": "1:0"}),
    ):
        answer = await reader.get(path, **names, **query)
        assert "No dispatcher owns this subscription" in answer.words
    assert "Owner none" in (await reader.get("/subscription", **names)).words
    page = await reader.get("/letters", **names)
    fields = {"form": page.form, "next": f"/letters?{urlencode(names)}"}
    assert (await reader.post(f"/take?{urlencode(names)}", fields | {"form": ""})).status == 403
    taken = await reader.post(f"/take?{urlencode(names)}", fields)
    assert (taken.status, taken.headers["Location"]) == (303, fields["next"])
    assert '<p class="empty">None' in (await reader.send("GET", fields["next"])).text


async def test_a_messages_life_is_told_by_its_identity_or_its_position(reader: Browser) -> None:
    by_id = await reader.get("/life", topic=TOPIC, producer="checkout", sequence_id=13)
    for answer in (by_id, await reader.send("GET", PAGES["life"])):
        assert "Life of checkout, 13" in answer.words
        assert re.search(
            r"delivered to till-1 .* failed by till-1, refused, attempt 1: no such card "
            rf"{re.escape(SCRIPT)} .* dead lettered",
            answer.words,
        )
        assert "Dead letters: 1:0" in answer.words
        assert "If it was sent again duplicate" in answer.words
    traced = await reader.get("/life", topic=BATCHED, trace=TRACE)
    assert "Life of batches, 1 " in traced.words
    assert f"of 3 messages Trace {TRACE}" in traced.words
    for query, fault in (
        ({"producer": "checkout", "sequence_id": 900}, "stale"),
        ({"producer": "checkout"}, "needs its sequence id"),
        ({"position": "9:9"}, "no such message"),
        ({"trace": "1" * 32}, "no message of the trace"),
        ({"trace": "0" * 32}, "trace_id must be 32 hexadecimal digits"),
    ):
        answer = await reader.get("/life", topic=TOPIC, **query)
        assert (answer.status, fault in answer.words) == (200, True), answer.words


async def test_a_letter_is_mended_and_discarded(reader: Browser, stack: Stack) -> None:
    topic = "acme/shop/letters"
    here = {"topic": topic, "subscription": "vans", "position": "1:0"}
    path = f"/mend?{urlencode(here)}"
    async with parcels(stack, topic):

        async def is_there() -> bool:
            return (await reader.send("GET", path)).status == 200

        await eventually(is_there, "the letter is there")
        page = await reader.send("GET", path)
        assert '{"parcel": 1, "weight": "?"}</textarea>' in unescape(page.text)
        (request_id,) = re.findall(r'name="request_id" value="([^"]+)"', page.text)
        fields = {
            "form": page.form,
            "request_id": request_id,
            "as": "json",
            "payload": '{"parcel": 1, "weight": "?"}',
            "name-0": "size",
            "value-0": "?",
        }
        for change, fault in (
            ({}, "nothing is changed"),
            ({"payload": "{"}, "not JSON"),
            ({"payload": "NaN"}, "not JSON"),
            ({"as": "hex", "payload": "0"}, "not hexadecimal"),
        ):
            answer = await reader.post(path, fields | change)
            assert (answer.status, fault in answer.words) == (400, True), answer.words
        change = {"payload": "[\r\n1]", "name-0": "", "name-1": "<b>", "value-1": "<b>"}
        first, again = [await reader.post(path, fields | change) for _ in range(2)]
        assert first.status == again.status == 303, again.words
        mended = first.headers["Location"]
        assert again.headers["Location"] == mended
        answer = await reader.send("GET", mended)
        assert "[ 1 ]" in answer.words
        assert "Name Value <b> <b>" in answer.words
        assert "<b>&" not in answer.text
        assert "mended" in (await reader.get("/letter", **here)).words

        discard = mended.replace("/letter", "/discard")
        page = await reader.send("GET", discard)
        (request_id,) = re.findall(r'name="request_id" value="([^"]+)"', page.text)
        fields = {"form": page.form, "request_id": request_id, "reason": "lost at sea"}
        assert (await reader.post(discard, fields)).status == 303
        assert "State discarded" in (await reader.send("GET", mended)).words
        life = (await reader.get("/life", topic=topic, position="1:0")).words
        assert re.search(r"mended by ipv4.* discarded by ipv4:.* lost at sea", life)
        assert not re.search(r"by (\S+), by \1", life)
        words = (await reader.get("/operations", topic=topic, subscription="vans")).words
        assert "lost at sea" in words
        assert "1 mend 1:0" in words


async def test_a_letter_of_a_large_message_is_redriven_whole(reader: Browser, stack: Stack) -> None:
    topic, payload = "acme/shop/sofas", b"s" * 3_000
    options = SubscriptionOptions(max_redeliveries=0)
    async with connect(stack.address("ledger"), stack.address("dispatcher")) as client:
        async with client.producer(topic, name="packers", chunking=Chunking(1_000)) as producer:
            await producer.send(payload, key="sofa")
        async with client.consumer(topic, "vans", name="van-1", options=options) as van:
            await van.nack(await van.receive(30), delay_s=0)
            here = {"topic": topic, "subscription": "vans"}

            async def listed() -> set[str]:
                page = await reader.get("/letters", **here)
                return set(re.findall(r'"/letter\?[^"]*position=1%3A([0-9]+)"', page.text))

            await eventually(listed, "the letter is there")
            (entry_id,) = await listed()
            position = f"1:{entry_id}"
            answer = await reader.get("/letter", **here, position=position)
            assert "a large message of 3 chunks" in answer.words
            assert "/mend?" not in answer.text
            path = f"/redrive?{urlencode(here | {'position': position})}"
            page = await reader.send("GET", path)
            (request_id,) = re.findall(r'name="request_id" value="([^"]+)"', page.text)
            assert (
                await reader.post(path, {"form": page.form, "request_id": request_id})
            ).status == 303
            back = await van.receive(30)
            assert back.payload == payload
            await van.ack(back)


async def test_a_redrive_of_many_and_a_replay_are_estimated_first(reader: Browser) -> None:
    words = (await reader.send("GET", PAGES["redrive_many"])).words
    assert "Of 1 letter: What would happen Entries At least At most redriven 1 1 1" in words
    assert "Redrive 1" in words
    none = await reader.get("/redrive-many", **NAMES, key="other")
    assert "not selected 1 1 1" in none.words
    assert "There is nothing to redrive." in none.words
    words = (await reader.send("GET", PAGES["replay"])).words
    assert "Of 30 entries:" in words
    assert re.search(r"redriven (\d+) \1 \1 .* Replay \1", words)
    for query, fault in (
        ({"expression": "nope("}, "Syntax error"),
        ({"rate": "10001"}, "above 10,000"),
    ):
        for path in ("/redrive-many", "/replay"):
            answer = await reader.get(path, **NAMES, estimate="yes", **query)
            assert (answer.status, fault in answer.words) == (200, True), answer.words
    assert "None is remembered." in (await reader.send("GET", PAGES["redrives"])).words


async def test_a_replay_into_a_new_subscription_runs_and_is_stopped(
    reader: Browser, stack: Stack
) -> None:
    names = {"topic": BATCHED, "subscription": "again"}
    query = {**names, "estimate": "yes", "create": "yes", "rate": "5"}
    page = await reader.get("/replay", **query)
    (request_id,) = re.findall(r'name="request_id" value="([^"]+)"', page.text)
    fields = {"form": page.form, "request_id": request_id}
    path = f"/replay?{urlencode(query)}"
    for _ in range(2):  # sent twice, it is started once
        answer = await reader.post(path, fields)
        assert answer.headers["Location"] == f"/redrives?{urlencode(names)}"

    async def is_done() -> bool:
        words = (await reader.get("/redrives", **names)).words
        assert "2 replay" not in words
        return "1 replay" in words and "done" in words

    await eventually(is_done, "the replay is done")
    for number, status in (("1", 303), ("7", 404)):
        stop = await reader.post(
            f"/redrives?{urlencode(names)}", {"form": page.form, "number": number}
        )
        assert stop.status == status


async def test_texts_of_messages_are_never_markup(reader: Browser) -> None:
    for path in (
        f"/messages?topic={HOSTILE}",
        f"/message?topic={HOSTILE}&position=1:0",
        f"/topic?topic={HOSTILE}",
        f"/messages?{urlencode({'topic': HOSTILE, 'key': SCRIPT, 'producer': SCRIPT})}",
        f"/why?{urlencode({**NAMES, 'key': SCRIPT})}",
    ):
        answer = await reader.send("GET", path)
        assert answer.status == 200
        assert SCRIPT in answer.words or "&lt;script" in answer.text
        assert SCRIPT not in answer.text


async def test_the_cluster_page_has_every_instance(reader: Browser, stack: Stack) -> None:
    words = (await reader.get("/cluster")).words
    needs = {"dedup": "redis answers", "ledger": "dedup answers sqlite answers"}
    for service in SERVICES:
        expected = f"{service} {stack.address(service)} ready {version('seqgate')} "
        assert expected + needs.get(service, "") in words


async def test_another_hosts_name_is_refused(stack: Stack) -> None:
    foreign = Browser(stack.address(CONSOLE), host="elsewhere.example")
    answer = await foreign.get("/")
    assert answer.status == 403
    assert TOPIC not in answer.text
    assert (await foreign.get("/healthz")).status == 200


async def test_its_metrics_are_those_of_the_catalogue(
    reader: Browser, metrics_address: str
) -> None:
    await reader.get("/topic", topic=TOPIC)
    await reader.get("/no-such-page")
    text = (await Browser(metrics_address).get("/metrics")).text
    found = {each.name: each for each in text_string_to_metric_families(text)}
    expected = {each.prometheus.removesuffix("_total") for each in of_service("console")}
    assert found.keys() - {"target_info", "target"} == expected
    requests = found[HTTP_REQUESTS.prometheus].samples
    counts = {
        (each.labels["http_route"], each.labels["http_response_status_code"])
        for each in requests
        if each.name.endswith("_count")
    }
    assert {("/topic", "200"), ("_other", "404")} <= counts
    assert len({route for route, _ in counts}) <= ROUTES_MAX
    calls = found[CLIENT_CALLS.prometheus].samples
    assert any(each.labels["rpc_method"].endswith("/GetTopic") for each in calls)


# ---- readers


@pytest_asyncio.fixture(scope="module")
async def secured(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[SecuredStack]:
    async with SecuredStack(tmp_path_factory.mktemp("secured-console")) as stack:
        token = stack.issuer.token("all")
        async with shop(stack, stack.address, stack.security(token=token)):
            yield stack


@asynccontextmanager
async def console(stack: SecuredStack, **given: Any) -> AsyncIterator[Browser]:
    """A console of a secured stack, with a certificate that has no rights."""
    mine = stack.authority.issue("console", uris=["spiffe://example/console"])
    (port,) = free_ports(1)
    settings: dict[str, Any] = {
        **{f"{service}_target": stack.address(service) for service in SERVICES},
        "listen": f"127.0.0.1:{port}",
        "credentials": "token",
        "peer_ca_file": stack.authority.file,
        "peer_certificate_file": mine.certificate,
        "peer_key_file": mine.key,
    }
    config = ConsoleConfig(**(settings | given))
    config.check()
    calls = calls_of(config)
    browser = Browser(config.listen)
    try:
        async with serving(config, Console(config, calls).app):
            yield browser
    finally:
        await calls.close()


async def signed_in(reader: Browser, token: str, **more: Any) -> Answer:
    page = await reader.get("/sign-in")
    return await reader.post("/sign-in", {"form": page.form, "token": token, "next": MINE}, **more)


async def test_without_a_token_every_page_leads_to_signing_in(secured: SecuredStack) -> None:
    async with console(secured) as reader:
        for path in PAGES.values():
            answer = await reader.send("GET", path)
            assert answer.status == 303
            assert answer.headers["Location"].startswith("/sign-in?next=")
            assert answer.text == ""


async def test_a_reader_sees_what_the_token_may_see_and_nothing_else(
    secured: SecuredStack,
) -> None:
    async with console(secured) as reader:
        answer = await signed_in(reader, secured.issuer.token("all"))
        assert (answer.status, answer.headers["Location"]) == (303, MINE)
        assert TOPIC in (await reader.send("GET", MINE)).words
        assert STUCK in (await reader.get("/subscription", **NAMES)).words

        nobody = reader.signed_out()
        await signed_in(nobody, secured.issuer.token("nobody"))
        for name, path in PAGES.items():
            answer = await nobody.send("GET", path)
            assert STUCK not in re.sub(r"<h1>.*?</h1>|<title>.*?</title>", "", answer.text), name
            assert "12.50" not in answer.text
            if name in (
                "topic",
                "messages",
                "message",
                "life",
                "subscription",
                "why",
                "letters",
                "letter",
                "redrive",
                "mend",
                "discard",
                "operations",
                "redrive_many",
                "replay",
                "redrives",
            ):
                assert answer.status == 403, name
            for shown in ("checkout", "till-1", BATCHED):
                assert shown not in answer.text, name


async def test_a_reader_without_rights_on_subscriptions_sees_topics(
    secured: SecuredStack,
) -> None:
    async with console(secured) as reader:
        await signed_in(reader, secured.issuer.token("read"))
        words = (await reader.get("/topic", topic=TOPIC)).words
        assert "Subscriptions cannot be shown" in words
        assert "checkout" in words


async def test_a_reader_who_may_not_consume_sees_letters_without_their_payloads(
    secured: SecuredStack,
) -> None:
    async with console(secured) as reader:
        await signed_in(reader, secured.issuer.token("administer"))
        answer = await reader.send("GET", PAGES["letter"])
        assert "State holds its key" in answer.words
        assert ">Redrive</a>" in answer.text
        assert "The payload cannot be shown" in answer.words
        assert "12.50" not in answer.text


async def test_a_list_beyond_a_readers_rights_leads_to_the_one_within_them(
    secured: SecuredStack,
) -> None:
    async with console(secured) as reader:
        await signed_in(reader, secured.issuer.token("read"))
        answer = await reader.get("/topics")
        assert answer.status == 403
        for form in ('action="/topics"', 'action="/topic"'):
            assert form in answer.text
        assert TOPIC in (await reader.send("GET", MINE)).words
        for path in ("/", "/topics", "/subscriptions"):
            answer = await reader.get(path)
            assert answer.headers["Location"] == f"{path}?prefix=acme%2Fshop%2F"
        assert "Of topics that begin with acme/shop/" in (await reader.get("/cluster")).words


@pytest.mark.parametrize("token", ["a.b.c", "", "with space", "ü", "x" * 4_000])
async def test_a_bad_token_signs_nobody_in(secured: SecuredStack, token: str) -> None:
    async with console(secured) as reader:
        answer = await signed_in(reader, token)
        assert answer.status == 403
        assert not any("token" in name for name in reader.cookies)
        assert token == "" or token not in answer.text


async def test_the_token_is_in_a_cookie_that_scripts_and_other_sites_cannot_use(
    secured: SecuredStack,
) -> None:
    token = secured.issuer.token("all")
    async with console(secured) as reader:
        answer = await signed_in(reader, token)
        (cookie,) = [each for each in answer.headers.get_all("Set-Cookie", []) if "token" in each]
        assert {"HttpOnly", "SameSite=strict", "Path=/"} <= set(cookie.split("; "))
        assert token not in (await reader.get("/")).text
        page = await reader.get("/")
        out = await reader.post("/sign-out", {"form": page.form})
        assert out.status == 303
        assert (await reader.send("GET", MINE)).status == 303


@pytest.mark.parametrize("origin", ["", "null", "http://elsewhere.example", "https://127.0.0.1"])
async def test_a_form_from_another_origin_is_refused(secured: SecuredStack, origin: str) -> None:
    async with console(secured) as reader:
        answer = await signed_in(reader, secured.issuer.token("all"), origin=origin)
        assert answer.status == 403
        assert not any("token" in name for name in reader.cookies)


async def test_a_form_without_its_value_is_refused(secured: SecuredStack) -> None:
    async with console(secured) as reader:
        await signed_in(reader, secured.issuer.token("all"))
        for value in ("", "other", reader.signed_out().cookies.get("form", "")):
            for path in ("/sign-out", *ACTIONS):
                assert (await reader.post(path, {"form": value})).status == 403
        assert (await reader.send("GET", MINE)).status == 200
        huge = await reader.post("/sign-out", {"form": "x" * 100_000})
        assert huge.status == 403


async def test_a_redrive_takes_a_form_of_the_console_and_its_readers_rights(
    secured: SecuredStack,
) -> None:
    path = PAGES["redrive"]
    async with console(secured) as reader:
        assert (await reader.post(path, {})).status == 403
        page = await reader.get("/sign-in")
        unknown = await reader.post(path, {"form": page.form, "request_id": "one"})
        assert unknown.headers["Location"].startswith("/sign-in?next=%2Fredrive")
        await signed_in(reader, secured.issuer.token("all"))
        page = await reader.send("GET", path)
        fields = {"form": page.form, "request_id": "one"}
        assert (await reader.post(path, fields, origin="http://elsewhere.example")).status == 403
        assert (await reader.post(path, fields | {"form": "other"})).status == 403
        assert (await reader.post(path, {"form": page.form})).status == 400

        nobody = reader.signed_out()
        await signed_in(nobody, secured.issuer.token("nobody"))
        page = await nobody.get("/")
        assert (await nobody.post(path, {"form": page.form, "request_id": "two"})).status == 403
        assert "holds its key" in (await reader.send("GET", PAGES["letter"])).words


async def test_with_a_certificate_of_its_own_it_shows_what_that_may_see(
    secured: SecuredStack,
) -> None:
    user = secured.user
    files = {"peer_certificate_file": user.certificate, "peer_key_file": user.key}
    async with console(secured, credentials="certificate", **files) as reader:
        answer = await reader.send("GET", MINE)
        assert TOPIC in answer.words
        assert "read-only" in answer.words
        for each in (answer, await reader.send("GET", PAGES["letter"])):
            assert 'method="post"' not in each.text
            assert ">Redrive</a>" not in each.text
        page = await reader.send("GET", PAGES["redrive"])
        assert 'method="post"' not in page.text
        for path in ACTIONS:
            form = reader.cookies["seqgate-form"]
            refused = await reader.post(path, {"form": form, "request_id": "one"})
            assert (refused.status, "read-only" in refused.text) == (403, True)


async def test_over_tls_its_cookies_belong_to_its_host(secured: SecuredStack) -> None:
    host = "console.example"
    async with console(secured, origin=f"https://{host}") as reader:
        reader.host = host
        page = await reader.get("/sign-in")
        assert all(name.startswith("__Host-") for name in reader.cookies)
        assert "Secure" in page.headers["Set-Cookie"]
        assert page.headers["Strict-Transport-Security"]
        fields = {"form": page.form, "token": secured.issuer.token("all")}
        assert (await reader.post("/sign-in", fields, origin=f"http://{host}")).status == 403
        assert (await reader.post("/sign-in", fields, origin=f"https://{host}")).status == 303


# ---- in a browser


@pytest_asyncio.fixture(scope="module")
async def chrome() -> AsyncIterator[Chromium]:
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(
            executable_path=chromium(), args=["--no-sandbox", "--disable-gpu"]
        )
        yield browser
        await browser.close()


def watched(page: Page) -> list[str]:
    """What goes wrong on a page, as it happens."""
    faults: list[str] = []
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("console", lambda said: faults.append(said.text) if said.type == "error" else None)
    # An update under way is aborted by leaving the page.
    page.on(
        "requestfailed",
        lambda request: (
            None
            if request.failure == "net::ERR_ABORTED"
            else faults.append(f"{request.url}: {request.failure}")
        ),
    )
    return faults


async def updated(page: Page) -> None:
    """Wait until a page has updated itself once more."""
    seen = "document.documentElement.dataset.updates"
    before = await page.evaluate(seen)

    async def is_fresh() -> bool:
        return bool(await page.evaluate(seen) != before)

    await eventually(is_fresh, "the page updates itself")


@asynccontextmanager
async def parcels(stack: Stack, topic: str) -> AsyncIterator[Consumer]:
    """A topic whose first parcel is refused for good, and holds back the second."""
    options = SubscriptionOptions(max_redeliveries=0, after_dead_letter=AfterDeadLetter.HOLD)
    async with connect(stack.address("ledger"), stack.address("dispatcher")) as client:
        async with client.producer(topic, name="packers") as producer:
            for number in (1, 2):
                parcel = b'{"parcel": %d, "weight": "?"}' % number
                await producer.send(parcel, key="parcel", properties={"size": "?"})
        async with client.consumer(topic, "vans", name="van-1", options=options) as van:
            await van.nack(await van.receive(30), delay_s=0)
            yield van


async def test_a_stuck_key_is_found_its_letter_mended_and_redriven_by_clicks(
    stack: Stack, chrome: Chromium
) -> None:
    topic = "acme/shop/parcels"
    page = await chrome.new_page(timezone_id="Asia/Kolkata", locale="en-GB")
    faults = watched(page)
    async with parcels(stack, topic) as van:
        await page.goto(f"http://{stack.address(CONSOLE)}/")
        stuck = page.locator("#alerts tr", has_text=topic)
        await stuck.get_by_role("link", name="vans").first.click()
        await page.locator("#keys").get_by_role("link", name="parcel").first.click()
        assert "held" in await page.locator(".chain").inner_text()
        await page.get_by_role("link", name="Dead letters of this key").click()
        await page.locator("#letters").get_by_role("link", name="1:0").first.click()

        await page.get_by_role("link", name="Its life").click()
        timeline = await page.locator(".timeline").inner_text()
        for event in ("delivered to van-1", "failed by van-1", "dead lettered"):
            assert event in timeline
        await page.get_by_role("link", name="1:0").last.click()

        await page.get_by_role("link", name="Mend").click()
        await page.get_by_label("Payload").fill('{"parcel": 1, "weight": 3}')
        await page.get_by_label("Value 1", exact=True).fill("small")
        await page.get_by_role("button", name="Mend").click()
        assert "Mended" in await page.locator(".facts").inner_text()
        await page.get_by_role("link", name="Redrive", exact=True).click()
        await page.get_by_role("button", name="Redrive now").click()
        await page.get_by_text(re.compile("^(on its way back|redriven)$")).first.wait_for()
        first = await van.receive(30)
        assert first.payload == b'{"parcel": 1, "weight": 3}'
        assert first.properties["size"] == "small"
        await van.ack(first)
        second = await van.receive(30)
        assert second.payload == b'{"parcel": 2, "weight": "?"}'
        await van.ack(second)
    assert faults == []


async def test_a_page_updates_itself_sorts_and_keeps_the_focus(
    stack: Stack, chrome: Chromium
) -> None:
    page = await chrome.new_page(timezone_id="Asia/Kolkata", locale="en-GB")
    faults = watched(page)
    await page.goto(f"http://{stack.address(CONSOLE)}/topics")
    shown = await page.locator("time").first.inner_text()
    utc = await page.locator("time").first.get_attribute("datetime")
    assert utc is not None
    assert shown[-5:-3] != utc[14:16]  # half an hour apart from UTC
    for expected in ("descending", "ascending"):
        button = page.get_by_role("button", name="Messages")
        await button.focus()
        await page.keyboard.press("Enter")
        head = page.locator("th[aria-sort]")
        assert await head.get_attribute("aria-sort") == expected
        await updated(page)
        assert await head.get_attribute("aria-sort") == expected
        assert await page.evaluate("document.activeElement.textContent") == "Messages"
    counts = await page.locator("tbody tr td:nth-child(3)").all_inner_texts()
    numbers = [int(each.replace(",", "")) for each in counts]
    assert numbers == sorted(numbers)
    other = await chrome.new_page()
    await other.goto(page.url)
    assert await other.locator("tbody tr td:nth-child(3)").all_inner_texts() == counts
    assert faults == []


async def test_pages_fit_wide_and_narrow_windows(stack: Stack, chrome: Chromium) -> None:
    """Writes pictures of the pages to build/console: of a few of them, unless at full depth."""
    SHOTS.mkdir(parents=True, exist_ok=True)
    page = await chrome.new_page()
    faults = watched(page)
    await page.goto(f"http://{stack.address(CONSOLE)}/subscription?{urlencode(NAMES)}")
    for _ in range(2):  # until its charts have lines
        await updated(page)
    drawn = set(some_of(list(PAGES), every=12))
    for name, path in PAGES.items():
        await page.goto(f"http://{stack.address(CONSOLE)}{path}")
        if name == "overview":
            await updated(page)
        for width in (390, 1280):
            await page.set_viewport_size({"width": width, "height": 800})
            overflow = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
            assert await page.evaluate(overflow) <= 0, name
            for scheme in ("light", "dark") if name in drawn else ():
                await page.emulate_media(color_scheme=scheme)
                await page.screenshot(path=SHOTS / f"{name}-{scheme}-{width}.png", full_page=True)
    assert faults == []
    await page.close()


async def test_a_reader_signs_in_and_out_and_scripts_see_no_token(
    secured: SecuredStack, chrome: Chromium
) -> None:
    SHOTS.mkdir(parents=True, exist_ok=True)
    async with console(secured) as reader:
        page = await chrome.new_page()
        await page.goto(f"http://{reader.address}{MINE}")
        await page.get_by_label("Token").fill(secured.issuer.token("all"))
        await page.get_by_role("button", name="Sign in").click()
        await page.get_by_role("link", name=TOPIC, exact=True).wait_for()
        assert page.url.endswith(MINE)
        assert await page.evaluate("document.cookie") == ""
        await page.screenshot(path=SHOTS / "signed-in.png")
        await page.get_by_role("button", name="Sign out").click()
        await page.get_by_label("Token").wait_for()
        await page.screenshot(path=SHOTS / "sign-in.png")

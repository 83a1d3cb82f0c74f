"""Authorization over all services as processes: mutual TLS, identities, and every right."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
from grpc import StatusCode, aio

from seqgate.api.common.v1 import common_pb2
from seqgate.api.cursor.v1 import cursor_pb2
from seqgate.api.dedup.v1 import dedup_pb2
from seqgate.api.dispatcher.v1 import dispatcher_pb2
from seqgate.api.dispatcher.v1.dispatcher_pb2_grpc import DispatcherServiceStub
from seqgate.api.filter.v1 import filter_pb2
from seqgate.api.ledger.v1 import ledger_pb2
from seqgate.api.ledger.v1.ledger_pb2_grpc import LedgerServiceStub
from seqgate.channels import open_blocking_channel
from seqgate.client import SubscriptionOptions, connect
from seqgate.client._channel import Security, open_channel
from seqgate.dev.stack import SERVICES
from seqgate.errors import AuthenticationError, PermissionDeniedError
from seqgate.owners import FollowingChannel
from seqgate.telemetry import metrics as told
from tests.cli.command_line import CommandLine
from tests.integration.refusals import check, status_of_call
from tests.support.authority import Files
from tests.support.nursery import Nursery
from tests.support.rpcs import TOPIC, VERBS, Rpc, rpcs
from tests.support.scrape import scraped
from tests.support.secured_stack import SecuredStack, first_answer, rules
from tests.support.stubs import cursor_stub, dedup_stub
from tests.support.waiting import eventually

PATIENCE_S = 20.0


@pytest_asyncio.fixture(scope="module")
async def secured(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[SecuredStack]:
    """Two processes each of ledger and cursor; each counts its own denials."""
    async with SecuredStack(tmp_path_factory.mktemp("secured"), instances=2) as stack:
        yield stack


@pytest.fixture
def command(tmp_path: Path, nursery: Nursery, secured: SecuredStack) -> CommandLine:
    return CommandLine(nursery, {"HOME": str(tmp_path), "COLUMNS": "80", **secured.variables()})


def calls(names: Iterable[str]) -> list[tuple[str, Rpc]]:
    """All methods, with their services."""
    asked = []
    for rpc in rpcs():
        asked += [(where, rpc) for where in names if rpc.service == where]
    return asked


async def status(channel: aio.Channel, rpc: Rpc, request: Any) -> Any:
    """The code with which a call is refused; None if it is not."""
    try:
        await first_answer(channel, rpc, request, 5)
    except aio.AioRpcError as error:
        return error
    return None


async def test_every_method_is_denied_to_verbs_that_do_not_allow_it(
    secured: SecuredStack,
) -> None:
    denied = 0
    for service in SERVICES:
        for verb in VERBS:
            token = secured.issuer.token(verb)
            async with secured.channel(service, token=token) as channel:
                for _, rpc in calls([service]):
                    if verb in rpc.verbs:
                        continue
                    error = await status(channel, rpc, rpc.request())
                    assert error is not None, (rpc.name, verb)
                    details = check(
                        status_of_call(error), StatusCode.PERMISSION_DENIED, "PERMISSION_DENIED"
                    )
                    assert details["principal"] == f"sub:{verb}", (rpc.name, verb)
                    assert verb not in details["verb"].split("|"), (rpc.name, verb)
                    denied += 1
    assert denied > 150
    await nothing_is_there(secured)


async def test_every_method_is_denied_outside_the_topics_of_a_rule(
    secured: SecuredStack,
) -> None:
    for service in SERVICES:
        async with secured.channel(service, token=secured.issuer.token("all")) as channel:
            for _, rpc in calls([service]):
                if rpc.name in ("filter.Compile", "filter.Explain"):
                    continue  # methods without a topic
                error = await status(channel, rpc, rpc.request("acme/other/orders"))
                assert error is not None, rpc.name
                check(status_of_call(error), StatusCode.PERMISSION_DENIED, "PERMISSION_DENIED")
    await nothing_is_there(secured)


async def test_every_method_is_refused_without_valid_credentials(
    secured: SecuredStack,
) -> None:
    nameless = secured.authority.issue("nameless", cn="\x7f")
    for service in SERVICES:
        async with (
            secured.channel(service, token="not.a.token") as forged,
            secured.channel(service, nameless) as without_name,
        ):
            for _, rpc in calls([service]):
                error = await status(forged, rpc, rpc.request())
                assert error is not None, rpc.name
                check(status_of_call(error), StatusCode.UNAUTHENTICATED, "INVALID_TOKEN")
                error = await status(without_name, rpc, rpc.request())
                assert error is not None, rpc.name
                check(status_of_call(error), StatusCode.UNAUTHENTICATED, "MISSING_CREDENTIALS")
    await nothing_is_there(secured)


async def test_service_roles_do_not_grant_the_calls_of_others(secured: SecuredStack) -> None:
    for caller in ("ledger", "dedup", "cursor", "dispatcher", "filter"):
        for service in SERVICES:
            async with secured.channel(service, secured.shown[caller]) as channel:
                for _, rpc in calls([service]):
                    if caller in rpc.roles:
                        continue
                    error = await status(channel, rpc, rpc.request())
                    assert error is not None, (rpc.name, caller)
                    assert error.code() is StatusCode.PERMISSION_DENIED, (rpc.name, caller, error)
    await nothing_is_there(secured)


async def test_denials_are_counted_by_reason_and_method(secured: SecuredStack) -> None:
    """The logs name principal and right; the metrics have the counts, per process."""
    issuer = secured.issuer
    nameless = secured.authority.issue("unnamed", cn="\x7f")
    reasons: dict[str, Any] = {
        "PERMISSION_DENIED": {"token": issuer.token("nobody")},
        "MISSING_CREDENTIALS": {"shown": nameless},
        "INVALID_TOKEN": {"token": "not.a.token"},
        "TOKEN_EXPIRED": {"token": issuer.token("all", ends=timedelta(minutes=-5))},
        "TOKEN_NOT_YET_VALID": {"token": issuer.token("all", nbf=2**33)},
        "WRONG_AUDIENCE": {"token": issuer.token("all", aud="another")},
        "WRONG_ISSUER": {"token": issuer.token("all", iss="https://another")},
    }
    assert set(reasons) == set(told.DENIAL.values)
    # Without streams of requests: gRPC may lose how one ended, and the call is then repeated.
    asked = {
        "ledger": ("Read", "GetTopic"),
        "dedup": ("ListProducers",),
        "cursor": ("ListCursors",),
        "dispatcher": ("Report",),
        "filter": ("Explain",),
    }
    methods = {
        service: [rpc for _, rpc in calls([service]) if rpc.descriptor.name in names]
        for service, names in asked.items()
    }
    before = {each: await scraped(secured.told[each]) for each in secured.services}
    for service in SERVICES:
        for times, how in enumerate(reasons.values(), 1):
            async with secured.channel(service, **how) as channel:
                for rpc in methods[service] * times:
                    assert await status(channel, rpc, rpc.request()) is not None
    for service in SERVICES:
        after = await scraped(secured.told[service])
        grown = {
            (reason, rpc.descriptor.name): after.value(told.DENIALS, **labels)
            - before[service].value(told.DENIALS, **labels)
            for reason in reasons
            for rpc in methods[service]
            for labels in [{"reason": reason, "rpc_method": rpc.path.removeprefix("/")}]
        }
        assert grown == {
            (reason, name): times
            for times, reason in enumerate(reasons, 1)
            for name in asked[service]
        }
        total = after.value(told.DENIALS) - before[service].value(told.DENIALS)
        assert total == sum(grown.values())
        # A denied call is counted with its code.
        for code in ("PERMISSION_DENIED", "UNAUTHENTICATED"):
            labels = {"rpc_response_status_code": code}
            ended = after.value(told.SERVER_CALLS, **labels)
            ended -= before[service].value(told.SERVER_CALLS, **labels)
            is_unknown = code == "UNAUTHENTICATED"
            denied = [
                n for (why, _), n in grown.items() if (why != "PERMISSION_DENIED") is is_unknown
            ]
            assert ended == sum(denied)
    other = await scraped(secured.told["ledger-1"])
    assert other.value(told.DENIALS) == before["ledger-1"].value(told.DENIALS)


async def nothing_is_there(secured: SecuredStack) -> None:
    """Check that no service has state of TOPIC."""
    async with (
        secured.channel("ledger") as ledger,
        secured.channel("cursor", secured.shown["jobs"]) as cursor,
    ):
        ledgers: Any = LedgerServiceStub(ledger)
        cursors: Any = cursor_stub(cursor)
        asked = ledger_pb2.ListTopicsRequest(prefix="acme/shop/orders")
        assert not (await ledgers.ListTopics(asked, timeout=PATIENCE_S)).topics
        for topic in (TOPIC, "acme/other/orders"):
            found = await cursors.ListCursors(
                cursor_pb2.ListCursorsRequest(topic=topic), timeout=PATIENCE_S
            )
            assert not found.cursors


@pytest.mark.parametrize("kind", ["certificate", "token", "token_file"])
async def test_a_user_publishes_consumes_and_reads(
    secured: SecuredStack, tmp_path: Path, kind: str
) -> None:
    topic = f"acme/shop/round-{kind.replace('_', '-')}"
    token: Any = None
    if kind == "token":
        token = secured.issuer.token("all")
    elif kind == "token_file":
        token = tmp_path / "token"
        token.write_text(secured.issuer.token("all"))
    security = secured.security(token=token)
    async with connect(
        secured.target("ledger"), secured.address("dispatcher"), tls=security.tls, token=token
    ) as client:
        async with client.producer(topic, name="p") as producer:
            for number in range(20):
                await producer.send(b"%d" % number, key=f"k{number % 3}")
        async with client.consumer(topic, "billing") as consumer:
            seen = set()
            async with asyncio.timeout(PATIENCE_S):
                async for message in consumer:
                    seen.add(message.payload)
                    await consumer.ack(message)
                    if len(seen) == 20:
                        break
        read = [message.payload async for message in client.reader(topic, follow=False)]
    assert seen == set(read) == {b"%d" % number for number in range(20)}


async def test_services_may_make_the_calls_that_users_requests_need(secured: SecuredStack) -> None:
    topic, token = "acme/shop/served", secured.issuer.token("all")
    tls = secured.security().tls
    addresses = secured.target("ledger"), secured.address("dispatcher")
    async with (
        connect(*addresses, tls=tls, token=token) as client,
        FollowingChannel(
            secured.target("ledger"), lambda at: open_channel(at, Security(tls, token))
        ) as ledger_channel,
        secured.channel("dedup", token=token) as dedup_channel,
        secured.channel("dispatcher", token=token) as dispatcher_channel,
    ):
        ledger: Any = LedgerServiceStub(ledger_channel)
        dedup: Any = dedup_stub(dedup_channel)
        dispatcher: Any = DispatcherServiceStub(dispatcher_channel)
        async with client.producer(topic, name="p") as producer:
            for _ in range(3):
                await producer.send(b"poison")

        # Dedup keeps policies and snapshots in the cursor service.
        values = dedup_pb2.PolicyValues(snapshot_entries=1)
        level = dedup_pb2.SetPolicyRequest(namespace="acme/shop", values=values)
        await dedup.SetPolicy(level, timeout=PATIENCE_S)
        taken = await dedup.TakeSnapshot(
            dedup_pb2.TakeSnapshotRequest(topic=topic), timeout=PATIENCE_S
        )
        assert taken.producers == 1

        # The dispatcher calls filter, and stores dead letters in the ledger.
        start = common_pb2.Start(earliest=common_pb2.Earliest())
        named: dict[str, Any] = {"topic": topic, "subscription": "billing"}
        made = dispatcher_pb2.CreateSubscriptionRequest(**named, start=start)
        await dispatcher.CreateSubscription(made, timeout=PATIENCE_S)
        chain = [filter_pb2.Filter(name="f", version=1, expression="producer == 'p'")]
        asked = dispatcher_pb2.SetFiltersRequest(**named, filters=chain, start=start)
        changed = (await dispatcher.SetFilters(asked, timeout=PATIENCE_S)).filters.changes
        assert [each.caller for each in changed] == ["sub:all"]
        options = SubscriptionOptions(max_redeliveries=0)
        async with client.consumer(topic, "billing", options=options) as consumer:
            for _ in range(3):
                await consumer.nack(await consumer.receive(PATIENCE_S), 0)
            dead = ledger_pb2.GetTopicRequest(topic=f"{topic}-billing-DLQ")

            async def letters() -> bool:
                with suppress(aio.AioRpcError):  # it does not exist before its first dead letter
                    return bool((await ledger.GetTopic(dead, timeout=5)).topic.entries == 3)
                return False

            await eventually(letters)
            await consumer.flush()

        # The ledger asks cursor for cursors that limit a trim, and dedup to forget a topic.
        trim = ledger_pb2.TrimTopicRequest(topic=topic)
        trim.before.CopyFrom(common_pb2.Position(ledger_id=1, entry_id=3))
        await ledger.TrimTopic(trim, timeout=PATIENCE_S)
        await ledger.DeleteTopic(
            ledger_pb2.DeleteTopicRequest(topic=topic, force=True), timeout=PATIENCE_S
        )
        with pytest.raises(aio.AioRpcError):
            await ledger.GetTopic(ledger_pb2.GetTopicRequest(topic=topic), timeout=PATIENCE_S)
        state = await dedup.GetTopicStatus(
            dedup_pb2.GetTopicStatusRequest(topic=topic), timeout=PATIENCE_S
        )
        assert state.producers == 0


async def test_the_client_raises_denials(secured: SecuredStack) -> None:
    tls = secured.security().tls
    addresses = secured.target("ledger"), secured.address("dispatcher")
    async with connect(*addresses, tls=tls, token=secured.issuer.token("read")) as client:
        with pytest.raises(PermissionDeniedError) as denied:
            async with client.producer("acme/shop/mine"):
                pass
        assert denied.value.details == {
            "principal": "sub:read",
            "verb": "publish",
            "topic": "acme/shop/mine",
        }
        with pytest.raises(PermissionDeniedError) as denied:
            async with client.consumer("acme/shop/mine", "billing"):
                pass
        assert denied.value.details["subscription"] == "billing"
    async with connect(*addresses, tls=tls, token="a.b.c") as client:
        with pytest.raises(AuthenticationError) as unknown:
            async with client.producer("acme/shop/mine"):
                pass
        assert unknown.value.reason == "INVALID_TOKEN"


async def test_a_publisher_is_cut_off_when_the_rules_change(secured: SecuredStack) -> None:
    tls = secured.security().tls
    token = secured.issuer.token("publish")
    async with (
        connect(secured.target("ledger"), tls=tls, token=token) as client,
        client.producer("acme/shop/cut", name="p", send_timeout_s=30) as producer,
    ):
        await producer.send(b"before")
        try:
            secured.access_file.write_text(rules().replace('"sub:publish"', '"sub:nobody"'))

            async def is_cut_off() -> bool:
                try:
                    await producer.send(b"after")
                except PermissionDeniedError:
                    return True
                return False

            await eventually(is_cut_off)
        finally:
            secured.access_file.write_text(rules())


async def test_a_job_authenticates_with_a_certificate_or_a_token(
    secured: SecuredStack, tmp_path: Path
) -> None:
    asked = ledger_pb2.ListTopicsRequest(prefix="acme/shop/")
    file = tmp_path / "token"

    def code(shown: Files, token_file: Path | None) -> StatusCode:
        tls = secured.security(shown).tls
        address = secured.address("ledger")
        with open_blocking_channel(address, tls=tls, token_file=token_file, options=()) as opened:
            try:
                LedgerServiceStub(opened).ListTopics(asked, timeout=PATIENCE_S)
            except grpc.RpcError as error:
                return StatusCode(error.code().value)
        return StatusCode.OK

    jobs, nobody = secured.shown["jobs"], secured.authority.issue("nobody")
    assert await asyncio.to_thread(code, jobs, None) is StatusCode.OK
    assert await asyncio.to_thread(code, nobody, None) is StatusCode.PERMISSION_DENIED
    file.write_text(secured.issuer.token("read"))
    assert await asyncio.to_thread(code, nobody, file) is StatusCode.OK
    file.write_text(secured.issuer.token("nobody"))
    assert await asyncio.to_thread(code, jobs, file) is StatusCode.PERMISSION_DENIED


async def test_the_command_line_uses_the_given_credentials(
    secured: SecuredStack, command: CommandLine, tmp_path: Path
) -> None:
    file = tmp_path / "token"
    file.write_text(secured.issuer.token("read"))
    topic = "acme/shop/commands"

    tls = secured.security().tls
    async with (
        connect(secured.target("ledger"), tls=tls) as client,
        client.producer(topic) as producer,
    ):
        await producer.send(b"1")

    shown = await command("topic", "show", topic, "-o", "json")
    assert shown.code == 0, shown.err
    with_token = ("--token-file", str(file), "-o", "json")
    denied = await command("publish", topic, *with_token, stdin=b"hello\n")
    assert denied.code == 1, denied.err
    assert denied.error["reason"] == "PERMISSION_DENIED"
    assert denied.error["details"]["principal"] == "sub:read"
    by_variable = command.with_(SEQGATE_TOKEN="a.b.c")
    assert (await by_variable("topic", "show", topic, "-o", "json")).error["reason"] == (
        "INVALID_TOKEN"
    )
    missing = await command("topic", "ls", "--ca-file", str(tmp_path / "none.pem"), "-o", "json")
    assert missing.code == 2
    assert missing.error["reason"] == "INVALID_SETTINGS"


async def test_services_continue_when_their_certificates_are_renewed(secured: SecuredStack) -> None:
    security = secured.security()
    async with connect(
        secured.target("ledger"), secured.address("dispatcher"), tls=security.tls
    ) as client:
        async with (
            client.producer("acme/shop/renewed", name="p") as producer,
            client.producer("acme/shop/renewed", name="q") as other,
        ):
            await producer.send(b"1")
            for name in SERVICES:
                secured.shown[name] = secured.authority.issue(
                    name,
                    uris=[f"spiffe://example/seqgate/{name}"],
                    hosts=["localhost", "127.0.0.1"],
                )
            await producer.send(b"2")
            await other.send(b"3")
        read = [m.payload async for m in client.reader("acme/shop/renewed", follow=False)]
    assert sorted(read) == [b"1", b"2", b"3"]
    for name in SERVICES:
        log = (secured.folder / "logs" / f"{name}.log").read_text()
        assert "unexpected" not in log
        assert "rejected, keeping" not in log

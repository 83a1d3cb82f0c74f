"""Data that must never reach the services' logs, and the volume of logs in a storm of refusals."""

import asyncio
import base64
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from grpc import StatusCode
from grpc.aio import AioRpcError
from redis.asyncio import Redis

from seqgate.api.dedup.v1 import dedup_pb2
from seqgate.api.dispatcher.v1 import dispatcher_pb2
from seqgate.api.filter.v1 import filter_pb2
from seqgate.api.ledger.v1 import ledger_pb2 as pb
from seqgate.client import Chunking, SubscriptionOptions, connect
from seqgate.dev.ports import free_ports
from seqgate.dev.stack import SERVICES, Stack
from seqgate.errors import SeqgateError
from seqgate.services.dedup.adapters.keys import topic_key
from seqgate.types import TopicName
from tests.integration.refusals import refused
from tests.integration.services import Services, connected, log_lines, not_serving
from tests.support.publisher import publishing, single
from tests.support.waiting import eventually

MARK = "s3cretMARK"
BASE64 = base64.b64encode(MARK.encode()).decode()

STORM = 200


@pytest.fixture
async def talkative(tmp_path: Path) -> AsyncIterator[Services]:
    """A stack that logs everything, with a password for Redis (which accepts any)."""
    (port,) = free_ports(1)
    environment = {f"SEQGATE_{each.upper()}_LOG_LEVEL": "debug" for each in SERVICES} | {
        "SEQGATE_DEDUP_REDIS_URL": f"redis://default:{MARK}@127.0.0.1:{port}/0",
        "SEQGATE_DEDUP_REDIS_TIMEOUT_S": "0.3",
        "GRPC_VERBOSITY": "",
    }
    stack = Stack(tmp_path, environment=environment, ports={"redis": port})
    with pytest.raises(AssertionError):  # for the error that the test provokes
        async with stack, connected(stack) as services:
            yield services


async def publish_marked(services: Services, topic: str) -> None:
    """Publish messages of every kind: small, refused and large."""
    wrong = single(2, 1, MARK.encode(), partition_key=MARK, payload_crc32c=1)
    async with publishing(services.ledger, topic, "p") as publisher:
        await publisher.send(
            single(1, 0, MARK.encode(), partition_key=MARK, properties={"region": MARK}), wrong
        )
        assert (await publisher.receipt(1)).status == pb.RECEIPT_STATUS_STORED
        assert (await publisher.receipt(2)).status == pb.RECEIPT_STATUS_REFUSED
    async with (
        connect(services.stack.address("ledger"), token=MARK) as client,
        client.producer(topic, name="large", chunking=Chunking(4)) as producer,
    ):
        await producer.send(MARK.encode(), key=MARK, properties={"region": MARK})


async def consume_marked(services: Services, topic: str) -> None:
    """Acknowledge and dead-letter messages, call ReleaseKey and Explain, and set a filter that
    fails."""
    stack = services.stack
    options = SubscriptionOptions(max_redeliveries=1)
    async with (
        connect(stack.address("ledger"), stack.address("dispatcher"), token=MARK) as client,
        client.consumer(topic, "s", options=options, properties={"mine": MARK}) as consumer,
    ):
        for _ in range(2):
            message = await anext(aiter(consumer))
            await consumer.nack(message)
        await consumer.ack(await anext(aiter(consumer)))
    names: dict[str, Any] = {"topic": topic, "subscription": "s"}
    with refused(StatusCode.NOT_FOUND, "KEY_NOT_HELD"):
        await services.dispatcher.ReleaseKey(
            dispatcher_pb2.ReleaseKeyRequest(key=MARK.encode(), **names)
        )
    await services.dispatcher.Explain(dispatcher_pb2.ExplainRequest(key=MARK.encode(), **names))
    await services.dispatcher.UpdateSubscriptionProperties(
        dispatcher_pb2.UpdateSubscriptionPropertiesRequest(put={"mine": MARK}, **names)
    )
    failing = filter_pb2.Filter(name="f", version=1, expression="int(properties.region) > 0")
    await services.dispatcher.SetFilters(
        dispatcher_pb2.SetFiltersRequest(filters=[failing], **names)
    )
    await publish_marked(services, f"{topic}-2")
    async with connect(stack.address("ledger"), stack.address("dispatcher")) as client:
        async with client.producer(topic, name="again") as producer:
            await producer.send(MARK.encode(), key=MARK, properties={"region": MARK})
        async with client.consumer(topic, "s", options=options):

            async def fails() -> bool:
                report = await services.dispatcher.Report(dispatcher_pb2.ReportRequest(**names))
                return bool(report.filter_failed_entries)

            await eventually(fails)


async def test_log_lines_have_no_payload_key_property_or_secret(
    talkative: Services,
) -> None:
    services, stack, topic = talkative, talkative.stack, "public/default/marked"
    await publish_marked(services, topic)
    await consume_marked(services, topic)
    broken = dedup_pb2.GetProducerRequest(topic="a/b/c", producer_name="p")
    async with Redis.from_url(stack.redis_url) as redis:
        await redis.set(topic_key(TopicName.parse("a/b/c")), MARK)
    with refused(StatusCode.INTERNAL, "INTERNAL"):
        await services.dedup.GetProducer(broken)
    await stack.kill("redis")
    await not_serving(stack.address("dedup"))
    with pytest.raises(SeqgateError):
        async with (
            connect(stack.address("ledger")) as client,
            client.producer(topic, name="late", open_timeout_s=1) as producer,
        ):
            await producer.send(MARK.encode(), key=MARK)
    await stack.run("redis")
    for service in reversed(SERVICES):
        await stack.terminate(service)
    seen = set()
    for service in SERVICES:
        text = (stack.folder / "logs" / f"{service}.log").read_text()
        assert MARK not in text, next(line for line in text.splitlines() if MARK in line)
        assert BASE64 not in text
        seen |= {line["event"] for line in log_lines(stack, service)}
    assert {"call", "refused", "unexpected", "dead-lettered", "draining", "stopped"} <= seen
    assert {"topic taken", "subscription taken", "subscription released"} <= seen


async def test_a_storm_of_refusals_is_sampled_in_the_log(stoppable: Services, topic: str) -> None:
    """On services that refuse little else: a class that was told lately is not told again."""

    def told(method: str) -> list[object]:
        lines = stoppable.log("ledger")
        return [each for each in lines if each.get("method", "").endswith(method)]

    before = len(told("/FindMessage"))
    request = pb.FindMessageRequest(topic=topic, producer_name="", sequence_id=1)
    with refused(StatusCode.NOT_FOUND, "TOPIC_NOT_FOUND"):
        await stoppable.ledger.FindMessage(
            pb.FindMessageRequest(topic=topic, producer_name="p", sequence_id=1)
        )
    answers = await asyncio.gather(
        *(stoppable.ledger.FindMessage(request) for _ in range(STORM)), return_exceptions=True
    )
    codes = {each.code() for each in answers if isinstance(each, AioRpcError)}
    assert (len(answers), codes) == (STORM, {StatusCode.INVALID_ARGUMENT})
    await eventually(lambda: len(told("/FindMessage")) > before)
    assert len(told("/FindMessage")) <= before + 2

    publications = [single(each, each, b"x", payload_crc32c=1) for each in range(1, STORM)]
    before = len(told("/Publish"))
    async with publishing(stoppable.ledger, topic, "p") as publisher:
        await publisher.send(*publications)
        for each in publications:
            receipt = await publisher.receipt(each.request_id)
            assert receipt.status == pb.RECEIPT_STATUS_REFUSED
    found = told("/Publish")
    assert len(found) <= before + 1
    assert any(each["reason"] == "CHECKSUM_MISMATCH" for each in found)  # type: ignore[index]

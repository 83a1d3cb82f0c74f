"""The log, the receipts and the deduplication state are held against the data set."""

from collections.abc import AsyncIterator, Mapping, Sequence
from itertools import chain
from pathlib import Path

from grpc import StatusCode, aio

from seqgate.api.dedup.v1 import dedup_pb2, dedup_pb2_grpc
from seqgate.api.ledger.v1 import ledger_pb2, ledger_pb2_grpc
from seqgate.client import connect
from tools.demo.airline import TOPIC
from tools.demo.chunk_proof import ChunkProof, LargeFindings
from tools.demo.flights import Flight
from tools.demo.journal import acknowledged
from tools.demo.line import Standing
from tools.demo.proof import Findings, Proof
from tools.demo.screen import Screen
from tools.demo.weather import Weather
from tools.stack.stack import Stack


async def prove(
    stack: Stack,
    carriers: Mapping[str, Sequence[Flight]],
    airports: Mapping[str, Sequence[Weather]],
    folder: Path,
    crashes: Sequence[Sequence[Standing]],
    screen: Screen,
) -> tuple[Findings, LargeFindings]:
    """Collect all evidence, and judge it. Journals are in `folder`."""
    flights, weather = list(chain(*carriers.values())), list(chain(*airports.values()))
    of_flights, of_weather, of_chunks = Proof(flights), Proof(weather), ChunkProof()
    step = screen.step("proving", len(flights) + len(weather))
    seen = 0
    async with (
        connect(stack.address("ledger")) as client,
        client.reader(TOPIC, follow=False, on_dropped=of_chunks.see_dropped) as reader,
    ):
        async for message in reader:
            if message.producer_name in airports:
                of_weather.see_message(message)
                of_chunks.see_message(message)
            else:
                of_flights.see_message(message)
            seen += 1
            if seen % 1_000 == 0:
                step(seen)
    step(seen)
    async for stored in _entries(stack):
        of_chunks.see_entry(stored)
    for standing in crashes:
        of_chunks.see_crash(standing)
    for proof, producers in ((of_flights, carriers), (of_weather, airports)):
        for name in producers:
            for receipt in acknowledged(folder, name):
                proof.see_receipt(name, receipt.sequence_id, receipt.message_id)
            proof.see_mark(name, await _persisted(stack, name))
    return of_flights.findings(), of_chunks.findings(of_weather.findings(), len(weather))


async def _entries(stack: Stack) -> AsyncIterator[ledger_pb2.StoredEntry]:
    """The log, entry by entry, without payloads."""
    async with aio.insecure_channel(stack.address("ledger")) as channel:
        stub = ledger_pb2_grpc.LedgerServiceStub(channel)
        request = ledger_pb2.ReadRequest(topic=TOPIC, metadata_only=True)
        request.earliest.SetInParent()
        async for response in stub.Read(request):
            for stored in response.entries.entries:
                yield stored


async def batches_cut(stack: Stack) -> int:
    """How many batches overlapped what was stored, since Redis last lost its state."""
    async with aio.insecure_channel(stack.address("dedup")) as channel:
        stub = dedup_pb2_grpc.DedupServiceStub(channel)
        request = dedup_pb2.GetTopicStatusRequest(topic=TOPIC)
        return int((await stub.GetTopicStatus(request, timeout=10)).counts.partial_claims)


async def _persisted(stack: Stack, producer_name: str) -> int | None:
    """The last id that deduplication knows to be stored."""
    async with aio.insecure_channel(stack.address("dedup")) as channel:
        stub = dedup_pb2_grpc.DedupServiceStub(channel)
        request = dedup_pb2.GetProducerRequest(topic=TOPIC, producer_name=producer_name)
        try:
            producer = (await stub.GetProducer(request, timeout=10)).producer
        except aio.AioRpcError as error:
            if error.code() is StatusCode.NOT_FOUND:
                return None
            raise
        return int(producer.persisted_sequence_id)

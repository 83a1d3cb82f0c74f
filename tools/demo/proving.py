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
from tools.demo.proof import Findings, Original, Proof
from tools.demo.screen import Screen, Step
from tools.demo.weather import Weather
from tools.stack.stack import Stack

Carriers = Mapping[str, list[Flight]]
Airports = Mapping[str, list[Weather]]


class Proving:
    """Collects what was published, and judges it."""

    def __init__(
        self, stack: Stack, carriers: Carriers, airports: Airports, producers: Path
    ) -> None:
        self._stack = stack
        self._carriers = carriers
        self._airports = airports
        self._producers = producers
        self._flights = Proof(chain.from_iterable(carriers.values()))
        self._weather = Proof(chain.from_iterable(airports.values()))
        self._chunks = ChunkProof()

    async def run(
        self, screen: Screen, crashes: list[list[Standing]]
    ) -> tuple[Findings, LargeFindings]:
        """Collect all evidence, and judge it."""
        sent = sum(len(own) for own in self._airports.values())
        flights = sum(len(own) for own in self._carriers.values())
        await self._read(screen.step("proving", flights + sent))
        async for stored in _entries(self._stack):
            self._chunks.see_entry(stored)
        for standing in crashes:
            self._chunks.see_crash(standing)
        await self._see_producers(self._flights, self._carriers)
        await self._see_producers(self._weather, self._airports)
        return self._flights.findings(), self._chunks.findings(self._weather.findings(), sent)

    async def _read(self, step: Step) -> None:
        """Read the topic as any application does."""
        seen = 0
        async with (
            connect(self._stack.address("ledger")) as client,
            client.reader(TOPIC, follow=False, on_dropped=self._chunks.see_dropped) as reader,
        ):
            async for message in reader:
                if message.producer_name in self._airports:
                    self._weather.see_message(message)
                    self._chunks.see_message(message)
                else:
                    self._flights.see_message(message)
                seen += 1
                if seen % 1_000 == 0:
                    step.at(seen)
        step.at(seen)

    async def _see_producers(
        self, proof: Proof, producers: Mapping[str, Sequence[Original]]
    ) -> None:
        for name in producers:
            for receipt in acknowledged(self._producers, name):
                proof.see_receipt(name, receipt.sequence_id, receipt.message_id)
            proof.see_mark(name, await _persisted(self._stack, name))


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
    """How many batches overlapped what was stored, as far as Redis remembers."""
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

"""Deliveries and acknowledgements, each by itself, whichever form they have on the wire."""

from collections.abc import Iterable, Iterator, Sequence

from seqgate.api.dispatcher.v1 import dispatcher_pb2 as pb
from seqgate.api.ledger.v1 import ledger_pb2


def each_delivery(deliveries: pb.Deliveries) -> Iterator[pb.Delivery]:
    yield from deliveries.deliveries
    for run in deliveries.runs:
        for number, entry in enumerate(run.entries, run.first):
            yield pb.Delivery(
                delivery=number,
                position=entry.position,
                metadata=entry.metadata,
                payload=entry.payload,
                append_time=entry.append_time,
                aborts=entry.aborts,
            )


def in_runs(deliveries: Iterable[pb.Delivery]) -> Iterator[pb.Deliveries]:
    """The same deliveries, in runs where they can be; the others in the plain form."""
    for each in deliveries:
        if each.attempts or each.acknowledged or each.HasField("gap"):
            yield pb.Deliveries(deliveries=[each])
            continue
        entry = ledger_pb2.StoredEntry(
            position=each.position,
            metadata=each.metadata,
            payload=each.payload,
            append_time=each.append_time,
            payload_bytes=len(each.payload),
            aborts=each.aborts,
        )
        yield pb.Deliveries(runs=[pb.DeliveryRun(first=each.delivery, entries=[entry])])


def each_settlement(acknowledge: pb.Acknowledge) -> Sequence[pb.Settlement]:
    runs = (range(run.first, run.first + run.count) for run in acknowledge.runs)
    whole = [pb.Settlement(delivery=number) for numbers in runs for number in numbers]
    return [*acknowledge.settlements, *whole]

"""The client of Seqgate for threads: for Flask, Django, Celery and scripts.

    with blocking.connect("localhost:7702", dispatcher="localhost:7704") as client:
        with client.producer("orders", name="checkout") as producer:
            receipt = producer.send(b"2 apples", key="customer-17")
        with client.consumer("orders", "billing") as consumer:
            message = consumer.receive(timeout_s=10)
            consumer.ack(message)

It is the asyncio client, `seqgate.client`, in a thread of its own: the same names, arguments and
errors, with methods that block. Threads may share a client and all that it makes. Options and
values, such as `Batching` and `Message`, are in `seqgate.client`.

A client belongs to the process that made it. In a process forked since, each use raises
ClientForkedError: see docs/guides/blocking.md.
"""

from seqgate.client.blocking._admin import Admin
from seqgate.client.blocking._client import Client, connect
from seqgate.client.blocking._consumer import Consumer
from seqgate.client.blocking._producer import Producer
from seqgate.client.blocking._reader import Reader

__all__ = ["connect", "Client", "Producer", "Reader", "Consumer", "Admin"]

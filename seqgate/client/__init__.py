"""The client library of Seqgate, for asyncio.

connect() gives a Client; a Client makes Producers and Readers. Errors are in seqgate.errors.
"""

from seqgate.client._batcher import Batching
from seqgate.client._client import Client, connect
from seqgate.client._codec import Compression, Message
from seqgate.client._outbox import Receipt
from seqgate.client._producer import Producer
from seqgate.client._reader import EARLIEST, LATEST, Reader, Start
from seqgate.types import MessageId

__all__ = [
    "connect",
    "Client",
    "Producer",
    "Batching",
    "Compression",
    "Receipt",
    "Reader",
    "Start",
    "EARLIEST",
    "LATEST",
    "Message",
    "MessageId",
]

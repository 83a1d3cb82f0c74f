"""The client library of Seqgate, for asyncio.

connect() gives a Client; a Client makes Producers and Readers. Errors are in seqgate.errors.
"""

from seqgate.client._assembler import AssemblyLimits, Dropped, DropReason
from seqgate.client._batcher import Batching
from seqgate.client._chunking import Chunking
from seqgate.client._client import Client, connect
from seqgate.client._codec import Compression, Message
from seqgate.client._outbox import Receipt
from seqgate.client._producer import Producer
from seqgate.client._reader import EARLIEST, LATEST, Reader, Start
from seqgate.message_id import ChunkMessageId, MessageId

__all__ = [
    "connect",
    "Client",
    "Producer",
    "Batching",
    "Chunking",
    "Compression",
    "Receipt",
    "Reader",
    "Start",
    "AssemblyLimits",
    "Dropped",
    "DropReason",
    "EARLIEST",
    "LATEST",
    "Message",
    "MessageId",
    "ChunkMessageId",
]

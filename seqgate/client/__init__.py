"""The asyncio client of Seqgate.

`connect` returns a Client, which makes Producers, Readers, Consumers and an Admin. Errors are in
`seqgate.errors`. `seqgate.client.blocking` is the client for threads.
"""

from seqgate.client._admin import Admin
from seqgate.client._assembler import AssemblyLimits, Dropped, DropReason
from seqgate.client._batcher import Batching
from seqgate.client._breaker import Breaker, BreakerState
from seqgate.client._by_key import process_by_key
from seqgate.client._chunking import Chunking
from seqgate.client._client import Client, connect
from seqgate.client._codec import Compression
from seqgate.client._consumer import Consumer
from seqgate.client._cursors import CursorInfo
from seqgate.client._deduplication import DeduplicationInfo, PolicyValues, Verdict
from seqgate.client._letters import (
    DeadLetter,
    DeadLetterLife,
    Discard,
    FailedDelivery,
    LetterMend,
    LetterOperation,
    Mend,
)
from seqgate.client._life import MessageEvent, MessageLife, SubscriptionLife
from seqgate.client._message import Gap, Message, Received, Token
from seqgate.client._outbox import Receipt
from seqgate.client._producer import OnConflict, Outgoing, Producer, SendManyError
from seqgate.client._reader import EARLIEST, LATEST, Missed, Reader, Start
from seqgate.client._redrives import Estimated, Redrive, RedriveEstimate, RedriveInfo
from seqgate.client._subscribing import (
    AfterDeadLetter,
    Incomplete,
    Placement,
    RetryPolicy,
    SubscriptionOptions,
    SubscriptionType,
)
from seqgate.client._subscriptions import Reason, SubscriptionInfo
from seqgate.client._topics import TopicInfo, Trimmed
from seqgate.message_id import ChunkMessageId, MessageId
from seqgate.tls import TLS

__all__ = [
    "connect",
    "Client",
    "TLS",
    "Producer",
    "Outgoing",
    "SendManyError",
    "OnConflict",
    "Batching",
    "Chunking",
    "Compression",
    "Receipt",
    "Reader",
    "Start",
    "Missed",
    "Consumer",
    "Received",
    "Token",
    "Gap",
    "SubscriptionType",
    "SubscriptionOptions",
    "Placement",
    "AfterDeadLetter",
    "RetryPolicy",
    "Breaker",
    "BreakerState",
    "Incomplete",
    "process_by_key",
    "Admin",
    "TopicInfo",
    "Trimmed",
    "PolicyValues",
    "DeduplicationInfo",
    "Verdict",
    "SubscriptionInfo",
    "Reason",
    "DeadLetter",
    "FailedDelivery",
    "Redrive",
    "MessageLife",
    "SubscriptionLife",
    "MessageEvent",
    "RedriveInfo",
    "RedriveEstimate",
    "Estimated",
    "DeadLetterLife",
    "LetterMend",
    "Mend",
    "Discard",
    "LetterOperation",
    "CursorInfo",
    "AssemblyLimits",
    "Dropped",
    "DropReason",
    "EARLIEST",
    "LATEST",
    "Message",
    "MessageId",
    "ChunkMessageId",
]

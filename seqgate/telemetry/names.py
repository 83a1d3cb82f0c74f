"""The names of spans, metrics and their attributes.

They follow OpenTelemetry's RPC and messaging conventions, as of semantic-conventions 1.44 (RPC:
release candidate; messaging: development), with Seqgate's own names under `seqgate.`. The packages
of conventions are all betas, so this module uses none; a test compares it with one.
"""

from typing import Final

# ---- RPC

RPC_SYSTEM_NAME: Final = "rpc.system.name"
RPC_METHOD: Final = "rpc.method"
RPC_RESPONSE_STATUS_CODE: Final = "rpc.response.status_code"
ERROR_TYPE: Final = "error.type"
SERVER_ADDRESS: Final = "server.address"
SERVER_PORT: Final = "server.port"
GRPC: Final = "grpc"

RPC_SERVER_CALL_DURATION: Final = "rpc.server.call.duration"
RPC_CLIENT_CALL_DURATION: Final = "rpc.client.call.duration"

PROCESS_EXIT_CODE: Final = "process.exit.code"

# ---- messaging

MESSAGING_SYSTEM: Final = "messaging.system"
MESSAGING_OPERATION_NAME: Final = "messaging.operation.name"
MESSAGING_OPERATION_TYPE: Final = "messaging.operation.type"
MESSAGING_DESTINATION_NAME: Final = "messaging.destination.name"
MESSAGING_DESTINATION_SUBSCRIPTION_NAME: Final = "messaging.destination.subscription.name"
MESSAGING_BATCH_MESSAGE_COUNT: Final = "messaging.batch.message_count"
MESSAGING_MESSAGE_ID: Final = "messaging.message.id"
MESSAGING_MESSAGE_BODY_SIZE: Final = "messaging.message.body.size"
MESSAGING_CLIENT_ID: Final = "messaging.client.id"
SEQGATE: Final = "seqgate"
"""The value of messaging.system. The conventions allow custom values; "pulsar" would be wrong."""

# The values of messaging.operation.type.
CREATE: Final = "create"
SEND: Final = "send"
RECEIVE: Final = "receive"
PROCESS: Final = "process"
SETTLE: Final = "settle"

# Settlements: values of messaging.operation.name.
ACK: Final = "ack"
NACK: Final = "nack"

# Services' operations on messages: values of messaging.operation.name.
PUBLISH: Final = "publish"
ADMIT: Final = "admit"
APPEND: Final = "append"
LOOK_UP: Final = "look_up"
CONFIRM: Final = "confirm"
READ: Final = "read"
DELIVER: Final = "deliver"
EVALUATE: Final = "evaluate"
PERSIST: Final = "persist"
DEAD_LETTER: Final = "dead_letter"

# Services' operations on topics: the first words of span names.
RECOVER: Final = "recover"
REPLAY: Final = "replay"
SNAPSHOT: Final = "snapshot"

# ---- database calls

DB_SYSTEM_NAME: Final = "db.system.name"
DB_OPERATION_NAME: Final = "db.operation.name"
REDIS: Final = "redis"
SQLITE: Final = "sqlite"
POSTGRESQL: Final = "postgresql"
COMMIT: Final = "COMMIT"
"""A write to SQLite, including the wait for its group commit."""
SELECT: Final = "SELECT"
"""A read from SQLite, including the wait for a reader."""

# ---- Seqgate's own

PRODUCER_NAME: Final = "seqgate.producer.name"
SEQUENCE_ID: Final = "seqgate.sequence_id"
CHUNK: Final = "chunk"
"""The event of a large message's span when one of its chunks is stored."""
CHUNK_ID: Final = "seqgate.chunk.id"
REASON: Final = "seqgate.reason"
"""The reason of a refusal, from the error catalogue."""
VERDICTS: Final = "seqgate.verdicts."
"""The prefix of a count of a group's verdicts: the verdict follows, in lower case."""
EVALUATED: Final = "seqgate.evaluated"
"""The number of distinct entries for which a filter was evaluated."""
REMEMBERED: Final = "seqgate.remembered"
"""The number of distinct entries whose verdict was cached."""
RECEIPT: Final = "seqgate.receipt"
OUTCOME: Final = "seqgate.outcome"
"""The answer to a group, if it is not verdicts."""
CAUSE: Final = "seqgate.cause"
"""Why the process began work of its own."""
ENTRIES: Final = "seqgate.entries"
PRODUCERS: Final = "seqgate.producers"
TOPIC: Final = "seqgate.topic"
"""The topic, if the span follows no message of it."""
STALE: Final = "seqgate.stale"
"""The number of entries whose delivery was stale."""
TOPICS: Final = "seqgate.topics"
PARTITIONS: Final = "seqgate.partitions"
GROUP_ENTRIES: Final = "seqgate.group.entries"
DEAD_LETTER_TOPIC: Final = "seqgate.dead_letter.topic"
"""The topic to which a message goes that failed too often."""
ATTEMPTS: Final = "seqgate.attempts"
"""The number of earlier failed deliveries of the message."""

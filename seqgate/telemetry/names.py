"""What spans, metrics and their attributes are called.

The RPC and messaging conventions of OpenTelemetry as of semantic-conventions 1.44 (RPC: release
candidate; messaging: development), and Seqgate's own names below `seqgate.`. A convention that
changes changes here. This module needs no package of conventions, which are all betas; a test
compares it with one.
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
"""The value of messaging.system. The conventions allow one of one's own, and to say "pulsar" would
not be true."""

# The values of messaging.operation.type.
CREATE: Final = "create"
SEND: Final = "send"
RECEIVE: Final = "receive"
PROCESS: Final = "process"
SETTLE: Final = "settle"

# What settles: values of messaging.operation.name.
ACK: Final = "ack"
NACK: Final = "nack"

# What services do with messages: values of messaging.operation.name.
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

# What they do for topics, of no message: the first words of spans' names.
RECOVER: Final = "recover"
REPLAY: Final = "replay"
SNAPSHOT: Final = "snapshot"

# ---- database calls

DB_SYSTEM_NAME: Final = "db.system.name"
DB_OPERATION_NAME: Final = "db.operation.name"
REDIS: Final = "redis"
SQLITE: Final = "sqlite"
COMMIT: Final = "COMMIT"
"""A write to SQLite, and the wait for the group that is made durable with it."""
SELECT: Final = "SELECT"
"""A read from SQLite, and the wait for a reader."""

# ---- Seqgate's own

PRODUCER_NAME: Final = "seqgate.producer.name"
SEQUENCE_ID: Final = "seqgate.sequence_id"
CHUNK: Final = "chunk"
"""The event of a large message's span: one of its chunks is stored."""
CHUNK_ID: Final = "seqgate.chunk.id"
REASON: Final = "seqgate.reason"
"""Why a service refused: the reason of the error catalogue."""
VERDICTS: Final = "seqgate.verdicts."
"""How many of a group were judged so: the verdict, in lower case, follows."""
EVALUATED: Final = "seqgate.evaluated"
"""Of how many different entries a filter had to be evaluated."""
REMEMBERED: Final = "seqgate.remembered"
"""Of how many different entries the verdict was remembered."""
RECEIPT: Final = "seqgate.receipt"
"""The status that a publication was answered with."""
OUTCOME: Final = "seqgate.outcome"
"""What a group was answered with, where that is no verdicts."""
CAUSE: Final = "seqgate.cause"
"""Why something was begun that nobody asked for."""
ENTRIES: Final = "seqgate.entries"
"""How many entries it is about."""
PRODUCERS: Final = "seqgate.producers"
"""How many producers it is about."""
TOPIC: Final = "seqgate.topic"
"""Which topic, where no message of it is followed."""
STALE: Final = "seqgate.stale"
"""Of how many of them the delivery counted no more."""
TOPICS: Final = "seqgate.topics"
"""How many topics it is about."""
PARTITIONS: Final = "seqgate.partitions"
"""Into how many partitions Spark's work is cut."""
GROUP_ENTRIES: Final = "seqgate.group.entries"
"""How many entries were stored together."""
DEAD_LETTER_TOPIC: Final = "seqgate.dead_letter.topic"
"""Where a message goes that failed too often."""
ATTEMPTS: Final = "seqgate.attempts"
"""How often deliveries of the message failed before."""

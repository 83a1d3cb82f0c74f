"""The log as a Spark data source, and as a sink that is exactly once.

Reading gives messages, or entries without payloads:

    import seqgate.spark

    spark = seqgate.spark.local_session("example")
    seqgate.spark.register(spark)
    messages = (
        spark.read.format("seqgate")
        .option("ledger", "127.0.0.1:7702")
        .option("topics", "public/default/orders, public/metrics/*")
        .option("from", "2026-01-31T12:00:00Z")
        .schema("topic string, key string, payload binary")
        .load()
    )
    messages.groupBy("topic", "key").count().show()

A row is a message, in the order of the log within a task. Batches are opened, and a large message
is one row, at the place of its last chunk. Batches and large messages at the edge of a task's part
of the log are read once and whole.

    topic                string     tenant/namespace/name
    message_id           string     as `seqgate read` prints it, and `from` and `to` take it
    ledger_id, entry_id  bigint     its position; of a large message, its last chunk's
    batch_index          int        its index in its batch, from 0; null: not in a batch
    append_time          timestamp  when it was stored, by the ledger's clock
    publish_time         timestamp  when it was published, by the producer's clock
    event_time           timestamp  the application's own; null: none
    producer             string
    sequence_id          bigint
    key                  string     null: none; base64 if it was published as bytes
    has_bytes_key        boolean    whether it was
    ordering_key         binary     null: none
    properties           map<string, string>
    payload              binary     uncompressed
    gap                  string     with `trimmed` = report: see there. Otherwise null

Times are whole milliseconds; one after the year 9999 is null.

Spark does not pass the columns that a query needs to a Python data source, so name them in
`.schema(...)`: others are not read. Without `payload` the ledger sends no payloads, except, for
`key`, `has_bytes_key`, `ordering_key`, `properties` and `event_time`, those of batches, which have
these inside.

Options:

    ledger               HOST:PORT of the ledger service
    topics               names and patterns, separated by commas; * is any text, ? any character
    from, to             where each topic's messages start and end: earliest, latest, a message's id
                         (LEDGER:ENTRY, or as in `message_id`), or a time (ISO 8601; UTC without an
                         offset). An id is included; a time is that of the first message stored then
                         or later, which `to` excludes. Default: all that the logs have
    rows                 messages or entries: see below. Default: messages
    bytesPerPartition    the approximate size of a task's part of the logs, 1 to 2^40 bytes of
                         payload and metadata; default: 16 MiB. Small topics share a task
    entriesPerPartition  the most entries per task, 1 to 100,000,000; default: 1,000,000
    trimmed              fail: if messages from an id in `from` on were trimmed, or messages were
                         trimmed since the DataFrame was planned, it ends with MessagesTrimmedError.
                         skip: the remaining ones are read. report: they are, and a row whose `gap`
                         names the first and last trimmed entry stands for the others; only topic
                         and position are set besides, and the position is that of the last.
                         Default: fail
    timeout              how long the ledger may be silent or unreachable, 1 to 86,400 seconds;
                         default: 60
    traceparent, tracestate
                         the parent span of reading, if OTEL_* enable spans in the executors:
                         `seqgate.telemetry.inject` creates them

A DataFrame is planned when it is first used. Each use reads up to the ends that the logs had then.
`topics`, `from` and `to` bound the read; a `where` selects from its rows. A damaged message ends
the query with CorruptMessageError or DataLossError, one above 512 MiB with MessageTooLargeError;
each names the topic and the position, so that `to` and `from` can read what is around it.

`spark.readStream` takes the same options except `to` and `rows`, and

    from                 where the topics that exist start. Default: latest. An id is that of an
                         entry. Topics that appear later are read from their first message
    maxMessagesPerTrigger
                         the most messages of a trigger, 1 to 2^53; default: all there are. Topics
                         share them. A batch is not cut, so the last one of a topic may exceed it

A named topic need not exist yet. A query continues where its checkpoint says; an offset is the last
position read of each topic, as JSON. With `trimmed` = fail, a query ends with MessagesTrimmedError
if unread messages were trimmed, and with NotFoundError if a topic that it has read was deleted.

With `rows` = entries, a row is an entry: a message, a batch, one chunk of a large message, or a
marker. Entries are read as columns, a million a second, and never with payloads. Times are numbers,
in milliseconds since 1970 (UTC): `timestamp_millis(append_time)` converts them to timestamps.

    topic, ledger_id, entry_id, producer
                         as above
    append_time          bigint    when it was appended
    sequence_id          bigint    the lowest of a batch
    highest_sequence_id  bigint    the highest of a batch; otherwise the same
    num_messages         int       the number of messages in a batch; null: not a batch
    payload_bytes        bigint    as stored
    marker               boolean   a system's own entry
    chunk_uuid           string    the attempt at a large message; null: not a chunk
    chunk_id             int       the chunk's number, from 0
    num_chunks           int       the number of the message's chunks
    total_bytes          int       the size of all chunks together
    aborts               string    the attempt that this entry ends; null: none

The following columns are read only if they are named, because they cost the most: each entry's
metadata is read and decoded.

    publish_time         bigint    by the producer's clock
    event_time           bigint    the application's own; null: none, or it exceeds a bigint
    partition_key        string
    compression          string    NONE, LZ4, ZLIB or ZSTD
    properties           map<string, string>

Entries are divided by `entriesPerPartition` alone, and `trimmed` is fail or skip.

Writing stores each row once, whatever is killed and started again:

    (
        orders.write.format("seqgate")
        .option("ledger", "127.0.0.1:7702")
        .option("topic", "public/default/orders")
        .option("job", "orders-2026-11")
        .option("staging", "/mnt/shared/staging")
        .mode("append")
        .save()
    )

Columns, of which only `payload` is required:

    payload              binary or string, never null
    key                  string or binary
    ordering_key         binary
    properties           map<string, string>: at most 128; with the keys, at most 120 KiB
    event_time           bigint (milliseconds since 1970) or timestamp

Options:

    ledger, timeout      as above
    topic                tenant/namespace/name, or a name in public/default; it must deduplicate
    job                  an id of your choice: 1 to 200 letters, digits, _, - and full stops. The
                         rows' producer has this name. Write the same rows again under the same id;
                         other rows need another one
    staging              the absolute path of a folder that the driver and all executors reach under
                         this path, and whose disk survives them
    resume               true: if rows are staged under this id, send those, whichever rows the
                         DataFrame has now. Default: false, other rows fail with OtherRowsError

Tasks stage their rows as files, and the driver sends them once all are durable: the row's number is
its sequence id. Rows keep the order of the DataFrame, partition by partition. Invalid options and
columns fail with InvalidOptionError, invalid rows with InvalidRowError, and rows above the ledger's
limit with MessageTooLargeError, before anything is sent. StagingLostError: the topic has messages
of the job that the staging folder knows nothing of.

`writeStream` takes the same columns and options. A micro-batch is an epoch, numbered by its batch
id, and a sequence id is `epoch * 2**32 + number`: at most 2**32 rows per micro-batch, and 2**31
micro-batches. A batch write is epoch 0. Keep the checkpoint and the staging folder together.
"""

from seqgate.spark._java import JavaEndedError, JavaNotFoundError, local_session
from seqgate.spark._source import SeqgateDataSource, register

__all__ = ["JavaEndedError", "JavaNotFoundError", "SeqgateDataSource", "local_session", "register"]

"""The log as a Spark data source: producers, ids and times of all entries, without payloads.

    import seqgate.spark

    spark = seqgate.spark.local_session("example")
    seqgate.spark.register(spark)
    entries = (
        spark.read.format("seqgate")
        .option("ledger", "127.0.0.1:7702")
        .option("topics", "public/default/orders, public/metrics/*")
        .schema("topic string, producer string, highest_sequence_id bigint")
        .load()
    )
    entries.groupBy("topic", "producer").max("highest_sequence_id").show()

A row is an entry: a message, a batch, or one chunk of a large message. Times are numbers, in
milliseconds since 1970 (UTC): `timestamp_millis(append_time)` converts them to timestamps.

    topic                string    tenant/namespace/name
    ledger_id, entry_id  bigint    its position
    append_time          bigint    when it was appended
    producer             string
    sequence_id          bigint    the lowest of a batch
    highest_sequence_id  bigint    the highest of a batch; otherwise the same
    num_messages         int       the number of messages in a batch; null: not a batch
    payload_bytes        bigint
    marker               boolean   a system's own entry
    chunk_uuid           string    the attempt at a large message; null: not a chunk
    chunk_id             int       the chunk's number, from 0
    num_chunks           int       the number of the message's chunks
    total_bytes          int       the size of all chunks together
    aborts               string    the attempt that this entry ends; null: none

Spark does not pass the columns that a query needs to a Python data source, so name them in
`.schema(...)`: others are not read. The following columns are read only if they are named, because
they cost the most: each entry's metadata is read and decoded.

    publish_time         bigint    by the producer's clock
    event_time           bigint    the application's own; null: none, or it exceeds a bigint
    partition_key        string
    compression          string    NONE, LZ4, ZLIB or ZSTD
    properties           map<string, string>

Options:

    ledger               HOST:PORT of the ledger service
    topics               names and patterns, separated by commas; * is any text, ? any character
    entriesPerPartition  the most entries per task, 1 to 100,000,000; default: 1,000,000
    from, through        positions, LEDGER:ENTRY: the first and the last entry to read
    trimmed              fail: if entries from `from` on were trimmed, or entries were trimmed since
                         the DataFrame was planned, it ends with MessagesTrimmedError; skip: the
                         remaining entries are read. Default: fail
    timeout              how long the ledger may be silent or unreachable, 1 to 86,400 seconds;
                         default: 60
    traceparent, tracestate
                         the parent span of reading, if OTEL_* enable spans in the executors:
                         `seqgate.telemetry.inject` creates them

A DataFrame is planned when it is first used. Each use reads up to the ends that the logs had then.
`topics`, `from` and `through` bound the read; a `where` selects from its rows.
"""

from seqgate.spark._java import JavaEndedError, JavaNotFoundError, local_session
from seqgate.spark._source import SeqgateDataSource, register

__all__ = ["JavaEndedError", "JavaNotFoundError", "SeqgateDataSource", "local_session", "register"]

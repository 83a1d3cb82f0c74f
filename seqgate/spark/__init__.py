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
milliseconds since 1970 (UTC): `timestamp_millis(append_time)` makes timestamps of them.

    topic                string    tenant/namespace/name
    ledger_id, entry_id  bigint    its position
    append_time          bigint    when it was appended
    producer             string
    sequence_id          bigint    of a batch, the lowest
    highest_sequence_id  bigint    of a batch, the highest; else the same
    num_messages         int       how many the batch holds; null: it is no batch
    payload_bytes        bigint
    marker               boolean   a system's own entry
    chunk_uuid           string    the attempt at a large message; null: it is no chunk
    chunk_id             int       which chunk, from 0
    num_chunks           int       how many the message has
    total_bytes          int       the size of all of them together
    aborts               string    the attempt that this entry ends; null: none

Spark does not tell a Python data source which columns a query needs, so name them in
`.schema(...)`: other columns are not read. The following columns are read only if they are named,
because they cost the most: each entry's metadata is read and decoded.

    publish_time         bigint    by the producer's clock
    event_time           bigint    the application's own; null: none, or no bigint
    partition_key        string
    compression          string    NONE, LZ4, ZLIB or ZSTD
    properties           map<string, string>

Options:

    ledger               HOST:PORT of the ledger service
    topics               names and patterns, separated by commas; * is any text, ? any character
    entriesPerPartition  how many entries a task reads, 1 to 100,000,000; 1,000,000 unless given
    from, through        positions, LEDGER:ENTRY: only entries from the one and up to the other
    trimmed              fail: if entries from `from` on were trimmed, or entries were trimmed since
                         the DataFrame was planned, it ends with MessagesTrimmedError; skip: the
                         remaining entries are read. Default: fail
    timeout              how long the ledger may be silent or unreachable, 1 to 86,400 seconds;
                         default: 60
    traceparent, tracestate
                         the parent span of reading, if OTEL_* enable spans in the executors:
                         `seqgate.telemetry.inject` creates them

A DataFrame is planned when it is first used, and reads up to the ends of the logs at that time,
each time that it is used. `topics`, `from` and `through` bound the read; a `where` selects from it.
"""

from seqgate.spark._java import JavaEndedError, JavaNotFoundError, local_session
from seqgate.spark._source import SeqgateDataSource, register

__all__ = ["JavaEndedError", "JavaNotFoundError", "SeqgateDataSource", "local_session", "register"]

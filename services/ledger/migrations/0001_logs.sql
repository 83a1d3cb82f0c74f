-- usable from: 0.1.0
-- Logs by topic. The columns are those of SQLite's tables (adapters/sqlite.py). Names compare by
-- bytes. An append updates its topic's row, which has room for that in its page.
CREATE TABLE topic (
    id          bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    name        text COLLATE "C" UNIQUE,    -- NULL: deleted, its blocks are yet to be removed
    incarnation bigint NOT NULL,
    ledger_id   bigint NOT NULL,
    created_ms  bigint NOT NULL,
    first_ledger bigint, first_entry bigint,    -- the first entry that is left; NULL: none is
    tail_ledger bigint, tail_entry bigint,      -- NULL: nothing was ever appended
    entries     bigint NOT NULL DEFAULT 0,
    messages    bigint NOT NULL DEFAULT 0,
    size_bytes  bigint NOT NULL DEFAULT 0
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.1, autovacuum_vacuum_cost_delay = 0);

-- What a deleted topic leaves behind: its ledger_id never goes back.
CREATE TABLE tombstone (name text COLLATE "C" PRIMARY KEY, ledger_id bigint NOT NULL);

-- Blobs are read apart from their rows, and are not worth compressing again.
CREATE TABLE block (
    id          bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,    -- ascending within a topic
    topic       bigint NOT NULL,
    ledger_id   bigint NOT NULL,
    first_entry bigint NOT NULL,
    last_entry  bigint NOT NULL,
    append_ms   bigint NOT NULL,
    messages    bigint NOT NULL,
    size_bytes  bigint NOT NULL,
    entries_crc bigint NOT NULL,
    metadata_crc bigint NOT NULL,
    payloads_crc bigint NOT NULL,
    entries     bytea NOT NULL,
    metadata    bytea NOT NULL,
    payloads    bytea NOT NULL
) WITH (
    autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_cost_delay = 0,
    toast.autovacuum_vacuum_scale_factor = 0.02, toast.autovacuum_vacuum_cost_delay = 0
);
ALTER TABLE block
    ALTER COLUMN entries SET STORAGE EXTERNAL,
    ALTER COLUMN metadata SET STORAGE EXTERNAL,
    ALTER COLUMN payloads SET STORAGE EXTERNAL;
CREATE UNIQUE INDEX block_place ON block (topic, ledger_id, last_entry);

-- Which block holds a producer's ids.
CREATE TABLE producer_block (
    topic    bigint NOT NULL,
    producer text COLLATE "C" NOT NULL,
    highest  bigint NOT NULL,
    block    bigint NOT NULL,
    lowest   bigint NOT NULL,
    unfinished boolean NOT NULL,    -- after this block a large message may be incomplete
    PRIMARY KEY (topic, producer, highest, block)
) WITH (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_cost_delay = 0);
CREATE INDEX producer_block_unfinished ON producer_block (topic) WHERE unfinished;
CREATE INDEX producer_block_block ON producer_block (block);
CREATE INDEX producer_block_order ON producer_block (topic, producer, block);

-- What the entries of each producer that were trimmed come to (see core/marks.py).
CREATE TABLE producer_trimmed (
    topic    bigint NOT NULL,
    producer text COLLATE "C" NOT NULL,
    highest  bigint NOT NULL,
    PRIMARY KEY (topic, producer)
);

-- Which instance stored what was last stored under a producer's name.
CREATE TABLE producer_instance (
    topic    bigint NOT NULL,
    producer text COLLATE "C" NOT NULL,
    instance bytea NOT NULL,
    PRIMARY KEY (topic, producer)
);

-- The last entry that was trimmed.
CREATE TABLE topic_trimmed (
    topic     bigint PRIMARY KEY,
    ledger_id bigint NOT NULL,
    entry_id  bigint NOT NULL
);

-- When the last entry of a topic was appended of which nothing is left.
CREATE TABLE topic_clock (topic bigint PRIMARY KEY, append_ms bigint NOT NULL);

-- Topics that were deleted and whose cursors are yet to be removed; each has a tombstone.
CREATE TABLE leaving (name text COLLATE "C" PRIMARY KEY);

-- The ledger processes on this database, each with a counter of its beats.
CREATE TABLE instance (
    id      text PRIMARY KEY,
    address text NOT NULL,
    beats   bigint NOT NULL
) WITH (fillfactor = 50);

-- Which of them should write a topic: the one that took it with this ledger_id.
CREATE TABLE topic_owner (
    topic     text COLLATE "C" PRIMARY KEY,
    ledger_id bigint NOT NULL,
    instance  text NOT NULL
);
CREATE INDEX topic_owner_instance ON topic_owner (instance);

-- usable from: 0.1.0
-- Cursors by topic and name. The columns are those of SQLite's tables (adapters/sqlite.py). Names
-- compare by bytes. A step updates its cursor's row, which has room for that in its page.
CREATE TABLE cursor (
    id          bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    topic       text COLLATE "C",       -- NULL: deleted, its rows are yet to be removed
    name        text COLLATE "C" NOT NULL,
    created_ms  bigint NOT NULL,
    mark_ledger bigint, mark_entry bigint,      -- NULL: nothing is acknowledged from the start on
    version     bigint NOT NULL,
    acknowledged bigint NOT NULL,
    partial     bigint NOT NULL,
    lease_owner text, lease_epoch bigint,       -- NULL: nobody ever asked
    lease_duration_ms bigint,                   -- how long the lease was granted for
    lease_number bigint NOT NULL,               -- changes with each grant, renewal and release
    mark_digest bytea, own_digest bytea         -- of the properties; NULL: there are none
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_cost_delay = 0);
CREATE UNIQUE INDEX cursor_place ON cursor (topic, name);

-- What is packed is not worth compressing again.
CREATE TABLE properties (
    cursor  bigint NOT NULL,
    digest  bytea NOT NULL,             -- BLAKE2b of what is packed, 16 bytes
    packed  bytea NOT NULL,             -- a MessagePack map
    PRIMARY KEY (cursor, digest)
) WITH (
    autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_cost_delay = 0,
    toast.autovacuum_vacuum_scale_factor = 0.02, toast.autovacuum_vacuum_cost_delay = 0
);

CREATE TABLE page (
    cursor    bigint NOT NULL,
    ledger_id bigint NOT NULL,
    number    bigint NOT NULL,
    bits      bytea NOT NULL,           -- see bits.py
    PRIMARY KEY (cursor, ledger_id, number)
) WITH (
    fillfactor = 70, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_cost_delay = 0,
    toast.autovacuum_vacuum_scale_factor = 0.02, toast.autovacuum_vacuum_cost_delay = 0
);
ALTER TABLE page ALTER bits SET STORAGE EXTERNAL;

CREATE TABLE batch (
    cursor    bigint NOT NULL,
    ledger_id bigint NOT NULL,
    entry_id  bigint NOT NULL,
    size      bigint NOT NULL,          -- below 0: how large it really is, is not known
    bits      bytea NOT NULL,           -- see bits.py
    PRIMARY KEY (cursor, ledger_id, entry_id)
) WITH (
    fillfactor = 70, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_cost_delay = 0
);
ALTER TABLE batch ALTER bits SET STORAGE EXTERNAL;

CREATE TABLE attempt (
    cursor    bigint NOT NULL,
    ledger_id bigint NOT NULL,
    entry_id  bigint NOT NULL,
    count     bigint NOT NULL,
    PRIMARY KEY (cursor, ledger_id, entry_id)
) WITH (
    fillfactor = 70, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_cost_delay = 0
);

-- Facts about the log: they outlive all but the last of its cursors.
CREATE TABLE succession (
    topic       text COLLATE "C" NOT NULL,
    last_ledger bigint NOT NULL, last_entry bigint NOT NULL,
    next_ledger bigint NOT NULL, next_entry bigint NOT NULL,
    PRIMARY KEY (topic, last_ledger, last_entry)
);

CREATE TABLE spent (
    topic text COLLATE "C" PRIMARY KEY, -- '': every topic
    epoch bigint NOT NULL               -- the highest that a deleted cursor of it had
);

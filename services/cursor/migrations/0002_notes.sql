-- usable from: 0.1.0
-- What the caller notes about an entry beside its count; NULL: none.
ALTER TABLE attempt ADD COLUMN note bytea;

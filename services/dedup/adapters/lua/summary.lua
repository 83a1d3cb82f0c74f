-- A topic's state without its producers.
--
-- KEYS[1]  hash  seqgate:dedup:v1:{<topic>}, see topic.lua
--
-- Returns {meta or false, number of fields}, as of one moment.

return { redis.call("HGET", KEYS[1], "meta"), redis.call("HLEN", KEYS[1]) }

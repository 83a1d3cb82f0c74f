-- Drop a topic's state unless it has a newer incarnation.
--
-- KEYS[1]  hash  seqgate:dedup:v1:{<topic>}, see topic.lua
-- ARGV[1]  incarnation, 19 digits
--
-- Returns 1 if there was state to drop, otherwise 0.

local meta = redis.call("HGET", KEYS[1], "meta")
if not meta or cmsgpack.unpack(meta).incarnation > ARGV[1] then return 0 end
return redis.call("DEL", KEYS[1])

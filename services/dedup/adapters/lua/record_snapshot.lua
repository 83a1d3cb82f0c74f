-- Record that a snapshot was taken.
--
-- KEYS[1]  hash  seqgate:dedup:v1:{<topic>}, see topic.lua
-- ARGV[1]  MessagePack of {incarnation, position, entries, taken_ms}
--
-- Same function as core/topic.py:TopicState.record_snapshot.

local meta = redis.call("HGET", KEYS[1], "meta")
if not meta then return 0 end
local topic = cmsgpack.unpack(meta)
local incarnation, position, entries, taken_ms = unpack(cmsgpack.unpack(ARGV[1]))
if topic.incarnation == incarnation and position >= topic.saved then
  topic.saved, topic.saved_entries, topic.saved_ms = position, entries, taken_ms
  redis.call("HSET", KEYS[1], "meta", cmsgpack.pack(topic))
end
return 0

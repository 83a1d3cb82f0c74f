-- Replace the state by a loaded one, unless the current state covers as much.
--
-- call, instead of topic.lua's:
--     incarnation  19 digits
--     through      38 digits
--     leap         as in topic.lua
--     replacing    replace even a state that covers as much, or more
--     taken_ms     false, or the time at which the loaded snapshot was taken
--     producers    {producer, mark, active_ms, ...}
--
-- Returns, in addition to topic.lua: {"loaded", 1 or 0, confirmed}
--
-- Same function as core/topic.py:TopicState.loaded_by.

local meta = redis.call("HGET", KEY, "meta")
if meta then topic = cmsgpack.unpack(meta) end
if topic and topic.incarnation > call.incarnation then return answer({ "fenced", topic.epoch }) end
if not topic or topic.incarnation < call.incarnation then
  topic = new_topic(call.incarnation, string.rep("0", ID))
elseif not call.replacing and topic.confirmed >= call.through then
  return answer({ "loaded", 0, topic.confirmed })
end

redis.call("DEL", KEY)
local producers = {}
for i = 1, #call.producers, 3 do
  local name, mark, active = call.producers[i], call.producers[i + 1], call.producers[i + 2]
  producers[name] = { persisted = mark, pushed = mark, active = active }
end
topic.confirmed, topic.remaining = call.through, 0
if call.taken_ms then
  topic.saved, topic.saved_entries, topic.saved_ms = call.through, topic.confirmed_entries, call.taken_ms
end
withdraw_all()
write_producers(producers)
return answer({ "loaded", 1, topic.confirmed })

-- Drop producers unless they were active since, or have claims in flight.
--
-- KEYS[1]  hash  seqgate:dedup:v1:{<topic>}, see topic.lua
-- ARGV[1]  MessagePack of {purge, evict}, each {{producer, active_ms}, ...}
--
-- Returns the number dropped.
--
-- Same function as core/topic.py:TopicState.forget.

local meta = redis.call("HGET", KEYS[1], "meta")
if not meta then return 0 end
local topic = cmsgpack.unpack(meta)

local function forget(listed)
  local dropped = 0
  for _, each in ipairs(listed) do
    local field = "p:" .. each[1]
    local value = redis.call("HGET", KEYS[1], field)
    if value then
      local persisted, pushed, term, active = string.match(value, "^(%S+) (%S+) (%d+) (%d+)$")
      local in_flight = tonumber(term) == topic.term and pushed ~= persisted
      if tonumber(active) == each[2] and not in_flight then
        dropped = dropped + redis.call("HDEL", KEYS[1], field)
      end
    end
  end
  return dropped
end

local lists = cmsgpack.unpack(ARGV[1])
local purged, evicted = forget(lists[1]), forget(lists[2])
if purged + evicted > 0 then
  topic.purged = topic.purged + purged
  topic.evicted = topic.evicted + evicted
  redis.call("HSET", KEYS[1], "meta", cmsgpack.pack(topic))
end
return purged + evicted

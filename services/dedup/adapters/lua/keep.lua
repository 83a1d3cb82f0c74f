-- Record producers as active, except those that were active within slack_ms.
--
-- KEYS[1]  hash  seqgate:dedup:v1:{<topic>}, see topic.lua
-- ARGV[1]  MessagePack of {now_ms, {producer, ...}, slack_ms}
--
-- Same function as core/topic.py:TopicState.keep.

local now_ms, names, slack_ms = unpack(cmsgpack.unpack(ARGV[1]))
for _, name in ipairs(names) do
  local field = "p:" .. name
  local value = redis.call("HGET", KEYS[1], field)
  if value then
    local marks, active = string.match(value, "^(%S+ %S+ %d+) (%d+)$")
    if now_ms - slack_ms > tonumber(active) then
      redis.call("HSET", KEYS[1], field, string.format("%s %.0f", marks, now_ms))
    end
  end
end
return 0

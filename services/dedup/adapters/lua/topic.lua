-- What every script of a topic begins with: reading and writing its hash, and the gate.
--
-- KEYS[1]  hash  seqgate:dedup:v1:{<topic>}
--     meta          MessagePack of the table `topic` below
--     p:<producer>  "<persisted> <pushed> <term> <active_ms>"
--                   persisted and pushed: 19 digits, or "-" for never
--                   pushed counts only while <term> is the topic's: withdrawing everything is one
--                   step of the topic's term, however many producers there are
--
-- Ids and positions are text of fixed width (19 and 38 digits) or "" for none, because numbers here
-- are doubles. Text compares as the numbers would.
--
-- ARGV[1]  MessagePack of the table `call`:
--     incarnation, epoch   19 digits
--     position             38 digits or ""
--     confirmation         false, or {after, through, entry_count, remaining,
--                          {{producer, last_append_ms, highest, highest, ...}, ...}}
--     and what the script adds
--
-- Answers MessagePack of {kind, ...}:
--     {"fenced", epoch} {"behind", confirmed} and what the script adds
--
-- Same functions as core/topic.py and core/sequence.py: change both or neither.

local KEY = KEYS[1]
local CHUNK = 1000 -- fields a HMGET or HSET: Lua's stack bounds unpack()

local call = cmsgpack.unpack(ARGV[1])
local topic
local changed = false

local function read_producers(names)
  local producers = {}
  for first = 1, #names, CHUNK do
    local fields = {}
    for i = first, math.min(first + CHUNK - 1, #names) do
      fields[#fields + 1] = "p:" .. names[i]
    end
    local values = redis.call("HMGET", KEY, unpack(fields))
    for i, value in ipairs(values) do
      local name = names[first + i - 1]
      if value then
        local persisted, pushed, term, active = string.match(value, "^(%S+) (%S+) (%d+) (%d+)$")
        if persisted == "-" then persisted = "" end
        if pushed == "-" or tonumber(term) ~= topic.term then pushed = persisted end
        if pushed < persisted then pushed = persisted end
        producers[name] = { persisted = persisted, pushed = pushed, active = tonumber(active), known = true }
      else
        producers[name] = { persisted = "", pushed = "", active = 0, known = false }
      end
    end
  end
  return producers
end

local function write_producers(producers)
  local fields = {}
  for name, p in pairs(producers) do
    fields[#fields + 1] = "p:" .. name
    fields[#fields + 1] = string.format("%s %s %.0f %.0f",
      p.persisted == "" and "-" or p.persisted, p.pushed == "" and "-" or p.pushed, topic.term, p.active)
    if #fields >= CHUNK then
      redis.call("HSET", KEY, unpack(fields))
      fields = {}
    end
  end
  if #fields > 0 then redis.call("HSET", KEY, unpack(fields)) end
end

local function withdraw_all()
  topic.term = topic.term + 1
  topic.revision = topic.revision + 1
  changed = true
end

-- core/topic.py:TopicState.entered_by. Answers a refusal or nil.
local function enter()
  local meta = redis.call("HGET", KEY, "meta")
  if meta then topic = cmsgpack.unpack(meta) end
  if not topic or topic.incarnation < call.incarnation then
    if topic then redis.call("DEL", KEY) end
    topic = {
      incarnation = call.incarnation, epoch = call.epoch, confirmed = "", revision = 0, term = 0, remaining = 0,
      confirmed_entries = 0, new = 0, duplicate = 0, partial = 0, waiting = 0, purged = 0, evicted = 0,
    }
    changed = true
    return nil
  end
  if topic.incarnation > call.incarnation or topic.epoch > call.epoch then
    return { "fenced", topic.epoch }
  end
  if topic.epoch < call.epoch then
    topic.epoch = call.epoch
    withdraw_all()
  end
  return nil
end

-- core/sequence.py:advance, over one producer's entries.
local function advance(p, entries)
  for i = 3, #entries do
    local highest = entries[i]
    local in_flight = p.pushed > p.persisted
    p.persisted = highest
    if not in_flight or p.pushed < highest then p.pushed = highest end
  end
  if entries[2] > p.active then p.active = entries[2] end
end

-- core/topic.py:TopicState._confirm. Answers a refusal or nil.
local function confirm()
  if not call.confirmation then return nil end
  local after, through, entry_count, remaining, listed = unpack(call.confirmation)
  if topic.confirmed < after then return { "behind", topic.confirmed } end
  if topic.confirmed < through then
    local names = {}
    for i, entries in ipairs(listed) do names[i] = entries[1] end
    local producers = read_producers(names)
    for _, entries in ipairs(listed) do advance(producers[entries[1]], entries) end
    write_producers(producers)
    topic.confirmed = through
    topic.remaining = remaining
    topic.confirmed_entries = topic.confirmed_entries + entry_count
    changed = true
  end
  return nil
end

-- core/topic.py:TopicState._compare. Answers a refusal or nil.
local function compare()
  if topic.confirmed < call.position then return { "behind", topic.confirmed } end
  if call.position < topic.confirmed then return { "fenced", topic.epoch } end
  return nil
end

local function answer(reply)
  if changed then redis.call("HSET", KEY, "meta", cmsgpack.pack(topic)) end
  return cmsgpack.pack(reply)
end

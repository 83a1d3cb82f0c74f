-- The common beginning of all scripts: access to a topic's hash, and the gate.
--
-- KEYS[1]  hash  seqgate:dedup:v1:{<topic>}
--     meta          MessagePack of the table `topic` below
--     p:<producer>  "<persisted> <pushed> <term> <active_ms>"
--                   persisted and pushed: marks, or "-" for never
--                   pushed applies only while <term> is the topic's: incrementing the topic's
--                   term withdraws all claims, however many producers there are
--
-- Ids and positions are text of fixed width (19 and 38 digits) or "" for none, because numbers here
-- are doubles. The text compares as the numbers would.
--
-- A mark is an id; inside a large message "<id>/<chunk>/<layout>", the last chunk that it covers.
-- The layout is "<number of chunks>/<bytes>/<uuid>", without white space.
--
-- ARGV[1]  MessagePack of the table `call`:
--     incarnation, epoch   19 digits
--     leap                 a random number below 2^40, by which the revision moves further than by one
--                          when claims are withdrawn
--     position             38 digits or ""
--     confirmation         false, or {after, through, entry_count, remaining,
--                          {{producer, last_append_ms, entry, entry, ...}, ...}}
--                          entry: the highest id, or for a chunk the mark that ends with it
--     and the fields of the script
--
-- Returns MessagePack of {kind, ...}:
--     {"fenced", epoch} {"behind", confirmed} and the kinds of the script
--
-- Same functions as core/topic.py and core/sequence.py: change both or neither.

local KEY = KEYS[1]
local FIELDS = 1000 -- per HMGET or HSET, since Lua's stack bounds unpack()
local REVISIONS = 2 ^ 52 -- numbers up to twice that are exact
local ID = 19 -- digits; a longer mark is inside a large message

local call = cmsgpack.unpack(ARGV[1])
local topic
local changed = false

local function id_of(mark) return string.sub(mark, 1, ID) end

-- The chunk and the layout of a mark inside a large message.
local function chunk_of(mark)
  local chunk, layout = string.match(mark, "^%d+/(%d+)/(.+)$")
  return tonumber(chunk), layout
end

local function is_last(chunk, layout) return chunk + 1 == tonumber(string.match(layout, "^%d+")) end

-- core/sequence.py:_continues, for two marks inside large messages.
local function continues(before, mark)
  local chunk, layout = chunk_of(mark)
  local before_chunk, before_layout = chunk_of(before)
  return layout == before_layout and chunk == before_chunk + 1
end

-- core/sequence.py:_ahead.
local function ahead(pushed, persisted)
  if #pushed <= ID and #persisted <= ID then return pushed > persisted end
  local pushed_id, persisted_id = id_of(pushed), id_of(persisted)
  if pushed_id ~= persisted_id then return pushed_id > persisted_id end
  if #persisted <= ID then return false end
  if #pushed <= ID then return true end
  local chunk, layout = chunk_of(pushed)
  local persisted_chunk, persisted_layout = chunk_of(persisted)
  return layout ~= persisted_layout or chunk > persisted_chunk
end

local function read_producers(names)
  local producers = {}
  for first = 1, #names, FIELDS do
    local fields = {}
    for i = first, math.min(first + FIELDS - 1, #names) do
      fields[#fields + 1] = "p:" .. names[i]
    end
    local values = redis.call("HMGET", KEY, unpack(fields))
    for i, value in ipairs(values) do
      local name = names[first + i - 1]
      if value then
        local persisted, pushed, term, active = string.match(value, "^(%S+) (%S+) (%d+) (%d+)$")
        if persisted == "-" then persisted = "" end
        if pushed == "-" or tonumber(term) ~= topic.term then pushed = persisted end
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
    if #fields >= FIELDS then
      redis.call("HSET", KEY, unpack(fields))
      fields = {}
    end
  end
  if #fields > 0 then redis.call("HSET", KEY, unpack(fields)) end
end

local function new_topic(incarnation, epoch)
  return {
    incarnation = incarnation, epoch = epoch, confirmed = "", revision = 0, term = 0, remaining = 0,
    confirmed_entries = 0, new = 0, duplicate = 0, partial = 0, waiting = 0, purged = 0, evicted = 0,
    misplaced = 0, aborted = 0,
    saved = "", saved_entries = 0, saved_ms = 0, -- core/topic.py:Saved
  }
end

-- In core/topic.py, with a single state, the revision moves by one. Redis may temporarily have two, on a
-- master that was cut off and on its successor, and one writer may meet both: claims admitted on one
-- must never be looked for on the other under the same revision.
local function leap()
  topic.revision = (topic.revision + 1 + call.leap) % REVISIONS
  changed = true
end

local function withdraw_all()
  topic.term = topic.term + 1
  leap()
end

-- core/topic.py:TopicState.entered_by. Returns a refusal or nil.
local function enter()
  local meta = redis.call("HGET", KEY, "meta")
  if meta then topic = cmsgpack.unpack(meta) end
  if not topic or topic.incarnation < call.incarnation then
    if topic then redis.call("DEL", KEY) end
    topic = new_topic(call.incarnation, call.epoch)
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

-- The mark after a chunk of the log; nil: the chunk continues nothing.
local function reached_by(entry, persisted)
  local chunk, layout = chunk_of(entry)
  if chunk > 0 then
    if #persisted <= ID or id_of(persisted) ~= id_of(entry) or not continues(persisted, entry) then return nil end
  end
  return is_last(chunk, layout) and id_of(entry) or entry
end

-- core/sequence.py:advance, over one producer's entries.
local function advance(p, entries)
  local persisted, pushed = p.persisted, p.pushed
  for i = 3, #entries do
    local mark = entries[i]
    if #mark > ID then mark = reached_by(mark, persisted) end
    if mark then
      if pushed == persisted or not ahead(pushed, mark) then pushed = mark end
      persisted = mark
    end
  end
  p.persisted, p.pushed = persisted, pushed
  if entries[2] > p.active then p.active = entries[2] end
end

-- core/topic.py:TopicState._behind.
local function behind()
  topic.remaining = math.max(1, topic.remaining)
  changed = true
  return { "behind", topic.confirmed }
end

local function unsaved() return topic.confirmed_entries - topic.saved_entries end

-- core/topic.py:TopicState._confirm. Returns a refusal or nil.
local function confirm()
  if not call.confirmation then return nil end
  local after, through, entry_count, remaining, listed = unpack(call.confirmation)
  if topic.confirmed < after then return behind() end
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

-- core/topic.py:TopicState._compare. Returns a refusal or nil.
local function compare()
  if topic.confirmed < call.position then return behind() end
  if call.position < topic.confirmed then return { "fenced", topic.epoch } end
  if topic.remaining > 0 then
    topic.remaining = 0
    changed = true
  end
  return nil
end

local function answer(reply)
  if changed then redis.call("HSET", KEY, "meta", cmsgpack.pack(topic)) end
  return cmsgpack.pack(reply)
end

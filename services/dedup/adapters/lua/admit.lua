-- Apply a confirmation, then judge claims.
--
-- KEYS[2]  string, optional: the token of the policies, if it is on the same server
--
-- call, in addition to topic.lua:
--     policies       the token that the caller knows
--     revision       a number, or false: not compared
--     claims         {{producer, lowest, highest, lowest, highest, ...}, ...}, no producer twice
--                    highest: an id, or for a chunk the mark that ends with it
--     now_ms         a number
--     max_producers  a number
--
-- Returns, in addition to topic.lua:
--     {"outdated"}  if KEYS[2] has another token, or none
--     {"changed", revision}
--     {"full", tracked, wanted}
--     {"judged", revision, {{verdicts, persisted, aborts}, ...}, unsaved}
--         verdicts: one letter per claim: New, In flight, Duplicate, Partial, Held, chunk Gap, layout
--                   Conflict
--         persisted: a mark or ""
--         aborts: {claim, mark, claim, mark, ...}: the index of a claim, from 1, and the mark
--                 inside the large message that it aborts
--
-- Same function as core/topic.py:TopicState.admit and core/sequence.py:admit.

if KEYS[2] and redis.call("GET", KEYS[2]) ~= call.policies then return answer({ "outdated" }) end

local refusal = enter()
if refusal then return answer(refusal) end
refusal = confirm() or compare()
if refusal then return answer(refusal) end
if call.revision and call.revision ~= topic.revision then
  return answer({ "changed", topic.revision })
end

local names = {}
for i, claims in ipairs(call.claims) do names[i] = claims[1] end
local producers = read_producers(names)

local unknown = 0
for _, p in pairs(producers) do
  if not p.known then unknown = unknown + 1 end
end
if unknown > 0 then
  local tracked = redis.call("HLEN", KEY) - redis.call("HEXISTS", KEY, "meta")
  if tracked + unknown > call.max_producers then
    return answer({ "full", tracked, unknown })
  end
end

-- core/sequence.py:_judge_chunk.
local function judge_chunk(p, id, mark)
  local persisted, pushed = p.persisted, p.pushed
  local persisted_id, pushed_id = id_of(persisted), id_of(pushed)
  local chunk, layout = chunk_of(mark)
  if id < persisted_id or (id == persisted_id and #persisted <= ID) then return "D" end
  if id == persisted_id then
    local stored_chunk, stored_layout = chunk_of(persisted)
    if layout == stored_layout and chunk <= stored_chunk then return "D" end
  end
  if id > pushed_id then return chunk == 0 and "N" or "G" end
  if id < pushed_id or #pushed <= ID then return "I" end
  local reached_chunk, reached_layout = chunk_of(pushed)
  if layout == reached_layout then
    if chunk <= reached_chunk then return "I" end
    return chunk == reached_chunk + 1 and "N" or "G"
  end
  if pushed ~= persisted then return "I" end
  return chunk == 0 and "N" or "C"
end

-- core/sequence.py:_judge.
local function judge(p, lowest, highest)
  if #highest > ID then return judge_chunk(p, lowest, highest) end
  local persisted, pushed = p.persisted, p.pushed
  if #persisted <= ID then
    if highest <= persisted then return "D" end
  elseif highest < id_of(persisted) then
    return "D"
  end
  if #pushed <= ID then
    if lowest > pushed then return "N" end
    return pushed ~= persisted and "I" or "P"
  end
  local pushed_id = id_of(pushed)
  if lowest > pushed_id then return "N" end
  if pushed ~= persisted then return "I" end
  return lowest == pushed_id and "N" or "P"
end

local count = { N = 0, D = 0, P = 0, I = 0, H = 0, G = 0, C = 0 }

local let_through = false
local judged = {}
for i, claims in ipairs(call.claims) do
  local p = producers[claims[1]]
  local verdicts, aborts = {}, {}
  local held = false
  for j = 2, #claims, 2 do
    local lowest, highest = claims[j], claims[j + 1]
    local verdict = judge(p, lowest, highest)
    if held and verdict ~= "D" then
      verdict = "H"
    elseif verdict == "N" then
      local chunk = #highest > ID
      if #p.pushed > ID and not (chunk and continues(p.pushed, highest)) then
        aborts[#aborts + 1] = j / 2
        aborts[#aborts + 1] = p.pushed
      end
      p.pushed = chunk and is_last(chunk_of(highest)) and lowest or highest
      let_through = true
    elseif verdict ~= "D" then
      held = true
    end
    count[verdict] = count[verdict] + 1
    verdicts[j / 2] = verdict
  end
  if call.now_ms > p.active then p.active = call.now_ms end
  topic.aborted = topic.aborted + #aborts / 2
  judged[i] = { table.concat(verdicts), p.persisted, aborts }
end

topic.new = topic.new + count.N
topic.duplicate = topic.duplicate + count.D
topic.partial = topic.partial + count.P
topic.waiting = topic.waiting + count.I + count.H
topic.misplaced = topic.misplaced + count.G + count.C

write_producers(producers)
if let_through then topic.revision = topic.revision + 1 end
changed = true
return answer({ "judged", topic.revision, judged, unsaved() })

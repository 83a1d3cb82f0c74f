-- Apply a confirmation, then judge claims.
--
-- call, beside what topic.lua names:
--     revision       a number, or false: not compared
--     claims         {{producer, lowest, highest, lowest, highest, ...}, ...}, each producer once
--     now_ms         a number
--     max_producers  a number
--
-- Answers, beside what topic.lua names:
--     {"changed", revision}
--     {"full", tracked, wanted}
--     {"judged", revision, {{verdicts, persisted}, ...}}
--         verdicts: one letter a claim: New, In flight, Duplicate, Partial, Held
--         persisted: 19 digits or ""
--
-- Same function as core/topic.py:TopicState.admit and core/sequence.py:admit.

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

local let_through = false
local judged = {}
for i, claims in ipairs(call.claims) do
  local p = producers[claims[1]]
  local persisted, pushed = p.persisted, p.pushed
  local verdicts = {}
  local held = false
  for j = 2, #claims, 2 do
    local lowest, highest = claims[j], claims[j + 1]
    local verdict
    if highest <= persisted then
      verdict = "D"
      topic.duplicate = topic.duplicate + 1
    elseif held then
      verdict = "H"
      topic.waiting = topic.waiting + 1
    elseif lowest > pushed then
      verdict = "N"
      topic.new = topic.new + 1
      pushed = highest
      let_through = true
    elseif pushed > persisted then
      verdict = "I"
      topic.waiting = topic.waiting + 1
      held = true
    else
      verdict = "P"
      topic.partial = topic.partial + 1
      held = true
    end
    verdicts[#verdicts + 1] = verdict
  end
  p.pushed = pushed
  if call.now_ms > p.active then p.active = call.now_ms end
  judged[i] = { table.concat(verdicts), persisted }
end

write_producers(producers)
topic.remaining = 0
if let_through then topic.revision = topic.revision + 1 end
changed = true
return answer({ "judged", topic.revision, judged })

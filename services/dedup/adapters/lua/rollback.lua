-- Apply a confirmation and withdraw claims, even if the state is behind.
--
-- call, in addition to topic.lua:
--     withdrawals  {{producer, keep_through}, ...}; empty: all claims
--                  keep_through: 19 digits or ""
--
-- Returns, in addition to topic.lua: {"applied", revision, unsaved}
--
-- Same function as core/topic.py:TopicState.rollback.

local refusal = enter()
if refusal then return answer(refusal) end
refusal = confirm() or compare()
if refusal and refusal[1] == "fenced" then return answer(refusal) end

if #call.withdrawals == 0 then
  withdraw_all()
else
  local names = {}
  for i, withdrawal in ipairs(call.withdrawals) do names[i] = withdrawal[1] end
  local producers = read_producers(names)
  for _, withdrawal in ipairs(call.withdrawals) do
    local name, keep = withdrawal[1], withdrawal[2]
    local p = producers[name]
    if p.known then
      if id_of(p.pushed) > keep then
        p.pushed = ahead(keep, p.persisted) and keep or p.persisted
      end
    end
  end
  for name, p in pairs(producers) do
    if not p.known then producers[name] = nil end
  end
  write_producers(producers)
  leap()
end
return answer(refusal or { "applied", topic.revision, unsaved() })

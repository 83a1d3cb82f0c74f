-- Apply a confirmation.
--
-- Returns, in addition to topic.lua: {"applied", revision, unsaved}
--
-- Same function as core/topic.py:TopicState.confirm.

local refusal = enter() or confirm()
if refusal then return answer(refusal) end
refusal = compare()
if refusal and refusal[1] == "fenced" then return answer(refusal) end
return answer({ "applied", topic.revision, unsaved() })

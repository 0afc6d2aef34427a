"""The one read-only script behind a routing decision.

KEYS: states, version, then one block set per worker.   ARGV: one worker id per block set, then the 16-byte hashes of
the prompt's full blocks in one string, of which the first 8 bytes are an entry.
Returns {version, seconds, microseconds, "matched,matched,...", {state, ...}}.

A set is prefix-closed, so the length of the match is where membership flips from yes to no. The search begins at the
previous worker's answer, because neighbours often agree (nothing, or the shared system prompt), gallops away from it
and bisects what is left. `redis.pcall`: a foreign key of another type counts as no match instead of failing the call.
"""

from __future__ import annotations

from hashlib import sha1
from typing import Final

LOOKUP: Final = """
local pcall, sub, floor = redis.pcall, string.sub, math.floor
local num_ids = #ARGV - 1
local blob = ARGV[num_ids + 1]
local num_blocks = #blob / 16
local states = num_ids > 0 and pcall('HMGET', KEYS[1], unpack(ARGV, 1, num_ids)) or {}
local entries = {}
local matched = {}
local finger = 0
for i = 1, num_ids do
  local key = KEYS[i + 2]
  local held, missing = 0, num_blocks + 1
  local step = 1
  local at = finger
  if at == 0 then at = 1 end
  local galloping_up = nil
  while missing - held > 1 do
    local entry = entries[at]
    if not entry then
      entry = sub(blob, at * 16 - 15, at * 16 - 8)
      entries[at] = entry
    end
    if pcall('SISMEMBER', key, entry) == 1 then
      held = at
      if galloping_up == nil then galloping_up = true elseif not galloping_up then step = 0 end
    else
      missing = at
      if galloping_up == nil then galloping_up = false elseif galloping_up then step = 0 end
    end
    if step > 0 then
      at = galloping_up and held + step or missing - step
      step = step * 2
      if at <= held or at >= missing then step = 0 end
    end
    if step == 0 then at = floor((held + missing) / 2) end
  end
  finger = held
  matched[i] = held
end
local now = pcall('TIME')
return {pcall('GET', KEYS[2]), now[1], now[2], table.concat(matched, ','), states}
"""

LOOKUP_SHA: Final = sha1(LOOKUP.encode()).hexdigest()

"""The one read-only script behind a routing decision.

KEYS: states, version, then one block set per worker.   ARGV: one worker id per block set, then the 16-byte hashes of
the prompt's full blocks in one string, of which the first 8 bytes are an entry.
Returns {version, seconds, microseconds, "matched,matched,...", {state, ...}}.

A set is prefix-closed, so the length of the match is where membership flips from yes to no. The search begins at the
previous worker's answer, because neighbours often agree (nothing, or the shared system prompt): one call asks for the
last block that the previous worker held and for the next one. If the flip is not there the search gallops away from it
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
local entries = setmetatable({}, {__index = function(known, at)
  local entry = sub(blob, at * 16 - 15, at * 16 - 8)
  known[at] = entry
  return entry
end})
local matched = {}
local finger = 0
for i = 1, num_ids do
  local key = KEYS[i + 2]
  local held, missing = 0, num_blocks + 1  -- the match is at least held, and less than missing
  local up = true
  if finger > 0 and finger < num_blocks then
    local both = pcall('SMISMEMBER', key, entries[finger], entries[finger + 1])
    if both[1] ~= 1 then
      missing, up = finger, false
    elseif both[2] ~= 1 then
      held, missing = finger, finger + 1
    else
      held = finger + 1
    end
  elseif num_blocks > 0 then
    local at = finger > 0 and finger or 1
    if pcall('SISMEMBER', key, entries[at]) == 1 then held = at else missing, up = at, false end
  end
  local step = 1
  while missing - held > 1 do
    local at = step > 0 and (up and held + step or missing - step) or 0
    if at <= held or at >= missing then
      step = 0
      at = floor((held + missing) / 2)
    else
      step = step * 2
    end
    if pcall('SISMEMBER', key, entries[at]) == 1 then
      held = at
      if not up then step = 0 end
    else
      missing = at
      if up then step = 0 end
    end
  end
  finger = held
  matched[i] = held
end
local states = num_ids > 0 and pcall('HMGET', KEYS[1], unpack(ARGV, 1, num_ids)) or {}
local now = pcall('TIME')
return {pcall('GET', KEYS[2]), now[1], now[2], table.concat(matched, ','), states}
"""

LOOKUP_SHA: Final = sha1(LOOKUP.encode()).hexdigest()

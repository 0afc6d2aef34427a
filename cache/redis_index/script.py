"""The one read-only script of a routing decision.

It returns {version, {seconds, microseconds}, {matched, ...}, {state, ...}}. `redis.pcall` makes a foreign key of
another type no match instead of an error. Calls dominate the time of a lookup, at some 0.5 us each; an argument costs
half of that.
"""

from __future__ import annotations

from hashlib import sha1
from typing import Final

# KEYS: states, version, then one block set per worker. ARGV: the prompt's 16-byte block hashes in one string (the first
# 8 bytes of each are its entry), then ids of workers, or `*` for all: their states are returned.
#
# A set is prefix-closed, so the match ends where membership flips from yes to no. The previous worker's answer is the
# search hint, because neighbours often agree (nothing, or the shared system prompt). One call asks for the block at the
# hint and for the next one, or the next two while neighbours have not agreed. If the flip is not there, the search
# gallops away from it and then bisects.
LOOKUP: Final = """
local pcall, sub, floor = redis.pcall, string.sub, math.floor
local blob = ARGV[1]
local num_blocks = #blob / 16
local entries = setmetatable({}, {__index = function(known, at)
  local entry = sub(blob, at * 16 - 15, at * 16 - 8)
  known[at] = entry
  return entry
end})
local matched = {}
local hint, agreed = 0, true
for i = 3, #KEYS do
  local key = KEYS[i]
  local held, missing = 0, num_blocks + 1  -- the match is at least held, and less than missing
  local up, step = true, 1
  if hint > 0 and hint < num_blocks then
    local found
    if agreed or hint + 1 == num_blocks then
      found = pcall('SMISMEMBER', key, entries[hint], entries[hint + 1])
    else
      found = pcall('SMISMEMBER', key, entries[hint], entries[hint + 1], entries[hint + 2])
    end
    if found[1] ~= 1 then
      missing, up = hint, false
    elseif found[2] ~= 1 then
      held, missing = hint, hint + 1
    elseif found[3] == nil then
      held = hint + 1
    elseif found[3] ~= 1 then
      held, missing = hint + 1, hint + 2
    else
      held, step = hint + 2, 2
    end
  elseif num_blocks > 0 then
    local at = hint > 0 and hint or 1
    if pcall('SISMEMBER', key, entries[at]) == 1 then held = at else missing, up = at, false end
  end
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
  agreed = held == hint
  hint = held
  matched[i - 2] = held
end
local states = {}
if ARGV[2] == '*' then
  states = pcall('HVALS', KEYS[1])
elseif #ARGV > 1 then
  states = pcall('HMGET', KEYS[1], unpack(ARGV, 2))
end
local version = pcall('GETRANGE', KEYS[2], 0, 63)  -- of any size
if type(version) == 'table' then version = pcall('GET', KEYS[2]) end  -- a user without that right
return {version, pcall('TIME'), matched, states}
"""

LOOKUP_SHA: Final = sha1(LOOKUP.encode()).hexdigest()

ALL_STATES: Final = "*"
"""In place of worker ids; no id is this."""

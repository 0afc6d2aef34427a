"""The one read-only script of a routing decision.

It returns {version, {seconds, microseconds}, {matched, ...}, {state, ...}}. `redis.pcall` makes a foreign key of
another type no match instead of an error. Calls dominate the time of a lookup, at some 0.5 us each; an argument costs
half of that.
"""

from __future__ import annotations

from hashlib import sha1
from typing import Final

from cache.redis_index.schema import MAX_STATE_BYTES

_SEARCH: Final = """local function NAME(key, held, missing, up, step, value)  -- the match is from held to missing - 1
  while missing - held > 1 do
    local at = step > 0 and (up and held + step or missing - step) or 0
    if at <= held or at >= missing then
      step = 0
      at = floor((held + missing) / 2)
    else
      step = step * 2
    end
    local found = FOUND
    if found then
      held, value = at, found
      if not up then step = 0 end
    else
      missing = at
      if up then step = 0 end
    end
  end
  return held, value  -- and what the last block of the match has
end"""


def _search(name: str, found: str) -> str:
    """Return the search for the end of a match. Written out for sets and hashes, as a call of a function costs 3 %."""
    return _SEARCH.replace("NAME", name).replace("FOUND", found)


# KEYS: states, version, the set of each worker's pool (a hash if it has ends), then the sets of tiers. ARGV:
# 1. the prompt's 16-byte block hashes in one string: the first 8 bytes of each are its entry. A byte more follows if
#    they cover the whole prompt, whose last token is always computed.
# 2. for each set of a tier, the place in `matched` of the match that it continues: two bytes, from 0 on.
# 3. for each pool, a byte: 1 if it has ends. Empty if none has.
# 4. ids of workers, or `*` for all: their states are returned. After a `?`, only those that are not too long.
#
# A set is prefix-closed, so the match ends where membership flips from yes to no. The previous worker's answer is the
# search hint, because neighbours often agree (nothing, or the shared system prompt). One call asks for the block at the
# hint and for the next one, or the next two while neighbours have not agreed. If the flip is not there, the search
# gallops away from it and then bisects.
#
# A tier's match begins where the one before it ends. So its call also asks for the block after that: most often the
# tier does not go on there. Its hint is the end of the last match that a tier has continued.
#
# Where a hit may stop is no prefix-closed set, so it is not searched: the hash has it for every block. The call that
# finds the last matching block returns it.
_LOOKUP: Final = """
local pcall, sub, byte, floor = redis.pcall, string.sub, string.byte, math.floor
local blob, links, ends = ARGV[1], ARGV[2], ARGV[3]
local has_ends = #ends > 0
local last_pool = #KEYS - #links / 2
local num_blocks = floor(#blob / 16)
local entries = setmetatable({}, {__index = function(known, at)
  local entry = sub(blob, at * 16 - 15, at * 16 - 8)
  known[at] = entry
  return entry
end})
SEARCH_SET
SEARCH_HASH
local function find_stop(key, hint, agreed)  -- returns the match, and where a hit stops
  local held, missing, value = 0, num_blocks + 1, false
  local up, step = true, 1
  if hint > 0 and hint < num_blocks then
    local found
    if agreed or hint + 1 == num_blocks then
      found = pcall('HMGET', key, entries[hint], entries[hint + 1])
    else
      found = pcall('HMGET', key, entries[hint], entries[hint + 1], entries[hint + 2])
    end
    if not found[1] then
      missing, up = hint, false
    elseif not found[2] then
      held, missing, value = hint, hint + 1, found[1]
    elseif found[3] == nil then
      held, value = hint + 1, found[2]
    elseif not found[3] then
      held, missing, value = hint + 1, hint + 2, found[2]
    else
      held, value, step = hint + 2, found[3], 2
    end
  elseif num_blocks > 0 then
    local at = hint > 0 and hint or 1
    value = pcall('HMGET', key, entries[at])[1]
    if value then held = at else missing, up = at, false end
  end
  held, value = search_hash(key, held, missing, up, step, value)
  local stop = value and tonumber(value)
  if stop == num_blocks and #blob % 16 == 1 then
    value = held > 1 and pcall('HMGET', key, entries[held - 1])[1]
    stop = value and tonumber(value)
  end
  local last = num_blocks - #blob % 16
  return held, stop and stop > 0 and stop <= held and stop <= last and floor(stop) or 0
end
local matched = {}
local hint, agreed = 0, true
for i = 3, last_pool do
  local key = KEYS[i]
  if has_ends and byte(ends, i - 2) == 1 then
    local held, stop = find_stop(key, hint, agreed)
    agreed = held == hint
    hint = held
    matched[i - 2] = stop
  else
    local held, missing = 0, num_blocks + 1
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
    if missing - held > 1 then held = search_set(key, held, missing, up, step) end
    agreed = held == hint
    hint = held
    matched[i - 2] = held
  end
end
hint = 0
for i = last_pool + 1, #KEYS do
  local key = KEYS[i]
  local high, low = byte(links, 2 * (i - last_pool) - 1, 2 * (i - last_pool))
  local base = matched[256 * high + low + 1]
  local held, missing, up = base, num_blocks + 1, true
  if base < num_blocks then
    if hint <= base then
      if pcall('SISMEMBER', key, entries[base + 1]) == 1 then held = base + 1 else missing = base + 1 end
    else
      local after = hint < num_blocks and hint + 1 or hint
      local found = pcall('SMISMEMBER', key, entries[base + 1], entries[hint], entries[after])
      if found[1] ~= 1 then
        missing = base + 1
      elseif found[2] ~= 1 then
        held, missing, up = base + 1, hint, false
      elseif found[3] ~= 1 then
        held, missing = hint, after
      else
        held = after
      end
    end
    if missing - held > 1 then held = search_set(key, held, missing, up, 1) end
  end
  if held > base then hint = held end
  matched[i - 2] = held
end
local states = {}
if ARGV[4] == '*' then
  states = pcall('HVALS', KEYS[1])
elseif ARGV[4] == '?' then
  for i = 5, #ARGV do
    local size = pcall('HSTRLEN', KEYS[1], ARGV[i])
    if type(size) == 'table' then  -- another type, or a user without that right
      states = pcall('HMGET', KEYS[1], unpack(ARGV, 5))
      break
    end
    states[i - 4] = size <= MAX_STATE_BYTES and pcall('HMGET', KEYS[1], ARGV[i])[1]
  end
elseif #ARGV > 3 then
  states = pcall('HMGET', KEYS[1], unpack(ARGV, 4))
end
local version = pcall('GETRANGE', KEYS[2], 0, 63)  -- of any size
if type(version) == 'table' then version = pcall('GET', KEYS[2]) end  -- a user without that right
return {version, pcall('TIME'), matched, states}
"""
LOOKUP: Final = (
    _LOOKUP.replace("MAX_STATE_BYTES", str(MAX_STATE_BYTES))
    .replace("SEARCH_SET", _search("search_set", "pcall('SISMEMBER', key, entries[at]) == 1"))
    .replace("SEARCH_HASH", _search("search_hash", "pcall('HMGET', key, entries[at])[1]"))
)

LOOKUP_SHA: Final = sha1(LOOKUP.encode()).hexdigest()

ALL_STATES: Final = "*"
"""Stands for all worker ids; no id is equal to it."""
SHORT_STATES: Final = "?"
"""Precedes worker ids, if foreign values of any size may be stored."""

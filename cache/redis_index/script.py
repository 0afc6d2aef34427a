"""The one read-only script of a routing decision, its packed command, and how its reply is read.

It returns {version, {seconds, microseconds}, {matched, ...}, {state, ...}}. `redis.pcall` makes a foreign key of
another type no match instead of an error. Calls dominate the time of a lookup, at some 0.5 us each; an argument costs
half of that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha1
from typing import Final

from cache.redis_index import schema
from cache.redis_index.client import Argument, pack
from cache.redis_index.registry import KnownWorker
from cache.redis_index.schema import MAX_STATE_BYTES, Keys, ReplyError, brief
from cache.types import TIERS

_SEARCH: Final = """local function search_KIND(key, held, missing, up, step, value)  -- it ends in held to missing - 1
  while missing - held > 1 do
    local at = step > 0 and (up and held + step or missing - step) or 0
    if at <= held or at >= missing then
      step = 0
      at = floor((held + missing) / 2)
    else
      step = step * 2
    end
    local found = ONE
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
_MATCH: Final = """local held, missing, value = 0, num_blocks + 1, false
    local up, step = true, 1
    if hint > 0 and hint < num_blocks then
      local found
      if agreed or hint + 1 == num_blocks then
        found = pcall('MANY', key, entries[hint], entries[hint + 1])
      else
        found = pcall('MANY', key, entries[hint], entries[hint + 1], entries[hint + 2])
      end
      if not (found[1]HAS) then
        missing, up = hint, false
      elseif not (found[2]HAS) then
        held, missing, value = hint, hint + 1, found[1]
      elseif found[3] == nil then
        held, value = hint + 1, found[2]
      elseif not (found[3]HAS) then
        held, missing, value = hint + 1, hint + 2, found[2]
      else
        held, value, step = hint + 2, found[3], 2
      end
    elseif num_blocks > 0 then
      local at = hint > 0 and hint or 1
      value = ONE
      if value then held = at else missing, up = at, false end
    end
    if missing - held > 1 then held, value = search_KIND(key, held, missing, up, step, value) end
    agreed = held == hint
    hint = held"""
_SET: Final = {"KIND": "set", "ONE": "pcall('SISMEMBER', key, entries[at]) == 1", "MANY": "SMISMEMBER", "HAS": " == 1"}
_HASH: Final = {"KIND": "hash", "ONE": "pcall('HMGET', key, entries[at])[1]", "MANY": "HMGET", "HAS": ""}


def _written_out(text: str, words: dict[str, str]) -> str:
    """Return Lua for sets or for hashes. Both are written out, as a call of a function costs 3 %."""
    for name, word in words.items():
        text = text.replace(name, word)
    return text


# KEYS: states, version, the set of each worker's pool (a hash if it has ends), then the sets of tiers. ARGV:
# 1. the prompt's 16-byte block hashes in one string: the first 8 bytes of each are its entry. A byte more follows if
#    they cover the whole prompt, whose last token is always computed.
# 2. for each set of a tier, the index in `matched` of the match that it continues: two bytes, from 0 on.
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
local matched = {}
local hint, agreed = 0, true
for i = 3, last_pool do
  local key = KEYS[i]
  if has_ends and byte(ends, i - 2) == 1 then
    MATCH_HASH
    local stop = value and tonumber(value)
    if stop == num_blocks and #blob % 16 == 1 then
      value = held > 1 and pcall('HMGET', key, entries[held - 1])[1]
      stop = value and tonumber(value)
    end
    local last = num_blocks - #blob % 16
    matched[i - 2] = stop and stop > 0 and stop <= held and stop <= last and floor(stop) or 0
  else
    MATCH_SET
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
    .replace("SEARCH_SET", _written_out(_SEARCH, _SET))
    .replace("SEARCH_HASH", _written_out(_SEARCH, _HASH))
    .replace("MATCH_SET", _written_out(_MATCH, _SET))
    .replace("MATCH_HASH", _written_out(_MATCH, _HASH))
)

LOOKUP_SHA: Final = sha1(LOOKUP.encode()).hexdigest()

ALL_STATES: Final = "*"
"""Stands for all worker ids; no id is equal to it."""
SHORT_STATES: Final = "?"
"""Precedes worker ids, if foreign values of any size may be stored."""


@dataclass(frozen=True, slots=True)
class Query:
    """The lookup command for some workers, packed, before and after the prompt's hashes."""

    workers: tuple[KnownWorker, ...]
    with_states: tuple[bytes, bytes]
    without_states: tuple[bytes, bytes]
    has_all_states: bool
    """`with_states` reads those of all workers of the shard."""
    links: tuple[int, ...]
    """For each set of a tier, the index of the match that it continues."""
    matches_of: tuple[tuple[int, ...], ...]
    """For each worker, the indices of its tiers' matches."""
    block_sizes: frozenset[int]
    """Those of the workers with ends."""

    def split(self, matches: list[int], num_blocks: int) -> tuple[list[int], Sequence[tuple[int, ...]]]:
        """Return each worker's match in its pool, and those in its tiers. A bad reply may raise anything."""
        num_pools, num_tiers = len(self.workers), len(self.links)
        if len(matches) != num_pools + num_tiers or (matches and not 0 <= min(matches) <= max(matches) <= num_blocks):
            raise ReplyError(f"{brief(matches)} for {num_pools} workers, {num_tiers} tiers and {num_blocks} blocks")
        if not any(self.matches_of):
            return matches, self.matches_of
        if any(matches[link] > match for link, match in zip(self.links, matches[num_pools:], strict=True)):
            raise ReplyError(f"a match in a tier ends before the one that it continues: {brief(matches)}")
        return matches[:num_pools], [tuple([matches[at] for at in indices]) for indices in self.matches_of]


def make_query(evalsha: bytes, keys: Keys, workers: Sequence[KnownWorker], *, by_name: bool, guarded: bool) -> Query:
    """Return the lookup among `workers`. `by_name`: read their states only, if `guarded` without those too long."""
    sets = [keys.pool(w.member, w.state.set_version) for w in workers]
    has_ends = [w.member.ends in schema.KNOWN_ENDS for w in workers]
    matches_of = [[at] for at in range(len(workers))]
    links = []
    # All first tiers, then all second ones: the neighbour's answer is the search hint.
    for depth in range(max((len(w.member.tiers) for w in workers), default=0)):
        for w, own in zip(workers, matches_of, strict=True):
            for tier in w.member.tiers[depth : depth + 1]:
                if tier not in TIERS or w.member.ends:
                    own.append(own[-1])
                    continue
                links.append(own[-1])
                own.append(len(sets))
                sets.append(keys.blocks(w.member.worker_id, w.member.epoch, w.state.set_version, tier))
    guard = [SHORT_STATES] if guarded else []
    ids = [*guard, *(w.member.worker_id for w in workers)] if by_name else [ALL_STATES]
    packed_links = b"".join(link.to_bytes(2, "big") for link in links)
    ends = bytes(has_ends) if any(has_ends) else b""
    all_keys = [keys.states, keys.version, *sets]
    command: list[Argument] = [evalsha, LOOKUP_SHA, len(all_keys), *all_keys, b"\0", packed_links, ends]
    block_sizes = frozenset(w.member.block_size for w, has in zip(workers, has_ends, strict=True) if has)
    return Query(
        tuple(workers),
        _around_hashes([*command, *ids]),
        _around_hashes(command),
        not by_name,
        tuple(links),
        tuple(tuple(indices[1:]) for indices in matches_of),
        block_sizes,
    )


def _around_hashes(command: list[Argument]) -> tuple[bytes, bytes]:
    """Pack a lookup, and return what comes before and after the prompt's hashes."""
    head, tail = pack([command]).split(b"$1\r\n\0", 1)  # the argument of the hashes: no key has a zero byte
    return head, tail

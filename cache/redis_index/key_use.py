"""The use of API keys, counted by Redis on its own clock: one script on the connection of the index.

{prefix:0}:limits:<key>    HASH, for two days after its last use:
                           requests, tokens, day -> what is used, and since when it runs off
                           open:<gateway id>     -> its open requests, and the end of its lease
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Final, NamedTuple

from redis.exceptions import ResponseError

from cache.redis_index.client import RedisDownError, pack
from cache.redis_index.lookup import RedisIndex
from cache.redis_index.schema import brief
from cache.types import GatewayId

LEASE_S: Final = 12.0
"""For this time the open requests of a gateway count that no longer reports them."""

# KEYS: the hash. ARGV: the gateway, its lease in seconds, then four for each limit: see `Charge`. All amounts are
# counted, or none where one of them lacks room. The reply has what was used of each limit before, as it is compared.
# Errors are values: that of a replica would end the connection.
_COUNT: Final = """
local key, own, lease_s = KEYS[1], 'open:' .. ARGV[1], tonumber(ARGV[2])
local time, held, fits, counted, found = redis.call('TIME'), {}, true, {}, {}
local now = time[1] + time[2] / 1e6
local values = redis.pcall('HGETALL', key)
if values.err then return redis.pcall('DEL', key) and false end
for at = 1, #values, 2 do held[values[at]] = values[at + 1] end
local function read(field)
  local amount, at_s = string.match(held[field] or '', '^(%S+) (%S+)$')
  return math.max(0, tonumber(amount) or 0), tonumber(at_s) or now
end
for at = 3, #ARGV, 4 do
  local kind, limit, needed, amount = ARGV[at], tonumber(ARGV[at + 1]), tonumber(ARGV[at + 2]), tonumber(ARGV[at + 3])
  local used, at_s = read(kind)
  if kind == 'streams' then
    local mine, mine_end_s = read(own)
    if needed < 0 or mine_end_s <= now then mine = 0 end
    used = mine
    for field in pairs(held) do
      local open, end_s = read(field)
      if field ~= own and string.sub(field, 1, 5) == 'open:' then
        if end_s > now and end_s <= now + lease_s then used = used + open else redis.pcall('HDEL', key, field) end
      end
    end
    counted[#counted + 1], counted[#counted + 2] = own, math.max(0, mine + amount) .. ' ' .. now + lease_s
  else
    if kind == 'day' then
      if math.floor(at_s / 86400) < math.floor(now / 86400) then used = 0 end
    else
      used = math.max(0, used - math.max(0, now - at_s) * limit / 60)
    end
    if at_s > now then redis.pcall('HSET', key, kind, used .. ' ' .. now) end  -- the clock was set back
    counted[#counted + 1], counted[#counted + 2] = kind, used + amount .. ' ' .. now
  end
  found[#found + 1] = tostring(used)
  if needed > 0 and tonumber(tostring(used)) + needed > limit then fits = false end
end
if fits then
  local done = redis.pcall('HSET', key, unpack(counted))
  if type(done) == 'table' then return false end
  redis.call('EXPIRE', key, 172800)
end
return found
"""


class Charge(NamedTuple):
    """The use of one limit by a request."""

    kind: str
    """requests and tokens run off evenly in a minute, day at midnight (UTC); streams are open."""
    limit: int
    needed: int
    """The room without which nothing is counted; 0: it is used already; -1: the gateway has just `amount` open."""
    amount: int


class KeyUse:
    """Counts the use of keys in Redis for one gateway."""

    def __init__(self, index: RedisIndex, gateway_id: GatewayId) -> None:
        self._shard = index.shards[0]
        self._gateway_id = gateway_id

    async def count(self, key: str, charges: Sequence[Charge]) -> Sequence[float] | None:
        """Count charges if all have room, and return what was used of each limit before.

        Whoever writes to Redis may have made it up. None: no answer within the deadline of a lookup, or an error.
        """
        return None if self._shard.breaker_open else await self._shard.in_time(partial(self._count, key, charges))

    def report(self, key: str, charges: Sequence[Charge]) -> None:
        """Count what is used already, if Redis is there. Nothing waits for it."""
        if not self._shard.breaker_open:
            with suppress(RedisDownError):
                self._shard.client.submit([self._packed(key, charges)], 1)

    async def _count(self, key: str, charges: Sequence[Charge]) -> Sequence[float] | None:
        """Raises RedisDownError."""
        (reply,) = await self._shard.client.submit([self._packed(key, charges)], 1)
        if isinstance(reply, ResponseError):
            self._shard.registry.warn_once(b"limits", f"the use of keys cannot be counted: {brief(reply)}")
        if not isinstance(reply, list) or len(reply) != len(charges):
            return None
        return [float(each) for each in reply]

    def _packed(self, key: str, charges: Sequence[Charge]) -> bytes:
        values = [value for charge in charges for value in charge]
        return pack([("EVAL", _COUNT, 1, self._shard.keys.limits(key), self._gateway_id, LEASE_S, *values)])

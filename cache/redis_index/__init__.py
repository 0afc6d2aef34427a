"""The prefix index in Redis: the only package that talks to it.

lookup.RedisIndex     gateway: one round trip per decision      registry     the workers of one shard as last read
writer.IndexWriter    worker: its own sets and entry            upkeep       dead members and foreign values
client.RedisClient    one pipelined connection, one owner task  connection   unix, TLS, Sentinel, Cluster
script                the read-only script of a lookup          hashes       registry hashes, also with foreign values
key_use.KeyUse        gateway: the use of API keys              schema       keys and records, untrusted when read
"""

from cache.redis_index.client import RedisDownError, diagnose
from cache.redis_index.connection import ClientSettings, WriterSettings, check_url
from cache.redis_index.key_use import LEASE_S, Charge, KeyUse
from cache.redis_index.lookup import ReaderSettings, RedisIndex
from cache.redis_index.registry import RegistryEntry
from cache.redis_index.schema import check_key_part
from cache.redis_index.writer import IndexWriter, SetChange

__all__ = [
    "LEASE_S",
    "Charge",
    "ClientSettings",
    "IndexWriter",
    "KeyUse",
    "ReaderSettings",
    "RedisDownError",
    "RedisIndex",
    "RegistryEntry",
    "SetChange",
    "WriterSettings",
    "check_key_part",
    "check_url",
    "diagnose",
]

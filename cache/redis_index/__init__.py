"""The prefix index in Redis: the only module that talks to it.

reader.RedisIndex    gateway: one round trip per decision        shard, registry        one shard as it reads it
writer.IndexWriter   worker: its own set and entry
link.Link            one pipelined connection, one owner task    endpoint.Endpoint     unix, TLS, Sentinel, Cluster
schema               the keys and records, untrusted when read   script.LOOKUP         the read-only script
diagnosis.diagnose     what a Redis says of itself, once
"""

from cache.redis_index.diagnosis import RedisFacts, diagnose
from cache.redis_index.endpoint import check_url
from cache.redis_index.link import LinkDownError
from cache.redis_index.reader import RedisIndex, ShardHealth
from cache.redis_index.registry import RegistryEntry
from cache.redis_index.schema import check_key_part
from cache.redis_index.shard import ReaderSettings
from cache.redis_index.writer import IndexWriter, WriterSettings

__all__ = [
    "IndexWriter",
    "LinkDownError",
    "ReaderSettings",
    "RedisFacts",
    "RedisIndex",
    "RegistryEntry",
    "ShardHealth",
    "WriterSettings",
    "check_key_part",
    "check_url",
    "diagnose",
]

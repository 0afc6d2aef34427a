"""The paged KV cache: blocks, hashes, allocators, and the index that tells gateways who holds what.

Pure, synchronous and deterministic: no clock, no randomness, no torch, no web framework. The one module that
talks to the outside is `cache.redis_index`.
"""

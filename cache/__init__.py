"""The paged KV cache: blocks, hashes, allocators, and the index by which gateways find a prefix.

Pure, synchronous and deterministic: no clock, no randomness, no torch, no web framework. Only `cache.redis_index`
talks to the outside.
"""

if not __debug__:
    raise RuntimeError(
        "headstart does not run under python -O or PYTHONOPTIMIZE: assertions guard its KV blocks, and without them a "
        "broken invariant would be wrong tokens, not an error; unset PYTHONOPTIMIZE"
    )

"""The paged KV cache: blocks, hashes, allocators, and the index that tells gateways who holds what.

Pure, synchronous and deterministic: no clock, no randomness, no torch, no web framework. The one module that
talks to the outside is `cache.redis_index`.
"""

if not __debug__:
    raise RuntimeError(
        "headstart does not run under python -O or PYTHONOPTIMIZE: assertions guard its KV blocks, and without them a "
        "broken invariant would be wrong tokens, not an error; unset PYTHONOPTIMIZE"
    )

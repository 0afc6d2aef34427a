"""Replays recorded workloads in simulated time through the real router, the real allocator and the in-memory index.

traces    the recorded requests             engine   the workers: a queue, prefills, decodes, a block pool
replay    gateways in front of the workers  rivals   the routing rules of other gateways
"""

"""Replays recorded workloads in simulated time through the real router, the real allocator and the in-memory index.

traces    the recorded requests             engine   the workers: a queue, a prefill at a time, decodes, a block pool
replay    gateways in front of the workers, from the first arrival to the last answer, and what came of it
"""

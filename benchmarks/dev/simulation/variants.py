"""Changes of a workload that make another cell of it: other lengths, rates and tenants. Prompts' sizes stay.

Each takes a workload and returns another; `VARIANTS` has their names in cells.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, count, islice
from typing import Final

from benchmarks.dev.simulation.traces import ROOT, Session, TraceRequest, Workload, make_request, name_block
from cache.hashing import hash_chain

NUM_TENANTS: Final = 20
HOT_TOKENS: Final = 30_000
HOT_PER_S: Final = 50.0
HOT_S: Final = 60.0
HOT_OWN_TOKENS: Final = 256
HOT_ANSWER_TOKENS: Final = 64
NUM_BATCHES: Final = 10
BATCH_SIZE: Final = 64
BURST_S: Final = 20.0
HOT: Final = -1
"""The conversation of a request with the hot prefix."""
_HOT_NUMBER: Final = 1 << 24


def with_answers(workload: Workload, length: Callable[[int], int]) -> Workload:
    """Change the tokens of each answer."""
    return _mapped(workload, lambda request, _: replace(request, num_output_tokens=length(request.num_output_tokens)))


def with_rate(workload: Workload, times: float) -> Workload:
    """Begin `times` as many sessions a second."""
    sessions = [replace(session, start_s=session.start_s / times) for session in workload.sessions]
    return replace(workload, sessions=sessions)


def with_tenants(workload: Workload, seed: int) -> Workload:
    """Give each conversation to one of twenty tenants, with Zipf weights. Tenants share no block.

    The cache's size in blocks follows, since it is a share of the distinct ones.
    """
    ends = list(accumulate(1.0 / rank for rank in range(1, NUM_TENANTS + 1)))

    def tenant_of(conversation: int) -> int:
        return bisect_left(ends, random.Random(f"{seed}/{conversation}").uniform(0.0, ends[-1]))

    tenants = {session.conversation: tenant_of(session.conversation) for session in workload.sessions}
    changed = _mapped(workload, lambda request, session: _of_tenant(request, tenants[session.conversation]))
    num_distinct = len({h for session in changed.sessions for request in session.requests for h in request.hashes})
    return replace(changed, num_distinct_blocks=num_distinct)


def with_one_time_prompts(workload: Workload, seed: int) -> Workload:
    """Add prompts of sixteen blocks that come only once, a fifth of all requests. The cache stays as large."""
    rng = random.Random(seed)
    last_s = max(session.start_s for session in workload.sessions)
    first = 1 + max(request.number for session in workload.sessions for request in session.requests)
    added = []
    for number in range(first, first + workload.num_requests // 4):
        blocks = [name_block("once", number, at) for at in range(16)]
        request = make_request(number, 16 * workload.block_size + 1, 64, blocks)
        added.append(Session(rng.uniform(0.0, last_s), [request], (0.0,), number))
    sessions = sorted([*workload.sessions, *added], key=lambda session: session.start_s)
    return replace(workload, sessions=sessions, num_requests=workload.num_requests + len(added))


def with_batches(workload: Workload, seed: int) -> Workload:
    """Add ten batches of 64 requests at once, which begin with a new prompt of sixteen blocks each."""
    rng = random.Random(f"{seed}/batches")
    last_s = max(session.start_s for session in workload.sessions)
    numbers = count(1 + max(request.number for session in workload.sessions for request in session.requests))
    added = []
    for batch in range(NUM_BATCHES):
        start_s, shared = rng.uniform(0.0, last_s), [name_block("batch", batch, at) for at in range(16)]
        for number in islice(numbers, BATCH_SIZE):
            blocks = [*shared, name_block("batch-own", number, 0)]
            request = make_request(number, len(blocks) * workload.block_size + 1, 64, blocks)
            added.append(Session(start_s, [request], (0.0,), -2 - batch))
    sessions = sorted([*workload.sessions, *added], key=lambda session: session.start_s)
    return replace(workload, sessions=sessions, num_requests=workload.num_requests + len(added))


def with_bursts(workload: Workload) -> Workload:
    """Let what begins within `BURST_S` begin in the first fifth of it."""
    sessions = [
        replace(session, start_s=session.start_s - 0.8 * (session.start_s % BURST_S)) for session in workload.sessions
    ]
    return replace(workload, sessions=sessions)


def with_kept_answers(workload: Workload) -> Workload:
    """Let answers take blocks, which the conversation's next prompt finds. The cache stays as large."""
    following: dict[int, TraceRequest] = {}
    by_conversation: dict[int, TraceRequest] = {}
    for session in workload.sessions:
        for request in session.requests:
            before = by_conversation.get(session.conversation)
            if before is not None:
                following[before.number] = request
            by_conversation[session.conversation] = request

    def kept(request: TraceRequest, _: Session) -> TraceRequest:
        return _with_answer(request, following.get(request.number), workload.block_size)

    return _mapped(workload, kept)


def with_hot_prefix(workload: Workload, seed: int, ramp_s: float = 0.0) -> Workload:
    """Add a prefix that one worker computes, and that a minute later begins 50 requests/s for a minute.

    It happens half-way through. `ramp_s`: the rate grows for this time before. The cache stays as large.
    """
    rng, block_size = random.Random(f"{seed}/hot"), workload.block_size
    begin_s = workload.sessions[len(workload.sessions) // 2].start_s
    shared = [name_block("hot", 0, at) for at in range(HOT_TOKENS // block_size)]
    num_tokens = HOT_TOKENS + HOT_OWN_TOKENS
    times_s, time_s = [begin_s - HOT_S], begin_s - ramp_s
    while (time_s := time_s + rng.expovariate(HOT_PER_S)) < begin_s + HOT_S:
        if rng.random() * ramp_s <= time_s - begin_s + ramp_s:
            times_s.append(time_s)
    added = []
    for number, time_s in enumerate(times_s, _HOT_NUMBER):
        own = [name_block("hot", number, at) for at in range(num_tokens // block_size - len(shared))]
        request = make_request(number, num_tokens, HOT_ANSWER_TOKENS, [*shared, *own])
        added.append(Session(time_s, (request,), (0.0,), HOT))
    sessions = sorted([*workload.sessions, *added], key=lambda session: session.start_s)
    return replace(workload, sessions=sessions, num_requests=workload.num_requests + len(added))


def _with_answer(request: TraceRequest, following: TraceRequest | None, block_size: int) -> TraceRequest:
    """Name the blocks that the answer fills as the next prompt does, if that begins with this one."""
    full = list(request.block_ids[:-1])
    num_more = (request.num_prompt_tokens + request.num_output_tokens) // block_size - len(full)
    if num_more < 1:
        return request
    answer: Sequence[int] = ()
    if following is not None and following.hashes[: len(full)] == request.hashes:
        answer = following.block_ids[:-1][len(full) : len(full) + num_more]
    answer = [*answer, *(name_block("answer", request.number, at) for at in range(len(answer), num_more))]
    block_ids = [*full, answer[0]]
    return replace(request, block_ids=block_ids, chain=hash_chain(ROOT, block_ids, 1), answer_ids=answer[1:])


def _of_tenant(request: TraceRequest, tenant: int) -> TraceRequest:
    if len(request.block_ids) < 2:
        return request
    block_ids = [name_block("tenant", tenant, request.block_ids[0]), *request.block_ids[1:]]
    chain = hash_chain(ROOT, block_ids, 1)
    return replace(request, block_ids=block_ids, chain=chain, hashes=chain[:-1])


def _mapped(workload: Workload, change: Callable[[TraceRequest, Session], TraceRequest]) -> Workload:
    sessions = [
        replace(session, requests=[change(request, session) for request in session.requests])
        for session in workload.sessions
    ]
    return replace(workload, sessions=sessions)


VARIANTS: Final[Mapping[str, Callable[[Workload, int], Workload]]] = {
    "x8": lambda workload, _: with_answers(workload, lambda num_tokens: 8 * num_tokens),
    "rate1.5": lambda workload, _: with_rate(workload, 1.5),
    "tenants": with_tenants,
    "once": with_one_time_prompts,
    "batches": with_batches,
    "bursts": lambda workload, _: with_bursts(workload),
    "kept": lambda workload, _: with_kept_answers(workload),
    "hot": with_hot_prefix,
    "ramp": partial(with_hot_prefix, ramp_s=HOT_S),
}
"""By the name in a cell: each takes a workload and the seed. The order is that in which they apply."""

"""Made workloads: requests that share a long prefix at the same time, which no recording has.

The pool of a worker is given in prefixes: `fan150_n8` has pools of 1.5.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import count
from typing import Final

from benchmarks.dev.simulation.traces import Session, TraceRequest, Workload, make_request, name_block

BLOCK_SIZE: Final = 512
PREFILL_TOKENS_PER_S: Final = 8000.0
NUM_REQUESTS: Final = 2700


class FanOutTrace:
    """Planners with long prompts. With each answer, its children begin at once, with the planner's prompt.

    A planner's children carry its session key, as sub-agents do.
    """

    PREFIX_BLOCKS: Final = 58
    NUM_CHILDREN: Final = 8
    OWN_BLOCKS: Final = (1, 4)
    ANSWER_TOKENS: Final = (16, 128)

    def workload(self, *, num_workers: int, load: float, seed: int) -> Workload:
        """Return families that arrive at random; `load` is the least work, each prefix once, over the fleet's."""
        rng, numbers = random.Random(f"{seed}/fan"), count()
        num_families = NUM_REQUESTS // (1 + self.NUM_CHILDREN)
        own = sum(self.OWN_BLOCKS) / 2 * self.NUM_CHILDREN
        family_s = (self.PREFIX_BLOCKS + own) * BLOCK_SIZE / PREFILL_TOKENS_PER_S
        duration_s = num_families * family_s / (load * num_workers)
        sessions = [self._family(family, rng.uniform(0.0, duration_s), rng, numbers) for family in range(num_families)]
        sessions.sort(key=lambda session: session.start_s)
        num_requests = num_families * (1 + self.NUM_CHILDREN)
        return Workload(sessions, BLOCK_SIZE, num_requests, num_workers * self.PREFIX_BLOCKS, PREFILL_TOKENS_PER_S)

    def _family(self, family: int, start_s: float, rng: random.Random, numbers: Iterator[int]) -> Session:
        prefix = [name_block("fan", family, at) for at in range(self.PREFIX_BLOCKS)]

        def request(num_own: int) -> TraceRequest:
            number = next(numbers)
            own = [name_block("fan-own", number, at) for at in range(num_own)]
            blocks = [*prefix, *own]
            return make_request(number, len(blocks) * BLOCK_SIZE + 1, rng.randint(*self.ANSWER_TOKENS), blocks)

        key, planner = f"family-{family}", request(0)
        children = [
            Session(0.0, [request(rng.randint(*self.OWN_BLOCKS))], (0.0,), family, key)
            for _ in range(self.NUM_CHILDREN)
        ]
        return Session(start_s, [planner], (0.0,), family, key, children)


class DocumentTrace:
    """Long documents, and many short questions about each within half a minute, several at a time."""

    PREFIX_BLOCKS: Final = 48
    NUM_QUESTIONS: Final = 20
    WITHIN_S: Final = 30.0
    ANSWER_TOKENS: Final = (32, 256)

    def workload(self, *, num_workers: int, load: float, seed: int) -> Workload:
        """Return the questions of all documents; `load` is the least work, each document once, over the fleet's."""
        rng, numbers = random.Random(f"{seed}/doc"), count()
        num_documents = NUM_REQUESTS // self.NUM_QUESTIONS
        document_s = (self.PREFIX_BLOCKS + self.NUM_QUESTIONS) * BLOCK_SIZE / PREFILL_TOKENS_PER_S
        duration_s = num_documents * document_s / (load * num_workers)
        sessions = []
        for document in range(num_documents):
            begin_s = rng.uniform(0.0, duration_s)
            blocks = [name_block("doc", document, at) for at in range(self.PREFIX_BLOCKS)]
            for _ in range(self.NUM_QUESTIONS):
                number = next(numbers)
                own = [*blocks, name_block("doc-own", number, 0)]
                request = make_request(number, len(own) * BLOCK_SIZE + 1, rng.randint(*self.ANSWER_TOKENS), own)
                sessions.append(Session(begin_s + rng.uniform(0.0, self.WITHIN_S), [request], (0.0,), document))
        sessions.sort(key=lambda session: session.start_s)
        num_blocks = num_workers * self.PREFIX_BLOCKS
        return Workload(sessions, BLOCK_SIZE, len(sessions), num_blocks, PREFILL_TOKENS_PER_S)

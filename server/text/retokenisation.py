"""Check whether a conversation's next turn brings the last answer back as the tokens that were generated.

    answered:  prompt | answer           record, under the prompt's last full block, the answer's last full block
    continued: prompt | answer' | ...    the same blocks? Then the worker's cache holds the answer, else only the prompt

The text of an answer, tokenised again within the next prompt, need not give the tokens it came from.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from cache.hashing import hash_chain
from cache.types import BlockHash

MAX_ANSWERS: Final = 10_000
MAX_SIBLINGS: Final = 4
"""Different answers kept for one prompt."""


class RetokenisationCheck:
    """Keep the last blocks of recent answers, least recently added out first. Owned by the event loop."""

    def __init__(self) -> None:
        self._answers: OrderedDict[BlockHash, list[tuple[int, BlockHash]]] = OrderedDict()

    def answered(
        self, prompt_ids: Sequence[int], hashes: Sequence[BlockHash], output_ids: Sequence[int], block_size: int
    ) -> None:
        """Record an answer that fills a block; `hashes` are those of the prompt's full blocks."""
        if not hashes:
            return
        blocks = hash_chain(hashes[-1], [*prompt_ids[len(hashes) * block_size :], *output_ids], block_size)
        if not blocks:
            return
        siblings = self._answers.setdefault(hashes[-1], [])
        self._answers.move_to_end(hashes[-1])
        siblings.append((len(blocks), blocks[-1]))
        del siblings[:-MAX_SIBLINGS]
        if len(self._answers) > MAX_ANSWERS:
            self._answers.popitem(last=False)

    def continued(self, hashes: Sequence[BlockHash]) -> bool | None:
        """Return whether a prompt's full blocks hold a recorded answer as generated; None if they continue none."""
        if self._answers.keys().isdisjoint(hashes):
            return None
        for last in range(len(hashes) - 1, -1, -1):
            siblings = self._answers.get(hashes[last])
            if siblings is not None:
                within = [(last + count, block) for count, block in siblings if last + count < len(hashes)]
                return any(hashes[index] == block for index, block in within) if within else None
        return None

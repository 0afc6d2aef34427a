"""Limits of the lists of token ids in a request."""

from __future__ import annotations

from typing import Final

from worker.wire import MAX_BAD_WORD_IDS, SamplingParams

MAX_LISTED_IDS: Final = 1 << 26
"""Ids in a request's lists times its choices: a vocabulary of 262,144 tokens, allowed and biased, for 128 choices."""


def too_many_ids(sampling: SamplingParams, num_choices: int) -> str | None:
    """Return what is wrong with the lengths of a request's lists, by field, or None."""
    lengths = {
        "allowed_token_ids": len(sampling.allowed_token_ids or ()),
        "logit_bias": len(sampling.logit_bias),
        "bad_words": sum(map(len, sampling.bad_words)),
        "stop_token_ids": len(sampling.stop_token_ids),
    }
    if (num_ids := lengths["bad_words"]) > MAX_BAD_WORD_IDS:
        return f"bad_words: {num_ids} tokens in all, and at most {MAX_BAD_WORD_IDS} are taken; leave some out"
    if (num_ids := sum(lengths.values())) * num_choices > MAX_LISTED_IDS:
        names = [name for name in sorted(lengths, key=lengths.__getitem__, reverse=True) if lengths[name]]
        return (
            f"{', '.join(names)}: {num_ids} ids times n = {num_choices} choices exceed {MAX_LISTED_IDS};"
            " shorten the lists or lower n (or best_of)"
        )
    return None

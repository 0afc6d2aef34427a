"""The requests of a schedule episode, drawn at random."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random
from typing import Any

from worker.wire import Grammar

VOCAB = 10
EOS = (3,)
LONGEST = 40
"""Prompt and output of a choice, in tokens, at most."""


@dataclass(frozen=True, slots=True, eq=False)
class Asked:
    """A request, when it comes, and when it is aborted."""

    step: int
    prompt_ids: list[int]
    max_tokens: int
    n: int
    num_resumed: int
    grammar_length: int | None
    abort_after: int | None
    aborts_first_choice: bool
    fields: dict[str, Any]


def draw_request(rng: Random, num_steps: int) -> Asked:
    shared = ([0, 1, 0, 2] * 8)[: rng.choice([0, 0, 6, 12, 20])]
    prompt_ids = [*shared, *(rng.randrange(rng.choice([1, 2, VOCAB])) for _ in range(rng.randint(1, 8)))]
    fields: dict[str, Any] = {"tenant": rng.choice("aab"), "priority": rng.choice([0, 0, 0, 1, -1])}
    fields["temperature"] = rng.choice([0.0, 0.0, 0.8, 1.2])  # it and the next have no meaning in exact arithmetic
    if rng.random() < 0.3:
        fields |= rng.choice([{"top_p": 0.9}, {"top_k": 3}, {"min_p": 0.05}, {"repetition_penalty": 1.1}])
    grammar_length = rng.randint(1, 14) if rng.random() < 0.15 else None
    if grammar_length is not None:
        fields["grammar"] = Grammar("regex", "x")
    if rng.random() < 0.4:
        fields["allowed_token_ids"] = tuple(rng.sample(range(VOCAB), rng.choice([1, 2, 2, 3])))
    if rng.random() < 0.2:
        few = fields.get("allowed_token_ids", range(VOCAB))
        words = [tuple(rng.choice(few) for _ in range(rng.choice([2, 2, 3]))) for _ in range(rng.randint(1, 5))]
        fields["bad_words"] = tuple(words)
    if rng.random() < 0.1:  # the prompt suggests a token that is never sampled, and behind which none is left
        sampled, suggested = rng.sample(range(VOCAB), 2)
        prompt_ids = [*prompt_ids[:20], sampled, sampled, suggested, sampled]
        fields["allowed_token_ids"] = (sampled, suggested)
        fields["bad_words"] = ((suggested, sampled), (suggested, suggested))
        fields["logit_bias"] = ((suggested, -300.0),)
    if rng.random() < 0.15:
        fields["frequency_penalty"] = rng.choice([-1.0, 0.25, 2.0])
    if rng.random() < 0.2:
        fields["stop_token_ids"] = (rng.randrange(VOCAB),)
    if rng.random() < 0.15:
        fields["min_tokens"] = rng.choice([1, 4, 20])
    if rng.random() < 0.1:
        fields["prompt_logprobs"] = 0
    return Asked(
        step=rng.randint(0, num_steps),
        prompt_ids=prompt_ids,
        max_tokens=rng.choice([0, 1, 3, 8, 12, 12]),
        n=rng.choice([1, 1, 1, 1, 2, 3]),
        num_resumed=rng.choice([0, 0, 0, 1, 4]),
        grammar_length=grammar_length,
        abort_after=rng.randint(0, 9) if rng.random() < 0.35 else None,
        aborts_first_choice=rng.random() < 0.3,
        fields=fields,
    )


def draw_plain_requests(rng: Random) -> list[Asked]:
    """Draw requests without rules, whose steps are launched ahead, and perhaps some that repeat themselves."""
    asked = []
    for _ in range(rng.randint(2, 6)):
        fields: dict[str, Any] = {"temperature": rng.choice([0.0, 1.0])}
        if rng.random() < 0.3:
            fields["allowed_token_ids"] = tuple(rng.sample(range(VOCAB), rng.choice([1, 2])))
        prompt_ids = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 6))]
        asked.append(Asked(rng.choice([0, 0, 1]), prompt_ids, 12, 1, 0, None, None, False, fields))
    return asked


def draw_twins(rng: Random, asked: Asked) -> list[Asked]:
    """Draw requests that give the same tokens at the same time. Those that end early come before the others."""
    twins = [asked] * rng.randint(1, 2)
    if rng.random() < 0.6:
        twins[0] = replace(asked, max_tokens=min(asked.max_tokens, rng.randint(1, 8)))
    return twins

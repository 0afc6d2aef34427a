"""What a drawn token means: the frame for the client, and whether its choice ends."""

from __future__ import annotations

from worker.engine.step import Drawn
from worker.sampling.errors import NoTokenLeft
from worker.scheduler.request import Choice, ConstraintError, Request
from worker.wire import Failed, Finished, FinishReason, PromptLogprobs, Tokens


def failed_by(error: Exception) -> Failed:
    """What the client hears of an error that its own request has caused."""
    if isinstance(error, ConstraintError):
        return Failed("invalid_grammar", str(error), retryable=False)
    if isinstance(error, NoTokenLeft):
        return Failed("invalid_request", str(error), retryable=False)
    return Failed("internal_error", "the request cannot be computed", retryable=False)


def end_of(choice: Choice, request: Request, eos_token_ids: frozenset[int]) -> tuple[FinishReason, int | None] | None:
    """Why the choice ends after its last token, and the token that stopped it; None: it goes on.

    `max_tokens` and `min_tokens` count all of the choice's output, a resumed part included.
    """
    sampling = request.wire.sampling
    num_output = len(choice.output_ids)
    if num_output and num_output > sampling.min_tokens:
        token_id = choice.output_ids[-1]
        if token_id in request.stop_token_ids or (not sampling.ignore_eos and token_id in eos_token_ids):
            return "stop", token_id
    if num_output and choice.constraint is not None and choice.constraint.finished:
        return "stop", None
    return ("length", None) if num_output >= sampling.max_tokens else None


def append(choice: Choice, drawn: Drawn) -> Tokens:
    """Add the token to the choice (and to its grammar, which may raise) and say so."""
    if choice.constraint is not None:
        choice.constraint.advance(drawn.token_id)
    choice.output_ids.append(drawn.token_id)
    logprobs = None if drawn.logprobs is None else (drawn.logprobs,)
    return Tokens(choice.index, (drawn.token_id,), logprobs)


def finish(choice: Choice, reason: FinishReason, stop_token_id: int | None = None) -> Finished:
    choice.finished = reason
    return Finished(choice.index, reason, stop_token_id)


def take_prompt_logprobs(request: Request) -> PromptLogprobs | None:
    """The frame with the prompt's logprobs, once, as soon as all are known."""
    known = request.prompt_logprobs
    if known is None or len(known) < len(request.prompt_ids) - 1:
        return None
    request.prompt_logprobs = None
    return PromptLogprobs((None, *known))

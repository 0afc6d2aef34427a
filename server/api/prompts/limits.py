"""The sizes of prompts, one by one and together, and of an answer, in the client's names for the fields."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final

from msgspec.structs import replace

from server.errors import ContextLengthError
from server.event_loop import sliced
from server.models.served_model import ServedModel
from server.request.choice import GenerationSpec
from server.schema.decoding import invalid
from server.schema.fields import ModelFields
from server.text.tokenizer import TooManyTokensError

TEXT_ROOM: Final = 4
"""The limit, in contexts, for a text that will be cut to `truncate_prompt_tokens`."""
MAX_BATCH_TOKENS: Final = 1 << 20
"""The limit for all prompts of a request together, or one context if that is more."""
MAX_COUNTED_TOKENS: Final = 1 << 16
"""The limit for one text to or from ids, or the model's context where that is more."""
Prompt = str | list[int]


@dataclass(frozen=True, slots=True)
class TokenLimits:
    """The bounds that a client sets, and the fields that it sets them with."""

    fields: ModelFields
    prompt_param: str
    max_tokens_param: str = "max_tokens"
    max_tokens: int | None = None
    """None: the model's own limit, or what the context has room for."""
    clamps: bool = False
    """`max_tokens` is cut to what the context has room for; otherwise such a request is an error."""

    async def prompt_tokens(
        self, text: str, model: ServedModel, *, add_bos: bool = False, client_offsets: Sequence[int] | None = None
    ) -> list[int]:
        """Tokenise a prompt, and cut it if the request asks for it. Raises ContextLengthError as soon as it cannot fit.

        `client_offsets`: see `Tokenizer.encode`.
        """
        keep = self.fields.truncate_prompt_tokens
        limit = model.max_model_len if keep is None else TEXT_ROOM * model.max_model_len
        check_text(len(text), model, self.prompt_param)
        try:
            ids = await model.tokenizer.encode(text, add_bos=add_bos, client_offsets=client_offsets, limit=limit)
        except TooManyTokensError as error:
            if keep is None:
                raise self._too_long(model, error.at_least, is_counted=False) from None
            message = f"the prompt has more than {limit} tokens, too many even before truncation"
            raise ContextLengthError(
                message, model.max_model_len, num_tokens=error.at_least, param=self.prompt_param
            ) from None
        return self.truncated(ids)

    def truncated(self, prompt_ids: list[int]) -> list[int]:
        """Apply `truncate_prompt_tokens`: keep the last N tokens, or the first N with truncation_side `right`."""
        keep = self.fields.truncate_prompt_tokens
        if keep is None or len(prompt_ids) <= keep:
            return prompt_ids
        return prompt_ids[:keep] if self.fields.truncation_side == "right" else prompt_ids[-keep:]

    def token_budget(self, model: ServedModel, num_prompt_tokens: int) -> int:
        """Return how many tokens may be generated. Raises InvalidRequestError for an empty prompt, or one too long."""
        if not num_prompt_tokens:
            raise invalid(self.prompt_param, "must not be empty")
        tokens_left = model.max_model_len - num_prompt_tokens
        asked, least = self.max_tokens, self.fields.min_tokens or 0
        if asked is None:
            limit = min(tokens_left, model.bundle.sampling_defaults.max_tokens or tokens_left)
        else:
            limit = min(tokens_left, asked) if self.clamps else asked
        if tokens_left < 1 or limit > tokens_left:
            raise self._too_long(model, num_prompt_tokens)
        if asked is not None and least > asked:
            raise invalid("min_tokens", f"must not be above {self.max_tokens_param}")
        if least > limit:
            is_context = limit == tokens_left
            bound = "the tokens that the context has room for" if is_context else "the model's own limit of an answer"
            raise invalid("min_tokens", f"must not be above {limit}, {bound}")
        return limit

    def _too_long(self, model: ServedModel, num_tokens: int, *, is_counted: bool = True) -> ContextLengthError:
        what, asked = "messages" if self.prompt_param == "messages" else "prompt", self.max_tokens
        message = f"your {what} resulted in {'' if is_counted else 'at least '}{num_tokens} tokens"
        if asked is not None and not self.clamps and is_counted:
            total = num_tokens + asked
            message = f"you requested {total} tokens ({num_tokens} in the {what}, {asked} in the completion)"
        return ContextLengthError(message, model.max_model_len, num_tokens=num_tokens, param=self.prompt_param)


async def encode_any(
    text: str, model: ServedModel, param: str, *, add_bos: bool = False, client_offsets: Sequence[int] | None = None
) -> list[int]:
    """Tokenise a text that may be longer than a context. Raises ContextLengthError."""
    limit = max(MAX_COUNTED_TOKENS, model.max_model_len)
    try:
        return await model.tokenizer.encode(text, add_bos=add_bos, client_offsets=client_offsets, limit=limit)
    except TooManyTokensError as error:
        message = f"{param} has more than the {limit} tokens that are counted in one request: send it in parts"
        raise ContextLengthError(message, model.max_model_len, num_tokens=error.at_least, param=param) from None


def check_text(num_chars: int, model: ServedModel, param: str) -> None:
    """Raises ContextLengthError for a prompt with too many characters to be tokenised."""
    longest, bound = model.prompt_bytes, model.tokenizer.bound
    if longest is None or bound is None or num_chars <= TEXT_ROOM * longest:
        return
    what = "messages hold" if param == "messages" else "prompt has"
    message = f"your {what} {num_chars} characters, and {TEXT_ROOM * longest} at most are read"
    num_tokens = num_chars // bound.token_bytes
    raise ContextLengthError(message, model.max_model_len, num_tokens=num_tokens, param=param)


async def batch_specs(
    shared: GenerationSpec, prompts: Sequence[Prompt], encode: Callable[[Prompt], Awaitable[Sequence[int]]]
) -> AsyncIterator[tuple[GenerationSpec, Prompt, int]]:
    """Yield a spec for each prompt, the prompt, and the tokens of all prompts so far. Rests between them.

    Raises InvalidRequestError for too many tokens.
    """
    limit = max(MAX_BATCH_TOKENS, shared.model.max_model_len)
    num_tokens = 0
    async for index, prompt in sliced(enumerate(prompts)):
        prompt_ids = await encode(prompt)
        num_tokens += len(prompt_ids)
        if num_tokens > limit:
            raise invalid(shared.prompt_param, f"has at most {limit} tokens in all: send several requests")
        id_ = shared.request_id if len(prompts) == 1 else f"{shared.request_id}-{index}"
        spec = replace(shared, request_id=id_, prompt_ids=prompt_ids, first_index=index * len(shared.seeds))
        yield spec, prompt, num_tokens

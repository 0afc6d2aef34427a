"""The sizes of a prompt and of its answer, in the client's names for the fields."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from server.errors import ContextLengthError
from server.models import ServedModel
from server.schema.decoding import invalid
from server.schema.fields import ModelFields
from server.text.tokenizer import TooManyTokensError

TEXT_ROOM: Final = 4
"""The limit, in contexts, for a text that will be cut to `truncate_prompt_tokens`."""


@dataclass(frozen=True, slots=True)
class TokenLimits:
    """The bounds that a client sets, and the fields that it sets them with."""

    fields: ModelFields
    prompt_param: str
    max_tokens_param: str = "max_tokens"
    max_tokens: int | None = None
    """None: what the context has room for."""
    clamps: bool = False
    """`max_tokens` is cut to what the context has room for, and else such a request is an error."""

    async def prompt_tokens(
        self, text: str, model: ServedModel, *, add_bos: bool = False, client_offsets: Sequence[int] | None = None
    ) -> list[int]:
        """Tokenise a prompt, and cut it if the request says so. Raises ContextLengthError as soon as it cannot fit.

        `client_offsets`: see `Tokenizer.encode`.
        """
        keep = self.fields.truncate_prompt_tokens
        room = model.max_model_len if keep is None else TEXT_ROOM * model.max_model_len
        longest = model.prompt_bytes
        if longest is not None and len(text) > TEXT_ROOM * longest:
            message = f"your prompt has {len(text)} characters, and {TEXT_ROOM * longest} at most are read"
            raise ContextLengthError(message, model.max_model_len, param=self.prompt_param)
        try:
            ids = await model.tokenizer.encode(text, add_bos=add_bos, client_offsets=client_offsets, room=room)
        except TooManyTokensError as error:
            if keep is None:
                raise self._too_long(model, f"at least {error.at_least}") from None
            message = f"your prompt, which is to be truncated, resulted in more than {room} tokens"
            raise ContextLengthError(message, model.max_model_len, param=self.prompt_param) from None
        return self.truncated(ids)

    def truncated(self, prompt_ids: list[int]) -> list[int]:
        """Apply `truncate_prompt_tokens`: keep the last so many tokens, or the first with truncation_side `right`."""
        keep = self.fields.truncate_prompt_tokens
        if keep is None or len(prompt_ids) <= keep:
            return prompt_ids
        return prompt_ids[:keep] if self.fields.truncation_side == "right" else prompt_ids[-keep:]

    def token_budget(self, model: ServedModel, num_prompt_tokens: int) -> int:
        """Return how many tokens may be generated. Raises InvalidRequestError for an empty prompt, or one too long."""
        if not num_prompt_tokens:
            raise invalid(self.prompt_param, "must not be empty")
        room = model.max_model_len - num_prompt_tokens
        limit = room if self.max_tokens is None else self.max_tokens
        if self.clamps:
            limit = min(limit, room)
        if room < 1 or limit > room:
            raise self._too_long(model, str(num_prompt_tokens))
        if self.fields.min_tokens is not None and self.fields.min_tokens > limit:
            raise invalid("min_tokens", f"must not be above {self.max_tokens_param}")
        return limit

    def _too_long(self, model: ServedModel, num_prompt_tokens: str) -> ContextLengthError:
        what, asked = "messages" if self.prompt_param == "messages" else "prompt", self.max_tokens
        message = f"your {what} resulted in {num_prompt_tokens} tokens"
        if asked is not None and not self.clamps and num_prompt_tokens.isdecimal():
            total = int(num_prompt_tokens) + asked
            message = f"you requested {total} tokens ({num_prompt_tokens} in the {what}, {asked} in the completion)"
        return ContextLengthError(message, model.max_model_len, param=self.prompt_param)


def in_vocabulary(token_ids: Iterable[int], vocab_size: int, param: str) -> tuple[int, ...]:
    """Return the ids. Raises InvalidRequestError for one that no token has."""
    ids = tuple(token_ids)
    if ids and max(ids) >= vocab_size:
        raise invalid(param, f"has token ids from 0 to {vocab_size - 1}, got {next(i for i in ids if i >= vocab_size)}")
    return ids

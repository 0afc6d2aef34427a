"""POST /tokenize and /detokenize, as vLLM has them: what the model would see, and what ids stand for."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta, Struct

from server.api.chat import client_offsets, render_chat
from server.api.job import encode_json
from server.api.logprobs import token_text
from server.api.sampling import check_vocabulary
from server.auth.identity import Identity
from server.errors import ContextLengthError, InvalidRequestError
from server.models import Models, ServedModel
from server.pace import Steps, paced
from server.schema.decoding import decode_json, inspect
from server.schema.fields import TokenId
from server.schema.types import ChatRequest, read
from server.text.detokenizer import TokenBytes
from server.text.tokenizer import TooManyTokensError


class TokenizeText(Struct, kw_only=True):
    prompt: str
    model: Annotated[str, Meta(max_length=1024)] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Struct, kw_only=True):
    tokens: list[TokenId]
    model: Annotated[str, Meta(max_length=1024)] | None = None


MOST_TOKENS: Final = 1 << 16
"""Of one text to or from ids, or the model's context where that is more."""
_OBJECT: Final = msgspec.json.Decoder(dict[str, Any])
_TEXT: Final = msgspec.json.Decoder(TokenizeText)
_IDS: Final = msgspec.json.Decoder(DetokenizeRequest)


class TextApi:
    def __init__(self, models: Models) -> None:
        self._models = models

    async def tokenize(self, body: bytes, identity: Identity) -> bytes:
        """A prompt, or messages through the chat template. Raises ApiError."""
        inspected = await inspect(body, self._models.max_text_bytes())
        fields = decode_json(body, _OBJECT.decode, inspected=inspected)
        if "messages" in fields:
            if fields.get("model") is None:
                fields["model"] = self._only(None, identity).name
            chat = await read(encode_json(fields), ChatRequest, None, "messages")
            model = self._models.allowed(chat.model, identity)
            rendered = await render_chat(chat, model)
            ids = await self._ids(
                rendered.text, model, param="messages", client_offsets=client_offsets(rendered, model)
            )
            with_texts = bool(fields.get("return_token_strs"))
        else:
            del fields
            request: TokenizeText = decode_json(body, _TEXT.decode, inspected=inspected)
            model = self._only(request.model, identity)
            add_bos = request.add_special_tokens is not False
            ids = await self._ids(request.prompt, model, param="prompt", add_bos=add_bos)
            with_texts = bool(request.return_token_strs)
        answer: dict[str, Any] = {"count": len(ids), "max_model_len": model.max_model_len, "tokens": ids}
        answer["token_strs"] = await paced(_texts(model.tokenizer.token_bytes, ids)) if with_texts else None
        return encode_json(answer)

    async def detokenize(self, body: bytes, identity: Identity) -> bytes:
        """The text of ids, special tokens included. Raises ApiError."""
        inspected = await inspect(body, self._models.max_text_bytes())
        request: DetokenizeRequest = decode_json(body, _IDS.decode, inspected=inspected)
        model = self._only(request.model, identity)
        if len(request.tokens) > (most := _most_tokens(model)):
            message = f"tokens holds {len(request.tokens)} ids, at most {most} are taken: send them in parts."
            raise InvalidRequestError(message, param="tokens")
        check_vocabulary(request.tokens, model, "tokens")
        return encode_json({"prompt": model.tokenizer.decode(request.tokens, skip_special=False)})

    async def _ids(
        self,
        text: str,
        model: ServedModel,
        *,
        param: str,
        add_bos: bool = False,
        client_offsets: Collection[int] | None = None,
    ) -> list[int]:
        """Also of more than a context. Raises ContextLengthError."""
        most = _most_tokens(model)
        try:
            ids = await model.tokenizer.encode(text, add_bos=add_bos, client_offsets=client_offsets, room=most)
        except TooManyTokensError:
            message = f"At most {most} tokens are counted in one request; this text has more: send it in parts."
            raise ContextLengthError(message, param=param) from None
        return ids

    def _only(self, name: str | None, identity: Identity) -> ServedModel:
        """The model named, or the only one there is for this key."""
        if name is not None:
            return self._models.allowed(name, identity)
        named = self._models.names()
        models = {id(model): model for alias, model in named if identity.may_use(alias, model.name)}
        if len(models) != 1:
            raise InvalidRequestError("model is required.", param="model")
        return next(iter(models.values()))


def _most_tokens(model: ServedModel) -> int:
    return max(MOST_TOKENS, model.max_model_len)


def _texts(pieces: TokenBytes, ids: Sequence[int]) -> Steps[list[str]]:
    texts = []
    for number, id_ in enumerate(ids, 1):
        texts.append(token_text(pieces, id_))
        if number % 1024 == 0:
            yield
    return texts

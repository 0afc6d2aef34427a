"""POST /tokenize and /detokenize, as vLLM has them: what the model would see, and what ids stand for."""

from __future__ import annotations

from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta, Struct

from server.api.chat import rendered_ids
from server.api.job import encode_json
from server.api.logprobs import token_text
from server.api.sampling import check_vocabulary
from server.errors import InvalidRequestError
from server.schema.decoding import decode_json
from server.schema.fields import TokenId
from server.schema.types import ChatRequest, decode
from server.text.models import Models, ServedModel
from server.trust.identity import Identity


class TokenizeText(Struct, kw_only=True):
    prompt: str
    model: Annotated[str, Meta(max_length=1024)] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Struct, kw_only=True):
    tokens: list[TokenId]
    model: Annotated[str, Meta(max_length=1024)] | None = None


_OBJECT: Final = msgspec.json.Decoder(dict[str, Any])
_TEXT: Final = msgspec.json.Decoder(TokenizeText)
_IDS: Final = msgspec.json.Decoder(DetokenizeRequest)


class TextApi:
    def __init__(self, models: Models) -> None:
        self._models = models

    async def tokenize(self, body: bytes, identity: Identity) -> bytes:
        """A prompt, or messages through the chat template. Raises ApiError."""
        fields = decode_json(body, _OBJECT.decode)
        if "messages" in fields:
            if fields.get("model") is None:
                fields["model"] = self._only(None, identity).name
            chat = decode(encode_json(fields), ChatRequest)
            model = self._models.allowed(chat.model, identity)
            ids, _ = await rendered_ids(chat, model)
            with_texts = bool(fields.get("return_token_strs"))
        else:
            request: TokenizeText = decode_json(body, _TEXT.decode)
            model = self._only(request.model, identity)
            ids = await model.tokenizer.encode(request.prompt, add_bos=request.add_special_tokens is not False)
            with_texts = bool(request.return_token_strs)
        answer: dict[str, Any] = {"count": len(ids), "max_model_len": model.max_model_len, "tokens": ids}
        answer["token_strs"] = [token_text(model.tokenizer.pieces, id_) for id_ in ids] if with_texts else None
        return encode_json(answer)

    async def detokenize(self, body: bytes, identity: Identity) -> bytes:
        """The text of ids, special tokens included. Raises ApiError."""
        request: DetokenizeRequest = decode_json(body, _IDS.decode)
        model = self._only(request.model, identity)
        check_vocabulary(request.tokens, model, "tokens")
        return encode_json({"prompt": model.tokenizer.decode(request.tokens, skip_special=False)})

    def _only(self, name: str | None, identity: Identity) -> ServedModel:
        """The model named, or the only one there is for this key."""
        if name is not None:
            return self._models.allowed(name, identity)
        named = self._models.names()
        models = {id(model): model for alias, model in named if identity.may_use(alias, model.name)}
        if len(models) != 1:
            raise InvalidRequestError("model is required.", param="model")
        return next(iter(models.values()))

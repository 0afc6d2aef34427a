"""POST /tokenize and /detokenize, and GET /tokenizer_info, as vLLM has them.

They return the tokens that the model would see, the text of tokens, and the tokenizer facts that lm-eval reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response

from server.api.chat import ChatEndpoint
from server.api.endpoint import EndpointServices
from server.api.formatting import encode_json, json_response
from server.api.prompts.limits import MAX_COUNTED_TOKENS, encode_any
from server.api.prompts.params import in_vocabulary
from server.auth.identity import Identity, identity_of
from server.event_loop import sliced
from server.models.served_model import ServedModel
from server.schema.decoding import NULL, fields_of, first_char, invalid, read_json, require_json
from server.schema.fields import TokenId


class TokenizeRequest(Struct, kw_only=True):
    prompt: str | None = None
    messages: msgspec.Raw = NULL
    model: Annotated[str, Meta(max_length=1024)] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Struct, kw_only=True):
    tokens: list[TokenId]
    model: Annotated[str, Meta(max_length=1024)] | None = None


_TEXT: Final = msgspec.json.Decoder(TokenizeRequest)
_OWN: Final = ("prompt", "return_token_strs")
"""Fields that chats do not have."""
_IDS: Final = msgspec.json.Decoder(DetokenizeRequest)


class TokenizeApi:
    def __init__(self, services: EndpointServices, chats: ChatEndpoint) -> None:
        self._services = services
        self._models = services.models
        self._chats = chats

    async def tokenize(self, http_request: Request) -> Response:
        """Tokenise a prompt, or messages through the chat template. Raises ApiError."""
        identity = identity_of(http_request.scope)
        request: TokenizeRequest = await self._read(http_request, _TEXT)
        ids: Sequence[int]
        if first_char(request.messages) != "n":
            if request.prompt is not None:
                raise invalid("prompt", "and messages exclude each other: give one of them")
            name = request.model or self._only_name(identity)
            fields = {key: item for key, item in fields_of(await http_request.body()).items() if key not in _OWN}
            model, ids = await self._chats.prompt_of(encode_json(fields | {"model": name}), identity)
        elif request.prompt is None:
            raise invalid("prompt", "is required")
        else:
            model = self._model(request.model, identity)
            adds, embeds = request.add_special_tokens is not False, model.facts.embedding_size > 0
            ids = await encode_any(request.prompt, model, "prompt", add_bos=adds and not embeds)
            if adds and embeds:  # as its texts get them
                ids = model.tokenizer.with_special_tokens(ids)
        texts = None
        if request.return_token_strs:
            model.check_readable(model.name)
            texts = [model.tokenizer.token(id_) async for id_ in sliced(ids)]
        answer = {"count": len(ids), "max_model_len": model.max_model_len, "tokens": list(ids), "token_strs": texts}
        return json_response(answer)

    async def detokenize(self, http_request: Request) -> Response:
        """Return the text of ids, special tokens included. Raises ApiError."""
        request: DetokenizeRequest = await self._read(http_request, _IDS)
        model = self._model(request.model, identity_of(http_request.scope))
        if len(request.tokens) > (limit := max(MAX_COUNTED_TOKENS, model.max_model_len)):
            raise invalid("tokens", f"holds {len(request.tokens)} ids, at most {limit} are taken: send them in parts")
        in_vocabulary(request.tokens, model.bundle.vocab_size, "tokens")
        return json_response({"prompt": model.tokenizer.decode(request.tokens)})

    async def tokenizer_info(self, http_request: Request) -> Response:
        """Describe a model's tokenizer, that of the query's `model` or of the only one. Raises ApiError."""
        model = self._model(http_request.query_params.get("model"), identity_of(http_request.scope))
        bundle = model.bundle
        has_other_template = await self._services.engine_text.has_other_template(model)
        info = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": bundle.bos_token,
            "eos_token": bundle.eos_token,
            "pad_token": bundle.eos_token,
            "add_bos_token": bundle.add_bos,
            "vocab_size": bundle.vocab_size,
            "model_max_length": model.max_model_len,
            "chat_template": None if has_other_template else bundle.chat_template,
        }
        return json_response(info)

    async def _read(self, http_request: Request, decoder: msgspec.json.Decoder[Any]) -> Any:
        require_json(http_request.scope["headers"])
        return await read_json(await http_request.body(), decoder.decode, self._models.text_limit)

    def _model(self, name: str | None, identity: Identity) -> ServedModel:
        """Return the model named, or the only one that this key may use."""
        return self._models.readable(name or self._only_name(identity), identity)

    def _only_name(self, identity: Identity) -> str:
        """Return a name, for this key, of the only model that it may use. Raises InvalidRequestError."""
        names = {id(model): name for name, model in self._models.names(identity) if not model.adapter}
        if len(names) != 1:
            raise invalid("model", "is required")
        return next(iter(names.values()))

"""Requests that an engine answers without text: embeddings, pooling, classes, scores and ranks.

The gateway places them by load. The engine reads the texts and writes the whole answer.

Source: docs/architecture/engine_text.md.
"""

from __future__ import annotations

from typing import Final

import msgspec

from server.api.endpoint import GenerateEndpoint, PreparedRequest
from server.api.formatting import ResponseFormatter, encode_json, response_id
from server.auth.identity import Identity, allowed_priority, request_salt
from server.errors import InvalidRequestError
from server.models.served_model import ServedModel
from server.request.choice import GenerationSpec
from server.request.engine_ask import EngineAsk
from server.schema.decoding import read_json
from worker.wire import POOLING_PATHS, EngineCall

ENGINE_PATHS: Final = {
    **{path: path for path in POOLING_PATHS},
    **{"/v1/score": "/score", "/v1/rerank": "/rerank", "/v2/rerank": "/rerank"},
}
"""The engine's path, by the path of a request."""
_BYTES_PER_TOKEN: Final = 4  # of usual English, as a guess before the engine has counted


class _Head(msgspec.Struct):
    model: str = ""


head_of: Final = msgspec.json.Decoder(_Head).decode
"""Reads the model's name of a body."""


class PoolingEndpoint(GenerateEndpoint):
    """A route that only engines have."""

    route = "pooling"

    async def prepare(self, body: bytes, identity: Identity) -> PreparedRequest:
        """Refuse the request: no engine of the model has this route."""
        name = (await read_json(body, head_of, self._models.batch_text_limit)).model
        self._known_model(name, identity)
        raise InvalidRequestError(f"The model {name!r:.200} is not served at this route.", param="model")


def prepared_pooling(
    call: EngineCall,
    name: str,
    model: ServedModel,
    identity: Identity,
    formatter: ResponseFormatter,
    *,
    cache_salt: str | None,
    priority: int | None,
    user: str | None,
) -> PreparedRequest:
    """Return the request of a call. Its length is estimated, as the gateway has no token ids of it."""
    id_ = response_id("pool-")
    ask = EngineAsk(
        call=call,
        head={"id": msgspec.Raw(encode_json(id_)), "model": msgspec.Raw(encode_json(name))},
        shows_usage=True,
        has_usage=True,
        shows_ids=False,
        is_resumable=False,
        num_tokens=min(len(call.body) // _BYTES_PER_TOKEN, model.max_model_len - 1),
    )
    spec = GenerationSpec(
        request_id=id_,
        model=model,
        root=model.root(request_salt(identity, cache_salt)),
        prompt_param="input",
        priority=allowed_priority(identity, priority),
        tenant=identity.tag,
        weight=identity.key.weight,
        affinity_key=user,
        ask=ask,
    )
    return PreparedRequest((spec,), formatter, stream=False)

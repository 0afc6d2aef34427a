"""Requests that an engine answers without text: embeddings, pooling, classes, scores and ranks.

The gateway places them by load. The engine reads the texts and writes the whole answer.

Source: docs/architecture/engine_text.md.
"""

from __future__ import annotations

from typing import Final

import msgspec

from server.api.endpoint import GenerateEndpoint, PreparedRequest
from server.auth.identity import Identity
from server.errors import InvalidRequestError
from server.schema.decoding import read_json
from worker.wire import POOLING_PATHS

ENGINE_PATHS: Final = {
    **{path: path for path in POOLING_PATHS},
    **{"/v1/score": "/score", "/v1/rerank": "/rerank", "/v2/rerank": "/rerank"},
}
"""The engine's path, by the path of a request."""


class _Head(msgspec.Struct):
    model: str = ""


head_of: Final = msgspec.json.Decoder(_Head).decode
"""Reads the model's name of a body."""


class PoolingEndpoint(GenerateEndpoint):
    """A route that only engines have."""

    route, prefix = "pooling", "pool-"

    async def prepare(self, body: bytes, identity: Identity) -> PreparedRequest:
        """Refuse the request: no engine of the model has this route."""
        name = (await read_json(body, head_of, self._models.batch_text_limit)).model
        self._known_model(name, identity)
        why = "is not served at this route: an engine with a model for it is needed"
        raise InvalidRequestError(f"The model {name!r:.200} {why}.", param="model")

"""/v1/embeddings: a batch of texts, each a text or token ids, answered with a vector each."""

from __future__ import annotations

import struct
from base64 import b64encode
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any, ClassVar, Final, Literal

from msgspec.structs import replace

from server.api.endpoint import GenerateEndpoint, PreparedRequest
from server.api.formatting import LazyJson, ResponseFormatter, json_parts, response_id
from server.api.prompts.limits import Prompt, batch_specs
from server.api.prompts.params import in_vocabulary, new_spec
from server.auth.identity import Identity
from server.errors import ContextLengthError, InvalidRequestError
from server.models.served_model import ServedModel
from server.request.choice import ChoiceDelta
from server.request.response import ResponseStream
from server.request_context import CURRENT, trace_stage
from server.schema.decoding import invalid
from server.schema.fields import PositiveCount, RequestFields
from server.schema.requests import BodyDecoder, batch_of
from server.text.tokenizer import TooManyTokensError
from worker.wire import Embed

MAX_INPUTS: Final = 2048
"""OpenAI's limit."""


class EmbeddingRequest(RequestFields, kw_only=True):
    text_field: ClassVar = "input"

    input: str | list[Any]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: PositiveCount | None = None


EMBEDDING: Final = BodyDecoder(EmbeddingRequest, "/v1/embeddings")


class EmbeddingEndpoint(GenerateEndpoint):
    route, prefix = "embeddings", "embd-"

    async def prepare(self, body: bytes, identity: Identity) -> PreparedRequest:
        with trace_stage("validate"):
            request = await EMBEDDING.read(body, self._models.batch_text_limit)
            model = self._known_model(request.model, identity)
            CURRENT.get().ignore(request.ignored_hints)
            size = model.facts.embedding_size
            if not size or model.adapter:
                message = f"The model {request.model!r:.200} makes no embeddings: a worker with `--task embed` does."
                raise InvalidRequestError(message, param="model")
            if request.dimensions is not None and request.dimensions > size:
                raise invalid("dimensions", f"is at most {size} for this model")
        with trace_stage("tokenise"):
            inputs = batch_of(request.input, "input")
            if len(inputs) > MAX_INPUTS:
                raise invalid("input", f"has {len(inputs)} texts, at most {MAX_INPUTS} are taken")
            spec = new_spec(response_id(self.prefix), model, identity, request, "input")
            shared = replace(spec, embed=Embed(request.dimensions))
            specs = [spec async for spec, _, _ in batch_specs(shared, inputs, partial(_input_ids, model))]
        return PreparedRequest(tuple(specs), EmbeddingFormatter(request), False)


async def _input_ids(model: ServedModel, item: Prompt) -> Sequence[int]:
    """Return a text's ids with the tokens that the tokenizer puts around it, or the client's ids as they are."""
    max_tokens = model.max_model_len
    try:
        if isinstance(item, str):
            item = model.tokenizer.with_special_tokens(await model.tokenizer.encode(item, limit=max_tokens))
        else:
            in_vocabulary(item, model.bundle.vocab_size, "input")
        if len(item) > max_tokens:
            raise TooManyTokensError(len(item))
    except TooManyTokensError as error:
        message = f"a text of the input resulted in at least {error.at_least} tokens: send it in parts"
        raise ContextLengthError(message, max_tokens, num_tokens=error.at_least, param="input") from None
    return item


class EmbeddingFormatter(ResponseFormatter):
    """The shape of an embedding response, which is never streamed."""

    def __init__(self, request: EmbeddingRequest) -> None:
        self._model = request.model
        self._base64 = request.encoding_format == "base64"

    def body(self, response: ResponseStream, choices: Sequence[ChoiceDelta]) -> Iterable[bytes]:
        vectors: Iterator[Any] = (generation.embedding for generation in response.generations)
        if self._base64:
            vectors = (b64encode(vector).decode() for vector in vectors)
        else:  # float32, little-endian
            vectors = (struct.unpack(f"<{len(vector) // 4}f", vector) for vector in vectors)
        usage = response.usage()
        kept = ("prompt_tokens", "total_tokens", "prompt_tokens_details")
        return json_parts(
            LazyJson(
                object="list",
                data=({"object": "embedding", "index": i, "embedding": each} for i, each in enumerate(vectors)),
                model=self._model,
                usage={name: usage[name] for name in kept},
            )
        )

"""Calls of an engine's own APIs, which write the text of an answer: bodies out, events in.

The gateway decides on the prompt's ids and the salt. Everything else in a body is the client's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from cache.hashing import MediaStart
from worker.adapter.api import EngineLostError, EnginePart, EngineRefusedError
from worker.adapter.http import AnswerTooLongError, EngineServer, refusal_of, refused, understood
from worker.common.capabilities import CHAT, IMAGES
from worker.common.chat_probes import BLACK_PNG
from worker.wire import POOLING_PATHS, EngineCall, GenerateRequest, Rendered

COMPLETIONS: Final = "/v1/completions"
_RENDER_TIMEOUT_S: Final = 60.0  # images have to be read, and prompts of megabytes
_RENDER_TRIES: Final = 3
"""vLLM closes connections after a fault of its own, as for a bomb. What ends three has caused the faults itself."""
_IMAGES: Final = frozenset({"image", "vision_chunk"})
"""vLLM's names for them."""
_ABSENT: Final = frozenset({404, 405, 501})
_CHANGES_PROMPT: Final = ("suffix", "truncate_prompt_tokens", "truncation_side")
LENGTHS: Final = {CHAT: ("max_completion_tokens", "max_tokens"), COMPLETIONS: ("max_tokens",)}


class _Choice(msgspec.Struct):
    index: int = 0
    token_ids: tuple[int, ...] | None = None
    finish_reason: str | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    """The counts at the end of an answer."""

    prompt_tokens_details: _Details | None = None

    def num_cached_tokens(self) -> int | None:
        return None if self.prompt_tokens_details is None else self.prompt_tokens_details.cached_tokens


class _Answer(msgspec.Struct):
    choices: tuple[_Choice, ...] = ()
    usage: _Usage | None = None
    error: Any = None

    @property
    def is_aborted(self) -> bool:
        """Return whether an answer ends because the engine pauses, sleeps or stops."""
        return "abort" in [choice.finish_reason for choice in self.choices]


class _Sampling(msgspec.Struct):
    max_tokens: int | None = None


class _Range(msgspec.Struct):
    offset: int


class _Features(msgspec.Struct):
    mm_hashes: dict[str, list[str]] = {}
    mm_placeholders: dict[str, list[_Range]] = {}

    def starts(self) -> tuple[MediaStart, ...]:
        """Return the images in order. Raises EngineRefusedError for other media."""
        if not self.mm_hashes.keys() <= _IMAGES:
            raise EngineRefusedError(400, "messages: audio and video are not served by this route")
        found = [
            MediaStart(identity, place.offset)
            for kind, identities in self.mm_hashes.items()
            for identity, place in zip(identities, self.mm_placeholders[kind], strict=True)
        ]
        return tuple(sorted(found, key=lambda start: start.position))


class _Prompt(msgspec.Struct):
    token_ids: tuple[int, ...]
    sampling_params: _Sampling
    features: _Features | None = None


_decode_answer: Final = msgspec.json.Decoder(_Answer).decode
decode_body: Final = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_prompts: Final = msgspec.json.Decoder(_Prompt | list[_Prompt]).decode


class TextServer(EngineServer):
    """An engine's server with vLLM's text APIs."""

    _model_name: str | None = None

    async def text_apis(self) -> tuple[str, ...]:
        """Return the APIs that the engine offers, and whether they take images. Those of text also render prompts."""
        found = [path for path in LENGTHS if await self._has(path) and await self._has(f"{path}/render")]
        found += [path for path in POOLING_PATHS if await self._has(path)]
        return (*found, IMAGES) if CHAT in found and await self.takes_images() else tuple(found)

    async def pooling_path(self) -> str | None:
        """Return an API of a model that generates no text. None: it generates text."""
        if not await self._has(CHAT):
            for path in POOLING_PATHS:
                if await self._has(path):
                    return path
        return None

    async def _has(self, path: str) -> bool:
        """Return whether the engine has this API. One that it has refuses the empty body as incomplete."""
        return (await self.call("POST", path, {}))[0] not in _ABSENT

    async def render(self, call: EngineCall) -> Rendered:
        """Return the engine's own ids of a call's prompts. Raises EngineLostError, EngineRefusedError."""
        # Without its processed images, which take megabytes.
        body = await self._with_model(call, "") | {"mm_payload": "none"}
        status, answer = await self.call("POST", f"{call.path}/render", body, _RENDER_TIMEOUT_S, _RENDER_TRIES)
        if status != 200:
            raise refused(status, answer)
        with understood(f"{call.path}/render"):
            found = _decode_prompts(answer)
            prompts = found if isinstance(found, list) else [found]
            media = tuple([() if prompt.features is None else prompt.features.starts() for prompt in prompts])
        lengths = tuple(max(0, prompt.sampling_params.max_tokens or 0) for prompt in prompts)
        return Rendered(tuple(prompt.token_ids for prompt in prompts), lengths, media if any(media) else ())

    async def takes_images(self) -> bool:
        """Return whether the engine renders an image in a chat."""
        part = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{BLACK_PNG}"}}
        body = {"messages": [{"role": "user", "content": [part]}], "max_tokens": 1}
        with contextlib.suppress(EngineRefusedError):
            return bool((await self.render(EngineCall(CHAT, msgspec.json.encode(body)))).media)
        return False

    async def generate(self, request: GenerateRequest, request_id: str, take: Callable[[EnginePart], None]) -> None:
        call = request.call
        assert call is not None
        body = call_body(await self._with_model(call, request.adapter), request, request_id)
        await answer(self, call, body, take)

    async def _with_model(self, call: EngineCall, adapter: str) -> dict[str, Any]:
        """Return the body with a name that the engine has for its model."""
        body: dict[str, Any] = dict(decode_body(call.body))
        if adapter or "model" not in body:
            body["model"] = adapter or (await self.model_name())
        return body

    async def model_name(self) -> str:
        """Return a name that the engine has for its model."""
        if self._model_name is None:
            self._model_name = (await self.model()).name
        return self._model_name


async def answer(
    server: EngineServer, call: EngineCall, body: dict[str, Any], take: Callable[[EnginePart], None]
) -> None:
    """Hand over the answer of the engine's API to a body: its events, or the whole."""
    if call.streams:
        await server.events(call.path, body, lambda data: take(part_of(data)))
        return
    try:
        status, whole = await server.call("POST", call.path, body, None)
    except AnswerTooLongError as error:
        raise EngineRefusedError(400, f"{error}: ask for less at a time") from error
    if status != 200:
        raise refused(status, whole)
    take(part_of(whole))


def part_of(data: bytes) -> EnginePart:
    """Read what the worker itself needs of an event. Raises EngineLostError, EngineRefusedError for an error."""
    try:
        answer = _decode_answer(data)
    except msgspec.MsgspecError as mismatch:
        raise EngineLostError(f"an event of another form: {mismatch}") from mismatch
    error = "it was aborted" if answer.is_aborted else answer.error
    if error is not None:
        code = error.get("code") if isinstance(error, dict) else None
        if isinstance(code, int) and 400 <= code < 500:
            raise refusal_of(code, error)
        raise EngineLostError(f"the engine failed the request: {refusal_of(500, error).message:.1000}")
    return EnginePart(
        data,
        tuple([(choice.index, choice.token_ids) for choice in answer.choices if choice.token_ids]),
        tuple([(choice.index, choice.finish_reason) for choice in answer.choices if choice.finish_reason]),
        None if answer.usage is None else answer.usage.num_cached_tokens(),
    )


def cached_tokens(answer: object) -> int | None:
    """Return the cached tokens that a whole answer reports; None: unknown."""
    with contextlib.suppress(msgspec.ValidationError):
        usage = msgspec.convert(answer, _Answer).usage
        return None if usage is None else usage.num_cached_tokens()
    return None


def call_body(client_body: Mapping[str, Any], request: GenerateRequest, request_id: str) -> dict[str, Any]:
    """Return the engine's body: the client's, with the prompt's ids, the salt, and the gateway's own wishes."""
    call, body = request.call, dict(client_body)
    assert call is not None
    body |= {"cache_salt": request.root.hex(), "request_id": request_id, "priority": request.priority}
    echoes, shows_prompt = (bytes(body.get(name, b"")) == b"true" for name in ("echo", "return_prompt_text"))
    prompt_ids = [*request.prompt_ids, *request.choices[0].output_ids]
    if call.path == CHAT and not (request.media or shows_prompt):  # for these, vLLM renders again
        body["kv_transfer_params"] = {"prompt_token_ids": prompt_ids}
    elif call.path == COMPLETIONS and not echoes:
        body["prompt"] = prompt_ids
        for name in _CHANGES_PROMPT:  # /render has applied them, and the output so far must stay
            body.pop(name, None)
    if call.path in LENGTHS and not echoes:  # an echo of ids has no text
        body["return_token_ids"] = True
    shorten(body, request, call.path)
    return body


def shorten(body: dict[str, Any], request: GenerateRequest, path: str) -> None:
    """Ask for the rest of an answer of which the request brings the first tokens."""
    if num_done := len(request.choices[0].output_ids):
        for name in LENGTHS[path]:
            body.pop(name, None)
        body[LENGTHS[path][0]] = request.sampling.max_tokens - num_done
        if "min_tokens" in body:
            body["min_tokens"] = max(0, msgspec.json.decode(body["min_tokens"]) - num_done)

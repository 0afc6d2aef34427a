"""vLLM's HTTP API: prompts by `.../render`, which --enable-scale-out adds, and answers by its text APIs."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from cache.hashing import MediaStart
from worker.adapter.api import EngineLoad, EngineLostError, EngineRefusedError, EventSource, Take
from worker.adapter.http import EngineServer, samples, understood
from worker.adapter.text import COMPLETIONS, LENGTHS, answer, decode_body, part_of, shorten
from worker.common.capabilities import CHAT, IMAGES
from worker.common.chat_probes import BLACK_PNG
from worker.wire import POOLING_PATHS, EngineCall, GenerateRequest, Rendered, SamplingDefaults, SamplingParams

_RENDER_TIMEOUT_S: Final = 60.0  # images have to be read, and prompts of megabytes
_RENDER_TRIES: Final = 3
"""vLLM closes connections after a fault of its own, as for a bomb. What ends three has caused the faults itself."""
_IMAGES: Final = frozenset({"image", "vision_chunk"})
"""vLLM's names for them."""
_ABSENT: Final = frozenset({404, 405, 501})
_CHANGES_PROMPT: Final = ("suffix", "truncate_prompt_tokens", "truncation_side")
_SLOW_TIMEOUT_S: Final = 30.0
"""For calls that wait for the engine's core or collect much data."""
_PAUSED_TIMEOUT_S: Final = 0.5  # a core that works answers in milliseconds
_KEEPS_LAST_BLOCK: Final = (
    *("draft_model", "extract_hidden_states", "medusa", "mlp_speculator", "ngram", "ngram_gpu", "suffix"),
)
"""Ways to speculate that do not use the model's own hidden states: every matching block is found."""
_CACHE_CONFIG: Final = b"vllm:cache_config_info"
_GAUGES: Final = {
    b"process_start_time_seconds": "started_s",
    b"vllm:num_requests_running": "num_running",
    b"vllm:num_requests_waiting": "num_waiting",
    b"vllm:kv_cache_usage_perc": "usage",
    b"vllm:engine_sleep_state": "num_awake",
}
"""Names of those metrics of which the largest sample counts: processes may report the same one."""
_TOTALS: Final = {
    b"vllm:request_prefill_kv_computed_tokens_sum": "prefill_tokens",
    b"vllm:request_prefill_time_seconds_sum": "prefill_s",
    b"vllm:request_prefill_time_seconds_count": "num_prefills",
    b"vllm:spec_decode_num_drafts_total": "num_drafts",
    b"vllm:generation_tokens_total": "work",
    b"vllm:iteration_tokens_total_sum": "work",
}
"""Names of the sums to which the samples of the others are added."""


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


_decode_prompts: Final = msgspec.json.Decoder(_Prompt | list[_Prompt]).decode


class VllmApi(EngineServer):
    """`worker.adapter.api.EngineApi` over one rank of a vLLM server."""

    kind = "vllm"
    _model_name: str | None = None

    async def version(self) -> str:
        status, answer = await self.call("POST", f"{COMPLETIONS}/render", {})  # it refuses the empty body
        if b"--enable-scale-out" in answer or (status == 404 and await self.pooling_path() is None):
            raise EngineRefusedError(404, f"no {COMPLETIONS}/render: start vLLM 0.32 or newer with --enable-scale-out")
        version = await self.json("GET", "/version")
        with understood("/version"):
            return str(version["version"])

    async def precision(self) -> str:
        try:
            config = (await self._config())["model_config"]
            return f"{config['dtype'].removeprefix('torch.')}/{config['quantization'] or 'dense'}"
        except (KeyError, TypeError, AttributeError):  # a version with another layout
            return ""

    async def drops_last_block(self) -> bool:
        if not (await self.load()).speculates:
            return False
        try:
            config = (await self._config())["speculative_config"]
            return config["method"] not in _KEEPS_LAST_BLOCK and not config.get("disable_eagle_block_drop")
        except (KeyError, TypeError, AttributeError):
            return True

    async def _config(self) -> dict[str, Any]:
        """Return the engine's configuration; empty unless it is in development mode."""
        status, body = await self.call("GET", "/server_info?config_format=json", timeout_s=_SLOW_TIMEOUT_S)
        try:
            config = json.loads(body)["vllm_config"] if status == 200 else {}
        except (ValueError, KeyError, TypeError, RecursionError):
            return {}
        return config if isinstance(config, dict) else {}

    async def load(self) -> EngineLoad:
        """Read the metrics. They also show the place of the rank in its server: headers count from the first one."""
        _, body = await self.call("GET", "/metrics")
        load = parse_load(body, self._rank)
        if self._rank is not None:
            self._headers["x-data-parallel-rank"] = str(load.ranks.index(self._rank))
        return load

    async def is_paused(self) -> bool:
        """Ask the engine's core, in development mode. A core that hangs does not answer."""
        with contextlib.suppress(EngineLostError, EngineRefusedError, AttributeError):
            return bool((await self.json("GET", "/is_paused", timeout_s=_PAUSED_TIMEOUT_S)).get("is_paused"))
        return False

    async def probe(self, prompt_ids: Sequence[int] = (0,), salt: str = "") -> int | None:
        if (path := await self.pooling_path()) is not None:
            await self.call("POST", path, {"model": await self.model_name(), "input": "a"}, None)  # a refusal will do
            return None
        body = {"model": await self.model_name(), "prompt": list(prompt_ids), "max_tokens": 1, "temperature": 0}
        answer = await self.content("POST", COMPLETIONS, body | ({"cache_salt": salt} if salt else {}), timeout_s=None)
        return part_of(answer).num_cached_tokens

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
        answer = await self.content("POST", f"{call.path}/render", body, _RENDER_TIMEOUT_S, _RENDER_TRIES)
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

    async def generate(self, request: GenerateRequest, request_id: str, take: Take) -> None:
        assert request.call is not None
        body = await self._with_model(request.call, request.adapter)
        await answer(self, request.call, call_body(body, request, request_id), take)

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

    async def sampling_defaults(self) -> SamplingDefaults | None:
        """Render a request without parameters. Only a chat has the model's own limit of an answer."""
        ask = {"prompt": [0], "max_tokens": 1}
        chat = {"messages": [{"role": "user", "content": "Hi"}]}
        try:
            resolved = (await self.json("POST", "/v1/completions/render", ask))[0]["sampling_params"]
        except (EngineRefusedError, LookupError, TypeError):  # without --enable-scale-out, or of another form
            return None
        defaults = {name: resolved.get(name) for name in SamplingDefaults.__struct_fields__ if name != "max_tokens"}
        with contextlib.suppress(EngineRefusedError, LookupError, TypeError):  # a model may have no chat template
            answer = await self.json("POST", "/v1/chat/completions/render", chat)
            longest = answer["sampling_params"]["max_tokens"]
            if len(answer["token_ids"]) + longest < (await self.model()).max_model_len:
                defaults["max_tokens"] = longest
        with understood("/v1/completions/render"):
            return msgspec.convert(without_neutral(defaults), SamplingDefaults, strict=False)

    async def event_source(self) -> EventSource | None:
        sources: dict[str, Any] = {}
        with contextlib.suppress(EngineRefusedError):  # a version without this call
            sources = await self.json("GET", "/kv_event_sources") or {}
        with understood("/kv_event_sources"):
            source = sources.get(str(self._rank)) if self._rank is not None else next(iter(sources.values()), None)
            if source is None or source.get("publisher") != "zmq":
                return None
            return EventSource(source["endpoint"], source.get("replay_endpoint"), source.get("topic") or "")

    async def reset(self) -> None:
        try:
            answer = await self.json(
                "POST", "/reset_prefix_cache?reset_running_requests=true", timeout_s=_SLOW_TIMEOUT_S
            )
        except EngineRefusedError as error:
            if error.status != 404:
                raise
            raise EngineRefusedError(404, "no /reset_prefix_cache; start vLLM with VLLM_SERVER_DEV_MODE=1") from error
        if answer is not None and not answer.get("success", True):
            raise EngineRefusedError(409, "its prefix cache is in use; try again")


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


def without_neutral(resolved: dict[str, Any]) -> dict[str, Any]:
    """Leave out parameters that have the API's own default, and limits that do not apply."""
    neutral = SamplingParams(max_tokens=0)
    everything = {"top_k": -1}  # another way to write 0
    return {
        name: value
        for name, value in resolved.items()
        if value not in (None, getattr(neutral, name), everything.get(name))
    }


def parse_load(text: bytes, rank: int | None) -> EngineLoad:
    """Read a rank's counts, by default of the first rank, from the metrics in the Prometheus text format.

    With several API servers, a gauge has no sample before the first request, and no process reports its start.
    Raises EngineLostError for another page, and EngineRefusedError for a rank of another server.
    """
    values: dict[str, float] = {}
    try:
        found = samples(text, {*_GAUGES, *_TOTALS, _CACHE_CONFIG})
        caches = {int(labels.get(b"engine", 0)): labels for name, labels, _ in found if name == _CACHE_CONFIG}
        if not caches:
            raise EngineLostError("/metrics is not vLLM's, or vLLM was started with --disable-log-stats: leave it out")
        ranks = tuple(sorted(caches))
        rank = ranks[0] if rank is None else rank
        if rank not in caches:
            others = ", ".join(map(str, ranks))
            raise EngineRefusedError(400, f"--engine-rank {rank}: this server has the ranks {others}")
        for name, labels, value in found:
            is_other = int(labels.get(b"engine", rank)) != rank or labels.get(b"sleep_state", b"awake") != b"awake"
            if name in _GAUGES and not is_other:
                values[_GAUGES[name]] = max(values.get(_GAUGES[name], 0.0), value)
            elif name in _TOTALS and not is_other:
                values[_TOTALS[name]] = values.get(_TOTALS[name], 0.0) + value
        facts = {
            "num_blocks": int(caches[rank][b"num_gpu_blocks"]) // len(ranks),  # the sum of a server's ranks
            "block_size": int(caches[rank][b"block_size"]),
            "reuses_prefixes": {b"True": True, b"False": False}.get(caches[rank].get(b"enable_prefix_caching", b"")),
            "speculates": "num_drafts" in values,
            "sleeps": values.get("num_awake", 1.0) == 0.0,
            "ranks": ranks,
        }
        return msgspec.convert(values | facts, EngineLoad, strict=False)
    except (KeyError, ValueError) as error:
        raise EngineLostError(f"/metrics is not vLLM's: {error}") from error

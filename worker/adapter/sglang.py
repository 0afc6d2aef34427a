"""SGLang's HTTP API, experimental: chats of one rank of the server. No other route is offered.

`/tokenize` renders the prompt, and the chat API answers for its ids. The cache events carry the salt of their requests
since 0.5.20. An older version is served without a prefix index. Their tokens show whether the engine matches pairs of
tokens, so `drops_last_block` is not asked (`worker.adapter.groups`).
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import msgspec

from worker.adapter.api import EngineLoad, EngineModel, EngineRefusedError, EventSource, Take
from worker.adapter.http import CALL_TIMEOUT_S, EngineServer, samples, understood
from worker.adapter.text import LENGTHS, answer, decode_body, shorten
from worker.common.capabilities import CHAT
from worker.wire import EngineCall, GenerateRequest, Rendered

_COUNTS: Final = {
    b"sglang:num_running_reqs": "num_running",
    b"sglang:num_queue_reqs": "num_waiting",
    b"sglang:token_usage": "usage",
    b"sglang:prompt_tokens_total": "prefill_tokens",
    b"sglang:generation_tokens_total": "generated_tokens",
}
_START_FIELDS: Final = (
    *("context_length", "dtype", "kv_cache_dtype", "max_total_num_tokens", "model_path", "quantization"),
    *("random_seed", "served_model_name", "startup_time", "tokenizer_path", "version"),
)
_SALTED_EVENTS: Final = (0, 5, 20)
"""The first version whose cache events are maps with the salt of their requests."""
_VERSION: Final = re.compile(r"(\d+)\.(\d+)\.(\d+)")

_RENDER_TIMEOUT_S: Final = 60.0  # the prompt may have megabytes
_CONVERSATION: Final = ({"role": "user", "content": "Hi"},)
_REFUSED: Final = frozenset(
    {
        *("add_generation_prompt", "add_special_tokens", "allowed_token_ids", "bad_words", "chat_template"),
        *("documents", "echo", "include_reasoning", "include_stop_str_in_output", "length_penalty"),
        *("logprob_token_ids", "media_io_kwargs", "mm_payload", "prompt_logprobs", "repetition_detection"),
        *("request_id", "return_mm_kwargs", "return_prompt_text", "return_token_offsets", "return_tokens_as_token_ids"),
        *("routed_experts_prompt_start", "session_id", "spaces_between_special_tokens"),
        *("structured_outputs", "truncate_prompt_tokens", "truncation_side", "vllm_xargs", "watermarking"),
    }
)
"""Fields that gateways send on, and that SGLang 0.5.23 would ignore. Its `session_id` addresses a cache."""
_DROPPED: Final = frozenset(
    {
        *("cache_control", "cache_salt", "metadata", "modalities", "model", "prediction", "priority"),
        *("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "return_token_ids"),
        *("safety_identifier", "service_tier", "store", "stream_interval", "thinking_token_budget", "verbosity"),
    }
)
"""Hints that are dropped. A `model` with a colon would name an adapter; SGLang's priorities have the opposite order."""


class SglangApi(EngineServer):
    """`worker.adapter.api.EngineApi` over one rank of an SGLang server."""

    kind = "sglang"

    async def version(self) -> str:
        return str((await self._about("server_info")).get("version", "unknown"))

    async def model(self) -> EngineModel:
        info = await self._about("model_info")
        with understood("/model_info"):
            source = str(info.get("tokenizer_path") or info.get("model_path") or "")
        return replace(await super().model(), source=source)

    async def precision(self) -> str:
        info = await self._about("server_info")
        return f"{info.get('dtype', 'auto')}/{info.get('quantization') or 'dense'}"

    async def load(self) -> EngineLoad:
        info = await self._about("server_info")
        status, page = await self.call("GET", "/metrics")
        rank = b"%d" % (self._rank or 0)
        with understood("/server_info"):
            counts = samples(page, _COUNTS) if status == 200 else ()  # with --enable-metrics
            values = {_COUNTS[name]: value for name, labels, value in counts if labels.get(b"dp_rank", rank) == rank}
            block_size = _block_size(info)
            facts = {
                "started_s": _start_of(info),
                "num_blocks": int(info.get("max_total_num_tokens") or 0) // block_size,
                "block_size": block_size,
                "work": values.get("prefill_tokens", 0.0) + values.get("generated_tokens", 0.0),
                "reuses_prefixes": None if "disable_radix_cache" not in info else not info["disable_radix_cache"],
                "ranks": tuple(range(int(info.get("dp_size") or 1))),
            }
            return msgspec.convert(values | facts, EngineLoad, strict=False)

    async def probe(self, prompt_ids: Sequence[int] = (0,), salt: str = "") -> int | None:
        body: dict[str, Any] = {"input_ids": list(prompt_ids), "sampling_params": {"max_new_tokens": 1}}
        if salt:
            body |= {"cache_salt": salt, "extra_key": salt}
        if self._rank is not None:
            body["data_parallel_rank"] = self._rank
        answer = await self.json("POST", "/generate", body, timeout_s=None)
        with understood("/generate"):
            num_cached = answer["meta_info"].get("cached_tokens")
            return None if num_cached is None else int(num_cached)

    async def event_source(self) -> EventSource | None:
        config, rank = (await self._about("server_info")).get("kv_events_config"), self._rank or 0
        with understood("/server_info"):
            source = json.loads(config) if isinstance(config, str) and config else config
            if not source or source.get("publisher", "zmq") != "zmq" or "endpoint" not in source:
                return None
            replay = source.get("replay_endpoint")
            endpoint = _of_rank(source["endpoint"], rank).replace("0.0.0.0", "*")
            return EventSource(
                endpoint, replay and _of_rank(replay, rank), source.get("topic") or "", source.get("bind")
            )

    async def index_problem(self) -> str | None:
        info = await self._about("server_info")
        version = str(info.get("version", "unknown"))
        if (found := _VERSION.match(version)) is not None and tuple(map(int, found.groups())) < _SALTED_EVENTS:
            first = ".".join(map(str, _SALTED_EVENTS))
            return (
                f"the cache events of SGLang {version} carry no salt, so the blocks of tenants look alike:"
                f" upgrade to {first} or newer"
            )
        with understood("/server_info"):
            pools = [state.get("memory_usage") or {} for state in info.get("internal_states") or ()]
            has_windows = any(pool.get("token_capacity_swa") is not None for pool in pools)
            if info.get("uses_mamba_radix_cache") or has_windows:
                return (
                    "the model keeps windows or states of its KV, and SGLang's cache events do not name them, so the"
                    " positions at which a hit may stop are not known"
                )
        return None

    async def reset(self) -> None:
        status, answer = await self.call("POST", "/flush_cache", timeout_s=30.0)
        if status != 200:
            raise EngineRefusedError(status, f"its cache is in use: {answer[:300].decode(errors='replace')}")

    async def text_apis(self) -> tuple[str, ...]:
        """Return the chat API, if `/tokenize` renders messages. Older versions take texts only."""
        status, _ = await self.call("POST", "/tokenize", {"messages": _CONVERSATION}, CALL_TIMEOUT_S)
        return (CHAT,) if status == 200 else ()

    async def render(self, call: EngineCall) -> Rendered:
        """Return the engine's own ids of a chat. Raises EngineLostError, EngineRefusedError."""
        body = _body_of(call)
        token_ids = tuple(await self.token_ids(body, _RENDER_TIMEOUT_S))
        with understood("/tokenize"):
            asked = [msgspec.json.decode(body[name]) for name in LENGTHS[CHAT] if name in body]
            longest = (await self.model()).max_model_len - len(token_ids)
            max_tokens = next((int(length) for length in asked if length is not None), longest)
        return Rendered((token_ids,), (max(0, max_tokens),), ())

    async def generate(self, request: GenerateRequest, request_id: str, take: Take) -> None:
        assert request.call is not None
        await answer(self, request.call, chat_body(request, request_id, self._rank), take)

    async def _about(self, what: str) -> dict[str, Any]:
        """Return what the server reports. Older versions have these calls as `/get_...` only, and newer ones warn."""
        try:
            info = await self.json("GET", f"/{what}")
        except EngineRefusedError as error:
            if error.status != 404:
                raise
            info = await self.json("GET", f"/get_{what}")
        return info if isinstance(info, dict) else {}


def chat_body(request: GenerateRequest, request_id: str, rank: int | None) -> dict[str, Any]:
    """Return the engine's body: the client's, with the prompt's ids and the salt."""
    call = request.call
    assert call is not None
    body = _body_of(call) | {
        "input_ids": [*request.prompt_ids, *request.choices[0].output_ids],
        "cache_salt": request.root.hex(),
        "rid": request_id,
    }
    if not call.streams:  # SGLang gives no token ids in streams
        body["return_token_ids"] = True
    if request.adapter:
        body["lora_path"] = request.adapter
    if rank is not None:
        body["data_parallel_rank"] = rank
    shorten(body, request, CHAT)
    return body


def _body_of(call: EngineCall) -> dict[str, Any]:
    """Return the client's body. Raises EngineRefusedError for a field that the engine does not have."""
    body: dict[str, Any] = dict(decode_body(call.body))
    for name, value in body.items():
        if name in _REFUSED and bytes(value) != b"null":
            raise EngineRefusedError(400, f"{name}: not sent on to this engine: leave it out", name)
    return {name: value for name, value in body.items() if name not in _REFUSED | _DROPPED}


def _block_size(info: dict[str, Any]) -> int:
    """Return the tokens in a block: pages, or several where context parallelism spreads them."""
    events = info.get("kv_events")
    return int((events.get("block_size") if isinstance(events, dict) else None) or info.get("page_size") or 1)


def _start_of(info: dict[str, Any]) -> float:
    """Return a number that differs for each start: the random seed differs, and in newer versions the start time."""
    fields = {name: info[name] for name in _START_FIELDS if name in info}
    return float(zlib.crc32(json.dumps(fields).encode())) if fields else 0.0


def _of_rank(endpoint: str, rank: int) -> str:
    """Return the endpoint of a data-parallel rank: rank 0's port plus the rank."""
    address, _, port = endpoint.rpartition(":")
    return f"{address}:{int(port) + rank}" if rank and port.isdigit() else endpoint

"""SGLang's native HTTP API: `/generate` with `input_ids`, one rank of the server.

Its cache events carry the salt of their requests since 0.5.20. An older version is served without a prefix index.
"""

from __future__ import annotations

import json
import re
import ssl
import zlib
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import msgspec

from worker.adapter.api import (
    SAME_FIELDS,
    Chunk,
    EngineLoad,
    EngineModel,
    EngineRefusedError,
    EventSource,
    resumed_seed,
    stream_error,
)
from worker.adapter.http import EngineServer, understood
from worker.adapter.sglang_text import SglangTexts
from worker.wire import (
    ChoiceState,
    GenerateRequest,
    SamplingDefaults,
    SamplingParams,
    TokenLogprobs,
)

UNSUPPORTED: Final = (
    *("allowed_token_ids", "bad_words", "grammar:grammar", "grammar:compact", "prompt_logprobs"),
    *("resume:grammar", "resume:penalties", "typical_p"),
)
_SAMPLE: Final = re.compile(
    r"^sglang:(num_running_reqs|num_queue_reqs|token_usage|prompt_tokens_total)(?:\{([^}]*)\})? (\S+)", re.MULTILINE
)
_OF_A_START: Final = (
    *("context_length", "dtype", "kv_cache_dtype", "max_total_num_tokens", "model_path", "quantization"),
    *("random_seed", "served_model_name", "startup_time", "tokenizer_path", "version"),
)
_SALTED_EVENTS: Final = (0, 5, 20)
"""The first version whose cache events are maps with the salt of their requests."""
_VERSION: Final = re.compile(r"(\d+)\.(\d+)\.(\d+)")

_Logprob = tuple[float | None, int, Any]


class _Reason(msgspec.Struct):
    type: str
    matched: int | str | None = None
    message: str | None = None


class _Meta(msgspec.Struct):
    completion_tokens: int = 0
    cached_tokens: int | None = None
    finish_reason: _Reason | None = None
    output_token_logprobs: list[_Logprob] | None = None
    output_top_logprobs: list[list[_Logprob] | None] | None = None


class _Event(msgspec.Struct):
    output_ids: tuple[int, ...] = ()
    meta_info: _Meta = msgspec.field(default_factory=_Meta)
    error: Any = None


class SglangApi(EngineServer):
    """`worker.adapter.api.EngineApi` over one rank of an SGLang server."""

    kind = "sglang"
    unsupported: tuple[str, ...] = UNSUPPORTED

    def __init__(self, url: str, *, key: str = "", rank: int | None = None, tls: ssl.SSLContext | None = None) -> None:
        """`rank`: the data-parallel rank, if the engine has several."""
        super().__init__(url, key, tls, {})
        self._rank = rank
        self._decode = msgspec.json.Decoder(_Event).decode
        texts = SglangTexts(self, rank)
        self.text_apis, self.render, self.text = texts.apis, texts.render, texts.answer

    async def version(self) -> str:
        return str((await self._info()).get("version", "unknown"))

    async def model(self) -> EngineModel:
        info = await self._about("model_info")
        with understood("/model_info"):
            source = str(info.get("tokenizer_path") or info.get("model_path") or "")
        return replace(await super().model(), source=source)

    async def number_format(self) -> str:
        info = await self._info()
        return f"{info.get('dtype', 'auto')}/{info.get('quantization') or 'dense'}"

    async def load(self) -> EngineLoad:
        info = await self._info()
        status, text = await self.call("GET", "/metrics")
        values = {"num_running_reqs": 0.0, "num_queue_reqs": 0.0, "token_usage": 0.0, "prompt_tokens_total": 0.0}
        with understood("/server_info"):
            block_size = _block_size(info)
            if status == 200:  # with --enable-metrics
                for name, labels, value in _SAMPLE.findall(text.decode(errors="replace")):
                    if f'dp_rank="{self._rank or 0}"' in labels or "dp_rank=" not in labels:
                        values[name] = float(value)
            return EngineLoad(
                started_s=_start_of(info),
                num_running=int(values["num_running_reqs"]),
                num_waiting=int(values["num_queue_reqs"]),
                num_blocks=int(info.get("max_total_num_tokens") or 0) // block_size,
                block_size=block_size,
                usage=values["token_usage"],
                prefill_tokens=values["prompt_tokens_total"],
                reuses_prefixes=None if "disable_radix_cache" not in info else not info["disable_radix_cache"],
            )

    async def tokenize_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        return await self.token_ids({"messages": messages})

    async def sampling_defaults(self) -> SamplingDefaults | None:
        return None

    async def media(self) -> tuple[str, ...]:
        return ()

    async def embedding_size(self) -> int:
        return 0

    async def ranks(self) -> tuple[int, ...]:
        info = await self._info()
        with understood("/server_info"):
            return tuple(range(int(info.get("dp_size") or 1)))

    async def event_source(self) -> EventSource | None:
        config, rank = (await self._info()).get("kv_events_config"), self._rank or 0
        with understood("/server_info"):
            source = json.loads(config) if isinstance(config, str) and config else config
            if not source or source.get("publisher", "zmq") != "zmq" or "endpoint" not in source:
                return None
            replay = source.get("replay_endpoint")
            endpoint = _of_rank(source["endpoint"], rank).replace("0.0.0.0", "*")
            return EventSource(
                endpoint, replay and _of_rank(replay, rank), source.get("topic") or "", source.get("bind")
            )

    async def drops_last_block(self) -> bool:
        """Return False: its events show whether it matches pairs of tokens."""
        return False

    async def index_problem(self) -> str | None:
        info = await self._info()
        version = str(info.get("version", "unknown"))
        if (found := _VERSION.match(version)) is not None and tuple(map(int, found.groups())) < _SALTED_EVENTS:
            first = ".".join(map(str, _SALTED_EVENTS))
            return (
                f"the cache events of SGLang {version} carry no salt, so the blocks of tenants look alike:"
                f" upgrade to {first} or newer"
            )
        with understood("/server_info"):
            states = info.get("internal_states") or ()
            if info.get("uses_mamba_radix_cache") or any(_has_windows(state) for state in states):
                return (
                    "the model keeps windows or states of its KV, and SGLang's cache events do not name them, so the"
                    " positions at which a hit may stop are not known"
                )
        return None

    async def reset(self) -> None:
        status, answer = await self.call("POST", "/flush_cache", timeout_s=30.0)
        if status != 200:
            raise EngineRefusedError(status, f"its cache is in use: {answer[:300].decode(errors='replace')}")

    async def generate(self, request: GenerateRequest, choice: ChoiceState, request_id: str) -> AsyncIterator[Chunk]:
        num_seen = 0
        async for data in self.events("/generate", generate_body(request, choice, request_id, self._rank)):
            event = self._decode(data)
            if event.error is not None:
                raise stream_error(event.error)
            chunk, num_seen = _chunk(event, num_seen, request.sampling.logprobs)
            yield chunk
            if event.meta_info.finish_reason is not None:
                yield Chunk(num_cached_tokens=event.meta_info.cached_tokens)

    async def prompt_logprobs(self, request: GenerateRequest) -> Sequence[TokenLogprobs | None]:
        raise EngineRefusedError(400, "prompt_logprobs: not served here")

    async def _info(self) -> dict[str, Any]:
        return await self._about("server_info")

    async def _about(self, what: str) -> dict[str, Any]:
        """Return what the server reports. Older versions have these calls as `/get_...` only, and newer ones warn."""
        try:
            info = await self.json("GET", f"/{what}")
        except EngineRefusedError as error:
            if error.status != 404:
                raise
            info = await self.json("GET", f"/get_{what}")
        return info if isinstance(info, dict) else {}


def generate_body(
    request: GenerateRequest, choice: ChoiceState, request_id: str, rank: int | None = None
) -> dict[str, Any]:
    """Return the body of /generate."""
    body: dict[str, Any] = {
        "rid": request_id,
        "input_ids": [*request.prompt_ids, *choice.output_ids],
        "sampling_params": _sampling(request.sampling, choice),
        # Events carry `cache_salt`. Versions that do not have it separate tenants by `extra_key`.
        "cache_salt": request.root.hex(),
        "extra_key": request.root.hex(),
        "stream": True,
    }
    if request.sampling.logprobs is not None:
        body |= {"return_logprob": True, "logprob_start_len": -1, "top_logprobs_num": request.sampling.logprobs}
    if request.adapter:
        body["lora_path"] = request.adapter
    return body if rank is None else body | {"data_parallel_rank": rank}


def _sampling(sampling: SamplingParams, choice: ChoiceState) -> dict[str, Any]:
    num_done = len(choice.output_ids)
    params: dict[str, Any] = {
        "max_new_tokens": sampling.max_tokens - num_done,
        "min_new_tokens": max(0, sampling.min_tokens - num_done),
        **{name: getattr(sampling, name) for name in SAME_FIELDS},
        "top_k": sampling.top_k or -1,
        "stop_token_ids": list(sampling.stop_token_ids),
        "sampling_seed": resumed_seed(choice),
        "no_stop_trim": True,
    }
    if sampling.logit_bias:
        params["logit_bias"] = {str(token_id): bias for token_id, bias in sampling.logit_bias}
    if (grammar := sampling.grammar) is not None:
        match grammar.kind:
            case "json_schema":
                params["json_schema"] = grammar.text
            case "json_object":
                params["json_schema"] = '{"type":"object"}'
            case "choice":
                params["regex"] = "|".join(f"(?:{re.escape(text)})" for text in json.loads(grammar.text))
            case "regex":
                params["regex"] = grammar.text
    return params


def _chunk(event: _Event, num_seen: int, num_top: int | None) -> tuple[Chunk, int]:
    """Return the new part of an event, and the number of tokens so far. Some versions repeat earlier tokens."""
    meta = event.meta_info
    token_ids = event.output_ids
    if len(token_ids) == meta.completion_tokens:
        token_ids = token_ids[num_seen:]
    num_new = len(token_ids)
    logprobs = None
    if num_top is not None and num_new:
        sampled = (meta.output_token_logprobs or [])[-num_new:]
        top = (meta.output_top_logprobs or [])[-num_new:] or [None] * num_new
        logprobs = tuple(
            TokenLogprobs(found[0] or 0.0, tuple((one[1], one[0] or 0.0) for one in best or ()))
            for found, best in zip(sampled, top, strict=True)
        )
    reason, stop_token_id = meta.finish_reason, None
    if reason is not None and reason.type == "stop":
        stop_token_id = reason.matched if isinstance(reason.matched, int) else (token_ids or (None,))[-1]
    return Chunk(token_ids, logprobs, None if reason is None else reason.type, stop_token_id), num_seen + num_new


def _block_size(info: dict[str, Any]) -> int:
    """Return the tokens in a block: pages, or several where context parallelism spreads them."""
    events = info.get("kv_events")
    return int((events.get("block_size") if isinstance(events, dict) else None) or info.get("page_size") or 1)


def _has_windows(state: dict[str, Any]) -> bool:
    """Return whether a scheduler has a pool for windows."""
    return (state.get("memory_usage") or {}).get("token_capacity_swa") is not None


def _start_of(info: dict[str, Any]) -> float:
    """Return a number for this start of the server. It draws a seed unless one is set; newer versions time it."""
    fields = {name: info[name] for name in _OF_A_START if name in info}
    return float(zlib.crc32(json.dumps(fields).encode())) if fields else 0.0


def _of_rank(endpoint: str, rank: int) -> str:
    """Return the endpoint of a data-parallel rank: rank 0's port plus the rank."""
    address, _, port = endpoint.rpartition(":")
    return f"{address}:{int(port) + rank}" if rank and port.isdigit() else endpoint

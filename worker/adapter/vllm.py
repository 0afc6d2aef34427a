"""vLLM's HTTP API: tokens in and out by `/inference/v1/generate`, which --enable-scale-out adds."""

from __future__ import annotations

import contextlib
import json
import re
import ssl
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from worker.adapter.api import (
    SAME_FIELDS,
    Chunk,
    EngineLoad,
    EngineLostError,
    EngineRefusedError,
    EventSource,
    resumed_seed,
    stream_error,
)
from worker.adapter.http import MAX_ANSWER_BYTES, EngineServer, understood
from worker.adapter.text import TextCalls, Usage
from worker.wire import ChoiceState, GenerateRequest, SamplingDefaults, SamplingParams, TokenLogprobs

TOKEN_API: Final = "/inference/v1/generate"
UNSUPPORTED: Final = ("typical_p", "bad_words", "grammar:grammar", "resume:grammar", "resume:penalties")
"""vLLM takes bad words as texts, and grammars in its own dialect. A resume loses grammars and penalties."""
MAX_LOGPROBS: Final = 20
"""The default of vLLM's --max-logprobs."""
_LOGPROB_BYTES: Final = 256
"""Maximum size of a log probability in JSON, except for long token texts."""
_SLOW_TIMEOUT_S: Final = 30.0
"""For calls that wait for the engine's core or collect much data."""
_KEEPS_LAST_BLOCK: Final = (
    *("draft_model", "extract_hidden_states", "medusa", "mlp_speculator", "ngram", "ngram_gpu", "suffix"),
)
"""Ways to speculate that do not use the model's own hidden states: every matching block is found."""
_SAMPLE: Final = re.compile(rb"^([a-zA-Z_:]+)(?:\{([^}]*)\})? ([^ \n]+)", re.MULTILINE)
_LABEL: Final = re.compile(rb'(\w+)="([^"]*)"')
_WANTED: Final = (
    b"process_start_time_seconds",
    b"vllm:num_requests_running",
    b"vllm:num_requests_waiting",
    b"vllm:kv_cache_usage_perc",
    b"vllm:cache_config_info",
    b"vllm:request_prefill_kv_computed_tokens_sum",
    b"vllm:request_prefill_time_seconds_sum",
    b"vllm:spec_decode_num_drafts_total",
)


class _Logprob(msgspec.Struct):
    token_id: int
    logprob: float
    top_logprobs: tuple[_Logprob, ...] = ()


class _Logprobs(msgspec.Struct):
    content: tuple[_Logprob, ...] | None = None


class _Choice(msgspec.Struct):
    token_ids: tuple[int, ...] | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class _Event(msgspec.Struct):
    choices: tuple[_Choice, ...] = ()
    usage: Usage | None = None
    error: Any = None


class VllmApi(EngineServer):
    """`worker.adapter.api.EngineApi` over one rank of a vLLM server."""

    kind = "vllm"
    unsupported: tuple[str, ...] = UNSUPPORTED

    def __init__(self, url: str, *, key: str = "", rank: int | None = None, tls: ssl.SSLContext | None = None) -> None:
        """`rank`: the data-parallel rank, if the engine has several."""
        super().__init__(url, key, tls, {} if rank is None else {"x-data-parallel-rank": str(rank)})
        self._rank = rank or 0
        self._decode = msgspec.json.Decoder(_Event).decode
        self._calls = calls = TextCalls(self)
        self.text_apis, self.render, self.text = calls.apis, calls.render, calls.answer
        self.embedding_size, self.media = calls.embedding_size, calls.media

    async def version(self) -> str:
        status, _ = await self.call("GET", TOKEN_API)  # 405: it takes POST only
        if status == 404 and not await self._calls.pools():
            raise EngineRefusedError(404, f"no {TOKEN_API}: start vLLM 0.32 or newer with --enable-scale-out")
        answer = await self.json("GET", "/version")
        with understood("/version"):
            return str(answer["version"])

    async def number_format(self) -> str:
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
        _, body = await self.call("GET", "/metrics")
        return parse_load(body, self._rank)

    async def tokenize_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        return await self.token_ids({"messages": messages, "add_generation_prompt": True})

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

    async def ranks(self) -> tuple[int, ...]:
        sources = await self._event_sources()
        with understood("/kv_event_sources"):
            return tuple(sorted(map(int, sources)))

    async def event_source(self) -> EventSource | None:
        sources = await self._event_sources()
        with understood("/kv_event_sources"):
            source = sources.get(str(self._rank))
            if source is None or source.get("publisher") != "zmq":
                return None
            return EventSource(source["endpoint"], source.get("replay_endpoint"), source.get("topic") or "")

    async def _event_sources(self) -> dict[str, Any]:
        """Return each rank's source of events; empty for a version without this call."""
        try:
            return await self.json("GET", "/kv_event_sources") or {}
        except EngineRefusedError:
            return {}

    async def index_problem(self) -> str | None:
        return None

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

    async def generate(self, request: GenerateRequest, choice: ChoiceState, request_id: str) -> AsyncIterator[Chunk]:
        num_logprobs = request.sampling.logprobs
        async for data in self.events(TOKEN_API, token_body(request, choice, request_id)):
            event = self._decode(data)
            if event.error is not None:  # a refusal is an event, too, with status 200
                raise stream_error(event.error)
            for answer in event.choices:
                yield _chunk(answer, num_logprobs)
            if event.usage is not None:
                yield Chunk(num_cached_tokens=event.usage.num_cached_tokens())

    async def prompt_logprobs(self, request: GenerateRequest) -> Sequence[TokenLogprobs | None]:
        num_top = request.sampling.prompt_logprobs or 0
        sampling = {"max_tokens": 1, "prompt_logprobs": min(num_top, MAX_LOGPROBS)}
        body: dict[str, Any] = {"token_ids": list(request.prompt_ids), "cache_salt": request.root.hex()}
        body |= {"sampling_params": sampling} | ({"model": request.adapter} if request.adapter else {})
        max_bytes = len(request.prompt_ids) * (num_top + 2) * _LOGPROB_BYTES + MAX_ANSWER_BYTES
        answer = await self.json("POST", TOKEN_API, body, timeout_s=None, max_bytes=max_bytes)
        positions: list[TokenLogprobs | None] = []
        for token_id, found in zip(request.prompt_ids, answer["prompt_logprobs"], strict=True):
            if found is None:
                positions.append(None)
                continue
            ranked = sorted((entry["logprob"], int(id_)) for id_, entry in found.items())[::-1]
            top = tuple((id_, logprob) for logprob, id_ in ranked[:num_top])
            own = found[str(token_id)]
            positions.append(TokenLogprobs(own["logprob"], top, own.get("rank") or 0))
        return positions


def without_neutral(resolved: dict[str, Any]) -> dict[str, Any]:
    """Leave out parameters that have the API's own default, and limits that do not apply."""
    neutral = SamplingParams(max_tokens=0)
    everything = {"top_k": -1}  # another way to write 0
    return {
        name: value
        for name, value in resolved.items()
        if value not in (None, getattr(neutral, name), everything.get(name))
    }


def token_body(request: GenerateRequest, choice: ChoiceState, request_id: str) -> dict[str, Any]:
    """Return the body of a request for tokens."""
    sampling = _sampling(request.sampling, choice) | {"detokenize": False}
    if request.sampling.logit_bias:
        sampling["logit_bias"] = dict(request.sampling.logit_bias)
    if request.sampling.logprobs is not None:
        sampling["logprobs"] = _asked_logprobs(request.sampling.logprobs)
    body = {
        "request_id": request_id,
        "token_ids": [*request.prompt_ids, *choice.output_ids],
        "sampling_params": sampling,
        "cache_salt": request.root.hex(),
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return body | ({"model": request.adapter} if request.adapter else {})


def _sampling(sampling: SamplingParams, choice: ChoiceState) -> dict[str, Any]:
    """Return the sampling parameters, with the remaining numbers of tokens."""
    num_done = len(choice.output_ids)
    params: dict[str, Any] = {
        "max_tokens": sampling.max_tokens - num_done,
        "min_tokens": max(0, sampling.min_tokens - num_done),
        **{name: getattr(sampling, name) for name in SAME_FIELDS},
        "stop_token_ids": list(sampling.stop_token_ids),
        "seed": resumed_seed(choice),
    }
    if sampling.allowed_token_ids is not None:
        params["allowed_token_ids"] = list(sampling.allowed_token_ids)
    if (grammar := sampling.grammar) is not None:
        match grammar.kind:
            case "json_schema":
                params["structured_outputs"] = {"json": grammar.text}
            case "json_object":
                params["structured_outputs"] = {"json_object": True}
            case "choice":
                params["structured_outputs"] = {"choice": json.loads(grammar.text)}
            case kind:
                params["structured_outputs"] = {kind: grammar.text}
        if grammar.compact:
            params["structured_outputs"]["disable_any_whitespace"] = True
    return params


def _asked_logprobs(num_top: int) -> int:
    """Ask for one more than needed: the sampled token takes a place in the list, even if it is not among the best."""
    return min(num_top + 1, max(num_top, MAX_LOGPROBS)) if num_top else 0


def _chunk(answer: _Choice, num_logprobs: int | None) -> Chunk:
    token_ids = answer.token_ids or ()
    logprobs = None
    if num_logprobs is not None and answer.logprobs is not None and answer.logprobs.content is not None:
        logprobs = tuple(_token_logprobs(entry, num_logprobs) for entry in answer.logprobs.content)
    stop_token_id = None
    if answer.finish_reason == "stop":
        stop_token_id = answer.stop_reason if isinstance(answer.stop_reason, int) else None
        if stop_token_id is None and token_ids:
            stop_token_id = token_ids[-1]  # EOS, which vLLM does not report
    return Chunk(token_ids, logprobs, answer.finish_reason, stop_token_id)


def _token_logprobs(entry: _Logprob, num_top: int) -> TokenLogprobs:
    best = sorted(entry.top_logprobs, key=lambda one: one.logprob, reverse=True)[:num_top]
    return TokenLogprobs(entry.logprob, tuple((one.token_id, one.logprob) for one in best))


def parse_load(text: bytes, rank: int) -> EngineLoad:
    """Read the engine's counts from its metrics in the Prometheus text format."""
    values: dict[bytes, float] = {}
    cache: dict[bytes, bytes] = {}
    try:
        for name, labels, value in _SAMPLE.findall(text):
            if name not in _WANTED:
                continue
            found = dict(_LABEL.findall(labels))
            if found.get(b"engine", b"%d" % rank) != b"%d" % rank:
                continue
            if name == b"vllm:cache_config_info":
                cache = found
            values[name] = values.get(name, 0.0) + float(value)
        num_blocks, block_size = int(cache[b"num_gpu_blocks"]), int(cache[b"block_size"])
        return EngineLoad(
            started_s=values.get(_WANTED[0], 0.0),
            num_running=int(values[_WANTED[1]]),
            num_waiting=int(values[_WANTED[2]]),
            num_blocks=num_blocks,
            block_size=block_size,
            usage=values[_WANTED[3]],
            prefill_tokens=values.get(_WANTED[5], 0.0),
            prefill_s=values.get(_WANTED[6], 0.0),
            reuses_prefixes={b"True": True, b"False": False}.get(cache.get(b"enable_prefix_caching", b"")),
            speculates=_WANTED[7] in values,
        )
    except (KeyError, ValueError, OverflowError) as error:
        raise EngineLostError(f"/metrics is not vLLM's: {error}") from error

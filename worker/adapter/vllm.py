"""vLLM's HTTP API: prompts by `.../render`, which --enable-scale-out adds, and answers by its text APIs."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from worker.adapter.api import EngineLoad, EngineLostError, EngineRefusedError, EventSource
from worker.adapter.http import understood
from worker.adapter.text import COMPLETIONS, TextServer, cached_tokens
from worker.wire import SamplingDefaults, SamplingParams

_SLOW_TIMEOUT_S: Final = 30.0
"""For calls that wait for the engine's core or collect much data."""
_PAUSED_TIMEOUT_S: Final = 0.5  # a core that works answers in milliseconds
_KEEPS_LAST_BLOCK: Final = (
    *("draft_model", "extract_hidden_states", "medusa", "mlp_speculator", "ngram", "ngram_gpu", "suffix"),
)
"""Ways to speculate that do not use the model's own hidden states: every matching block is found."""
_SAMPLE: Final = re.compile(rb"^([a-zA-Z_:]+)(?:\{([^}]*)\})? ([^ \n]+)", re.MULTILINE)
_CACHE_CONFIG: Final = b"vllm:cache_config_info"
_LABEL: Final = re.compile(rb'(\w+)="([^"]*)"')
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


class VllmApi(TextServer):
    """`worker.adapter.api.EngineApi` over one rank of a vLLM server."""

    kind = "vllm"

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
        answer = await self.json("POST", COMPLETIONS, body | ({"cache_salt": salt} if salt else {}), timeout_s=None)
        return cached_tokens(answer)

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
        names = {*_GAUGES, *_TOTALS, _CACHE_CONFIG}
        samples = [(n, dict(_LABEL.findall(labels)), value) for n, labels, value in _SAMPLE.findall(text) if n in names]
        caches = {int(labels.get(b"engine", 0)): labels for name, labels, _ in samples if name == _CACHE_CONFIG}
        if not caches:
            raise EngineLostError("/metrics is not vLLM's, or vLLM was started with --disable-log-stats: leave it out")
        ranks = tuple(sorted(caches))
        rank = ranks[0] if rank is None else rank
        if rank not in caches:
            others = ", ".join(map(str, ranks))
            raise EngineRefusedError(400, f"--engine-rank {rank}: this server has the ranks {others}")
        for name, labels, value in samples:
            is_other = int(labels.get(b"engine", rank)) != rank or labels.get(b"sleep_state", b"awake") != b"awake"
            if is_other or name == _CACHE_CONFIG:
                continue
            if name in _GAUGES:
                values[_GAUGES[name]] = max(values.get(_GAUGES[name], 0.0), float(value))
            else:
                values[_TOTALS[name]] = values.get(_TOTALS[name], 0.0) + float(value)
        return EngineLoad(
            started_s=values.get("started_s", 0.0),
            num_running=int(values.get("num_running", 0)),
            num_waiting=int(values.get("num_waiting", 0)),
            num_blocks=int(caches[rank][b"num_gpu_blocks"]) // len(ranks),  # the sum of a server's ranks
            block_size=int(caches[rank][b"block_size"]),
            usage=values.get("usage", 0.0),
            prefill_tokens=values.get("prefill_tokens", 0.0),
            prefill_s=values.get("prefill_s", 0.0),
            num_prefills=int(values.get("num_prefills", 0)),
            reuses_prefixes={b"True": True, b"False": False}.get(caches[rank].get(b"enable_prefix_caching", b"")),
            speculates="num_drafts" in values,
            work=values.get("work", 0.0),
            sleeps=values.get("num_awake", 1.0) == 0.0,
            ranks=ranks,
        )
    except (KeyError, ValueError, OverflowError) as error:
        raise EngineLostError(f"/metrics is not vLLM's: {error}") from error

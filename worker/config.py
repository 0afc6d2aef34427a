"""The options of a worker."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from typing import Any, Final, Literal

from cache.allocators import PREFIX_CACHES, PrefixCache
from worker.common.command_line import CommandParser, check_web_url
from worker.common.options import (
    ENGINE_TEMPLATE,
    MAX_PORT,
    SharedConfig,
    json_object,
    make_parser,
    num_bytes,
    option,
    option_name,
    template_text,
)
from worker.common.sockets import is_loopback
from worker.scheduler.budget import BatchLimits

logger = logging.getLogger(__name__)

EngineKind = Literal["headstart", "vllm", "sglang"]
Task = Literal["auto", "generate", "embed"]
KV_DISK_BYTES: Final = 10 << 30  # the default of --kv-disk-size
ENGINES: Final[tuple[EngineKind, ...]] = ("headstart", "vllm", "sglang")
TASKS: Final[tuple[Task, ...]] = ("auto", "generate", "embed")
_OWN_OPTIONS: Final = ("model", "task", "kv_disk", "kv_host_memory", "speculate")
"""Options that only the built-in engine has."""

_model = partial(option, "model")
_net = partial(option, "network")
_engine = partial(option, "another engine")
_cache = partial(option, "KV cache")
_batch = partial(option, "batching")


@dataclass(frozen=True, slots=True)
class WorkerConfig(SharedConfig):
    """The options. None: chosen by device and model. Raises ValueError that names the option."""

    model: str = _model("", "a GGUF file, a folder with safetensors, or a Hugging Face id")
    served_model_name: str | None = _model(None, "the name that clients use (default: the model's own)")
    task: Task = _model("auto", "generate or embed texts; auto: by the model's pooling file (auto)", choices=TASKS)  # noqa: RUF009 (a field)
    device: str = _model("auto", "cpu, cuda, cuda:1 ... (default: cuda when there is one)")
    local_rank: int = _model(0, "this worker's number on this machine, from 0 (default 0)", least=0)
    local_world_size: int = _model(1, "workers that share this machine's GPUs and cores (default 1)")
    dtype: str | None = _model(
        None, "float32, bfloat16, float16, or auto: the quickest here (default: float32 on a CPU, else bfloat16)"
    )
    weights: str = _model(
        "auto",
        "dense; packed: 4 and 8 bit GGUF weights stay so; auto: packed where no result changes (auto)",
        choices=("auto", "dense", "packed"),
    )
    deterministic: bool = _model(False, "give the same tokens however requests are batched, on a CPU with a compiler")
    max_model_len: int | None = _model(
        None, "tokens of the longest prompt and answer together (default: the model's)", type=int
    )
    generation_config: str = _model(
        "auto", "sampling defaults: auto: the model's own, none, or a folder's generation_config.json (auto)"
    )
    chat_template: str | None = _model(
        None, "a chat template instead of the model's own (default: none)", "FILE", type=template_text
    )
    default_chat_template_kwargs: dict[str, Any] | None = _model(  # noqa: RUF009 (a field)
        None, "switches of the chat template, which requests may change (default: none)", "JSON", type=json_object
    )
    threads: int | None = _model(None, "CPU threads (default: the cores that it may use)", type=int)
    port: int = _net(8100, "port; 0 takes a free one (default 8100)", least=0, most=MAX_PORT)
    advertise_url: str | None = _net(None, "where gateways reach this worker (default: from --host)", "URL")
    worker_id: str | None = _net(None, "name in the registry, unique among workers (default: host name and port)")
    redis: str | None = option("shared index", None, "the shared index; without it gateways need --workers", "URL")
    max_step_s: float = _net(120.0, "longest step; then the process ends (default 120)", least=0)
    engine: EngineKind = _engine("headstart", "headstart: its own; else the server at --engine-url", choices=ENGINES)  # noqa: RUF009 (a field)
    engine_url: str = _engine("", "the server of the engine, e.g. http://127.0.0.1:8000 or unix:/run/vllm.sock", "URL")
    engine_key_file: str | None = _engine(None, "its API key (default: none)", "FILE")
    engine_ca: str | None = _engine(None, "the authority of its certificate (default: the system's)", "FILE")
    engine_rank: int | None = _engine(None, "its data-parallel rank, where it has several", type=int, least=0)
    events: str = _engine(
        "auto",
        "its cache events: a ZMQ endpoint, auto: the one it reports, or none: no prefix is known (auto)",
        "ENDPOINT",
    )
    events_replay: str | None = _engine(
        None, "where it repeats lost events (default: the address it reports)", "ENDPOINT"
    )
    events_exposed: bool = _engine(False, "allow the events, which hold every prompt, to cross the network")
    hang_s: float = _engine(20.0, "without progress for this time, it hangs if it has requests (default 20)", least=1)
    probe_s: float = _engine(
        5.0, "without progress for this time, it is asked for one token; 0: never (default 5)", least=0
    )
    tokenizer: str | None = _engine(None, "a folder or Hugging Face id (default: what the engine has loaded)")
    revision: str | None = _engine(None, "the model's revision, the same at all its workers (default: from the files)")
    block_size: int = _cache(16, "tokens in a block (default 16)")
    num_blocks: int | None = _cache(
        None, "blocks in the pool, the null block included (default: by --kv-cache-memory)", type=int
    )
    kv_cache_memory: int | None = _cache(
        None, "size of the pool, e.g. 4G (default: from free memory)", "SIZE", type=num_bytes
    )
    kv_host_memory: int = _cache(
        0,
        "pinned host memory that takes blocks before they are evicted, e.g. 32G (default: none)",
        "SIZE",
        type=num_bytes,
        least=0,
    )
    kv_disk: str | None = _cache(
        None, "a folder for blocks on disk, which a restarted worker finds again (default: none)", "DIR"
    )
    kv_disk_size: int = _cache(KV_DISK_BYTES, "size of the blocks on disk (default 10G)", "SIZE", type=num_bytes)
    warm_start_s: float = _cache(
        5.0, "time to fetch chains that peers used last, before the worker registers; 0: none (default 5)", least=0
    )
    prefix_cache: PrefixCache = _cache("hash", "how prefixes are reused (default hash)", choices=PREFIX_CACHES)  # noqa: RUF009 (a field)
    max_num_seqs: int = _batch(64, "choices in a step (default 64)")
    max_num_batched_tokens: int | None = _batch(None, "tokens in a step (default: 512 on a CPU, else 4096)", type=int)
    max_waiting_requests: int = _batch(1024, "requests that may wait (default 1024)")
    max_queued_tokens: int = _batch(1 << 20, "prompt tokens that may wait (default 1M)")
    max_queue_s: float = _batch(120.0, "longest estimated wait; then requests are refused (default 120)", least=0)
    max_batch_prefill_tokens: int | None = _batch(None, "prefill tokens in a step (as TGI)", type=int)
    max_batch_total_tokens: int | None = _batch(None, "prompt + max_tokens of all running (as TGI)", type=int)
    waiting_served_ratio: float | None = _batch(
        None, "admit at least this part of the running number together (as TGI)", least=0, type=float
    )
    max_waiting_tokens: int = _batch(
        20, "steps after which --waiting-served-ratio holds no request back (default 20)", least=0
    )
    speculate: int = _batch(
        0, "draft tokens of a sequence in a step, looked up in its own text (default 0: none)", least=0
    )
    async_scheduling: bool = _batch(
        True, "on a GPU, launch a step only when the tokens of the step before are known", flag="--no-async-scheduling"
    )

    def __post_init__(self) -> None:
        SharedConfig.__post_init__(self)
        if self.local_rank >= self.local_world_size:
            raise ValueError(f"--local-rank must be below --local-world-size, got {self.local_rank}")
        if self.num_blocks is not None and self.kv_cache_memory is not None:
            raise ValueError("--num-blocks and --kv-cache-memory exclude each other: give one")
        if (self.kv_disk is not None or self.kv_host_memory) and self.prefix_cache != "hash":
            raise ValueError("--kv-disk and --kv-host-memory need --prefix-cache hash: others name no blocks")
        given = (name for name in _OWN_OPTIONS if getattr(self, name) not in ("", "auto", None, 0))
        if self.engine != "headstart" and (own := next(given, None)):
            raise ValueError(f"{option_name(own)} is for the built-in engine: use the option of the other engine")
        if self.engine == "headstart" and (self.tokenizer or self.revision):
            raise ValueError("--tokenizer and --revision are for other engines: give --model FOLDER, or ID@REVISION")
        if self.chat_template is not None and self.engine != "headstart":
            raise ValueError(ENGINE_TEMPLATE)
        if (self.engine == "headstart") != (self.engine_url == ""):
            raise ValueError("--engine vllm (or sglang) and --engine-url go together: give both or none")
        for name, url in (("--engine-url", self.engine_url), ("--advertise-url", self.advertise_url)):
            if url and not (url == self.engine_url and url.startswith("unix:/")):
                check_web_url(name, url)

    @property
    def template_kwargs(self) -> bytes:
        """The switches of the template, as JSON."""
        return json.dumps(self.default_chat_template_kwargs or {}).encode()

    def may_exchange(self) -> bool:
        """Return whether blocks and prompts may go to other workers: only with a cluster secret or on loopback."""
        if self.cluster_secret() or is_loopback(self.host):
            return True
        logger.warning("without a cluster secret this worker exchanges nothing with others: anybody could join in")
        return False

    def limits(self, default_tokens: tuple[int, int | None]) -> BatchLimits:
        """Return the scheduler's limits. `default_tokens` are those of `default_step_tokens`."""
        batched_tokens, solo_tokens = default_tokens
        max_num_batched_tokens = self.max_num_batched_tokens or max(batched_tokens, self.max_num_seqs)
        solo = None
        if self.max_num_batched_tokens is None and solo_tokens is not None:
            solo = max(solo_tokens, max_num_batched_tokens)
        options = asdict(self) | {
            "max_num_batched_tokens": max_num_batched_tokens,
            "max_solo_prefill_tokens": solo,
            "await_prefixes": self.prefix_cache != "off",
        }
        return BatchLimits(
            **{limit.name: options[limit.name] for limit in fields(BatchLimits) if limit.name in options}
        )


def default_step_tokens(device: str, dtype: str) -> tuple[int, int | None]:
    """Return the tokens in a step, and in one of a solo prefill (None: the same), for a kind of device."""
    if device != "cpu":
        return 4096, None
    # In float32, 2,048 tokens in one step take as long as four times 512; in bfloat16 larger products are faster.
    return 512, 2048 if dtype == "bfloat16" else None


def parser() -> CommandParser:
    return make_parser(
        WorkerConfig,
        ("model", "another engine", "network", "shared index", "observability", "KV cache", "batching"),
        "worker",
        "One model on one device, for the gateways.",
    )


def parse(argv: Sequence[str]) -> WorkerConfig:
    """Parse the command line. Raises ValueError; argparse itself exits with status 2."""
    return WorkerConfig(**vars(parser().parse_args(argv)))

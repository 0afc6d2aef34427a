"""The options of a worker, from the command line into one frozen dataclass."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Final

from cache.allocators import PREFIX_CACHES, PrefixCache
from cache.redis_index import WriterSettings
from worker.common.options import SharedConfig, add_log_options, add_redis_options, add_tls_options, num_bytes
from worker.scheduler.budget import BatchLimits

_POSITIVE: Final = (
    "threads",
    "block_size",
    "num_blocks",
    "kv_cache_memory",
    "max_model_len",
    "max_waiting_requests",
    "max_queued_tokens",
)


@dataclass(frozen=True, slots=True)
class WorkerConfig(SharedConfig):
    """The options. None: chosen by device and model. Raises ValueError that names the option."""

    model: str = ""
    served_model_name: str | None = None
    port: int = 8100
    advertise_url: str | None = None
    worker_id: str | None = None
    device: str = "auto"
    local_rank: int = 0
    local_world_size: int = 1
    dtype: str | None = None
    weights: str = "dense"
    deterministic: bool = False
    threads: int | None = None
    block_size: int = 16
    num_blocks: int | None = None
    kv_cache_memory: int | None = None
    """Bytes of KV pool, when `num_blocks` is not given."""
    prefix_cache: PrefixCache = "hash"
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int | None = None
    max_solo_prefill_tokens: int | None = None
    max_waiting_requests: int = 1024
    max_queued_tokens: int = 1 << 20
    max_queue_s: float = 120.0
    aging_s: float = 30.0
    watermark: float = 0.01
    max_batch_prefill_tokens: int | None = None
    max_batch_total_tokens: int | None = None
    waiting_served_ratio: float | None = None
    max_waiting_tokens: int = 20
    async_scheduling: bool = True
    max_step_s: float = 120.0

    def __post_init__(self) -> None:
        SharedConfig.__post_init__(self)
        for name in _POSITIVE:
            self.require(name, 1)
        for name in ("max_step_s", "aging_s", "max_queue_s"):
            self.require(name, 0)
        if not 0 <= self.local_rank < self.local_world_size:
            raise ValueError(f"--local-rank must be below --local-world-size, got {self.local_rank}")
        if self.num_blocks is not None and self.kv_cache_memory is not None:
            raise ValueError("--num-blocks and --kv-cache-memory exclude each other: give one")
        if self.prefix_cache not in PREFIX_CACHES:
            raise ValueError(f"--prefix-cache must be one of {', '.join(PREFIX_CACHES)}, got {self.prefix_cache!r}")

    def limits(self, max_model_len: int, default_tokens: tuple[int, int | None]) -> BatchLimits:
        """Return the scheduler's limits. `default_tokens` are those of `default_step_tokens`."""
        batched_tokens, solo_tokens = default_tokens
        max_num_batched_tokens = self.max_num_batched_tokens or max(batched_tokens, self.max_num_seqs)
        solo = self.max_solo_prefill_tokens
        if solo is None and self.max_num_batched_tokens is None and solo_tokens is not None:
            solo = max(solo_tokens, max_num_batched_tokens)
        return BatchLimits(
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_solo_prefill_tokens=solo,
            max_model_len=max_model_len,
            aging_s=self.aging_s,
            watermark=self.watermark,
            await_prefixes=self.prefix_cache != "off",
            max_batch_prefill_tokens=self.max_batch_prefill_tokens,
            max_batch_total_tokens=self.max_batch_total_tokens,
            waiting_served_ratio=self.waiting_served_ratio,
            max_waiting_tokens=self.max_waiting_tokens,
        )

    def writer_settings(self) -> WriterSettings:
        """Return how to write to the shared index. Raises ValueError for a file that cannot be read."""
        return WriterSettings(
            prefix=self.redis_prefix,
            num_shards=self.redis_shards,
            username=self.redis_username,
            password=self.redis_password(),
            cluster_secret=self.cluster_secret(),
        )


def default_step_tokens(device: str, dtype: str) -> tuple[int, int | None]:
    """Return the tokens in a step, and in one of a solo prefill (None: the same), for a kind of device."""
    if device != "cpu":
        return 4096, None
    # In float32, 2,048 tokens in one step take as long as four times 512; in bfloat16 larger products are faster.
    return 512, 2048 if dtype == "bfloat16" else None


def parser() -> argparse.ArgumentParser:
    """Build the parser. Every option sets the field of WorkerConfig that has its name, and has its default."""
    p = argparse.ArgumentParser(
        prog="headstart worker", description="One model on one device, for the gateways.", allow_abbrev=False
    )
    model = p.add_argument_group("model")
    model.add_argument("--model", help="a GGUF file, a folder with safetensors, or a Hugging Face id")
    model.add_argument("--served-model-name", help="the name that clients use (default: the model's own)")
    model.add_argument("--device", help="cpu, cuda, cuda:1 ... (default: cuda when there is one)")
    model.add_argument("--local-rank", type=int, help="this worker's number on this machine, from 0 (default 0)")
    model.add_argument("--local-world-size", type=int, help="workers that share this machine's GPUs (default 1)")
    model.add_argument("--dtype", help="float32, bfloat16 or float16 (default: float32 on a CPU, else bfloat16)")
    model.add_argument("--weights", help="dense, or packed: 4 and 8 bit GGUF decodes packed")
    model.add_argument(
        "--deterministic", action="store_true", help="the same tokens however requests are batched, in bfloat16 too"
    )
    model.add_argument("--max-model-len", type=int, help="longest prompt and answer together (default: the model's)")
    model.add_argument("--threads", type=int, help="CPU threads (default: torch's)")

    net = p.add_argument_group("network")
    net.add_argument("--host", help="address to listen on (default 127.0.0.1)")
    net.add_argument("--port", type=int, help="port; 0 takes a free one (default 8100)")
    net.add_argument("--advertise-url", metavar="URL", help="where gateways reach this worker (default: from --host)")
    add_tls_options(net, "for gateways")
    net.add_argument("--worker-id", help="name in the registry, unique among workers (default: host name and port)")
    add_redis_options(net, "the shared index; without it gateways need --workers")
    net.add_argument("--drain-grace-s", type=float, help="time for open requests (default 30)")
    net.add_argument("--max-step-s", type=float, help="a longer step is a hang (default 120)")

    watch = p.add_argument_group("observability")
    add_log_options(watch)

    cache = p.add_argument_group("KV cache")
    cache.add_argument("--block-size", type=int, help="tokens in a block (default 16)")
    cache.add_argument("--num-blocks", type=int, help="blocks of the pool, the null block included")
    cache.add_argument("--kv-cache-memory", type=num_bytes, metavar="SIZE", help="e.g. 4G (default: from free memory)")
    cache.add_argument("--prefix-cache", choices=PREFIX_CACHES)

    batch = p.add_argument_group("batching")
    batch.add_argument("--max-num-seqs", type=int, help="choices in a step (64)")
    batch.add_argument("--max-num-batched-tokens", type=int, help="tokens in a step (default: 512 on a CPU, else 4096)")
    batch.add_argument(
        "--max-solo-prefill-tokens",
        type=int,
        help="tokens in a step of one prefill while no other request waits (default: 2048 on a CPU in bfloat16)",
    )
    batch.add_argument("--max-waiting-requests", type=int, help="requests that may wait (1024)")
    batch.add_argument("--max-queued-tokens", type=int, help="prompt tokens that may wait (1M)")
    batch.add_argument("--max-queue-s", type=float, help="refuse beyond this wait (120)")
    batch.add_argument("--aging-s", type=float, help="waiting worth one priority (30)")
    batch.add_argument("--watermark", type=float, help="part of the pool kept free (0.01)")
    batch.add_argument("--max-batch-prefill-tokens", type=int, help="prefill tokens in a step (as TGI)")
    batch.add_argument("--max-batch-total-tokens", type=int, help="prompt + max_tokens of all running (as TGI)")
    batch.add_argument("--waiting-served-ratio", type=float, help="admit so many, relative to the running (as TGI)")
    batch.add_argument("--max-waiting-tokens", type=int, help="... or after so many steps (20)")
    batch.add_argument(
        "--no-async-scheduling",
        dest="async_scheduling",
        action="store_false",
        help="on a GPU, launch the next decodes only when the tokens of the step before are known",
    )
    p.set_defaults(**asdict(WorkerConfig()))
    return p


def parse(argv: Sequence[str]) -> WorkerConfig:
    """Parse the command line. Raises ValueError; argparse itself exits with status 2."""
    return WorkerConfig(**vars(parser().parse_args(argv)))

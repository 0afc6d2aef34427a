"""The options of a worker, from the command line into one frozen dataclass."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Final

from cache.allocators.factory import PREFIX_CACHES, PrefixCache
from cache.redis_index import WriterSettings, check_key_part, check_url
from worker.common.logs import LOG_FORMATS, LogFormat
from worker.common.tls import ServerCertificate
from worker.scheduler.budget import BatchLimits

_UNITS: Final = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_SECRET_VARIABLE: Final = "HEADSTART_CLUSTER_SECRET"


@dataclass(frozen=True, slots=True)
class Place:
    """The `index`-th of `count` workers that one machine runs."""

    index: int
    count: int

    def gpu(self, num_gpus: int) -> int:
        """The GPU of this worker, when they are dealt out in turn."""
        return self.index % num_gpus

    def num_on(self, gpu: int, num_gpus: int) -> int:
        """How many workers that GPU has."""
        return len(range(gpu, self.count, num_gpus))


ALONE: Final = Place(0, 1)


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """None: chosen when the device and the model are known. Raises ValueError that names the option."""

    model: str = ""
    served_model_name: str | None = None
    host: str = "127.0.0.1"
    port: int = 8100
    advertise_url: str | None = None
    worker_id: str | None = None
    redis: str | None = None
    redis_prefix: str = "headstart"
    redis_shards: int = 1
    redis_username: str | None = None
    redis_password_file: str | None = None
    cluster_secret_file: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    device: str = "auto"
    place: Place = ALONE
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
    launch_ahead: bool = True
    drain_grace_s: float = 30.0
    max_step_s: float = 120.0
    log_level: str = "info"
    log_format: LogFormat = "text"
    otlp_endpoint: str | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.port < 1 << 16:
            raise ValueError(f"--port must be 0 to 65535, got {self.port}")
        for name in ("threads", "block_size", "num_blocks", "kv_cache_memory", "max_model_len", "redis_shards"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
        for name in ("drain_grace_s", "max_step_s", "aging_s", "max_queue_s"):
            if (value := getattr(self, name)) < 0.0:
                raise ValueError(f"--{name.replace('_', '-')} must not be negative, got {value}")
        if self.num_blocks is not None and self.kv_cache_memory is not None:
            raise ValueError("--num-blocks and --kv-cache-memory exclude each other: give one")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("--tls-cert and --tls-key go together: give both or none")
        if self.redis is not None:
            check_url("--redis", self.redis)
            check_key_part("--redis-prefix", self.redis_prefix)
        if self.prefix_cache not in PREFIX_CACHES:
            raise ValueError(f"--prefix-cache must be one of {', '.join(PREFIX_CACHES)}, got {self.prefix_cache!r}")

    def limits(
        self, *, max_model_len: int, default_batched_tokens: int, default_solo_prefill_tokens: int | None = None
    ) -> BatchLimits:
        """The scheduler's limits, once the length of the context is known."""
        max_num_batched_tokens = self.max_num_batched_tokens or max(default_batched_tokens, self.max_num_seqs)
        solo = self.max_solo_prefill_tokens
        if solo is None and self.max_num_batched_tokens is None and default_solo_prefill_tokens is not None:
            solo = max(default_solo_prefill_tokens, max_num_batched_tokens)
        return BatchLimits(
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_solo_prefill_tokens=solo,
            max_model_len=max_model_len,
            max_waiting_requests=self.max_waiting_requests,
            max_queued_tokens=self.max_queued_tokens,
            max_queue_s=self.max_queue_s,
            aging_s=self.aging_s,
            watermark=self.watermark,
            await_prefixes=self.prefix_cache != "off",
            max_batch_prefill_tokens=self.max_batch_prefill_tokens,
            max_batch_total_tokens=self.max_batch_total_tokens,
            waiting_served_ratio=self.waiting_served_ratio,
            max_waiting_tokens=self.max_waiting_tokens,
        )

    def writer_settings(self) -> WriterSettings:
        """How the worker writes to the shared index. Raises ValueError for a file that cannot be read."""
        return WriterSettings(
            prefix=self.redis_prefix,
            num_shards=self.redis_shards,
            username=self.redis_username,
            password=self._redis_password(),
            cluster_secret=self.cluster_secret(),
        )

    def _redis_password(self) -> str | None:
        """None: the URL's own, if any."""
        if self.redis_password_file is None:
            return None
        try:
            return Path(self.redis_password_file).read_text().strip()
        except OSError as error:
            raise ValueError(f"--redis-password-file: {error}") from error

    def certificate(self) -> ServerCertificate | None:
        """What is shown to gateways. Raises ValueError."""
        if self.tls_cert is None or self.tls_key is None:
            return None
        return ServerCertificate(self.tls_cert, self.tls_key)

    def cluster_secret(self) -> bytes:
        """From --cluster-secret-file or the environment; empty: none."""
        if self.cluster_secret_file is not None:
            return Path(self.cluster_secret_file).read_bytes().strip()
        return os.environ.get(_SECRET_VARIABLE, "").encode()


def default_step_tokens(device: str, dtype: str) -> tuple[int, int | None]:
    """Tokens in a step, and in one of a solo prefill (None: no more than that), for a kind of device."""
    if device != "cpu":
        return 4096, None
    # In float32, 2,048 tokens in one step take as long as four times 512; in bfloat16 larger products are faster.
    return 512, 2048 if dtype == "bfloat16" else None


def place(text: str) -> Place:
    """`0/2`."""
    match = re.fullmatch(r"(\d{1,4})/(\d{1,4})", text)
    if match is None or int(match[1]) >= int(match[2]):
        raise argparse.ArgumentTypeError(f"a place such as 0/2 or 1/2 is needed, got {text!r}")
    return Place(int(match[1]), int(match[2]))


def num_bytes(text: str) -> int:
    """`512M`, `4G`, `1.5G` or a plain number."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if match is None:
        raise argparse.ArgumentTypeError(f"a size such as 512M or 4G is needed, got {text!r}")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="headstart worker", description="One model on one device, for the gateways.", allow_abbrev=False
    )
    defaults = WorkerConfig()
    model = p.add_argument_group("model")
    model.add_argument("--model", default="", help="a GGUF file, a folder with safetensors, or a Hugging Face id")
    model.add_argument("--served-model-name", help="the name that clients use (default: the model's own)")
    model.add_argument("--device", default="auto", help="cpu, cuda, cuda:1 ... (default: cuda when there is one)")
    model.add_argument(
        "--place",
        type=place,
        default=defaults.place,
        metavar="I/N",
        help="the I-th, from 0, of N workers on this machine, which share out its GPUs (default 0/1)",
    )
    model.add_argument("--dtype", help="float32, bfloat16 or float16 (default: float32 on a CPU, else bfloat16)")
    model.add_argument("--weights", default="dense", help="dense, or packed: 4 and 8 bit GGUF decodes packed")
    model.add_argument(
        "--deterministic", action="store_true", help="the same tokens however requests are batched, in bfloat16 too"
    )
    model.add_argument("--max-model-len", type=int, help="longest prompt and answer together (default: the model's)")
    model.add_argument("--threads", type=int, help="CPU threads (default: torch's)")

    net = p.add_argument_group("network")
    net.add_argument("--host", default=defaults.host, help="address to listen on (default 127.0.0.1)")
    net.add_argument("--port", type=int, default=defaults.port, help="port; 0 takes a free one (default 8100)")
    net.add_argument("--advertise-url", metavar="URL", help="where gateways reach this worker (default: from --host)")
    net.add_argument("--tls-cert", metavar="FILE", help="certificate for gateways, PEM with its chain (default: none)")
    net.add_argument("--tls-key", metavar="FILE", help="its key; both are read anew when they change")
    net.add_argument("--worker-id", help="name in the registry, unique among workers (default: host name and port)")
    net.add_argument("--redis", metavar="URL", help="the shared index; without it gateways need --workers")
    net.add_argument("--redis-prefix", default=defaults.redis_prefix, help="prefix of every key (default headstart)")
    net.add_argument("--redis-shards", type=int, default=1, help="slots over which the index is spread (default 1)")
    net.add_argument("--redis-username", metavar="NAME", help="the ACL user (default: the URL's)")
    net.add_argument("--redis-password-file", metavar="FILE", help="its password (default: the URL's)")
    net.add_argument(
        "--cluster-secret-file", metavar="FILE", help=f"the secret of the gateways (default: ${_SECRET_VARIABLE})"
    )
    net.add_argument(
        "--drain-grace-s", type=float, default=defaults.drain_grace_s, help="time for open requests (default 30)"
    )
    net.add_argument(
        "--max-step-s", type=float, default=defaults.max_step_s, help="a longer step is a hang (default 120)"
    )

    watch = p.add_argument_group("observability")
    watch.add_argument("--log-level", default="info", choices=("debug", "info", "warning", "error"))
    watch.add_argument("--log-format", default="text", choices=LOG_FORMATS, help="json: one object a line")
    watch.add_argument(
        "--otlp-endpoint", metavar="URL", help="send traces there, e.g. http://127.0.0.1:4318 (default: as OTEL_* say)"
    )

    cache = p.add_argument_group("KV cache")
    cache.add_argument("--block-size", type=int, default=defaults.block_size, help="tokens in a block (default 16)")
    cache.add_argument("--num-blocks", type=int, help="blocks of the pool, the null block included")
    cache.add_argument("--kv-cache-memory", type=num_bytes, metavar="SIZE", help="e.g. 4G (default: from free memory)")
    cache.add_argument("--prefix-cache", default=defaults.prefix_cache, choices=PREFIX_CACHES)

    batch = p.add_argument_group("batching")
    batch.add_argument("--max-num-seqs", type=int, default=defaults.max_num_seqs, help="choices in a step (64)")
    batch.add_argument("--max-num-batched-tokens", type=int, help="tokens in a step (default: 512 on a CPU, else 4096)")
    batch.add_argument(
        "--max-solo-prefill-tokens",
        type=int,
        help="tokens in a step of one prefill that nobody waits for (default: 2048 on a CPU in bfloat16)",
    )
    batch.add_argument("--max-waiting-requests", type=int, default=defaults.max_waiting_requests, help="queue (1024)")
    batch.add_argument(
        "--max-queued-tokens", type=int, default=defaults.max_queued_tokens, help="prompt tokens that may wait (1M)"
    )
    batch.add_argument("--max-queue-s", type=float, default=defaults.max_queue_s, help="refuse beyond this wait (120)")
    batch.add_argument("--aging-s", type=float, default=defaults.aging_s, help="waiting worth one priority (30)")
    batch.add_argument("--watermark", type=float, default=defaults.watermark, help="part of the pool kept free (0.01)")
    batch.add_argument("--max-batch-prefill-tokens", type=int, help="prefill tokens in a step (as TGI)")
    batch.add_argument("--max-batch-total-tokens", type=int, help="prompt + max_tokens of all running (as TGI)")
    batch.add_argument("--waiting-served-ratio", type=float, help="admit so many, relative to the running (as TGI)")
    batch.add_argument(
        "--max-waiting-tokens", type=int, default=defaults.max_waiting_tokens, help="... or after so many steps (20)"
    )
    batch.add_argument(
        "--no-launch-ahead",
        dest="launch_ahead",
        action="store_false",
        help="on a GPU, begin no step of decodes before the tokens of the one before it have been seen",
    )
    return p


def parse(argv: Sequence[str]) -> WorkerConfig:
    """Raises ValueError; argparse ends the process with status 2 on what it refuses itself."""
    args = vars(parser().parse_args(argv))
    return WorkerConfig(**{field.name: args[field.name] for field in fields(WorkerConfig)})

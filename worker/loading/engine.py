"""Build the engine from the options: model, pool, scheduler. Imports torch, so `worker.main` imports it late."""

from __future__ import annotations

import logging
import ssl
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, cast

import torch

from cache.allocators import make_allocator
from cache.allocators.base import Allocator
from cache.allocators.hash import HashAllocator
from cache.block_record import RecordFormat, layout_fingerprint
from cache.records import WorkerMember, new_epoch, signed
from cache.stores.base import BlockStore
from cache.stores.disk import DiskStore
from cache.stores.host import HostStore
from cache.types import WorkerId
from worker.attention.block_copier import BlockCopier, make_copier
from worker.common.capabilities import EMBEDDINGS, TOKENS
from worker.common.checks import check_kv_disk
from worker.common.cores import busy_advice, num_cores, thread_times
from worker.common.proof import gateway_token
from worker.config import WorkerConfig, default_step_tokens
from worker.contracts.engine import EngineSinks
from worker.contracts.metrics import VllmNames, WorkerMetrics
from worker.contracts.rates import StepCost
from worker.engine.engine import EngineCore
from worker.files.embedding import find_pooling
from worker.files.generation_config import gguf_defaults, sampling_defaults
from worker.files.tokenizer_files import fields_of_folder, fingerprint
from worker.kv_transfer.peers import PeerClient
from worker.kv_transfer.pool_blocks import PoolBlocks
from worker.kv_transfer.transfers import KVTransfers
from worker.loading.pool import device_of, max_model_len_of, num_pool_blocks
from worker.loading.warm_up import limit_onednn_cache, warm_up
from worker.model.config import LoadOptions, WeightForm
from worker.model.dtype import choose_dtype
from worker.model.gguf import GGUFCheckpoint
from worker.model.gguf_tokenizer import fields_of_gguf
from worker.model.load import LoadedModel, load_model
from worker.publishing.inbox import PublisherInbox
from worker.runner.model_runner import ModelRunner
from worker.sampling.sampler import DRAWS
from worker.scheduler.scheduler import Scheduler
from worker.scheduler.speculation import Speculation
from worker.wire import OLDEST_PROTOCOL, PROTOCOL_VERSION, TokenizerBundle

logger = logging.getLogger(__name__)

_SLAB_BYTES: Final = 1 << 30
"""Host memory is pinned in pieces of this size."""
_WARM_UP_TOKENS: Final = 256  # enough to measure the prefill rate, and a second or two on a slow processor


class _LoadedParts:
    """The model, and what is measured and built from it, for `build_engine`."""

    def __init__(self, config: WorkerConfig, report: Callable[[str], None]) -> None:
        """Load the model, size the pool, and measure the prefill rate."""
        limit_onednn_cache()
        torch.set_num_threads(config.threads or num_cores(config.local_world_size))
        self.config = config
        self.model = model = _load_model(config, report)
        self.pooling = find_pooling(config.task, model.checkpoint.path)
        if self.pooling is None and not model.has_head:
            path = model.checkpoint.path
            raise ValueError(f"{path} has no lm_head.weight: it can only make embeddings (--task embed)")
        self.num_blocks = num_pool_blocks(config, model)
        pool_tokens = (self.num_blocks - 1) * config.block_size
        max_model_len = max_model_len_of(config, model, pool_tokens)
        self.limits = config.limits(default_step_tokens(model.device.type, model.options.dtype))
        self.bundle = build_bundle(config, model, max_model_len)
        self.runner = ModelRunner(
            model,
            num_blocks=self.num_blocks,
            block_size=config.block_size,
            eos_token_ids=self.bundle.eos_token_ids,
            max_num_seqs=self.limits.max_num_seqs,
        )
        report("measuring the prefill rate")
        begun = thread_times()
        num_tokens = min(_WARM_UP_TOKENS, self.limits.max_num_batched_tokens, pool_tokens)
        self.rate = warm_up(self.runner, num_tokens, config.block_size)
        if advice := busy_advice(begun):
            report(f"WARNING: {advice}")


def build_bundle(config: WorkerConfig, model: LoadedModel, max_model_len: int) -> TokenizerBundle:
    """Build what gateways fetch from the checkpoint that is loaded. Raise ModelError."""
    checkpoint = model.checkpoint
    if isinstance(checkpoint, GGUFCheckpoint):
        fields = fields_of_gguf(checkpoint.metadata)
        defaults = gguf_defaults(config.generation_config, checkpoint.metadata, checkpoint.path)
    else:
        fields = fields_of_folder(checkpoint.path)
        defaults = sampling_defaults(config.generation_config, checkpoint.path)
    digest = fingerprint(*fields.values())
    if config.chat_template is not None:
        digest = fingerprint(digest.encode(), config.chat_template)
        fields |= {"chat_template": config.chat_template, "tool_template": None}
    return TokenizerBundle(
        fingerprint=digest,
        model=config.served_model_name or checkpoint.name,
        revision=checkpoint.revision,
        vocab_size=model.config.vocab_size,
        max_model_len=max_model_len,
        block_size=config.block_size,
        sampling_defaults=defaults,
        template_kwargs=config.template_kwargs,
        **fields,
    )


def build_engine(
    config: WorkerConfig,
    url: str,
    worker_id: str,
    metrics: WorkerMetrics,
    report: Callable[[str], None],
    tls: ssl.SSLContext | None = None,
    sinks: EngineSinks | None = None,
) -> EngineCore:
    """Load the model and build the engine over it; `report` receives the progress. `tls` is for calls to peers.

    Raises ModelError, ValueError, OSError or torch's RuntimeError (out of memory).
    """
    sinks = sinks or EngineSinks()
    parts = _LoadedParts(config, report)
    allocator = _make_allocator(parts)
    transfers = _make_transfers(parts, allocator, metrics, sinks.publisher, tls)
    speculation = None
    if config.speculate:
        speculation = Speculation(config.speculate, StepCost(parts.rate.seconds(1), parts.rate.step_tokens))
    fetcher = None if transfers is None else transfers.fetches
    scheduler = Scheduler(allocator, parts.limits, parts.bundle.eos_token_ids, speculation, fetcher)
    metrics.registry.register(VllmNames(metrics, parts.bundle.model))
    report(f"{parts.num_blocks} blocks of {config.block_size} tokens, prefill {parts.rate.tokens_per_s:.0f} tokens/s")
    return EngineCore(
        scheduler,
        parts.runner,
        parts.rate,
        parts.bundle,
        _make_member(parts, url, worker_id, transfers),
        metrics,
        config.async_scheduling,
        max_step_s=config.max_step_s,
        transfers=transfers,
        pooling=parts.pooling,
        sinks=sinks,
    )


def _load_model(config: WorkerConfig, report: Callable[[str], None]) -> LoadedModel:
    report("loading the model")

    def on_layer(done: int, total: int) -> None:
        if 10 * done // max(1, total) > 10 * (done - 1) // max(1, total):  # every tenth of the layers
            report(f"loading layer {done} of {total}")

    device = device_of(config)
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # the latter where torch is built without CUDA
        raise ValueError(
            f"--device {device}: {str(error).partition('.')[0]}. On the processor: --device cpu"
        ) from error
    options = LoadOptions(
        dtype=choose_dtype(config.dtype, device),
        device=device,
        weights=cast(WeightForm, config.weights),
        deterministic=config.deterministic,
        max_model_len=config.max_model_len,
    )
    return load_model(config.model, options, on_layer)


def _make_allocator(parts: _LoadedParts) -> Allocator:
    config, window_size = parts.config, None
    if config.prefix_cache == "off" and (window := parts.model.config.attention.longest_window) is not None:
        window_size = window + parts.limits.max_step_tokens  # a step's first token still sees its whole window
    return make_allocator(config.prefix_cache, parts.num_blocks, config.block_size, window_size)


def _make_member(parts: _LoadedParts, url: str, worker_id: str, transfers: KVTransfers | None) -> WorkerMember:
    """Return the signed registry entry."""
    config, bundle = parts.config, parts.bundle
    member = WorkerMember(
        worker_id=WorkerId(worker_id),
        epoch=new_epoch(),
        url=url,
        model=bundle.model,
        namespace=parts.bundle.namespace.fingerprint,
        numerics=f"{parts.runner.numerics}/{DRAWS}",
        block_size=config.block_size,
        max_model_len=bundle.max_model_len,
        protocol=PROTOCOL_VERSION,
        epoch_started_ms=time.time_ns() // 1_000_000,
        oldest_protocol=OLDEST_PROTOCOL,
        capabilities=(TOKENS if parts.pooling is None else EMBEDDINGS,),
        embedding_size=0 if parts.pooling is None else parts.model.config.hidden_size,
    )
    return signed(config.cluster_secret(), member if transfers is None else transfers.described(member))


def _make_transfers(
    parts: _LoadedParts,
    allocator: Allocator,
    metrics: WorkerMetrics,
    publisher: PublisherInbox | None,
    tls: ssl.SSLContext | None,
) -> KVTransfers | None:
    """Open the stores below the pool, and let blocks move. None: the allocator does not name blocks.

    Raises ValueError for a folder that cannot be used.
    """
    if not isinstance(allocator, HashAllocator):
        return None
    config, model, cache = parts.config, parts.model, parts.runner.cache
    copier, heads, secret = make_copier(cache), model.config.attention, config.cluster_secret()
    layout = layout_fingerprint(
        namespace=parts.bundle.namespace.fingerprint,
        files=model.checkpoint.files.digest,
        numerics=parts.runner.numerics,
        dtype=str(cache.dtype),
        shape=(heads.num_layers, heads.num_kv_heads, heads.head_dim, cache.block_size),
    )
    record = RecordFormat(layout, copier.num_bytes, secret)
    pool, stores = PoolBlocks(allocator, copier), _open_stores(config, record, copier)
    peers = PeerClient(record, gateway_token(secret), tls) if config.may_exchange() else None
    return KVTransfers(pool, parts.rate, stores, record, peers, metrics, publisher)


def _open_stores(config: WorkerConfig, record: RecordFormat, copier: BlockCopier) -> list[BlockStore]:
    """Open the stores below the pool, the fastest first."""
    stores: list[BlockStore] = []
    if num_host_blocks := config.kv_host_memory // copier.num_bytes:
        most = max(1, _SLAB_BYTES // copier.num_bytes)
        counts = [min(most, num_host_blocks - first) for first in range(0, num_host_blocks, most)]
        stores.append(HostStore([copier.new_payload(count) for count in counts], copier.num_bytes))
    if config.kv_disk is not None:
        disk = check_kv_disk(Path(config.kv_disk), config.kv_disk_size, config.local_world_size)
        if disk.status == "fail":
            raise ValueError(f"--kv-disk: {disk.found}: {disk.fix}")
        if disk.status == "warn":
            logger.warning("%s: %s", disk.found, disk.fix)
        stores.append(DiskStore(Path(config.kv_disk), record, config.kv_disk_size))
    return stores

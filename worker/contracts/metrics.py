"""The metrics of a worker, at each stage of a request as Text Generation Inference has them. One per process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from cache.allocators.base import CacheStats
from cache.records import WorkerLoad
from worker.contracts.engine import EngineOutput, StepKind
from worker.wire import End, EngineText, Failed, Finished, Tokens

_SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_LONG_SECONDS: Final = (*_SECONDS, 120.0, 300.0, 600.0, 3600.0)  # as a request may take
_SIZES: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)


class WorkerMetrics:
    """Counted by the engine thread, read by the HTTP side."""

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()

        def counter(name: str, text: str, labels: Sequence[str] = ()) -> Counter:
            return Counter(f"headstart_worker_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str, labels: Sequence[str] = ()) -> Gauge:
            return Gauge(f"headstart_worker_{name}", text, labels, registry=registry)

        def histogram(name: str, text: str, buckets: Sequence[float], labels: Sequence[str] = ()) -> Histogram:
            return Histogram(f"headstart_worker_{name}", text, labels, buckets=buckets, registry=registry)

        self.requests = counter("requests", "Requests submitted to the engine")
        self.successes = counter("request_success", "Finished choices, by reason", ["reason"])
        self.failures = counter("request_failures", "Requests that ended without an answer, by cause", ["cause"])
        self.refusals = counter("request_refusals", "Requests refused before the queue, by code", ["code"])
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of started requests")
        self.cached_tokens = counter("cached_tokens", "Prompt tokens of started requests found in the KV cache")
        self.output_tokens = counter("output_tokens", "Sampled tokens")
        self.drafts = counter("drafts", "Decodes with draft tokens (--speculate)")
        self.draft_tokens = counter("draft_tokens", "Draft tokens that were verified")
        self.accepted_tokens = counter("accepted_draft_tokens", "Draft tokens that were right, and so sampled")
        self.skipped_tokens = counter("skipped_tokens", "Tokens beyond the first that came together for a choice")
        self.queue_s = histogram("queue_seconds", "From arrival to the start of the prefill", _LONG_SECONDS)
        self.prefill_s = histogram("prefill_seconds", "From the start of the prefill to the first token", _LONG_SECONDS)
        self.decode_s = histogram("decode_seconds", "From the first token to the end", _LONG_SECONDS)

        self.queue_size = gauge("queue_size", "Waiting sequences")
        self.queued_tokens = gauge("queued_tokens", "Tokens that the waiting sequences have to compute")
        self.running = gauge("running_sequences", "Running sequences")
        self.running_max_tokens = gauge("running_max_tokens", "Prompt and max_tokens of the running sequences")
        self.batch_size = histogram("batch_size", "Sequences in a step", _SIZES)
        self.batch_tokens = histogram("batch_tokens", "Tokens in a step, by kind", _SIZES, ["kind"])
        self.batch_growth = counter("batch_growth", "Steps in which the batch grew, by reason", ["reason"])
        self.batch_growth_s = histogram("batch_growth_seconds", "Scheduling of steps in which the batch grew", _SECONDS)
        self.step_s = histogram("step_seconds", "Forward and sampling of a step, by its content", _SECONDS, ["kind"])
        self.forward_s = histogram(
            "forward_seconds", "Device time of a step up to its logits, by its content", _SECONDS, ["kind"]
        )
        self.sample_s = histogram(
            "sample_seconds", "Device time of a step after its logits, by its content", _SECONDS, ["kind"]
        )
        self._longest_step_s = 0.0
        gauge("longest_step_seconds", "The longest step since the last scrape").set_function(self._take_longest_step)
        self.host_s = histogram("host_seconds", "Scheduling before and bookkeeping after a step", _SECONDS, ["phase"])
        self.between_tokens_s = histogram(
            "time_between_tokens_seconds", "From one step with decodes to the next, one observation a step", _SECONDS
        )
        self.step_failures = counter("step_failures", "Steps that raised, by their content", ["kind"])
        for kind in get_args(StepKind):
            self.step_failures.labels(kind)  # from 0: an alert does not see a series that begins with a failure
        self.preemptions = counter("preemptions", "Sequences preempted, to be computed again")
        self.prefill_rate = gauge("prefill_tokens_per_second", "Measured prefill rate; 0: unknown")
        self.prefill_fixed = gauge("prefill_fixed_seconds", "Measured part of a prefill that its tokens do not change")
        self.engine_problem = gauge("engine_problem", "1: the engine of this adapter takes no request")

        self.blocks = gauge("kv_blocks", "Blocks of the KV pool")
        self.free_blocks = gauge("kv_free_blocks", "Blocks that can be taken, cached ones included")
        self.cached_blocks = gauge("kv_cached_blocks", "Blocks that a prefix lookup can find")
        self.evictions = counter("kv_evictions", "Cached blocks evicted")
        self._num_evictions = 0
        self.tail_age = gauge("kv_lru_tail_age_allocations", "Allocations since the next victim was released")

        self.stored_blocks = gauge("kv_stored_blocks", "Blocks in a store below the pool", ["tier"])
        self.saved_bytes = counter("kv_saved_bytes", "Bytes of blocks written to a store below the pool", ["tier"])
        self.fetched_tokens = counter("kv_loaded_tokens", "Tokens whose blocks came into the pool, by place", ["place"])
        self.fetched_bytes = counter("kv_loaded_bytes", "Bytes of blocks that came into the pool, by place", ["place"])
        self.fetches = counter("kv_loads", "Fetches of prefixes, by how they ended: complete, short or late", ["end"])
        self.served_bytes = counter("kv_served_bytes", "Bytes of blocks that peers fetched here")

        self.tasks = gauge("asyncio_tasks", "Tasks of the event loop")
        self.index_connected = gauge("index_connected", "1 while this worker is connected to the shared index")
        self.index_events = counter(
            "index_events", "Publishing problems: invalid, refused, displaced, failed; and rewritten", ["event"]
        )
        self.index_entries = gauge("index_entries", "Blocks that this worker has to publish or has published")

    def render(self) -> bytes:
        """Return the Prometheus text format."""
        return generate_latest(self.registry)

    def count_outputs(self, outputs: Sequence[EngineOutput]) -> None:
        """Count the tokens and the ends of choices and requests."""
        num_tokens = num_skipped = 0
        for _, frame in outputs:
            match frame:
                case Tokens():
                    num_tokens += (num_new := len(frame.token_ids))
                    if num_new > 1:
                        num_skipped += num_new - 1
                case EngineText():
                    pass
                case Finished():
                    self.successes.labels(frame.reason).inc()
                case End() if frame.prefill_s or frame.decode_s:  # it had a first token
                    self.prefill_s.observe(frame.prefill_s)
                    self.decode_s.observe(frame.decode_s)
                case Failed():
                    self.failures.labels(frame.code).inc()
        if num_tokens:
            self.output_tokens.inc(num_tokens)
        if num_skipped:
            self.skipped_tokens.inc(num_skipped)

    def count_step(self, kind: StepKind, step_s: float, interval_s: float) -> None:
        """Count a step that returned `interval_s` after the one before it."""
        if kind != "prefill":  # each decode sampled its last token in the step before
            self.between_tokens_s.observe(interval_s)
        self.step_s.labels(kind).observe(step_s)
        self._longest_step_s = max(self._longest_step_s, step_s)

    def count_drafts(self, drafts: Sequence[tuple[int, int]]) -> None:
        """Count the draft tokens of each decode of a step, and those that were accepted."""
        if drafts:
            self.drafts.inc(len(drafts))
            self.draft_tokens.inc(sum(num_tokens for num_tokens, _ in drafts))
            self.accepted_tokens.inc(sum(num_accepted for _, num_accepted in drafts))

    def count_parts(self, kind: StepKind, forward_s: float, sample_s: float) -> None:
        """Count the parts of a step on its device."""
        self.forward_s.labels(kind).observe(forward_s)
        self.sample_s.labels(kind).observe(sample_s)

    def count_fetch(self, end: str, num_blocks: dict[str, int], block_size: int, block_bytes: int) -> None:
        """Count a fetch that has ended and the blocks that came, by place."""
        self.fetches.labels(end).inc()
        for place, count in num_blocks.items():
            self.fetched_tokens.labels(place).inc(count * block_size)
            self.fetched_bytes.labels(place).inc(count * block_bytes)

    def _take_longest_step(self) -> float:
        longest_s, self._longest_step_s = self._longest_step_s, 0.0
        return longest_s

    def set_state(self, load: WorkerLoad, stats: CacheStats) -> None:
        """Set the gauges of the queue and of the pool."""
        self.queue_size.set(load.num_waiting)
        self.running.set(load.num_running)
        self.prefill_rate.set(load.prefill_tokens_per_s)
        self.prefill_fixed.set(load.prefill_fixed_s)
        self.blocks.set(stats.num_blocks)
        self.free_blocks.set(stats.num_free_blocks)
        self.cached_blocks.set(stats.num_cached_blocks)
        self.evictions.inc(max(0, stats.evictions - self._num_evictions))
        self._num_evictions = stats.evictions
        self.tail_age.set(stats.next_victim_age)


class VllmNames(Collector):
    """A worker's samples under vLLM's names, copied at each scrape. Adapters lack it: their engines export their own.

    Gateways export vLLM's gauges, and what clients see: no sample has the same name at both, as sums would count twice.
    """

    def __init__(self, metrics: WorkerMetrics, model: str) -> None:
        self._labels = {"model_name": model}
        self._metrics = metrics
        self._names = {
            "num_preemptions": metrics.preemptions,
            "prefix_cache_queries": metrics.prompt_tokens,
            "prefix_cache_hits": metrics.cached_tokens,
            "spec_decode_num_drafts": metrics.drafts,
            "spec_decode_num_draft_tokens": metrics.draft_tokens,
            "spec_decode_num_accepted_tokens": metrics.accepted_tokens,
            "request_queue_time_seconds": metrics.queue_s,
            "request_prefill_time_seconds": metrics.prefill_s,
            "request_decode_time_seconds": metrics.decode_s,
        }

    def collect(self) -> Iterator[Metric]:
        for name, metric in self._names.items():
            for family in metric.collect():
                copy = Metric(f"vllm:{name}", family.documentation, family.type)
                for sample in family.samples:
                    suffix = sample.name.removeprefix(family.name)
                    copy.add_sample(f"{copy.name}{suffix}", {**sample.labels, **self._labels}, sample.value)
                yield copy

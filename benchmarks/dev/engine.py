"""`headstart bench engine`: the scheduler and the runner on one device, without HTTP, against `transformers`.

The floor is the time of the matrix-vector products with the model's fused weights, warm, in the same process.
Scheduling and the kernels around the products cannot bring a decode step of one sequence below it. Another layout of
the weights, or fewer bits, can. Rounds of floor, step and packed step alternate, and the best of each counts: on a busy
machine that is their undisturbed time. Decode is also compared with the rate of a memory copy on the device. Prefill is
compared with the rate of a large matrix product.

A GPU without the network: `headstart bench engine --shape llama-8b --device cuda`.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from itertools import cycle, islice
from typing import Any, Final

import torch

from benchmarks.dev.device_rates import matrix_rate, memory_rate, synchronise
from benchmarks.dev.random_model import SHAPES, random_model, random_reference
from benchmarks.dev.requantised import requantised_model
from benchmarks.report import Figure, Report, option_parser, publish
from cache.allocators import make_allocator
from worker.config import WorkerConfig, default_step_tokens
from worker.contracts.engine import EngineOutput, RequestKey
from worker.contracts.step import Launch, StepResult
from worker.doctor import weight_bytes
from worker.engine.grammar import GrammarCompiler
from worker.kernels.cpu import matmul_kernels_for
from worker.loading.engine import build_bundle
from worker.model.config import LoadOptions, ModelConfig
from worker.model.dtype import choose_dtype
from worker.model.gguf import GGUFCheckpoint
from worker.model.load import FAMILIES, LoadedModel, load_model
from worker.runner.model_runner import ModelRunner
from worker.scheduler.budget import BatchLimits
from worker.scheduler.plan import StepPlan
from worker.scheduler.request import Request
from worker.scheduler.scheduler import Scheduler
from worker.scheduler.speculation import Speculation
from worker.wire import ChoiceState, GenerateRequest, Grammar, SamplingParams, Tokens

PROMPT_TOKENS: Final = 32
BATCH_SIZES: Final = (1, 8, 32)
CONTEXT_TOKENS: Final = 4096
PREFILL_TOKENS: Final = 2048
MIXED: Final = "mixed"
JSON: Final = "json_schema"
_NUMBERS: Final = '{"type": "array", "items": {"type": "integer"}, "minItems": 1000}'
AS_SENT: Final[Mapping[str, Mapping[str, Any]]] = {
    "top_p": {"temperature": 0.7, "top_p": 0.95},
    "qwen": {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
    "presence": {"presence_penalty": 1.5},
    JSON: {"grammar": Grammar("json_schema", _NUMBERS)},
    "logprobs": {"logprobs": 5},
}
"""Settings as clients send them, and in a batch MIXED all of them in turn."""
STEPS_IN_A_ROW: Final = 8
"""Where steps overlap, a single step would begin while the one before is still processed."""
_ROOT: Final = b"benchmark-engine"


class Engine:
    """The worker's own scheduler and runner, stepped as fast as they go."""

    def __init__(
        self,
        model: LoadedModel,
        num_blocks: int,
        block_size: int,
        chunk_tokens: int | None = None,
        speculation: Speculation | None = None,
        grammars: GrammarCompiler | None = None,
    ) -> None:
        """Steps of `chunk_tokens`; None: as a worker on this device."""
        self._runner = ModelRunner(model, num_blocks=num_blocks, block_size=block_size, eos_token_ids=())
        batched, solo = default_step_tokens(model.device.type, model.options.dtype)
        limits = BatchLimits(
            max_num_batched_tokens=chunk_tokens or batched,
            max_solo_prefill_tokens=solo if chunk_tokens is None else None,
        )
        allocator = make_allocator("hash", num_blocks, block_size)
        self._scheduler = Scheduler(allocator, limits, (), speculation)
        self._grammars = grammars
        self._num_requests = 0
        self._in_flight: deque[tuple[StepPlan, Launch[StepResult]]] = deque()

    @property
    def steps_in_a_row(self) -> int:
        """How many have to be timed together."""
        return STEPS_IN_A_ROW if self._runner.overlaps else 1

    @property
    def hit_tokens(self) -> int:
        """Tokens that the pool had, of all requests so far."""
        return self._scheduler.allocator.stats().hit_tokens

    def submit(self, prompt_ids: Sequence[int], max_tokens: int, temperature: float = 0.0, **params: Any) -> Request:
        self._num_requests += 1
        wire = GenerateRequest(
            request_id=str(self._num_requests),
            gateway_id="bench",
            epoch="",
            root=_ROOT,
            prompt_ids=list(prompt_ids),
            choices=(ChoiceState(0, self._num_requests),),
            sampling=SamplingParams(max_tokens=max_tokens, temperature=temperature, ignore_eos=True, **params),
        )
        constraints = {} if self._grammars is None else asyncio.run(self._grammars.constraints(wire))
        request = Request(RequestKey(self._num_requests), wire, 0.0, 30.0, constraints)
        self._scheduler.submit(request)
        return request

    def step(self) -> tuple[StepPlan, list[EngineOutput]] | None:
        """Return one step and its outputs; None when there was nothing to do. On a device that computes next to this
        thread the next step is launched first, where the worker would."""
        now_s = time.monotonic()
        if not self._in_flight:
            if (plan := self._scheduler.schedule(now_s)) is None:
                return None
            self._in_flight.append((plan, self._runner.launch(plan.step())))
        may_overlap = self._runner.overlaps and len(self._in_flight) == 1
        if may_overlap and (ahead := self._scheduler.schedule_async()) is not None:
            self._in_flight.append((ahead, self._runner.launch(ahead.step())))
        plan, launch = self._in_flight.popleft()
        outputs = self._scheduler.update(plan, launch.collect().sequences, now_s)
        if (speculation := self._scheduler.speculation) is not None:
            speculation.measure(plan, time.monotonic() - now_s)
        return plan, outputs

    def drain(self) -> int:
        """Step until all is done -> tokens that came out."""
        num_tokens = 0
        while (done := self.step()) is not None:
            num_tokens += sum(len(out.frame.token_ids) for out in done[1] if isinstance(out.frame, Tokens))
        return num_tokens


class Floor:
    """The products of one token with weights of the model's fused shapes, and nothing else."""

    def __init__(self, config: ModelConfig, options: LoadOptions) -> None:
        hidden, attention, device = config.hidden_size, config.attention, options.device
        rows = (attention.query_size + 2 * attention.kv_size, hidden, 2 * config.intermediate_size, hidden)
        columns = (hidden, attention.query_size, hidden, config.intermediate_size)
        shapes = [*list(zip(rows, columns, strict=True)) * attention.num_layers, (config.vocab_size, hidden)]
        self._weights = [torch.randn(shape, device=device).to(options.torch_dtype) for shape in shapes]
        self._states = {n: torch.randn(n, device=device).to(options.torch_dtype) for n in {n for _, n in shapes}}

    @torch.inference_mode()
    def __call__(self) -> None:
        for weight in self._weights:
            torch.mv(weight, self._states[weight.shape[1]])
        synchronise(self._weights[0].device)


class Reference:
    """A model of `transformers`, as it comes."""

    def __init__(self, model: Any, options: LoadOptions) -> None:
        self._model = model.to(options.device).eval()
        self._device = torch.device(options.device)

    @torch.inference_mode()
    def generate(self, prompts: Sequence[Sequence[int]], num_tokens: int, **sampled: Any) -> None:
        """Generate by greedy search, or sample by these settings."""
        ids = torch.tensor(prompts, device=self._device)
        fields = {"max_new_tokens": num_tokens, "min_new_tokens": num_tokens, "do_sample": bool(sampled)}
        fields |= {"top_k": 0} | sampled if sampled else {}
        self._model.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **fields)

    @torch.inference_mode()
    def prefill(self, prompt: Sequence[int]) -> None:
        logits = self._model(torch.tensor([prompt], device=self._device), logits_to_keep=1).logits
        synchronise(logits.device)


def main(argv: list[str]) -> int:
    options = _parse(argv)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    options.dtype = choose_dtype(options.dtype, options.device)
    load = LoadOptions(dtype=options.dtype, device=options.device, weights=options.weights)
    model = load_model(options.model, load) if options.shape is None else random_model(options.shape, load)
    figures = [*_decode_figures(model, options), *_engine_figures(model, options), *_sampled_figures(model, options)]
    figures += _shares(model, {figure.name: figure.value for figure in figures})
    if not options.no_transformers:
        figures += _reference_figures(Reference(_reference(model, options), load), model.config.vocab_size, options)
    publish(Report("engine", figures, _environment(model, options)), options)
    return 0


def _environment(model: LoadedModel, options: argparse.Namespace) -> dict[str, object]:
    found: dict[str, object] = {
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "model": model.checkpoint.name,
        "dtype": options.dtype,
        "weights": options.weights,
        "device": options.device,
        "block_size": options.block_size,
    }
    if model.device.type == "cuda":
        found |= {"gpu": torch.cuda.get_device_name(model.device), "cuda": torch.version.cuda}
        found |= {name: version(name) for name in ("triton", "xformers")}
    return found


def _reference(model: LoadedModel, options: argparse.Namespace) -> Any:
    """The same checkpoint, or the same random shape, in `transformers`."""
    if options.shape is not None:
        return random_reference(options.shape, model.options)
    from transformers import AutoModelForCausalLM, GgufConfig

    path, fields = model.checkpoint.path, {"dtype": model.dtype}
    if isinstance(model.checkpoint, GGUFCheckpoint):
        # Dense weights of the same dtype as ours: left packed, transformers computes in float32.
        dense = GgufConfig(dequantize=True)
        return AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, quantization_config=dense, **fields
        )
    return AutoModelForCausalLM.from_pretrained(path, **fields)


def _shares(model: LoadedModel, figures: Mapping[str, float]) -> list[Figure]:
    """Compare with the device's best: a decode that only reads the weights, a prefill of only products."""
    config, on_gpu = model.config, model.device.type == "cuda"
    bytes_per_s, flops_per_s = memory_rate(model.device), matrix_rate(model.device, model.dtype)
    hidden, shape = config.hidden_size, config.attention
    embedding_bytes = config.vocab_size * hidden * model.dtype.itemsize
    has_table = isinstance(model.checkpoint, GGUFCheckpoint) or not config.tie_embeddings  # next to the head
    read_bytes = weight_bytes(model.checkpoint, config, model.device, model.dtype) - has_table * embedding_bytes
    read_s = read_bytes / bytes_per_s
    per_layer = hidden * (2 * shape.query_size + 2 * shape.kv_size + 3 * config.intermediate_size)
    attention = PREFILL_TOKENS * shape.query_size  # a query sees half of the tokens, for its scores and for its sum
    per_token = 2 * shape.num_layers * (per_layer + attention)
    prefill_s = PREFILL_TOKENS / figures["prefill_tokens_per_s"]
    flops = PREFILL_TOKENS * per_token + 2 * config.vocab_size * hidden
    return [
        Figure("memory_bytes_per_s", bytes_per_s, "1/s", "a large copy, read and written"),
        Figure("matrix_flops_per_s", flops_per_s, "1/s", "a large square product"),
        Figure(
            "decode_b1_of_memory_rate",
            read_s / figures["decode_step_b1_s"],
            "",
            f"reading the weights would take {read_s:.6f} s",
            ">= 0.7" if on_gpu else "",
        ),
        Figure(
            "prefill_of_matrix_rate",
            flops / prefill_s / flops_per_s,
            "",
            f"{flops / 1e12:.2f} T operations for {PREFILL_TOKENS:,} tokens",
            ">= 0.5" if on_gpu else "",
        ),
    ]


def _decode_figures(model: LoadedModel, options: argparse.Namespace) -> list[Figure]:
    """Floor and steps of one sequence, in alternating rounds."""
    floor = Floor(model.config, model.options)
    engines = {name: _decoding(each, options) for name, each in _forms(model, options)}
    runs: dict[str, Callable[[], object]] = {"floor_step_s": floor, **{name: e.step for name, e in engines.items()}}
    best = dict.fromkeys(runs, float("inf"))
    in_a_row = engines["decode_step_b1_s"].steps_in_a_row
    for _ in range(options.steps):
        for name, run in runs.items():
            run()  # warms the caches with these weights: the ones before have just been streamed through
            best[name] = min(best[name], _seconds(lambda run=run: [run() for _ in range(in_a_row)]) / in_a_row)  # type: ignore[misc]
    step_s, floor_s = best["decode_step_b1_s"], best["floor_step_s"]
    figures = [
        Figure("floor_step_s", floor_s, "s", "only matrix-vector products of the fused weights"),
        Figure("decode_step_b1_s", step_s, "s", f"{step_s / floor_s:.2f} x the floor", "<= 1.4 x"),
    ]
    if dense_s := best.get("decode_step_b1_dense_s"):
        figures.append(Figure("decode_step_b1_dense_s", dense_s, "s", "weights in float32"))
        for name, goal in (("int8", 1.6), ("int4", 1.8)):
            quantised_s = best[f"decode_step_b1_{name}_s"]
            gain = f"{dense_s / quantised_s:.2f} x the speed of dense weights"
            figures.append(Figure(f"decode_step_b1_{name}_s", quantised_s, "s", gain, f">= {goal} x"))
    if packed_s := best.get("decode_step_b1_packed_s"):
        figures.append(
            Figure("decode_step_b1_packed_s", packed_s, "s", f"{packed_s / floor_s:.2f} x the floor", "<= 0.7 x")
        )
        packed = engines["decode_step_b1_packed_s"]
        rate = max(_rate(packed, options, [{}] * 8) for _ in range(options.rounds))
        figures.append(Figure("tokens_per_s_b8_packed", rate, "1/s"))
    return figures


def _engine_figures(model: LoadedModel, options: argparse.Namespace) -> list[Figure]:
    engine = _engine(model, options)
    figures = [
        Figure(
            f"tokens_per_s_b{size}",
            max(_rate(engine, options, [{}] * size) for _ in range(options.rounds)),
            "1/s",
            "prefill of the short prompts included",
        )
        for size in BATCH_SIZES
    ]
    prompts = _Prompts(model.config.vocab_size)
    prefill_s = min(_first_token_s(engine, prompts.take(PREFILL_TOKENS)) for _ in range(options.rounds))
    figures.append(Figure("prefill_tokens_per_s", PREFILL_TOKENS / prefill_s, "1/s", f"{PREFILL_TOKENS:,} tokens"))
    cold_s = warm_s = float("inf")
    for _ in range(options.rounds):
        prompt = prompts.take(CONTEXT_TOKENS)
        cold_s = min(cold_s, _first_token_s(engine, prompt))
        same, before = CONTEXT_TOKENS - options.block_size, engine.hit_tokens
        warm_s = min(warm_s, _first_token_s(engine, prompt[:same] + prompts.take(options.block_size)))
        assert engine.hit_tokens - before == same, "the cached prefix was computed again"
    return [
        *figures,
        Figure("ttft_cold_s", cold_s, "s", f"{CONTEXT_TOKENS:,} tokens"),
        Figure(
            "ttft_warm_s", warm_s, "s", f"{options.block_size} of them new: {warm_s / cold_s:.1%} of cold", "<= 5 %"
        ),
    ]


def grammars_of(model: LoadedModel) -> GrammarCompiler:
    """Return the grammars of a model with a tokenizer."""
    return GrammarCompiler(build_bundle(WorkerConfig(), model, model.config.max_model_len))


def settings_as_sent(name: str, count: int) -> list[Mapping[str, Any]]:
    """Return the settings of each of `count` sequences."""
    return list(islice(cycle(AS_SENT.values() if name == MIXED else (AS_SENT[name],)), count))


def _sampled_figures(model: LoadedModel, options: argparse.Namespace) -> Iterator[Figure]:
    """Compare settings with greedy, in alternating rounds. Random weights have no tokenizer, so no grammar."""
    has_tokenizer = options.shape is None
    engine = _engine(model, options, grammars_of(model) if has_tokenizer else None)
    for size in BATCH_SIZES:
        for name in [name for name in (*AS_SENT, MIXED) if has_tokenizer or name not in (JSON, MIXED)]:
            greedy = rate = 0.0
            for _ in range(options.rounds):
                greedy = max(greedy, _rate(engine, options, [{}] * size))
                rate = max(rate, _rate(engine, options, settings_as_sent(name, size)))
            yield Figure(f"tokens_per_s_{name}_b{size}", rate, "1/s", f"{rate / greedy:.3f} of greedy")


def _reference_figures(reference: Reference, vocab_size: int, options: argparse.Namespace) -> list[Figure]:
    prompts, figures = _Prompts(vocab_size), []
    reference.generate([prompts.take(PROMPT_TOKENS)], 2)
    for size in BATCH_SIZES:
        batch = [prompts.take(PROMPT_TOKENS) for _ in range(size)]
        elapsed_s = min(_seconds(lambda batch=batch: reference.generate(batch, options.tokens)) for _ in range(2))  # type: ignore[misc]
        figures.append(Figure(f"transformers_tokens_per_s_b{size}", size * options.tokens / elapsed_s, "1/s"))
        for name in ("top_p", "qwen"):  # it has no counterpart of the others
            begun_s = time.perf_counter()
            reference.generate(batch, options.tokens, **AS_SENT[name])
            rate = size * options.tokens / (time.perf_counter() - begun_s)
            figures.append(Figure(f"transformers_tokens_per_s_{name}_b{size}", rate, "1/s"))
        if size == 1:
            figures.append(Figure("transformers_decode_step_b1_s", elapsed_s / options.tokens, "s"))
    for length, name in ((PREFILL_TOKENS, "prefill"), (CONTEXT_TOKENS, "cold")):
        prompt = prompts.take(length)
        elapsed_s = min(_seconds(lambda prompt=prompt: reference.prefill(prompt)) for _ in range(options.rounds))  # type: ignore[misc]
        if name == "prefill":
            figures.append(Figure("transformers_prefill_tokens_per_s", length / elapsed_s, "1/s", f"{length:,} tokens"))
        else:
            figures.append(Figure("transformers_ttft_cold_s", elapsed_s, "s", f"{length:,} tokens"))
    return figures


class _Prompts:
    """Random token ids, never the same twice."""

    def __init__(self, vocab_size: int) -> None:
        self._random = random.Random(0)
        self._vocab_size = vocab_size

    def take(self, num_tokens: int) -> list[int]:
        return self._random.choices(range(self._vocab_size), k=num_tokens)


def _engine(model: LoadedModel, options: argparse.Namespace, grammars: GrammarCompiler | None = None) -> Engine:
    size = options.block_size
    num_blocks = 2 + max(BATCH_SIZES) * (-(-(PROMPT_TOKENS + options.tokens) // size) + 1)
    return Engine(model, num_blocks + 2 * CONTEXT_TOKENS // size, size, options.chunk, grammars=grammars)


def _decoding(model: LoadedModel, options: argparse.Namespace) -> Engine:
    """An engine whose every next step decodes one sequence."""
    engine = _engine(model, options)
    num_steps = options.steps * (1 + engine.steps_in_a_row)
    engine.submit(_Prompts(model.config.vocab_size).take(PROMPT_TOKENS), num_steps + 8)
    engine.step()
    engine.step()
    return engine


def _rate(engine: Engine, options: argparse.Namespace, settings: Sequence[Mapping[str, Any]]) -> float:
    """Output tokens per second of a batch that starts together."""
    engine.drain()
    prompts = _Prompts(1000)
    for params in settings:
        engine.submit(prompts.take(PROMPT_TOKENS), options.tokens, **params)
    begun_s = time.perf_counter()
    return engine.drain() / (time.perf_counter() - begun_s)


def _first_token_s(engine: Engine, prompt: Sequence[int]) -> float:
    engine.submit(prompt, 1)
    return _seconds(engine.drain)


def _forms(model: LoadedModel, options: argparse.Namespace) -> Iterator[tuple[str, LoadedModel]]:
    """Yield the model and, on a CPU, the same with its weights in other forms."""
    yield "decode_step_b1_s", model
    is_own = options.shape is None and model.checkpoint.model_type in FAMILIES
    if not is_own or matmul_kernels_for(model.dtype, model.device) is None:
        if isinstance(model.checkpoint, GGUFCheckpoint) and (options.device, options.dtype) == ("cpu", "bfloat16"):
            packed = LoadOptions(dtype="bfloat16", weights="packed")
            yield "decode_step_b1_packed_s", load_model(options.model, packed)
        return
    yield "decode_step_b1_dense_s", load_model(options.model, replace(model.options, weights="dense"))
    yield "decode_step_b1_int8_s", requantised_model(model, "Q8_0")
    yield "decode_step_b1_int4_s", requantised_model(model, "Q4_1")


def _seconds(run: Callable[[], object]) -> float:
    begun_s = time.perf_counter()
    run()
    return time.perf_counter() - begun_s


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = option_parser("engine", "Decode, prefill and first tokens of one worker's engine.")
    parser.add_argument("--model", default="", help="as of `headstart worker` (default: the model that is installed)")
    parser.add_argument("--shape", choices=sorted(SHAPES), help="random weights of this shape, instead of --model")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1 ... (default cpu)")
    parser.add_argument("--dtype", default="bfloat16", help="as of `headstart worker` (default bfloat16)")
    parser.add_argument("--weights", default="auto", help="as of `headstart worker` (default auto)")
    parser.add_argument("--threads", type=int, help="CPU threads (default: torch's)")
    parser.add_argument("--block-size", type=int, default=16, help="tokens in a block of the KV pool (default 16)")
    parser.add_argument("--chunk", type=int, help="most tokens in a step (default: as a worker on the device)")
    parser.add_argument("--steps", type=int, default=40, help="rounds of single decode steps (default 40)")
    parser.add_argument("--tokens", type=int, default=64, help="output tokens of a sequence in a batch (default 64)")
    parser.add_argument("--rounds", type=int, default=2, help="repetitions of everything else (default 2)")
    parser.add_argument("--no-transformers", action="store_true", help="leave the comparison out")
    return parser.parse_args(argv)

"""The model runner: block copies, one forward over all sequences of a step, logits where needed, and sampling.

launch:   inputs -> model -> logits -> samples, extremes of the written KV -> to the host     queued on the device
collect:  wait -> check -> one result per sequence                                            results are read only here
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, chain
from typing import Final

import torch
from torch import Tensor

from worker.attention.base import Attention, ForwardBatch, Span
from worker.attention.kv_cache import KVCache
from worker.attention.selector import select_attention
from worker.contracts.step import Launch, NonFinite, Row, SampledToken, SequenceResult, SequenceStep, Step, StepResult
from worker.kernels.device import DeviceStream, Stopwatch, current_device, to_device, to_host
from worker.model.load import LoadedModel
from worker.runner.graphs import RecordableAttention, StepGraphs, cuda_recorder, rerun
from worker.sampling.rules import TokenRules
from worker.sampling.sampler import LogprobRows, SamplerOutput, sample, token_logprobs
from worker.wire import SamplingParams, TokenLogprobs

logger = logging.getLogger(__name__)

_LOGPROB_ROWS: Final = 256
"""Prompt logprobs that are computed at a time: each needs a row of the vocabulary's size."""
_SUM_UNIT: Final = 2.0**-28
"""Finer than embeddings need; float64 adds multiples of it exactly, up to a sum of 2**25."""


class ModelRunner:
    """A `worker.contracts.step.Runner` over one decoder and one KV pool."""

    def __init__(
        self,
        model: LoadedModel,
        *,
        num_blocks: int,
        block_size: int,
        eos_token_ids: Sequence[int],
        max_num_seqs: int = 64,
        stream: DeviceStream | None = None,
    ) -> None:
        """Allocate the pool of `num_blocks` blocks, and record graphs for steps of up to `max_num_seqs` tokens.

        `eos_token_ids` are not sampled before min_tokens. Steps are queued on `stream`, if given.
        """
        self._decoder = model.decoder
        self._device = model.device
        self._stream = stream or DeviceStream(model.device)
        self._last: _StepOutput | None = None
        """The output of the last queued step, for one that follows it. None: it raised, or none can follow."""
        self._eos_token_ids = tuple(eos_token_ids)
        self._vocab_size = model.config.vocab_size
        shape = model.config.attention
        self.cache = KVCache(shape, num_blocks, block_size, model.dtype, model.device)
        self._attention = select_attention(shape, self.cache, deterministic=model.options.deterministic)
        max_model_len = min(model.config.max_model_len, (num_blocks - 1) * block_size)
        self._graphs = self._record(model, max_num_seqs, max_model_len)
        self.numerics = f"{model.numerics}/{self._attention.name}"

    @property
    def overlaps(self) -> bool:
        return self._stream.overlaps

    def prepare(self, params: SamplingParams, prompt_ids: Sequence[int]) -> object:
        return TokenRules(params, prompt_ids, self._eos_token_ids, self._vocab_size)

    def launch(self, step: Step) -> Launch[StepResult]:
        """Queue the step. Collecting may raise NoTokenLeft and NonFinite."""
        with _cleared_if_raises(self.cache, step):
            work = self._stream.enqueue(partial(self._compute, step))
        return Launch(partial(self._collect, step, work), work.is_done)

    def _collect(self, step: Step, work: Launch[tuple[_StepOutput, Stopwatch]]) -> StepResult:
        with _cleared_if_raises(self.cache, step):
            output, stopwatch = work.collect()
            return StepResult(output.results(), stopwatch.seconds())

    def run(self, step: Step) -> list[SequenceResult]:
        return self.launch(step).collect().sequences

    @torch.inference_mode()
    def _compute(self, step: Step) -> tuple[_StepOutput, Stopwatch]:
        stopwatch = Stopwatch(self._device)
        last, self._last = self._last, None
        self.cache.copy_blocks(step.copies)
        token_ids = None
        if any(sequence.follows is not None for sequence in step.sequences):
            if last is None:
                raise RuntimeError("there is no step to follow")
            token_ids = last.followed_token_ids(step)
        output = self._forward(step, token_ids, stopwatch)
        stopwatch.mark()
        if self._stream.overlaps:
            self._last = output
        return output, stopwatch

    def _forward(self, step: Step, token_ids: Tensor | None, stopwatch: Stopwatch) -> _StepOutput:
        """Run the model, and sample. `token_ids` (sequences,), if given, replace those of the decodes in `step`."""
        if not step.sequences:
            stopwatch.mark()
            return _StepOutput(step, (), None, {}, None, None)
        replayed = None if self._graphs is None else self._graphs.hidden(step.sequences, token_ids)
        if replayed is not None:
            order = list(map(Row, range(len(step.sequences))))
            sequences, (hidden, slots) = step.sequences, replayed
        else:
            order = attention_order(step.sequences)
            sequences = [step.sequences[index] for index in order]
            batch = build_batch(sequences, self._attention, self._device, self.cache.block_size)
            if token_ids is not None:
                batch.token_ids.copy_(token_ids[to_device(order, torch.int64, self._device)])
            hidden, slots = self._decoder.forward(batch, self._attention), batch.slots
        ends = list(accumulate([len(sequence.token_ids) for sequence in sequences]))
        logits = self._logits(sequences, ends, hidden)
        stopwatch.mark()
        rows = list(chain.from_iterable([sequence.sampling_rows for sequence in sequences]))
        sampled = None if logits is None else sample(logits, rows, self._eos_token_ids)
        return _StepOutput(
            step=step,
            order=order,
            sampled=sampled,
            prompt_logprobs={
                index: self._prompt_logprobs(sequence, ends[index], hidden)
                for index, sequence in enumerate(sequences)
                if sequence.num_prompt_logprobs is not None
            },
            extremes=to_host(self.cache.find_extremes(slots)),
            pooled=_pooled(sequences, ends, hidden),
        )

    def _logits(self, sequences: Sequence[SequenceStep], ends: Sequence[int], hidden: Tensor) -> Tensor | None:
        """Return a row of logits for every sampling row, from the last token of its sequence (`end - 1`)."""
        last_tokens = [end - 1 for sequence, end in zip(sequences, ends, strict=True) if sequence.sampling_rows]
        if not last_tokens:
            return None
        if len(last_tokens) < len(hidden):
            hidden = hidden[to_device(last_tokens, torch.int64, self._device)]
        logits = self._decoder.logits(hidden)
        counts = [len(sequence.sampling_rows) for sequence in sequences if sequence.sampling_rows]
        if sum(counts) > len(last_tokens):
            sources = [source for source, count in enumerate(counts) for _ in range(count)]
            logits = logits[to_device(sources, torch.int64, self._device)]
        return logits

    def _prompt_logprobs(self, sequence: SequenceStep, end: int, hidden: Tensor) -> list[LogprobRows]:
        num_top, next_ids = sequence.num_prompt_logprobs or 0, sequence.next_token_ids
        first = end - len(sequence.token_ids)
        found = []
        for start in range(0, len(next_ids), _LOGPROB_ROWS):
            ids = next_ids[start : start + _LOGPROB_ROWS]
            logits = self._decoder.logits(hidden[first + start : first + start + len(ids)])
            found.append(token_logprobs(logits, to_device(ids, torch.int64, self._device), [num_top] * len(ids)))
        return found

    def _record(self, model: LoadedModel, max_rows: int, max_model_len: int) -> StepGraphs | None:
        """Record small steps on a GPU. Models of transformers run eagerly instead: they also compute on the host."""
        if self._device.type != "cuda" or not isinstance(self._attention, RecordableAttention):
            return None
        try:
            with current_device(self._device), torch.inference_mode():
                return StepGraphs(
                    model.decoder,
                    self._attention,
                    self._device,
                    block_size=self.cache.block_size,
                    max_rows=max_rows,
                    max_model_len=max_model_len,
                    record=cuda_recorder() if model.decoder.is_recordable else rerun,
                )
        except RuntimeError as error:
            logger.warning("steps are launched kernel by kernel: CUDA graphs cannot be recorded: %s", error)
            return None


def _pooled(sequences: Sequence[SequenceStep], ends: Sequence[int], hidden: Tensor) -> Tensor | None:
    """Return (rows, hidden_size) float64 on the host: a row for each sequence that asks for its `hidden`."""
    rows = []
    for sequence, end in zip(sequences, ends, strict=True):
        if sequence.hidden == "last":
            rows.append(hidden[end - 1].double())
        elif sequence.hidden == "sum":
            # Multiples of one unit add up without rounding, so the sum does not depend on the chunks.
            tokens = hidden[end - len(sequence.token_ids) : end].double()
            rows.append((tokens / _SUM_UNIT).round_().sum(0) * _SUM_UNIT)
    return to_host(torch.stack(rows)) if rows else None


def attention_order(sequences: Sequence[SequenceStep]) -> list[Row]:
    """Return the order of `worker.attention.base`: decodes first, by context length, then chunks."""
    starts = [math.inf if len(sequence.token_ids) > 1 else sequence.start for sequence in sequences]
    return sorted(map(Row, range(len(sequences))), key=starts.__getitem__)


def build_batch(
    sequences: Sequence[SequenceStep], attention: Attention, device: torch.device, block_size: int
) -> ForwardBatch:
    """Concatenate the tokens of sequences, which are in order."""
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    for part in sequences:
        token_ids += part.token_ids
        positions += range(part.start, part.start + len(part.token_ids))
        slots += part.slots
    tensors = to_device((token_ids, positions, slots), torch.int64, device)
    plan = attention.plan([_span(part, block_size) for part in sequences])
    return ForwardBatch(tensors[0], tensors[1], tensors[2], plan)


def _span(part: SequenceStep, block_size: int) -> Span:
    """Describe a part to the attention. Where only a window is kept, repeat its block table up to the whole length.

    Such a sequence uses its blocks as a ring (`cache.allocators.plain`), so one block is found at several positions.
    Only the last of them is inside a window.
    """
    table, stop = part.block_table, part.start + len(part.token_ids)
    num_blocks = -(-stop // block_size)
    if len(table) < num_blocks:
        table = [table[index % len(table)] for index in range(num_blocks)]
    return Span(part.start, len(part.token_ids), table)


@dataclass(frozen=True, slots=True)
class _StepOutput:
    """A step's output, in the order of the batch. `results` reads the host copies."""

    step: Step
    order: Sequence[Row]
    """The row in the step of each sequence of the batch."""
    sampled: SamplerOutput | None
    prompt_logprobs: Mapping[int, Sequence[LogprobRows]]
    """By the place in the batch."""
    extremes: Tensor | None
    """The lowest and highest of the written keys and values."""
    pooled: Tensor | None
    """See `_pooled`."""

    def followed_token_ids(self, step: Step) -> Tensor:
        """Return (sequences,) on the device: the token that this output sampled for each sequence of `step`."""
        assert self.sampled is not None, "the step that is followed has sampled nothing"
        token_ids = self.sampled.device_token_ids
        firsts = self._first_logit_rows()
        rows = [firsts[row] for row in step.followed_rows(self.step.sequences)]
        return token_ids[to_device(rows, torch.int64, token_ids.device)]

    def results(self) -> list[SequenceResult]:
        """Read the tensors. Raises NoTokenLeft and NonFinite."""
        tokens = [] if self.sampled is None else self.sampled.tokens()
        if self.sampled is not None and not all(bool(best.isfinite().all()) for best in self.sampled.best_logits):
            self.sampled.check(self._reached_logit_rows(tokens))
        if self.extremes is not None and not bool(self.extremes.isfinite().all()):
            raise NonFinite("keys or values of the step are not finite")
        if self.pooled is not None and not bool(self.pooled.isfinite().all()):
            raise NonFinite("the hidden states of the step are not finite")
        pooled = iter(() if self.pooled is None else self.pooled.numpy())
        results = [SequenceResult()] * len(self.step.sequences)
        num_read = 0
        for index, row in enumerate(self.order):
            sequence, prompt_logprobs = self.step.sequences[row], list[TokenLogprobs]()
            for part in self.prompt_logprobs.get(index, ()):
                part.check()
                prompt_logprobs += part.rows()
            sampled = tuple(tokens[num_read : (num_read := num_read + len(sequence.sampling_rows))])
            hidden = None if sequence.hidden is None else next(pooled)
            results[row] = SequenceResult(sampled, tuple(prompt_logprobs), hidden)
        return results

    def _first_logit_rows(self) -> dict[Row, int]:
        """Return where the logits of each row of the step begin."""
        ends = accumulate(len(self.step.sequences[row].sampling_rows) for row in self.order)
        return dict(zip(self.order, (0, *ends), strict=False))

    def _reached_logit_rows(self, tokens: Sequence[SampledToken]) -> list[int]:
        """Return the rows of the logits that no wrong draft token precedes."""
        firsts, sequences = self._first_logit_rows(), self.step.sequences
        reached = self.step.reached_rows(lambda row: tokens[firsts[row]].token_id)
        return [firsts[row] + index for row in reached for index in range(len(sequences[row].sampling_rows))]


@contextmanager
def _cleared_if_raises(cache: KVCache, step: Step) -> Iterator[None]:
    """Zero the slots of a step that raises: the next owner of their blocks may read them as padding."""
    try:
        yield
    except Exception:
        with suppress(RuntimeError):  # the device may be lost
            cache.clear([slot for sequence in step.sequences for slot in sequence.slots])
        raise

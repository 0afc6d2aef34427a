"""Runs steps: block copies, one forward over all sequences, logits where they are needed, and the draws.

launch:   inputs -> model -> logits -> draws, extremes of what was written -> to the host     queued on the device
collect:  wait -> check -> one result a sequence                                              here results are looked at
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch
from torch import Tensor

from worker.attention.kv_cache import KVCache, NonFiniteKV
from worker.attention.selector import select_attention
from worker.device import DeviceStream, current_device, default_stream, to_device, to_host
from worker.engine.step import Launch, SequenceResult, SequenceStep, Step
from worker.model.llama import LlamaDecoder
from worker.model.load import LoadedModel
from worker.runner.batch import Batch, BatchedSequence, build_batch
from worker.runner.graphs import DecodeGraphs, RecordableAttention, cuda_recorder, rerun
from worker.sampling.sampler import LogprobRows, SamplerOutput, sample, token_logprobs

logger = logging.getLogger(__name__)

_LOGPROB_ROWS: Final = 256
"""Prompt logprobs need a row of the vocabulary's size per token: this many are held at a time."""


class ModelRunner:
    """A `worker.engine.step.Runner` over one decoder and one KV pool."""

    __slots__ = (
        "_attention",
        "_cache",
        "_decoder",
        "_device",
        "_eos_token_ids",
        "_graphs",
        "_last",
        "_stream",
        "numerics",
    )

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
        """`eos_token_ids` are hidden from draws before min_tokens. Allocates the pool of `num_blocks` blocks. Steps of
        more than `max_num_seqs` decodes may be slower. They are queued on `stream` if it is given, else as the device
        does it."""
        self._decoder = model.decoder
        self._device = model.device
        self._stream = stream or default_stream(model.device)
        self._last: _Outputs | None = None
        """Of the step queued last, for one that follows it; None: it has raised, or none will follow."""
        self._eos_token_ids = tuple(eos_token_ids)
        shape = model.config.attention
        self._cache = KVCache(shape, num_blocks, block_size, model.dtype, model.device)
        self._attention = select_attention(shape, self._cache, deterministic=model.options.deterministic)
        max_model_len = min(model.config.max_model_len, (num_blocks - 1) * block_size)
        self._graphs = self._record(model, max_num_seqs, max_model_len)
        self.numerics = f"{model.numerics}/{self._attention.name}"

    @property
    def cache(self) -> KVCache:
        return self._cache

    @property
    def overlaps(self) -> bool:
        return self._stream.overlaps

    def launch(self, step: Step) -> Launch[list[SequenceResult]]:
        """Results: one per sequence of the step, in its order. To collect them may raise SamplingError, and NonFiniteKV
        whether the step draws or not."""
        with _cleared_if_raises(self._cache, step):
            return _StepLaunch(self._cache, step, self._stream.enqueue(partial(self._compute, step)))

    def run(self, step: Step) -> list[SequenceResult]:
        return self.launch(step).collect()

    @torch.inference_mode()
    def _compute(self, step: Step) -> _Outputs:
        """Queue the whole of a step."""
        last, self._last = self._last, None
        self._cache.copy_blocks(step.copies)
        outputs = self._outputs(step, last)
        if self._stream.overlaps:
            self._last = outputs
        return outputs

    def _outputs(self, step: Step, last: _Outputs | None) -> _Outputs:
        token_ids = _followed(step, last)
        if not step.sequences:
            return _Outputs((), None, None, (), None)
        if (replayed := self._replay(step.sequences, token_ids)) is not None:
            tokens, slots = replayed
            places = [(place, sequence) for place, sequence in enumerate(step.sequences)]
            extremes = to_host(self._cache.find_extremes(slots))
            return _Outputs(places, tokens.token_ids, tokens.to_host(), [()] * len(places), extremes)
        batch = build_batch(step, self._attention, self._device, self._cache.block_size)
        if token_ids is not None:
            order = to_device([sequence.index for sequence in batch.sequences], torch.int64, self._device)
            batch.forward.token_ids.copy_(token_ids[order])
        hidden = self._decoder.forward(batch.forward, self._attention)
        drawn = self._draw(batch, hidden)
        return _Outputs(
            [(sequence.index, sequence.step) for sequence in batch.sequences],
            None if drawn is None else drawn.token_ids,
            None if drawn is None else drawn.to_host(),
            [self._prompt_logprobs(sequence, hidden) for sequence in batch.sequences],
            to_host(self._cache.find_extremes(batch.forward.slots)),
        )

    def _draw(self, batch: Batch, hidden: Tensor) -> SamplerOutput | None:
        """The draws of each sequence, from the logits of its last token."""
        drawing = [sequence for sequence in batch.sequences if sequence.step.sampling_rows]
        if not drawing:
            return None
        if len(drawing) < len(hidden):
            hidden = hidden[to_device([sequence.stop - 1 for sequence in drawing], torch.int64, self._device)]
        logits = self._decoder.logits(hidden)
        draws = [draw for sequence in drawing for draw in sequence.step.sampling_rows]
        if len(draws) > len(drawing):
            rows = [row for row, sequence in enumerate(drawing) for _ in sequence.step.sampling_rows]
            logits = logits[to_device(rows, torch.int64, self._device)]
        return sample(logits, draws, self._eos_token_ids)

    def _record(self, model: LoadedModel, max_rows: int, max_model_len: int) -> DecodeGraphs | None:
        """Decodes on a GPU. Models that are not our own may do on the host what a recording would not repeat."""
        if self._device.type != "cuda" or not isinstance(self._attention, RecordableAttention):
            return None
        try:
            with current_device(self._device), torch.inference_mode():
                return DecodeGraphs(
                    model.decoder,
                    self._attention,
                    self._device,
                    block_size=self._cache.block_size,
                    max_rows=max_rows,
                    max_model_len=max_model_len,
                    record=cuda_recorder() if isinstance(model.decoder, LlamaDecoder) else rerun,
                )
        except RuntimeError as error:
            logger.warning("decodes are launched kernel by kernel: CUDA graphs cannot be recorded: %s", error)
            return None

    def _replay(
        self, sequences: Sequence[SequenceStep], token_ids: Tensor | None
    ) -> tuple[SamplerOutput, Tensor] | None:
        """A step of decodes alone through its recording, and the slots that it writes; None: it has to be run."""
        if self._graphs is None or any(
            len(s.sampling_rows) != 1 or s.num_prompt_logprobs is not None for s in sequences
        ):
            return None
        if (replayed := self._graphs.logits(sequences, token_ids)) is None:
            return None
        logits, slots = replayed
        return sample(logits, [sequence.sampling_rows[0] for sequence in sequences], self._eos_token_ids), slots

    def _prompt_logprobs(self, sequence: BatchedSequence, hidden: Tensor) -> Sequence[LogprobRows]:
        num_top = sequence.step.num_prompt_logprobs
        if num_top is None:
            return ()
        next_ids, first = sequence.step.next_token_ids, sequence.first
        found: list[LogprobRows] = []
        for start in range(0, len(next_ids), _LOGPROB_ROWS):
            ids = next_ids[start : start + _LOGPROB_ROWS]
            logits = self._decoder.logits(hidden[first + start : first + start + len(ids)])
            rows = token_logprobs(logits, to_device(ids, torch.int64, self._device), [num_top] * len(ids))
            found.append(rows.to_host())
        return found


@dataclass(frozen=True, slots=True)
class _Outputs:
    """What a step leaves on the host, in the order of the batch."""

    sequences: Sequence[tuple[int, SequenceStep]]
    """Each with its place in the step."""
    token_ids: Tensor | None
    """What was drawn, on the device."""
    sampled: SamplerOutput | None
    prompt_logprobs: Sequence[Sequence[LogprobRows]]
    extremes: Tensor | None
    """Of the keys and values that were written."""

    def rows(self) -> dict[int, int]:
        """For each place in the step the row of `token_ids` with its first token."""
        rows, row = {}, 0
        for place, sequence in self.sequences:
            rows[place] = row
            row += len(sequence.sampling_rows)
        return rows

    def results(self) -> list[SequenceResult]:
        """Raises SamplingError, NonFiniteKV."""
        tokens = iter(() if self.sampled is None else self.sampled.tokens())
        if self.extremes is not None and not bool(self.extremes.isfinite().all()):
            raise NonFiniteKV("keys or values of the step are not finite")
        results = [SequenceResult()] * len(self.sequences)
        for (place, sequence), logprobs in zip(self.sequences, self.prompt_logprobs, strict=True):
            drawn = tuple(next(tokens) for _ in sequence.sampling_rows)
            results[place] = SequenceResult(drawn, tuple(token for rows in logprobs for token in rows.rows()))
        return results


def _followed(step: Step, last: _Outputs | None) -> Tensor | None:
    """(sequences,) the tokens of decodes that follow the last step, as it has drawn them; None: these do not."""
    places = [sequence.follows for sequence in step.sequences if sequence.follows is not None]
    if not places:
        return None
    assert len(places) == len(step.sequences), "a part of a step follows another"
    if last is None or last.token_ids is None:
        raise RuntimeError("there is no step to follow")
    rows = last.rows()
    return last.token_ids[to_device([rows[place] for place in places], torch.int64, last.token_ids.device)]


@dataclass(frozen=True, slots=True)
class _StepLaunch:
    """A `worker.engine.step.Launch` of a step over a pool."""

    cache: KVCache
    step: Step
    work: Launch[_Outputs]

    def is_done(self) -> bool:
        return self.work.is_done()

    def collect(self) -> list[SequenceResult]:
        with _cleared_if_raises(self.cache, self.step):
            return self.work.collect().results()


@contextmanager
def _cleared_if_raises(cache: KVCache, step: Step) -> Iterator[None]:
    """Zeroes what the step was to write when it raises, for whatever reason: it may have written some of it, and the
    blocks' next owner may read it as padding. What the step has only read is not touched."""
    try:
        yield
    except Exception:
        with suppress(RuntimeError):  # of a device that is gone
            cache.clear([slot for sequence in step.sequences for slot in sequence.slots])
        raise

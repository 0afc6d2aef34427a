"""The models of schedule episodes: exact arithmetic, and tiny random decoders under the real runner."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol
from zlib import crc32

import numpy as np
import torch
from msgspec.structs import replace
from torch import Tensor

from cache.hashing import encode_tokens
from cache.types import BlockId
from tests.worker.families import write_family
from tests.worker.kv_transfer.moving_engine import BLOCK_SIZE, TokenCopier
from tests.worker.scheduler.arithmetic_runner import GARBAGE, ArithmeticRunner, is_probe
from tests.worker.scheduler.engine import HandEngine, generate
from tests.worker.scheduler.episode_requests import EOS, LONGEST, VOCAB, Asked
from worker.attention.block_copier import make_copier
from worker.contracts.step import (
    NonFinite,
    NoTokenLeft,
    Row,
    Runner,
    SamplingRow,
    SequenceResult,
    SequenceStep,
    Step,
)
from worker.kernels.device import DeviceStream
from worker.kv_transfer.pool_blocks import Copier
from worker.model.load import LoadedModel, LoadOptions, load_model
from worker.runner.model_runner import ModelRunner
from worker.sampling.sampler import apply_edits, edits_of
from worker.scheduler.request import ConstraintError
from worker.wire import ChoiceState, End, GenerateRequest, SamplingParams

NONE_LEFT = -7
WINDOW = 9
TIE = 1e-4
"""The two best logits of the reference may change places if they are this close, without --deterministic."""


@dataclass(frozen=True, slots=True)
class Alone:
    """The answer for a choice that runs by itself, with a cold cache."""

    token_ids: list[int]
    reason: str
    """The reason of its end, or `no token`, or `not finite`."""
    prompt_logprobs: list[float] | None = None
    ties: frozenset[int] = frozenset()
    """Places in `token_ids` where another token is right too. Later tokens may then differ."""


@dataclass(slots=True)
class Faults:
    """The steps of an episode that raise, and the logits that are not finite."""

    raising: frozenset[int] = frozenset()
    """Numbers of steps."""
    spoiled: dict[int, int] = field(default_factory=dict)
    """A row of the logits, by the number of the step."""
    broken: tuple[list[int], int] | None = None
    """A prompt, and the number of output tokens after which its logits are never finite."""
    num_steps: int = 0

    def raises(self) -> bool:
        """Count a step. Return whether it raises."""
        self.num_steps += 1
        return self.num_steps in self.raising

    def spoiled_rows(self, rows: Sequence[SamplingRow]) -> list[int]:
        """Return the rows of this step whose logits are not finite; none of a probe, whose seed is 0."""
        if any(row.seed == 0 for row in rows):
            return []
        found = {self.spoiled[self.num_steps] % len(rows)} if rows and self.num_steps in self.spoiled else set()
        if self.broken is not None:
            prompt_ids, num_output = self.broken
            position = len(prompt_ids) + num_output
            found |= {i for i, row in enumerate(rows) if row.position == position and row.prompt_ids == prompt_ids}
        return sorted(found)

    @property
    def any_step(self) -> bool:
        """Some steps fail although their requests are valid."""
        return bool(self.raising or self.spoiled)

    def limit(self, asked: Asked, alone: Alone) -> Alone:
        """Return the answer that the faults leave."""
        if self.broken is None or asked.prompt_ids != self.broken[0] or len(alone.token_ids) <= self.broken[1]:
            return alone
        return Alone(alone.token_ids[: self.broken[1]], "not finite", alone.prompt_logprobs, alone.ties)


class EpisodeModel(Protocol):
    """The model of an episode, and its answers to a request that runs by itself."""

    window: int | None

    def alone(self, asked: Asked, index: int) -> Alone: ...

    def constraint(self, length: int, output_ids: Sequence[int] = ()) -> Turning:
        """Return the grammar state of a choice with this output."""

    def make_runner(self, num_blocks: int, faults: Faults, stream: DeviceStream | None) -> Runner: ...

    def copier(self, runner: Any) -> Copier: ...

    def blocks_alone(self, token_ids: Sequence[int]) -> list[Any]:
        """Return the content of each full block of the tokens, computed in one step."""

    def has_block(self, runner: Any, block_id: BlockId, content: Any) -> bool:
        """Return whether the pool holds the content."""

    def logprobs_agree(self, found: Sequence[float], expected: Sequence[float]) -> bool: ...


class Turning:
    """A grammar of `length` tokens, in which the token that is forbidden turns with those before."""

    def __init__(self, length: int, pack: Callable[[frozenset[int]], object], output_ids: Sequence[int] = ()) -> None:
        self.length, self.num_taken, self.state = length, 0, 0
        self.pack = pack
        for token_id in output_ids:
            self.advance(token_id)

    @property
    def finished(self) -> bool:
        return self.num_taken >= self.length

    def allowed(self) -> object:
        return self.pack(frozenset(range(VOCAB)) - {self.state % VOCAB})

    def allowed_along(self, draft_ids: Sequence[int]) -> Sequence[object]:
        scout = Turning(self.length, self.pack)
        scout.num_taken, scout.state = self.num_taken, self.state
        masks = [scout.allowed()]
        for draft_id in draft_ids:
            if draft_id == scout.state % VOCAB:
                break
            scout.advance(draft_id)
            if scout.finished:
                break
            masks.append(scout.allowed())
        return masks

    def advance(self, token_id: int) -> None:
        if token_id == self.state % VOCAB or self.finished:
            raise ConstraintError(f"{token_id} does not follow")
        self.num_taken, self.state = self.num_taken + 1, self.state * 3 + token_id + 1


def choose(read: Sequence[int], params: SamplingParams, seed: int, output_ids: Sequence[int], allowed: Any) -> int:
    """Return the best token that the rules leave, or NONE_LEFT."""
    digest = crc32(encode_tokens(read) + seed.to_bytes(8, "little"))
    scores = {token_id: float(crc32(bytes([token_id]), digest) % 256) for token_id in range(VOCAB)}
    for token_id in scores:
        scores[token_id] += dict(params.logit_bias).get(token_id, 0.0)
        scores[token_id] -= 100 * params.frequency_penalty * output_ids.count(token_id)
    left = set(scores if params.allowed_token_ids is None else params.allowed_token_ids)
    left &= set(scores) if allowed is None else allowed
    for word in params.bad_words:
        if len(word) == 1 or tuple(output_ids[1 - len(word) :]) == word[:-1]:
            left.discard(word[-1])
    if len(output_ids) < params.min_tokens:
        left = left - {*EOS, *params.stop_token_ids} or left
    return max(left, key=lambda token_id: (scores[token_id], token_id), default=NONE_LEFT)


class RuledRunner(ArithmeticRunner):
    """Samples by the rules of each row, and raises for a row that counts and has no token left."""

    def __init__(self, num_blocks: int, faults: Faults, stream: DeviceStream | None, window: int | None) -> None:
        super().__init__(num_blocks, BLOCK_SIZE, lambda step: not is_probe(step) and faults.raises(), stream, window)
        self.faults = faults

    def _sample(self, read: Sequence[int], row: SamplingRow) -> int:
        known_ids = [*row.prompt_ids, *row.output_ids, *row.draft_ids][row.position - len(read) :]
        assert read[: len(known_ids)] == known_ids or GARBAGE in read, "the KV is of other tokens than the row"
        output_ids = [*row.output_ids, *row.draft_ids, *read[len(known_ids) :]]
        return choose(read, row.params, row.seed, output_ids, row.allowed)

    def compute(self, step: Step) -> list[SequenceResult]:
        results = super().compute(step)
        reached = set(step.reached_rows(lambda row: results[row].sampled[0].token_id))
        rows = [(Row(row), each) for row, sequence in enumerate(step.sequences) for each in sequence.sampling_rows]
        spoiled = [rows[index][0] for index in self.faults.spoiled_rows([each for _, each in rows])]
        if reached.intersection(spoiled):
            self._overwrite(step)
            raise NonFinite("the logits are not finite")
        if any(token.token_id == NONE_LEFT for row in reached for token in results[row].sampled):
            self._overwrite(step)
            raise NoTokenLeft("the rules leave no token")
        return results

    def _overwrite(self, step: Step) -> None:
        for sequence in step.sequences:
            for slot in sequence.slots:
                self.kv[slot] = GARBAGE


@dataclass(frozen=True, slots=True)
class ExactModel:
    """The next token is a hash of all tokens before, or of those in the window."""

    window: int | None = None

    def alone(self, asked: Asked, index: int) -> Alone:
        params = generate(asked.prompt_ids, asked.max_tokens, **asked.fields).sampling
        grammar = None if asked.grammar_length is None else self.constraint(asked.grammar_length)
        output_ids: list[int] = []
        logprobs = [-float(token_id) for token_id in asked.prompt_ids[1:]]
        while len(output_ids) < asked.max_tokens:
            allowed = None if grammar is None else grammar.allowed()
            token_ids = [*asked.prompt_ids, *output_ids]
            read = token_ids if self.window is None else token_ids[-self.window :]
            token_id = choose(read, params, 100 + index, output_ids, allowed)
            if token_id == NONE_LEFT:
                return Alone(output_ids, "no token", logprobs)
            output_ids.append(token_id)
            if grammar is not None:
                grammar.advance(token_id)
            if len(output_ids) > params.min_tokens and token_id in (*EOS, *params.stop_token_ids):
                return Alone(output_ids, "stop", logprobs)
            if grammar is not None and grammar.finished:
                return Alone(output_ids, "stop", logprobs)
        return Alone(output_ids, "length", logprobs)

    def constraint(self, length: int, output_ids: Sequence[int] = ()) -> Turning:
        return Turning(length, lambda allowed: allowed, output_ids)

    def make_runner(self, num_blocks: int, faults: Faults, stream: DeviceStream | None) -> RuledRunner:
        return RuledRunner(num_blocks, faults, stream, self.window)

    def copier(self, runner: RuledRunner) -> Copier:
        return TokenCopier(runner)

    def blocks_alone(self, token_ids: Sequence[int]) -> list[list[int]]:
        last = len(token_ids) - BLOCK_SIZE + 1
        return [list(token_ids[start : start + BLOCK_SIZE]) for start in range(0, last, BLOCK_SIZE)]

    def has_block(self, runner: RuledRunner, block_id: BlockId, content: list[int]) -> bool:
        return runner.kv[block_id * BLOCK_SIZE :][:BLOCK_SIZE] == content

    def logprobs_agree(self, found: Sequence[float], expected: Sequence[float]) -> bool:
        return found == expected


class FaultyRunner(ModelRunner):
    """The real runner, whose steps fail after they have written their KV, or have logits that are not finite."""

    def __init__(self, model: LoadedModel, num_blocks: int, faults: Faults, stream: DeviceStream | None = None) -> None:
        super().__init__(model, num_blocks=num_blocks, block_size=BLOCK_SIZE, eos_token_ids=EOS, stream=stream)
        self.faults = faults

    def _forward(self, step: Step, *rest: Any) -> Any:
        written = [slot for sequence in step.sequences for slot in sequence.slots]
        assert len(written) == len(set(written)), "two tokens of one step share a slot"
        raises = not is_probe(step) and self.faults.raises()
        output = super()._forward(step, *rest)
        if raises:
            raise RuntimeError("the device says no")
        return output

    def _logits(self, sequences: Sequence[SequenceStep], ends: Sequence[int], hidden: Tensor) -> Tensor | None:
        logits = super()._logits(sequences, ends, hidden)
        rows = [row for sequence in sequences for row in sequence.sampling_rows]
        if logits is not None and (spoiled := self.faults.spoiled_rows(rows)):
            logits = logits.clone()
            logits[spoiled] = float("nan")
        return logits


class _ReferenceRunner(FaultyRunner):
    """Keeps the gap between the two best logits of each step that samples greedily, and 1.0 for others."""

    def __init__(self, model: LoadedModel) -> None:
        super().__init__(model, 2 + LONGEST // BLOCK_SIZE, Faults())
        self.gaps: list[float] = []

    def _logits(self, sequences: Sequence[SequenceStep], ends: Sequence[int], hidden: Tensor) -> Tensor | None:
        logits = super()._logits(sequences, ends, hidden)
        rows = [row for sequence in sequences for row in sequence.sampling_rows]
        if logits is not None:
            best = apply_edits(logits, *edits_of(rows, EOS, logits.shape[1])).topk(2).values[0]
            self.gaps.append(float(best[0] - best[1]) if rows[0].params.greedy else 1.0)
        return logits


class TinyModel:
    """A tiny random decoder in float32."""

    def __init__(self, model: LoadedModel) -> None:
        self.deterministic = model.options.deterministic
        self.window = model.config.attention.longest_window
        self._model = model
        self._reference = _ReferenceRunner(model)

    def alone(self, asked: Asked, index: int) -> Alone:
        wire: GenerateRequest = generate(asked.prompt_ids, asked.max_tokens, **asked.fields)
        wire = replace(wire, choices=(ChoiceState(0, 100 + index, ()),))
        num_blocks = self._reference.cache.num_blocks
        engine = HandEngine(num_blocks, BLOCK_SIZE, runner=self._reference, prefix_cache="off", eos=EOS)
        self._reference.gaps.clear()
        constraints = {} if asked.grammar_length is None else {0: self.constraint(asked.grammar_length)}
        request = engine.submit(wire, constraints)
        engine.finish()
        got = engine.answer(request)
        reason = got.finished[0].reason if isinstance(got.last, End) else "no token"
        positions = () if got.prompt_logprobs is None else got.prompt_logprobs.positions[1:]
        close = [] if self.deterministic else [i for i, gap in enumerate(self._reference.gaps) if gap < TIE]
        return Alone(got.tokens.get(0, []), reason, [each.logprob for each in positions], frozenset(close))

    def constraint(self, length: int, output_ids: Sequence[int] = ()) -> Turning:
        return Turning(length, _bit_mask, output_ids)

    def make_runner(self, num_blocks: int, faults: Faults, stream: DeviceStream | None) -> FaultyRunner:
        return FaultyRunner(self._model, num_blocks, faults, stream)

    def copier(self, runner: ModelRunner) -> Copier:
        return make_copier(runner.cache)

    def blocks_alone(self, token_ids: Sequence[int]) -> list[Tensor]:
        num_blocks = len(token_ids) // BLOCK_SIZE
        token_ids = token_ids[: num_blocks * BLOCK_SIZE]
        table = [BlockId(block_id) for block_id in range(1, 1 + num_blocks)]
        if token_ids:
            slots = range(BLOCK_SIZE, BLOCK_SIZE + len(token_ids))
            self._reference.run(Step([SequenceStep(token_ids, 0, table, slots)]))
        return [_block(self._reference, block_id).clone() for block_id in table]

    def has_block(self, runner: ModelRunner, block_id: BlockId, content: Tensor) -> bool:
        found = _block(runner, block_id)
        if self.deterministic:
            return torch.equal(found, content)
        return torch.allclose(found, content, rtol=1e-3, atol=1e-3)

    def logprobs_agree(self, found: Sequence[float], expected: Sequence[float]) -> bool:
        if self.deterministic:
            return found == expected
        return bool(np.allclose(found, expected, rtol=1e-3, atol=1e-3))


def _block(runner: ModelRunner, block_id: BlockId) -> Tensor:
    return runner.cache.rows[:, block_id * BLOCK_SIZE : (block_id + 1) * BLOCK_SIZE]


def _bit_mask(allowed: frozenset[int]) -> object:
    return np.array([sum(1 << token_id for token_id in allowed)], dtype=np.int32)


EXACT: tuple[EpisodeModel, ...] = (ExactModel(), ExactModel(), ExactModel(WINDOW))


def load_tiny(folder: Path) -> tuple[EpisodeModel, ...]:
    """Write the checkpoints of tiny models, and load each of them with --deterministic and without."""
    options = (LoadOptions(dtype="float32"), LoadOptions(dtype="float32", deterministic=True))
    models = []
    for family in ("llama3", "llama3", "mistral_window"):
        if not (folder / family).exists():
            write_family(family, folder / family, vocab_size=VOCAB, num_hidden_layers=2)
        models += [TinyModel(load_model(str(folder / family), each)) for each in options]
    return tuple(models)

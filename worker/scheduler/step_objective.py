"""An objective for the time of a step: how much prefill fits next to the decodes.

    room       = objective / margin - time of a step of the decodes only
    tokens     = room / time of a prefill token, which grows with its position in the prompt

Both times are fitted to the recent steps. The margin covers what the fit misses: it keeps 99 of 100 steps within the
objective if their times scatter as those of a normal distribution do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from worker.contracts.rates import FadedLine, StepCost

_FADE: Final = 0.97  # 23 steps halve a weight
_PRIOR_VARIANCE: Final = 256.0**2
"""The weight of the guess that a token costs the same at every position, in squared tokens."""
_MIN_SHARE: Final = 0.25
"""A token costs at least this share of the mean one: a steep fit would make the first tokens free."""
_NUM_DEVIATIONS: Final = 2.33
"""Standard deviations of the normal distribution that 99 of 100 values stay below."""
_FIRST_DEVIATION: Final = 0.1  # until steps are measured
_MIN_DEVIATION: Final = 0.01  # a row of equal steps does not promise the next one
_MOST_TOKENS: Final = 1 << 30  # no limit, as an integer
_MAX_RATIO: Final = 2.0
"""A step that took longer, over its prediction, counts as this: the machine stalled."""


class StepObjective:
    """Bounds the prefill tokens of steps with decodes, to take at most `max_step_s`. Owned by the scheduler."""

    def __init__(self, max_step_s: float, block_size: int, token_s: float = 0.0, fixed_tokens: float = 0.0) -> None:
        """The first guess: `token_s` for each token, and a fixed cost of `fixed_tokens * token_s` for each step."""
        self.max_step_s = max_step_s
        self.block_size = block_size
        self._decodes = StepCost(token_s, fixed_tokens)
        self._token = FadedLine(0.0, token_s, 0.0, _FADE, _PRIOR_VARIANCE)
        """Seconds of a prefill token over its position."""
        self._ratio = 1.0
        """Time of a step over its prediction, the mean."""
        self._variance = _FIRST_DEVIATION**2

    @property
    def margin(self) -> float:
        """The time over its prediction that one step in a hundred exceeds."""
        return self._ratio + _NUM_DEVIATIONS * max(_MIN_DEVIATION, math.sqrt(self._variance))

    def decode_s(self, num_decodes: int) -> float:
        """Return the predicted time of a step of decodes only."""
        return self._decodes.seconds(num_decodes)

    def token_s(self, position: float) -> float:
        """Return the predicted time of a prefill token at this position."""
        return max(self._token.at(position), _MIN_SHARE * self._token.mean_y)

    def worth(self, num_tokens: int, start: int) -> int:
        """Return how many tokens at the start of a prompt take as long as these from position `start`."""
        return math.ceil(num_tokens * self._weight(start + num_tokens / 2))

    def tokens_worth(self, num_first: int, start: int) -> int:
        """Return how many tokens from position `start` take at most as long as `num_first` at the start of a prompt."""
        most = num_first / self._weight(start)
        return int(num_first / self._weight(start + most / 2))

    def _weight(self, position: float) -> float:
        first_s = self.token_s(0.0)
        return max(1.0, self.token_s(position) / first_s) if first_s > 0.0 else 1.0

    def max_prefill_tokens(self, num_decodes: int) -> int:
        """Return how many tokens at the start of a prompt fit into a step with these decodes."""
        return int(min(_MOST_TOKENS, self._num_tokens(num_decodes, self.token_s(0.0))))

    def prefill_tokens_per_s(self, num_decodes: int, max_tokens: int) -> float:
        """Return the prefill rate in steps with these decodes, of at most `max_tokens`; 0.0 if it is not known."""
        token_s = self.token_s(self._token.mean_x)
        num_tokens = min(max_tokens, max(self.block_size, self._num_tokens(num_decodes, token_s)))
        step_s = self.decode_s(num_decodes) + num_tokens * token_s
        return num_tokens / (self._ratio * step_s) if step_s > 0.0 else 0.0

    def measure(self, num_decodes: int, prefills: Sequence[range], duration_s: float) -> None:
        """Take the duration of a step with `prefills` of these positions. One without decodes measures nothing.

        A draft token counts as a decode.
        """
        if num_decodes and not prefills:
            self._decodes.measure(num_decodes, duration_s)
        elif num_decodes:
            self._measure_mixed(num_decodes, prefills, duration_s)

    def _num_tokens(self, num_decodes: int, token_s: float) -> float:
        room_s = self.max_step_s / self.margin - self.decode_s(num_decodes)
        return max(0.0, room_s) / token_s if token_s > 0.0 else math.inf

    def _measure_mixed(self, num_decodes: int, prefills: Sequence[range], duration_s: float) -> None:
        num_tokens = sum(map(len, prefills))
        position = sum(len(tokens) * (tokens.start + tokens.stop) for tokens in prefills) / (2 * num_tokens)
        decode_s, prefill_s = self.decode_s(num_decodes), num_tokens * self.token_s(position)
        room_s = self.max_step_s - decode_s
        weight = (prefill_s / room_s) ** 2 if room_s > prefill_s > 0.0 else 1.0  # a short prefill measures little
        if (predicted_s := decode_s + prefill_s) > 0.0:
            fade = _FADE**weight
            difference = min(duration_s / predicted_s, _MAX_RATIO) - self._ratio
            self._ratio += (1.0 - fade) * difference
            self._variance = fade * (self._variance + (1.0 - fade) * difference * difference)
        token_s = max(0.0, duration_s - decode_s) / num_tokens
        if prefill_s > 0.0:
            token_s = min(token_s, 2.0 * _MAX_RATIO * prefill_s / num_tokens)
        self._token.add(position, token_s, weight)

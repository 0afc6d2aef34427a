"""Ten `generation_config.json` files in the forms that models have, each with what a request without fields becomes."""

from __future__ import annotations

from typing import Any, Final

CONFIGS: Final[dict[str, tuple[dict[str, Any], dict[str, float]]]] = {
    "thinks": (
        {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "transformers_version": "4.51.0"},
        {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
    ),
    "codes": (
        {"do_sample": True, "repetition_penalty": 1.05, "temperature": 0.7, "top_p": 0.8, "top_k": 20},
        {"repetition_penalty": 1.05, "temperature": 0.7, "top_p": 0.8, "top_k": 20},
    ),
    "only its ends": ({"bos_token_id": 1, "eos_token_id": [2, 3], "pad_token_id": 0}, {}),
    "a limit": ({"max_new_tokens": 40, "temperature": 0.3}, {"max_tokens": 40, "temperature": 0.3}),
    "a limit beyond the context": ({"max_new_tokens": 100_000}, {}),
    "greedy": ({"do_sample": False, "temperature": 0.0}, {"temperature": 0.0}),
    "does not sample": ({"do_sample": False, "temperature": 0.9, "top_p": 0.6}, {"temperature": 0.9, "top_p": 0.6}),
    "neutral": ({"temperature": 1.0, "top_p": 1.0, "top_k": 0, "repetition_penalty": 1.0}, {}),
    "the default of transformers": ({"temperature": 1.0, "top_k": 50}, {"top_k": 50}),
    "rare ones": (
        {"min_p": 0.1, "top_k": -1, "presence_penalty": 1.5, "frequency_penalty": 0.2, "typical_p": 0.9},
        {"min_p": 0.1, "presence_penalty": 1.5, "frequency_penalty": 0.2},
    ),
}
CONTEXT: Final = 2048

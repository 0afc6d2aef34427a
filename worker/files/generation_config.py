"""The sampling defaults of a model: its files' own, as vLLM reads them.

`generation_config.json` counts, and without one the same fields of `config.json`. `do_sample` does not: a client that
wants the most likely tokens sends a temperature of 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec

from worker.files.errors import CheckpointError
from worker.files.tokenizer_files import read_json
from worker.wire import NO_DEFAULTS, SamplingDefaults

NONE: Final = ("none", "vllm")
"""Values of --generation-config that take no defaults of the model. The second is vLLM's own word."""
_RENAMED: Final = {"max_tokens": "max_new_tokens"}
_GGUF: Final = {
    "temperature": "general.sampling.temp",
    "top_p": "general.sampling.top_p",
    "top_k": "general.sampling.top_k",
    "min_p": "general.sampling.min_p",
    "repetition_penalty": "general.sampling.penalty_repeat",
}


class Fields(Protocol):
    """A JSON object, or the metadata of a GGUF file."""

    def get(self, key: str, /) -> Any: ...


def sampling_defaults(choice: str, folder: Path) -> SamplingDefaults:
    """Return the defaults that --generation-config chooses: `auto` reads `folder`, another value is a folder itself.

    Raise CheckpointError, which names the file.
    """
    if choice in NONE:
        return NO_DEFAULTS
    source = folder if choice == "auto" else Path(choice).expanduser()
    for name in ("generation_config.json", "config.json"):
        if (file := source / name).is_file():
            fields = {field: _RENAMED.get(field, field) for field in SamplingDefaults.__struct_fields__}
            return _defaults(read_json(file), fields, str(file))
    if choice != "auto":
        raise CheckpointError(f"--generation-config: {source} has no generation_config.json")
    return NO_DEFAULTS


def gguf_defaults(choice: str, metadata: Fields, file: Path) -> SamplingDefaults:
    """Return the defaults that a GGUF file holds, or those of the folder that --generation-config names.

    Raise CheckpointError.
    """
    if choice == "auto":
        return _defaults(metadata, _GGUF, str(file))
    return sampling_defaults(choice, file.parent)


def _defaults(values: Fields, names: Mapping[str, str], source: str) -> SamplingDefaults:
    """Read each field under its name in `values`."""
    found = {field: value for field, name in names.items() if (value := values.get(name)) is not None}
    if found.get("top_k", 0) == -1:
        found["top_k"] = 0
    try:
        return msgspec.convert(found, SamplingDefaults, strict=False)
    except msgspec.ValidationError as error:
        raise CheckpointError(f"{source}: {error}; correct it, or start with --generation-config none") from error

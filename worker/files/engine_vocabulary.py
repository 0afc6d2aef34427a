"""Vocabularies that only an engine can read: tekken.json, ranks in tiktoken's format, and Python code for them.

A gateway needs no vocabulary where the engine renders prompts and writes answers. It needs the control tokens, and a
digest of the files, which differs for two vocabularies.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from worker.files.errors import CheckpointError

VOCABULARY_FILES: Final = ("tekken.json", "*.tiktoken", "tiktoken.model", "tokenizer.model*")
_CODE_FILES: Final = ("tokenization_*.py", "encoding_*.py")
ENGINE_FILES: Final = (*VOCABULARY_FILES, *_CODE_FILES)
"""Files of a repository that the digest needs."""
_FLAGS: Final = ("single_word", "lstrip", "rstrip", "normalized")


def engine_vocabulary(folder: Path, config: Mapping[str, Any]) -> bytes | None:
    """Return a JSON object with the digest and the `added_tokens`, as in tokenizer.json; None without a vocabulary.

    `config`: the content of tokenizer_config.json. Raise CheckpointError for a vocabulary without control tokens.
    """
    if not any(path for pattern in VOCABULARY_FILES for path in folder.glob(pattern)):
        return None
    digest = hashlib.sha256()
    try:
        for path in sorted({path for pattern in ENGINE_FILES for path in folder.glob(pattern)}):
            digest.update(f"{path.name}\0{path.stat().st_size}\0".encode() + path.read_bytes())
        tekken = json.loads((folder / "tekken.json").read_bytes()) if (folder / "tekken.json").is_file() else {}
        added = _tekken_tokens(tekken) or _config_tokens(config)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{folder}: its vocabulary cannot be read: {error}") from error
    if not added and not tekken:  # mistral-common reads no control token in a text
        raise CheckpointError(
            f"{folder} names no control tokens: list them in added_tokens_decoder of tokenizer_config.json"
        )
    return json.dumps({"digest": digest.hexdigest(), "added_tokens": added}).encode()


def _tekken_tokens(tekken: Mapping[str, Any]) -> list[dict[str, Any]]:
    special = tekken.get("special_tokens") or ()
    return [_token(int(token["rank"]), token["token_str"], bool(token["is_control"])) for token in special]


def _config_tokens(config: Mapping[str, Any]) -> list[dict[str, Any]]:
    decoder: Mapping[str, Any] = config.get("added_tokens_decoder") or {}
    return [_token(int(id_), token["content"], bool(token.get("special", False))) for id_, token in decoder.items()]


def _token(id_: int, content: str, special: bool) -> dict[str, Any]:
    return {"id": id_, "content": content, "special": special} | dict.fromkeys(_FLAGS, False)

"""What a gateway needs of a model's tokenizer, built from the checkpoint that the worker has loaded."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tokenizers import Tokenizer

from worker.model.bpe import TokenType, canonical_json, tokenizer_from_gguf
from worker.model.checkpoint import Checkpoint
from worker.model.errors import CheckpointError
from worker.model.gguf import GGUFCheckpoint, Metadata
from worker.model.load import LoadedModel
from worker.model.safetensors import read_json
from worker.wire import TokenizerBundle

_END_OF_TURN: Final = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>")
"""Control tokens that end an answer when the model's chat template writes them, whatever its file calls EOS."""


@dataclass(frozen=True, slots=True)
class _Parts:
    """The fields that make two tokenizers different."""

    tokenizer_json: bytes
    chat_template: str | None
    bos_token: str | None
    eos_token: str | None
    eos_token_ids: tuple[int, ...]
    add_bos: bool

    @property
    def fingerprint(self) -> str:
        digest = hashlib.blake2b(digest_size=16)
        fields = (self.chat_template, self.bos_token, self.eos_token, self.eos_token_ids, self.add_bos)
        for part in (self.tokenizer_json, repr(fields).encode()):
            digest.update(len(part).to_bytes(8, "little") + part)
        return digest.hexdigest()


def build_bundle(model: LoadedModel, *, block_size: int, max_model_len: int) -> TokenizerBundle:
    """Raises ModelError when the checkpoint has no tokenizer that `tokenizers` can run."""
    parts = _parts(model.checkpoint)
    return TokenizerBundle(
        fingerprint=parts.fingerprint,
        model=model.name,
        revision=model.revision,
        tokenizer_json=parts.tokenizer_json,
        chat_template=parts.chat_template,
        bos_token=parts.bos_token,
        eos_token=parts.eos_token,
        eos_token_ids=parts.eos_token_ids,
        add_bos=parts.add_bos,
        vocab_size=model.config.vocab_size,
        max_model_len=max_model_len,
        block_size=block_size,
    )


def _parts(checkpoint: Checkpoint) -> _Parts:
    if isinstance(checkpoint, GGUFCheckpoint):
        return _from_gguf(checkpoint.metadata)
    return _from_folder(checkpoint.path)


def _from_gguf(metadata: Metadata) -> _Parts:
    tokenizer = tokenizer_from_gguf(metadata)
    tokens = metadata["tokenizer.ggml.tokens"]
    types = metadata["tokenizer.ggml.token_type"]
    template = metadata.get("tokenizer.chat_template")
    ids = {int(metadata["tokenizer.ggml.eos_token_id"])}
    for key in ("tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id"):
        if (token_id := metadata.get(key)) is not None:
            ids.add(int(token_id))
    for token in _END_OF_TURN:
        token_id = tokenizer.token_to_id(token)
        if template and token in template and token_id is not None and types[token_id] == TokenType.CONTROL:
            ids.add(token_id)
    bos_id = metadata.get("tokenizer.ggml.bos_token_id")
    return _Parts(
        tokenizer_json=canonical_json(tokenizer),
        chat_template=template,
        bos_token=None if bos_id is None else tokens[int(bos_id)],
        eos_token=tokens[int(metadata["tokenizer.ggml.eos_token_id"])],
        eos_token_ids=tuple(sorted(ids)),
        add_bos=bool(metadata.get("tokenizer.ggml.add_bos_token", False)),
    )


def _from_folder(folder: Path) -> _Parts:
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise CheckpointError(f"{folder} has no tokenizer.json; save a fast tokenizer there (save_pretrained does)")
    tokenizer_json = file.read_bytes()
    try:
        tokenizer = Tokenizer.from_buffer(tokenizer_json)
    except Exception as error:  # the binding raises plain Exception for whatever is wrong with the file
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    config = _optional_json(folder / "tokenizer_config.json")
    bos, eos = _token_text(config.get("bos_token")), _token_text(config.get("eos_token"))
    bos_id = None if bos is None else tokenizer.token_to_id(bos)
    return _Parts(
        tokenizer_json=tokenizer_json,
        chat_template=_chat_template(folder, config),
        bos_token=bos,
        eos_token=eos,
        eos_token_ids=_eos_token_ids(folder, tokenizer, eos),
        add_bos=bos_id is not None and tokenizer.encode("a").ids[:1] == [bos_id],
    )


def _eos_token_ids(folder: Path, tokenizer: Tokenizer, eos: str | None) -> tuple[int, ...]:
    """generation_config.json says best; config.json is next; the tokenizer's own EOS always counts."""
    ids: set[int] = set()
    for file in ("generation_config.json", "config.json"):
        listed = _optional_json(folder / file).get("eos_token_id")
        if listed is not None:
            ids.update(listed if isinstance(listed, list) else [listed])
            break
    if eos is not None and (eos_id := tokenizer.token_to_id(eos)) is not None:
        ids.add(eos_id)
    return tuple(sorted(int(token_id) for token_id in ids))


def _chat_template(folder: Path, config: dict[str, Any]) -> str | None:
    """chat_template.jinja, or the field of tokenizer_config.json: a text, or named texts of which `default` counts."""
    if (file := folder / "chat_template.jinja").is_file():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _token_text(token: object) -> str | None:
    """Special tokens are stored as a text, or as an object with its `content`."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _optional_json(file: Path) -> dict[str, Any]:
    return read_json(file) if file.is_file() else {}

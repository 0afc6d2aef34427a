"""The tokenizer bundle that gateways fetch, built from the checkpoint that the worker has loaded.

GGUF files hold a vocabulary and merges; for byte-level BPE families they become a `tokenizers` tokenizer here.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from gguf import TokenType
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from worker.model.config import CheckpointError, UnsupportedModel
from worker.model.gguf import GGUFCheckpoint, Metadata
from worker.model.huggingface import read_json
from worker.model.load import LoadedModel
from worker.wire import TokenizerBundle

_END_OF_TURN: Final = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>")
"""Control tokens that end an answer if the chat template writes them, whatever the file calls EOS."""
_SPLIT_ENDING: Final = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CONTRACTIONS_AND_WORDS: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_LLAMA3_PATTERN: Final = _CONTRACTIONS_AND_WORDS + r"\p{N}{1,3}" + _SPLIT_ENDING
_QWEN2_PATTERN: Final = _CONTRACTIONS_AND_WORDS + r"\p{N}" + _SPLIT_ENDING


@dataclass(frozen=True, slots=True)
class _Family:
    """How a family of tokenizers splits text before BPE. `pattern` None: GPT-2's own, inside ByteLevel."""

    pattern: str | None
    single_digits: bool = False
    whole_words_first: bool = False
    nfc: bool = False


_FAMILIES: Final = {
    "smollm": _Family(pattern=None, single_digits=True),
    "gpt-2": _Family(pattern=None),
    "llama-bpe": _Family(pattern=_LLAMA3_PATTERN, whole_words_first=True),
    "llama3": _Family(pattern=_LLAMA3_PATTERN, whole_words_first=True),
    "qwen2": _Family(pattern=_QWEN2_PATTERN, nfc=True),
}


def build_bundle(model: LoadedModel, *, block_size: int, max_model_len: int) -> TokenizerBundle:
    """Raise ModelError when the checkpoint has no tokenizer that `tokenizers` can run."""
    checkpoint = model.checkpoint
    if isinstance(checkpoint, GGUFCheckpoint):
        fields = _from_gguf(checkpoint.metadata)
    else:
        fields = _from_folder(checkpoint.path)
    return TokenizerBundle(
        fingerprint=_fingerprint(*fields.values()),
        model=checkpoint.name,
        revision=checkpoint.revision,
        vocab_size=model.config.vocab_size,
        max_model_len=max_model_len,
        block_size=block_size,
        **fields,
    )


def _fingerprint(tokenizer_json: bytes, *fields: object) -> str:
    """Digest the fields by which two tokenizers differ."""
    digest = hashlib.blake2b(digest_size=16)
    for part in (tokenizer_json, repr(fields).encode()):
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()


def _from_gguf(metadata: Metadata) -> dict[str, Any]:
    """Return the fields of the fingerprint, in its order."""
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
    return {
        "tokenizer_json": canonical_json(tokenizer),
        "chat_template": template,
        "bos_token": None if bos_id is None else tokens[int(bos_id)],
        "eos_token": tokens[int(metadata["tokenizer.ggml.eos_token_id"])],
        "eos_token_ids": tuple(sorted(ids)),
        "add_bos": bool(metadata.get("tokenizer.ggml.add_bos_token", False)),
    }


def _from_folder(folder: Path) -> dict[str, Any]:
    """Return the fields of the fingerprint, in its order."""
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
    return {
        "tokenizer_json": tokenizer_json,
        "chat_template": _chat_template(folder, config),
        "bos_token": bos,
        "eos_token": eos,
        "eos_token_ids": _eos_token_ids(folder, tokenizer, eos),
        "add_bos": bos_id is not None and tokenizer.encode("a").ids[:1] == [bos_id],
    }


def _eos_token_ids(folder: Path, tokenizer: Tokenizer, eos: str | None) -> tuple[int, ...]:
    """Take generation_config.json, else config.json, and the tokenizer's own EOS in any case."""
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
    """Read chat_template.jinja, or the field of tokenizer_config.json: a text, or named texts with a `default`."""
    if (file := folder / "chat_template.jinja").is_file():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _token_text(token: object) -> str | None:
    """Return the text of a special token, which is stored as a text or as an object with its `content`."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _optional_json(file: Path) -> dict[str, Any]:
    return read_json(file) if file.is_file() else {}


def tokenizer_from_gguf(metadata: Metadata) -> Tokenizer:
    """Build a tokenizer that encodes as the original does. With special tokens, BOS comes first if the file says so."""
    kind, family_name = metadata["tokenizer.ggml.model"], metadata.get("tokenizer.ggml.pre", "default")
    if kind != "gpt2" or family_name not in _FAMILIES:
        raise UnsupportedModel(
            f"tokenizer {kind!r} with pre-tokenizer {family_name!r}: GGUF files are supported with gpt2-style "
            f"tokenizers of {', '.join(sorted(_FAMILIES))}; use the model's safetensors and tokenizer.json instead"
        )
    family, tokens = _FAMILIES[family_name], metadata["tokenizer.ggml.tokens"]
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise CheckpointError("tokenizer.ggml.tokens has a token twice")
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=family.whole_words_first))
    if family.nfc:
        tokenizer.normalizer = normalizers.NFC()
    steps: list[pre_tokenizers.PreTokenizer] = []
    if family.single_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if family.pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(family.pattern), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=family.pattern is None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = _post_processor(metadata, tokens)
    _add_special_tokens(tokenizer, tokens, metadata["tokenizer.ggml.token_type"])
    return tokenizer


def _post_processor(metadata: Metadata, tokens: Sequence[str]) -> processors.PostProcessor:
    byte_level = processors.ByteLevel(trim_offsets=False)
    if not metadata.get("tokenizer.ggml.add_bos_token", False):
        return byte_level
    bos_id = int(metadata["tokenizer.ggml.bos_token_id"])
    bos, special = tokens[bos_id], [(tokens[bos_id], bos_id)]
    template = processors.TemplateProcessing(single=[bos, "$A"], pair=[bos, "$A", bos, "$B"], special_tokens=special)
    return processors.Sequence([byte_level, template])


def _add_special_tokens(tokenizer: Tokenizer, tokens: Sequence[str], types: Sequence[int]) -> None:
    is_special: dict[int, bool] = {TokenType.CONTROL: True, TokenType.UNKNOWN: True, TokenType.USER_DEFINED: False}
    added = [
        AddedToken(token, special=is_special[kind], normalized=False)
        for token, kind in zip(tokens, types, strict=True)
        if kind in is_special
    ]
    tokenizer.add_tokens(added)
    if tokenizer.get_vocab_size() != len(tokens):
        raise CheckpointError(f"the GGUF vocabulary of {len(tokens)} became {tokenizer.get_vocab_size()} tokens")


def canonical_json(tokenizer: Tokenizer) -> bytes:
    """Return tokenizer.json, the same bytes for the same tokenizer in every process."""
    return json.dumps(json.loads(tokenizer.to_str()), ensure_ascii=False, separators=(",", ":")).encode()

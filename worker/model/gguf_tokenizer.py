"""The tokenizer of a GGUF file: its vocabulary and merges, for byte-level BPE families, as a `tokenizers` tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from gguf import TokenType
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from worker.files.errors import CheckpointError, UnsupportedModel
from worker.files.tokenizer_files import canonical_json
from worker.model.gguf import Metadata

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


def fields_of_gguf(metadata: Metadata) -> dict[str, Any]:
    """Return the fields of a bundle that a file determines, in the order in which `fingerprint` takes them.

    Raise ModelError if it has no tokenizer for `tokenizers`.
    """
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
        "add_bos": bool(tokenizer.encode("").ids),
    }


def tokenizer_from_gguf(metadata: Metadata) -> Tokenizer:
    """Build a tokenizer that encodes as the original does. With special tokens, the file decides on BOS."""
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
    by_default = family.whole_words_first and metadata.get("tokenizer.ggml.bos_token_id") is not None  # as llama.cpp
    tokenizer.post_processor = _post_processor(metadata, tokens, by_default=by_default)
    _add_special_tokens(tokenizer, tokens, metadata["tokenizer.ggml.token_type"])
    return tokenizer


def _post_processor(metadata: Metadata, tokens: Sequence[str], *, by_default: bool) -> processors.PostProcessor:
    byte_level = processors.ByteLevel(trim_offsets=False)
    if not metadata.get("tokenizer.ggml.add_bos_token", by_default):
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

"""A `tokenizers` tokenizer from the vocabulary inside a GGUF file: the byte-level BPE families."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from worker.model.errors import CheckpointError, UnsupportedModel
from worker.model.gguf import Metadata

_SPLIT_ENDING: Final = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CONTRACTIONS_AND_WORDS: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_LLAMA3_PATTERN: Final = _CONTRACTIONS_AND_WORDS + r"\p{N}{1,3}" + _SPLIT_ENDING
_QWEN2_PATTERN: Final = _CONTRACTIONS_AND_WORDS + r"\p{N}" + _SPLIT_ENDING


class TokenType(IntEnum):
    """`tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True)
class _Family:
    """How a family of tokenizers cuts text before BPE: `pattern` None is GPT-2's own, inside ByteLevel."""

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


def tokenizer_from_gguf(metadata: Metadata) -> Tokenizer:
    """Encodes as the original tokenizer does; with special tokens it puts BOS first where the file says so."""
    kind, family_name = metadata["tokenizer.ggml.model"], metadata.get("tokenizer.ggml.pre", "default")
    if kind != "gpt2" or family_name not in _FAMILIES:
        raise UnsupportedModel(
            f"tokenizer {kind!r} with pre-tokenizer {family_name!r}: GGUF files are supported with gpt2-style "
            f"tokenizers of {', '.join(sorted(_FAMILIES))}; use the model's safetensors and tokenizer.json instead"
        )
    family, tokens = _FAMILIES[family_name], metadata["tokenizer.ggml.tokens"]
    tokenizer = Tokenizer(_bpe(tokens, metadata["tokenizer.ggml.merges"], family))
    if family.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _pre_tokenizer(family)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = _post_processor(metadata, tokens)
    _add_special_tokens(tokenizer, tokens, metadata["tokenizer.ggml.token_type"])
    return tokenizer


def _bpe(tokens: Sequence[str], merges: Sequence[str], family: _Family) -> models.BPE:
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise CheckpointError("tokenizer.ggml.tokens has a token twice")
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    return models.BPE(vocab=vocabulary, merges=pairs, ignore_merges=family.whole_words_first)


def _pre_tokenizer(family: _Family) -> pre_tokenizers.PreTokenizer:
    steps: list[pre_tokenizers.PreTokenizer] = []
    if family.single_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if family.pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(family.pattern), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=family.pattern is None))
    return pre_tokenizers.Sequence(steps)


def _post_processor(metadata: Metadata, tokens: Sequence[str]) -> processors.PostProcessor:
    byte_level = processors.ByteLevel(trim_offsets=False)
    if not metadata.get("tokenizer.ggml.add_bos_token", False):
        return byte_level
    bos_id = int(metadata["tokenizer.ggml.bos_token_id"])
    bos = tokens[bos_id]
    template = processors.TemplateProcessing(
        single=[bos, "$A"], pair=[bos, "$A", bos, "$B"], special_tokens=[(bos, bos_id)]
    )
    return processors.Sequence([byte_level, template])


def _add_special_tokens(tokenizer: Tokenizer, tokens: Sequence[str], types: Sequence[int]) -> None:
    special = (TokenType.CONTROL, TokenType.UNKNOWN)
    added = [
        AddedToken(token, special=kind in special, normalized=False)
        for token, kind in zip(tokens, types, strict=True)
        if kind in special or kind == TokenType.USER_DEFINED
    ]
    tokenizer.add_tokens(added)
    if tokenizer.get_vocab_size() != len(tokens):
        raise CheckpointError(f"the GGUF vocabulary of {len(tokens)} became {tokenizer.get_vocab_size()} tokens")


def canonical_json(tokenizer: Tokenizer) -> bytes:
    """tokenizer.json, the same bytes for the same tokenizer in every process."""
    return json.dumps(json.loads(tokenizer.to_str()), ensure_ascii=False, separators=(",", ":")).encode()

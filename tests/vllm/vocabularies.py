"""Models without tokenizer.json: a tiny Llama with a tekken or a tiktoken vocabulary, which only an engine can read."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path
from typing import Any, Final

from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from server.text.detokenizer import BYTE_ALPHABET
from tests.vllm.test_cache import STORY

PATTERN: Final = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
NUM_SPECIAL: Final = 32
NUM_TOKENS: Final = 768
"""With the special ones."""
TEKKEN_TOKENS: Final = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]"),
    *("[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]"),
    *("[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"),
)
TIKTOKEN_TOKENS: Final = ("<|pad|>", "<|bos|>", "<|eos|>", "<|turn|>", "<|end|>")
TEMPLATE: Final = """{% if tools %}<|turn|>tools
{% for tool in tools %}{{ tool | tojson }}{% endfor %}<|end|>{% endif %}
{%- for m in messages %}<|turn|>{{ m.role }}
{{ m.content }}{% for call in m.tool_calls or [] %}<tool_call>
{{ call.function | tojson }}
</tool_call>{% endfor %}<|end|>{% endfor %}<|turn|>assistant
"""
CODE: Final = '''
"""A slow tokenizer over ranks in tiktoken's format."""
import tiktoken
from tiktoken.load import load_tiktoken_bpe
from transformers import PreTrainedTokenizer


class RanksTokenizer(PreTrainedTokenizer):
    vocab_files_names = {"vocab_file": "ranks.tiktoken"}
    model_input_names = ["input_ids", "attention_mask"]

    def __init__(self, vocab_file, **kwargs):
        ranks = load_tiktoken_bpe(vocab_file)
        self._ranks = {token.decode("latin-1"): rank for token, rank in ranks.items()}
        self._tokens = {rank: token for token, rank in self._ranks.items()}
        self._model = tiktoken.Encoding("ranks", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={})
        super().__init__(**kwargs)

    @property
    def vocab_size(self):
        return len(self._ranks)

    def get_vocab(self):
        return self._ranks | self.added_tokens_encoder

    def _tokenize(self, text, **kwargs):
        return [self._tokens[rank] for rank in self._model.encode(text, disallowed_special=())]

    def _convert_token_to_id(self, token):
        return self._ranks[token]

    def _convert_id_to_token(self, index):
        return self._tokens.get(index, "")

    def convert_tokens_to_string(self, tokens):
        return "".join(tokens).encode("latin-1", "ignore").decode("utf-8", "replace")

    def save_vocabulary(self, save_directory, filename_prefix=None):
        return ()
'''


def write_tekken(folder: Path) -> Path:
    """Write a model with tekken.json, which mistral-common reads. Returns `folder`."""
    tokens = _tokens()
    _write_weights(folder)
    special = [{"rank": at, "token_str": text, "is_control": True} for at, text in enumerate(TEKKEN_TOKENS)]
    config = {"pattern": PATTERN, "version": "v7", "default_vocab_size": NUM_TOKENS}
    config |= {"num_vocab_tokens": len(tokens), "default_num_special_tokens": NUM_SPECIAL}
    vocab = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": token.decode("utf-8", "replace")}
        for rank, token in enumerate(tokens)
    ]
    layout = {"config": config, "vocab": vocab, "special_tokens": special, "type": "Tekken", "version": 1}
    (folder / "tekken.json").write_text(json.dumps(layout))
    return folder


def write_tiktoken(folder: Path) -> Path:
    """Write a model with tiktoken's ranks and Python code that reads them. Returns `folder`."""
    tokens = _tokens()
    _write_weights(folder)
    lines = [f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(tokens)]
    (folder / "ranks.tiktoken").write_text("".join(lines))
    code = CODE.replace("PATTERN", repr(PATTERN))
    (folder / "tokenization_ranks.py").write_text(code)
    flags = dict.fromkeys(("lstrip", "rstrip", "single_word", "normalized"), False)
    added = {
        str(len(tokens) + at): {"content": text, "special": True} | flags for at, text in enumerate(TIKTOKEN_TOKENS)
    }
    config = {
        "tokenizer_class": "RanksTokenizer",
        "auto_map": {"AutoTokenizer": ["tokenization_ranks.RanksTokenizer", None]},
        "added_tokens_decoder": added,
        "bos_token": "<|bos|>",
        "eos_token": "<|eos|>",
        "pad_token": "<|pad|>",
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def _tokens() -> list[bytes]:
    """Return the bytes of all tokens in the order of their ranks: 256 bytes, then merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = sorted(BYTE_ALPHABET, key=BYTE_ALPHABET.__getitem__)
    size = NUM_TOKENS - NUM_SPECIAL
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    texts = [STORY, json.dumps({"type": "function", "function": {"name": "get_weather", "parameters": {}}}), CODE]
    tokenizer.train_from_iterator([*texts, *map(str, range(1000)), *re.findall(r"\w+", STORY)], trainer)
    merges: list[list[str]] = json.loads(tokenizer.to_str())["model"]["merges"]
    return [*(bytes([byte]) for byte in range(256)), *(_bytes("".join(pair)) for pair in merges)][:size]


def _bytes(token: str) -> bytes:
    return bytes([BYTE_ALPHABET[char] for char in token])


def _write_weights(folder: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    size: dict[str, Any] = {"vocab_size": NUM_TOKENS, "hidden_size": 256, "intermediate_size": 256}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(**size, **heads, max_position_embeddings=4096, bos_token_id=1, eos_token_id=2)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(folder)

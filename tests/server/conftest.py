"""A small byte-level tokenizer, trained on the spot, the bundle that a worker serves with it, and such a worker."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.server.scripted_worker import Says, ScriptedWorker
from worker.wire import TokenizerBundle

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{{ message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
ANSWER = "The capital of France is Paris. 🎉 你好"
CORPUS = (
    "The capital of France is Paris. What is the weather like today? I would like to book a flight to New York, "
    "please tell me which seats are free.\n\n1. First, cancel the reservation.\n2. Then ask the user for the address.\n"
    "Das ist ein längerer Satz mit Umlauten: äöüß. 你好世界。今日は 🎉🎊 emoji and stop words. STOP END <tool_call>"
)


def bundle_of(tokenizer: Tokenizer, **changes: Any) -> TokenizerBundle:
    """Return a bundle as a worker with this tokenizer serves it, but for `changes`."""
    fields: dict[str, Any] = {
        "fingerprint": "f" * 32,
        "model": "tiny",
        "revision": "r1",
        "tokenizer_json": tokenizer.to_str().encode(),
        "chat_template": CHATML,
        "bos_token": "<|endoftext|>",
        "eos_token": "<|im_end|>",
        "eos_token_ids": (2,),
        "add_bos": False,
        "vocab_size": tokenizer.get_vocab_size(),
        "max_model_len": 2048,
        "block_size": 16,
    }
    return TokenizerBundle(**{**fields, **changes})


@pytest.fixture(scope="session")
def raw_tokenizer() -> Tokenizer:
    return trained_tokenizer()


def trained_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([CORPUS], trainer)
    tokenizer.add_tokens([AddedToken("<think>", normalized=False), AddedToken("</think>", normalized=False)])
    return tokenizer


@pytest.fixture(scope="session")
def bundle(raw_tokenizer: Tokenizer) -> TokenizerBundle:
    return bundle_of(raw_tokenizer)


@pytest.fixture
def worker(bundle: TokenizerBundle, raw_tokenizer: Tokenizer) -> ScriptedWorker:
    return ScriptedWorker(bundle, reply=raw_tokenizer.encode(ANSWER).ids)


@pytest.fixture
def says(bundle: TokenizerBundle, raw_tokenizer: Tokenizer) -> Says:
    return Says(bundle, raw_tokenizer)

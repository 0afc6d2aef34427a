"""A tiny random Idefics3 with SmolLM2's tokenizer: vLLM's processor for it needs no torchvision.

An image is 39 tokens: 36 placeholders, and three tokens around them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from tests import smollm2
from tests.vllm.engines import Options

NUM_TOKENS: Final = 39
"""Tokens of an image in a prompt."""
_PIXELS: Final = 168
_MARKS: Final = ("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", "<row_1_col_1>")
TEMPLATE: Final = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'image' %}<image>{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_model(folder: Path) -> Path:
    """Write the model's files. Returns `folder`."""
    import torch
    from transformers import Idefics3Config, Idefics3ForConditionalGeneration

    tokenizer = json.loads(smollm2.tokenizer().to_str())
    size = smollm2.tokenizer().get_vocab_size()
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    marks = [{"id": size + number, "content": mark} | flags for number, mark in enumerate(_MARKS)]
    tokenizer["added_tokens"] += marks
    heads = {"num_hidden_layers": 2, "num_attention_heads": 2}
    text: dict[str, Any] = {"model_type": "llama", "vocab_size": size + len(marks), "hidden_size": 128}
    text |= heads | {"intermediate_size": 256, "max_position_embeddings": 1024, "tie_word_embeddings": False}
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    vision = heads | {"hidden_size": 64, "intermediate_size": 128, "image_size": _PIXELS, "patch_size": 14}
    config = Idefics3Config(
        text_config=text | ids,
        vision_config=vision,
        image_token_id=size,
        scale_factor=2,
        tie_word_embeddings=False,
        **ids,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        Idefics3ForConditionalGeneration(config).save_pretrained(folder)
    processor = {"processor_class": "Idefics3Processor", "image_seq_len": 36}
    edge = {"longest_edge": _PIXELS}
    pixels = {"image_processor_type": "Idefics3ImageProcessor", "do_image_splitting": False, "size": edge}
    files = {
        "tokenizer": tokenizer,
        "tokenizer_config": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<|im_start|>",
            "eos_token": "<|im_end|>",
            "chat_template": TEMPLATE,
            "clean_up_tokenization_spaces": False,
        },
        "processor_config": processor,
        "preprocessor_config": processor | pixels | {"max_image_size": edge, "resample": 1},
    }
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def options(folder: Path) -> Options:
    """Return those of an engine with the model in `folder`."""
    limit = ("--limit-mm-per-prompt", '{"image": 8}')
    return Options(model=folder, num_blocks=64, max_model_len=1024, niceness=5, args=limit)

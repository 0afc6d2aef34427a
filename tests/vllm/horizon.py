"""A tiny random model whose engine reads calls and reasoning as K2 Horizon's: the gateway has no such formats.

A body's `structured_outputs` holds the answer to a text, so it has calls and reasoning wherever a test wants them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from tests.tiny_model import write_tiny_model
from tests.vllm.engines import Options

_NEVER_USED: Final = ("repo_name", "reponame", "file_sep", "filename", "gh_stars", "issue_start", "issue_comment")
_MORE_NEVER_USED: Final = ("issue_closed", "jupyter_start", "jupyter_text")
_NAMES: Final = ("think", "think_fast", "think_faster", "tool_calls", "tool_call")
TEMPLATE: Final = (
    "{% if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.reasoning %}<ifm|think>{{ message.reasoning }}</ifm|think>{% endif %}"
    "{{ message.content or '' }}"
    "{% if message.tool_calls %}{{ message.tool_calls | tojson }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
THINK: Final = "<ifm|think>{}</ifm|think>"
"""Has reasoning in it."""


def calls(called: Sequence[tuple[str, Mapping[str, str]]]) -> str:
    """Return calls of functions with their arguments, in the model's own format."""
    written = ""
    for name, arguments in called:
        pairs = (
            f"<ifm|arg_key>{key}</ifm|arg_key><ifm|arg_value>{arguments[key]}</ifm|arg_value>" for key in arguments
        )
        written += f"<ifm|tool_call>{name}{''.join(pairs)}</ifm|tool_call>"
    return f"<ifm|tool_calls>{written}</ifm|tool_calls>"


def write_model(folder: Path) -> Path:
    """Write SmolLM2's tokenizer with the marks instead of tokens that no text has, and random weights."""
    write_tiny_model(folder, max_position_embeddings=4096, hidden_size=128)
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    marks = [mark for name in _NAMES for mark in (f"<ifm|{name}>", f"</ifm|{name}>")]
    named = dict(zip((f"<{name}>" for name in (*_NEVER_USED, *_MORE_NEVER_USED)), marks, strict=True))
    for token in tokenizer["added_tokens"]:
        if token["content"] in named:
            token |= {"content": named[token["content"]], "special": False}
    vocabulary = tokenizer["model"]["vocab"]
    tokenizer["model"]["vocab"] = {named.get(text, text): token_id for text, token_id in vocabulary.items()}
    path.write_text(json.dumps(tokenizer))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE}
    config |= {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "clean_up_tokenization_spaces": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def options(folder: Path) -> Options:
    """Return those of an engine with the model in `folder`."""
    parsers = ("--enable-auto-tool-choice", "--tool-call-parser", "k2_horizon", "--reasoning-parser", "k2_horizon")
    constraints = ("--structured-outputs-config", '{"backend": "xgrammar", "enable_in_reasoning": true}')
    return Options(model=folder, num_blocks=256, max_model_len=4096, niceness=5, args=(*parsers, *constraints))

"""Bundles of models whose vocabulary only an engine can read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from worker.adapter.api import EngineModel
from worker.adapter.connect import make_bundle
from worker.config import WorkerConfig
from worker.files.errors import CheckpointError
from worker.files.tokenizer_files import fields_of_folder
from worker.wire import TokenizerBundle

DECODER = {"7": {"content": "<|end|>", "special": True}, "9": {"content": "<think>", "special": False}}
TEKKEN = {"special_tokens": [{"rank": 2, "token_str": "</s>", "is_control": True}], "vocab": []}


def bundle(folder: Path) -> TokenizerBundle:
    return make_bundle(WorkerConfig(engine="vllm", engine_url="http://h"), EngineModel("m", str(folder), 64))[0]


def write(folder: Path, **files: object) -> Path:
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / name.replace("__", ".")).write_text(text)
    return folder


def test_ranks_and_their_control_tokens(tmp_path: Path) -> None:
    config = {"added_tokens_decoder": DECODER, "eos_token": "<|end|>", "chat_template": "t"}
    write(tmp_path, r__tiktoken="YQ== 0\n", tokenizer_config__json=config, config__json={"vocab_size": 10})
    made = bundle(tmp_path)
    assert (made.tokenizer_json, made.vocab_size, made.eos_token_ids, made.chat_template) == (b"", 10, (7,), "t")
    tokens = json.loads(made.engine_vocabulary)["added_tokens"]
    assert [(token["id"], token["content"], token["special"]) for token in tokens] == [
        (7, "<|end|>", True),
        (9, "<think>", False),
    ]


def test_tekken(tmp_path: Path) -> None:
    made = bundle(write(tmp_path, tekken__json=TEKKEN, params__json={"vocab_size": 5}))
    assert made.vocab_size == 5
    assert [token["content"] for token in json.loads(made.engine_vocabulary)["added_tokens"]] == ["</s>"]


@pytest.mark.parametrize("file", ["r.tiktoken", "tokenization_r.py", "tokenizer_config.json"])
def test_each_file_changes_the_fingerprint(tmp_path: Path, file: str) -> None:
    config = {"added_tokens_decoder": DECODER}
    write(tmp_path, r__tiktoken="YQ== 0\n", tokenization_r__py="a = 1", config__json={"vocab_size": 9})
    write(tmp_path, tokenizer_config__json=config)
    before = bundle(tmp_path).fingerprint
    assert bundle(tmp_path).fingerprint == before
    changed = config | {"chat_template": "other"} if file.endswith("json") else "Yg== 0\n"
    (tmp_path / file).write_text(changed if isinstance(changed, str) else json.dumps(changed))
    assert bundle(tmp_path).fingerprint != before


def test_own_engine_needs_tokenizer_json(tmp_path: Path) -> None:
    write(tmp_path, tekken__json=TEKKEN, config__json={"vocab_size": 5})
    with pytest.raises(CheckpointError, match=r"has no tokenizer\.json"):
        fields_of_folder(tmp_path)


def test_ranks_without_control_tokens(tmp_path: Path) -> None:
    """Without their names no client could be kept from writing them."""
    with pytest.raises(CheckpointError, match="added_tokens_decoder"):
        bundle(write(tmp_path, r__tiktoken="YQ== 0\n", config__json={"vocab_size": 9}))


@pytest.mark.parametrize("tekken", ["[", '"x"', {"special_tokens": [1]}, {"special_tokens": [{"rank": "a"}]}])
def test_a_broken_tekken_file(tmp_path: Path, tekken: object) -> None:
    with pytest.raises(CheckpointError, match="cannot be read"):
        bundle(write(tmp_path, tekken__json=tekken, config__json={"vocab_size": 9}))

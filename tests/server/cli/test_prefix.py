"""`headstart prefix` with a model's files, read by a process of the worker's side."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from tests.server.api.test_prompts import LONG, WITH_TOOLS, chat, messages
from tests.server.cli.commands import status_of


@pytest.fixture
def folder(tmp_path: Path, raw_tokenizer: Tokenizer) -> Path:
    """The files of a tokenizer."""
    place = tmp_path / "tiny"
    place.mkdir()
    (place / "tokenizer.json").write_text(raw_tokenizer.to_str())
    tokens = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>", "chat_template": WITH_TOOLS}
    (place / "tokenizer_config.json").write_text(json.dumps(tokens))
    return place


def written(folder: Path, *bodies: dict[str, Any]) -> list[str]:
    paths = [folder / f"{name}.json" for name in "ab"]
    for path, body in zip(paths, bodies, strict=True):
        path.write_text(json.dumps(body))
    return [str(path) for path in paths]


def test_it_says_where_and_why_two_prompts_part(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = (chat(f"{LONG}Folder: /home/{name}/src.") for name in ("ann", "bob"))
    assert status_of("prefix", *written(folder, a, b), "--model", str(folder), "--block-size", "8") == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("tiny: A has ")
    assert lines[1].endswith(" blocks of 8")
    assert lines[2] == f"They part in messages[0].content, character {len(LONG) + 14}: a path"
    assert lines[3].endswith("Folder: /home/|ann/src.")
    assert lines[4].endswith("Folder: /home/|bob/src.")
    assert lines[5].startswith("Cost: ")
    assert lines[6].startswith("With the same text there, they would share the first ")


def test_a_conversation_that_goes_on_ends_with_0(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = messages()
    turns = [{"role": "assistant", "content": "Two."}, {"role": "user", "content": "Which?"}]
    paths = written(folder, first, messages(messages=[*first["messages"], *turns]))
    assert status_of("prefix", *paths, "--model", str(folder), "--json") == 0
    said = json.loads(capsys.readouterr().out)
    assert said["goes_on"]
    assert said["num_shared_tokens"] == said["num_tokens_a"]
    assert said["num_cached_tokens"] == said["num_tokens_a"] // 16 * 16


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[1]", "b.json: it holds no JSON object"),
        ("{", "b.json: "),
        ('{"model": "m"}', "b.json: body has none of messages, input and prompt"),
        ('{"messages": 5}', "b.json: "),
        (None, "b.json: No such file"),
    ],
)
def test_a_file_that_is_no_request_ends_with_2(
    folder: Path, capsys: pytest.CaptureFixture[str], text: str | None, problem: str
) -> None:
    paths = written(folder, chat(), chat())
    Path(paths[1]).unlink()
    if text is not None:
        Path(paths[1]).write_text(text)
    assert status_of("prefix", *paths, "--model", str(folder)) == 2
    assert problem in capsys.readouterr().err


def test_a_model_that_is_not_there_ends_with_2(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of("prefix", *written(folder, chat(), chat()), "--model", str(folder / "none")) == 2
    assert "has no tokenizer.json" in capsys.readouterr().err

"""A byte order mark, as Windows' programs write it, changes no file, key or body; ids hold no control character."""

from __future__ import annotations

import io
import re
from pathlib import Path

import msgspec
import pytest
from starlette.requests import Request

from cache.records import WorkerMember
from server.auth.identity import digest_text, parse_keys
from server.auth.limits import KeyEntry, TenantEntry
from server.cli import keys
from server.http.middleware import body_limit
from server.schema.requests import ChatRequest
from tests import smollm2
from tests.members import make_member
from worker.common.command_line import read_text
from worker.config import parse
from worker.files.tokenizer_files import fields_of_folder

DIGEST = "sha256:" + "0" * 64
MARK = b"\xef\xbb\xbf"


def test_a_key_file_may_begin_with_a_mark() -> None:
    text = f'[[keys]]\ntenant = "a"\ndigest = "{digest_text(b"key")}"\n'
    assert parse_keys("\ufeff" + text) == parse_keys(text)


def test_a_secret_and_options_may_begin_with_a_mark(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(MARK + b"a secret\r\n")
    assert read_text("--x", str(tmp_path / "secret")) == "a secret"
    (tmp_path / "options.toml").write_bytes(MARK + b'[worker]\r\nmodel = "m"\r\n')
    assert parse(["--config", str(tmp_path / "options.toml")]).model == "m"


def test_the_texts_of_a_model_may_begin_with_a_mark(tmp_path: Path) -> None:
    """A mark of a template would be the first token of each prompt."""
    (tmp_path / "tokenizer.json").write_text(smollm2.tokenizer().to_str())
    config, template = b'{"eos_token": "<|im_end|>"}', b"{{ messages[0].content }}\r\n"
    found = []
    for mark in (b"", MARK):
        (tmp_path / "tokenizer_config.json").write_bytes(mark + config)
        (tmp_path / "chat_template.jinja").write_bytes(mark + template)
        found.append(fields_of_folder(tmp_path))
    assert found[0] == found[1]


def test_the_digest_is_of_the_key_alone(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("\ufeffsecret-value-0123456789\r\n"))
    assert keys.main(["digest", "--tenant", "a"]) in (0, None)
    assert digest_text(b"secret-value-0123456789") in capsys.readouterr().out


async def test_a_body_may_begin_with_a_mark() -> None:
    async def receive():  # type: ignore[no-untyped-def]
        return {"type": "http.request", "body": MARK + b"{}", "more_body": False}

    bodies = []

    async def app(scope, receive, send) -> None:  # type: ignore[no-untyped-def]
        bodies.append(await Request(scope, receive).body())

    await body_limit(app, 100)({"type": "http", "headers": [(b"content-length", b"5")]}, receive, receive)
    assert bodies == [b"{}"]


@pytest.mark.parametrize("worker_id", ["", "a\r\nx-other: 1", "a b", "a\x00", "\u2028", "x" * 257])
def test_ids_of_a_worker_are_visible_ascii(worker_id: str) -> None:
    record = msgspec.to_builtins(make_member("w"))
    assert msgspec.convert(record, WorkerMember).worker_id == "w"
    for name in ("worker_id", "epoch"):
        with pytest.raises(msgspec.ValidationError, match=name):
            msgspec.convert({**record, name: worker_id}, WorkerMember)


@pytest.mark.parametrize(("entry", "field"), [(KeyEntry, "tenant"), (KeyEntry, "digest"), (TenantEntry, "tenant")])
def test_a_name_has_no_line_end(entry: type, field: str) -> None:
    """`$` of a pattern matches before one."""
    given = {"tenant": "acme"} | ({"digest": DIGEST} if entry is KeyEntry else {})
    msgspec.convert(given, entry)
    with pytest.raises(msgspec.ValidationError, match=field):
        msgspec.convert({**given, field: given[field] + "\n"}, entry)


def test_no_pattern_ends_with_a_dollar() -> None:
    for path in ("cache", "server", "worker"):
        for file in Path(path).rglob("*.py"):
            assert not re.search(r"Meta\(pattern=.*\$\"", file.read_text()), file


def test_stream_options_alone_are_taken() -> None:
    """Clients set them once for all requests."""
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "stream_options": {"include_usage": True}}
    msgspec.convert(body, ChatRequest).check()

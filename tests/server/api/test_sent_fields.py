"""Only listed fields of a body reach an engine; each that engines publish is sent on, or refused by name."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import ValidationError

from server.api.engine.text import _check, _is_sent, _Known, _known_of
from server.errors import InvalidRequestError
from server.schema.field_table import IGNORED, REFUSED_FIELDS, SENT_FIELDS, SENT_XARGS
from server.schema.fields import RequestFields
from tests.server.api.engine_worker import EngineWorker, engine_gateway
from tests.server.test_app import MESSAGES, chat, post
from worker.adapter.sglang import _DROPPED, _REFUSED

ENGINES: Final = tomllib.loads((Path(__file__).parents[2] / "data" / "engine_fields.toml").read_text())
PATHS: Final = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completions",
    "/v1/embeddings": "embeddings",
    "/rerank": "rerank",
    "/score": "score",
}
CHECKED: Final = {
    "/v1/chat/completions": {"modalities", "prediction", "verbosity"},
}
"""Fields that no engine reads, and that change no answer or are read by the gateway."""
HONOURED: Final = {"typical_p", "best_of", "min_tokens", "allowed_token_ids", "bad_words", "truncate_prompt_tokens"}
"""Fields of the built-in engine that some routes of other engines lack."""
VLLM_REFUSED: Final = {
    *("kv_transfer_params", "ec_transfer_params", "previous_response_id", "background", "use_beam_search"),
    "prompt_embeds",
}
SGLANG_REFUSED: Final = {
    *("bootstrap_host", "bootstrap_port", "bootstrap_room", "custom_logit_processor", "custom_params"),
    *("data_parallel_rank", "disagg_prefill_dp_rank", "extra_key", "input_ids", "lora_path", "rid", "routed_dp_rank"),
    "session_params",
}
"""Fields that address adapters, ranks, caches, other hosts or code."""
GUIDED: Final = ("guided_choice", "guided_grammar", "guided_json", "guided_regex")
TEXTS: Final = {
    **{"/v1/chat/completions": "messages", "/v1/messages": "messages"},
    **{"/v1/completions": "prompt", "/v1/responses": "input", "/v1/embeddings": "input"},
}


def refused(path: str, body: dict[str, Any]) -> str | None:
    """Return the field that a body is refused for."""
    raw = json.dumps(body).encode()
    try:
        _check(path, _known_of(raw), body, SENT_XARGS)
    except ValidationError as error:  # one of the fields that the gateway reads
        return str(error).rpartition("$.")[2].strip("`")
    except InvalidRequestError as error:
        return error.param if error.message.startswith(str(error.param)) else error.message
    return None


@pytest.mark.parametrize("path", PATHS)
def test_published_fields_of_vllm_are_sent_on(path: str) -> None:
    for name in ENGINES["vllm"][PATHS[path]]:
        assert _is_sent(path, name) != (name in VLLM_REFUSED), name


@pytest.mark.parametrize("path", PATHS)
def test_no_field_is_sent_that_no_engine_reads(path: str) -> None:
    """An engine ignores such a field, and the client would take it for honoured."""
    read = {*ENGINES["vllm"][PATHS[path]], *CHECKED.get(path, ()), *RequestFields.__struct_fields__}
    sglang = ENGINES["sglang"]["chat"] if path == "/v1/chat/completions" else ()
    assert SENT_FIELDS[path] - read - {*sglang} == set()


async def test_servers_of_tools_are_left_out_and_named(engines: list[EngineWorker]) -> None:
    body = chat(max_tokens=1, best_of=1, mcp_servers=[{"type": "url", "name": "m", "url": "https://m.example"}])
    async with engine_gateway(engines[0]) as target:
        status, headers, raw = await post(target.url, body, "/v1/messages")
        assert (status, headers["x-headstart-ignored"]) == (200, "mcp_servers"), raw
        assert "mcp_servers" not in engines[0].rendered[-1]


def test_published_fields_of_sglang_are_sent_on_with_chats() -> None:
    for name in ENGINES["sglang"]["chat"]:
        assert _is_sent("/v1/chat/completions", name) != (name in SGLANG_REFUSED), name
    sent = {*SENT_FIELDS["/v1/chat/completions"], *RequestFields.__struct_fields__}
    assert sent.difference(ENGINES["sglang"]["chat"], _DROPPED) | {"session_id"} == _REFUSED  # by its adapter


@pytest.mark.parametrize("path", SENT_FIELDS)
@given(
    name=st.text(max_size=30)
    | st.sampled_from(
        [*VLLM_REFUSED, *SGLANG_REFUSED, *HONOURED, *_Known.__struct_fields__, "kv_cache_report_mode", "n" * 99]
    )
)
def test_unsafe_fields_are_refused_by_name(path: str, name: str) -> None:
    if not _is_sent(path, name) and name not in IGNORED:
        is_unsafe = name in VLLM_REFUSED | SGLANG_REFUSED | HONOURED.union(*REFUSED_FIELDS.values())
        assert refused(path, {name: "x"}) == (name if is_unsafe else None)
        if name not in _Known.__struct_fields__:  # the gateway reads these, and checks their types
            assert refused(path, {name: ""}) is None
    assert refused(path, {name: None}) is None
    if "vllm_xargs" in SENT_FIELDS[path] and name not in SENT_XARGS:
        assert refused(path, {"vllm_xargs": {name: 1}}) == f"vllm_xargs.{name[:64]}"


async def test_what_an_engine_gets(engines: list[EngineWorker]) -> None:
    async with engine_gateway(engines[0]) as target:
        xargs = {"ngram_size": 30}
        status, _, raw = await post(target.url, chat(vllm_xargs=xargs, store=True, background=False, unheard_of=None))
        assert status == 200, raw
        assert engines[0].rendered[-1]["vllm_xargs"] == xargs
        assert not {"background", "unheard_of"} & engines[0].rendered[-1].keys()
        status, headers, raw = await post(target.url, chat(unheard_of="x", client_metadata={"a": "b"}, new="\u2028"))
        assert (status, headers["x-headstart-ignored"]) == (200, "unheard_of, client_metadata, new"), raw
        assert not {"unheard_of", "client_metadata", "new"} & engines[0].rendered[-1].keys()
        for fields, param in (
            ({"vllm_xargs": {"kv_transfer_params": "x"}}, "vllm_xargs.kv_transfer_params"),
            ({"lora_path": "x"}, "lora_path"),
            ({"best_of": "1"}, "best_of"),
        ):
            status, _, raw = await post(target.url, chat(**fields))
            assert (status, json.loads(raw)["error"]["param"]) == (400, param)
        assert len(engines[0].rendered) == 2


@pytest.mark.parametrize(
    ("path", "fields", "remedy"),
    [
        ("/v1/chat/completions", chat(use_beam_search=True, n=2), "`n` samples"),
        ("/v1/completions", {"model": "tiny", "prompt": "a", "use_beam_search": True}, "`n` samples"),
        ("/v1/messages", chat(use_beam_search=True), "is not offered"),
        *[("/v1/chat/completions", chat(**{name: "a"}), "use structured_outputs") for name in GUIDED],
        ("/v1/completions", {"model": "tiny", "prompt": "a", "guided_regex": "a"}, "use structured_outputs"),
        ("/v1/messages", chat(guided_json={"type": "object"}), "use structured_outputs"),
        *[(path, {field: MESSAGES if field == "messages" else "a"}, "GET /v1/models") for path, field in TEXTS.items()],
        ("/v1/chat/completions", chat(model=None), "GET /v1/models"),
        ("/v1/completions", {"model": "", "prompt": "a"}, "GET /v1/models"),
    ],
)
async def test_a_refusal_has_a_remedy(
    engines: list[EngineWorker], path: str, fields: dict[str, Any], remedy: str
) -> None:
    """vLLM ignores `guided_*`, and takes the only model for a missing one."""
    async with engine_gateway(engines[0]) as target:
        status, _, raw = await post(target.url, fields, path)
    assert (status, remedy in json.loads(raw)["error"]["message"]) == (400, True), raw
    assert engines[0].received == []


async def test_tokens_are_spelled_as_by_vllm(engines: list[EngineWorker]) -> None:
    """vLLM's `token_strs` are the vocabulary's own words: half a character and a space have names there."""
    tokenizer = engines[0].tokenizer
    assert tokenizer is not None
    async with engine_gateway(engines[0]) as target:
        for body in ({"prompt": "two words, é"}, {"messages": chat()["messages"]}):
            _, _, raw = await post(target.url, {**body, "model": "tiny", "return_token_strs": True}, "/tokenize")
            answer = json.loads(raw)
            assert answer["token_strs"] == [tokenizer.id_to_token(token_id) for token_id in answer["tokens"]]
            assert any("\u0120" in token for token in answer["token_strs"])


async def test_an_owner_lists_names_of_xargs(engines: list[EngineWorker]) -> None:
    async with engine_gateway(engines[0], engine_xargs=frozenset({"target_token"})) as target:
        for xargs, expected in (({"target_token": 67}, 200), ({"ngram_size": 3}, 200), ({"other": 1}, 400)):
            status, _, raw = await post(target.url, chat(vllm_xargs=xargs))
            assert status == expected, raw
        assert json.loads(raw)["error"]["param"] == "vllm_xargs.other"
        assert "--engine-xargs" in json.loads(raw)["error"]["message"]

"""Every field of clients or other servers is honoured, refused by name, or cannot change an answer."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any, Final

import pytest
from anthropic.types.beta.message_count_tokens_params import MessageCountTokensParams as CountParams
from anthropic.types.beta.message_create_params import MessageCreateParamsBase as MessageParams
from openai.types.chat.completion_create_params import CompletionCreateParamsBase as ChatParams
from openai.types.completion_create_params import CompletionCreateParamsBase as CompletionParams
from openai.types.embedding_create_params import EmbeddingCreateParams
from openai.types.responses.response_create_params import ResponseCreateParamsBase as ResponseParams
from tokenizers import Tokenizer

from server.schema.field_table import IGNORED, REFUSED_FIELDS
from server.schema.messages import MessagesRequest
from server.schema.wishes import WORDS as WISHES
from tests.server import test_fields
from tests.server.api.test_embeddings import SIZE, embeds
from tests.server.conftest import ANSWER, CHATML, bundle_of
from tests.server.gateway_app import gateway
from tests.server.scripted_worker import ScriptedWorker
from tests.server.test_app import post
from tools.reference import ROUTES

ENGINES: Final = tomllib.loads((Path(__file__).parents[1] / "data" / "engine_fields.toml").read_text())
MESSAGES_PATH: Final = "/v1/messages"
SDK_FIELDS: Final[dict[str, dict[str, Any]]] = {
    "/v1/chat/completions": ChatParams.__annotations__,
    "/v1/completions": CompletionParams.__annotations__,
    "/v1/responses": ResponseParams.__annotations__,
    "/v1/embeddings": EmbeddingCreateParams.__annotations__,
    MESSAGES_PATH: {**MessageParams.__annotations__, **CountParams.__annotations__},
}
NAMES: Final = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completions",
    "/v1/responses": "responses",
    "/v1/embeddings": "embeddings",
    MESSAGES_PATH: "messages",
}
KINDS: Final = {**test_fields.KINDS, MESSAGES_PATH: MessagesRequest}
BODIES: Final[dict[str, dict[str, Any]]] = {
    **test_fields.BODIES,
    MESSAGES_PATH: {"model": "tiny", "max_tokens": 50, "messages": [{"role": "user", "content": "x"}]},
}
TOOL: Final = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
MESSAGES: Final = [{"role": "user", "content": "y"}]
PARTIAL: Final = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
SCHEMA: Final = {"type": "object", "properties": {"a": {"type": "string"}}}
VALUES: Final[dict[str, dict[str, Any]]] = {
    "add_generation_prompt": {"add_generation_prompt": False},
    "add_special_tokens": {"add_special_tokens": False},
    "allowed_token_ids": {"allowed_token_ids": [1, 2]},
    "bad_words": {"bad_words": ["x"]},
    "best_of": {"best_of": 2},
    "cache_salt": {"cache_salt": "x"},
    "chat_template_kwargs": {"chat_template_kwargs": {"enable_thinking": False}},
    "continue_final_message": {"continue_final_message": True, "add_generation_prompt": False, "messages": PARTIAL},
    "echo": {"echo": True},
    "frequency_penalty": {"frequency_penalty": 1.0},
    "ignore_eos": {"ignore_eos": True},
    "include_stop_str_in_output": {"include_stop_str_in_output": True, "stop": "a"},
    "input": {"input": "another"},
    "instructions": {"instructions": "Be brief."},
    "logit_bias": {"logit_bias": {"1": 5}},
    "max_completion_tokens": {"max_completion_tokens": 3},
    "max_output_tokens": {"max_output_tokens": 3},
    "max_tokens": {"max_tokens": 3},
    "messages": {"messages": MESSAGES},
    "min_p": {"min_p": 0.5},
    "min_tokens": {"min_tokens": 2},
    "n": {"n": 2},
    "presence_penalty": {"presence_penalty": 1.0},
    "priority": {"priority": -1},
    "prompt": {"prompt": "another"},
    "prompt_logprobs": {"prompt_logprobs": 1},
    "reasoning_effort": {"reasoning_effort": "high"},
    "repetition_penalty": {"repetition_penalty": 1.5},
    "response_format": {"response_format": {"type": "json_object"}},
    "return_token_ids": {"return_token_ids": True},
    "seed": {"seed": 7},
    "skip_special_tokens": {"skip_special_tokens": False},
    "stop": {"stop": "a"},
    "stop_token_ids": {"stop_token_ids": [3]},
    "stream": {"stream": True},
    "stream_options": {"stream": True, "stream_options": {"include_usage": True}},
    "structured_outputs": {"structured_outputs": {"json": SCHEMA}},
    "temperature": {"temperature": 0.5},
    "text": {"text": {"format": {"type": "json_object"}}},
    "tool_choice": {"tool_choice": "required", "tools": [TOOL]},
    "tools": {"tools": [TOOL]},
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.5},
    "truncate_prompt_tokens": {"truncate_prompt_tokens": 1},
    "truncation_side": {"truncation_side": "right", "truncate_prompt_tokens": 1},
    "typical_p": {"typical_p": 0.5},
}
"""A value that changes the answer, with what it needs to be accepted."""
WORDS: Final[dict[str, dict[str, Any]]] = {
    "/v1/chat/completions": {"seed": 1},
    "/v1/completions": {"seed": 1, "prompt": "The capital of France"},
    "/v1/responses": {"seed": 1},
    "/v1/embeddings": {},
    MESSAGES_PATH: {"seed": 1},
}
COMPLETION_VALUES: Final = {"logprobs": {"logprobs": 2}}
CHAT_VALUES: Final = {
    **{word: {word: False} for word in ("thinking", "enable_thinking", "think", "reasoning")},
    **{word: {word: 0} for word in WISHES if "budget" in word},
    "google": {"google": {"thinking_config": {"thinking_budget": 0}}},
    "extra_body": {"extra_body": {"google": {"thinking_config": {"thinking_budget": 0}}}},
    "logprobs": {"logprobs": True},
    "top_logprobs": {"top_logprobs": 2, "logprobs": True},
    "parallel_tool_calls": {"parallel_tool_calls": False, "tools": [TOOL], "tool_choice": "required"},
}
RESPONSES_TOOL: Final = {"type": "function", **TOOL["function"]}
RESPONSES_VALUES: Final = {
    "reasoning": {"reasoning": {"effort": "high"}},
    "top_logprobs": {"top_logprobs": 2},
    "include": {"include": ["message.output_text.logprobs"]},
    "tools": {"tools": [RESPONSES_TOOL]},
    "tool_choice": {"tool_choice": "required", "tools": [RESPONSES_TOOL]},
    "parallel_tool_calls": {"parallel_tool_calls": False, "tools": [RESPONSES_TOOL], "tool_choice": "required"},
}
EMBEDDING_VALUES: Final = {"dimensions": {"dimensions": 2}, "encoding_format": {"encoding_format": "base64"}}
ANTHROPIC_TOOL: Final = {"name": "f", "input_schema": {"type": "object"}}
MESSAGES_VALUES: Final = {
    "output_config": {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
    "output_format": {"output_format": {"type": "json_schema", "schema": SCHEMA}},
    "stop_sequences": {"stop_sequences": ["a"]},
    "include_stop_str_in_output": {"include_stop_str_in_output": True, "stop_sequences": ["a"]},
    "system": {"system": "Be brief."},
    "thinking": {"thinking": {"type": "disabled"}},
    "mcp_servers": {"mcp_servers": [{"type": "url", "name": "m", "url": "https://m.example"}]},
    "tools": {"tools": [ANTHROPIC_TOOL]},
    "tool_choice": {"tool_choice": {"type": "any"}, "tools": [ANTHROPIC_TOOL]},
}
OWN: Final = {
    "/v1/chat/completions": VALUES | CHAT_VALUES,
    "/v1/completions": VALUES | COMPLETION_VALUES,
    "/v1/responses": VALUES | RESPONSES_VALUES,
    "/v1/embeddings": VALUES | EMBEDDING_VALUES,
    MESSAGES_PATH: VALUES | MESSAGES_VALUES,
}
UNCHANGED: Final = {"model", "modalities", "truncation", "context_management"}
"""Honoured fields of which every other value is an error."""
HINTS: Final = {
    **{path: test_fields.hints(path) for path in test_fields.BODIES},
    MESSAGES_PATH: test_fields.hints("/v1/chat/completions") | {"stop"},
}


def known(path: str) -> dict[str, str]:
    """Return every field that a client or a server has on this route, with its source."""
    fields = dict.fromkeys(SDK_FIELDS[path], "its SDK")
    for engine, table in ENGINES.items():
        fields |= dict.fromkeys(table.get(NAMES[path], ()), engine)
    for other, kind in KINDS.items():
        fields |= dict.fromkeys(kind.__struct_fields__, other)
    return fields


@pytest.fixture
def worker(raw_tokenizer: Tokenizer) -> ScriptedWorker:
    """One whose template, tokens and answer show every field."""
    template = CHATML + "{{ enable_thinking }}{{ reasoning_effort }}"
    reply = [*raw_tokenizer.encode(ANSWER).ids, 0]
    return ScriptedWorker(bundle_of(raw_tokenizer, chat_template=template, add_bos=True), reply=reply)


@pytest.mark.parametrize("path", BODIES)
def test_every_known_field_has_an_entry(path: str) -> None:
    entries = {*KINDS[path].__struct_fields__, *REFUSED_FIELDS[path], *IGNORED}
    assert {field: who for field, who in known(path).items() if field not in entries} == {}
    assert not set(IGNORED) & {*KINDS[path].__struct_fields__, *REFUSED_FIELDS[path]}


@pytest.mark.parametrize("route", ROUTES)
def test_a_refusal_advises_no_field_that_is_refused(route: str) -> None:
    refused = ROUTES[route]
    assert {name: row.why for name, row in refused.items() if row.advised_field in refused} == {}


@pytest.mark.parametrize("path", BODIES)
async def test_no_honoured_field_is_ignored(worker: ScriptedWorker, path: str) -> None:
    """A value that would change the answer changes what the worker gets, or what the client gets."""
    if path == "/v1/embeddings":
        worker.behave, worker.embedding_size = embeds, SIZE
    silent = []
    async with gateway(worker) as target:

        async def observed(body: dict[str, Any]) -> tuple[Any, ...]:
            status, headers, raw = await post(target.url, body, path)
            assert status == 200, (body, raw)
            request = worker.received[-1]
            seeds = [choice.seed for choice in request.choices]
            asked = list(request.prompt_ids), request.sampling, seeds, request.priority, request.root
            return *asked, shape(raw), headers.get("x-headstart-ignored")

        for field in sorted(set(KINDS[path].__struct_fields__) - HINTS[path] - UNCHANGED):
            values = OWN[path][field]
            body = {**BODIES[path], **WORDS[path], **values}
            before = {**BODIES[path], **WORDS[path], **{k: v for k, v in values.items() if k != field}}
            if await observed(body) == await observed(before):
                silent.append(field)
    assert silent == []


def shape(raw: bytes) -> Any:
    """Return an answer without what differs each time."""
    text = raw.decode()
    if text.startswith(("data:", "event:")):
        events = [line for line in text.splitlines() if line.startswith("data:")]
        return "stream", len(events), '"usage":{' in text
    return re.sub(r'"(id|created|created_at)":("[^"]*"|[0-9]+)', "", text)

"""Messages and Responses: the prompts are those of vLLM's own routes, and so are the kinds and the order of events.

The engine renders both: a body by its own route, and the chat that Headstart makes of it by the route of chats.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, NamedTuple

import httpx
import pytest

from server.api.engine.chats import chat_of
from server.api.messages import messages_intent
from server.api.prompts.client_lines import conversation_without_line
from server.api.prompts.items import responses_intent
from server.schema.decoding import TextLimit
from server.schema.messages import MESSAGES
from server.schema.requests import RESPONSES
from tests.server.test_agents import AGENTS, recorded
from tests.server.text.template_families import FAMILIES
from tests.tiny_model import write_tiny_model
from tests.vllm.bodies import FUNCTION, PARAMETERS
from tests.vllm.engines import Options
from tests.vllm.fleet import LONG_S, models_behind_a_gateway

MODEL: Final = "tiny"
MAX_MODEL_LEN: Final = 32768
PATHS: Final = ("/v1/messages", "/v1/responses")
NUM_RANDOM: Final = 150
"""Bodies for each path."""
TEXTS: Final = ("Count to ten", "Größe, 日本語, 🙂", "a\ttab\nand a line", "x", " lead", "trail \n")
SHOWN: Final = ("type", "text", "thinking", "name", "arguments", "input", "content", "stop_reason", "output")
KNOWN_CLASSES: Final = (
    *("a system message inside", "a continued answer", "a failed result", "several thoughts", "a document"),
    *("a namespace", "several texts"),
)
"""Those of the table in docs/architecture/engine_text.md."""


class Urls(NamedTuple):
    engine: str
    gateway: str


@pytest.fixture(scope="module")
def urls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Urls]:
    """An engine with a template that takes the system's message first, and a gateway in front of it."""
    folder = tmp_path_factory.mktemp("dialects")
    model = write_tiny_model(folder / "model", max_position_embeddings=MAX_MODEL_LEN, hidden_size=128)
    config = json.loads((model / "tokenizer_config.json").read_text())
    config["chat_template"] = FAMILIES["system-first"]
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    flags = ("--enable-auto-tool-choice", "--tool-call-parser", "qwen3_coder", "--reasoning-parser", "qwen3")
    options = Options(num_blocks=4096, max_model_len=MAX_MODEL_LEN, niceness=5, model=model, args=flags)
    with models_behind_a_gateway(folder, {MODEL: options}) as (gateway, adapters):
        yield Urls(adapters[MODEL].engine.url, gateway.url)


def class_of(path: str, body: Mapping[str, Any]) -> str:
    """Return the class of bodies whose prompt differs; empty: there is none."""
    found: dict[str, bool]
    if path == PATHS[0]:
        contents = [each["content"] for each in body["messages"] if isinstance(each["content"], list)]
        blocks = [block for content in contents for block in content]
        found = {
            "a system message inside": any(each["role"] == "system" for each in body["messages"]),
            "a continued answer": body["messages"][-1]["role"] == "assistant",
            "a failed result": any(block.get("is_error") for block in blocks),
            "several thoughts": any(sum(b["type"] == "thinking" for b in content) > 1 for content in contents),
            "a document": any(block["type"] in ("document", "tool_reference") for block in blocks),
        }
    else:
        items = body["input"] if isinstance(body["input"], list) else []
        later = items[0 if body.get("instructions") else 1 :]
        texts = [each["content"] for each in items if each.get("role") == "assistant"]
        found = {
            "a system message inside": any(each.get("role") in ("system", "developer") for each in later),
            "a namespace": any(tool.get("type") == "namespace" for tool in body.get("tools") or ()),
            "several texts": any(isinstance(content, list) and len(content) > 1 for content in texts),
        }
    return next((name for name, is_there in found.items() if is_there), "")


def recorded_bodies() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each recorded body, and its beginnings up to a turn of the user or a result."""
    for agent in AGENTS:
        for request in recorded(agent):
            path, body = request["path"].partition("?")[0], request["body"] | {"model": MODEL}
            field = "messages" if path == PATHS[0] else "input"
            items = body.get(field) if path in PATHS else ()
            for number, item in enumerate(items or (), 1):
                is_end = item.get("role") == "user" or str(item.get("type")).endswith("_output")
                if is_end or number == len(items):
                    yield path, body | {field: items[:number]}


def random_body(path: str, chance: random.Random) -> dict[str, Any]:
    """Return a body with thoughts, calls, results, tools and switches."""

    def text() -> str:
        return chance.choice(TEXTS)

    def parts(kind: str) -> Any:
        return chance.choice((text(), [{"type": kind, "text": text()}], [{"type": kind, "text": text()}] * 2))

    is_messages = path == PATHS[0]
    turns: list[dict[str, Any]] = []
    for number in range(chance.randrange(1, 4)):
        turns.append({"role": "user", "content": parts("text" if is_messages else "input_text")})
        ids = [f"call{number}{each}" for each in range(chance.randrange(3))]
        if is_messages:
            blocks: list[dict[str, Any]] = []
            if chance.random() < 0.4:
                blocks.append({"type": "thinking", "thinking": text(), "signature": "s"})
            if chance.random() < 0.6 or not ids:
                blocks.append({"type": "text", "text": text()})
            uses = [{"type": "tool_use", "id": id_, "name": "get_weather", "input": {"city": text()}} for id_ in ids]
            turns.append({"role": "assistant", "content": [*blocks, *uses]})
            results = [{"type": "tool_result", "tool_use_id": id_, "content": parts("text")} for id_ in ids]
            turns.append({"role": "user", "content": results or text()})
            continue
        if chance.random() < 0.4:
            thought = {"type": "reasoning_text", "text": text()}
            turns.append({"type": "reasoning", "id": f"rs{number}", "summary": [], "content": [thought]})
        if chance.random() < 0.4 or not ids:
            content = [{"type": "output_text", "text": text()}]
            turns.append({"type": "message", "role": "assistant", "content": chance.choice((content, text()))})
        kinds = [chance.choice(("function_call", "custom_tool_call")) for _ in ids]
        for id_, kind in zip(ids, kinds, strict=True):
            own = {"name": "patch", "input": text()}
            if kind == "function_call":
                own = {"name": "get_weather", "arguments": json.dumps({"city": text()})}
            turns.append({"type": kind, "call_id": id_} | own)
        for id_, kind in zip(ids, kinds, strict=True):
            turns.append({"type": f"{kind}_output", "call_id": id_, "output": text()})
        turns.append({"role": "user", "content": text()})
    body: dict[str, Any] = {"messages": turns, "max_tokens": 8} if is_messages else {"input": turns}
    body["model"] = MODEL
    if chance.random() < 0.5:
        system = {"system": parts("text")} if is_messages else {"instructions": text()}
        body |= system
    if chance.random() < 0.5:
        flat = {"type": "function"} | FUNCTION
        tool = {"name": "get_weather", "description": "d", "input_schema": PARAMETERS} if is_messages else flat
        custom = [{"type": "custom", "name": "patch", "description": "p"}]
        body["tools"] = [tool] if is_messages or chance.random() < 0.5 else [tool, *custom]
    return body


async def chat_for(path: str, body: Mapping[str, Any]) -> bytes:
    """Return the chat that Headstart makes of a body."""
    raw = json.dumps(body).encode()
    if path == PATHS[0]:
        request = await MESSAGES.read(raw, TextLimit)
        intent = await messages_intent(request)
    else:
        intent = responses_intent(await RESPONSES.read(raw, TextLimit))
    conversation, _ = conversation_without_line(intent.conversation)
    return chat_of(dataclasses.replace(intent, conversation=conversation))


def difference(client: httpx.Client, path: str, body: dict[str, Any]) -> str:
    """Return how a prompt differs from that of vLLM's own route, or an empty text."""
    own = client.post(f"{path}/render", json=body)
    headers = {"content-type": "application/json"}
    ours = client.post("/v1/chat/completions/render", content=asyncio.run(chat_for(path, body)), headers=headers)
    if (own.status_code, ours.status_code) != (200, 200):
        return f"{path}: {own.text[:300]} {ours.text[:300]}"
    return "" if own.json()["token_ids"] == ours.json()["token_ids"] else f"{path} {json.dumps(body)[:3000]}"


@pytest.mark.parametrize("kind", ["recorded", "random"])
def test_prompts_are_those_of_the_own_route(urls: Urls, kind: str) -> None:
    """Else the body is of a class that the page names."""
    chance = random.Random(kind)
    bodies = [*recorded_bodies()]
    if kind == "random":
        bodies = [(path, random_body(path, chance)) for path in PATHS for _ in range(NUM_RANDOM)]
    with httpx.Client(base_url=urls.engine, timeout=LONG_S) as client, ThreadPoolExecutor(4) as pool:
        found = [*pool.map(lambda each: difference(client, *each), bodies)]
    classes = [class_of(path, body) for path, body in bodies]
    counts = Counter((path, name) for (path, _), name, text in zip(bodies, classes, found, strict=True) if text)
    print(f"{kind}: {len(bodies)} prompts, {found.count('')} equal, others {dict(counts)}")
    assert set(classes) <= {"", *KNOWN_CLASSES}
    assert not [text for name, text in zip(classes, found, strict=True) if text and not name]


def kinds(answer: httpx.Response) -> list[str]:
    """Return the names of a stream's events. Equal neighbours are one."""
    names = [line.removeprefix("event: ") for line in answer.text.splitlines() if line.startswith("event: ")]
    # vLLM calls an answer completed that its length has cut, and sends no pings.
    names = [name.replace("response.incomplete", "response.completed") for name in names if name != "ping"]
    return [name for at, name in enumerate(names) if names[max(0, at - 1)] != name or not at]


def shown(value: Any) -> Any:
    """Return types, texts and calls of an unstreamed answer."""
    if isinstance(value, dict):
        found = {name: shown(value[name]) for name in SHOWN if value.get(name) is not None}
        return {name: each for name, each in found.items() if each != {}}
    return [shown(each) for each in value] if isinstance(value, list) else value


@pytest.mark.parametrize("path", PATHS)
def test_answers_are_those_of_the_own_route(urls: Urls, path: str) -> None:
    chance = random.Random(path)
    length = {"max_tokens": 12} if path == PATHS[0] else {"max_output_tokens": 12}
    for _ in range(12):
        body = random_body(path, chance) | length | {"temperature": 0}
        for stream in (False, True):
            own, ours = (httpx.post(url + path, json=body | {"stream": stream}, timeout=LONG_S) for url in urls)
            assert (own.status_code, ours.status_code) == (200, 200), (own.text, ours.text)
            if stream:
                assert kinds(ours) == kinds(own), body
            else:
                assert shown(ours.json()) == shown(own.json()), body

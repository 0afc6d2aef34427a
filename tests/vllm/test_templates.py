"""Prompts that the gateway renders for an engine are the engine's own, for random bodies of chats.

The engine is `vllm launch render`, which takes a template with each request. The templates are those of the tests'
families and those that vLLM ships; HEADSTART_TEMPLATES names a folder with more (*.jinja).
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import httpx
from tokenizers import Tokenizer

from server.api.engine.prompts import shapes_of
from server.errors import ApiError
from server.event_loop import run_now
from server.text.chat_template import ChatTemplate
from tests.server.text.conversations import CHAT_PATH, read
from tests.server.text.template_families import FAMILIES
from tests.vllm.engines import INSTALLED, MODEL, Engine, Options, write_model
from tests.vllm.fleet import LONG_S
from worker.common.chat_probes import CHAT_PROBES, digests

SEED: Final = 1
NUM_BODIES: Final = 60
"""The number for each template."""
PARTS: Final = """{%- if tools %}{{ tools | tojson }}{% endif %}
{%- for message in messages %}<{{ message.role }}>
{%- if message.content is string %}{{ message.content }}
{%- else %}{% for part in message.content or [] %}{{ part.text }}{% endfor %}{% endif %}
{%- for call in message.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}
{%- endfor %}"""
"""It takes the parts of a text one by one."""
STRICT: Final = """{%- for tool in tools or [] %}{{ '// ' + tool.function.description }}{{ tool | tojson }}{% endfor %}
{%- for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"""
"""It refuses tools without a description."""
_TEXTS: Final = ("Hi", " a b ", "", "\n\n", "Größe 🙂", 'x<y> & "q"', "line\nline\r\n", '{"a": 1}', "日本", "  ")
_SCHEMAS: Final[tuple[dict[str, Any], ...]] = (
    {"type": "object", "properties": {"city": {"type": "string", "description": "C"}}, "required": ["city"]},
    {"type": "object", "properties": {}},
    {"properties": {"z": {"anyOf": [{"enum": ["ä", 1, None]}, {"type": "null"}]}}, "$defs": {"ü": {"type": "string"}}},
    {},
)
_ARGUMENTS: Final = ('{"city": "Oslo"}', "{}", '{"n": 1.50, "l": [1, null, {"é": "<&>"}]}', ' {"a": "\\u00e9\\n"}')
_BROKEN: Final = ('{"city": "Os', "[1]", "", "null", '"x"')


def bodies(chance: random.Random, count: int) -> Iterator[dict[str, Any]]:
    """Yield bodies with the fields that the gateway renders."""

    def content(role: str) -> Any:
        kind = chance.random()
        if kind < 0.2:
            return [{"type": "text", "text": chance.choice(_TEXTS)} for _ in range(chance.randint(1, 3))]
        return None if kind < 0.3 and role == "assistant" else chance.choice(_TEXTS)

    def turn(role: str, **fields: Any) -> dict[str, Any]:
        fields |= {"name": chance.choice(("Ada", "x y"))} if chance.random() < 0.1 else {}
        return {"role": role, "content": content(role)} | fields

    def tool(name: str) -> dict[str, Any]:
        fields = {
            "description": chance.choice(("D", "Größe <b>", "", "two\nlines")),
            "parameters": chance.choice(_SCHEMAS),
            "strict": chance.random() < 0.5,
        }
        given = {
            field: value for field, value in fields.items() if chance.random() < (0.2 if field == "strict" else 0.8)
        }
        return {"type": "function", "function": {"name": name} | given}

    def calls() -> Iterator[dict[str, Any]]:
        ids = [f"call{chance.randrange(100_000):05d}" for _ in range(chance.randint(1, 2))]
        arguments = _ARGUMENTS if chance.random() < 0.8 else _BROKEN
        functions = [{"name": "f", "arguments": chance.choice(arguments)} for _ in ids]
        pairs = zip(ids, functions, strict=True)
        yield turn("assistant", tool_calls=[{"id": id_, "type": "function", "function": each} for id_, each in pairs])
        yield from (turn("tool", tool_call_id=id_) for id_ in ids)

    for _ in range(count):
        messages = [turn("system")] if chance.random() < 0.4 else []
        for _ in range(chance.randint(1, 3)):
            messages.append(turn("user"))
            messages += calls() if chance.random() < 0.4 else ()
            messages += [turn("assistant")] if chance.random() < 0.6 else []
        body: dict[str, Any] = {"messages": [*messages, turn("user")]}
        if chance.random() < 0.5:
            body["tools"] = [tool(name) for name in ("f", "g")]
            body["tool_choice"] = chance.choice(("auto", "none", "required"))
        if chance.random() < 0.2:
            body["chat_template_kwargs"] = {"enable_thinking": chance.random() < 0.5}
        if chance.random() < 0.2:
            body["reasoning_effort"] = chance.choice(("none", "low", "high"))
        yield body


class Pair:
    """A template at the gateway and at an engine, with one tokenizer."""

    def __init__(self, source: str, model: Path, client: httpx.Client) -> None:
        self._source, self._client = source, client
        self._tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        config = json.loads((model / "tokenizer_config.json").read_text())
        self._template = ChatTemplate(source, bos_token=config["bos_token"], eos_token=config["eos_token"])
        probes = CHAT_PROBES.items()
        own = digests({name: [self.own(body) for body in bodies] for name, bodies in probes})
        theirs = digests({name: [self.theirs(body) for body in bodies] for name, bodies in probes})
        self.shared = {name for name, _ in {*own}.intersection(theirs)}

    def own(self, body: Mapping[str, Any]) -> Sequence[int] | None:
        """Return the gateway's ids; None if it refuses or repairs the body."""
        try:
            conversation = run_now(read(CHAT_PATH, json.dumps({"model": MODEL} | dict(body)).encode()).__await__())
            rendered = self._template.render(conversation)
        except ApiError:
            return None
        ids: list[int] = self._tokenizer.encode(rendered.text, add_special_tokens=False).ids
        return None if rendered.repairs else ids

    def theirs(self, body: Mapping[str, Any]) -> Sequence[int] | None:
        answer = self._client.post("/render", json={"model": MODEL, "chat_template": self._source} | dict(body))
        ids: list[int] = answer.json()["token_ids"] if answer.status_code == 200 else []
        return ids or None


def templates() -> dict[str, str]:
    found = {**FAMILIES, "parts": PARTS, "strict": STRICT}
    folders = [*INSTALLED.glob("lib/python*/site-packages/vllm/transformers_utils/chat_templates")]
    folders += [Path(os.environ["HEADSTART_TEMPLATES"])] if "HEADSTART_TEMPLATES" in os.environ else []
    return found | {file.stem: file.read_text() for folder in folders for file in sorted(folder.glob("*.jinja"))}


def test_prompts_of_shared_classes_are_the_engines(tmp_path: Path) -> None:
    """A body whose classes have equal digests has equal ids. A body that is repaired reaches no engine as it is."""
    wrong: list[str] = []
    num_equal = num_others = 0
    model = write_model()
    args = ("--trust-request-chat-template", "--enable-auto-tool-choice", "--tool-call-parser", "hermes")
    with (
        Engine(tmp_path, Options(args=args, command=("launch", "render"))) as engine,
        httpx.Client(base_url=engine.url + CHAT_PATH, timeout=LONG_S) as client,
    ):
        for name, source in templates().items():
            pair = Pair(source, model, client)
            for body in bodies(random.Random(f"{name} {SEED}"), NUM_BODIES):
                own = pair.own(body) if shapes_of(body) <= pair.shared else None
                if own is None:
                    num_others += 1
                elif own == pair.theirs(body):
                    num_equal += 1
                else:
                    wrong.append(f"{name}: {json.dumps(body, ensure_ascii=False)}")
    print(f"{num_equal} prompts of {num_equal + num_others} by the gateway, all equal")
    assert not wrong, "\n".join([f"{len(wrong)} differ", *wrong[:3]])
    assert num_equal > num_others / 2

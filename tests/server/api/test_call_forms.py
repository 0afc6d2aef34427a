# ruff: noqa: RUF001 (DeepSeek's markers have a wide bar)
"""Calls over the API: by a grammar in the form of the model's own format, and whole in a form that is unknown."""

from __future__ import annotations

import json
from typing import Any

import aiohttp
import pytest
from tokenizers import Tokenizer

from server.text.formats import FORMATS
from tests.server.conftest import bundle_of, trained_tokenizer
from tests.server.gateway_app import gateway
from tests.server.scripted_worker import ScriptedWorker
from tests.server.sse_grammar import events
from tests.server.test_app import chat, post, post_once
from tests.waiting import HANG_S
from worker.engine.grammar import GrammarCompiler, GrammarConstraint
from worker.wire import GenerateRequest

WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 20, "pattern": "(?=B|K)."},
                "days": {"type": "integer"},
                "unit": {"$ref": "#/$defs/unit"},
                "part": {"$ref": "#/$defs/text", "const": "Y"},
                "tags": {"type": "array", "items": {"type": "string"}},
                "exact": {"type": "boolean"},
            },
            "required": ["city", "unit"],
            "additionalProperties": False,
            "$defs": {"unit": {"enum": ["C", "F"]}, "text": {"type": "string"}},
        },
    },
}
NOW: Any = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}
ARGUMENTS = {"city": "Bonn <3", "days": 3, "unit": "F", "part": "Y", "tags": ["a", "b"], "exact": True}
LESS = {"city": "K", "unit": "C"}
JSON = json.dumps(ARGUMENTS)
CALLS: Any = (("get_weather", ARGUMENTS), ("get_weather", LESS), ("now", {}))
TEXTS = tuple((name, json.dumps(arguments)) for name, arguments in CALLS)


def listed(opening: str, closing: str = "") -> str:
    return f"{opening}[{objects('', '', ', ')}]{closing}"


def objects(opening: str, closing: str, between: str, arguments: str = "arguments") -> str:
    return between.join(f'{opening}{{"name": "{name}", "{arguments}": {text}}}{closing}' for name, text in TEXTS)


def parameters(arguments: dict[str, Any], form: str) -> str:
    """Write each argument by a form of its key and its text."""
    texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in arguments.items()}
    return "".join(form.format(key, text) for key, text in texts.items())


def qwen(opening: str, closing: str, line: str = "\n") -> str:
    form = f"<parameter={{}}>{line}{{}}{line}</parameter>{line}"
    return line.join(
        f"{opening}{line}<function={name}>{line}{parameters(arguments, form)}</function>{line}{closing}"
        for name, arguments in CALLS
    )


def invokes(opening: str, closing: str) -> str:
    form = '<parameter name="{}">{}</parameter>\n'
    calls = [f'<invoke name="{name}">\n{parameters(arguments, form)}</invoke>\n' for name, arguments in CALLS]
    return f"{opening}\n{''.join(calls)}{closing}"


def glm(line: str) -> str:
    form = f"<arg_key>{{}}</arg_key>{line}<arg_value>{{}}</arg_value>{line}"
    return line.join(f"<tool_call>{name}{line}{parameters(arguments, form)}</tool_call>" for name, arguments in CALLS)


def named(before: str, after: str, end: str, section: tuple[str, str] = ("", ""), between: str = "") -> str:
    return section[0] + between.join(before + name + after + text + end for name, text in TEXTS) + section[1]


def python(opening: str, closing: str, between: str = ", ") -> str:
    full = 'get_weather(city="Bonn <3", days=3, unit="F", part="Y", tags=["a", "b"], exact=True)'
    return opening + between.join((full, 'get_weather(city="K", unit="C")', "now()")) + closing


BEGIN, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, CALL_END, SEP = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
FORMS: dict[str, tuple[str, str]] = {
    "deepseek_v3": (
        f"{{{{ tools }}}}{{{{'{BEGIN}{CALL}' + 'function' + '{SEP}' + '\\n```json\\n'}}}}",
        named(f"{CALL}function{SEP}", "\n```json\n", f"\n```{CALL_END}", (BEGIN, END), "\n"),
    ),
    "glm45": ("{{ tools }}<tool_call>{function-name}\n<arg_key>", glm("\n")),
    "glm47": ("{{ tools }}<tool_call>{function-name}<arg_key>", glm("")),
    "granite3": ("{{ tools }}respond only with <|tool_call|> followed by a JSON list", listed("<|tool_call|>")),
    "hermes": ("{{ tools }}<tool_call>", objects("<tool_call>\n", "\n</tool_call>", "\n")),
    "llama": ("{{ tools }}<|python_tag|>", objects("", "", "; ", "parameters")),
    "minimax_m2": ("{{ tools }}<minimax:tool_call>", invokes("<minimax:tool_call>", "</minimax:tool_call>")),
    "mistral": ("{{ tools }}[TOOL_CALLS]", listed("[TOOL_CALLS]")),
    "mistral_v11": ("{{ tools }}[TOOL_CALLS]name[ARGS]", named("[TOOL_CALLS]", "[ARGS]", "")),
    "phi4": ("{{ tools }}<|tool|>{}<|/tool|>", listed("<|tool_call|>", "<|/tool_call|>")),
    "phi4_mini": ("{{ tools }}functools[", listed("functools")),
    "pythonic": ("{{ tools }}[func_name1(params_name1=params_value1...), func_name2(params)]", python("[", "]")),
    "qwen3_coder": ("{{ tools }}<tool_call>\n<function=example>", qwen("<tool_call>", "</tool_call>")),
}
"""By format: a short template, and calls as a model that was trained on it writes them."""
TAGGED = {"glm45", "glm47", "minimax_m2", "qwen3_coder"}


def tokenizer_with(*special: str) -> Tokenizer:
    tokenizer = trained_tokenizer()
    tokenizer.add_special_tokens([text for text in special if text.startswith(("<", "[", "｜"))])
    return tokenizer


def worker_of(name: str, text: str, *, special: bool, **changes: Any) -> ScriptedWorker:
    """Return a worker whose model's template is that of a family. `special`: so are the tokens of its markers."""
    markers = [each for each in FORMATS[name].markers if each.endswith((">", "]", "｜")) and "name=" not in each]
    tokenizer = tokenizer_with(*markers if special else ())
    fields = {"chat_template": FORMS[name][0], **changes}
    return ScriptedWorker(bundle_of(tokenizer, **fields), reply=tokenizer.encode(text, add_special_tokens=False).ids)


def test_every_format_has_a_form_here() -> None:
    assert FORMS.keys() == FORMATS.keys()


@pytest.mark.parametrize("special", [False, pytest.param(True, marks=pytest.mark.e2e)], ids=["texts", "tokens"])
@pytest.mark.parametrize("name", FORMS)
async def test_required_calls_come_in_the_familys_own_form(name: str, special: bool) -> None:
    """The grammar takes what the family writes, and no bare list. The calls arrive, streamed and not."""
    text = FORMS[name][1]
    worker = worker_of(name, text, special=special)
    body = chat(tools=[WEATHER, NOW], tool_choice="required")
    async with gateway(worker) as target:
        status, headers, raw = await post(target.url, body)
        assert status == 200, raw
        city = "tools[get_weather].function.parameters.properties.city"
        unheld = f"{city}.pattern, {city}.maxLength" if name in TAGGED else f"{city}.pattern"
        assert headers.get("x-headstart-relaxed") == unheld
        _, _, stream = await post(target.url, {**body, "stream": True})
        await post(target.url, {**body, "tool_choice": named_choice("now")})
    (choice,) = json.loads(raw)["choices"]
    calls = [each["function"] for each in choice["message"]["tool_calls"]]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
    assert [(call["name"], json.loads(call["arguments"])) for call in calls] == [*CALLS]
    streamed = "".join(
        call["function"].get("arguments", "")
        for event in events(stream)[:-1]
        for each in event["choices"]
        for call in each["delta"].get("tool_calls", ())
    )
    assert streamed == "".join(call["arguments"] for call in calls)
    for refused in ('[{"name": "now", "parameters": {}}]', text.replace("F", "K"), text.replace("Y", "K")):
        await check_grammar(worker, worker.received[0], taken=text, refused=refused)
    await check_grammar(worker, worker.received[2], taken="", refused=text)


def named_choice(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


async def check_grammar(worker: ScriptedWorker, request: GenerateRequest, *, taken: str, refused: str) -> None:
    compiler = GrammarCompiler(worker.bundle, compile_timeout_s=HANG_S)
    tokenizer = Tokenizer.from_str(worker.bundle.tokenizer_json.decode())
    try:
        for text, is_taken in ((taken, True), (refused, False)):
            constraint = (await compiler.constraints(request))[0]
            ids = tokenizer.encode(text, add_special_tokens=False).ids
            place = follows(constraint, [*ids, *([2] if is_taken and text else [])])
            assert (place is None) == is_taken, tokenizer.decode(ids[: (place or 0) + 1], skip_special_tokens=False)
    finally:
        compiler.close()


def follows(constraint: GrammarConstraint, token_ids: list[int]) -> int | None:
    """Return the place of the first token that a grammar refuses."""
    for place, token_id in enumerate(token_ids):
        mask: Any = constraint.allowed()
        if not (int(mask[token_id // 32]) >> (token_id % 32)) & 1:
            return place
        constraint.advance(token_id)
    return None


UNKNOWN = "{{ tools }}{{ messages[0].content }}<<CALL>>"
STRANGE = "Hm. <|call_start|>get_weather: Bonn<|call_end|> <tool_call>"


async def test_an_unknown_format_passes_unharmed(caplog: pytest.LogCaptureFixture) -> None:
    """Its special tokens show where there are tools, and only there. The log and /v1/models name it."""
    tokenizer = tokenizer_with("<|call_start|>", "<|call_end|>", "<tool_call>")
    ids = tokenizer.encode(STRANGE, add_special_tokens=False).ids
    worker = ScriptedWorker(bundle_of(tokenizer, chat_template=UNKNOWN), reply=ids)
    async with gateway(worker) as target:
        assert [record.getMessage() for record in caplog.records if "--tool-parser" in record.getMessage()]
        [card] = await listed_models(target.url)
        assert await contents(target.url, tools=[WEATHER]) == [STRANGE, STRANGE]
        assert await contents(target.url) == ["Hm. get_weather: Bonn "] * 2
        await post(target.url, chat(tools=[WEATHER], tool_choice="required"))
        await post(target.url, chat(tools=[WEATHER], tool_choice=named_choice("get_weather")))
    assert (card["tool_parser"], card["reasoning_parser"]) == ("unknown", None)
    kinds = [request.sampling.grammar and request.sampling.grammar.kind for request in worker.received]
    assert kinds == [None, None, None, None, "json_schema", "json_schema"]


def template_of(call: str, before: str = "") -> str:
    """Return a template with tools. `call` writes a call: `f` is its function."""
    calls = "{% for call in m.tool_calls %}{% set f = call.function %}" + call + "{% endfor %}"
    return "{{ tools }}" + before + "{% for m in messages %}<|im_start|>{{ m.content }}" + calls + "{% endfor %}"


OTHER_FORMS = {
    "another family's tags": (
        "<tool_call>{{ f.name }}<tool_sep><arg_key>city</arg_key>",
        "<arg_value>",
        "</tool_call>",
    ),
    "a prefix": (']<]name[>[<tool_call>\n]<]name[>[<invoke name="{{ f.name }}">', "]<]name[>[<city>", "</tool_call>"),
    "another text": ("<tool_call>\nname: {{ f.name }}\n", "city: ", "\n</tool_call>"),
    "its tokens elsewhere": ("[TOOL_CALLS]<name>{{ f.name }}</name>[ARGS]", "<city>", "</city>"),
}


@pytest.mark.parametrize("form", OTHER_FORMS)
async def test_markers_in_another_form_are_unknown(form: str) -> None:
    """The template renders calls that no format with these markers reads. They arrive whole, with all tokens."""
    before, key, after = OTHER_FORMS[form]
    text = "Hm. " + before.replace("{{ f.name }}", "now") + key + "Bonn" + after
    tokenizer = tokenizer_with("<tool_call>", "</tool_call>", "<tool_sep>", "<arg_key>", "[TOOL_CALLS]", "[ARGS]")
    template = template_of(before + key + "{{ f.arguments.city }}" + after)
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    worker = ScriptedWorker(bundle_of(tokenizer, chat_template=template), reply=ids)
    async with gateway(worker) as target:
        [card] = await listed_models(target.url)
        assert await contents(target.url, tools=[NOW]) == [text, text]
    assert card["tool_parser"] == "unknown"


async def test_the_options_name_formats() -> None:
    text = "[THINK]hm[/THINK]<tool_call>now</tool_call>"
    worker = ScriptedWorker(bundle_of(trained_tokenizer(), chat_template=UNKNOWN), reply=ids_of(text))
    async with gateway(worker, tool_parser="glm47", reasoning="mistral") as target:
        [card] = await listed_models(target.url)
        _, _, raw = await post(target.url, chat(tools=[NOW]))
    assert (card["tool_parser"], card["reasoning_parser"]) == ("glm47", "mistral")
    message = json.loads(raw)["choices"][0]["message"]
    assert (message["reasoning_content"], message["tool_calls"][0]["function"]["name"]) == ("hm", "now")


@pytest.mark.parametrize("begun", [False, True], ids=["maybe", "inside"])
@pytest.mark.parametrize("special", [False, True], ids=["texts", "tokens"])
async def test_required_calls_may_follow_thoughts(begun: bool, special: bool) -> None:
    """A prompt that has begun the reasoning asks for its end first."""
    tokenizer = tokenizer_with(*(("<think>", "</think>") if special else ()))
    template = "{{ tools }}{# <tool_call> <think> #}" + ("{{ '<think>' }}" if begun else "")
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    text = f"{'' if begun else '<think>'}a <tool_call> or not?</think>\n\n{call}"
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    worker = ScriptedWorker(bundle_of(tokenizer, chat_template=template), reply=ids)
    _, _, raw = await post_once(gateway(worker), chat(tools=[NOW], tool_choice=named_choice("now")))
    (choice,) = json.loads(raw)["choices"]
    assert choice["finish_reason"] == "stop", "as OpenAI's for a named function"
    assert choice["message"]["reasoning_content"] == "a <tool_call> or not?"
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "now", "arguments": "{}"}
    await check_grammar(worker, worker.received[0], taken=text, refused="Now then.</think>Well")
    if not begun:
        await check_grammar(worker, worker.received[0], taken=call, refused="Well")


async def test_a_template_without_tools_is_read_in_both_forms() -> None:
    """Its prompt asks for Hermes' form, and the model may write its own."""
    template = f"{{{{ messages[0].content }}}}{{# {BEGIN} ```json #}}"
    for text in ('<tool_call>{"name": "now", "arguments": {}}</tool_call>', FORMS["deepseek_v3"][1]):
        worker = ScriptedWorker(bundle_of(trained_tokenizer(), chat_template=template), reply=ids_of(text))
        _, _, raw = await post_once(gateway(worker), chat(tools=[WEATHER, NOW]))
        message = json.loads(raw)["choices"][0]["message"]
        assert message["tool_calls"][-1]["function"]["name"] == "now"
        assert message["content"] is None


async def contents(url: str, **fields: Any) -> list[str]:
    """Return the content of an answer, whole and streamed."""
    _, _, raw = await post(url, chat(**fields))
    _, _, stream = await post(url, chat(stream=True, **fields))
    deltas = [choice["delta"] for event in events(stream)[:-1] for choice in event["choices"]]
    return [json.loads(raw)["choices"][0]["message"]["content"], "".join(each.get("content") or "" for each in deltas)]


async def listed_models(url: str) -> list[dict[str, Any]]:
    async with aiohttp.ClientSession() as session, session.get(f"{url}/v1/models") as response:
        cards: list[dict[str, Any]] = (await response.json())["data"]
        return cards


def ids_of(text: str) -> list[int]:
    ids: list[int] = trained_tokenizer().encode(text, add_special_tokens=False).ids
    return ids

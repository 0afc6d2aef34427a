# ruff: noqa: RUF001 (DeepSeek's and StepFun's markers have a wide bar)
"""Formats over the API: which one a model has, and calls that a grammar holds to it."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
from tokenizers import Tokenizer

from server.models.served_model import build_model
from server.text.formats import FORMATS
from server.text.formats.reasoning import THOUGHT_FORMATS
from tests.server.conftest import bundle_of, trained_tokenizer
from tests.server.gateway_app import gateway
from tests.server.scripted_worker import ScriptedWorker
from tests.server.sse_grammar import events
from tests.server.test_app import chat, post
from worker.grammar import GrammarCompiler, GrammarConstraint
from worker.wire import GenerateRequest, TokenizerBundle

WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer"},
                "unit": {"enum": ["C", "F"]},
                "tags": {"type": "array", "items": {"type": "string"}},
                "exact": {"type": "boolean"},
            },
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}
NOW: Any = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}
ARGUMENTS = {"city": "Bonn <3", "days": 3, "unit": "F", "tags": ["a", "b"], "exact": True}
LESS = {"city": "K", "unit": "C"}
JSON, LESS_JSON = json.dumps(ARGUMENTS), json.dumps(LESS)
LINE = "\n"


def listed(opening: str, closing: str = "", name: str = "name", arguments: str = "arguments", before: str = "") -> str:
    calls = ((("get_weather"), JSON), ("get_weather", LESS_JSON), ("now", "{}"))
    objects = (f'{{{before}"{name}": "{each}", "{arguments}": {text}}}' for each, text in calls)
    return f"{opening}[{', '.join(objects)}]{closing}"


def objects(opening: str, closing: str, between: str, arguments: str = "arguments") -> str:
    calls = ((("get_weather"), JSON), ("get_weather", LESS_JSON), ("now", "{}"))
    return between.join(f'{opening}{{"name": "{name}", "{arguments}": {text}}}{closing}' for name, text in calls)


def qwen(opening: str, closing: str, line: str = "\n") -> str:
    def call(name: str, arguments: dict[str, Any]) -> str:
        texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in arguments.items()}
        tags = "".join(f"<parameter={key}>{line}{text}{line}</parameter>{line}" for key, text in texts.items())
        return f"{opening}{line}<function={name}>{line}{tags}</function>{line}{closing}"

    return line.join((call("get_weather", ARGUMENTS), call("get_weather", LESS), call("now", {})))


def invokes(opening: str, closing: str, bar: str = "", typed: bool = False) -> str:
    def call(name: str, arguments: dict[str, Any]) -> str:
        tags = ""
        for key, value in arguments.items():
            is_text = isinstance(value, str)
            said = f' string="{str(is_text).lower()}"' if typed else ""
            text = value if is_text else json.dumps(value)
            tags += f'<{bar}parameter name="{key}"{said}>{text}</{bar}parameter>\n'
        return f'<{bar}invoke name="{name}">\n{tags}</{bar}invoke>\n'

    return f"{opening}\n{call('get_weather', ARGUMENTS)}{call('get_weather', LESS)}{call('now', {})}{closing}"


def glm(line: str) -> str:
    def call(name: str, arguments: dict[str, Any]) -> str:
        texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in arguments.items()}
        pairs = (f"<arg_key>{k}</arg_key>{line}<arg_value>{v}</arg_value>{line}" for k, v in texts.items())
        return f"<tool_call>{name}{line}{''.join(pairs)}</tool_call>"

    return line.join((call("get_weather", ARGUMENTS), call("get_weather", LESS), call("now", {})))


def named(before: str, after: str, end: str, section: tuple[str, str] = ("", ""), between: str = "") -> str:
    calls = ((("get_weather"), JSON), ("get_weather", LESS_JSON), ("now", "{}"))
    return section[0] + between.join(before + name + after + text + end for name, text in calls) + section[1]


def gemma(opening: str, closing: str, quote: str) -> str:
    full = f"city:{quote}Bonn <3{quote},days:3,unit:{quote}F{quote},tags:[{quote}a{quote},{quote}b{quote}],exact:true"
    bodies = (f"get_weather{{{full}}}", f"get_weather{{city:{quote}K{quote},unit:{quote}C{quote}}}", "now{}")
    return "".join(f"{opening}call:{body}{closing}" for body in bodies)


def python(opening: str, closing: str, between: str = ", ") -> str:
    full = 'get_weather(city="Bonn <3", days=3, unit="F", tags=["a", "b"], exact=True)'
    return opening + between.join((full, 'get_weather(city="K", unit="C")', "now()")) + closing


STEP = "<｜tool_call_begin｜>function<｜tool_sep｜>"
BEGIN, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, CALL_END, SEP = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
KIMI = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
FORMS: dict[str, tuple[str, str]] = {
    "apertus": (
        "{{ tools }}<|tools_prefix|>",
        f'<|tools_prefix|>[{{"get_weather": {JSON}}}, {{"get_weather": {LESS_JSON}}}, {{"now": {{}}}}]<|tools_suffix|>',
    ),
    "command_a": (
        "{{ tools }}<|START_ACTION|>[",
        listed("<|START_ACTION|>", "<|END_ACTION|>", "tool_name", "parameters", '"tool_call_id": "0", '),
    ),
    "deepseek_v3": (
        f"{{{{ tools }}}}{{{{'{BEGIN}{CALL}' + tool['type'] + '{SEP}' + '\\n```json\\n'}}}}",
        named(f"{CALL}function{SEP}", "\n```json\n", f"\n```{CALL_END}", (BEGIN, END), "\n"),
    ),
    "deepseek_v31": (f"{{{{ tools }}}}{BEGIN}{CALL}", named(CALL, SEP, CALL_END, (BEGIN, END))),
    "deepseek_v32": (
        "{{ tools }}<｜DSML｜function_calls>",
        invokes("<｜DSML｜function_calls>", "</｜DSML｜function_calls>", "｜DSML｜", True),
    ),
    "deepseek_v4": (
        "{{ tools }}<｜DSML｜tool_calls>",
        invokes("<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>", "｜DSML｜", True),
    ),
    "deepseek_v41": (
        "{{ tools }}<｜DSML｜ calls>",
        invokes("<｜DSML｜ calls>", "</｜DSML｜ calls>", "｜DSML｜ ", True),
    ),
    "function_gemma": (
        "{{ tools }}<start_function_call>call:",
        gemma("<start_function_call>", "<end_function_call>", "<escape>"),
    ),
    "gemma4": ("{{ tools }}<|tool_call>call:", gemma("<|tool_call>", "<tool_call|>", '<|"|>')),
    "glm45": ("{{ tools }}<tool_call>{function-name}\n<arg_key>", glm("\n")),
    "glm47": ("{{ tools }}<tool_call>{function-name}<arg_key>", glm("")),
    "gpt_oss": (
        "{{ tools }}<|start|>assistant<|channel|>final<|message|>",
        f"<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{JSON}",
    ),
    "granite3": ("{{ tools }}respond only with <|tool_call|> followed by a JSON list", listed("<|tool_call|>")),
    "granite_20b": ("{{ tools }}<function_call>", objects("<function_call>", "</function_call>", "")),
    "hermes": ("{{ tools }}<tool_call>", objects("<tool_call>\n", "\n</tool_call>", "\n")),
    "hunyuan": ("{{ tools }}<tool_calls>[", listed("<tool_calls>", "</tool_calls>")),
    "internlm": (
        "{{ tools }}<|action_start|><|plugin|>",
        objects("<|action_start|><|plugin|>", "<|action_end|>", "", "parameters"),
    ),
    "kimi_k2": (
        "{{ tools }}<|tool_calls_section_begin|>",
        named("<|tool_call_begin|>functions.", ":0<|tool_call_argument_begin|>", "<|tool_call_end|>", KIMI),
    ),
    "kimi_k3": (
        "{{ tools }}{{- '<|open|>' + tag }}{{ '<|sep|>' }}",
        '<|open|>tools<|sep|><|open|>call tool="get_weather" index="1"<|sep|><|open|>argument key="city" type="string"'
        '<|sep|>Bonn<|close|>argument<|sep|><|open|>argument key="unit" type="string"<|sep|>C<|close|>argument<|sep|>'
        "<|close|>call<|sep|><|close|>tools<|sep|>",
    ),
    "lfm2": ("{{ tools }}<|tool_list_start|>", python("<|tool_call_start|>[", "]<|tool_call_end|>")),
    "llama3": ("{{ tools }}<|python_tag|>", objects("", "", "; ", "parameters")),
    "llama4": ("{{ tools }}<|header_start|>", objects("", "", "; ", "parameters")),
    "longcat": ("{{ tools }}<longcat_tool_call>", objects("<longcat_tool_call>\n", "\n</longcat_tool_call>", "\n")),
    "mimo": ("{{ tools }}<tool_call><function=", qwen("<tool_call>", "</tool_call>", "")),
    "minimax_m2": ("{{ tools }}<minimax:tool_call>", invokes("<minimax:tool_call>", "</minimax:tool_call>")),
    "mistral": ("{{ tools }}[TOOL_CALLS]", listed("[TOOL_CALLS]")),
    "mistral_v11": ("{{ tools }}[TOOL_CALLS]name[ARGS]", named("[TOOL_CALLS]", "[ARGS]", "")),
    "nemotron": ("{{ tools }}<TOOLCALL>[", listed("<TOOLCALL>", "</TOOLCALL>")),
    "olmo3": ("{{ tools }}<function_calls>", python("<function_calls>\n", "\n</function_calls>", "\n")),
    "phi4": ("{{ tools }}<|tool|>{}<|/tool|>", listed("<|tool_call|>", "<|/tool_call|>")),
    "phi4_mini": ("{{ tools }}functools[", listed("functools")),
    "pythonic": ("{{ tools }}[func_name1(params_name1=params_value1...), func_name2(params)]", python("[", "]")),
    "qwen3_coder": ("{{ tools }}<tool_call>\n<function=example>", qwen("<tool_call>", "</tool_call>")),
    "seed_oss": ("{{ tools }}<seed:tool_call><function=", qwen("<seed:tool_call>", "</seed:tool_call>")),
    "step3": (
        "{{ tools }}<steptml:invoke name=",
        f'<｜tool_calls_begin｜>{STEP}<steptml:invoke name="get_weather"><steptml:parameter name="city">Bonn'
        '</steptml:parameter><steptml:parameter name="unit">C</steptml:parameter></steptml:invoke><｜tool_call_end｜>'
        "<｜tool_calls_end｜>",
    ),
}
"""By format: a short template, and calls as a model that was trained on it writes them."""
ONE_CALL = ("gpt_oss", "kimi_k3", "step3")
CONFIG_NAMES = tuple(FORMATS)


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


@pytest.mark.parametrize("special", [False, True], ids=["texts", "tokens"])
@pytest.mark.parametrize("name", FORMS)
async def test_required_calls_come_in_the_familys_own_form(name: str, special: bool) -> None:
    """The grammar takes what the family writes, and no bare list. The calls arrive, streamed and not."""
    text = FORMS[name][1]
    worker = worker_of(name, text, special=special)
    body = chat(tools=[WEATHER, NOW], tool_choice="required")
    async with gateway(worker) as target:
        status, _, raw = await post(target.url, body)
        assert status == 200, raw
        _, _, stream = await post(target.url, {**body, "stream": True})
        _, _, cards = await post(target.url, {**body, "tool_choice": named_choice("now")})
    (choice,) = json.loads(raw)["choices"]
    calls = [each["function"] for each in choice["message"]["tool_calls"]]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
    if name not in ONE_CALL:
        expected = [("get_weather", ARGUMENTS), ("get_weather", LESS), ("now", {})]
        assert [(call["name"], json.loads(call["arguments"])) for call in calls] == expected
    streamed = "".join(
        call["function"].get("arguments", "")
        for event in events(stream)[:-1]
        for each in event["choices"]
        for call in each["delta"].get("tool_calls", ())
    )
    assert streamed == "".join(call["arguments"] for call in calls)
    await check_grammar(worker, worker.received[0], taken=text, refused='[{"name": "now", "parameters": {}}]')
    await check_grammar(worker, worker.received[2], taken="", refused=text)


def named_choice(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


async def check_grammar(worker: ScriptedWorker, request: GenerateRequest, *, taken: str, refused: str) -> None:
    compiler = GrammarCompiler(worker.bundle)
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

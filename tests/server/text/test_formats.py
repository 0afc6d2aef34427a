# ruff: noqa: RUF001 (DeepSeek's markers have a wide bar)
"""Outputs that model cards, chat templates and engines document: read right, whole and at every cut."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from server.text.formats import CALL_LIST, FORMATS
from server.text.formats.arguments import typed, types_of
from server.text.formats.base import GrammarTools
from server.text.formats.reasoning import THOUGHT_FORMATS
from server.text.output_parser import OutputParser, OutputRules, ReasoningStart

SCHEMAS: dict[str, Any] = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "exact": {"type": "boolean"},
            "options": {"type": "object"},
            "tags": {"type": "array", "items": {"type": "string"}},
            "unit": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "ratio": {"$ref": "#/$defs/ratio"},
            "note": {"type": ["string", None]},  # as YAML reads [string, null]
        },
        "$defs": {"ratio": {"type": "number"}},
    },
    "now": {"type": "object", "properties": {}},
}
CITY = ("get_weather", {"city": "Köln"})
LONG = ("get_weather", {"city": "Köln", "days": 3})
NOW: tuple[str, dict[str, Any]] = ("now", {})
CITY_JSON = '{"city": "Köln"}'
LONG_JSON = '{"city": "Köln", "days": 3}'
NESTED = {"city": 'K"ö}<ln\n', "days": -3, "options": {"a": [1, {"b": None}], "c": "x,y"}, "tags": ["a", "🎉"]}
NESTED_JSON = json.dumps(NESTED, ensure_ascii=False)


class Case(NamedTuple):
    tools: str
    text: str
    calls: Sequence[tuple[str, Any]] = ()
    content: str = ""
    thoughts: str = ""
    reasoning: ReasoningStart = "none"
    style: str = "think"


def qwen(body: str, opening: str = "<tool_call>", closing: str = "</tool_call>") -> str:
    return f"{opening}\n{body}\n{closing}"


WEATHER_XML = "<function=get_weather>\n<parameter=city>\nKöln\n</parameter>\n</function>"
ALL_XML = (
    "<function=get_weather>\n<parameter=city>\na\n<b>\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
    '<parameter=exact>\nTrue\n</parameter>\n<parameter=options>\n{"a": [1, true]}\n</parameter>\n'
    "<parameter=tags>\n['x', 'y']\n</parameter>\n<parameter=unit>\nnull\n</parameter>\n"
    "<parameter=ratio>\n0.5\n</parameter>\n<parameter=other>\n7\n</parameter>\n</function>"
)
ALL = {
    **{"city": "a\n<b>", "days": 3, "exact": True, "options": {"a": [1, True]}, "tags": ["x", "y"]},
    **{"unit": None, "ratio": 0.5, "other": "7"},
}
R1 = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n{}\n```<｜tool▁call▁end｜>"


def deepseek(*calls: tuple[str, str]) -> str:
    return "<｜tool▁calls▁begin｜>" + "\n".join(R1.format(*call) for call in calls) + "<｜tool▁calls▁end｜>"


def objects(*calls: tuple[str, str], keys: tuple[str, str] = ("name", "arguments")) -> str:
    return ", ".join(f'{{"{keys[0]}": "{name}", "{keys[1]}": {text}}}' for name, text in calls)


BOTH = (("get_weather", LONG_JSON), ("now", "{}"))
CASES = [
    # Qwen3, Hermes, Granite 4, Ernie 4.5, EXAONE
    Case("hermes", f"{qwen(objects(BOTH[0]))}\n{qwen(objects(BOTH[1]))}", [LONG, NOW]),
    Case("hermes", f"Well.\n\n{qwen(objects(('get_weather', NESTED_JSON)))}", [("get_weather", NESTED)], "Well."),
    Case("hermes", f"<think>\nhm\n</think>\n\n{qwen(objects(BOTH[0]))}", [LONG], "", "\nhm\n", "maybe"),
    Case("hermes", f"hm\n{qwen(objects(BOTH[0]))}", [LONG], "", "hm\n", "inside"),
    Case("hermes", f"hm{qwen(objects(BOTH[0]))}</think>yes", [LONG], "yes", "hm", "inside"),
    Case("hermes", "a <tool_call> b</think>yes", (), "yes", "a <tool_call> b", "inside"),
    # Qwen3-Coder, Qwen3.5, Nemotron 3, Step 3.5
    Case("qwen3_coder", qwen(WEATHER_XML), [CITY]),
    Case(
        "qwen3_coder",
        f"Ok.\n\n{qwen(ALL_XML)}\n{qwen('<function=now>' + chr(10) + '</function>')}",
        [("get_weather", ALL), NOW],
        "Ok.",
    ),
    Case("qwen3_coder", f"{WEATHER_XML}\n</tool_call>", [CITY]),
    Case(
        "qwen3_coder",
        qwen("<function=get_weather>\n<parameter=exact>\n1\n</parameter>\n</function>"),
        [("get_weather", {"exact": True})],
    ),
    Case(
        "qwen3_coder", "<tool_call>\n<function=get_weather>\n<parameter=city>\nKöln\n</function>\n</tool_call>", [CITY]
    ),
    Case(
        "qwen3_coder",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nKöln\n<parameter=days>\n3\n</parameter>\n</function>",
        [LONG],
    ),
    Case("qwen3_coder", qwen(WEATHER_XML.replace("Köln", "</tool_call>")), [("get_weather", {"city": "</tool_call>"})]),
    Case("qwen3_coder", qwen(WEATHER_XML.replace("city", "note")), [("get_weather", {"note": "Köln"})]),
    Case("qwen3_coder", f"hm\n</think>\n\n{qwen(WEATHER_XML)}", [CITY], "", "hm\n", "inside"),
    Case("qwen3_coder", qwen(objects(BOTH[0])), [LONG]),
    # DeepSeek
    Case("deepseek_v3", "Hi\n\n" + deepseek(*BOTH), [LONG, NOW], "Hi"),
    Case("deepseek_v3", "<think>\nhm\n</think>\n" + deepseek(BOTH[0]), [LONG], "", "\nhm\n", "maybe"),
    Case("deepseek_v3", deepseek(("get_weather", NESTED_JSON)), [("get_weather", NESTED)]),
    # GLM
    Case(
        "glm45",
        "\nHi\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Köln</arg_value>\n<arg_key>days</arg_key>\n"
        "<arg_value>3</arg_value>\n</tool_call>\n<tool_call>now\n</tool_call>",
        [LONG, NOW],
        "\nHi",
    ),
    Case(
        "glm45",
        "<think>hm</think>\n<tool_call>get_weather\n<arg_key>options</arg_key>\n"
        '<arg_value>{"a": [1]}</arg_value>\n</tool_call>',
        [("get_weather", {"options": {"a": [1]}})],
        "",
        "hm",
        "maybe",
    ),
    Case(
        "glm47",
        "hm</think><tool_call>get_weather<arg_key>city</arg_key><arg_value>Köln</arg_value></tool_call><tool_call>now</tool_call>",
        [CITY, NOW],
        "",
        "hm",
        "inside",
    ),
    Case(
        "glm47",
        "<tool_call>get_weather<arg_key>city</arg_key><arg_value>the <arg_key> of GLM</arg_value></tool_call>",
        [("get_weather", {"city": "the <arg_key> of GLM"})],
    ),
    # MiniMax
    Case(
        "minimax_m2",
        'hm\n</think>\n\nHi\n<minimax:tool_call>\n<invoke name="get_weather">\n'
        '<parameter name="city">Köln</parameter>\n'
        '<parameter name="days">3</parameter>\n</invoke>\n<invoke name="now">\n</invoke>\n</minimax:tool_call>',
        [LONG, NOW],
        "Hi",
        "hm\n",
        "inside",
    ),
    Case(
        "minimax_m2",
        '<minimax:tool_call><invoke name="get_weather"><parameter name="city"><a><parameter name="b" value="c"/></a>'
        '</parameter><parameter name="days">3</parameter></invoke></minimax:tool_call>',
        [("get_weather", {"city": '<a><parameter name="b" value="c"/></a>', "days": 3})],
    ),
    Case(
        "minimax_m2",
        '<minimax:tool_call><invoke name="get_weather"><parameter name="tags">["a"]</parameter>'
        "</invoke></minimax:tool_call>",
        [("get_weather", {"tags": ["a"]})],
    ),
    # Granite, Phi-4: JSON between markers
    Case("granite3", f"<|tool_call|>[{objects(*BOTH)}]", [LONG, NOW]),
    Case("granite3", f"<tool_call>[{objects(BOTH[0])}]", [LONG]),
    Case(
        "granite3", "Here is my thought process: hm. Here is my response: yes", (), "yes", " hm. ", "maybe", "granite"
    ),
    # Granite 3.3: its answer is between tags too
    Case("granite3", "<think> hm </think><response> a\n\nb </response>", (), "a\n\nb", " hm ", "maybe", "granite33"),
    Case("granite3", "<think>hm</think>\n<response>\na </b>\n</response>\n", (), "a </b>", "hm", "maybe", "granite33"),
    Case("granite3", "<response>yes</response>", (), "yes", "", "maybe", "granite33"),
    Case("granite3", "yes </response>", (), "yes </response>", "", "maybe", "granite33"),
    Case("granite3", f"<think>hm</think><|tool_call|>[{objects(BOTH[0])}]", [LONG], "", "hm", "maybe", "granite33"),
    Case("phi4_mini", f"functools[{objects(*BOTH)}]", [LONG, NOW]),
    Case("phi4_mini", "use functools.reduce", (), "use functools.reduce"),
    Case("phi4", f"<|tool_call|>[{objects(*BOTH)}]<|/tool_call|>", [LONG, NOW]),
    Case("phi4", f"<|tool_call|>{objects(BOTH[0])}<|/tool_call|>", [LONG]),
    # Functions: Llama 4, Gemma 3
    Case("pythonic", '[get_weather(city="Köln", days=3), now()]', [LONG, NOW]),
    Case(
        "pythonic",
        "[get_weather(city='it\\'s \"x\"', tags=['a', \"b\"], options={'a': None, 'b': [True, -1.5]})]",
        [("get_weather", {"city": 'it\'s "x"', "tags": ["a", "b"], "options": {"a": None, "b": [True, -1.5]}})],
    ),
    Case("pythonic", "[1] says [other(x=1)]", (), "[1] says [other(x=1)]"),
    Case("pythonic", "[other(x=1)]", (), "[other(x=1)]"),
    Case("llama", '<|python_start|>[get_weather(city="Köln")]<|python_end|>', [CITY]),
    Case("llama", '<|python_start|>{"name": "get_weather", "parameters": {"city": "Köln"}}<|python_end|>', [CITY]),
    Case(
        "llama",
        '{"name": "get_weather", "parameters": {"city": "Köln"}}; {"name": "now", "parameters": {}}',
        [CITY, NOW],
    ),
    Case("llama", 'Let me see.\n{"name": "get_weather", "parameters": {"city": "Köln"}}', [CITY], "Let me see."),
    Case("llama", 'Write {"name": "now"} or\n{"x": 1}', (), 'Write {"name": "now"} or\n{"x": 1}'),
    # Mistral
    Case("mistral", f"[THINK]hm[/THINK]Hi[TOOL_CALLS][{objects(*BOTH)}]", [LONG, NOW], "Hi", "hm", "maybe", "mistral"),
    Case("mistral_v11", f"[TOOL_CALLS]get_weather[ARGS]{LONG_JSON}[TOOL_CALLS]now[ARGS]{{}}", [LONG, NOW]),
    Case("mistral_v11", f"[TOOL_CALLS]get_weather[CALL_ID]a1B2c3D4e[ARGS]{CITY_JSON}", [CITY]),
]
MALFORMED = [
    ("hermes", "<tool_call>\nnot JSON\n</tool_call>"),
    ("hermes", '<tool_call>{"answer": 42}</tool_call> so'),
    ("qwen3_coder", "<tool_call>\nno call\n</tool_call>"),
    ("qwen3_coder", "use <function=get_weather and that"),
    ("deepseek_v3", "<｜tool▁calls▁begin｜>x<｜tool▁calls▁end｜>"),
    ("glm45", "<tool_call>now what</tool_call>"),
    ("minimax_m2", "<minimax:tool_call>\nwhat\n</minimax:tool_call>"),
    ("granite3", "<|tool_call|>[1, 2]"),
    ("phi4_mini", "functools[reduce]"),
    ("mistral", "[TOOL_CALLS] none"),
    ("pythonic", "[get_weather(Köln)]"),
    ("llama", '{"name": "other", "parameters": {}}'),
]


def message(rules: OutputRules, parts: Sequence[str]) -> tuple[list[tuple[str, str]], int]:
    """Return the deltas of a text, of which neighbours of one kind are one, and where its answer begins."""
    parser, found = OutputParser(rules), list[tuple[str, str]]()
    for number, part in enumerate(parts, 1):
        for kind, text in parser.feed(part, last=number == len(parts)):
            if found and kind == found[-1][0] != "call":
                text = found.pop()[1] + text
            found.append((kind, text))
    return found, parser.answer_start


def rules_of(case: Case) -> OutputRules:
    return OutputRules(
        reasoning=case.reasoning,
        thoughts=THOUGHT_FORMATS[case.style],
        tools=FORMATS[case.tools],
        tool_names=frozenset(SCHEMAS),
        schemas=SCHEMAS,
    )


@pytest.mark.parametrize("number", range(len(CASES)))
def test_what_a_family_documents(number: int) -> None:
    case = CASES[number]
    deltas, _ = message(rules_of(case), [case.text])
    texts = {kind: "".join(text for each, text in deltas if each == kind) for kind in ("content", "reasoning")}
    assert (texts["content"], texts["reasoning"]) == (case.content, case.thoughts)
    calls: list[tuple[str, str]] = []
    for kind, text in deltas:
        if kind == "call":
            calls.append((text, ""))
        elif kind == "arguments":
            calls[-1] = (calls[-1][0], calls[-1][1] + text)
    assert [(name, json.loads(text)) for name, text in calls] == list(case.calls)


@pytest.mark.parametrize("number", range(len(CASES)))
def test_every_cut_of_what_a_family_documents(number: int) -> None:
    """A stream is the whole. A text that ends anywhere gives a beginning of each call, and no other call."""
    case = CASES[number]
    rules, text = rules_of(case), case.text
    whole = message(rules, [text])
    full = [json.dumps(arguments, ensure_ascii=False) for _, arguments in case.calls]
    for at in range(len(text) + 1):
        assert message(rules, [text[:at], text[at:]]) == whole, text[:at]
        cut = message(rules, [text[:at]])
        assert message(rules, list(text[:at]) or [""]) == cut, text[:at]
        assert message(rules, [text[:at], ""]) == cut, text[:at]
        assert len([kind for kind, _ in cut[0] if kind == "call"]) <= len(full)


@pytest.mark.parametrize(("name", "text"), MALFORMED)
def test_malformed_calls_lose_no_character(name: str, text: str) -> None:
    rules = OutputRules(tools=FORMATS[name], tool_names=frozenset(SCHEMAS), schemas=SCHEMAS)
    for parts in ([text], list(text), [text, ""]):
        assert message(rules, parts)[0] == [("content", text)]


@pytest.mark.parametrize("text", ["-1e999", "[-1e999]", "0x" + "f" * 4000, "-0x" + "f" * 4000])
def test_a_number_that_json_cannot_write_is_a_string(text: str) -> None:
    assert json.loads(typed(text, frozenset({"number", "array"}))) == text


@pytest.mark.parametrize(
    "of_calls", [{"required": [{}]}, {"properties": {"a": {"anyOf": 5}}}, {"properties": {"a": {"type": 5}}}]
)
@pytest.mark.parametrize("name", ["qwen3_coder", "pythonic"])
def test_a_schema_of_wrong_types_breaks_nothing(name: str, of_calls: dict[str, Any]) -> None:
    tokenizer: Any = SimpleNamespace(added_tokens={}, added_pattern=re.compile("(?!)"))
    assert FORMATS[name].rules(GrammarTools({"f": of_calls}, {"f": of_calls}, {"f": "f"}, [], True, tokenizer))
    assert types_of(of_calls, "a") == {"string"}


def test_a_tag_that_is_cut_is_no_content() -> None:
    text = qwen(WEATHER_XML)
    start = text.index("<parameter=")
    for end in range(start, start + len("<parameter=")):
        assert message(rules_of(CASES[6]), [text[:end]])[0] == [("call", "get_weather")], text[:end]


def test_arguments_come_as_they_are_written() -> None:
    """A string by a schema need not wait for its end."""
    parser = OutputParser(rules_of(CASES[6]))
    opening = "<tool_call>\n<function=get_weather>\n<parameter=city>\nKö"
    assert parser.feed(opening, last=False) == [("call", "get_weather"), ("arguments", '{"city": "Kö')]
    assert parser.feed('l"n\n', last=False) == [("arguments", 'l\\"n')]
    assert parser.feed("</par", last=False) == []
    assert parser.feed("ameter>\n</function>", last=False) == [("arguments", '"}')]


def test_no_marker_begins_with_another() -> None:
    """The reader takes the first marker that it finds."""
    for each in (*FORMATS.values(), CALL_LIST):
        for one in each.opens:
            assert not [other for other in each.opens if other != one and other.startswith(one)], each.name

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.schema.tools import ToolName
from server.text.call_syntax import JsonScanner, call_of
from server.text.formats import CALL_LIST, FORMATS, formats_of
from server.text.formats.calls import MAX_NAME_CHARS
from server.text.output_parser import OutputDelta, OutputParser, OutputRules

HERMES = OutputRules(tools=FORMATS["hermes"])
LLAMA = OutputRules(tools=FORMATS["llama"], tool_names=frozenset({"f", "g"}))
MISTRAL = OutputRules(tools=FORMATS["mistral"])
LIST = OutputRules(tools=CALL_LIST)
THINKING = OutputRules(reasoning="maybe", tools=FORMATS["hermes"])


def read(rules: OutputRules, parts: list[str], *, ends_later: bool = True) -> tuple[str, str, list[tuple[str, str]]]:
    """Return (reasoning, content, calls) of a text that arrives in parts. `ends_later`: the end comes without text."""
    parser = OutputParser(rules)
    parts = [*parts, ""] if ends_later else parts
    reasoning = content = ""
    calls: list[tuple[str, str]] = []
    for number, part in enumerate(parts, 1):
        for delta in parser.feed(part, last=number == len(parts)):
            match delta:
                case "content", text:
                    content += text
                case "reasoning", text:
                    reasoning += text
                case "call", name:
                    calls.append((name, ""))
                case "arguments", text:
                    calls[-1] = (calls[-1][0], calls[-1][1] + text)
    return reasoning, content, calls


ARGUMENTS = '{"city": "K\\"ö}<ln", "days": [1, {"x": null}]}'
CALL = f'{{"name": "f", "arguments": {ARGUMENTS}}}'
CASES: list[tuple[OutputRules, str, tuple[str, str, list[tuple[str, str]]]]] = [
    (HERMES, "just text < here", ("", "just text < here", [])),
    (HERMES, f"<tool_call>\n{CALL}\n</tool_call>", ("", "", [("f", ARGUMENTS)])),
    (HERMES, f"Let me look. \n<tool_call>{CALL}</tool_call>\n", ("", "Let me look.", [("f", ARGUMENTS)])),
    (HERMES, f"<tool_call>{CALL}</tool_call>\n<tool_call>{CALL}</tool_call>", ("", "", [("f", ARGUMENTS)] * 2)),
    (HERMES, f"<tool_call>{CALL}</tool_call> and then", ("", " and then", [("f", ARGUMENTS)])),
    (HERMES, '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', ("", "", [("f", '{"a": 1}')])),
    (HERMES, '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', ("", "", [("f", '{"a": 1}')])),
    (HERMES, '<tool_call>{"name": "f"}</tool_call>', ("", "", [("f", "{}")])),
    (HERMES, '<tool_call>{"name": "f", "arguments": null}</tool_call>', ("", "", [("f", "{}")])),
    (HERMES, '<tool_call>{"arguments": null, "name": "f"}</tool_call>', ("", "", [("f", "{}")])),
    (HERMES, '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1', ("", "", [("f", '{"a": 1')])),
    (HERMES, "<tool_call>{broken}</tool_call>", ("", "<tool_call>{broken}</tool_call>", [])),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": [1, 2', ("", "", [("f", '{"a": [1, 2')])),
    (HERMES, "a <tool_", ("", "a <tool_", [])),
    (HERMES, "trailing \n", ("", "trailing \n", [])),
    (LLAMA, '{"name": "f", "parameters": {"a": 1}}', ("", "", [("f", '{"a": 1}')])),
    (LLAMA, '<|python_tag|>{"type": "function", "name": "f", "parameters": {}}', ("", "", [("f", "{}")])),
    (LLAMA, '{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}', ("", "", [("f", "{}"), ("g", "{}")])),
    (LLAMA, '{"name": "other", "parameters": {}}', ("", '{"name": "other", "parameters": {}}', [])),
    (LLAMA, '{"name": "f", "parameters": {}}; {"name": "g"', ("", "", [("f", "{}"), ("g", "")])),
    (LLAMA, '{"answer": 42}', ("", '{"answer": 42}', [])),
    (LLAMA, '{"name": "f", "parameters": null}', ("", "", [("f", "{}")])),
    (LLAMA, '{"name": "f", "parameters": 5}', ("", "", [("f", "5")])),
    (MISTRAL, "[TOOL_CALLS]" + "x" * 300 + '{"a": 1}', ("", "[TOOL_CALLS]" + "x" * 300 + '{"a": 1}', [])),
    (LLAMA, " plain", ("", " plain", [])),
    (MISTRAL, f"[TOOL_CALLS] [{CALL}, {CALL}]", ("", "", [("f", ARGUMENTS)] * 2)),
    (MISTRAL, f"ok[TOOL_CALLS]f[ARGS]{ARGUMENTS}[TOOL_CALLS]g{{}}", ("", "ok", [("f", ARGUMENTS), ("g", "{}")])),
    (MISTRAL, "[TOOL", ("", "[TOOL", [])),
    (
        LIST,
        '[{"name": "f", "parameters": {"a": 1}}, {"name": "g", "parameters": {}}]',
        ("", "", [("f", '{"a": 1}'), ("g", "{}")]),
    ),
    (OutputRules(forced="f"), '{"a": 1}', ("", "", [("f", '{"a": 1}')])),
    (
        OutputRules(tools=FORMATS["hermes"], parallel=False),
        f"<tool_call>{CALL}</tool_call><tool_call>{CALL}</tool_call>",
        ("", "", [("f", ARGUMENTS)]),
    ),
    (
        THINKING,
        f"<think>\nhm </thi</think>\n\nYes.<tool_call>{CALL}</tool_call>",
        ("\nhm </thi", "Yes.", [("f", ARGUMENTS)]),
    ),
    (THINKING, "no thoughts", ("", "no thoughts", [])),
    (THINKING, "<thi", ("", "<thi", [])),
    (OutputRules(reasoning="inside"), "deep</think>\nYes", ("deep", "Yes", [])),
    (OutputRules(reasoning="inside"), "deep and never e</th", ("deep and never e</th", "", [])),
]


@pytest.mark.parametrize("case", range(len(CASES)))
def test_every_format_at_once_and_character_by_character(case: int) -> None:
    rules, text, expected = CASES[case]
    assert read(rules, [text]) == expected
    assert read(rules, [text], ends_later=False) == expected
    assert read(rules, list(text)) == expected


@pytest.mark.parametrize(
    ("rules", "before", "text"),
    [
        (
            OutputRules(tools=CALL_LIST, tool_names=frozenset({"fly", "flow"})),
            "",
            '[{"name": "fly", "arguments": {"a": "x"}}]',
        ),
        (HERMES, "<tool_call>", '{"name": "fly", "arguments": {"a": "x"}}</tool_call>'),
        (MISTRAL, "[TOOL_CALLS]", '[{"name": "fly", "arguments": {"a": "x"}}]'),
        (MISTRAL, "[TOOL_CALLS]", 'fly[ARGS]{"a": "x"}'),
    ],
)
def test_a_call_that_is_cut_is_a_call(rules: OutputRules, before: str, text: str) -> None:
    """Wherever the limit of tokens falls, no piece of a call is content, and arguments are what came of them."""
    for size in range(len(text)):
        cut = text[:size]
        reasoning, content, calls = read(rules, [before + cut])
        assert (reasoning, content.strip("{[ ")) == ("", "") or "fl" not in cut, cut
        assert rules.tools != "list" or content == "", cut
        if "fly" in cut:
            ((name, arguments),) = calls
            assert name == "fly"
            assert '{"a": "x"}'.startswith(arguments.strip())
        assert read(rules, list(before + cut)) == (reasoning, content, calls), cut


JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


@settings(max_examples=300, deadline=None)
@given(value=JSON, cut=st.integers(0, 50))
def test_the_scanner_finds_the_end_of_a_value(value: Any, cut: int) -> None:
    text = json.dumps(value)
    scanner = JsonScanner()
    first = scanner.feed(text[:cut])
    used = first if scanner.done else first + scanner.feed(text[cut:] + ", rest")
    assert used == len(text)
    assert scanner.done or cut >= len(text)


def test_the_format_is_derived_from_the_template() -> None:
    assert formats_of("... <tool_call> ...") == [FORMATS["hermes"]]
    assert formats_of("... [TOOL_CALLS] ... <tool_call>") == [FORMATS["mistral"], FORMATS["hermes"]]
    assert formats_of("... <|python_tag|> ...") == [FORMATS["llama"]]
    assert formats_of("nothing") == []


def test_a_text_that_is_no_call_name_is_not_held_back() -> None:
    parser = OutputParser(MISTRAL)
    assert parser.feed("[TOOL_CALLS]" + "x" * MAX_NAME_CHARS, last=False) == []
    assert parser.feed("x", last=False) == [("content", "[TOOL_CALLS]" + "x" * (MAX_NAME_CHARS + 1))]


def test_a_call_too_deep_to_parse_is_no_call() -> None:
    assert call_of('{"name":' * 100_000 + "1" + "}" * 100_000) is None


CUSTOM = OutputRules(tools=FORMATS["hermes"], client_names={"say": ToolName("say", "custom")})
INPUTS = {
    '{"input": "a\\n\\"b\\" \\u00e9 \\ud83c\\udf89 \\\\"}': 'a\n"b" é 🎉 \\',
    '{"input": ""}': "",
    '{"input": "a\\ud83cb\\udf89"}': "a\ufffdb\ufffd",
    '{"input": "a", "note": "b"}': "a",
    '{"patch": "a\\nb"}': "a\nb",
    '{"patch": "a\\ud83cb\\ud83c\\udf89"}': "a\ufffdb🎉",
    '{"a": 1, "b": 2}': '{"a": 1, "b": 2}',
    '"plain text"': "plain text",
}


@pytest.mark.parametrize("arguments", INPUTS)
def test_the_input_of_a_custom_tool(arguments: str) -> None:
    """However the text is cut, and whatever form the model gives the arguments."""
    written = f'<tool_call>{{"name": "say", "arguments": {arguments}}}</tool_call>'
    for size in (1, 2, 3, 5, 7, len(written)):
        parser, deltas = OutputParser(CUSTOM), []
        for start in range(0, len(written), size):
            deltas += parser.feed(written[start : start + size], last=start + size >= len(written))
        assert "".join(delta.text for delta in deltas if delta.kind == "input") == INPUTS[arguments]
        assert [delta.text for delta in deltas if delta.kind != "input"] == ["say"]


def test_the_input_of_a_custom_tool_comes_as_it_is_written() -> None:
    parser = OutputParser(CUSTOM)
    parser.feed('<tool_call>{"name": "say", "arguments": {"input": "ab', last=False)
    assert parser.feed("cd\\", last=False) == [OutputDelta("input", "cd")]
    assert parser.feed('ne"', last=False) == [OutputDelta("input", "\ne")]
    assert parser.feed("}}</tool_call>", last=True) == []

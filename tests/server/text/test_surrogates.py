"""Surrogates in a model's calls: an answer can always be encoded, and is the same however it is cut."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.text.formats import FORMATS
from server.text.output_parser import ChoiceMessage, OutputRules

ESCAPES = [r"\ud83d", r"\ude00", r"\ud83d\ude00", r"\\ud83d", r"\u00e9", r"\n", r"\"", "x", "é", "😀"]
FORMS = {
    "hermes": '<tool_call>{"name": "f", "arguments": {"a": "%s", "b": ["%s"]}}</tool_call>',
    "pythonic": '[f(a="%s", b=["%s"])]',
    "qwen3_coder": (
        '<tool_call>\n<function=f>\n<parameter=c>\n{"a": "%s"}\n</parameter>\n'
        '<parameter=b>\n["%s"]\n</parameter>\n</function>\n</tool_call>'
    ),
}
SCHEMAS = {"f": {"properties": {"b": {"type": "array"}, "c": {"type": "object"}}}}


def arguments(form: str, parts: list[str]) -> str:
    rules = OutputRules(tools=FORMATS[form], tool_names=frozenset({"f"}), schemas=SCHEMAS)
    message, found = ChoiceMessage(rules), ""
    for number, part in enumerate(parts, 1):
        for delta in message.deltas(part, last=number == len(parts)):
            for call in delta.get("tool_calls", ()):
                found += call["function"].get("arguments", "")
    return found


@pytest.mark.parametrize("form", FORMS)
@given(texts=st.lists(st.sampled_from(ESCAPES), max_size=6).map("".join), data=st.data())
def test_halves_are_replaced_however_they_are_cut(form: str, texts: str, data: st.DataObject) -> None:
    text = FORMS[form] % (texts, texts)
    cuts = sorted(data.draw(st.sets(st.integers(1, len(text) - 1), max_size=12)))
    whole = arguments(form, [text])
    assert arguments(form, [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]) == whole
    whole.encode()
    value = json.loads(whole)
    json.dumps(value, ensure_ascii=False).encode()
    read: Any = json.loads(f'"{texts}"')
    joined = read.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    assert value["b"] == [joined]

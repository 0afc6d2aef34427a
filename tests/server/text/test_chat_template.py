from __future__ import annotations

from typing import Any

import msgspec
import pytest

from server.errors import InvalidRequestError
from server.schema.intent import Conversation
from server.schema.requests import ChatRequest
from server.text.chat_template import ChatTemplate
from server.text.template_sandbox import TemplateError
from tests.server.conftest import CHATML


def request(*messages: dict[str, Any], **fields: Any) -> Conversation:
    asked = msgspec.convert({"model": "m", "messages": messages, **fields}, ChatRequest)
    asked.check()
    return asked.intent().conversation


def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, bos_token="<s>", eos_token="</s>")


USER = {"role": "user", "content": "Hi"}


def test_the_generation_prompt_can_be_left_out() -> None:
    chatml = template(CHATML)
    assert chatml.render(request(USER)).text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert chatml.render(request(USER, add_generation_prompt=False)).text == "<|im_start|>user\nHi<|im_end|>\n"


def test_continue_final_message_keeps_its_trailing_space() -> None:
    rendered = template(CHATML).render(
        request(USER, {"role": "assistant", "content": "Well, "}, continue_final_message=True)
    )
    assert rendered.text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nWell, "


@pytest.mark.parametrize(("source", "role"), [(CHATML, "system"), (CHATML + "{# developer #}", "developer")])
def test_developer_is_system_unless_the_template_knows_it(source: str, role: str) -> None:
    assert (
        template(source).render(request({"role": "developer", "content": "x"})).text.startswith(f"<|im_start|>{role}\n")
    )


def test_tools_and_their_calls_as_objects() -> None:
    source = (
        "{{ tools | tojson }}|{{ messages[1].tool_calls[0].function.arguments.city }}|{{ messages[2].tool_call_id }}"
    )
    call = {"id": "c1", "type": "function", "function": {"name": "w", "arguments": '{"city": "Köln <b>"}'}}
    rendered = template(source).render(
        request(
            USER,
            {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": "rain"},
            tools=[{"type": "function", "function": {"name": "w", "parameters": {"type": "object"}}}],
        )
    )
    assert rendered.text == (
        '[{"type": "function", "function": {"name": "w", "description": null, "parameters": {"type": "object"}}}]'
        "|Köln <b>|c1"
    )


def test_equal_schemas_are_equal_prompts() -> None:
    """With any order of keys, at any depth. The order of the tools is the client's."""
    one = {"type": "object", "properties": {"b": {"enum": [2, 1], "type": "integer"}, "a": {"type": "string"}}}
    other = {"properties": {"a": {"type": "string"}, "b": {"type": "integer", "enum": [2, 1]}}, "type": "object"}
    source = "{{ tools | tojson }}"

    def written(*schemas: dict[str, object], sorts_schemas: bool) -> str:
        tools = [{"type": "function", "function": {"name": f"w{n}", "parameters": s}} for n, s in enumerate(schemas)]
        found = ChatTemplate(source, bos_token=None, eos_token=None, sorts_schemas=sorts_schemas)
        return found.render(request(USER, tools=tools)).text

    assert written(one, other, sorts_schemas=True) == written(other, one, sorts_schemas=True)
    assert '"enum": [2, 1], "type"' in written(other, sorts_schemas=True)
    assert written(one, sorts_schemas=False) != written(other, sorts_schemas=False)


@pytest.mark.parametrize(
    ("content", "joined"),
    [
        ("{{ m.content }}", "a\nb"),
        ("{{ m.content | trim }}", "a\nb"),
        (
            "{% if m.content is string %}{{ m.content }}{% else %}"
            "{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}",
            "ab",
        ),
        (
            "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}{% if p.type == 'text' %}"
            "{{ p.text + '\\n\\n' }}{% endif %}{% endfor %}{% endif %}",
            "a\n\nb",
        ),
        ("{% if m.content is not string %}{{ raise_exception('text') }}{% endif %}{{ m.content }}", "a\nb"),
        ("{{ m.content if m.content is string else m.content | tojson }}", "a\nb"),
    ],
)
def test_parts_are_joined_as_the_template_does(content: str, joined: str) -> None:
    source = "{% for m in messages %}" + content + "{% endfor %}"
    parts = {"role": "user", "content": [{"type": "text", "text": text} for text in "ab"]}
    assert template(source).render(request(parts)).text == joined


def test_a_bare_tool_has_nulls() -> None:
    """As vLLM renders it."""
    tools = [{"type": "function", "function": {"name": "w"}}]
    text = template("{{ tools | tojson }}").render(request(USER, tools=tools)).text
    assert '{"name": "w", "description": null, "parameters": null}' in text


def test_generation_blocks_and_loop_controls() -> None:
    source = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% break %}{% endfor %}"
    assert template(source).render(request(USER, USER)).text == "Hi"


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[5].content.x }}",
        "{{ 1 / 0 }}",
        "{{ ''.__class__.__mro__ }}",
        "{% set _ = messages.append(1) %}",
        "{% for i in range(10 ** 9) %}x{% endfor %}",
        "{{ 'x' * (17 * 1024 * 1024) }}",
    ],
)
def test_a_template_that_fails_refuses_the_request(source: str) -> None:
    with pytest.raises(InvalidRequestError) as raised:
        template(source).render(request(USER))
    assert raised.value.param == "messages"


def test_a_broken_template_is_refused_by_name() -> None:
    with pytest.raises(TemplateError, match="chat_template"):
        template("{% if %}")


def test_known_switches_pass_and_variables_are_refused() -> None:
    source = "{{ enable_thinking }}{{ reasoning_effort }}"
    assert template(source).render(request(USER, chat_template_kwargs={"enable_thinking": False})).text == "False"
    assert template(source).render(request(USER, reasoning_effort="none")).text == "Falsenone"
    for name in ("messages", "tools", "bos_token", "raise_exception"):
        with pytest.raises(InvalidRequestError) as raised:
            template(source).render(request(USER, chat_template_kwargs={name: 1}))
        assert raised.value.param == "chat_template_kwargs"


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}",
        "{% for i in range(90000) %}{% for j in range(90000) %}x{% endfor %}{% endfor %}",
        "{% macro m(n) %}{% for i in range(90000) %}{{ m(n + 1) }}{% endfor %}{% endmacro %}{{ m(0) }}",
        "{{ 'x' * 1000000000 }}",
        "{{ 1000000000 * [1] }}",
        "{{ 9 ** (9 ** 9) }}",
        "{{ (10 ** 300000) ** 300000 }}",
        "{{ range(10 ** 9) | list }}",
    ],
)
def test_endless_work_is_stopped(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.text.chat_template.RenderClock.__init__.__defaults__", (0.2, float("inf")))
    with pytest.raises(InvalidRequestError, match="template"):
        template(source).render(request(USER))


def test_checked_loops_behave_like_plain_ones() -> None:
    source = (
        "{% for m in messages recursive %}{{ loop.index }}{{ m.content }}{% if loop.last %}!{% endif %}"
        "{% else %}none{% endfor %}{{ 3 * 'ab' }}{{ 2 ** 10 }}"
    )
    assert template(source).render(request(USER, USER)).text == "1Hi2Hi!ababab1024"


@pytest.mark.parametrize(
    "arguments",
    ['{"a":' + "[" * 900 + "]" * 900 + "}", '{"a":[' + "[]," * 30_000 + "[]]}", '{"a":[' + '"<|",' * 30_000 + '""]}'],
)
@pytest.mark.parametrize("old", [True, False])
def test_json_in_arguments_has_the_limits_of_a_body(arguments: str, old: bool) -> None:
    function = {"name": "f", "arguments": arguments}
    calls = (
        {"function_call": function} if old else {"tool_calls": [{"id": "c", "type": "function", "function": function}]}
    )
    asked = request(USER, {"role": "assistant", **calls}, USER)
    with pytest.raises(InvalidRequestError) as refused:
        template("{% for m in messages %}{{ m.role }}{{ m.tool_calls | tojson }}{% endfor %}").render(asked)
    where = "function_call" if old else "tool_calls[0].function"
    assert refused.value.param == f"messages[1].{where}.arguments"

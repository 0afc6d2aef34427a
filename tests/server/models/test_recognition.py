"""The formats that a model has by its template, its tokens or the options."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from server.config import GatewayConfig, parse
from server.models.recognition import formats
from server.models.served_model import ServedModel, build_model
from server.text.chat_template import ChatTemplate
from server.text.formats import FORMATS
from tests.server.api.test_call_forms import BEGIN, CALL, CALL_END, END, FORMS, SEP, template_of, tokenizer_with
from tests.server.conftest import bundle_of, trained_tokenizer

EXECUTOR = ThreadPoolExecutor(1)
CONFIG = GatewayConfig(workers=("http://127.0.0.1:9",))


def model_of(**changes: Any) -> ServedModel:
    return build_model(bundle_of(trained_tokenizer(), **changes), EXECUTOR, CONFIG)


@pytest.mark.parametrize("name", FORMS)
def test_a_template_tells_the_format(name: str, caplog: pytest.LogCaptureFixture) -> None:
    assert model_of(chat_template=FORMS[name][0]).tool_format == FORMATS[name]
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize(
    ("tokens", "tools", "thoughts"),
    [
        (("[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]"), "mistral_v11", "mistral"),
        (("[TOOL_CALLS]",), "mistral", None),
        ((BEGIN, END, SEP, "<think>", "</think>"), "unknown", None),
        (("<|tool_call_start|>", "<|tool_call_end|>"), "unknown", None),
        (("<|tool_call|>", "<|/tool_call|>"), "phi4", None),
        (("<tool_call>", "</tool_call>"), "unknown", None),
    ],
)
def test_tokens_tell_the_format_where_the_template_does_not(
    tokens: tuple[str, ...], tools: str, thoughts: str | None
) -> None:
    """But for the tokens of Qwen's vocabulary, which models with other formats have too."""
    bundle = bundle_of(tokenizer_with(*tokens), chat_template="{{ tools }}")
    model = build_model(bundle, EXECUTOR, CONFIG)
    assert (model.tool_format.name if model.tool_format else "unknown") == tools
    assert (model.thoughts and model.thoughts.name) == thoughts


@pytest.mark.parametrize(
    ("template", "thoughts"),
    [
        ("{{ messages }}", None),
        ("<think>", "think"),
        ("{{ content.split('</think>') }}", "think"),
        ("thoughts between <think></think> and your response between <response></response>", "granite33"),
        ("<think>{{ '<tool_response>' }}", "think"),
        ("Write between <response></response>", None),
        ("[THINK]", "mistral"),
        ("<|START_THINKING|>", None),
        ("Write your thoughts after 'Here is my thought process:'", "granite"),
        ("{{ '<|open|>' + 'think' }}<|sep|>", None),
    ],
)
def test_a_template_tells_the_reasoning(template: str, thoughts: str | None) -> None:
    model = model_of(chat_template=template)
    assert (model.thoughts and model.thoughts.name) == thoughts


HERMES_CALL = '<tool_call>\n{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}\n</tool_call>'


def test_a_template_may_mention_other_families() -> None:
    """The call that it renders shows the format, not the first marker in its text."""
    mentions = "Never write [TOOL_CALLS], <|tool_call|>, <minimax:tool_call> or " + BEGIN + "."
    assert model_of(chat_template=template_of(HERMES_CALL, mentions)).tool_format == FORMATS["hermes"]
    assert model_of(chat_template=template_of(HERMES_CALL, "{# as [TOOL_CALLS] #}")).tool_format == FORMATS["hermes"]


@pytest.mark.parametrize(
    ("call", "name"),
    [
        ('{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}', "llama"),
        ('<|python_tag|>{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}', "llama"),
        ('[{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}]', None),  # xLAM 2
        ("<function={{ f.name }}>{{ f.arguments | tojson }}</function>", None),  # functionary 3.1
        ("{{ f.name }}: {{ f.arguments | tojson }}", None),
    ],
)
def test_a_form_without_markers_is_checked_too(call: str, name: str | None) -> None:
    """A template of Llama's headers may have another family's calls. Their text is content, with all tokens."""
    template = template_of(call, "{# ipython, parameters, <|python_tag|> #}")
    template += "{% if add_generation_prompt %}<|im_start|>{% endif %}"
    found = model_of(chat_template=template).tool_format
    assert (found and found.name) == name


PYTHON_CALL = "{{ f.name }}(city='{{ f.arguments.city }}')"
TAGGED = "<parameter=city>\n{{ f.arguments.city }}\n</parameter>\n"
GLM_CALL = "<arg_key>city</arg_key>{0}<arg_value>{{{{ f.arguments.city }}}}</arg_value>{0}</tool_call>"
LISTED_CALL = '[{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}]'
NAMED = "{{ f.name }}%s{{ f.arguments | tojson }}"
TEMPLATE_CALLS = {
    "deepseek_v3": f"{BEGIN}{CALL}function{SEP}{NAMED}" % f"\n{'```'}json\n" + f"\n```{CALL_END}{END}",
    "glm45": "<tool_call>{{ f.name }}\n" + GLM_CALL.format("\n"),
    "glm47": "<tool_call>{{ f.name }}" + GLM_CALL.format(""),
    "granite3": "<|tool_call|>" + LISTED_CALL,
    "hermes": HERMES_CALL,
    "llama": LISTED_CALL[1:-1].replace('arguments"', 'parameters"'),
    "minimax_m2": '<minimax:tool_call>\n<invoke name="{{ f.name }}">\n<parameter name="city">{{ f.arguments.city }}'
    "</parameter>\n</invoke>\n</minimax:tool_call>",
    "mistral": "[TOOL_CALLS]" + LISTED_CALL,
    "mistral_v11": "[TOOL_CALLS]" + NAMED % "[ARGS]",
    "phi4": f"<|tool_call|>{LISTED_CALL}<|/tool_call|>",
    "phi4_mini": "functools" + LISTED_CALL,
    "pythonic": f"[{PYTHON_CALL}]",
    "qwen3_coder": "<tool_call>\n<function={{ f.name }}>\n" + TAGGED + "</function>\n</tool_call>",
}
"""By format: how a template writes a call."""


@pytest.mark.parametrize("name", FORMS)
@settings(max_examples=20)
@given(
    header=st.sampled_from(["<|assistant|>", "<|im_start|>assistant\n"]),
    special=st.booleans(),
    size=st.integers(0, 12),
    end=st.sampled_from(["think>", "<think>\n", "\n\n", "|", "channel|>"]),
)
def test_the_end_of_the_prompt_hides_no_call(name: str, header: str, special: bool, size: int, end: str) -> None:
    """A prompt that opens thoughts may share characters with a call, as QwQ's `<think>` and `<tool_call>` do."""
    marker = FORMATS[name].opens[0] if FORMATS[name].opens else '{"name"'
    begun = marker[: min(size, len(marker) - 1)] + end
    assume(not TEMPLATE_CALLS[name].startswith(begun))
    marks = FORMS[name][0].translate(dict.fromkeys(map(ord, "{}")))
    source = (
        f"{{{{ tools }}}}{{# {marks} #}}{{% for m in messages %}}{{{{ m.content }}}}"
        f"{{% for call in m.tool_calls %}}{{% set f = call.function %}}{header}{TEMPLATE_CALLS[name]}{{% endfor %}}"
        f"{{% endfor %}}{{% if add_generation_prompt %}}{header}{begun}{{% endif %}}"
    )
    tokens = ["<|assistant|>", *(each for each in FORMATS[name].markers if special)]
    bundle: Any = SimpleNamespace(chat_template=source, tool_template=None)
    tokenizer: Any = SimpleNamespace(added_tokens=dict.fromkeys(tokens, 1))
    template = ChatTemplate(source, bos_token=None, eos_token=None)
    assert formats(bundle, tokenizer, template, CONFIG)[0] == FORMATS[name]


def test_a_template_that_refuses_calls_has_its_marks() -> None:
    template = template_of("{{ raise_exception('no calls') }}", "<tool_call>")
    assert model_of(chat_template=template).tool_format == FORMATS["hermes"]


@pytest.mark.parametrize("line", [["--reasoning", "other"], ["--tool-parser", "other"]])
def test_an_unknown_format_is_refused_by_name(line: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--workers", "http://127.0.0.1:9", *line])
    assert line[0] in capsys.readouterr().err

# ruff: noqa: RUF001 (DeepSeek's markers have a wide bar)
"""The families whose calls stand between markers: one row each, which a reader and a grammar share.

A chat template gets the first row whose marks it contains, so narrower rows come first. Each example is from the row's
model card, its chat template or the engine's documentation.
"""

from __future__ import annotations

from functools import partial
from typing import Final

from server.text.formats.arguments import Tags
from server.text.formats.base import ToolFormat
from server.text.formats.calls import CallForm, Syntax
from server.text.formats.grammar import call_rules

_DEEPSEEK: Final = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_DEEPSEEK_CALL: Final = ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")
_SEP: Final = "<｜tool▁sep｜>"


def _row(name: str, marks: tuple[tuple[str, ...], ...], syntax: Syntax, tokens: tuple[str, ...] = ()) -> ToolFormat:
    """`marks`: groups of texts; a template with all texts of one group uses this row. `tokens`: see `ToolFormat`."""
    tags = () if syntax.tags is None else (*syntax.tags.key, *syntax.tags.value)
    texts = (*syntax.opens, *syntax.closes, *syntax.name_ends, *tags, *syntax.extra)
    return ToolFormat(
        name,
        tuple(dict.fromkeys(text for text in texts if len(text) > 1)),
        lambda template: any(all(mark in template for mark in group) for group in marks),
        syntax.read,
        partial(call_rules, syntax),
        opens=syntax.opens,
        read_calls=syntax.read_calls,
        tokens=tokens,
    )


def _list(opening: str, closing: str, opens: tuple[str, ...] = (), closes: tuple[str, ...] = ()) -> Syntax:
    """<|tool_call|>[{"name": ..., "arguments": {...}}, ...]"""
    form = CallForm((opening, "", closing), is_list=True)
    return Syntax((opening, *opens), (*filter(None, [closing]), *closes), form, "object")


def _mistral(form: CallForm) -> Syntax:
    """[TOOL_CALLS][{"name": ..., "arguments": {...}}] or [TOOL_CALLS]NAME[ARGS]{...}"""
    name = r"([\w.:/-]+)\s*(?:\[CALL_ID\]\s*[A-Za-z0-9]*)?"
    return Syntax(("[TOOL_CALLS]",), (), form, "json", ("[ARGS]", "{"), name, extra=("[CALL_ID]",))


def _glm(line: str) -> Syntax:
    """<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>"""
    return Syntax(
        opens=("<tool_call>",),
        closes=("</tool_call>",),
        form=CallForm(("<tool_call>", line, "</tool_call>"), separator=line),
        name_ends=("<",),
        tags=Tags(("<arg_key>", "</arg_key>"), ("<arg_value>", "</arg_value>"), line=line),
    )


ROWS: Final = (
    _row(
        "deepseek_v3",  # also of the models distilled from R1
        ((_DEEPSEEK[0], "```json"),),
        Syntax(
            opens=(_DEEPSEEK[0], _DEEPSEEK_CALL[0]),
            closes=("```", _DEEPSEEK_CALL[1], _DEEPSEEK[1]),
            form=CallForm(
                (f"{_DEEPSEEK_CALL[0]}function{_SEP}", "\n```json\n", f"\n```{_DEEPSEEK_CALL[1]}"), _DEEPSEEK, "\n"
            ),
            name_ends=("```json",),
            name=rf"(?:[a-z]*{_SEP})?\s*([\w.:/-]+)",
            extra=(_SEP,),
        ),
    ),
    _row("glm47", (("<arg_key>", "}<arg_key>"), ("<arg_key>", "name<arg_key>")), _glm("")),
    _row("glm45", (("<arg_key>",),), _glm("\n")),
    _row(
        "minimax_m2",
        (("<minimax:tool_call>",),),
        Syntax(
            opens=("<minimax:tool_call>", "<invoke name="),
            closes=("</invoke>", "</minimax:tool_call>"),
            form=CallForm(('<invoke name="', '">\n', "</invoke>\n"), ("<minimax:tool_call>\n", "</minimax:tool_call>")),
            name_ends=(">",),
            tags=Tags(('<parameter name="', '">'), ("", "</parameter>"), line="\n"),
        ),
    ),
    _row(
        "qwen3_coder",
        (("<tool_call>", "<function="),),
        Syntax(
            opens=("<tool_call>", "<function="),
            closes=("</function>", "</tool_call>"),
            form=CallForm(("<tool_call>\n<function=", ">\n", "</function>\n</tool_call>"), separator="\n"),
            name_ends=(">",),
            tags=Tags(("<parameter=", ">"), ("", "</parameter>"), trims=True, line="\n"),
        ),
    ),
    _row("phi4_mini", (("functools[",),), _list("functools", "", ("<|tool_call|>",), ("<|/tool_call|>",))),
    _row(
        "phi4",
        (("<|/tool_call|>",), ("<|/tool|>",)),
        _list("<|tool_call|>", "<|/tool_call|>", ("functools",)),
        ("<|tool_call|>", "<|/tool_call|>"),
    ),
    _row("granite3", (("<|tool_call|>",),), _list("<|tool_call|>", "", ("<tool_call>",), ("</tool_call>",))),
    _row(
        "mistral_v11",
        (("[TOOL_CALLS]", "[ARGS]"),),
        _mistral(CallForm(("[TOOL_CALLS]", "[ARGS]", ""))),
        ("[TOOL_CALLS]", "[ARGS]"),
    ),
    _row(
        "mistral", (("[TOOL_CALLS]",),), _mistral(CallForm(("[TOOL_CALLS]", "", ""), is_list=True)), ("[TOOL_CALLS]",)
    ),
    _row(
        "hermes",
        (("<tool_call>",),),
        Syntax(
            opens=("<tool_call>",),
            closes=("</tool_call>",),
            arguments="object",
            form=CallForm(("<tool_call>\n", "", "\n</tool_call>"), separator="\n"),
        ),
    ),
)

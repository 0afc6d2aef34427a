# ruff: noqa: RUF001 (DeepSeek's and StepFun's markers have a wide bar)
"""The families whose calls stand between markers: one row each, which a reader and a grammar share.

The first row whose marks a chat template holds is taken, so that narrow ones come first. Each example is what the row's
model card, chat template or the engine's documentation shows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Final

from server.text.formats.arguments import Tags
from server.text.formats.base import ToolFormat
from server.text.formats.calls import Syntax, Written
from server.text.formats.grammar import call_rules

_DEEPSEEK: Final = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_DEEPSEEK_CALL: Final = ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")
_SEP: Final = "<｜tool▁sep｜>"
_KIMI: Final = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")


@dataclass(frozen=True, slots=True)
class Row:
    name: str
    marks: tuple[tuple[str, ...], ...]
    """Texts in chat templates: all of any group."""
    syntax: Syntax
    tokens: tuple[str, ...] = ()
    """Tokens that only vocabularies of this family have."""

    def format(self) -> ToolFormat:
        syntax = self.syntax
        tags = () if syntax.tags is None else (*syntax.tags.key, *syntax.tags.value)
        texts = (*syntax.opens, *syntax.closes, *syntax.stops, *tags, syntax.quote, *syntax.extra)
        return ToolFormat(
            self.name,
            tuple(dict.fromkeys(text for text in texts if len(text) > 1)),
            self.is_used_by,
            syntax.read,
            partial(call_rules, syntax),
            opens=syntax.opens,
            read_calls=syntax.read_calls,
            tokens=self.tokens,
        )

    def is_used_by(self, template: str) -> bool:
        return any(all(mark in template for mark in group) for group in self.marks)


def _objects(opening: str, closing: str, line: str = "", arguments: str = "arguments") -> Syntax:
    """<tool_call>{"name": ..., "arguments": {...}}</tool_call>"""
    written = Written((opening + line, "", line + closing), separator=line, keys=("name", arguments))
    return Syntax((opening,), (closing,), "object", written)


def _list(opening: str, closing: str, *keys: str, opens: tuple[str, ...] = (), closes: tuple[str, ...] = ()) -> Syntax:
    """<|tool_call|>[{"name": ..., "arguments": {...}}, ...]"""
    written = Written((opening, "", closing), is_list=True, keys=keys or ("name", "arguments"))
    return Syntax((opening, *opens), (*filter(None, [closing]), *closes), "object", written)


def _qwen(opening: str, closing: str, line: str = "\n") -> Syntax:
    """<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>"""
    call = (f"{opening}{line}<function=", f">{line}", f"</function>{line}{closing}")
    return Syntax(
        opens=(opening, "<function="),
        closes=("</function>", closing),
        arguments="tags",
        writes=Written(call, separator=line),
        stops=(">",),
        tags=Tags(("<parameter=", ">"), ("", "</parameter>"), trims=bool(line), line=line),
    )


def _invokes(opening: str, closing: str, prefix: str = "", space: str = "") -> Syntax:
    """<invoke name="NAME"><parameter name="KEY">VALUE</parameter></invoke> in a section. `prefix` is in every tag."""
    invoke, parameter = f"<{prefix}{space}invoke", f"<{prefix}{space}parameter"
    end = f"</{prefix}{space}invoke>"
    return Syntax(
        opens=(opening, f"{invoke} name="),
        closes=(end, closing),
        arguments="tags",
        writes=Written((f'{invoke} name="', '">\n', f"{end}\n"), (f"{opening}\n", closing)),
        stops=(">",),
        tags=Tags(
            (f'{parameter} name="', '">'),
            ("", f"</{prefix}{space}parameter>"),
            line="\n",
            attribute="string" if prefix else "",
        ),
    )


def _dsml(section: str, space: str = "") -> Syntax:
    return _invokes(f"<｜DSML｜{space}{section}>", f"</｜DSML｜{space}{section}>", "｜DSML｜", space=space)


def _glm(line: str) -> Syntax:
    """<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>"""
    return Syntax(
        opens=("<tool_call>",),
        closes=("</tool_call>",),
        arguments="tags",
        writes=Written(("<tool_call>", line, "</tool_call>"), separator=line),
        stops=("<",),
        tags=Tags(("<arg_key>", "</arg_key>"), ("<arg_value>", "</arg_value>"), line=line),
    )


def _gemma(opening: str, closing: str, quote: str) -> Syntax:
    """<|tool_call>call:NAME{KEY:<|"|>VALUE<|"|>,KEY:42}<tool_call|>"""
    written = Written((f"{opening}call:", "", closing))
    return Syntax(
        (opening,), (closing,), "relaxed", written, stops=("{",), name=r"(?:call)?\s*:?\s*([\w.-]+)", quote=quote
    )


def _python(opens: tuple[str, ...], closes: tuple[str, ...], written: Written) -> Syntax:
    """[NAME(KEY="VALUE", KEY=42), NAME()]"""
    return Syntax(opens, closes, "python", written)


ROWS: Final = (
    Row(
        "deepseek_v41",
        (("<｜DSML｜ calls>",), ("｜DSML｜ calls",)),
        _dsml("calls", space=" "),
    ),
    Row("deepseek_v4", (("｜DSML｜tool_calls",), ("dsml_token", "tool_calls>", "DSML")), _dsml("tool_calls")),
    Row("deepseek_v32", (("DSML",),), _dsml("function_calls"), tokens=("｜DSML｜",)),
    Row(
        "deepseek_v3",  # and R1
        ((_DEEPSEEK[0], "```json"),),
        Syntax(
            opens=(_DEEPSEEK[0], _DEEPSEEK_CALL[0]),
            closes=("```", _DEEPSEEK_CALL[1], _DEEPSEEK[1]),
            arguments="json",
            writes=Written(
                (f"{_DEEPSEEK_CALL[0]}function{_SEP}", "\n```json\n", f"\n```{_DEEPSEEK_CALL[1]}"), _DEEPSEEK, "\n"
            ),
            stops=("```json",),
            name=rf"(?:[a-z]*{_SEP})?\s*([\w.:/-]+)",
            extra=(_SEP,),
        ),
    ),
    Row(
        "deepseek_v31",
        ((_DEEPSEEK[0],),),
        Syntax(
            opens=(_DEEPSEEK[0], _DEEPSEEK_CALL[0]),
            closes=(_DEEPSEEK_CALL[1], _DEEPSEEK[1]),
            arguments="json",
            writes=Written((_DEEPSEEK_CALL[0], _SEP, _DEEPSEEK_CALL[1]), _DEEPSEEK),
            stops=(_SEP,),
        ),
        tokens=(*_DEEPSEEK, _SEP),
    ),
    Row(
        "kimi_k2",
        ((_KIMI[0],),),
        Syntax(
            opens=(_KIMI[0], "<|tool_call_begin|>"),
            closes=("<|tool_call_end|>", _KIMI[1]),
            arguments="json",
            writes=Written(
                ("<|tool_call_begin|>functions.", ":0<|tool_call_argument_begin|>", "<|tool_call_end|>"), _KIMI
            ),
            stops=("<|tool_call_argument_begin|>",),
            name=r"(?:functions\.)?([\w./-]+?)(?::[0-9]*)?",
        ),
        tokens=_KIMI,
    ),
    Row(
        "kimi_k3",
        (("<|open|>", "<|sep|>"), ("'<|open|>'",)),
        Syntax(
            opens=("<|open|>tools<|sep|>", "<|open|>call tool="),
            closes=("<|close|>call<|sep|>", "<|close|>tools<|sep|>", "<|close|>message<|sep|>"),
            arguments="tags",
            writes=Written(
                ('<|open|>call tool="', '" index="1"<|sep|>', "<|close|>call<|sep|>"),
                ("<|open|>tools<|sep|>", "<|close|>tools<|sep|>"),
            ),
            stops=("<|sep|>",),
            name=r'"([\w.:/-]+)"(?: index="[0-9]+")?',
            tags=Tags(('<|open|>argument key="', '"<|sep|>'), ("", "<|close|>argument<|sep|>"), attribute="type"),
            extra=("<|open|>", "<|close|>"),
        ),
        tokens=("<|open|>", "<|close|>", "<|sep|>"),
    ),
    Row("glm47", (("<arg_key>", "}<arg_key>"), ("<arg_key>", "name<arg_key>")), _glm("")),
    Row("glm45", (("<arg_key>",),), _glm("\n")),
    Row("minimax_m2", (("<minimax:tool_call>",),), _invokes("<minimax:tool_call>", "</minimax:tool_call>")),
    Row("seed_oss", (("<seed:tool_call>",),), _qwen("<seed:tool_call>", "</seed:tool_call>")),
    Row(
        "mimo", (("<tool_call><function=",), ('<tool_call>" ~ "<function=',)), _qwen("<tool_call>", "</tool_call>", "")
    ),
    Row("qwen3_coder", (("<function=",),), _qwen("<tool_call>", "</tool_call>")),
    Row(
        "step3",
        (("steptml:invoke",),),
        Syntax(
            opens=(
                "<｜tool_calls_begin｜>",
                "<｜tool_call_begin｜>",
                "function<｜tool_sep｜>",
                "<steptml:invoke name=",
            ),
            closes=("</steptml:invoke>", "<｜tool_call_end｜>", "<｜tool_calls_end｜>"),
            arguments="tags",
            writes=Written(
                (
                    '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="',
                    '">',
                    "</steptml:invoke><｜tool_call_end｜>",
                ),
                ("<｜tool_calls_begin｜>", "<｜tool_calls_end｜>"),
            ),
            stops=(">",),
            tags=Tags(('<steptml:parameter name="', '">'), ("", "</steptml:parameter>")),
            extra=("<｜tool_sep｜>",),
        ),
        tokens=("<｜tool_calls_begin｜>", "<｜tool_sep｜>"),
    ),
    Row(
        "gemma4",
        (("<|tool_call>",),),
        _gemma("<|tool_call>", "<tool_call|>", '<|"|>'),
        ("<|tool_call>", "<tool_call|>"),
    ),
    Row(
        "function_gemma",
        (("<start_function_call>",),),
        _gemma("<start_function_call>", "<end_function_call>", "<escape>"),
        ("<start_function_call>", "<end_function_call>"),
    ),
    Row(
        "lfm2",
        (("<|tool_call_start|>",), ("<|tool_list_start|>",)),
        _python(
            ("<|tool_call_start|>",),
            ("<|tool_call_end|>",),
            Written(("", "(", ")"), ("<|tool_call_start|>[", "]<|tool_call_end|>"), ", "),
        ),
        ("<|tool_call_start|>", "<|tool_call_end|>"),
    ),
    Row(
        "olmo3",
        (("<function_calls>",),),
        _python(
            ("<function_calls>",),
            ("</function_calls>",),
            Written(("", "(", ")"), ("<function_calls>\n", "\n</function_calls>"), "\n"),
        ),
    ),
    Row(
        "command_a",
        (("<|START_ACTION|>",),),
        _list("<|START_ACTION|>", "<|END_ACTION|>", "tool_call_id", "tool_name", "parameters"),
        ("<|START_ACTION|>", "<|END_ACTION|>"),
    ),
    Row(
        "apertus",
        (("<|tools_prefix|>",),),
        _list("<|tools_prefix|>", "<|tools_suffix|>", ""),
        ("<|tools_prefix|>", "<|tools_suffix|>"),
    ),
    Row("phi4_mini", (("functools[",),), _list("functools", "", opens=("<|tool_call|>",), closes=("<|/tool_call|>",))),
    Row(
        "phi4",
        (("<|/tool_call|>",), ("<|/tool|>",)),
        _list("<|tool_call|>", "<|/tool_call|>", opens=("functools",)),
        ("<|tool_call|>", "<|/tool_call|>"),
    ),
    Row(
        "granite3", (("<|tool_call|>",),), _list("<|tool_call|>", "", opens=("<tool_call>",), closes=("</tool_call>",))
    ),
    Row("granite_20b", (("<function_call>",),), _objects("<function_call>", "</function_call>")),
    Row("hunyuan", (("<tool_calls>",),), _list("<tool_calls>", "</tool_calls>")),
    Row("nemotron", (("<TOOLCALL>",),), _list("<TOOLCALL>", "</TOOLCALL>")),
    Row(
        "internlm",
        (("<|action_start|>",),),
        _objects("<|action_start|><|plugin|>", "<|action_end|>", arguments="parameters"),
    ),
    Row("longcat", (("<longcat_tool_call>",),), _objects("<longcat_tool_call>", "</longcat_tool_call>", "\n")),
    Row(
        "mistral_v11",
        (("[TOOL_CALLS]", "[ARGS]"),),
        Syntax(
            opens=("[TOOL_CALLS]",),
            closes=(),
            arguments="json",
            writes=Written(("[TOOL_CALLS]", "[ARGS]", "")),
            stops=("[ARGS]", "{"),
            name=r"([\w.:/-]+)\s*(?:\[CALL_ID\]\s*[A-Za-z0-9]*)?",
            extra=("[CALL_ID]",),
        ),
        ("[TOOL_CALLS]", "[ARGS]"),
    ),
    Row(
        "mistral",
        (("[TOOL_CALLS]",),),
        Syntax(
            opens=("[TOOL_CALLS]",),
            closes=(),
            arguments="json",
            writes=Written(("[TOOL_CALLS]", "", ""), is_list=True),
            stops=("[ARGS]", "{"),
            name=r"([\w.:/-]+)\s*(?:\[CALL_ID\]\s*[A-Za-z0-9]*)?",
            extra=("[CALL_ID]",),
        ),
        ("[TOOL_CALLS]",),
    ),
    Row("hermes", (("<tool_call>",),), _objects("<tool_call>", "</tool_call>", "\n")),
)

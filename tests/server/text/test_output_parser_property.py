"""Whatever a model writes, however it is cut: a streamed answer is the whole one, and no character of it is lost."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as RawTokenizer

from server.text.detokenizer import Detokenizer, TextRules, TokenBytes
from server.text.formats import CALL_LIST, FORMATS
from server.text.formats.reasoning import THINK, THOUGHT_FORMATS
from server.text.output_parser import OutputDelta, OutputParser, OutputRules, ReasoningStart

FIRST_WITNESS = 0x4E00
"""Content holds characters that occur once, so that each can be followed."""
WITNESS = "\N{PLACE OF INTEREST SIGN}"
"""Stands for the next of them."""
TOOLS = frozenset({"f", "fly", "flow"})
SCHEMAS = {"f": {"properties": {"a": {"type": "string"}, "b": {"type": ["array", "null"]}}}}
REASONING: tuple[ReasoningStart, ...] = ("none", "maybe", "inside")
RULES = [
    *(
        OutputRules(
            reasoning=reasoning,
            thoughts=THINK if tools is None else THOUGHT_FORMATS.get(tools.name, THINK),
            tools=tools,
            tool_names=TOOLS,
            schemas=SCHEMAS,
        )
        for reasoning in REASONING
        for tools in (*FORMATS.values(), CALL_LIST, None)
    ),
    *(
        OutputRules(reasoning=reasoning, thoughts=thoughts, tools=tools, tool_names=TOOLS, schemas=SCHEMAS)
        for reasoning in REASONING[1:]
        for thoughts in THOUGHT_FORMATS.values()
        for tools in (FORMATS["hermes"], FORMATS["llama"], None)
    ),
    OutputRules(forced="f"),
]

MARKERS = ["<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "<think>", "</think>"]
HEADS = [
    f"<function=f>\n<parameter=a>\n{WITNESS}\n</parameter>\n</function>",
    f'<invoke name="f"><parameter name="a">{WITNESS}</parameter></invoke>',
    f"f\n<arg_key>a</arg_key>\n<arg_value>{WITNESS}</arg_value>",
    'f\n```json\n{"a": 1}\n```',
    f"f(a=\"{WITNESS}\", b=[1, 'x'])",
    f"[f(a={WITNESS}), fly()]",
]
OBJECTS = [
    '{"name": "f", "arguments": {"a": [1, {"b": "x}"}]}}',
    '{"name": "fly", "parameters": {}}',
    '{"arguments": {"a": 1}, "name": "f"}',
    '{"type": "function", "id": "1", "name": "f", "arguments": "{\\"a\\": 1}"}',
    '{"name": "f", "arguments": 5, "note": [{"x": "y"}]}',
    '{"name": "f"}',
    '{"name": "f\\u0041\\"", "arguments": null}',
    '{"answer": 42}',
    f"{{{WITNESS}}}",
    "f{}",
    "fly[ARGS]{}",
    *HEADS,
]
SPACES = [" ", "\n", "\t \n", "  "]
NOISE = [
    "{",
    "}",
    "[",
    "]",
    '"',
    "\\",
    ",",
    ";",
    ":",
    "<",
    "</",
    "[T",
    "<|",
    "<t",
    "1",
    '"name"',
    '"arguments": ',
    "\0",
]


def part_of(text: str, start: int, end: int) -> str:
    return text[start : max(start, len(text) - end)]


WHOLE = st.one_of(
    st.sampled_from(MARKERS),
    st.sampled_from(OBJECTS),
    st.sampled_from(SPACES),
    st.just(WITNESS),
    st.just("a" + WITNESS),
)
BROKEN = st.builds(part_of, st.sampled_from([*MARKERS, *OBJECTS]), st.integers(0, 3), st.integers(0, 30))
CALL = st.tuples(
    st.sampled_from(["<tool_call>", "<tool_call>\n", "[TOOL_CALLS]", "[TOOL_CALLS] [", "<|python_tag|>", "[", ""]),
    st.sampled_from(OBJECTS),
    st.sampled_from(["</tool_call>", "\n</tool_call>", "]", "; ", ", ", "", "<", "\n< ", "</tool\n"]),
).map("".join)
BROKEN_CALL = st.builds(part_of, CALL, st.integers(0, 2), st.integers(0, 30))
NEARLY = st.builds(
    lambda call, at, noise: call[:at] + noise + call[at:], CALL, st.integers(0, 60), st.sampled_from([*NOISE, WITNESS])
)
PIECES = st.lists(st.one_of(CALL, WHOLE, WHOLE, BROKEN, BROKEN_CALL, NEARLY, st.sampled_from(NOISE)), max_size=6)


OPENINGS = {"list": ("[",)}
CLOSINGS = {"list": ("]",)}


def own_texts(rules: OutputRules) -> list[str]:
    """Return the texts of the format itself: those that open, close or mark something."""
    opens = () if rules.tools is None else (*rules.tools.opens, *rules.tools.tokens)
    return sorted({*rules.markers(), *opens})


def own_pieces(rules: OutputRules) -> st.SearchStrategy[list[str]]:
    """Make pieces of the format's own texts, their beginnings and ends, with calls and white space between them."""
    own = st.sampled_from(own_texts(rules) or [""])
    broken = st.builds(part_of, own, st.integers(0, 3), st.integers(0, 12))
    return st.lists(st.one_of(own, own, broken, st.sampled_from(OBJECTS), st.sampled_from(SPACES), WHOLE), max_size=6)


@st.composite
def texts(draw: st.DrawFn, rules: OutputRules) -> str:
    """Make a text that has, every other time, a call of the format itself, closed or nearly."""
    written = "".join(draw(st.one_of(PIECES, own_pieces(rules))))
    if rules.tools is not None and draw(st.booleans()):
        opening = draw(st.sampled_from(OPENINGS.get(rules.tools.name, rules.tools.opens or ("",))))
        closing = draw(st.sampled_from(CLOSINGS.get(rules.tools.name, (*rules.tools.markers, "; "))))
        end = closing[: draw(st.integers(0, len(closing)))]
        call = opening + draw(st.sampled_from(OBJECTS)) + draw(st.sampled_from(["", "\n"])) + end
        written = draw(st.sampled_from(["", "", WITNESS])) + call + draw(st.sampled_from(["", " ", "\n"])) + written
    pieces = written.split(WITNESS)
    return "".join(
        piece + (chr(FIRST_WITNESS + number) if number < len(pieces) - 1 else "") for number, piece in enumerate(pieces)
    )


RULED = st.sampled_from(RULES).flatmap(lambda rules: st.tuples(st.just(rules), texts(rules)))


def merged(deltas: Sequence[OutputDelta]) -> list[tuple[str, str]]:
    """Join neighbours of one kind; each call stays separate."""
    found: list[tuple[str, str]] = []
    for kind, text in deltas:
        if found and kind == found[-1][0] != "call":
            text = found.pop()[1] + text
        found.append((kind, text))
    return found


def parse(rules: OutputRules, parts: Sequence[str], *, ends_later: bool) -> tuple[list[tuple[str, str]], int]:
    """Return what a text gives that arrives in parts, and where its answer starts."""
    parser = OutputParser(rules)
    parts = [*parts, ""] if ends_later else parts
    deltas = [delta for at, part in enumerate(parts, 1) for delta in parser.feed(part, last=at == len(parts))]
    return merged(deltas), parser.answer_start


TOKEN = re.compile(r'\s*(?:([{}\[\],:])|("(?:[^"\\\x00-\x1f]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*")|([^\s{}\[\],:"]+))')
CUT_TOKEN = re.compile(
    r'\s*(?:"(?:[^"\\\x00-\x1f]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*(?:\\(?:u[0-9a-fA-F]{0,3})?)?'
    r"|-?(?:\d+(?:\.\d*)?(?:[eE][+-]?\d*)?)?|t(?:ru?)?|f(?:a(?:ls?)?)?|n(?:ul?)?)?\Z"
)
SCALAR = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?|true|false|null|NaN|-?Infinity")


def json_end(text: str, start: int) -> int:
    """Return where the JSON value ends that begins at `start`; where it stops to be one; or the end of the text."""
    closes: list[str] = []
    expected = "value"
    at = start
    while True:
        if CUT_TOKEN.match(text, at):
            return len(text)
        token = TOKEN.match(text, at)
        if token is None:
            return at
        mark, string, scalar = token.groups()
        if mark in ("{", "[") and expected in ("value", "value or end"):
            closes.append("}" if mark == "{" else "]")
            expected = "key or end" if mark == "{" else "value or end"
        elif mark in ("}", "]"):
            if not closes or closes[-1] != mark or expected not in ("comma", "key or end", "value or end"):
                return at
            closes.pop()
            expected = "comma"
        elif mark == ",":
            if expected != "comma":
                return at
            expected = "key" if closes[-1] == "}" else "value"
        elif mark == ":":
            if expected != "colon":
                return at
            expected = "value"
        elif string is not None and expected in ("key", "key or end"):
            expected = "colon"
        elif expected in ("value", "value or end") and (string is not None or SCALAR.fullmatch(scalar or "")):
            expected = "comma"
        else:
            return at
        at = token.end()
        if not closes:
            return at


def check(rules: OutputRules, text: str, cuts: Sequence[int]) -> None:
    edges = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    parts = [text[start:end] for start, end in pairwise(edges)]
    whole = parse(rules, [text], ends_later=False)
    assert parse(rules, parts, ends_later=True) == whole
    assert parse(rules, parts, ends_later=False) == whole
    assert parse(rules, list(text) or [""], ends_later=False) == whole
    # Nothing is lost or doubled but within what is JSON of a call.
    shown = [char for _, part in whole[0] for char in re.sub(r"\\u(4e..)", lambda m: chr(int(m[1], 16)), part)]
    seen = [char for char in shown if FIRST_WITNESS <= ord(char) < FIRST_WITNESS + 0x100]
    assert len(seen) == len(set(seen))
    within = [(start, json_end(text, start)) for start, char in enumerate(text) if char == "{"]
    for at, char in enumerate(text):
        if FIRST_WITNESS <= ord(char) < FIRST_WITNESS + 0x100 and char not in seen:
            assert any(start <= at < end for start, end in within), f"{char} is lost: {whole[0]}"


CASES = {"ruled": RULED, "cuts": st.lists(st.integers(0, 300), max_size=5)}


@settings(max_examples=1000)
@given(**CASES)
def test_streamed_is_whole_and_nothing_is_lost(ruled: tuple[OutputRules, str], cuts: list[int]) -> None:
    check(*ruled, cuts)


@pytest.mark.deep
@settings(max_examples=30_000)
@given(**CASES)
def test_streamed_is_whole_and_nothing_is_lost_in_many_cases(ruled: tuple[OutputRules, str], cuts: list[int]) -> None:
    check(*ruled, cuts)


def check_orders(repeat: int, *, with_halves: bool) -> None:
    """Check every text of `repeat` of a format's own texts, a call and a word; of the first halves too."""
    for rules in RULES:
        own = own_texts(rules)
        halves = [text[: (len(text) + 1) // 2] for text in own] if with_halves else []
        for order in product(sorted({*own, *halves, OBJECTS[1], "word"}), repeat=repeat):
            check(rules, "".join(order), ())


def test_a_format_reads_its_own_texts_in_every_order() -> None:
    check_orders(2, with_halves=False)


@pytest.mark.deep
def test_a_format_reads_three_of_its_own_texts_in_every_order() -> None:
    check_orders(3, with_halves=True)


def answered(token_bytes: TokenBytes, rules: TextRules, output: OutputRules, parts: Sequence[Sequence[int]]) -> str:
    """Return what the detokenizer and the parser make of ids that arrive in parts."""
    detokenizer, parser = Detokenizer(token_bytes, rules), OutputParser(output)
    deltas = [delta for ids in parts for delta in parser.feed(detokenizer.feed(ids), last=False)]
    return repr((merged([*deltas, *parser.feed(detokenizer.finish(), last=True)]), parser.answer_start))


@settings(max_examples=300, deadline=None)
@given(
    ruled=RULED,
    more=texts(OutputRules()),
    cuts=st.lists(st.integers(0, 300), max_size=5),
    end=st.integers(0, 8),
    stops=st.lists(st.sampled_from(["</tool", "}", "🎉", " x", "</think>"]), max_size=2),
    include_stop=st.booleans(),
)
def test_tokens_however_they_arrive_give_one_answer(
    raw_tokenizer: RawTokenizer,
    ruled: tuple[OutputRules, str],
    more: str,
    cuts: list[int],
    end: int,
    stops: list[str],
    include_stop: bool,
) -> None:
    """With stop strings, and a limit that may fall within a character or a marker."""
    rules, text = ruled
    ids: list[int] = raw_tokenizer.encode(f"{text}é🎉{more}", add_special_tokens=False).ids
    ids = ids[: len(ids) - end]
    token_bytes = TokenBytes(raw_tokenizer, {"decoder": {"type": "ByteLevel"}})
    edges = [0, *sorted(cut % (len(ids) + 1) for cut in cuts), len(ids)]
    text_rules = TextRules(tuple(stops), include_stop)
    whole = answered(token_bytes, text_rules, rules, [ids])
    assert answered(token_bytes, text_rules, rules, [ids[start:stop] for start, stop in pairwise(edges)]) == whole
    assert answered(token_bytes, text_rules, rules, [[id_] for id_ in ids]) == whole

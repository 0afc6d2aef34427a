"""Structured output: whatever is drawn among the allowed tokens follows the grammar, and bad grammars are refused."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest

from tests import smollm2
from tests.waiting import HANG_S
from worker.common.json_schema import MAX_INDENTED_LEVELS
from worker.engine.grammar import GrammarCompiler, GrammarConstraint
from worker.scheduler.request import ConstraintError
from worker.wire import ChoiceState, GenerateRequest, Grammar, SamplingParams, TokenizerBundle

EOS = 2
SCHEMA = {
    "type": "object",
    "properties": {
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "kind": {"enum": ["cat<|im_end|>", "dög"]},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["age", "kind", "tags"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def bundle() -> TokenizerBundle:
    tokenizer = smollm2.tokenizer()
    vocab_size = tokenizer.get_vocab_size() + 7  # models pad their vocabulary
    text = tokenizer.to_str().encode()
    return TokenizerBundle("f", "m", "r", text, None, None, None, (EOS,), False, vocab_size, 4096, 16)


@pytest.fixture
def compiler(bundle: TokenizerBundle) -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(bundle, compile_timeout_s=HANG_S)
    yield compiler
    compiler.close()


def request(grammar: Grammar | None, *outputs: tuple[int, ...]) -> GenerateRequest:
    choices = tuple(ChoiceState(i, i, output) for i, output in enumerate(outputs or ((),)))
    return GenerateRequest("r", "g", "", b"s" * 16, [1], choices, SamplingParams(max_tokens=99, grammar=grammar))


def allowed_ids(constraint: GrammarConstraint, vocab_size: int) -> list[int]:
    words = np.asarray(constraint.allowed())
    assert words.dtype == np.int32
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")
    assert len(bits) >= vocab_size
    assert not bits[vocab_size:].any()
    return np.flatnonzero(bits).tolist()


def walk(constraint: GrammarConstraint, bundle: TokenizerBundle, seed: int) -> tuple[int, ...]:
    """Tokens drawn at random among the allowed, ended as soon as the grammar can end."""
    drawn: list[int] = []
    chooser = random.Random(seed)
    while not constraint.finished:
        ids = allowed_ids(constraint, bundle.vocab_size)
        token_id = EOS if EOS in ids else chooser.choice(ids)
        constraint.advance(token_id)
        drawn.append(token_id)
        assert len(drawn) < 400
    return tuple(token_id for token_id in drawn if token_id != EOS)


@pytest.mark.parametrize("seed", range(4))
async def test_json_of_a_schema(compiler: GrammarCompiler, bundle: TokenizerBundle, seed: int) -> None:
    (constraint,) = (await compiler.constraints(request(Grammar("json_schema", json.dumps(SCHEMA))))).values()
    value = json.loads(smollm2.tokenizer().decode(walk(constraint, bundle, seed)))
    assert set(value) == {"age", "kind", "tags"}
    assert 0 <= value["age"] <= 99
    assert value["kind"] in ("cat<|im_end|>", "dög")
    assert len(value["tags"]) <= 3


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar("json_schema", json.dumps(SCHEMA)),
        Grammar("json_object", ""),
        Grammar("json_schema", json.dumps(SCHEMA), compact=True),
    ],
)
@pytest.mark.parametrize("seed", range(3))
async def test_white_space_is_a_space_or_an_indented_line(
    compiler: GrammarCompiler, bundle: TokenizerBundle, grammar: Grammar, seed: int
) -> None:
    """A model that prefers white space writes at most as much as a printer of JSON."""
    (constraint,) = (await compiler.constraints(request(grammar))).values()
    tokenizer, rng, drawn = smollm2.tokenizer(), random.Random(seed), list[int]()
    white = {id_ for text, id_ in tokenizer.get_vocab().items() if re.fullmatch("[ĠĊĉč]+", text)}
    while not constraint.finished and len(drawn) < 80:
        ids = set(allowed_ids(constraint, bundle.vocab_size))
        if ids == {EOS} or (len(drawn) > 40 and EOS in ids):
            break
        chosen = rng.choice(sorted(ids & white or ids - {EOS}))
        constraint.advance(chosen)
        drawn.append(chosen)
    text = re.sub(r'"(?:[^"\\]|\\.)*("|$)', '""', tokenizer.decode(drawn))
    assert text.startswith("{")
    gaps = re.findall(r"\s+", text)
    if grammar.compact:
        assert gaps == []
    else:
        assert gaps or grammar.kind == "json_object"  # which may write one endless string
        assert all(re.fullmatch(rf" |\n {{0,{2 * MAX_INDENTED_LEVELS}}}", gap) for gap in gaps), gaps


@pytest.mark.parametrize(
    ("grammar", "pattern"),
    [
        (Grammar("regex", r"[a-c]{3}<\|im_end\|>[0-9]{2}"), r"[a-c]{3}<\|im_end\|>[0-9]{2}"),
        (Grammar("choice", '["yes", "no \\"way\\"", "\\u00e9\\n"]'), 'yes|no "way"|é\n'),
        (Grammar("grammar", 'start: "a" | "(" start ")"'), r"\(*a\)*"),
        (Grammar("grammar", 'root ::= "<|im_end|>" [0-9]'), r"<\|im_end\|>[0-9]"),
    ],
)
async def test_other_kinds(compiler: GrammarCompiler, bundle: TokenizerBundle, grammar: Grammar, pattern: str) -> None:
    for seed in range(3):
        (constraint,) = (await compiler.constraints(request(grammar))).values()
        assert re.fullmatch(pattern, smollm2.tokenizer().decode(walk(constraint, bundle, seed)))


async def test_choices_have_states_of_their_own_and_resume(compiler: GrammarCompiler, bundle: TokenizerBundle) -> None:
    grammar = Grammar("regex", "[a-z]{12}")
    (whole,) = (await compiler.constraints(request(grammar))).values()
    output = walk(whole, bundle, 1)
    resumed = await compiler.constraints(request(grammar, (), output[:1], output))
    assert [resumed[i].finished for i in range(3)] == [False, False, True]
    for token_id in output[1:]:
        assert token_id in allowed_ids(resumed[1], bundle.vocab_size)
        resumed[1].advance(token_id)
    assert resumed[1].finished
    assert not resumed[0].finished


async def test_a_costly_factor_in_a_grammar_is_refused(compiler: GrammarCompiler) -> None:
    """The compiler would take all memory, also for one that a client's own grammar holds."""
    for text in ('start: %json {"multipleOf": 536870912}', 'start: a\na: %json\n{"items": {"multipleOf": 1e30}}'):
        with pytest.raises(ConstraintError, match="multipleOf takes at most"):
            await compiler.constraints(request(Grammar("grammar", text)))
    await compiler.constraints(request(Grammar("grammar", 'start: "%json {" %json {"multipleOf": 86400}')))


async def test_a_resumed_output_that_breaks_the_grammar_is_refused(compiler: GrammarCompiler) -> None:
    tokens = tuple(smollm2.tokenizer().encode("123", add_special_tokens=False).ids)
    with pytest.raises(ConstraintError, match="choice 0"):
        await compiler.constraints(request(Grammar("regex", "[a-z]+"), tokens))


async def test_a_panic_at_a_resumed_output_is_an_error(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    class PanicException(BaseException):
        """The library's."""

    def consume_tokens(ids: list[int]) -> bool:
        raise PanicException("index out of bounds")

    async def prototype(grammar: Grammar) -> SimpleNamespace:
        return SimpleNamespace(deep_copy=lambda: SimpleNamespace(consume_tokens=consume_tokens))

    monkeypatch.setattr(compiler, "_prototype", prototype)
    with pytest.raises(ConstraintError, match="index out of bounds"):
        await compiler.constraints(request(Grammar("regex", "[a-z]+"), (1,)))


async def test_a_token_outside_the_grammar_is_an_error(compiler: GrammarCompiler) -> None:
    (constraint,) = (await compiler.constraints(request(Grammar("regex", "[a-z]+")))).values()
    with pytest.raises(ConstraintError):
        constraint.advance(smollm2.tokenizer().encode("7", add_special_tokens=False).ids[0])


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar("regex", "(("),
        Grammar("json_schema", "{]"),
        Grammar("json_schema", "[]"),
        Grammar("json_schema", "[" * 50_000),
        Grammar("json_schema", '{"type": "bogus"}'),
        Grammar("json_schema", '{"$ref": "#/nowhere"}'),
        Grammar("choice", "[]"),
        Grammar("choice", '["a", 1]'),
        Grammar("grammar", "nonsense!!"),
        Grammar("grammar", "start: nowhere"),
        Grammar("regex", "a" * 300_000),
    ],
    ids=lambda grammar: grammar.text[:20],
)
async def test_bad_grammars_are_refused_by_their_kind(compiler: GrammarCompiler, grammar: Grammar) -> None:
    with pytest.raises(ConstraintError, match=grammar.kind) as caught:
        await compiler.constraints(request(grammar))
    assert len(str(caught.value)) < 400
    assert "\n" not in str(caught.value)
    await compiler.constraints(request(Grammar("regex", "fine")))  # the next one is served


async def test_slow_compiling_is_cut_off(bundle: TokenizerBundle) -> None:
    compiler = GrammarCompiler(bundle, compile_timeout_s=0.0)
    with pytest.raises(ConstraintError, match="not compiled within"):
        await compiler.constraints(request(Grammar("regex", "a")))
    compiler.close()


async def test_only_so_many_bytes_are_kept(bundle: TokenizerBundle) -> None:
    compiler = GrammarCompiler(bundle, max_cached_bytes=350_000, compile_timeout_s=HANG_S)
    for i in (0, 1, 2, 0, 3):
        await compiler.constraints(request(Grammar("regex", f"a{{{i + 1}}}")))
    assert [grammar.text for grammar in compiler._compiled] == ["a{3}", "a{1}", "a{4}"]
    await compiler.constraints(request(Grammar("regex", "a|" * 300 + "b")))
    assert len(compiler._compiled) == 1, "a large one takes the place of several"
    compiler.close()


async def test_without_a_grammar_nothing_is_constrained(compiler: GrammarCompiler) -> None:
    assert await compiler.constraints(request(None)) == {}


async def test_an_error_of_a_regex_says_its_reason(compiler: GrammarCompiler) -> None:
    for pattern, reason in (("((", "unclosed group"), ("a{5,2}", "repetition"), ("(?<=a)b", "look-around")):
        with pytest.raises(ConstraintError, match=reason):
            await compiler.constraints(request(Grammar("regex", pattern)))


def chained(num_levels: int) -> str:
    definitions: dict[str, object] = {str(i): {"items": {"$ref": f"#/$defs/{i + 1}"}} for i in range(num_levels)}
    definitions[str(num_levels)] = {"type": "string"}
    return json.dumps({"$ref": "#/$defs/0", "$defs": definitions}, separators=(",", ":"))


async def test_references_in_a_long_row_take_no_stack_of_the_process(compiler: GrammarCompiler) -> None:
    await compiler.constraints(request(Grammar("json_schema", chained(1500))))


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"type": "bogus"}, "at properties.a.items: .*no type"),
        ({"$ref": "#/nowhere"}, "at properties.a.items: the reference #/nowhere points to nothing"),
        ({"type": "string", "minLength": -1}, "at properties.a.items: minLength must be an integer from 0"),
        (
            {"type": "array", "items": {"uniqueItems": True}},
            "a.items.items: .*cannot hold .*uniqueItems",
        ),
        ({"type": "integer", "multipleOf": 2**20}, "multipleOf takes at most 5 digits"),
    ],
)
async def test_a_schema_that_does_not_compile_is_named_by_its_place(
    compiler: GrammarCompiler, schema: dict[str, object], message: str
) -> None:
    whole = {"type": "object", "properties": {"b": {"type": "string"}, "a": {"type": "array", "items": schema}}}
    with pytest.raises(ConstraintError, match=message):
        await compiler.constraints(request(Grammar("json_schema", json.dumps(whole))))

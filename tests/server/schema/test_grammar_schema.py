"""Schemas of pydantic, zod and OpenAPI, and random ones: what a grammar makes of them."""

from __future__ import annotations

import json
import re
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator, FormatChecker
from llguidance import LLMatcher

from server.errors import InvalidRequestError
from server.event_loop import run_now
from server.schema.grammar_schema import GrammarSchema, grammar_schema, relaxed_header
from server.schema.patterns import enforceable_pattern
from tests.schema_language import drawn, dumps, matcher, takes, tokenizer
from worker.engine.grammar import in_words, to_llguidance
from worker.wire import Grammar

SCHEMAS: dict[str, Any] = json.loads((Path(__file__).parents[2] / "data" / "schemas.json").read_text())
REFUSED = {
    **dict.fromkeys(("pydantic_set", "pydantic_frozenset"), "uniqueItems"),
    **dict.fromkeys(("pydantic_length_keys", "pydantic_enum_keys"), "propertyNames"),
    **dict.fromkeys(("pydantic_date_keys", "pydantic_uuid_keys"), "propertyNames"),
    **dict.fromkeys(("zod_enum_record", "zod_partial_record"), "propertyNames"),
    "openapi_conditional": "dependentRequired",
    "zod_emoji": "pattern",
}
"""Those that no grammar holds, with `strict`, and the keyword to blame."""
RELAXED = frozenset({"zod_numbers"})
"""Those with limits of floats, which are named with `strict` too."""
FORMATS = FormatChecker(["date", "email", "ipv4", "ipv6", "uuid"])


def placed(schema: Any, *, strict: bool = False, name: str = "format") -> GrammarSchema:
    return run_now(grammar_schema(schema, "p", strict=strict, name=name).__await__())


def language(held: GrammarSchema) -> Any:
    return matcher(Grammar("json_schema", dumps(held.schema)))


@pytest.mark.parametrize("name", SCHEMAS)
def test_ordinary_types_are_held_or_named(name: str) -> None:
    """A text drawn from the grammar is valid, unless a keyword is named as left to the model."""
    schema = SCHEMAS[name]
    held = placed(schema)
    assert (name in {*REFUSED, *RELAXED}) == bool(held.relaxed)
    start = language(held)
    texts = [text for seed in range(2) if (text := drawn(start, seed)) is not None]
    if name not in REFUSED:
        assert placed(schema, strict=True) == held
        kind = Draft202012Validator if "draft" not in name else None
        for text in texts:
            value = json.loads(text)
            if kind is not None:
                kind(schema, format_checker=FORMATS).validate(value)
    else:
        assert all(f".{REFUSED[name]}" in " ".join(held.relaxed) for _ in held.relaxed)
        with pytest.raises(InvalidRequestError, match=rf"{REFUSED[name]} cannot be enforced") as refused:
            placed(schema, strict=True)
        assert refused.value.param in held.relaxed


NAMES = ("A", "b/c", "d~e", "ü %", "$ref")
REFERENCES = ("#", *(f"#/$defs/{name}" for name in ("A", "b~1c", "d~0e", "%C3%BC%20%25", "$ref")), "#leaf")
LEAVES = st.sampled_from(
    [
        {"type": "integer", "minimum": 0, "maximum": 9},
        {"type": "boolean"},
        {"const": {"$ref": "#/nowhere"}},
        {"enum": ["x", {"$ref": "#"}]},
        {"type": "null", "default": {"$ref": "#/nowhere"}, "examples": [{"$ref": "x"}]},
    ]
)


KEYWORDS: dict[str, st.SearchStrategy[Any]] = {
    "type": st.sampled_from(["string", "integer", "number", "array", "object", "boolean", ["string", "null"]]),
    "minLength": st.integers(0, 2),
    "maxLength": st.integers(2, 4),
    "pattern": st.sampled_from(["^[a-c]+$", "b", "^(?=a)a", r"\bx"]),
    "format": st.sampled_from(["date", "time", "uuid", "ipv4", "email", "weird", "regex"]),
    "minimum": st.sampled_from([0, -1, 1.5, -(10**20)]),
    "exclusiveMinimum": st.sampled_from([0, 1]),
    "exclusiveMaximum": st.sampled_from([0.5, 3, 10**16, 1e300]),
    "multipleOf": st.sampled_from([1, 2, 0.5, 1e-30, 2**30]),
    "minItems": st.integers(0, 2),
    "maxItems": st.integers(2, 3),
    "uniqueItems": st.booleans(),
    "contains": st.sampled_from([{}, {"const": 1}]),
    "minContains": st.integers(0, 2),
    "unevaluatedItems": st.booleans(),
    "minProperties": st.integers(0, 2),
    "maxProperties": st.integers(1, 2),
    "required": st.lists(st.sampled_from("ab"), unique=True, max_size=2),
    "propertyNames": st.sampled_from([{"maxLength": 2}, {"type": "string"}]),
    "patternProperties": st.dictionaries(st.sampled_from(["^a", "b$", "(?!a)"]), st.just({"type": "null"}), max_size=2),
    "dependentRequired": st.sampled_from([{}, {"a": ["b"]}]),
    "dependencies": st.sampled_from([{}, {"a": {"required": ["b"]}}]),
    "unevaluatedProperties": st.booleans(),
    "const": st.sampled_from([1, "a", None, {"a": 1}]),
    "enum": st.lists(st.sampled_from([0, 2**53 + 1, 1.0, "a", "b", None, [1]]), min_size=1, max_size=3),
    "if": st.sampled_from([{"type": "string"}, {"required": ["a"]}]),
    "then": st.just({"maxLength": 1}),
    "else": st.just({"maximum": 1}),
}


def any_schema(node: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Return schemas of all keywords, of which some are nonsense together."""
    holding = {
        "properties": st.dictionaries(st.sampled_from("abc"), node, max_size=2),
        "additionalProperties": st.booleans() | node,
        "items": node,
        "prefixItems": st.lists(node, min_size=1, max_size=2),
        **dict.fromkeys(("anyOf", "oneOf", "allOf"), st.lists(node, min_size=1, max_size=2)),
        "not": node,
        "$ref": st.sampled_from(["#", "#/$defs/x", "#x", "http://e.com/y#/items"]),
    }
    known = KEYWORDS | holding
    names = st.lists(st.sampled_from(sorted(known)), min_size=1, max_size=4, unique=True)
    return names.flatmap(lambda chosen: st.fixed_dictionaries({name: known[name] for name in chosen}))


DEFINITIONS: dict[str, Any] = {
    "x": {"$anchor": "x", "type": ["integer", "null"], "id": "x"},
    "y": {"$id": "http://e.com/y", "items": {"type": "boolean"}},
}
ANY_SCHEMAS = st.recursive(any_schema(st.sampled_from([{}, {"type": "integer"}])), any_schema, max_leaves=4).map(
    lambda schema: schema | {"$defs": DEFINITIONS, "x-guidance": {"lenient": True}}
)


@pytest.mark.parametrize("num", [40, pytest.param(1000, marks=pytest.mark.deep)])
def test_no_keyword_is_lost_silently(num: int) -> None:
    """A text that the grammar takes is valid, but for the keywords that are named."""

    @given(ANY_SCHEMAS)
    @settings(max_examples=num, deadline=None)
    def check(schema: dict[str, Any]) -> None:
        held = placed(schema)
        compiled = LLMatcher(tokenizer(), to_llguidance(Grammar("json_schema", dumps(held.schema))), log_level=0)
        if compiled.is_error():  # refused by name: no value fits it, or it has too many parts
            reason = in_words(compiled.get_error())
            assert "cannot hold" not in reason, (reason, schema)
        elif not held.relaxed:
            for text in filter(None, (drawn(compiled, seed) for seed in range(3))):
                with suppress(RecursionError):  # of a schema that refers to itself without an end
                    Draft202012Validator(schema, format_checker=FORMATS).validate(json.loads(text))

    check()


def test_an_id_of_zod_is_no_base_of_references() -> None:
    schema = {
        "$ref": "#/$defs/User",
        "$defs": {
            "User": {"id": "User", "type": "object", "properties": {"p": {"$ref": "#/$defs/Post"}}},
            "Post": {"id": "Post", "type": "string"},
        },
    }
    start = language(placed(schema))
    assert takes(start, '{"p":"x"}')
    assert not takes(start, '{"p":1}')


def objects(value: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.dictionaries(st.sampled_from(NAMES), value, max_size=2).map(
        lambda properties: {"type": "object", "properties": properties, "additionalProperties": False}
    )


NODES: st.SearchStrategy[Any] = st.recursive(
    LEAVES | st.sampled_from(REFERENCES).map(lambda reference: {"$ref": reference}),
    lambda node: st.one_of(
        objects(node),
        node.map(lambda item: {"type": "array", "items": item, "maxItems": 2}),
        st.lists(node, min_size=1, max_size=2).map(lambda options: {"anyOf": options}),
        node.map(lambda item: {"type": "array", "prefixItems": [item], "items": False}),
    ),
    max_leaves=4,
)


@st.composite
def rooted(draw: st.DrawFn) -> dict[str, Any]:
    """An object with optional properties, so that every circle of references has an end."""
    root = draw(objects(NODES))
    root["$defs"] = {name: draw(objects(NODES)) for name in NAMES} | {"L": {"$anchor": "leaf", "type": "boolean"}}
    if draw(st.booleans()):
        root["$id"] = "https://example.com/tool"
    return root


def check_same_language(schema: dict[str, Any], seeds: range) -> None:
    plain = language(placed(schema))
    other = {"type": "object", "properties": {"A": {"$ref": "#/$defs/A"}}, "$defs": {"A": {"type": "string"}}}
    never = placed(other, name="never").schema
    calls = {
        "type": "array",
        "items": {"anyOf": [{"$ref": "#/$defs/other"}, {"$ref": "#/$defs/tool"}]},
        "$defs": {
            "other": {
                "type": "object",
                "required": ["never"],
                "additionalProperties": False,
                "properties": {"never": never},
            },
            "tool": placed(schema, name="tool").schema,
        },
    }
    inside = matcher(Grammar("json_schema", dumps(calls)))
    for seed in seeds:
        if (text := drawn(plain, seed)) is not None:
            assert takes(inside, f"[{text}]"), text
        if (text := drawn(inside, seed)) is not None:
            for value in json.loads(text):
                assert "never" in value or takes(plain, dumps(value)), value
        for text in ('{"A":0}', '{"A":{"A":"x"}}', '{"b/c":true}', '{"$ref":null}', "{}", '{"x":1}'):
            assert takes(plain, text) == takes(inside, f"[{text}]"), text


@pytest.mark.parametrize(("num", "num_seeds"), [(25, 2), pytest.param(1500, 4, marks=pytest.mark.deep)])
def test_a_schema_has_the_same_language_wherever_it_is_placed(num: int, num_seeds: int) -> None:
    @given(rooted())
    @settings(max_examples=num, deadline=None)
    def check(schema: dict[str, Any]) -> None:
        check_same_language(schema, range(num_seeds))

    check()


PIECES = ("a", "[a-z]", r"\d", "(", ")", "|", "*", "+?", "{2}", "{1,}", "^", "$", r"\b", "(?:", "(?=", "(?<n>", r"\1")
PIECES += ("{", "}", "[", "]", "[^]", "[^^]", "[z-a]", r"\/", r"\p{L}", r"\Z", ".", "é", "[^", "-")


@given(st.lists(st.sampled_from(PIECES), max_size=6).map("".join))
@example("[^]")
@settings(max_examples=150, deadline=None)
def test_a_pattern_that_is_held_compiles(pattern: str) -> None:
    if enforceable_pattern(pattern) is not None:
        matcher(Grammar("json_schema", dumps({"type": "string", "pattern": pattern})))


def test_patterns_written_without_look_ahead_take_the_same_texts() -> None:
    email = r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
    duration = SCHEMAS["zod_iso"]["properties"]["du"]["pattern"]
    number = r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"
    texts = {
        email: ["a@b.de", "a.b@c.de", ".a@b.de", "a..b@c.de", "a'@b.de", "'a@b.de", "a.@b.de", "a@b..de", "a.-@b.de"],
        duration: ["P1W", "P", "PT", "P1Y", "P1YT", "P1Y2D", "PT1H2S", "P1W1D", "PT1.5S", "P1DT2M", "P1M2Y"],
        number: ["1", "-1.5", ".", "+", "-.5", "1.", "", "00.10", "-."],
    }
    for pattern, given_texts in texts.items():
        same = enforceable_pattern(pattern)
        assert same not in (None, pattern)
        for text in given_texts:
            assert bool(re.search(pattern, text)) == bool(re.search(str(same), text)), (pattern, text)


@pytest.mark.parametrize(
    ("schema", "taken", "refused"),
    [
        ({"type": "string", "format": "time"}, "12:00:00Z", "12:00:00z"),
        ({"type": "string", "format": "date-time"}, "2024-02-29T12:00:00+01:00", "2024-02-28t12:00:00Z"),
        ({"type": "string", "format": "date-time", "pattern": "^2"}, "2024-02-29T12:00:00Z", "2023-02-29T12:00:00Z"),
        ({"type": "string", "format": "path"}, "/a b", None),
        ({"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 3}]}, "abcd", None),
        ({"type": "string", "not": {"const": "a"}}, "b", None),
        ({"exclusiveMinimum": 0, "maximum": 0.5}, 0.25, 0),
        ({"allOf": [{"exclusiveMaximum": -1, "exclusiveMinimum": float("nan")}, {"minimum": -1.5}]}, -1.1, -1),
        ({"enum": [{"id": [2**53 + 1]}]}, {"id": [2**53 + 1]}, None),
    ],
)
def test_what_a_value_may_be(schema: dict[str, Any], taken: Any, refused: Any) -> None:
    start = language(placed(schema))
    assert takes(start, dumps(taken))
    assert refused is None or not takes(start, dumps(refused))


def test_a_reference_into_what_is_left_to_the_model_still_holds() -> None:
    schema = {"type": "object", "properties": {"a": {"$ref": "#/not/items"}}, "not": {"items": {"type": "boolean"}}}
    held = placed(schema)
    assert held.relaxed == ("p.not",)
    start = language(held)
    assert takes(start, '{"a":true}')
    assert not takes(start, '{"a":1}')


@pytest.mark.parametrize("reference", ["#/$defs/b", "https://example.com/x", "Pet", "#name", "#/a/0", "http://[x"])
def test_a_reference_to_nothing_is_left_to_the_model(reference: str) -> None:
    schema = {"items": {"$ref": reference, "type": "integer"}, "$defs": {"a": {}}}
    held = placed(schema)
    assert held.relaxed == ("p.items.$ref",)
    assert takes(language(held), "[1]")
    assert not takes(language(held), '["x"]')
    with pytest.raises(InvalidRequestError, match=r"p\.items\.\$ref cannot be enforced"):
        placed(schema, strict=True)


def test_a_reference_into_what_has_no_effect_still_holds() -> None:
    for aside in ({"then": {"type": "boolean"}}, {"minProperties": 0, "not": {"type": "boolean"}}):
        [name] = aside.keys() & {"then", "not"}
        start = language(placed({"type": "object", "properties": {"a": {"$ref": f"#/{name}"}}, **aside}))
        assert takes(start, '{"a":true}')
        assert not takes(start, '{"a":1}')


def test_a_header_names_places_in_one_ascii_line() -> None:
    schema = {"properties": {f"ü\r\n{i}, x": {"uniqueItems": True} for i in range(20)}}
    name, value = relaxed_header(placed(schema).relaxed)
    assert name == b"x-headstart-relaxed"
    assert value.isascii()
    assert b"\n" not in value
    assert value.startswith(b'p.properties["\\u00fc\\r\\n0, x"].uniqueItems, ')
    assert value.endswith(b", and 4 more")


@pytest.mark.parametrize(
    "schema",
    [
        {"oneOf": [{"const": number} for number in range(4000)]},
        {"oneOf": [{"enum": [*range(start, start + 15_000)]} for start in (0, 15_000)]},
        {"properties": {f"p{n}": {} for n in range(20_000)}, "required": [f"p{n}" for n in reversed(range(20_000))]},
        {"oneOf": [{"type": "object", "required": [f"p{n}" for n in range(9_000)], "properties": {"k": {}}}] * 2},
        {"anyOf": [{}] * 100_000},
        {"pattern": "a" * 1_000_000},
    ],
)
def test_no_large_schema_holds_the_event_loop(schema: dict[str, Any]) -> None:
    """In processor time, and far above what a step takes: what is not linear takes minutes."""
    steps, longest_s = grammar_schema(schema, "tools", strict=False).__await__(), 0.0
    done = False
    while not done:
        begun_s = time.thread_time()
        done = next(steps, steps) is steps
        longest_s = max(longest_s, time.thread_time() - begun_s)
    assert longest_s < 10.0


def test_options_that_share_no_value_are_held() -> None:
    for options, is_held in (
        ([{"type": "string"}, {"type": "integer"}], True),
        ([{"type": "number"}, {"type": "integer"}], False),
        ([{"type": ["string", "null"]}, {"type": "null"}], False),
        ([{"const": 1}, {"const": 2}], True),
        ([{"const": 1}, {"const": 1.0}], False),
        ([{"const": True}, {"const": 1}], True),
        ([{"const": 1}, {"type": "string"}], False),
        ([{"type": "string"}, _tagged("a"), _tagged("b")], True),
        ([_tagged("a"), _tagged("a")], False),
        ([_tagged("a"), {"type": "object"}], False),
        ([{"type": 5}, {"type": "string"}], False),
    ):
        assert (
            run_now(grammar_schema({"oneOf": options}, "x", strict=False).__await__()).relaxed
            == ((), ("x.oneOf",))[not is_held]
        )


def _tagged(kind: str) -> dict[str, Any]:
    return {"type": "object", "properties": {"kind": {"const": kind}}, "required": ["kind"]}


def test_the_header_of_relaxed_places_is_short() -> None:
    schema: dict[str, Any] = {}
    for _ in range(40):
        schema = {"properties": {"p" * 60: schema}, "uniqueItems": True}
    places = run_now(grammar_schema(schema, "tools", strict=False).__await__()).relaxed
    name, value = relaxed_header(places)
    assert (name, value.endswith(b"and 24 more"), len(value) < 4096) == (b"x-headstart-relaxed", True, True)

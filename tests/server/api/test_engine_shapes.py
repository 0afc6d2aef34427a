"""Bodies that an engine renders: repaired, they hold all that the client sent, in a shape that needs no repair."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace
from typing import Any, Final

import jinja2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.api.engine.shapes import EFFORT, EngineShapes, _body, _turns
from server.errors import InvalidRequestError
from server.text.shapes import Shapes, repaired
from server.text.template_sandbox import TemplateEnvironment
from tests.json_texts import texts
from tests.server.text.conversations import BODIES, CHAT_PATH, Call, Step, strange
from tests.server.text.scales import SCALES
from tests.server.text.template_families import RULES
from worker.wire import EngineCall, Rendered

chat_body: Final = BODIES[CHAT_PATH]
SHAPES: Final = st.builds(
    Shapes,
    turns=st.sampled_from(["free", "parted", "joined"]),
    fills=st.frozensets(st.sampled_from(["user", "assistant", "system", "tool"])),
    **dict.fromkeys(
        (
            *("counts_tools", "first_user", "first_system", "second_system", "late_system", "developer"),
            *("late_developer", "orphans", "late_results", "answered_results", "missing_results", "short_ids"),
        ),
        st.booleans(),
    ),
)


def fields_of(body: dict[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps(body))


@given(requests=strange(), shapes=SHAPES)
def test_nothing_is_lost(requests: list[list[Step]], shapes: Shapes) -> None:
    for steps in requests[-1:]:
        turns = _turns(fields_of(chat_body(steps, has_tools=True)))
        assert turns is not None
        changed, _ = repaired(shapes, turns, has_tools=True)
        body = _body(changed)
        found = "\n".join(texts(body))
        for step in steps:
            for text in (step.text, step.thoughts, *(call.arguments for call in step.calls)):
                assert text in found or json.dumps(text)[1:-1] in found, (text, body)


@given(requests=strange(), family=st.sampled_from(list(RULES)))
def test_a_repaired_body_needs_no_repair(requests: list[list[Step]], family: str) -> None:
    shapes = Shapes(**RULES[family])
    for steps in requests[-1:]:
        turns = _turns(fields_of(chat_body(steps, has_tools=True)))
        assert turns is not None
        changed, repairs = repaired(shapes, turns, has_tools=True)
        again = _turns(fields_of(_body(changed)))
        assert again is not None
        assert "arguments" in repairs or repaired(shapes, again, has_tools=True)[1] == ()


def test_a_call_is_kept_where_turns_are_joined() -> None:
    steps = [Step("assistant", "a", calls=(Call("call00001"),)), Step("assistant", "b"), Step("user", "c")]
    turns = _turns(fields_of(chat_body(steps, has_tools=True)))
    assert turns is not None
    changed, _ = repaired(Shapes(turns="joined", counts_tools=True), turns, has_tools=True)
    body = _body(changed)
    assert "call00001" in texts(body)
    assert {"a", "b"} <= {*"\n".join(texts(body)).split()}


def test_thoughts_are_joined_under_either_name() -> None:
    given = [{"reasoning": "1"}, {"reasoning_content": "2"}, {"reasoning": "3", "reasoning_content": "no"}]
    messages = [{"role": "assistant", "content": "a", **thoughts} for thoughts in given]
    turns = _turns(fields_of({"messages": messages}))
    assert turns is not None
    (turn,) = repaired(Shapes(turns="joined"), turns, has_tools=False)[0]
    assert (turn["content"], turn["reasoning_content"]) == ("a\n\na\n\na", "1\n2\n3")


@pytest.mark.parametrize(
    "wrong", [{"reasoning_content": 5}, {"own": 5}, {"tool_calls": [{"id": "c", "function": "f"}]}]
)
def test_fields_of_wrong_types_are_left_to_the_engine(wrong: dict[str, Any]) -> None:
    messages = [{"role": "assistant", "content": "a", **wrong}, {"role": "assistant", "content": "b"}]
    turns = _turns(fields_of({"messages": messages}))
    assert turns is not None
    assert repaired(Shapes(turns="joined", lists_arguments=True), turns, has_tools=True)[0]


def test_ids_are_written_into_calls_and_results() -> None:
    steps = [Step("user", "x")]
    for id_ in ("call_0123456789abcdef", "call00001", "toolu_01"):
        steps += [Step("assistant", "y", "z", (Call(id_),)), Step("tool", "w", result_of=id_)]
    turns = _turns(fields_of(chat_body(steps, has_tools=True)))
    assert turns is not None
    changed, repairs = repaired(Shapes(short_ids=True), turns, has_tools=True)
    assert repairs == ("call-ids",)
    body = json.dumps(_body(changed))
    assert not {"call_0123456789abcdef", "toolu_01"} & {*re.findall(r'"([^"]*)"', body)}
    written = re.findall(r'"(?:id|call_id|tool_call_id|tool_use_id)": "([a-zA-Z0-9]{9})"', body)
    assert len(written) == 6
    assert written[::2] == written[1::2], "a result keeps its call"
    assert "call00001" in written


@pytest.mark.parametrize("output", [5, {"a": 1}, ["x"], [5]])
def test_results_of_another_form_are_left_to_the_engine(output: object) -> None:
    body = chat_body([Step("user", "x"), Step("tool", "MARK", result_of="c")], has_tools=True)
    body = json.loads(json.dumps(body).replace('"MARK"', json.dumps(output)))
    assert _turns(fields_of(body)) is None


@pytest.mark.parametrize("needs", [False, True])
async def test_tools_get_the_fields_that_an_engines_template_needs(needs: bool) -> None:
    """The messages, whole tools and those that the engine refuses stay as they are."""
    own: list[dict[str, Any]] = [{"name": "f"}, {"name": "g", "description": "G.", "parameters": {"type": "object"}}]
    tools = [*({"type": "function", "function": each} for each in own), {"type": "web_search"}]
    fields = fields_of(chat_body([Step("user", "x")], has_tools=True) | {"tools": tools})
    template = SimpleNamespace(shapes=Shapes(fills_tools=needs), grants=None)
    model: Any = SimpleNamespace(fingerprint="f", template=template)
    found, repairs = await _shapes(_no_render).repaired(fields, model)
    kept = {field: value for field, value in found.items() if field != "tools"}
    assert kept == {field: value for field, value in fields.items() if field != "tools"}
    if not needs:
        assert (found["tools"], repairs) == (fields["tools"], ())
        return
    assert repairs == ("tool-fields",)
    filled = found["tools"][0]["function"]
    assert (filled["description"], filled["parameters"]) == ("", {"type": "object", "properties": {}})
    assert found["tools"][1:] == tools[1:]


async def test_tools_without_a_system_message_are_repaired() -> None:
    fields = fields_of(chat_body([Step("user", "x")], has_tools=True))
    model: Any = SimpleNamespace(
        fingerprint="f", template=SimpleNamespace(shapes=Shapes(tools_need_system=True), grants=None)
    )
    found, repairs = await _shapes(_no_render).repaired(fields, model)
    assert (repairs, found["messages"][0]["role"]) == (("tools-without-system",), "system")


@pytest.mark.parametrize("adapter", ["", "pirate"])
async def test_probes_leave_the_name_of_the_model_to_the_worker(adapter: str) -> None:
    """Its engine may have another name for it."""
    rendered: list[dict[str, Any]] = []

    async def render(call: EngineCall, model: Any) -> Rendered:
        rendered.append(json.loads(call.body))
        return Rendered(((1,),), (1,))

    tokenizer = SimpleNamespace(is_engine_only=True)
    model = _model(tokenizer=tokenizer, adapter=adapter)
    fields = fields_of({"messages": [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]})
    await _shapes(render).repaired(fields, model)
    assert {body.get("model", "") for body in rendered} == {adapter}


async def test_an_engine_gets_the_nearest_effort() -> None:
    """Its template is not the gateway's. The operator's values are kept."""

    async def render(call: EngineCall, model: Any) -> Rendered:
        body = json.loads(call.body)
        switches = body.get("chat_template_kwargs", {})
        if effort := body.get("reasoning_effort"):
            switches = {"reasoning_effort": effort, "enable_thinking": effort != "none"} | switches
        template = TemplateEnvironment().from_string(SCALES["high max"])
        try:
            text = template.render(messages=body["messages"], add_generation_prompt=True, **switches)
        except jinja2.TemplateError as error:
            raise InvalidRequestError(str(error)) from error
        return Rendered((tuple(map(ord, text)),), (1,))

    async def sent(*, forced: dict[str, Any] | None = None, **fields: Any) -> tuple[dict[str, Any], tuple[str, ...]]:
        model = _model(tokenizer=tokenizer, template_kwargs={"own": 1}, forced_kwargs=forced or {})
        found, repairs, ignored = await _shapes(render).granted(fields_of(fields), None, model)
        assert ignored == ((EFFORT,) if forced else ())
        return found, repairs

    def effort(value: str | None) -> dict[str, Any]:
        return {EFFORT: value}

    tokenizer = SimpleNamespace(is_engine_only=False, decode=lambda ids: "".join(map(chr, ids)))
    on, off = ({"chat_template_kwargs": {"thinking": value}} for value in (True, False))
    assert await sent(**effort("low")) == (effort("high") | on, ("effort",))
    assert await sent(**effort("max")) == (effort("max") | on, ())
    assert await sent(**effort("none")) == (effort(None) | off, ())
    assert await sent(chat_template_kwargs={"enable_thinking": False, "b": 2, "own": 1}) == (
        {"chat_template_kwargs": {"enable_thinking": False, "b": 2, "own": 1, "thinking": False}},
        (),
    )
    assert await sent(forced={"reasoning_effort": "max"}, **effort("high")) == (
        effort(None) | {"chat_template_kwargs": {"thinking": True, "reasoning_effort": "max"}},
        (),
    )
    for fields in ({"chat_template_kwargs": "x"}, effort(7), {"stream": True}):  # type: ignore[arg-type]
        assert await sent(**fields) == (fields_of(fields), ())


def _model(**fields: Any) -> Any:
    switches: dict[str, Any] = {"template_kwargs": {}, "forced_kwargs": {}, "adapter": ""}
    return SimpleNamespace(fingerprint="f", template=None, name="fleet", **switches | fields)


def _shapes(render: Any) -> EngineShapes:
    renderer: Any = SimpleNamespace(digests=lambda model: frozenset(), render=render)
    prompts: Any = SimpleNamespace(shares_template=_shares)
    return EngineShapes(renderer, prompts, is_strict=False)


async def _shares(*_: object) -> bool:
    return True


async def _no_render(*_: object) -> Rendered:
    raise AssertionError("the gateway has the template")

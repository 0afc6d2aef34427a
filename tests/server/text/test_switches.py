"""Wishes about thoughts reach a template as the nearest values that it takes."""

from __future__ import annotations

import itertools
from typing import Any, Final

import pytest

from server.errors import InvalidRequestError
from server.schema.wishes import EFFORTS, TOGGLES
from server.text.chat_template import ChatTemplate
from tests.server.text.scales import SCALES
from tests.server.text.test_chat_template import USER, request, template

NEAREST: Final = {
    "low medium xhigh": "none low low medium xhigh xhigh xhigh",
    "high max": "- high high high high max max",
    "none high": "none high high high high high high",
    "always": "low low low medium xhigh xhigh xhigh",
    "any": "none minimal low medium high xhigh max",
}
"""The effort that each scale is given for each of `EFFORTS`; `-`: none."""
OFF: Final = {"low medium xhigh": "enable_thinking", "high max": "thinking"}


@pytest.mark.parametrize("scale", SCALES)
def test_an_effort_becomes_the_nearest(scale: str) -> None:
    found = template(SCALES[scale])
    for effort, nearest in zip(EFFORTS, NEAREST[scale].split(), strict=True):
        rendered = found.render(request(USER, reasoning_effort=effort))
        given: dict[str, Any] = {} if nearest == "-" else {"reasoning_effort": nearest}
        if effort == "none" and scale in OFF:
            given["chat_template_kwargs"] = {OFF[scale]: False}
        assert rendered.text == found.render(request(USER, **given)).text, effort
        assert rendered.repairs == (("effort",) if nearest not in (effort, "-") else ()), effort


@pytest.mark.parametrize("scale", SCALES)
def test_no_wish_about_thoughts_is_refused(scale: str) -> None:
    """Every pair of a field and a switch is rendered."""
    found = template(SCALES[scale])
    values: list[dict[str, Any]] = [{}, *[{"reasoning_effort": effort} for effort in EFFORTS]]
    values += [{name: value} for name, *both in TOGGLES for value in both]
    for field, switch in itertools.product(values[: len(EFFORTS) + 1], values):
        asked = request(USER, **field, chat_template_kwargs=switch)
        found.render(asked)


def test_thoughts_that_cannot_be_off_are_the_weakest() -> None:
    rendered = template(SCALES["always"]).render(request(USER, chat_template_kwargs={"enable_thinking": False}))
    assert (rendered.repairs, rendered.text[:6]) == (("effort", "thinking"), "Brief.")


def test_an_operator_fixes_a_value() -> None:
    forced = {"reasoning_effort": "low"}
    found = ChatTemplate(SCALES["low medium xhigh"], bos_token=None, eos_token=None, forced=forced)
    for given in ({}, {"reasoning_effort": "xhigh"}, {"chat_template_kwargs": {"reasoning_effort": "medium"}}):
        assert found.render(request(USER, **given)).text.startswith("Effort low.")


def test_an_error_names_the_effort() -> None:
    """With values that no table has, and an operator's that is refused."""
    strict = ChatTemplate(SCALES["high max"], bos_token=None, eos_token=None, is_strict=True)
    with pytest.raises(InvalidRequestError) as refused:
        strict.render(request(USER, reasoning_effort="low"))
    assert refused.value.param == "reasoning_effort"
    with pytest.raises(InvalidRequestError, match="refuses chat_template_kwargs: no effort own") as refused:
        template(SCALES["high max"]).render(request(USER, chat_template_kwargs={"reasoning_effort": "own"}))
    assert refused.value.param == "chat_template_kwargs"
    late = (
        "{{ messages[1].content.upper() if messages | length > 1 else raise_exception('short') }}{{ reasoning_effort }}"
    )
    with pytest.raises(InvalidRequestError, match="these messages: short") as refused:
        template(late).render(request(USER, reasoning_effort="high"))
    assert refused.value.param == "messages"

"""A wish for thoughts is fulfilled or named, whatever its words are."""

from __future__ import annotations

import itertools
from typing import Any, Final

import pytest

from server.errors import InvalidRequestError
from server.schema import wishes
from server.schema.field_table import REFUSED_FIELDS
from server.schema.wishes import EFFORT_NAMES, TOGGLES, Wish
from tests.server.text.scales import SCALES
from tests.server.text.template_families import FAMILIES
from tests.server.text.test_chat_template import USER, request, template
from tests.server.wishes_table import WORDS, efforts, kept

OTHERS: Final = {
    "budget": "{{ messages[0].content }}{{ thinking_budget if thinking_budget is defined }}",
    "mode": "{{ messages[0].content }}{{ '<think>' if thinking_mode != 'disabled' }}",
    "option": "{{ messages[0].content }}{{ '<think>' if thinking_option == 'on' }}",
    "no_think": "{% if reasoning_effort is defined and reasoning_effort not in ['no_think', 'low', 'high'] %}"
    "{{ raise_exception('effort') }}{% endif %}{{ messages[0].content }}{{ reasoning_effort or 'no_think' }}",
    "own effort": "{% if thinking_effort is defined and thinking_effort not in ['low', 'high', 'max'] %}"
    "{{ raise_exception('effort') }}{% endif %}{{ messages[0].content }}{{ thinking_effort or 'max' }}"
    "{{ '</think>' if thinking is defined and not thinking }}",
    "low high": "{% if reasoning_effort is defined and reasoning_effort not in ['low', 'high'] %}"
    "{{ raise_exception('effort') }}{% endif %}{{ messages[0].content }}{{ reasoning_effort or 'low' }}",
    "max for any": "{{ messages[0].content }}{{ reasoning_effort if reasoning_effort in ['low', 'high'] else 'max' }}",
    "only max": "{{ messages[0].content }}{% if reasoning_effort == 'max' %}Most.{% endif %}",
    "high and max": "{{ messages[0].content }}{% if reasoning_effort == 'max' %}Most.{% endif %}"
    "{% if reasoning_effort == 'high' %}More.{% endif %}",
    "none": "{{ messages[0].content }}",
}
EFFORTS: Final = {
    "no_think": "none, low, high",
    "own effort": "none, low, high, max",
    "low high": "low, high",
    "max for any": "low, high, max",
    "only max": "max",
    "high and max": "high, max",
    "none": "none of them",
}
"""Those with a prompt of their own."""
TEMPLATES: Final = {**FAMILIES, **SCALES, **OTHERS}


@pytest.mark.parametrize("name", TEMPLATES)
def test_no_wish_is_taken_in_silence(name: str) -> None:
    """A prompt without thoughts differs from one with them, or both fields are named."""
    found = template(TEMPLATES[name])
    outcomes = {word: kept(found, word) for word in WORDS}
    assert "SILENT" not in outcomes.values(), outcomes


@pytest.mark.parametrize("name", ["low medium xhigh", "high max", "none high", "budget", "mode", "option", "no_think"])
def test_every_word_turns_the_switch_that_a_template_has(name: str) -> None:
    found = template(TEMPLATES[name])
    assert {kept(found, word) for word in WORDS} <= {"yes", "nearest"}


@pytest.mark.parametrize("name", EFFORTS)
def test_the_efforts_that_a_template_reads_are_found(name: str) -> None:
    assert efforts(template(OTHERS[name])) == EFFORTS[name]


def test_a_budget_is_given_or_named() -> None:
    asked = request(USER, thinking={"type": "enabled", "budget_tokens": 700})
    assert template(OTHERS["budget"]).render(asked).text == "Hi700"
    assert template(SCALES["high max"]).render(asked).ignored == ("thinking.budget_tokens",)


def test_names_without_effect_are_named() -> None:
    asked = request(
        USER,
        chat_template_kwargs={"enable_thinking": False, "own": 1, "thinks": 2},
        thinking={"type": "enabled", "keep": "all"},
        reasoning={"exclude": True},
    )
    rendered = template("{{ own }}{{ '<think>' if thinking }}").render(asked)
    assert rendered.text == "1"
    assert rendered.ignored == ("thinking.keep", "reasoning.exclude", "chat_template_kwargs.thinks")


@pytest.mark.parametrize(
    ("fields", "wish"),
    [
        ({"thinking": {"type": "adaptive"}}, Wish()),
        ({"thinking": {"type": "disabled", "budget_tokens": 9}}, Wish(thinks=False, budget=9)),
        ({"think": "low", "reasoning_effort": "high"}, Wish("high")),
        ({"enable_thinking": True, "chat_template_kwargs": {"thinking_mode": "disabled"}}, Wish(thinks=False)),
        ({"thinking_budget": -1}, Wish(thinks=True)),
        ({"reasoning": {"max_tokens": 5, "effort": "low"}}, Wish("low", thinks=True, budget=5)),
        ({"extra_body": {"google": {"thinking_config": {"thinking_budget": 0}}}}, Wish(thinks=False)),
        ({"extra_body": {"chat_template_kwargs": {"thinking": "false"}, "think": "low"}}, Wish("low", thinks=False)),
        ({"extra_body": {"other": 1}, "google": "x", "chat_template_kwargs": {"thinking": "x"}}, Wish()),
    ],
)
def test_the_first_of_two_wishes_counts(fields: dict[str, Any], wish: Wish) -> None:
    assert request(USER, **fields).wishes.wish == wish


@pytest.mark.parametrize("name", TEMPLATES)
def test_no_pair_of_switches_is_refused(name: str) -> None:
    """A value that the template refuses stays away from it, whatever stands next to it."""
    compiled = template(TEMPLATES[name])
    for effort, (toggle, *values) in itertools.product(wishes.EFFORTS, TOGGLES):
        for value in values:
            compiled.render(request(USER, chat_template_kwargs={"reasoning_effort": effort, toggle: value}))


@pytest.mark.parametrize("name", dict.fromkeys([*[row[0] for row in TOGGLES], *EFFORT_NAMES, "disable_reasoning"]))
def test_no_name_of_a_switch_is_dropped_in_silence(name: str) -> None:
    """A chat's field with such a name is a word for a wish, or refused."""
    assert name in wishes.WORDS or name in REFUSED_FIELDS["/v1/chat/completions"]


@pytest.mark.parametrize("fields", [{"think": "loud"}, {"thinking": [1]}, {"reasoning": {"effort": 0.5}}])
def test_a_word_of_another_form_is_refused_by_name(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match="takes true, false, an effort") as refused:
        request(USER, **fields)
    assert (refused.value.param or "").startswith(next(iter(fields)))

"""The texts between which model families write their reasoning."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class ThoughtFormat:
    """How a family of models writes its reasoning, at the beginning of an answer."""

    name: str
    starts: tuple[str, ...]
    """Each may begin it. A prompt that ends with one has begun it."""
    ends: tuple[str, ...]
    answer: tuple[str, ...] = ()
    """The texts around the answer that follows, which are no part of it."""
    is_special: bool = False
    """Its texts are tokens that only vocabularies of this family have."""

    @property
    def markers(self) -> tuple[str, ...]:
        return (*self.starts, *self.ends, *self.answer)

    def is_mentioned_in(self, template: str) -> bool:
        """Return whether a chat template has one of the texts, or all of them where some are another format's."""
        return (all if self.answer else any)(text in template for text in self.markers)

    def is_begun_by(self, prompt: str) -> bool:
        """Return whether the reasoning is open at the end of a prompt."""
        return prompt.rstrip().endswith(self.starts)


def _granite(verb: str) -> tuple[str, ...]:
    return tuple(f"{here} my {verb}:" for here in ("Here is", "Here's"))


THINK: Final = ThoughtFormat("think", ("<think>",), ("</think>",))
_ALL: Final = (
    ThoughtFormat("mistral", ("[THINK]",), ("[/THINK]",), is_special=True),
    ThoughtFormat("granite33", THINK.starts, THINK.ends, answer=("<response>", "</response>")),
    ThoughtFormat("granite", _granite("thought process"), _granite("response")),
    THINK,
)
"""The first that a template mentions is taken."""
THOUGHT_FORMATS: Final = {each.name: each for each in sorted(_ALL, key=lambda each: each.name)}


def thoughts_of(template: str, tokens: Collection[str]) -> ThoughtFormat | None:
    """Return the format that a chat template mentions, or that a vocabulary has tokens for."""
    mentioned = [each for each in _ALL if each.is_mentioned_in(template)]
    special = [each for each in _ALL if each.is_special and {*each.starts, *each.ends} <= set(tokens)]
    return next(iter(mentioned or special), None)

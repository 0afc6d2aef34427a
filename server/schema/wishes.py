"""The words by which clients wish for thoughts: on or off, an effort, a budget of tokens.

Anthropic, DeepSeek, GLM, Kimi   thinking: {"type": "disabled"}
DashScope, Qwen                  enable_thinking: false; thinking_budget: 0
Gemini's OpenAI form             extra_body: {"google": {"thinking_config": {"thinking_budget": 0}}}
llama.cpp                        reasoning_budget: 0, and other names
Ollama                           think: false, or an effort
OpenAI, vLLM, SGLang             reasoning_effort: "none"; chat_template_kwargs with a template's own names
OpenRouter                       reasoning: {"enabled": false}, with an effort or a budget
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from server.schema.decoding import invalid

EFFORTS: Final = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
"""From the weakest."""
TOGGLES: Final[tuple[tuple[str, Any, Any], ...]] = (
    *((name, True, False) for name in ("enable_thinking", "thinking", "enable_reasoning", "reasoning")),
    *(("thinking_mode", on, off) for on, off in (("enabled", "disabled"), ("thinking", "chat"), ("on", "off"))),
    ("thinking_option", "on", "off"),
    ("thinking_budget", -1, 0),
)
"""A switch of templates, and its values for on and off."""
EFFORT_NAMES: Final = ("reasoning_effort", "thinking_effort", "reasoning_strength")
BUDGET_NAMES: Final = ("thinking_budget", "thinking_token_budget", "reasoning_budget")
WORDS: Final = (
    *("reasoning_effort", "thinking", "enable_thinking", "think", "reasoning", "thinking_budget"),
    *("thinking_token_budget", "thinking_budget_tokens", "reasoning_budget", "reasoning_budget_tokens"),
    *("google", "extra_body"),
)
"""Fields of a chat."""
_TYPES: Final[dict[str, bool | None]] = {
    **dict.fromkeys(("enabled", "on"), True),
    **dict.fromkeys(("disabled", "off"), False),
    **dict.fromkeys(("adaptive", "auto", "between_tools"), None),
}
"""None: the template decides."""
_BOOLEANS: Final[Mapping[str, Any]] = {"true": True, "false": False, "True": True, "False": False}
_PARTS: Final = ("type", "enabled", "effort", "thinking_level", "budget_tokens", "max_tokens", "thinking_budget")
"""The keys of an object that hold a wish."""


class Wish(NamedTuple):
    """A client's wish; None: it has none."""

    effort: str | None = None
    thinks: bool | None = None
    budget: int | None = None
    """The most tokens of thoughts."""

    @property
    def turns(self) -> bool | None:
        """Return whether it turns thoughts on or off."""
        return self.effort != "none" if self.thinks is None and self.effort is not None else self.thinks


class Wishes:
    """The wishes of a request, with the fields that hold them. Of two for the same, the first one counts."""

    def __init__(self, switches: Mapping[str, Any] | None = None) -> None:
        """`switches`: those of a template."""
        self._values: dict[str, Any] = {}
        self.fields: dict[str, str] = {}
        """By the parts of a `Wish`."""
        self.switches: set[str] = set()
        """Those of a template's switches that hold a wish."""
        self.unread: list[str] = []
        """Fields that hold something else, which no template reads."""
        self.add_switches(switches or {})

    @property
    def wish(self) -> Wish:
        return Wish(**self._values)

    def add(self, value: Any, field: str) -> None:
        """Add the wish of a value, whatever its form. Raises InvalidRequestError."""
        if isinstance(value, bool):
            self._set("thinks", value, field)
        elif isinstance(value, int):
            self._set("thinks", value != 0, field)
            self._set("budget", value if value > 0 else None, field)
        elif isinstance(value, str) and value in EFFORTS:
            self._set("effort", value, field)
        elif isinstance(value, str) and value in _TYPES:
            self._set("thinks", _TYPES[value], field)
        elif isinstance(value, Mapping):
            for part in (*_PARTS, *[key for key in value if key not in _PARTS]):
                if part in _PARTS and value.get(part) is not None:
                    self.add(value[part], f"{field}.{part}")
                elif part not in _PARTS and value[part]:
                    self.unread.append(f"{field}.{part}")
        else:
            raise invalid(field, "takes true, false, an effort, a number of tokens, or an object with one of them")

    def add_switches(self, switches: Mapping[str, Any], place: str = "") -> None:
        """Add the wishes in the switches of a template."""
        for name, given in switches.items():
            field = f"{place}chat_template_kwargs.{name}"
            value = _BOOLEANS.get(given, given) if isinstance(given, str) else given
            is_number = isinstance(value, int) and not isinstance(value, bool)
            toggles = [value == on for toggle, on, off in TOGGLES if toggle == name and value in (on, off)]
            if (name in EFFORT_NAMES and value in EFFORTS) or (name in BUDGET_NAMES and is_number):
                self.add(value, field)
            elif toggles:
                self._set("thinks", toggles[0], field)
            else:
                self.unread += [field] if place else []
                continue
            self.switches.add(name)

    def add_words(self, fields: Mapping[str, Any], place: str = "") -> None:
        """Add the wishes in words of a chat's body, also in an `extra_body`, which SDKs do not send as such.

        Raises InvalidRequestError.
        """
        for name in WORDS:
            value, path = fields.get(name), place + name
            if name == "google":
                value = value.get("thinking_config") if isinstance(value, Mapping) else None
                path = f"{path}.thinking_config"
            if name == "extra_body" and isinstance(value, Mapping) and not place:
                self.add_words(value, "extra_body.")
                if isinstance(switches := value.get("chat_template_kwargs"), Mapping):
                    self.add_switches(switches, "extra_body.")
            elif value is not None and name != "extra_body":
                self.add(value, path)

    def _set(self, part: str, value: Any, field: str) -> None:
        if value is not None and part not in self._values:
            self._values[part], self.fields[part] = value, field

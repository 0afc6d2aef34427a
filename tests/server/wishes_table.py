"""Each word by which clients wish for thoughts, over chat templates: a table of docs/api/thoughts.md.

python -m tests.server.wishes_table FOLDER    (files NAME.jinja)
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from server.schema.wishes import EFFORTS
from server.text.chat_template import ChatTemplate
from tests.server.text.test_chat_template import USER, request

Body = dict[str, Any]


def _kwargs(name: str, off: Any, on: Any) -> tuple[Body, Body]:
    return {"chat_template_kwargs": {name: off}}, {"chat_template_kwargs": {name: on}}


WORDS: Final[Mapping[str, tuple[Body, Body]]] = {
    "Anthropic": ({"thinking": {"type": "disabled"}}, {"thinking": {"type": "enabled", "budget_tokens": 2048}}),
    "OpenAI": ({"reasoning_effort": "none"}, {"reasoning_effort": "high"}),
    "DeepSeek, Kimi, GLM": ({"thinking": {"type": "disabled"}}, {"thinking": {"type": "enabled"}}),
    "DashScope": ({"enable_thinking": False}, {"enable_thinking": True}),
    "DashScope's budget": ({"thinking_budget": 0}, {"thinking_budget": 512}),
    "Ollama": ({"think": False}, {"think": True}),
    "Ollama's effort": ({"think": False}, {"think": "high"}),
    "OpenRouter": ({"reasoning": {"enabled": False}}, {"reasoning": {"effort": "high"}}),
    "Gemini": (
        {"extra_body": {"google": {"thinking_config": {"thinking_budget": 0}}}},
        {"google": {"thinking_config": {"thinking_level": "high", "include_thoughts": True}}},
    ),
    "SDKs' argument as a field": (
        {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}},
        {"extra_body": {"thinking": {"type": "enabled"}}},
    ),
    "vLLM's budget": ({"thinking_token_budget": 0}, {"thinking_token_budget": 512}),
    "llama.cpp": ({"reasoning_budget": 0}, {"reasoning_budget": -1}),
    "Qwen's switch": _kwargs("enable_thinking", off=False, on=True),
    "a switch as a text": _kwargs("enable_thinking", off="false", on="true"),
    "DeepSeek's switch": _kwargs("thinking", off=False, on=True),
    "Kimi's switch": _kwargs("thinking_effort", off="none", on="max"),
    "Seed's switch": _kwargs("thinking_budget", off=0, on=512),
    "Ling's switch": _kwargs("thinking_option", off="off", on="on"),
}
"""Fields of a chat that wish for no thoughts, and for thoughts."""


def outcome(template: ChatTemplate, body: Body) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
    """Return a prompt, the repairs, and the fields without effect."""
    rendered = template.render(request(USER, **body))
    return rendered.text, rendered.repairs, rendered.ignored


def kept(template: ChatTemplate, word: str) -> str:
    """Return what a template makes of a word: `yes`, `nearest`, `named`, or `SILENT`."""
    off, on = (outcome(template, body) for body in WORDS[word])
    if off[0] != on[0]:
        return "nearest" if off[1] or on[1] else "yes"
    return "named" if off[1] + off[2] and on[1] + on[2] else "SILENT"


def efforts(template: ChatTemplate) -> str:
    """Return the efforts with a prompt of their own."""
    found = {effort: outcome(template, {"reasoning_effort": effort}) for effort in EFFORTS}
    own = [effort for effort, (_, repairs, ignored) in found.items() if not repairs and not ignored]
    return ", ".join(own) or "none of them"


def main(folder: Path) -> None:
    print("| template | efforts with a prompt of their own | words for on and off | by the nearest |")
    print("| --- | --- | --- | --- |")
    files = sorted(folder.glob("*.jinja"), key=lambda file: file.stem.lower())
    num_silent, unable = 0, list[str]()
    for file in files:
        template = ChatTemplate(file.read_text(), bos_token="<s>", eos_token="</s>")
        found = [kept(template, word) for word in WORDS] if template.grants.by_wish else []
        num_silent += found.count("SILENT")
        if "yes" in found or "nearest" in found:
            print(f"| {file.stem} | {efforts(template)} | {found.count('yes')} | {found.count('nearest')} |")
        else:
            unable.append(file.stem)
    print(f"\nNo switch: {', '.join(unable)}.\n")
    print(f"{len(WORDS)} words over {len(files)} templates: {num_silent} silent.")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""The grammar of a streamed answer, checked on the raw bytes.

stream := event* "data: [DONE]\n\n"          event := "data: " JSON "\n\n" | ": " text "\n\n"
"""

from __future__ import annotations

import json
import re
from typing import Any


class GrammarError(AssertionError):
    pass


def events(raw: bytes) -> list[Any]:
    """The JSON of every data event, "[DONE]" included as that string; comments before an event are left out.

    An empty line after a comment is an event without data to some readers.
    """
    if not raw.endswith(b"\n\n"):
        raise GrammarError(f"the stream ends within an event: {raw[-80:]!r}")
    if b"\r" in raw or raw.startswith(b"\xef\xbb\xbf"):
        raise GrammarError("carriage returns and byte order marks have no place here")
    found: list[Any] = []
    for lines in raw.decode("utf-8")[:-2].split("\n\n"):
        block = re.sub(r"\A(: .*\n)+", "", lines)
        if not block.startswith("data: ") or "\n" in block:
            raise GrammarError(f"not an event: {block!r}")
        payload = block.removeprefix("data: ")
        found.append(payload if payload == "[DONE]" else json.loads(payload))
    return found


def check_chat(raw: bytes, *, num_choices: int = 1, include_usage: bool = False, by_engine: bool = False) -> list[str]:
    """A whole chat stream; the text of every choice. `by_engine`: vLLM wrote the chunks.

    It writes no null before the usage, and the last text may be in the finish chunk.
    """
    *chunks, last = events(raw)
    _require(last == "[DONE]", "the last event is [DONE]")
    texts = [""] * num_choices
    state = ["new"] * num_choices
    usage = chunks.pop() if include_usage else None
    for chunk in chunks:
        _check_head(chunk, chunks[0], "chat.completion.chunk", include_usage and not by_engine)
        _require(len(chunk["choices"]) == 1, "one choice a chunk")
        choice = chunk["choices"][0]
        _require({"index", "delta", "logprobs", "finish_reason"} <= set(choice), "the keys of a choice")
        _require(choice["index"] >= 0, "the number of a choice")
        index, delta = choice["index"], choice["delta"]
        if state[index] == "new":
            _require(delta in ({"role": "assistant", "content": empty} for empty in ("", None)), "first comes the role")
            _require(choice["finish_reason"] is None, "a role chunk does not finish")
            state[index] = "open"
            continue
        _require(state[index] == "open", "nothing follows the finish chunk")
        _require("role" not in delta, "one role chunk a choice")
        if choice["finish_reason"] is not None:
            _require(delta == {} or by_engine, "the finish chunk's delta is empty")
            _require(choice["finish_reason"] in ("stop", "length", "tool_calls", "content_filter"), "finish_reason")
            state[index] = "finished"
        texts[index] += delta.get("content") or ""
    _require(state == ["finished"] * num_choices, "every choice finishes")
    if usage is not None:
        _check_usage(usage, chunks[0])
    return texts


def check_completion(
    raw: bytes, *, num_choices: int = 1, include_usage: bool = False, by_engine: bool = False
) -> list[str]:
    """A whole completion stream; the text of every choice. `by_engine`: see `check_chat`."""
    *chunks, last = events(raw)
    _require(last == "[DONE]", "the last event is [DONE]")
    texts = [""] * num_choices
    finished = [False] * num_choices
    usage = chunks.pop() if include_usage else None
    for chunk in chunks:
        _check_head(chunk, chunks[0], "text_completion", include_usage and not by_engine)
        (choice,) = chunk["choices"]
        _require({"index", "text", "logprobs", "finish_reason"} <= set(choice), "the keys of a choice")
        _require(choice["index"] >= 0, "the number of a choice")
        _require(not finished[choice["index"]], "nothing follows the finish chunk")
        texts[choice["index"]] += choice["text"]
        finished[choice["index"]] = choice["finish_reason"] is not None
    _require(all(finished), "every choice finishes")
    if usage is not None:
        _check_usage(usage, chunks[0])
    return texts


def _check_head(chunk: dict[str, Any], first: dict[str, Any], kind: str, has_usage: bool) -> None:
    _require(chunk["object"] == kind, "object")
    for key in ("id", "created", "model"):
        _require(chunk[key] == first[key], f"the same {key} on all chunks")
    _require(("usage" in chunk) == has_usage, "usage: null on all chunks with include_usage, else on none")
    if has_usage:
        _require(chunk["usage"] is None, "usage is null before the usage chunk")


def _check_usage(chunk: dict[str, Any], first: dict[str, Any]) -> None:
    _require(chunk["choices"] == [], "the usage chunk has no choices")
    _require(chunk["id"] == first["id"], "the same id")
    usage = chunk["usage"]
    _require(usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"], "the sum of tokens")
    _require(usage["prompt_tokens_details"]["cached_tokens"] <= usage["prompt_tokens"], "cached tokens")


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise GrammarError(what)

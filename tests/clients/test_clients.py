"""Clients that others wrote, against a running `headstart serve`; each is a program of its own environment."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import pytest

from tests.clients.running import INSTALLED, OPENAI2, PROGRAMS, converse, converse_python
from tests.e2e.serving import SMALL_POOL, Serve
from tests.tiny_model import write_tiny_model

MODULES: Final = str(INSTALLED / "node_modules")


def check_city(city: dict[str, Any]) -> None:
    assert set(city) == {"name", "is_capital"}
    assert isinstance(city["is_capital"], bool)


def check_turns(answer: dict[str, Any], *same: str, cached: bool = True) -> None:
    """Check two turns: the first answer, the `same` one by other ways, and the second, whose beginning is cached."""
    assert "Paris" in answer["first"]
    for way in ("streamed", *same):
        assert answer[way] == answer["first"], way
    assert answer["second"]
    assert not cached or answer["cached"] > 0


def test_javascript(smollm2: Serve) -> None:
    answer = converse(smollm2, "node", str(PROGRAMS / "javascript.cjs"), NODE_PATH=MODULES)
    assert "Paris" in answer["streamed"]
    assert answer["streamed"] == answer["whole"]
    assert answer["usage"]["completion_tokens"] > 0
    assert answer["second"]
    assert answer["response"]
    assert answer["refused"]


def test_ai_sdk(smollm2: Serve) -> None:
    answer = converse(smollm2, "node", str(PROGRAMS / "ai_sdk.cjs"), NODE_PATH=MODULES)
    check_turns(answer, "response")
    assert answer["usage"]["outputTokens"] > 0
    check_city(answer["city"])
    assert answer["calls"], "it called the tool"
    assert answer["after"]


def test_langchain(smollm2: Serve) -> None:
    answer = converse_python(smollm2, "langchain_chat.py")
    check_turns(answer)
    assert answer["streamed_usage"]["output_tokens"] > 0
    check_city(answer["city"])
    assert set(answer["calls"]) == {"City"}


def test_litellm(smollm2: Serve) -> None:
    answer = converse_python(smollm2, "litellm_chat.py", OPENAI2)
    check_turns(answer)
    assert "top_logprobs" in answer["refused"]
    assert "maximum context length" in answer["too_long"]


def test_anthropic(smollm2: Serve) -> None:
    answer = converse_python(smollm2, "anthropic_messages.py")
    check_turns(answer, "streamed_async")
    assert answer["streamed_output"] > 0
    assert answer["stop_reason"] == "end_turn"
    assert answer["stop_sequence"] == "Paris"
    assert answer["counted"] == answer["input"]
    assert answer["events"] == ["message_start", "content_block_start"], "the SDK drops pings"
    check_city(answer["city"])
    tools = answer["tools"]
    assert tools["input"] == tools["streamed"]
    assert set(tools["input"]) == {"name"}
    assert tools["stop_reason"] == "tool_use"
    assert "input_json" in tools["kinds"]
    assert tools["answer"]
    assert (answer["no_model"]["class"], answer["no_model"]["type"]) == ("NotFoundError", "not_found_error")
    assert (answer["wrong"]["class"], answer["too_long"]["class"]) == ("BadRequestError", "BadRequestError")
    assert answer["too_long"]["message"].startswith("prompt is too long: ")
    assert answer["clamped"] == "end_turn"
    assert answer["run"]["kinds"] == ["tool_use", "tool_use"]
    assert set(answer["run"]["cities"]) <= {"Paris", "Rome"}
    assert answer["run"]["cities"]
    assert all(name == id_ and kind == "model" for id_, kind, name in answer["models"])
    assert answer["models"]
    assert answer["model"].startswith("20")
    assert answer["wrong"]["id"].startswith("req_")
    assert "messages[0].content[0].text" in answer["wrong"]["message"]
    assert "image" in answer["image"], "a model of text gets a line in its place"


def test_openai(smollm2: Serve) -> None:
    answer = converse_python(smollm2, "openai_chat.py")
    check_turns(answer, "streamed_async", "response")
    assert answer["streamed_usage"] > 0
    for city in ("city", "call", "city_of_response"):
        check_city(answer[city])
    assert "Paris" in answer["completion"]
    assert len(answer["logprobs"]) == 4
    assert answer["no_model"] == ["NotFoundError", "model_not_found", "model"]
    assert answer["too_long"] == ["BadRequestError", "context_length_exceeded", "messages"]
    assert answer["wrong"] == ["BadRequestError", None, "top_p"]


def test_openai_agents(smollm2: Serve) -> None:
    for answer in converse_python(smollm2, "openai_agents.py").values():
        check_turns(answer)
        assert "raw_response_event" in answer["kinds"]
        check_city(answer["city"])
        assert answer["calls"], "it called the tool"
        assert answer["after_tool"]


def test_pydantic_ai(smollm2: Serve) -> None:
    answer = converse_python(smollm2, "pydantic_ai_agent.py")
    check_turns(answer, "response")
    check_city(answer["by_tool"])
    check_city(answer["by_schema"])


def test_huggingface_hub(smollm2: Serve) -> None:
    answer = converse_python(smollm2, "huggingface_chat.py")
    check_turns(answer, cached=False)
    assert answer["streamed_usage"] > 0
    assert answer["logprobs"] > 0
    check_city(answer["city"])
    assert answer["call"] == "tell_city"
    assert "top_p" in answer["refused"]


def test_llama_index(smollm2: Serve) -> None:
    answer = converse_python(smollm2, "llamaindex_chat.py", OPENAI2)
    check_turns(answer, "deltas")
    check_city(answer["city"])
    assert "Paris" in answer["completed"]
    assert answer["completed_stream"] == answer["completed"]


def test_instructor(smollm2: Serve) -> None:
    answer = converse_python(smollm2, "instructor_city.py", OPENAI2)
    assert set(answer) == {"tool_call", "json_schema_mode"}
    for mode in answer.values():
        check_city(mode["city"])
        assert mode["partial"] == mode["city"]
        assert mode["parts"] > 1
        assert mode["output"] > 0


def test_embeddings(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "tiny-llama")
    with Serve("--model", str(model), "--num-workers", "1", "--worker-args", f"{SMALL_POOL} --task embed") as serve:
        answer = converse_python(serve, "embeddings.py")
    assert answer["floats"] == pytest.approx(answer["sdk"][0], abs=1e-5), "the SDK asks for base64"
    assert sum(value**2 for value in answer["floats"]) == pytest.approx(1, abs=1e-5)
    assert answer["documents"][0] == pytest.approx(answer["sdk"][0], abs=1e-5)
    assert answer["documents"][1] == pytest.approx(answer["sdk"][1], abs=1e-5)
    assert answer["query"] == pytest.approx(answer["sdk"][0], abs=1e-5)
    assert len(answer["short"]) == 8
    assert answer["tokens"] > 0

"""Calls of vLLM's own text APIs: what is sent, which frames come, and which errors."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from msgspec.structs import replace as with_fields
from starlette.responses import JSONResponse, Response

from cache.hashing import MediaStart
from tests.running import listening
from tests.worker.adapter.rig import MEMBER, Rig, finishes, make_request, running, token_ids
from tests.worker.adapter.scripted_http import ScriptedHttp, sse
from tests.worker.adapter.test_vllm import api as api
from tests.worker.adapter.test_vllm import server as server
from worker.adapter.api import EngineLostError, EngineRefusedError
from worker.adapter.health import facts_of
from worker.adapter.text import CHAT, COMPLETIONS
from worker.adapter.vllm import VllmApi
from worker.wire import End, EngineCall, EngineText, Failed, GenerateRequest, Started

PROMPT = tuple(range(100, 140))
USAGE = {"choices": [], "usage": {"prompt_tokens": 40, "prompt_tokens_details": {"cached_tokens": 32}}}


def asking(path: str = CHAT, *, streams: bool = True, n: int = 1, output_ids: tuple[int, ...] = (), **body: Any) -> Any:
    call = EngineCall(path, json.dumps({"stream": streams, **body}).encode(), streams)
    return with_fields(make_request(PROMPT, n=n, output_ids=output_ids, max_tokens=50), call=call)


def delta(text: str, ids: list[int], index: int = 0, reason: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": index, "delta": {"content": text}, "token_ids": ids, "finish_reason": reason}]}


async def parts_of(api: VllmApi, request: GenerateRequest) -> list[bytes]:
    parts = list[bytes]()
    await api.generate(request, "id-1", lambda data, part: parts.append(data))
    return parts


async def test_body_has_the_ids_the_salt_and_the_priority(server: ScriptedHttp, api: VllmApi) -> None:
    server.answers[f"POST {CHAT}"] = sse(delta("a", [5]))
    await parts_of(api, with_fields(asking(messages=[], temperature=0.5, cache_salt="of another tenant"), priority=3))
    body = server.bodies[-1]
    assert body["kv_transfer_params"] == {"prompt_token_ids": list(PROMPT)}
    assert body["cache_salt"] == make_request().root.hex()
    assert body["return_token_ids"] is True
    assert (body["priority"], body["request_id"], body["temperature"], body["model"]) == (3, "id-1", 0.5, "m")


async def test_rest_of_an_answer_has_fewer_tokens_to_go(server: ScriptedHttp, api: VllmApi) -> None:
    server.answers |= {f"POST {path}": sse(delta("a", [5])) for path in (CHAT, COMPLETIONS)}
    await parts_of(api, asking(output_ids=(7, 8), max_tokens=50, max_completion_tokens=50, min_tokens=3))
    body = server.bodies[-1]
    assert body["kv_transfer_params"] == {"prompt_token_ids": [*PROMPT, 7, 8]}
    assert (body["max_completion_tokens"], body["min_tokens"], body.get("max_tokens")) == (48, 1, None)
    await parts_of(api, asking(COMPLETIONS, output_ids=(7,), prompt="x"))
    assert (server.bodies[-1]["prompt"], server.bodies[-1]["max_tokens"]) == ([*PROMPT, 7], 49)


async def test_a_shortened_prompt_is_not_shortened_again(server: ScriptedHttp, api: VllmApi) -> None:
    """vLLM shortens prompts of ids, too: the rest of an answer would lose tokens. It refuses a suffix to ids."""
    server.answers[f"POST {COMPLETIONS}"] = sse(delta("a", [5]))
    shortens = {"truncate_prompt_tokens": len(PROMPT), "truncation_side": "right", "suffix": "of code"}
    for output_ids in ((), (7,)):
        await parts_of(api, asking(COMPLETIONS, output_ids=output_ids, prompt="x", **shortens))
        body = server.bodies[-1]
        assert body["prompt"] == [*PROMPT, *output_ids]
        assert not shortens.keys() & body.keys()
    await parts_of(api, asking(COMPLETIONS, prompt="x", echo=True, **shortens))
    assert shortens.items() <= server.bodies[-1].items(), "its text is not shortened yet"


async def test_an_echo_has_its_text(server: ScriptedHttp, api: VllmApi) -> None:
    """vLLM echoes no text of a prompt of ids, nor where ids are asked for."""
    server.answers[f"POST {COMPLETIONS}"] = sse(delta("a", [5]))
    await parts_of(api, asking(COMPLETIONS, prompt="x", echo=True))
    assert server.bodies[-1]["prompt"] == "x"
    assert "return_token_ids" not in server.bodies[-1]


async def test_a_prompt_that_is_shown_has_its_text(server: ScriptedHttp, api: VllmApi) -> None:
    """vLLM has no text of a prompt of ids."""
    server.answers[f"POST {CHAT}"] = sse(delta("a", [5]))
    for shows, has_ids in ((True, False), (False, True), (None, True)):
        await parts_of(api, asking(messages=[], return_prompt_text=shows))
        assert ("kv_transfer_params" in server.bodies[-1]) is has_ids


@pytest.mark.parametrize(
    ("path", "event"),
    [
        (CHAT, delta("", [], reason="abort")),
        (COMPLETIONS, {"choices": [{"index": 1, "text": "a", "finish_reason": "abort"}]}),
    ],
)
async def test_an_aborted_answer_is_no_end(path: str, event: Any, server: ScriptedHttp, api: VllmApi) -> None:
    """vLLM aborts its requests when it is paused, sent to sleep or stopped: another engine can go on with them."""
    server.answers[f"POST {path}"] = sse(event)
    with pytest.raises(EngineLostError, match="aborted"):
        await parts_of(api, asking(path))


async def test_only_apis_that_render_are_offered(server: ScriptedHttp, api: VllmApi) -> None:
    missing = JSONResponse({"error": {"message": "field required"}}, status_code=400)
    for path in (CHAT, f"{CHAT}/render", COMPLETIONS, "/v1/messages", "/v1/messages/render"):
        server.answers[f"POST {path}"] = missing
    del server.answers[f"POST {COMPLETIONS}/render"]
    assert await api.text_apis() == (CHAT,)


async def test_render(server: ScriptedHttp, api: VllmApi) -> None:
    prompt = {"token_ids": [1, 2], "sampling_params": {"max_tokens": 9}, "features": None}
    server.answers[f"POST {CHAT}/render"] = JSONResponse(prompt)
    server.answers[f"POST {COMPLETIONS}/render"] = JSONResponse([prompt, prompt])
    assert (await api.render(EngineCall(CHAT, b"{}"))).prompts == ((1, 2),)
    assert (await api.render(EngineCall(COMPLETIONS, b"{}"))).max_tokens == (9, 9)
    assert (await api.render(EngineCall(CHAT, b"{}"))).media == ()


def features(**identities: list[str]) -> dict[str, Any]:
    """Return those of a prompt with media, of ten tokens each, in reverse order."""
    places = {
        kind: [{"offset": 90 - 10 * at, "length": 10} for at in range(len(of))] for kind, of in identities.items()
    }
    return {"mm_hashes": identities, "mm_placeholders": places, "kwargs_data": None}


async def test_render_returns_the_places_of_images(server: ScriptedHttp, api: VllmApi) -> None:
    """Their pixels are not asked for. Other media are refused."""
    prompt: dict[str, Any] = {"token_ids": [1, 2], "sampling_params": {"max_tokens": 9}, "features": None}
    server.answers[f"POST {CHAT}/render"] = JSONResponse(prompt | {"features": features(image=["a", "b"])})
    rendered = await api.render(EngineCall(CHAT, b"{}"))
    assert rendered.media == ((MediaStart("b", 80), MediaStart("a", 90)),)
    assert server.bodies[-1]["mm_payload"] == "none"
    assert await api.takes_images()
    server.answers[f"POST {CHAT}/render"] = JSONResponse(prompt | {"features": features(image=["a"], audio=["b"])})
    with pytest.raises(EngineRefusedError, match="audio and video"):
        await api.render(EngineCall(CHAT, b"{}"))
    server.answers[f"POST {CHAT}/render"] = JSONResponse(prompt)
    assert not await api.takes_images()
    server.answers[f"POST {CHAT}/render"] = JSONResponse({"error": "not a multimodal model"}, status_code=400)
    assert not await api.takes_images()


async def test_prompts_are_rendered_again_on_another_connection() -> None:
    """vLLM answers 500 to an image of too many pixels, and then closes the connection, which may be in use."""
    prompt = {"token_ids": [1, 2], "sampling_params": {"max_tokens": 9}}
    bodies: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while (head := await reader.readuntil(b"\r\n\r\n")) and len(bodies) != 1:
            bodies.append(await reader.readexactly(int(re.search(rb"content-length: (\d+)", head, re.I)[1])))  # type: ignore[index]
            status, answer = (b"500 Fault", {}) if len(bodies) == 1 else (b"200 OK", prompt)
            data = json.dumps(answer).encode()
            writer.write(b"HTTP/1.1 %b\r\ncontent-length: %d\r\n\r\n%b" % (status, len(data), data))
        bodies.append(b"closed")

    async with listening(serve) as port:
        api = VllmApi(f"http://127.0.0.1:{port}")
        call = EngineCall(CHAT, b'{"model": "m"}')
        with pytest.raises(EngineRefusedError):
            await api.render(call)
        assert (await api.render(call)).prompts == ((1, 2),)
        await api.close()
    assert bodies[1] == b"closed"


async def test_answers_to_images_come_from_messages(server: ScriptedHttp, api: VllmApi) -> None:
    """vLLM renders such chats again."""
    server.answers[f"POST {CHAT}"] = sse(delta("a", [5]))
    await parts_of(api, with_fields(asking(messages=[]), media=(MediaStart("a", 3),)))
    assert "kv_transfer_params" not in server.bodies[-1]


@contextlib.asynccontextmanager
async def rig_over(api: VllmApi) -> AsyncIterator[Rig]:
    rig = Rig(api, facts=facts_of(await api.load(), await api.model()))
    rig.engine.member = replace(MEMBER, capabilities=(CHAT,))
    async with running(rig):
        yield rig


async def test_frames_of_a_stream(server: ScriptedHttp, api: VllmApi) -> None:
    first, second = delta("a", [5]), delta("b", [6, 7], 1, "length")
    server.answers[f"POST {CHAT}"] = sse(first, second, delta("c", [8], 0, "tool_calls"), USAGE)
    async with rig_over(api) as rig:
        frames = await rig.answer(asking(n=2))
        assert await rig.is_idle()
    assert isinstance(frames[0], Started)
    assert [json.loads(frame.data) for frame in frames if isinstance(frame, EngineText)][:2] == [first, second]
    assert (token_ids(frames, 0), token_ids(frames, 1)) == ([5, 8], [6, 7])
    assert [(frame.choice, frame.reason) for frame in finishes(frames)] == [(0, "stop"), (1, "length")]
    assert isinstance(frames[-1], End)
    assert frames[-1].num_cached_tokens == 32


async def test_frames_of_a_whole_answer(server: ScriptedHttp, api: VllmApi) -> None:
    answer: dict[str, Any] = dict(USAGE)
    answer["choices"] = [{"index": 0, "message": {}, "token_ids": [5, 6], "finish_reason": "stop"}]
    server.answers[f"POST {CHAT}"] = JSONResponse(answer)
    async with rig_over(api) as rig:
        frames = await rig.answer(asking(streams=False))
    assert token_ids(frames) == [5, 6]
    assert rig.metrics.registry.get_sample_value("headstart_worker_prefill_seconds_count") == 0, "its end is not seen"
    assert [type(frame) for frame in frames][-2:] != [Failed]
    assert frames[-1].num_cached_tokens == 32  # type: ignore[union-attr]


async def test_other_apis_are_refused(api: VllmApi) -> None:
    async with rig_over(api) as rig:
        refusal = rig.engine.refusal(asking("/v1/load_lora_adapter"))
    assert refusal is not None
    assert refusal.code == "unsupported"


async def test_broken_streams_are_lost(server: ScriptedHttp, api: VllmApi) -> None:
    for answer in (sse(delta("a", [5]), done=False), sse(b"data: nonsense\n\n"), Response(b"nonsense")):
        server.answers[f"POST {CHAT}"] = answer
        async with rig_over(VllmApi(api._url)) as rig:
            [*_, last] = await rig.answer(asking(streams=callable(answer)))
        assert isinstance(last, Failed)
        assert last.code == "worker_lost"


async def test_engines_without_text_are_served_by_their_own_apis(server: ScriptedHttp, api: VllmApi) -> None:
    missing = JSONResponse({"error": {"message": "field required"}}, status_code=400)
    server.answers |= {f"POST {path}": missing for path in ("/score", "/rerank")}
    server.answers["GET /version"] = JSONResponse({"version": "0.32.0"})
    assert (await api.version(), await api.text_apis()) == ("0.32.0", ("/score", "/rerank"))
    request = with_fields(asking("/rerank", streams=False, query="a"), prompt_ids=())
    server.answers["POST /rerank"] = JSONResponse({"results": []})
    [part] = await parts_of(api, request)
    assert json.loads(part) == {"results": []}
    body = server.bodies[-1]
    assert (body["query"], body["cache_salt"], body["model"]) == ("a", make_request().root.hex(), "m")
    assert not {"kv_transfer_params", "return_token_ids"}.intersection(body)


async def test_an_answer_that_is_too_long_is_the_clients_error(server: ScriptedHttp, api: VllmApi) -> None:
    server.answers["POST /v1/embeddings"] = Response(b" " * (17 << 20), media_type="application/json")
    with pytest.raises(EngineRefusedError, match="more than 16 MiB: ask for less at a time"):
        await parts_of(api, with_fields(asking("/v1/embeddings", streams=False, input="a"), prompt_ids=()))

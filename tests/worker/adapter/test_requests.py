"""Requests at another engine, over a scripted API: their frames, order and endings."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial

import msgspec
import pytest

from tests.waiting import HANG_S, until
from tests.worker.adapter.rig import (
    Rig,
    ScriptedApi,
    finishes,
    make_request,
    token_ids,
)
from worker.adapter import requests as requests_module
from worker.adapter.api import EngineLostError, EngineRefusedError
from worker.adapter.health import Sign
from worker.adapter.prefill_line import PrefillLine
from worker.contracts.engine import RequestKey, StepLog
from worker.wire import (
    End,
    EngineText,
    Failed,
    Finished,
    Frame,
    Started,
    Tokens,
)


def timeless(frames: Sequence[Frame]) -> list[Frame]:
    """Return the frames with no time in a queue. The first one has to have it."""
    first, *others = frames
    assert isinstance(first, Started)
    assert first.queue_s is not None
    return [msgspec.structs.replace(first, queue_s=None), *others]


async def test_frames_of_a_stream(api: ScriptedApi, rig: Rig) -> None:
    key = rig.submit(make_request())
    call = await api.call()
    call.token(11)
    call.end("stop", 64)
    await until(lambda: rig.is_over(key))
    *frames, end = rig.frames[key]
    text = EngineText(b"{}")
    assert timeless(frames) == [Started(0), Tokens(0, (11,)), text, Tokens(0, (6,)), text, text, Finished(0, "stop")]
    assert isinstance(end, End)
    assert end.num_cached_tokens == 64
    assert min(end.queue_s, end.prefill_s, end.decode_s) >= 0.0


async def test_choices_are_one_call(api: ScriptedApi, rig: Rig) -> None:
    key = rig.submit(make_request(n=3))
    call = await api.call()
    assert rig.engine._account.num_open_choices == 3
    call.end()
    await until(lambda: rig.is_over(key))
    assert [frame.choice for frame in finishes(rig.frames[key])] == [0, 1, 2]
    assert len(api.calls) == 1


async def test_a_traced_request_has_its_times(api: ScriptedApi, rig: Rig) -> None:
    steps = StepLog()
    request = make_request()
    rig.engine.submit(RequestKey(99), request, None, steps)
    call = await api.call()
    call.token()
    call.end()
    await until(lambda: rig.is_over(RequestKey(99)))
    assert steps.begun_s is not None
    assert steps.first_token_s is not None
    assert steps.begun_s <= steps.first_token_s


async def test_a_resumed_prompt_is_never_more_cached_than_long(api: ScriptedApi, rig: Rig) -> None:
    """The engine counts the output so far with it."""
    request = make_request(range(100, 140), output_ids=tuple(range(40)), max_tokens=80)
    key = rig.submit(request)
    (await api.call()).end(num_cached_tokens=64)
    await until(lambda: rig.is_over(key))
    assert rig.frames[key][-1].num_cached_tokens == 40


async def test_an_internal_error_of_an_engine_that_has_died(api: ScriptedApi, rig: Rig) -> None:
    """Its server answers for a while, and another worker can take the request."""
    key = rig.submit(make_request())
    call = await api.call()
    api.healthy = False
    call.say(EngineRefusedError(500, "EngineCore encountered an issue."))
    await until(lambda: rig.is_over(key))
    assert (rig.frames[key][-1].code, rig.frames[key][-1].retryable) == ("worker_lost", True)


VLLM_TOO_LONG = "This model's maximum context length is 8 tokens. However, you requested 9 tokens."
SGLANG_TOO_LONG = "The input (9 tokens) is longer than the model's context length (8 tokens)."
LLAMA_TOO_LONG = "the request exceeds the available context size. try increasing the context size"
TGI_TOO_LONG = "Input validation error: `inputs` tokens + `max_new_tokens` must be <= 8. Given: 9 and 1"


@pytest.mark.parametrize(
    ("error", "code", "retryable"),
    [
        (EngineLostError("broken"), "worker_lost", True),
        (EngineLostError("closed", closed=True), "worker_lost", True),
        (EngineLostError("refused", gone=True, unsent=True), "not_ready", True),
        (EngineLostError("too many open files", unsent=True), "not_ready", True),
        (EngineRefusedError(400, "no"), "invalid_request", False),
        (EngineRefusedError(422, "no"), "invalid_request", False),
        (EngineRefusedError(400, VLLM_TOO_LONG), "context_length_exceeded", False),
        (EngineRefusedError(400, SGLANG_TOO_LONG), "context_length_exceeded", False),
        (EngineRefusedError(400, LLAMA_TOO_LONG), "context_length_exceeded", False),
        (EngineRefusedError(422, TGI_TOO_LONG), "context_length_exceeded", False),
        (EngineRefusedError(401, "no"), "not_ready", True),
        (EngineRefusedError(403, "no"), "invalid_request", False),
        (EngineRefusedError(404, "no"), "not_ready", True),
        (EngineRefusedError(429, "full"), "queue_full", True),
        (EngineRefusedError(503, "full"), "queue_full", True),
        (EngineRefusedError(500, "oh"), "engine_error", False),
        (ValueError("a chunk that is none"), "internal", True),
    ],
    ids=str,
)
@pytest.mark.parametrize("num_tokens", [0, 2])
async def test_a_failed_stream(
    api: ScriptedApi, rig: Rig, error: Exception, code: str, retryable: bool, num_tokens: int
) -> None:
    key = rig.submit(make_request(n=2))
    call = await api.call()
    for _ in range(num_tokens):
        call.token()
    call.say(error)
    await until(lambda: rig.is_over(key))
    last = rig.frames[key][-1]
    assert isinstance(last, Failed)
    assert (last.code, last.retryable) == (code, retryable)
    assert not finishes(rig.frames[key]), "no choice has ended, so another worker takes all"
    assert (last.retry_after_s is not None) == (code == "queue_full")


def later(clock: Callable[[], float], seconds: float) -> float:
    return clock() + seconds


@pytest.mark.parametrize("n", [1, 3])
async def test_deadline_before_the_first_token(api: ScriptedApi, rig: Rig, n: int) -> None:
    key = rig.submit(make_request(n=n, deadline_s=0.01))
    await until(lambda: rig.is_over(key))
    assert timeless(rig.frames[key]) == [Started(0), Failed("deadline", "it waited too long", retryable=False)]


async def test_no_deadline_behind_the_first_token(api: ScriptedApi, rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    key = rig.submit(make_request(deadline_s=HANG_S))
    call = await api.call()
    call.token()
    await until(lambda: token_ids(rig.frames[key]))
    loop = asyncio.get_running_loop()
    monkeypatch.setattr(loop, "time", partial(later, loop.time, 2 * HANG_S))
    for _ in range(3):
        await asyncio.sleep(0)
    call.end()
    await until(lambda: rig.is_over(key))
    assert isinstance(rig.frames[key][-1], End)


@pytest.mark.parametrize("num_turns", [0, 1, 2, 5, 50])
async def test_abort_of_all(api: ScriptedApi, rig: Rig, num_turns: int) -> None:
    """However far the request has come, from the very turn in which it was submitted on."""
    key = rig.submit(make_request(n=2))
    for turn in range(num_turns):
        await asyncio.sleep(0)
        if turn == 10:
            (await api.call()).token()
    rig.engine.abort(key)
    await until(rig.is_idle)
    assert isinstance(rig.frames[key][-1], End)
    assert [frame.reason for frame in finishes(rig.frames[key])] == ["abort"] * 2
    assert not api.open_calls
    rig.engine.abort(key)


async def test_times_of_an_aborted_request(api: ScriptedApi, rig: Rig) -> None:
    """They are measurements like those of other requests."""
    answered, waiting = rig.submit(make_request()), rig.submit(make_request(range(300, 400)))
    call = await api.call()
    await asyncio.sleep(0.03)
    call.token()
    await until(lambda: token_ids(rig.frames[answered]))
    await asyncio.sleep(0.03)
    rig.engine.abort(answered)
    end = rig.frames[answered][-1]
    assert isinstance(end, End)
    assert min(end.prefill_s, end.decode_s) >= 0.025
    rig.engine.abort(waiting)
    end = rig.frames[waiting][-1]
    assert isinstance(end, End)
    assert (end.prefill_s, end.decode_s) == (0.0, 0.0), "nothing was measured"
    await until(rig.is_idle)


async def test_fail_all(api: ScriptedApi, rig: Rig) -> None:
    keys = [rig.submit(make_request(n=2)) for _ in range(3)]
    (await api.call(0)).token()
    await until(lambda: len(api.calls) == 3)
    keys.append(rig.submit(make_request()))  # not begun
    failed = Failed("draining", "the worker stops", retryable=True)
    api.calls[1].say(EngineLostError("broken"))  # in the same turn
    rig.engine.fail_all(failed).result()
    await until(rig.is_idle)
    assert all(rig.frames[key][-1] == failed for key in keys)


async def test_suspects_run_alone_and_start_first(api: ScriptedApi, rig: Rig) -> None:
    keys = [rig.submit(make_request(is_suspect=True)) for _ in range(2)]
    plain = rig.submit(make_request())
    await until(lambda: len(api.calls) == 2)
    suspect = next(call for call in api.calls if call.request.is_suspect)
    assert timeless(rig.frames[keys[0]]) == [Started(0)], "before its prefill: the gateway knows whom a death hits"
    assert not rig.frames[keys[1]]
    suspect.token()
    await until(lambda: len(api.calls) == 3)
    assert timeless(rig.frames[keys[1]]) == [Started(0)]
    for call in api.calls:
        call.end()
    await until(lambda: all(rig.is_over(key) for key in (*keys, plain)))


async def test_a_suspect_that_the_engine_never_had(api: ScriptedApi, rig: Rig) -> None:
    """A lost engine is the fault of one that it had, whatever was announced for the others."""
    keys = [rig.submit(make_request(is_suspect=True)) for _ in range(2)]
    await until(lambda: api.calls)
    rig.engine.apply(Sign.CLOSED, "gone")
    await until(lambda: all(map(rig.is_over, keys)))
    codes = [rig.frames[key][-1].code for key in keys]  # type: ignore[union-attr]
    assert codes == ["worker_lost", "not_ready"]


async def test_a_suspect_between_its_notice_and_its_prefill(
    api: ScriptedApi, rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests_module, "SUSPECT_NOTICE_S", HANG_S)
    key = rig.submit(make_request(is_suspect=True))
    await until(lambda: rig.frames[key])
    rig.engine.apply(Sign.CLOSED, "gone")
    await until(lambda: rig.is_over(key))
    assert rig.frames[key][-1].code == "not_ready"  # type: ignore[union-attr]


async def test_started_comes_in_the_order_of_the_prefills(api: ScriptedApi, rig: Rig) -> None:
    """The engine runs them one by one without a report: each begins with the first token of the one before."""
    keys = [rig.submit(make_request(gateway=f"g{number}")) for number in range(3)]
    await until(lambda: len(api.calls) == 3)
    assert [len(rig.frames[key]) for key in keys] == [1, 0, 0]
    await until(lambda: rig.load.num_waiting == 2)
    api.calls[0].token()
    await until(lambda: rig.frames[keys[1]])
    assert [len(rig.frames[key]) for key in keys] == [3, 1, 0]
    for call in api.calls:
        call.end()
    await until(lambda: all(map(rig.is_over, keys)))


async def test_unstreamed_requests_leave_the_line_one_by_one(api: ScriptedApi, rig: Rig) -> None:
    """Their first tokens are not seen: each has probably ended after those before it."""
    rig.engine._account.line = PrefillLine(0.001)
    unseen, last = rig.submit(make_request(streams=False)), rig.submit(make_request(range(300, 350), streams=False))
    streamed = rig.submit(make_request(range(500, 600)))
    await until(lambda: rig.frames[streamed])
    begun = [rig.frames[key][0] for key in (last, streamed)]
    waited = [frame.queue_s or 0.0 for frame in begun if isinstance(frame, Started)]
    assert waited[0] >= 0.09
    assert waited[1] >= 0.14
    for call in api.calls:
        call.end()
    await until(lambda: all(map(rig.is_over, (unseen, last, streamed))))

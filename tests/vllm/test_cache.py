"""A real vLLM finds what the index promises of it, through resets and restarts."""

from __future__ import annotations

import secrets
import time
from typing import Any, Final

from tests.server.sse_grammar import check_chat
from tests.vllm.fleet import BLOCK_SIZE, Adapter, VllmFleet, ask, found, hits, promised
from tests.waiting import wait_until

STORY: Final = "It was a bright cold day in April, and the clocks were striking thirteen. " * 6


def question(text: str = STORY) -> dict[str, Any]:
    """Return a completion's body that no other test has asked."""
    return {"prompt": f"{secrets.token_hex(8)} {text}", "max_tokens": 2}


def remembered(fleet: VllmFleet, body: dict[str, Any]) -> Adapter:
    """Ask, wait until the index promises the prompt, and return the adapter that has served it."""
    adapter = fleet.adapter_of(fleet.complete(body))
    wait_until(lambda: fleet.indexed(body, adapter) >= BLOCK_SIZE, what="the index knows the prompt")
    return adapter


def test_four_turns(fleet: VllmFleet) -> None:
    """Every turn goes to the same engine; promise, usage and the engine's own counter are equal."""
    messages = [{"role": "user", "content": f"{secrets.token_hex(8)} {STORY} Who says that?"}]
    adapter, counts = None, []
    for _ in range(4):
        before = [hits(engine) for engine in fleet.engines]
        body = {"messages": messages, "max_tokens": 12, "stream": True, "stream_options": {"include_usage": True}}
        answer = fleet.complete(body)
        after = [hits(engine) for engine in fleet.engines]
        adapter = fleet.adapter_of(answer) if adapter is None else adapter
        assert fleet.adapter_of(answer) is adapter
        counts.append((promised(answer), found(answer), sum(after) - sum(before)))
        [text] = check_chat(answer.content, include_usage=True, by_engine=True)
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "And then?"}]
        adapter.settle()
    print(f"promised, found, counted by the engine: {counts}")
    assert all(one == other == third for one, other, third in counts)
    assert counts[0][0] < counts[1][0] < counts[2][0] < counts[3][0]


def test_other_tenant_finds_nothing(fleet: VllmFleet) -> None:
    body = question()
    adapter = remembered(fleet, body)
    assert all(fleet.matched(body, each, tenant="blue") == 0 for each in fleet.adapters)
    before = sum(map(hits, fleet.engines))
    assert found(fleet.complete(body, tenant="blue")) == 0
    assert sum(map(hits, fleet.engines)) == before
    again = fleet.complete(body)
    assert fleet.adapter_of(again) is adapter
    assert found(again) == sum(map(hits, fleet.engines)) - before > 0


def test_reset_through_the_adapter(fleet: VllmFleet) -> None:
    """Nothing is promised any more when the answer to the reset comes, and the engine finds nothing."""
    body = question()
    adapter = remembered(fleet, body)
    epoch = adapter.purge()
    begun_s = time.monotonic()
    wait_until(lambda: fleet.matched(body, adapter) == 0)
    print(f"no promise {time.monotonic() - begun_s:.3f} s after the reset")
    assert adapter.epoch() == epoch
    before = hits(adapter.engine)
    ask(adapter.engine, body["prompt"])
    assert hits(adapter.engine) == before
    wait_until(adapter.is_whole, what="the index is whole")


def test_reset_behind_the_adapter(fleet: VllmFleet) -> None:
    """An idle engine does not report a reset. After its next step, no removed block is promised."""
    body = question()
    adapter = remembered(fleet, body)
    epoch = adapter.epoch()
    adapter.engine.request("/reset_prefix_cache", {})
    ask(adapter.engine, f"{secrets.token_hex(8)} {STORY}")
    begun_s = time.monotonic()
    wait_until(lambda: fleet.matched(body, adapter) == 0)
    print(f"no promise {time.monotonic() - begun_s:.3f} s after the engine's next step")
    assert adapter.epoch() != epoch
    wait_until(adapter.is_whole, what="the index is whole")


def test_adapter_restarted(fleet: VllmFleet) -> None:
    """A new adapter learns from the replay what the engine holds, prompts before its time included."""
    body = question()
    adapter = remembered(fleet, body)
    before = fleet.indexed(body, adapter)
    adapter.kill()
    adapter.start()
    fleet.wait_ready()
    begun_s = time.monotonic()
    wait_until(lambda: fleet.knows_epoch(body, adapter), what="the gateway knows the new epoch")
    wait_until(lambda: fleet.indexed(body, adapter) == before, what="the index promises as before")
    print(f"{before} tokens promised again {time.monotonic() - begun_s:.3f} s after the restart")
    wait_until(adapter.is_whole, what="the index is whole")
    answer = fleet.complete(body)
    assert fleet.adapter_of(answer) is adapter
    assert found(answer) > 0

"""Any mix of requests on two engines whose blocks move: every answer is right, and no block stays allocated."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.stores.disk import DiskStore
from cache.stores.host import HostStore
from tests.worker.kv_transfer.moving_engine import PAYLOAD_BYTES, RECORD, MovingEngine
from tests.worker.scheduler.arithmetic_runner import answer
from tests.worker.scheduler.engine import generate
from worker.scheduler.request import Request
from worker.wire import BlockSource, End

arrivals = st.lists(
    st.fixed_dictionaries(
        {
            "engine": st.integers(0, 1),
            "step": st.integers(0, 40),
            "prefix": st.integers(0, 24),
            "prompt": st.lists(st.integers(0, 1), min_size=1, max_size=12),
            "max_tokens": st.integers(0, 8),
            "n": st.sampled_from([1, 1, 2]),
            "num_fetched": st.integers(0, 9),
            "source": st.sampled_from(["0", "1", "gone"]),
            "abort_after": st.none() | st.integers(0, 8),
        }
    ),
    min_size=2,
    max_size=14,
)
mixes = st.fixed_dictionaries(
    {
        "arrivals": arrivals,
        "num_blocks": st.integers(13, 30),
        "num_host_blocks": st.integers(0, 12),
        "num_disk_blocks": st.integers(0, 30),
        "num_turns": st.integers(2, 6),
        "damages": st.booleans(),
        "purges": st.sets(st.integers(0, 60), max_size=2),
        "give_ups": st.sets(st.integers(0, 60), max_size=6),
        "seed": st.integers(0, 1 << 32),
    }
)


@contextmanager
def two_engines(mix, folder: Path) -> Iterator[list[MovingEngine]]:
    engines: dict[str, MovingEngine] = {}
    random = Random(mix["seed"])
    for url in ("0", "1"):
        stores = []
        if mix["num_host_blocks"]:
            stores.append(HostStore([memoryview(bytearray(mix["num_host_blocks"] * PAYLOAD_BYTES))], PAYLOAD_BYTES))
        if mix["num_disk_blocks"]:
            stores.append(DiskStore(folder, RECORD, mix["num_disk_blocks"] * RECORD.record_bytes))
        engines[url] = MovingEngine(
            stores, engines, random, RECORD, damages=mix["damages"], num_blocks=mix["num_blocks"], max_num_seqs=4
        )
    try:
        yield list(engines.values())
    finally:
        for engine in engines.values():
            engine.transfers.close()


def run_mix(mix) -> int:
    """Run a mix, and return the number of tokens loaded."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm")))
        engines = stack.enter_context(two_engines(mix, folder))
        left = sorted(mix["arrivals"], key=lambda arrival: arrival["step"])
        live: list[tuple[dict, list[int], Request, int]] = []
        step = 0
        while left or any(engine.scheduler.has_work for engine in engines):
            while left and left[0]["step"] <= step:
                arrival = left.pop(0)
                prompt_ids = [*([0, 1] * 12)[: arrival["prefix"]], *arrival["prompt"]]
                source = BlockSource(arrival["source"], "", arrival["num_fetched"])
                wire = generate(prompt_ids, arrival["max_tokens"], arrival["n"], source=source)
                live.append((arrival, prompt_ids, engines[arrival["engine"]].submit(wire), step))
            for arrival, _, request, since in live:
                if arrival["abort_after"] == step - since:
                    engines[arrival["engine"]].abort(request)
            for engine in engines:
                if step in mix["purges"]:
                    engine.purge()
                if step in mix["give_ups"]:
                    engine.transfers.fetches.give_up_latest()
                if engine.step() is None and engine.scheduler.has_work:
                    assert engine.transfers.fetches.active, "work is left but nothing was scheduled"
                engine.move_blocks(mix["num_turns"])
            step += 1
            assert step < 3000, "no end in sight"
        for arrival, prompt_ids, request, _ in live:
            got = engines[arrival["engine"]].answer(request)
            assert isinstance(got.last, End)
            for index in range(arrival["n"]):
                expected = answer(prompt_ids, 100 + index, arrival["max_tokens"])
                tokens = got.tokens.get(index, [])
                assert tokens == expected[: len(tokens)]
                assert got.finished[index].reason == "abort" or tokens == expected
        for engine in engines:
            engine.transfers.fetches.give_up_all()
            assert engine.allocator.num_free_blocks == engine.allocator.num_blocks - 1
            engine.allocator.check_integrity()
        num_fetched = sum(sum((request.fetched_tokens or {}).values()) for _, _, request, _ in live)
        families = [family for engine in engines for family in engine.transfers._metrics.fetched_tokens.collect()]
        num_counted = sum(each.value for family in families for each in family.samples if each.name.endswith("_total"))
        assert num_fetched <= num_counted
        return num_fetched


@pytest.mark.parametrize("num_mixes", [80, pytest.param(3_000, marks=pytest.mark.deep)])
def test_any_mix_gives_the_tokens_of_each_alone(num_mixes: int) -> None:
    @settings(max_examples=num_mixes, deadline=None)
    @given(mix=mixes)
    def check(mix) -> None:
        run_mix(mix)

    check()


@pytest.mark.parametrize(("place", "purges"), [("host", set()), ("disk", set()), ("peer", set()), ("peer", {82})])
def test_blocks_come_from_each_place(place: str, purges: set[int]) -> None:
    """The mixes above fetch from every place: a prompt computed at one engine is fetched from there.

    A purge gives up a fetch that has begun.
    """
    first = {"engine": 0, "step": 0, "prefix": 24, "prompt": [1], "max_tokens": 1, "n": 1, "num_fetched": 0}
    first |= {"source": "gone", "abort_after": None}
    others = [{**first, "step": 20 + 4 * n, "prefix": 0, "prompt": [n % 2] * 12 + [0] * n} for n in range(8)]
    again = {**first, "step": 80}
    if place == "peer":
        again |= {"engine": 1, "num_fetched": 6, "source": "0"}
    mix = {
        "arrivals": [first, again] if place == "peer" else [first, *others, again],
        "num_blocks": 13,
        "num_host_blocks": 40 * (place == "host"),
        "num_disk_blocks": 40 * (place == "disk"),
        "num_turns": 2 if purges else 6,
        "damages": False,
        "purges": purges,
        "give_ups": set(),
        "seed": 0,
    }
    assert (run_mix(mix) >= 20) == (not purges)

"""Blocks that move between real processes: the tokens stay, and every way there shows in usage and explanations."""

from __future__ import annotations

import asyncio
import secrets
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from cache.types import BlockHash
from server.workers.client import WorkerClient
from server.workers.networks import WorkerNetworks
from tests.faults.cluster import Cluster, Topology
from tests.faults.part import Worker, metrics
from tests.faults.worker_process import Additions
from tests.waiting import HANG_S, wait_until
from worker.contracts.exchange import MAX_BLOCKS, ChainsWanted, Handover
from worker.wire import pack, unpack

pytestmark = pytest.mark.e2e
WORKER_ARGS = ["--dtype", "float32", "--deterministic"]
STEP_S = 0.1
"""Time of each step: so computing takes long enough for moving to pay."""


class Moving(Cluster):
    """Two workers, each with a folder for blocks."""

    def __init__(self, folder: Path, model: Path) -> None:
        disk = ["--kv-disk", str(folder / "kv"), "--kv-disk-size", "16M"]
        topology = Topology(worker_args=[*WORKER_ARGS, *disk], additions=Additions(step_s=STEP_S))
        super().__init__(folder, model, topology)

    def ask(self, prompt: str, **options: Any) -> Answer:
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 6, "temperature": 1.0, "seed": 7, "ignore_eos": True}
        body |= {"return_token_ids": True, "logprobs": 0, **options}
        # To read the certificates of authorities would take longer than a short prefill.
        return Answer(httpx.post(f"{self.gateway.url}/v1/completions", json=body, timeout=HANG_S, verify=False))

    def cold(self, prompt: str) -> Answer:
        """Compute under a name of its own, so that no block is found."""
        answer = self.ask(prompt, cache_salt=secrets.token_hex(8))
        assert answer.cached == 0
        return answer

    def explain(self, prompt: str) -> dict[str, Any]:
        url = f"{self.gateway.ops_url}/route/explain?path=/v1/completions"
        answer = httpx.post(url, json={"model": "tiny", "prompt": prompt}, timeout=HANG_S)
        assert answer.status_code == 200, answer.text
        explanation: dict[str, Any] = answer.json()
        return explanation

    def named(self, name: str) -> Worker:
        return next(worker for worker in self.workers if worker.name == name)

    def other(self, name: str) -> Worker:
        return next(worker for worker in self.workers if worker.name != name)

    def post(self, worker: Worker, path: str) -> None:
        assert httpx.post(worker.url + path, timeout=HANG_S).status_code == 200

    def restart(self, worker: Worker, number: int = signal.SIGTERM) -> None:
        worker.send(number)
        assert worker.wait(HANG_S) == (0 if number == signal.SIGTERM else -number)
        worker.start()
        self.wait_ready()

    def epoch(self, worker: Worker) -> str | None:
        """Return a worker's epoch in the registry, None without. Polls of a gateway would learn it earlier."""
        workers = httpx.get(f"{self.gateway.ops_url}/index", timeout=HANG_S).json()["workers"]
        return next((each["epoch"] for each in workers if each["worker_id"] == worker.name), None)

    def view(self, prompt: str, worker: str) -> dict[str, Any]:
        """Return what the gateway would do with the prompt at a worker."""
        return next(view for view in self.explain(prompt)["workers"] if view["worker"] == worker)

    def compute(self, prompt: str) -> Answer:
        """Ask for a prompt that no cache holds. Return when its blocks are in the index and on disk."""
        before = {worker.name: self.num_saved(worker) for worker in self.workers}
        answer = self.ask(prompt)
        assert answer.cached == 0
        num_blocks = self.explain(prompt)["prompt_blocks"]
        wait_until(lambda: self.view(prompt, answer.worker)["index_tokens"] == 16 * num_blocks)
        wait_until(lambda: self.num_saved(self.named(answer.worker)) >= before[answer.worker] + num_blocks)
        return answer

    def num_saved(self, worker: Worker) -> float:
        return metrics(worker.url).get("headstart_worker_kv_stored_blocks{disk}", 0.0)


class Answer:
    """The parts of a completion that a test compares. `drawn` is equal only where every logit was."""

    def __init__(self, response: httpx.Response) -> None:
        assert response.status_code == 200, response.text
        body = response.json()
        (choice,) = body["choices"]
        self.drawn = (choice["token_ids"], choice["logprobs"]["token_logprobs"])
        self.worker: str = response.headers["x-headstart-worker"]
        details = body["usage"]["prompt_tokens_details"]
        self.cached: int = details["cached_tokens"]
        self.places: dict[str, int] = details.get("headstart", {})
        self.num_tokens = (body["usage"]["prompt_tokens"] - 1) // 16 * 16
        """Tokens of the prompt's whole blocks, which a later request need not compute."""


def prompt_of(topic: str) -> str:
    return " ".join(f"Line {n} about {topic}, and nothing else." for n in range(60))


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Moving]:
    with Moving(tmp_path_factory.mktemp("moving"), tiny_model) as running:
        yield running


async def test_a_copy_that_a_gateway_asks_for_gives_the_same_tokens(fleet: Moving) -> None:
    prompt = prompt_of("copies")
    first = fleet.compute(prompt)
    holder, other = fleet.named(first.worker), fleet.other(first.worker)
    with closing(WorkerClient("", WorkerNetworks())) as client:
        member = (await client.state(holder.url)).member
        wanted = pack(ChainsWanted(member.epoch, member.layout, MAX_BLOCKS))
        answer = await asyncio.to_thread(httpx.post, f"{member.url}/chains", content=wanted, timeout=HANG_S)
        chain = unpack(answer.content, Handover).chains[0]  # the one that it used last
        num_blocks = await client.adopt(other.url, member, BlockHash(chain.root), chain.block_hashes())
    assert num_blocks == len(chain.block_hashes())
    wait_until(lambda: fleet.view(prompt, other.name)["matched_tokens"] == first.num_tokens)
    fleet.post(holder, "/drain")
    wait_until(lambda: fleet.view(prompt, holder.name)["guard"] == "draining")
    copied = fleet.ask(prompt)
    assert (copied.worker, copied.cached, copied.drawn) == (other.name, first.num_tokens, first.drawn)
    fleet.restart(holder)


def test_blocks_outlive_a_worker_by_its_peer_and_by_its_disk(fleet: Moving) -> None:
    """It drains: the other fetches. It leaves: the other has its chains. It dies: its next life finds them on disk."""
    prompts = [prompt_of(topic) for topic in ("draining", "leaving", "dying")]
    draining, leaving, dying = prompts
    first = fleet.compute(draining)
    holder, other = fleet.named(first.worker), fleet.other(first.worker)
    fleet.post(holder, "/drain")
    wait_until(lambda: fleet.view(draining, holder.name)["guard"] == "draining")
    view = fleet.view(draining, other.name)
    assert (view["fetch_from"], view["fetched_tokens"]) == (holder.name, {"peer": first.num_tokens})
    fetched = fleet.ask(draining)
    assert (fetched.worker, fetched.places) == (other.name, {"pool": 0, "peer": first.num_tokens})
    assert fetched.drawn == first.drawn
    fleet.restart(holder)

    first = fleet.compute(leaving)
    holder, other = fleet.named(first.worker), fleet.other(first.worker)
    fleet.restart(holder)
    assert fleet.view(leaving, other.name)["matched_tokens"] == first.num_tokens

    first = fleet.compute(dying)
    holder, other = fleet.named(first.worker), fleet.other(first.worker)
    fleet.restart(holder, signal.SIGKILL)
    wait_until(lambda: fleet.view(dying, holder.name)["fetched_tokens"] == {"disk": first.num_tokens})
    fleet.post(other, "/drain")
    wait_until(lambda: fleet.view(dying, other.name)["guard"] == "draining")
    loaded = fleet.ask(dying)
    assert (loaded.worker, loaded.places) == (holder.name, {"pool": 0, "disk": first.num_tokens})
    assert loaded.drawn == first.drawn
    fleet.restart(other)


def test_nothing_comes_back_after_a_purge(fleet: Moving) -> None:
    """Neither from the disk of this life or the next, nor from a peer."""
    prompt = prompt_of("oblivion")
    first = fleet.compute(prompt)
    for worker in fleet.workers:
        fleet.post(worker, "/purge")
    assert [path for path in fleet.folder.glob("kv/*/*.blocks") if path.stat().st_size] == []
    for is_restarted in (False, True):
        if is_restarted:
            for worker in fleet.workers:
                fleet.post(worker, "/purge")
            for worker in fleet.workers:
                fleet.restart(worker, signal.SIGKILL)
        wait_until(lambda: all(not found(fleet.view(prompt, worker.name)) for worker in fleet.workers))
        again = fleet.ask(prompt)
        assert again.cached == 0
        assert again.drawn == first.drawn
    fleet.assert_quiet(within_s=HANG_S)


def found(view: dict[str, Any]) -> int:
    return int(view["matched_tokens"] + sum(view["fetched_tokens"].values()))


def test_a_worker_joins_with_what_its_peer_used_last(fleet: Moving) -> None:
    """It has the blocks when the index first names it; and a peer that dies while it joins costs nothing."""
    prompt = prompt_of("joining")
    first = fleet.compute(prompt)
    holder, other = fleet.named(first.worker), fleet.other(first.worker)
    epochs = [None, fleet.epoch(other)]
    fleet.post(other, "/purge")
    wait_until(lambda: fleet.epoch(other) not in epochs)
    epochs.append(fleet.epoch(other))
    fleet.restart(other, signal.SIGKILL)
    wait_until(lambda: fleet.epoch(other) not in epochs)
    assert fleet.view(prompt, other.name)["matched_tokens"] == first.num_tokens
    fleet.post(holder, "/drain")
    wait_until(lambda: fleet.view(prompt, holder.name)["guard"] == "draining")
    warm = fleet.ask(prompt)
    assert (warm.worker, warm.cached, warm.places.get("peer", 0)) == (other.name, first.num_tokens, 0)
    assert warm.drawn == first.drawn
    fleet.restart(holder)
    fleet.assert_quiet(within_s=HANG_S)


def test_what_a_busy_worker_holds_is_fetched_by_the_other(fleet: Moving) -> None:
    prompt = prompt_of("busy bees")
    fleet.compute(prompt)
    asked = [f"{prompt} {prompt_of(f'number {number}')}" for number in range(24)]
    with ThreadPoolExecutor(len(asked)) as threads:
        answers = list(threads.map(fleet.ask, asked))
        expected = list(threads.map(fleet.cold, asked))
    assert [answer.drawn for answer in answers] == [answer.drawn for answer in expected]
    assert len({answer.worker for answer in answers}) == 2
    assert any(answer.places.get("peer", 0) > 600 for answer in answers), [answer.places for answer in answers]

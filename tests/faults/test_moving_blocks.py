"""Blocks that move, under kills at any point and over disks that fail: no wrong token, no lost request, no lost block.

`pytest -m faults tests/faults/test_moving_blocks.py -s` prints what moved.
"""

from __future__ import annotations

import asyncio
import random
import shutil
import signal
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from cache.records import WorkerState
from tests.faults.client import Outcome, ask, ask_all, completion, session
from tests.faults.cluster import Cluster, Topology
from tests.faults.part import Worker, metrics
from tests.faults.worker_process import Additions
from worker.contracts.exchange import ChainsWanted, Handover
from worker.wire import WireError, pack, unpack

pytestmark = pytest.mark.faults
NUM_KILLS = 100
COPY_S = 10.0
SERVE_S = 0.002
"""The time to read a block for a copy."""
NUM_CLIENTS = 8
NUM_PROMPTS = 48
POOL_BLOCKS = 400
"""Less than the prompts need, so that blocks are evicted, and loaded again."""
INTEGRITY_S = 10.0
"""An idle worker checks its pool this often, and dies of what it finds."""
WORDS = ["up", "down", "left", "right", "north", "south", "east", "west"]


def prompts(rng: random.Random) -> list[str]:
    """Return a tree: every prompt extends an earlier one, or begins a new one."""
    texts: list[str] = []
    for _ in range(NUM_PROMPTS):
        start = rng.choice(texts) if texts and rng.random() < 0.7 else ""
        texts.append((start if len(start) < 4000 else "") + " ".join(rng.choices(WORDS, k=120)) + " ")
    return texts


def bodies(rng: random.Random, **options: Any) -> list[dict[str, Any]]:
    options = {"max_tokens": 24, "temperature": 1.0, "seed": 11, "stream_options": {"include_usage": True}} | options
    return [completion(text, logprobs=0, **options) for text in prompts(rng)]


def topology(folder: Path, *, num_workers: int = 1, **additions: float) -> Topology:
    folder.mkdir(parents=True, exist_ok=True)
    args = ["--dtype", "float32", "--deterministic", "--num-blocks", str(POOL_BLOCKS)]
    args += ["--kv-disk", str(folder), "--kv-disk-size", "32M"]
    return Topology(num_workers=num_workers, worker_args=args, additions=Additions(**{"step_s": 0.02, **additions}))


async def cold(cluster: Cluster, asked: list[dict[str, Any]]) -> list[Outcome]:
    """Compute each answer without any block of another's."""
    salted = [body | {"cache_salt": str(number)} for number, body in enumerate(asked)]
    answers = await ask_all(cluster.gateway.url, salted, parallel=4)
    assert all(answer.ok for answer in answers)
    return answers


def places(outcome: Outcome) -> Counter[str]:
    assert outcome.usage is not None
    return Counter(outcome.usage["prompt_tokens_details"].get("headstart", {}))


async def check(cluster: Cluster, asked: list[dict[str, Any]], expected: list[Outcome]) -> Counter[str]:
    """Ask in order, a few at a time. Return the tokens that came from each place."""
    answers = await ask_all(cluster.gateway.url, asked, parallel=3)
    for number, (answer, want) in enumerate(zip(answers, expected, strict=True)):
        assert answer.ok, (number, answer.status, answer.error)
        assert answer.same_as(want), number
    return sum(map(places, answers), Counter())


# --- kills ---------------------------------------------------------------------------------------------------------


class Clients:
    """Ask random prompts without end, and compare every answer."""

    def __init__(self, cluster: Cluster, asked: list[dict[str, Any]], expected: list[Outcome]) -> None:
        self._cluster, self._asked, self._expected = cluster, asked, expected
        self.num_answers = 0
        self.wrong: list[str] = []
        self.places: Counter[str] = Counter()
        self.stopping = False

    async def run(self, seed: float) -> None:
        rng = random.Random(seed)
        async with session() as http:
            while not self.stopping:
                number = rng.randrange(len(self._asked))
                answer = await ask(http, self._cluster.gateway.url, self._asked[number])
                self.num_answers += 1
                if not answer.ok:
                    self.wrong.append(f"prompt {number} lost: {answer.status} {answer.error}")
                elif not answer.same_as(self._expected[number]):
                    self.wrong.append(f"prompt {number} differs: {answer.choices} {self._expected[number].choices}")
                else:
                    self.places += places(answer)


async def kill_often(cluster: Cluster, clients: Clients, rng: random.Random) -> None:
    for number in range(NUM_KILLS):
        assert clients.wrong == [], f"after {number} kills"
        victim = rng.choice(cluster.workers)
        await asyncio.sleep(rng.uniform(0.0, 1.0))
        if rng.random() < 0.3:  # it drains, and dies somewhere in its hand-over
            victim.send(signal.SIGTERM)
            await asyncio.sleep(rng.uniform(0.0, 0.8))
        await asyncio.to_thread(victim.kill)
        victim.start()
        await asyncio.to_thread(cluster.wait_ready)


async def test_a_hundred_kills(tmp_path: Path, model: Path, rng: random.Random) -> None:
    with Cluster(tmp_path / "fleet", model, topology(tmp_path / "kv", num_workers=3)) as cluster:
        asked = bodies(rng)
        expected = await cold(cluster, asked)
        clients = Clients(cluster, asked, expected)
        tasks = [asyncio.create_task(clients.run(rng.random())) for _ in range(NUM_CLIENTS)]
        try:
            await kill_often(cluster, clients, rng)
        finally:
            clients.stopping = True
            await asyncio.gather(*tasks)
        print(f"{clients.num_answers} answers, tokens by place: {dict(clients.places)}")
        assert clients.wrong == []
        assert clients.places["disk"] > 0
        assert clients.places["peer"] > 0
        await asyncio.to_thread(cluster.assert_quiet, 20.0)
        await asyncio.sleep(INTEGRITY_S + 1.0)
        await check(cluster, asked[:3], expected[:3])
        await asyncio.sleep(1.0)
        assert all(worker.poll() is None for worker in cluster.workers)
        for worker in cluster.workers:
            assert "Traceback" not in worker.log.read_text(errors="replace"), worker.tail()


# --- copies on purpose ---------------------------------------------------------------------------------------------


def offered(worker: Worker) -> Handover:
    """Return the chains that a worker used last, as a gateway or a peer gets them."""
    state = unpack(httpx.get(f"{worker.url}/state", timeout=COPY_S).content, WorkerState)
    wanted = ChainsWanted(state.member.epoch, state.member.layout, POOL_BLOCKS)
    return unpack(httpx.post(f"{worker.url}/chains", content=pack(wanted), timeout=COPY_S).content, Handover)


def lacking(source: Worker, target: Worker) -> tuple[Handover, int]:
    """Return the offered chains that the target lacks, and the number of their missing blocks."""
    offer, held = offered(source), {each for chain in offered(target).chains for each in chain.block_hashes()}
    chains = [chain for chain in offer.chains if not held.issuperset(chain.block_hashes())]
    num_blocks = len({each for chain in chains for each in chain.block_hashes()} - held)
    return Handover(offer.url, offer.epoch, offer.layout, tuple(chains)), num_blocks


def copy_chains(offer: Handover, target: Worker) -> int:
    """Ask a worker for a peer's chains, as a gateway does. Return the blocks that it took; 0 if it has died."""
    try:
        answer = httpx.post(f"{target.url}/adopt", content=pack(offer), timeout=COPY_S)
        return unpack(answer.content, dict[str, int]).get("adopted_blocks", 0)
    except (httpx.HTTPError, WireError):
        return 0


async def test_a_hundred_kills_in_copies(tmp_path: Path, model: Path, rng: random.Random) -> None:
    """The worker that gives dies, or the one that takes, while others answer requests.

    A worker starts empty, and a copy is of blocks that it lacks. So a copy takes at least `SERVE_S` for each of them.
    """
    args = ["--dtype", "float32", "--deterministic", "--num-blocks", str(POOL_BLOCKS), "--warm-start-s", "0"]
    parts = Topology(num_workers=3, worker_args=args, additions=Additions(step_s=0.02, serve_s=SERVE_S))
    num_cut, num_blocks = 0, 0
    with Cluster(tmp_path / "fleet", model, parts) as cluster:
        asked = bodies(rng)
        expected = await cold(cluster, asked)
        clients = Clients(cluster, asked, expected)
        tasks = [asyncio.create_task(clients.run(rng.random())) for _ in range(NUM_CLIENTS // 2)]
        try:
            for number in range(NUM_KILLS):
                source, target = pair = rng.sample(cluster.workers, 2)
                offer, num_lacking = await asyncio.to_thread(lacking, source, target)
                copy = asyncio.create_task(asyncio.to_thread(copy_chains, offer, target))
                await asyncio.sleep(rng.uniform(0.0, 1.5) * num_lacking * SERVE_S)
                num_cut += not copy.done()
                victim = rng.choice(pair)
                await asyncio.to_thread(victim.kill)
                num_blocks += await copy
                victim.start()
                await asyncio.to_thread(cluster.wait_ready)
                assert clients.wrong == [], f"after {number + 1} kills"
        finally:
            clients.stopping = True
            await asyncio.gather(*tasks)
        print(f"{num_cut} copies cut short, {num_blocks} blocks in the others and {clients.num_answers} answers")
        assert clients.wrong == []
        assert num_cut > NUM_KILLS // 4
        assert num_blocks > 0
        fresh = [body | {"cache_salt": f"other {number}"} for number, body in enumerate(asked[:4])]
        assert not await check(cluster, fresh, expected[:4]), "the blocks are another tenant's"
        await asyncio.to_thread(cluster.assert_quiet, 20.0)
        await asyncio.sleep(INTEGRITY_S + 1.0)
        await check(cluster, asked[:3], expected[:3])
        assert all(worker.poll() is None for worker in cluster.workers)
        for worker in cluster.workers:
            assert "Traceback" not in worker.log.read_text(errors="replace"), worker.tail()


# --- disks ---------------------------------------------------------------------------------------------------------


def mount(*args: str | Path) -> None:
    if subprocess.run(["mount", *args], check=False).returncode:
        pytest.skip("mounting needs root")


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[None]:
    """A file system of this size, with all that is mounted over it later."""
    folder.mkdir(parents=True)
    mount("-t", "tmpfs", "-o", f"size={size},mode=0700", "tmpfs", folder)
    try:
        yield
    finally:
        while subprocess.run(["umount", "-l", folder], check=False, stderr=subprocess.DEVNULL).returncode == 0:
            pass


def make_read_only(folder: Path) -> None:
    """Put a read-only view over the folder: the file system itself has a file open for writing, the lock."""
    mount("--bind", folder, folder)
    mount("-o", "remount,bind,ro", folder)


def num_saved(cluster: Cluster) -> float:
    return sum(metrics(w.url).get("headstart_worker_kv_saved_bytes_total{disk}", 0.0) for w in cluster.workers)


async def ask_through_a_fault(
    cluster: Cluster, rng: random.Random, fault: Callable[[], object], *, loads: bool
) -> Counter[str]:
    """Fill pool and disk, cause the fault, and ask all twice again. Return the sources of the blocks at the end."""
    asked = bodies(rng)
    expected = await cold(cluster, asked)
    before = await check(cluster, asked, expected)
    before += await check(cluster, asked, expected)
    if loads:
        assert before["disk"] > 0, "the disk is in use"
    fault()
    during = await check(cluster, asked, expected)
    during += await check(cluster, asked, expected)
    await asyncio.to_thread(cluster.assert_quiet, 20.0)
    return during


async def test_a_disk_that_is_full(tmp_path: Path, model: Path, rng: random.Random) -> None:
    with (
        small_disk(tmp_path / "kv", "3M"),
        Cluster(tmp_path / "fleet", model, topology(tmp_path / "kv")) as cluster,
    ):
        await ask_through_a_fault(cluster, rng, lambda: None, loads=False)
        assert "tried again every" in cluster.workers[0].log.read_text()
        assert num_saved(cluster) > 0


async def test_a_disk_that_becomes_read_only(tmp_path: Path, model: Path, rng: random.Random) -> None:
    folder = tmp_path / "kv"
    with small_disk(folder, "64M"), Cluster(tmp_path / "fleet", model, topology(folder)) as cluster:
        during = await ask_through_a_fault(cluster, rng, lambda: make_read_only(folder), loads=True)
        assert during["disk"] > 0, "what is there can be read"


async def test_a_disk_that_vanishes(tmp_path: Path, model: Path, rng: random.Random) -> None:
    with Cluster(tmp_path / "fleet", model, topology(tmp_path / "kv")) as cluster:
        during = await ask_through_a_fault(cluster, rng, lambda: shutil.rmtree(tmp_path / "kv"), loads=True)
        assert during["disk"] == 0


async def test_a_file_that_is_overwritten(tmp_path: Path, model: Path, rng: random.Random) -> None:
    """Bytes of another disk, in every record: all of them misses."""

    def scribble() -> None:
        for path in (tmp_path / "kv").glob("*/*.blocks"):
            with path.open("r+b") as file:
                for offset in range(0, path.stat().st_size, 4000):
                    file.seek(offset)
                    file.write(rng.randbytes(16))

    with Cluster(tmp_path / "fleet", model, topology(tmp_path / "kv")) as cluster:
        await ask_through_a_fault(cluster, rng, scribble, loads=True)


async def test_a_disk_that_takes_200_ms_a_block(tmp_path: Path, model: Path, rng: random.Random) -> None:
    """Slower than computing: after the first loads that lag, workers compute."""
    with Cluster(tmp_path / "fleet", model, topology(tmp_path / "kv", disk_s=0.2)) as cluster:
        (worker,) = cluster.workers
        await ask_through_a_fault(cluster, rng, lambda: None, loads=False)
        samples = metrics(worker.url)
        print({name: value for name, value in samples.items() if "kv_loads" in name})
        assert sum(value for name, value in samples.items() if name.startswith("headstart_worker_kv_loads_total")) < 20

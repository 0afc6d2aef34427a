"""Fleets with workers of role "prefill", and requests of every kind that a split must not change."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, Final

from tests.faults.client import Outcome, ask_all, completion
from tests.faults.cluster import Cluster, Topology
from tests.faults.part import Worker, metrics
from tests.faults.worker_process import Additions

WORDS: Final = ["up", "down", "left", "right", "north", "south", "east", "west"]
SCHEMA: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "array", "maxItems": 3}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOL: Final[dict[str, Any]] = {"type": "function", "function": {"name": "book", "parameters": SCHEMA}}
SAMPLED: Final[dict[str, Any]] = {"temperature": 1.0, "seed": 11, "ignore_eos": False}
KINDS: Final[tuple[dict[str, Any], ...]] = (
    {},
    {"logprobs": 2, **SAMPLED},
    {"n": 2, "logprobs": 0, **SAMPLED},
    {"stream": False, "n": 2, **SAMPLED},
    {"stop": ["a", "e "], **SAMPLED},
    {"min_tokens": 6, "repetition_penalty": 1.3, "frequency_penalty": 0.5, **SAMPLED},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "trip", "schema": SCHEMA}}, **SAMPLED},
    {"messages": (), "logprobs": True, "top_logprobs": 1, **SAMPLED},
    {"messages": (), "stream": False, **SAMPLED},
    {"messages": (), "tools": [TOOL], "tool_choice": "required", "stream": False, **SAMPLED},
    {"messages": (), "tools": [TOOL], "tool_choice": "required", **SAMPLED},
)


def text(rng: random.Random) -> str:
    return " ".join(rng.choices(WORDS, k=800))


def bodies(rng: random.Random, *, times: int = 1) -> list[dict[str, Any]]:
    """Return requests with long prompts, `times` of each kind."""
    made = []
    for kind in KINDS * times:
        body = completion(text(rng), **{"max_tokens": 16, **kind})
        if "messages" in kind:
            body["messages"] = [{"role": "user", "content": body.pop("prompt")}]
        if body["stream"]:
            body["stream_options"] = {"include_usage": True}
        made.append(body)
    return made


class SplitCluster(Cluster):
    """Worker 0 and up to `num_prefill` have the role. The second gateway never splits."""

    def __init__(self, folder: Path, model: Path, *, num_prefill: int = 1, num_mixed: int = 1) -> None:
        self._num_prefill = num_prefill
        args = ["--dtype", "float32", "--deterministic"]
        num_workers = num_prefill + num_mixed
        topology = Topology(num_workers, 2, worker_args=args, additions=Additions(step_s=0.05))
        super().__init__(folder, model, topology)
        self.gateways[1].args += ["--policy", "least_load"]

    def worker(self, name: str, *args: Any) -> Worker:
        made = super().worker(name, *args)
        if int(name[1:]) < self._num_prefill:
            made.args += ["--role", "prefill"]
        return made

    @property
    def num_splits(self) -> float:
        return self.gateway.metrics().get("headstart_splits_total", 0.0)

    async def unsplit(self, asked: list[dict[str, Any]]) -> list[Outcome]:
        """Compute each answer at one worker of role "mixed", without any block of another's."""
        salted = [body | {"cache_salt": f"own {number}"} for number, body in enumerate(asked)]
        answers = await ask_all(self.gateways[1].url, salted)
        assert all(answer.ok for answer in answers), [answer.error for answer in answers]
        return answers

    def fetched_bytes(self) -> float:
        """Return what the workers of role "mixed" have fetched."""
        name = "headstart_worker_kv_loaded_bytes_total{peer}"
        return sum(metrics(worker.url).get(name, 0.0) for worker in self.workers[self._num_prefill :])

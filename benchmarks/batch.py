"""`headstart bench batch`: `headstart batch` in the order of prefixes and in that of a shuffled file.

The file asks several questions about each of many texts. The pool holds a part of the texts. Runs alternate at one
server, each with a cache salt of its own, so that none finds what another left.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import statistics
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import httpx

from benchmarks.replay_load.place import Place
from benchmarks.report import Figure, Report, option_parser, publish
from worker.common.command_line import module_command

BLOCK_SIZE: Final = 16
WORDS: Final = ("the", "of", "and", "to", "in", "for", "is", "on", "that", "by", "this", "with", "you", "it", "not")
ORDERS: Final = ("prefix", "file")
_SUMMARY: Final = re.compile(r"([\d.]+) lines/s, (\d+) prompt tokens, (\d+)% cached")


def write_requests(path: Path, model: str, options: argparse.Namespace, salt: str) -> None:
    """Write every question about every text, shuffled."""
    rng = random.Random(0)
    texts = [" ".join(rng.choices(WORDS, k=options.text_tokens)) for _ in range(options.texts)]
    lines: list[dict[str, Any]] = []
    for text in texts:
        for number in range(options.questions):
            prompt = f"{text}\nQuestion {number} of {options.questions}: what is it about?"
            body = {"model": model, "prompt": prompt, "max_tokens": options.max_tokens, "cache_salt": salt}
            lines.append({"custom_id": str(len(lines)), "method": "POST", "url": "/v1/completions", "body": body})
    rng.shuffle(lines)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def run_batch(url: str, requests: Path, order: str, options: argparse.Namespace) -> tuple[float, int]:
    """Return lines/s, and how many of 100 prompt tokens were cached."""
    answers = requests.with_suffix(f".{order}.answers")
    command = [*module_command("server.cli"), "batch", str(requests), str(answers), "--url", url, "--order", order]
    command += ["--concurrency", str(options.concurrency)]
    said = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    match = _SUMMARY.search(said)
    assert match is not None, said
    return float(match[1]), int(match[3])


def measure(options: argparse.Namespace) -> dict[str, list[tuple[float, int]]]:
    """Return what every run of each order gave."""
    pool_tokens = options.texts * options.text_tokens * options.pool_part
    worker_args = f"--num-blocks={1 + int(pool_tokens) // BLOCK_SIZE // options.workers}"
    place = Place("headstart", serve_args=["--num-workers", str(options.workers), f"--worker-args={worker_args}"])
    results: dict[str, list[tuple[float, int]]] = {order: [] for order in ORDERS}
    with tempfile.TemporaryDirectory() as folder, place.opened() as url:
        models: list[dict[str, Any]] = httpx.get(f"{url}/v1/models").json()["data"]
        for number in range(options.rounds):
            for order in ORDERS[:: 1 if number % 2 else -1]:
                salt = f"{number}-{order}"
                requests = Path(folder) / salt
                write_requests(requests, models[0]["id"], options, salt)
                results[order].append(run_batch(url, requests, order, options))
    return results


def main(argv: Sequence[str]) -> int:
    parser = option_parser("batch", "headstart batch in the order of prefixes, and in that of a shuffled file.")
    parser.add_argument("--texts", type=int, default=24, metavar="N", help="texts that are asked about (default 24)")
    parser.add_argument("--questions", type=int, default=8, metavar="N", help="about each text (default 8)")
    parser.add_argument("--text-tokens", type=int, default=480, metavar="N", help="of a text, about (default 480)")
    parser.add_argument("--max-tokens", type=int, default=4, metavar="N", help="of an answer (default 4)")
    parser.add_argument("--pool-part", type=float, default=0.25, metavar="X", help="texts in all pools (default 0.25)")
    parser.add_argument("--workers", type=int, default=2, metavar="N", help="(default 2)")
    parser.add_argument("--concurrency", type=int, default=8, metavar="N", help="open requests (default 8)")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="pairs of runs (default 3)")
    options = parser.parse_args(argv)
    results = measure(options)
    rates = {order: [rate for rate, _ in runs] for order, runs in results.items()}
    cached = {order: statistics.mean([share for _, share in runs]) / 100 for order, runs in results.items()}
    ratios = [one / other for one, other in zip(rates["prefix"], rates["file"], strict=True)]
    figures = [
        Figure("ratio_median", statistics.median(ratios), "x", "lines/s, prefix order over shuffled", ">= 1.5"),
        Figure("ratio_min", min(ratios), "x"),
        *(Figure(f"{order}_lines_per_s", statistics.median(rates[order]), "/s") for order in ORDERS),
        *(Figure(f"{order}_cached", cached[order], "", "part of the prompt tokens") for order in ORDERS),
    ]
    names = ("texts", "questions", "text_tokens", "max_tokens", "pool_part", "workers", "concurrency", "rounds")
    publish(Report("batch", figures, {name: getattr(options, name) for name in names}), options)
    return 0

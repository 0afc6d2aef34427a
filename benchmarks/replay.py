"""`headstart bench replay`: recorded conversations against any OpenAI-compatible server, or two of them side by side.

    headstart bench replay chats/ --url http://127.0.0.1:8000                   a folder, four conversations at a time
    headstart bench replay trace.jsonl.gz --url A --url B --rate 2 --html r.html    two servers, open loop, a report
    headstart bench replay chats/ --policies headstart round_robin              two policies, each on a fresh `serve`

A source is a file or a folder of conversations in OpenAI's message format (.json or .jsonl, .gz too). It may also be a
published trace that names blocks by id. Every server gets the same requests: recorded answers, not its own, are the
history of the next turn.
"""

from __future__ import annotations

import asyncio
import shlex
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from benchmarks.progress import Progress
from benchmarks.replay_load.client import AnswerError, ChatClient, Target, first_model
from benchmarks.replay_load.driver import Pace, drive, start_times
from benchmarks.replay_load.place import Place, StartError
from benchmarks.replay_load.plots import ttft_distribution
from benchmarks.replay_load.summary import Objective, Run, figures
from benchmarks.replay_load.workload import Conversation, Shape, WorkloadError, load
from benchmarks.report import Report, option_parser, publish
from server.cli.common import between


def options_of(argv: Sequence[str]) -> Namespace:
    parser = option_parser("replay", "Recorded conversations against any OpenAI-compatible server.")
    count = between(1)
    positive = between(0.001, kind=float)
    parser.add_argument("source", type=Path, help="a file or folder of conversations, or a trace")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--url", action="append", help="a server, without /v1; repeat it to compare")
    where.add_argument("--policies", nargs="+", metavar="POLICY", help="start `headstart serve` with each, in turn")
    parser.add_argument("--labels", nargs="+", help="what to call the servers (default: host and port)")
    parser.add_argument("--serve-args", default="", metavar="'ARGS'", help="further options of `headstart serve`")
    parser.add_argument("--model", help="default: the first that the server lists")
    parser.add_argument("--api-key", default="unused")
    parser.add_argument("--limit", type=count, metavar="N", help="conversations to take (default all)")
    parser.add_argument("--min-turns", type=count, default=1, metavar="N", help="leave shorter conversations out")
    parser.add_argument("--max-turns", type=count, metavar="N", help="of each conversation (default all)")
    parser.add_argument("--max-tokens", type=count, default=64, help="of each answer, at most (default 64)")
    parser.add_argument("--token-scale", type=float, default=1.0, help="of lengths in traces without text (default 1)")
    pace = parser.add_mutually_exclusive_group()
    pace.add_argument("--concurrency", type=count, default=4, help="closed loop: conversations at a time (4)")
    pace.add_argument("--rate", type=positive, metavar="R", help="open loop: conversations begun a second")
    pace.add_argument("--speed", type=positive, metavar="X", help="open loop: the recorded start times, X times faster")
    parser.add_argument("--max-think", type=float, default=0.0, metavar="S", help="cap of recorded pauses (default 0)")
    parser.add_argument("--timeout", type=positive, default=300.0, metavar="S", help="of one request (default 300)")
    parser.add_argument("--slo-ttft", type=float, default=2.0, metavar="S", help="for goodput (default 2)")
    parser.add_argument("--slo-token", type=float, default=0.2, metavar="S", help="a token, for goodput (default 0.2)")
    parser.add_argument("--seed", type=int, default=0, help="of the arrival times of --rate")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a report with plots")
    options = parser.parse_args(argv)
    num_targets = len(options.url or options.policies)
    if options.labels and len(options.labels) != num_targets:
        parser.error(f"--labels: {len(options.labels)} labels for {num_targets} servers")
    return options


def main(argv: Sequence[str]) -> int:
    options = options_of(argv)
    pace = Pace(options.concurrency, options.rate, options.speed, options.max_think, options.seed)
    objective = Objective(options.slo_ttft, options.slo_token)
    try:
        conversations = load(options.source, _shape(options))
        start_times(conversations, pace)
        runs = [_run(options, place, conversations, pace) for place in _places(options)]
    except (WorkloadError, AnswerError, StartError, ValueError, OSError) as error:
        print(f"headstart bench replay: {error}", file=sys.stderr)
        return 2
    facts = {
        "source": options.source.name,
        "conversations": len(conversations),
        "turns": sum(len(conversation.turns) for conversation in conversations),
        **_pace_facts(pace),
        "max_tokens": options.max_tokens,
    }
    report = Report("replay", figures(runs, objective), facts)
    publish(report, options, lambda axes: _draw(axes, runs))
    if options.html is not None:
        _write_page(options.html, runs, report, command_of(argv, options.api_key))
        print(f"\nreport: {options.html}", file=sys.stderr)
    return 1 if any(run.errors for run in runs) else 0


def _shape(options: Namespace) -> Shape:
    return Shape(options.limit, options.min_turns, options.max_turns, options.token_scale)


def _run(options: Namespace, place: Place, conversations: Sequence[Conversation], pace: Pace) -> Run:
    with place.opened() as url:
        return asyncio.run(_drive(options, place.label, url, conversations, pace))


async def _drive(options: Namespace, label: str, url: str, conversations: Sequence[Conversation], pace: Pace) -> Run:
    model = options.model or await first_model(url, options.api_key)
    num_turns = sum(len(conversation.turns) for conversation in conversations)
    progress = Progress(num_turns, label)
    target = Target(label, url, model, options.api_key)
    async with ChatClient(target, max_tokens=options.max_tokens, timeout_s=options.timeout) as client:
        outcomes = await drive(client, conversations, pace, progress.advance)
        return Run(label, outcomes, num_turns, client.elapsed_s())


def _places(options: Namespace) -> list[Place]:
    if options.url:
        urls = [url.rstrip("/").removesuffix("/v1") for url in options.url]
        labels = options.labels or [url.partition("://")[2] for url in urls]
        return [Place(label, url) for label, url in zip(labels, urls, strict=True)]
    shared = shlex.split(options.serve_args)
    pairs = zip(options.labels or options.policies, options.policies, strict=True)
    return [Place(label, None, [*shared, "--policy", policy]) for label, policy in pairs]


def _pace_facts(pace: Pace) -> dict[str, object]:
    if pace.speed is not None:
        return {"loop": "open", "speed": pace.speed}
    if pace.rate_per_s is not None:
        return {"loop": "open", "rate_per_s": pace.rate_per_s, "seed": pace.seed}
    return {"loop": "closed", "concurrency": pace.concurrency}


def _draw(axes: object, runs: Sequence[Run]) -> None:
    ttft_distribution(axes, runs)
    axes.legend()  # type: ignore[attr-defined]


def command_of(argv: Sequence[str], key: str) -> str:
    """Return the command without its key: a page is passed on."""
    return shlex.join(["headstart", "bench", "replay", *(word.replace(key, "KEY") if key else word for word in argv)])


def _write_page(path: Path, runs: Sequence[Run], report: Report, command: str) -> None:
    from benchmarks.replay_load.page import render
    from benchmarks.report import environment

    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(render(runs, report.figures, environment(report), command), encoding="utf-8")

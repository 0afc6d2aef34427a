"""`headstart bench engines`: what an adapter adds in front of another engine, and routers head to head.

    headstart bench engines                                     processor time over one vLLM, and without Headstart
    headstart bench engines --real                              first tokens and gaps of the same
    headstart bench engines --head-to-head chats.jsonl.gz       routers over the same two vLLM engines

They start vLLM (`--vllm`: the folder of its environment, as tools/install_vllm.py makes it).
"""

from __future__ import annotations

import asyncio
import tempfile
from argparse import Namespace
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from benchmarks.dev.engines_load import head_to_head, real, routers, text, vllm
from benchmarks.dev.gateway_load.processes import make_bundle
from benchmarks.replay_load.workload import Shape, load
from benchmarks.report import Report, option_parser, publish


def main(argv: Sequence[str]) -> int:
    options = _options(argv)
    publish(_one_engine(options) if options.head_to_head is None else _head_to_head(options), options)
    return 0


def _options(argv: Sequence[str]) -> Namespace:
    parser = option_parser("engines", "What an adapter adds in front of another engine, and routers head to head.")
    parser.add_argument("--rounds", type=int, default=5, help="in alternation (default 5)")
    parser.add_argument("--samples", type=int, default=200, help="of each latency in each round (default 200)")
    parser.add_argument("--streams", type=int, default=64, help="at once (default 64)")
    parser.add_argument("--vllm", type=Path, default=Path(".venv-vllm"), metavar="DIR", help="vLLM's environment")
    parser.add_argument("--real", action="store_true", help="first tokens and gaps, for 1, 8 and 32 streams")
    parser.add_argument("--model-size", type=int, nargs=2, default=(256, 4), metavar=("HIDDEN", "LAYERS"))
    fleet = parser.add_argument_group("head to head")
    fleet.add_argument("--head-to-head", type=Path, metavar="SOURCE", help="the recorded conversations to play")
    fleet.add_argument("--routers", type=Path, default=Path(".venv-routers"), metavar="DIR", help="their environment")
    fleet.add_argument("--only", nargs="+", metavar="ROUTER", help="only these routers")
    fleet.add_argument("--conversations", type=int, default=26, help="to play in a round (default 26)")
    fleet.add_argument("--concurrency", type=int, default=6, help="conversations at a time (default 6)")
    fleet.add_argument("--max-tokens", type=int, default=8, help="of each answer (default 8)")
    fleet.add_argument("--pool", type=float, default=0.5, help="blocks of both pools, per block of the workload (0.5)")
    fleet.add_argument(
        "--engine-url", action="append", help="an engine that runs already and binds its event socket; repeat it"
    )
    return parser.parse_args(argv)


def _engines(stack: ExitStack, options: Namespace, count: int, num_blocks: int | None) -> list[vllm.Engine]:
    """Return those that run already, or start `count` of them."""
    if options.engine_url:
        return [vllm.running(url) for url in options.engine_url]
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    model = folder / "model"
    model.mkdir()
    vllm.write_model(model, *options.model_size)
    return stack.enter_context(vllm.engines(options.vllm, model, folder, count=count, num_blocks=num_blocks))


def _one_engine(options: Namespace) -> Report:
    if options.engine_url and not options.real:
        raise SystemExit("the processor time is that of an engine that it starts itself: leave out --engine-url")
    with ExitStack() as stack:
        engines = _engines(stack, options, 1, None)
        if not options.real:
            sizes = {"samples": options.samples, "streams": options.streams}
            figures = asyncio.run(text.measure(engines[0], rounds=options.rounds, **sizes))
        else:
            figures = asyncio.run(real.measure(engines[0], rounds=options.rounds))
    return Report("engines", figures, {"rounds": options.rounds, "model": _model(options)})


def _model(options: Namespace) -> str:
    hidden_size, num_layers = options.model_size
    return f"random Llama, {num_layers} layers of {hidden_size}"


def _head_to_head(options: Namespace) -> Report:
    conversations = [head_to_head.as_text(each) for each in load(options.head_to_head, Shape(options.conversations))]
    num_requests = sum(len(conversation.turns) for conversation in conversations)
    known = routers.routers(options.routers / "bin")
    chosen = [router for router in known if options.only is None or router.name in options.only]
    workload_blocks = head_to_head.num_blocks(conversations, make_bundle()[1])
    pool_blocks = round(options.pool * workload_blocks / 2)
    with ExitStack() as stack:
        engines = _engines(stack, options, 2, pool_blocks + 1)  # vLLM keeps one for itself
        results = asyncio.run(
            head_to_head.compare(
                chosen,
                engines,
                conversations,
                rounds=options.rounds,
                concurrency=options.concurrency,
                max_tokens=options.max_tokens,
            )
        )
    facts = {
        "model": _model(options),
        "requests": num_requests,
        "rounds": options.rounds,
        "concurrency": options.concurrency,
        "workload_blocks": workload_blocks,
        "pool_blocks": f"2 x {pool_blocks}",
        "cache_aware": routers.BALANCE,
    }
    return Report("engines", head_to_head.figures(results), facts)

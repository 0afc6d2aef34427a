"""`headstart bench steps`: steps bounded by time (`--max-step-ms`), in the worker's own engine and in simulation.

engine       decodes that go on while prompts are prefilled: processor time of the steps that have both, without an
             objective and with one of three times a step of the decodes
simulation   recorded conversations on workers in steps of tokens: times between tokens and to the first one, for
             each objective and without
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator

from benchmarks.dev.simulation.fleet import ReplaySettings
from benchmarks.dev.simulation.step_replay import StepReplay, TokenTimes
from benchmarks.dev.simulation.traces import CONVERSATION, DATA, ConversationTrace
from benchmarks.report import Figure, Report, option_parser, percentile, publish
from server.router.policies import POLICIES


def main(argv: list[str]) -> int:
    options = options_of(argv)
    figures = [*engine_figures(options), *simulation_figures(options)]
    names = ["decodes", "prompt_tokens", "prompts", "dtype", "times", "workers", "load", "cache", "half", "seed"]
    publish(Report("steps", figures, {name: getattr(options, name) for name in names}), options)
    return 0


def options_of(argv: list[str]) -> Namespace:
    parser = option_parser("steps", "Steps bounded by time.")
    parser.add_argument("--only", choices=("engine", "simulation"), help="one of the two parts")
    parser.add_argument("--model", default="", help="as of `headstart worker` (default: the model that is installed)")
    parser.add_argument("--dtype", default="float32", help="as of `headstart worker` (default float32)")
    parser.add_argument("--decodes", type=int, default=4, help="sequences that decode (default 4)")
    parser.add_argument("--prompt-tokens", type=int, default=1024, help="of each prompt (default 1024)")
    parser.add_argument("--prompts", type=int, default=8, help="measured, one after another (default 8)")
    parser.add_argument("--times", type=float, default=3.0, help="the objective over a step of the decodes (default 3)")
    parser.add_argument(
        "--objectives", type=float, nargs="+", default=[50.0, 75.0, 100.0, 200.0], metavar="MS", help="of simulations"
    )
    parser.add_argument("--workers", type=int, default=8, help="simulated (default 8)")
    parser.add_argument("--load", type=float, default=0.8, help="input tokens over what the fleet can prefill")
    parser.add_argument("--cache", type=float, default=0.25, help="blocks of the fleet over distinct blocks")
    parser.add_argument("--half", type=int, choices=(0, 1), help="only the even or the odd conversations")
    parser.add_argument("--seed", type=int, default=0, help="of the arrivals")
    return parser.parse_args(argv)


def engine_figures(options: Namespace) -> Iterator[Figure]:
    """Yield the processor time of steps with decodes and prefill, with an objective and without."""
    if options.only == "simulation":
        return
    from benchmarks.dev.steps_load.engine import StepBench  # imports torch

    bench = StepBench(options.model, options.dtype, options.decodes, options.prompt_tokens)
    decode_s = bench.decode_s(60)
    objective_s = options.times * decode_s
    yield Figure("decode_step_cpu_s", decode_s, "s", f"{options.decodes} decodes, the median")
    yield Figure("objective_s", objective_s, "s", f"{options.times:g} times that")
    for name, max_step_s in (("free", None), ("bounded", objective_s)):
        found = bench.mixed(max_step_s, options.prompts)
        times = found.cpu_s
        within = sum(cpu_s <= objective_s for cpu_s in times) / len(times)
        note = f"{len(times)} steps with prefill"
        yield Figure(f"{name}.step_cpu_p50_s", percentile(times, 0.5), "s", note)
        yield Figure(f"{name}.step_cpu_p99_s", percentile(times, 0.99), "s")
        yield Figure(f"{name}.within", within, "", "steps within the objective", ">= 0.99" if max_step_s else "")
        yield Figure(f"{name}.prefill_tokens_per_cpu_s", found.num_prefill_tokens / sum(times), "1/s")
        yield Figure(f"{name}.prompt_cpu_s", sum(found.prompt_cpu_s) / len(found.prompt_cpu_s), "s", "to a first token")


def simulation_figures(options: Namespace) -> Iterator[Figure]:
    """Yield the curve over the objectives."""
    if options.only == "engine":
        return
    trace = ConversationTrace(DATA / CONVERSATION, options.half)
    free = simulate(trace, options, None)
    yield from _curve("free", free, free, None)
    for objective_ms in options.objectives:
        yield from _curve(
            f"objective_{objective_ms:g}ms", simulate(trace, options, objective_ms / 1000), free, objective_ms / 1000
        )


def simulate(trace: ConversationTrace, options: Namespace, max_step_s: float | None) -> TokenTimes:
    workload = trace.workload(num_workers=options.workers, load=options.load, seed=options.seed)
    settings = ReplaySettings(
        options.workers, options.cache, seed=options.seed, shared_engine=True, max_step_s=max_step_s
    )
    return StepReplay(workload, POLICIES["headstart"], settings).token_times()


def _curve(name: str, found: TokenTimes, free: TokenTimes, max_step_s: float | None) -> Iterator[Figure]:
    goal = "" if max_step_s is None else f"<= {max_step_s:g}"
    ratio = found.outcome.ttft_mean_s / free.outcome.ttft_mean_s
    yield Figure(f"{name}.itl_p50_s", found.itl_p50_s, "s", "between two tokens of a request")
    yield Figure(f"{name}.itl_p99_s", found.itl_p99_s, "s", goal=goal)
    yield Figure(f"{name}.within", found.within, "", "requests within 2 s and 50 ms a token")
    yield Figure(f"{name}.ttft_mean_s", found.outcome.ttft_mean_s, "s")
    yield Figure(f"{name}.ttft_p99_s", found.outcome.ttft_p99_s, "s")
    if max_step_s is not None:
        yield Figure(f"{name}.ttft_over_free", ratio, "x", goal="<= 1.3")

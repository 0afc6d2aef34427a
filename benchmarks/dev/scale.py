"""`headstart bench scale`: a fleet that follows `headstart_workers_needed` through a day, in simulated time.

The day has copies of the recorded conversations, few at night and many by day: 2 to 20 workers are needed. It is
compressed to 144 minutes. So load rises and falls ten times as fast as in 24 hours. Every 15 s a scaler sets the
fleet's size to the number. A new worker serves 30 s later, and the highest ordinals leave.

The oracle has the smallest fleet of each minute that meets the objective (`scale_load.oracle`). A second part shrinks a
fleet of 8 to 6 under steady load, with and without the hand-over of blocks.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import Any, Final

from benchmarks.dev.scale_load.day import day_of
from benchmarks.dev.scale_load.elastic import MINUTE_S, ElasticReplay, Minute
from benchmarks.dev.scale_load.oracle import oracle
from benchmarks.dev.simulation.fleet import ReplaySettings
from benchmarks.dev.simulation.traces import CONVERSATION, DATA, ConversationTrace, Workload
from benchmarks.report import Figure, Report, option_parser, publish

RECORDED_S: Final = 2400.0
LEAST: Final = 2
MOST: Final = 24
NUM_BEFORE: Final = 8
NUM_AFTER: Final = 6
COUNTED_MINUTES: Final = 4
"""Minutes after the fleet has shrunk in which hits are counted."""
STEADY_PEAK: Final = 1.2
STEADY_RATE: Final = 8000.0


def options_of(argv: list[str]) -> Namespace:
    parser = option_parser("scale", __doc__ or "")
    parser.add_argument("--minutes", type=int, default=144, help="of the day (default 144)")
    parser.add_argument("--peak", type=float, default=12.0, help="times the recorded traffic by day (default 12)")
    parser.add_argument("--objective", type=float, default=3.0, help="for p90 of queue and prefill, in s (default 3)")
    parser.add_argument("--rate", type=float, default=24_000.0, help="prefill tokens per second (default 24000)")
    parser.add_argument("--blocks", type=int, default=4000, help="of each worker's pool, 512 tokens each")
    parser.add_argument("--gateways", type=int, default=1, help="each with a number of its own (default 1)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--parts", nargs="+", choices=("day", "handover"), default=["day", "handover"])
    parser.add_argument("--handover-minutes", type=int, default=16, help="the fleet shrinks 4 before (default 16)")
    parser.add_argument(
        "--handover-blocks", type=int, default=16_000, help="of each worker's pool in that part (default 16000)"
    )
    return parser.parse_args(argv)


def settings_of(options: Namespace, num_workers: int, worker_blocks: int) -> ReplaySettings:
    num_blocks = float(num_workers * worker_blocks)  # a day counts as one distinct block
    num_gateways, seed = options.gateways, options.seed
    return ReplaySettings(num_workers, num_blocks, num_gateways=num_gateways, seed=seed, shared_engine=True)


def recorded() -> Workload:
    trace = ConversationTrace(DATA / CONVERSATION)
    as_fast = trace.workload(num_workers=1, load=1.0, seed=0)
    num_tokens = sum(session.requests[0].num_prompt_tokens for session in as_fast.sessions)
    return trace.workload(num_workers=1, load=num_tokens / RECORDED_S / trace.PREFILL_TOKENS_PER_S, seed=0)


def measure_day(options: Namespace) -> tuple[list[Minute], list[int]]:
    """Return the minutes of the scaled fleet, and the oracle's workers."""
    day = day_of(
        recorded(),
        duration_s=options.minutes * MINUTE_S,
        peak=options.peak,
        prefill_tokens_per_s=options.rate,
        seed=options.seed,
    )
    settings = settings_of(options, LEAST, options.blocks)
    replay = ElasticReplay(day, settings, options.objective, lambda _, needed: min(MOST, max(LEAST, needed)))
    replay.run()
    return replay.minutes(), oracle(replay.prefills(), options.objective, LEAST)


def measure_handover(options: Namespace) -> dict[str, float]:
    """Return the share of cached tokens in the last minutes, for a fleet that stays and for two that shrink."""
    num_minutes = options.handover_minutes
    load = day_of(
        recorded(),
        duration_s=num_minutes * MINUTE_S,
        peak=STEADY_PEAK,
        prefill_tokens_per_s=STEADY_RATE,
        seed=options.seed,
        rate=lambda _: 1.0,
    )
    after = num_minutes - COUNTED_MINUTES

    def shrinks(now_s: float, _: int) -> int:
        return NUM_BEFORE if now_s < after * MINUTE_S else NUM_AFTER

    sizes: dict[str, tuple[Callable[[float, int], int], bool]] = {
        "stays": (lambda *_: NUM_BEFORE, True),
        "without": (shrinks, False),
        "with": (shrinks, True),
    }
    hits, settings = {}, settings_of(options, NUM_BEFORE, options.handover_blocks)
    for name, (size, hands_over) in sizes.items():
        replay = ElasticReplay(load, settings, options.objective, size, hands_over=hands_over)
        replay.run()
        minutes = replay.minutes()[after:]
        hits[name] = sum(each.num_cached_tokens for each in minutes) / sum(each.num_prompt_tokens for each in minutes)
    return hits


def day_figures(minutes: Sequence[Minute], best: Sequence[int], objective_s: float) -> list[Figure]:
    num_met = sum(minute.p90_s <= objective_s for minute in minutes)
    ours_h = sum(minute.num_workers for minute in minutes) * MINUTE_S / 3600
    oracle_h = sum(best) * MINUTE_S / 3600
    num_prompt_tokens = sum(minute.num_prompt_tokens for minute in minutes)
    return [
        Figure("minutes", len(minutes)),
        Figure("met_share", num_met / len(minutes)),
        Figure("worker_hours", ours_h),
        Figure("oracle_worker_hours", oracle_h),
        Figure("over_oracle", ours_h / oracle_h),
        Figure("most_workers", max(minute.num_workers for minute in minutes)),
        Figure("hit", sum(minute.num_cached_tokens for minute in minutes) / num_prompt_tokens),
    ]


def draw(axes: Any, minutes: Sequence[Minute], best: Sequence[int], objective_s: float) -> None:
    axes.step(range(len(minutes)), [minute.num_workers for minute in minutes], label="workers")
    axes.step(range(len(best)), best, label="oracle")
    late = [at for at, minute in enumerate(minutes) if minute.p90_s > objective_s]
    axes.plot(late, [minutes[at].num_workers for at in late], "x", label="objective missed")
    axes.set_xlabel("minute")
    axes.legend()


def main(argv: list[str]) -> int:
    options = options_of(argv)
    figures: list[Figure] = []
    minutes: list[Minute] = []
    best: list[int] = []
    if "day" in options.parts:
        minutes, best = measure_day(options)
        figures += day_figures(minutes, best, options.objective)
        for at, (minute, size) in enumerate(zip(minutes, best, strict=True)):
            if at % 12 == 0 or minute.p90_s > options.objective:
                print(f"minute {at:4}  workers {minute.num_workers:5.1f}  oracle {size:3}  p90 {minute.p90_s:6.2f} s")
    if "handover" in options.parts:
        hits = measure_handover(options)
        lost = hits["stays"] - hits["without"]
        kept = (hits["with"] - hits["without"]) / lost if lost > 0.0 else 1.0
        figures += [Figure(f"handover.{name}.hit", hit) for name, hit in hits.items()]
        figures.append(Figure("handover.kept", kept))
    env = {name: getattr(options, name) for name in ("minutes", "peak", "objective", "rate", "gateways", "seed")}
    publish(Report("scale", figures, env), options, lambda axes: draw(axes, minutes, best, options.objective))
    return 0

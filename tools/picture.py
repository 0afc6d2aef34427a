"""Write README's moving picture: coding agents on four workers, by round robin and by Headstart, in simulated time.

python -m tools.picture   rewrites docs/images/conversations.svg, and its figures in benchmarks/results/agents.json

A bar is a prefill, as long as it takes; its colour is the agent's session.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.dev.route_load.runs import DATA
from benchmarks.dev.simulation.engine import Job, SimulatedWorker
from benchmarks.dev.simulation.fleet import ReplaySettings
from benchmarks.dev.simulation.replay import Replay
from benchmarks.dev.simulation.traces import SWE_AGENT, SweAgentTrace, Workload
from server.router.policies import POLICIES

ROOT: Final = Path(__file__).parents[1]
FILE: Final = ROOT / "docs" / "images" / "conversations.svg"
FIGURES: Final = ROOT / "benchmarks" / "results" / "agents.json"
NUM_WORKERS: Final = 4
POLICIES_SHOWN: Final = {"round_robin": "Round robin", "headstart": "Headstart"}
BEGIN_S: Final = 60.0
SHOWN_S: Final = 90.0
"""The part of the replay that is shown."""
PLAY_S: Final = 15
NUM_FRAMES: Final = 30
"""Values of a counter while the picture plays."""
WIDTH: Final = 960
LEFT: Final = 90
RIGHT: Final = 190
LANE: Final = 24
PANEL: Final = NUM_WORKERS * LANE + 52


@dataclass(slots=True)
class Prefill:
    worker: str
    session: int
    begin_s: float
    num_tokens: int
    num_cached: int
    end_s: float = 0.0
    ttft_s: float = 0.0


class Recording(Replay):
    """A replay that keeps its prefills."""

    def __init__(self, workload: Workload, policy: str) -> None:
        super().__init__(workload, POLICIES[policy], ReplaySettings(num_workers=NUM_WORKERS, cache_share=1.5))
        self.prefills: dict[int, Prefill] = {}
        self._numbers = {session: number for number, session in enumerate(workload.sessions)}

    def _begun(self, worker: SimulatedWorker, job: Job) -> None:
        super()._begun(worker, job)
        self.prefills[job.request.number] = Prefill(
            worker.member.worker_id,
            self._numbers[job.session],
            self._now_s,
            job.request.num_prompt_tokens,
            job.num_cached_tokens,
        )

    def _prefilled(self, worker: SimulatedWorker, job: Job) -> None:
        prefill = self.prefills[job.request.number]
        prefill.end_s, prefill.ttft_s = self._now_s, self._now_s - job.arrival_s
        super()._prefilled(worker, job)


def record(policy: str) -> list[Prefill]:
    workload = SweAgentTrace(DATA / SWE_AGENT).workload(num_workers=NUM_WORKERS, load=1.0, seed=1)
    replay = Recording(workload, policy)
    replay.run()
    shown = [each for each in replay.prefills.values() if each.end_s >= BEGIN_S and each.begin_s < BEGIN_S + SHOWN_S]
    return sorted(shown, key=lambda each: each.end_s)


def at(time_s: float) -> float:
    """Return the x of a time, within the lanes."""
    share = min(max((time_s - BEGIN_S) / SHOWN_S, 0.0), 1.0)
    return LEFT + share * (WIDTH - LEFT - RIGHT)


def counter(values: list[str], x: int, y: int) -> list[str]:
    """Draw a text that changes while the picture plays, and stays at its last value."""
    lines = []
    for number, value in enumerate(values):
        first, after = number / len(values), (number + 1) / len(values)
        times = f"0;{first:.3f};{min(after, 0.999):.3f};1"
        shown = "0;1;1;1" if number == len(values) - 1 else "0;1;0;0"
        if not number:
            times, shown = f"0;{after:.3f};1", "1;0;0"
        lines.append(
            f'<text x="{x}" y="{y}" class="n" opacity="{int(number == len(values) - 1)}">{value}<animate '
            f'attributeName="opacity" calcMode="discrete" dur="{PLAY_S + 3}s" repeatCount="indefinite" '
            f'keyTimes="{times}" values="{shown}"/></text>'
        )
    return lines


def panel(title: str, prefills: list[Prefill], top: int) -> list[str]:
    lines = [f'<text x="{LEFT}" y="{top + 18}" class="t">{title}</text>']
    names = sorted({each.worker for each in prefills})
    for number, name in enumerate(names):
        y = top + 30 + number * LANE
        lines.append(f'<text x="{LEFT - 10}" y="{y + 15}" class="l">{name.replace("-0", " ")}</text>')
        lines.append(f'<rect x="{LEFT}" y="{y}" width="{WIDTH - LEFT - RIGHT}" height="{LANE - 4}" class="lane"/>')
    lines.append('<g clip-path="url(#played)">')
    for each in prefills:
        y, x = top + 30 + names.index(each.worker) * LANE, at(each.begin_s)
        width, hue = max(at(each.end_s) - x, 1.0), each.session * 137 % 360
        lines.append(f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{LANE - 4}" fill="hsl({hue} 65% 55%)"/>')
    lines.append("</g>")
    shares, times = [], []
    for number in range(1, NUM_FRAMES + 1):
        done = [each for each in prefills if each.end_s <= BEGIN_S + SHOWN_S * number / NUM_FRAMES]
        total = sum(each.num_tokens for each in done)
        shares.append(f"{sum(each.num_cached for each in done) / total:.0%}" if total else "-")
        times.append(f"{sum(each.ttft_s for each in done) / len(done):.1f} s" if done else "-")
    x = WIDTH - RIGHT + 20
    lines += [f'<text x="{x}" y="{top + 46}" class="s">tokens from the cache</text>', *counter(shares, x, top + 68)]
    lines += [f'<text x="{x}" y="{top + 92}" class="s">mean time to first token</text>', *counter(times, x, top + 114)]
    return lines


def figures(recorded: dict[str, list[Prefill]]) -> dict[str, float]:
    """Return what the counters of the picture show at its end."""
    found = {}
    for policy, prefills in recorded.items():
        done = [each for each in prefills if each.end_s <= BEGIN_S + SHOWN_S]
        found[f"{policy}.hit"] = sum(each.num_cached for each in done) / sum(each.num_tokens for each in done)
        found[f"{policy}.ttft_mean_s"] = sum(each.ttft_s for each in done) / len(done)
    return found


def picture(recorded: dict[str, list[Prefill]]) -> str:
    height = 2 * PANEL + 44
    moving: dict[str, Any] = {"w": WIDTH - LEFT - RIGHT, "end": PLAY_S / (PLAY_S + 3)}
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="system-ui, sans-serif">',
        "<title>The same coding agents on four workers, by round robin and by Headstart</title>",
        "<style>.t{font-size:15px;font-weight:600;fill:#1b1f24}.l{font-size:12px;fill:#57606a;text-anchor:end}"
        ".s{font-size:12px;fill:#57606a}.n{font-size:20px;font-weight:600;fill:#1b1f24}.lane{fill:#eef1f4}</style>",
        f'<rect width="{WIDTH}" height="{height}" rx="8" fill="#fff"/>',
        f'<clipPath id="played"><rect x="{LEFT}" y="0" height="{height}" width="{moving["w"]}">'
        f'<animate attributeName="width" dur="{PLAY_S + 3}s" repeatCount="indefinite" '
        f'keyTimes="0;{moving["end"]:.3f};1" values="0;{moving["w"]};{moving["w"]}"/></rect></clipPath>',
    ]
    for number, (policy, title) in enumerate(POLICIES_SHOWN.items()):
        lines += panel(title, recorded[policy], 8 + number * PANEL)
    note = f"{SHOWN_S:.0f} s of recorded coding agents, simulated. A bar is a prefill, its colour the agent's session."
    lines += [f'<text x="{LEFT}" y="{height - 14}" class="s">{note}</text>', "</svg>"]
    return "\n".join(lines) + "\n"


def main() -> None:
    recorded = {policy: record(policy) for policy in POLICIES_SHOWN}
    result = {"bench": "picture", "command": "python -m tools.picture", "figures": figures(recorded), "missed": {}}
    FILE.write_text(picture(recorded), encoding="utf-8")
    FIGURES.write_text(json.dumps(result) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

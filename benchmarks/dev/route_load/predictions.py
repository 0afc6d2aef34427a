"""Figures of what the router predicted for every request: room, prices, and moves away from holders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from benchmarks.dev.simulation.outcomes import NUM_DECILES, Decile, Outcome, Predictions, merged
from benchmarks.report import Figure

MAX_ERROR_S: Final = 0.2
MAX_ERROR_SHARE: Final = 0.25
MAX_UNWAITED_S: Final = 0.1
MAX_LOSING_SHARE: Final = 0.05
MAX_PRICE_CHANGE: Final = 0.1
LONG: Final = "_x8"
"""The cell of the same name without it has the recorded answers."""


def prediction_figures(outcomes: Mapping[str, Sequence[Outcome]]) -> list[Figure]:
    """Return figures of `headstart` by cell, of all spreadings together."""
    by_cell = {cell: merged(outcome.predictions for outcome in runs) for cell, runs in outcomes.items()}
    listed: list[Figure] = []
    for cell, predictions in by_cell.items():
        used = [decile for decile in predictions.deciles if decile.num_requests]
        error_s = max(((d.predicted_s - d.actual_s) / d.num_requests for d in used), key=abs)
        missed, moves = sum(not is_near(decile) for decile in used), predictions.moves
        losing = moves.num_losing / moves.num_requests if moves.num_requests else 0.0
        what = (
            f"of {moves.num_requests}: {moves.saved_queue_s:.4g} s of queue for {moves.added_prefill_s:.4g} of prefill"
        )
        listed += [
            Figure(f"headstart.{cell}.room_error_s", error_s, "s", "predicted less actual wait, in the worst decile"),
            Figure(f"headstart.{cell}.room_deciles_missed", missed, "", f"of {len(used)}", goal="0"),
            Figure(f"headstart.{cell}.moves_losing", losing, "", what, goal=f"<= {MAX_LOSING_SHARE}"),
        ]
        if LONG in cell and (short := by_cell.get(cell.replace(LONG, ""))) is not None:
            change = price_change(short, predictions)
            goal = f"within {MAX_PRICE_CHANGE}"
            listed.append(Figure(f"headstart.{cell}.price_change", change, "", "with longer answers", goal=goal))
    return listed


def is_near(decile: Decile) -> bool:
    """Return True if the predicted wait for room is near the actual one, in the mean over the decile."""
    num = decile.num_requests
    predicted_s, actual_s = decile.predicted_s / num, decile.actual_s / num
    if not actual_s:
        return predicted_s <= MAX_UNWAITED_S
    return abs(predicted_s - actual_s) <= max(MAX_ERROR_S, MAX_ERROR_SHARE * actual_s)


def price_change(short: Predictions, long: Predictions) -> float:
    """Return the growth of the price of evictions, over the prompt's prefill, at the same fill of the pool."""
    before = after = 0.0
    for one, other in zip(short.deciles, long.deciles, strict=True):
        if weight := min(one.num_requests, other.num_requests):
            before += weight * one.price / one.num_requests
            after += weight * other.price / other.num_requests
    return after / before - 1.0 if before else 0.0


def room_table(outcomes: Mapping[str, Sequence[Outcome]]) -> str:
    """Return a table of the wait for room by decile of the pool's fill, where any was predicted or came."""
    lines = [
        "wait for room, mean s; those that did not wait; price of evictions over the prompt's prefill",
        f"{'cell':28}{'fill':>10}{'requests':>10}{'predicted':>11}{'actual':>9}{'unwaited':>10}{'price':>8}  near",
    ]
    for cell, runs in outcomes.items():
        for at, decile in enumerate(merged(outcome.predictions for outcome in runs).deciles):
            num, unwaited = decile.num_requests, max(1, decile.num_unwaited)
            if not num or not (decile.predicted_s or decile.actual_s or at >= NUM_DECILES - 2):
                continue
            fill = f"{10 * at}-{10 * at + 10} %" if at + 1 < NUM_DECILES else "> 100 %"
            lines.append(
                f"{cell:28}{fill:>10}{num:10}{decile.predicted_s / num:11.3f}{decile.actual_s / num:9.3f}"
                f"{decile.predicted_unwaited_s / unwaited:10.3f}{decile.price / num:8.3f}"
                f"  {'yes' if is_near(decile) else 'NO'}"
            )
    return "\n".join(lines)

"""`python -m benchmarks.gpu --report DIR`: every part in a process of its own, and its log in DIR as it ends.

Exit code 0 when every part is ok, 1 when one is not, 2 for wrong options.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from benchmarks.gpu import parts as plan
from benchmarks.gpu.parts import Part
from benchmarks.gpu.report import Outcome, Summary

ROOT: Final = Path(__file__).parents[2]
COMMIT: Final = ROOT / "packages" / "commit.txt"
"""In a bundle."""


def environment(mode: str, device: str, model: str) -> dict[str, str]:
    """Return the variables of the parts: our sources first, no plugin that happens to be installed, no network."""
    found = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "HF_HUB_OFFLINE": "1", "GPU_CHECK_MODEL": model}
    found["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    found.pop("TRITON_INTERPRET", None)
    if mode == "interpreter":
        found["TRITON_INTERPRET"] = "1"
        found.setdefault("OMP_NUM_THREADS", "1")
    if index := device.partition(":")[2]:
        found["CUDA_VISIBLE_DEVICES"] = index
    return found


def run(part: Part, log: Path, variables: Mapping[str, str]) -> Outcome:
    """Run a part until its limit, with all that it prints in `log`. End the processes that it started."""
    outcome = Outcome(part.name, part.title, "skipped", 0.0, part.limit_s, log.name, part.skipped)
    outcome.command = shlex.join(("python", *part.command[1:]))
    if part.skipped:
        log.write_text(f"skipped: {part.skipped}\n")
        return outcome
    begun_s = time.monotonic()
    with log.open("w") as output:
        process = subprocess.Popen(
            part.command,
            cwd=ROOT,
            env=dict(variables),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            outcome.status = "failed" if process.wait(part.limit_s) else "ok"
        except subprocess.TimeoutExpired:
            outcome.status = "too late"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    outcome.elapsed_s = time.monotonic() - begun_s
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    outcome.line = lines[-1] if lines else ""
    if (said := _object(outcome.line)) is not None and "figures" in said:
        outcome.figures = said["figures"]
        outcome.line = ", ".join(f"{name} {said['figures'].get(name, 0):.3g}" for name in _SHARES)
    return outcome


_SHARES: Final = ("decode_b1_of_memory_rate", "prefill_of_matrix_rate")


def _object(line: str) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def commit() -> str:
    """Return the commit of these sources, or that of the bundle."""
    if COMMIT.is_file():
        return COMMIT.read_text().strip()
    command = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def check(folder: Path, device: str, model: str, names: Iterable[str], *, quick: bool) -> Summary:
    """Run the named parts, and the first always. What follows it does not run when it fails."""
    folder.mkdir(parents=True, exist_ok=True)
    folder, chosen = folder.resolve(), set(names)
    summary = Summary(folder, {"commit": commit()})

    def do(part: Part, mode: str) -> Outcome:
        log = folder / f"{plan.NAMES.index(part.name)}-{part.name}.log"
        summary.outcomes.append(Outcome(part.name, part.title, "running", limit_s=part.limit_s, log=log.name))
        summary.save()
        print(f"{part.name:15} {part.title} ...", flush=True)
        outcome = summary.outcomes[-1] = run(part, log, environment(mode, device, model))
        summary.save()
        print(f"{'':15} {outcome.status} after {outcome.elapsed_s:.0f} s: {outcome.line}", flush=True)
        return outcome

    outcome = do(plan.ready("cuda" if device.startswith("cuda") else device), "cuda")
    found = _object(outcome.line) or {}
    summary.host |= {name: value for name, value in found.items() if name != "ok"}
    summary.save()
    if outcome.status != "ok":
        print((folder / outcome.log).read_text())
        return summary
    for part in plan.parts(found["mode"], folder, found["free_bytes"], quick=quick):
        if part.name in chosen:
            do(part, found["mode"])
    return summary


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.gpu", description="Checks a GPU, in at most 8 minutes.")
    parser.add_argument("--report", type=Path, default=Path("gpu-report"), metavar="DIR")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--model", default="", metavar="DIR")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--parts", default=",".join(plan.NAMES), metavar="NAMES")
    options = parser.parse_args(argv)
    if unknown := set(options.parts.split(",")) - set(plan.NAMES):
        parser.error(f"--parts: {', '.join(sorted(unknown))} is none of {', '.join(plan.NAMES)}")
    if not (ROOT / "tests").is_dir():
        parser.error("the tests are not installed: run it in a checkout of the sources, or from `make gpu-bundle`")
    summary = check(options.report, options.device, options.model, options.parts.split(","), quick=options.quick)
    print(f"\n{'all is well' if summary.is_ok else 'not all is well'}: {summary.folder / 'summary.md'}")
    return 0 if summary.is_ok else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

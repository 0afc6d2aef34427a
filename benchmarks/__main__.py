"""`headstart bench NAME`: runs one measurement."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Final

from benchmarks.progress import elapsed
from worker.common.checks import missing_extra
from worker.common.command_line import suggestion
from worker.common.cores import bound_spinning

BENCHES: Final = {
    "cache": "the bookkeeping of the paged cache for a request, and the hashing of its blocks",
    "replay": "recorded conversations against any OpenAI-compatible server, or two side by side",
}
"""Summary of each bench of the wheel."""
DEV_BENCHES: Final = {
    "engine": "the scheduler and the model on one device, without HTTP",
    "engines": "what an adapter adds in front of a vLLM, and routers head to head",
    "first-token": "from the request to the first token, stage by stage, next to other servers",
    "fleet": "a gateway in front of a thousand workers, with restarts",
    "gateway": "what the gateway adds to a worker that answers at once",
    "index": "a decision on a real Redis, against PING and the peers' schemas",
    "limits": "single requests within every limit, each at the worst of its fields",
    "prompts": "what a prompt of 8,000 to 128,000 tokens costs the gateway",
    "route": "routing policies on recorded workloads in simulated time",
    "sampling": "what a sampled token costs, over a greedy one",
    "speculation": "tokens per second with drafts and without, in pairs",
    "tiers": "the first token of a prompt whose blocks are elsewhere, and the cost of keeping blocks",
    "tokens": "what a token costs between the engine and the client, by process",
}
"""Summary of each bench that needs a checkout."""
HAVE_A_BAR: Final = {"replay", "route"}


def usage() -> str:
    """Return the list of benches. The wheel has only the first ones."""
    lines = [f"  {name:12} {summary}" for name, summary in BENCHES.items()]
    lines += ["", f"In a checkout{'' if has_sources() else ' (not installed here)'}:", ""]
    lines += [f"  {name:12} {summary}" for name, summary in DEV_BENCHES.items()]
    head = ["usage: headstart bench NAME [--json] [--plot FILE] [OPTIONS]", ""]
    return "\n".join([*head, *lines, "", "headstart bench NAME --help lists its options."])


def has_sources() -> bool:
    return (Path(__file__).parent / "dev").is_dir()


def main(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(usage())
        return 0 if argv else 2
    name, *arguments = argv
    if name not in BENCHES and name not in DEV_BENCHES:
        hint = suggestion(name, [*BENCHES, *DEV_BENCHES])
        print(f"headstart bench: there is no bench {name!r}{hint}\n\n{usage()}", file=sys.stderr)
        return 2
    if name in DEV_BENCHES and not has_sources():
        text = f"not installed: clone the repository and run `make bench ARGS={name}` there"
        print(f"headstart bench {name}: {text}", file=sys.stderr)
        return 2
    module_name = ("" if name in BENCHES else "dev.") + name.replace("-", "_")
    bound_spinning()  # before torch is imported, as a worker does
    try:
        module = importlib.import_module(f"benchmarks.{module_name}")
    except ImportError as error:
        print(f"headstart bench {name}: {missing_extra(error)}", file=sys.stderr)
        return 2
    if name in HAVE_A_BAR:
        return int(module.main(arguments))
    with elapsed(f"headstart bench {name} is measuring"):
        return int(module.main(arguments))


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)  # as `headstart` does

"""Count the product files that mention a feature and are not its own: `python tools/spread.py [FEATURE ...]`.

An optional feature is a room of its own and few doors. A feature that most files mention cannot be removed by one line.
With names of features, the lines are printed too.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).parent.parent


class Feature(NamedTuple):
    name: str
    pattern: str
    """Its words in the code: the names of today, and those that they had before."""
    own: tuple[str, ...] = ()
    """The files and folders that exist for it."""


FEATURES: Final = (
    Feature(
        "copies",
        r"CopyPlan|import Copies|\bCopies\(|: Copies$|max_copies|send_copy|chain_copies|\.copies\.planner|client\.adopt"
        r"|def adopt\(self, url: str, peer",
        ("server/router/copies.py",),
    ),
    Feature(
        "ends",
        r"\bends: Annotated|member\.ends|blocks\.ends|\bends=|import .*\bStops\b|class Stops|\bStops\(|change\.stops"
        r"|KNOWN_ENDS|has_ends|PartKind|part_kind|expected_parts|find_stop|update_stops",
        ("worker/adapter/groups.py", "worker/adapter/holders.py"),
    ),
    Feature(
        "tiers",
        r"\btiers?\b|tier_blocks|tier_tokens|\bTier\b|\bTierName\b|\bTIERS\b",
        (
            "cache/stores/",
            "server/router/fetch_plan.py",
            "worker/kv_transfer/fetches.py",
            "worker/kv_transfer/saver.py",
            "worker/kv_transfer/transfers.py",
        ),
    ),
    Feature(
        "peer fetch",
        r"fetch_tokens_per_s|BlockSource|PeerClient|PeersByLayout|FetchPlan|find_peers|choose_peer|\.peers\b"
        r"|fetch_s\b|fetched_tokens|fetched_from",
        (
            "server/router/fetch_plan.py",
            "worker/contracts/exchange.py",
            "worker/http/blocks.py",
            "worker/kv_transfer/",
        ),
    ),
    Feature(
        "speculation",
        r"[Ss]peculation|--speculate|config\.speculate|\bspeculate:|[Dd]rafter|draft_ids?\b|draft_tokens|[Dd]raft token"
        r"|count_drafts|no draft\b",
        ("worker/scheduler/speculation.py", "worker/scheduler/drafter.py"),
    ),
    Feature(
        "images",
        r"(?<!engine\.)\bmedia\b(?! and keys|, and)|\bMedia\b|has_images|takes_images|\bIMAGES\b|MediaStart|ImageRules",
        ("server/api/prompts/images.py", "server/api/engine/media.py"),
    ),
    Feature(
        "embeddings",
        r"\bEmbed\b|\bEMBEDDINGS?\b|\bEmbedding(Request|Endpoint|Formatter)?\b|embedding_size|spec\.embed|request\.embed"
        r"|\bembed=|\bPooling\b|\bfind_pooling\b|(?<!api)\.pooling\b|pooling=|task == .embed",
        ("server/api/embeddings.py", "worker/files/embedding.py"),
    ),
    Feature(
        "text by the engine",
        r"EngineText|EngineCall|EngineAnswer|EngineRequest|EngineAsk|text_apis|engine_text|\bRendered\b|chat_probes"
        r"|is_of_engine|engine_vocabulary|engine_writes",
        (
            "server/api/engine/",
            "server/api/pooling.py",
            "server/request/engine_answer.py",
            "server/request/engine_text_request.py",
            "worker/adapter/",
            "worker/common/chat_probes.py",
        ),
    ),
    Feature(
        "SGLang",
        r"[Ss]glang|SGLang|is_bigram|drops_last_block",
        ("worker/adapter/sglang.py",),
    ),
    Feature(
        "usage log",
        r"UsageLog|usage_log",
        ("server/usage/log.py",),
    ),
)


def foreign_lines(feature: Feature, root: Path = ROOT) -> dict[str, list[str]]:
    """Return the lines that mention a feature, by the file, for files that are not its own."""
    listed = subprocess.run(
        ["git", "-C", str(root), "ls-files", "server", "cache", "worker"], capture_output=True, text=True, check=True
    )
    found = {}
    for name in listed.stdout.split():
        if name.endswith(".py") and not name.startswith(feature.own) and (root / name).exists():
            lines = enumerate((root / name).read_text().splitlines(), 1)
            if mentions := [f"{number}: {line.strip()}" for number, line in lines if re.search(feature.pattern, line)]:
                found[name] = mentions
    return found


def main(names: list[str]) -> None:
    for feature in FEATURES:
        if names and feature.name not in names:
            continue
        found = foreign_lines(feature)
        print(f"{feature.name:20} {len(found):3} files {sum(map(len, found.values())):4} lines")
        for name, lines in found.items() if names else ():
            print(f"  {name}", *lines, sep="\n    ")


if __name__ == "__main__":
    main(sys.argv[1:])

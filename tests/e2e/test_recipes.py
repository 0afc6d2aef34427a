"""Each recipe of CONTRIBUTING.md, "Where to add what", followed as it stands in a copy of the tree.

The checks run once over all of them, and then the tests that each recipe names. What is added does nothing.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import pytest

from tests.waiting import HANG_S

pytestmark = [pytest.mark.e2e, pytest.mark.deep]

ROOT: Final = Path(__file__).parents[2]
CHECKS_S: Final = 5 * HANG_S


class Edit(NamedTuple):
    """A text that is added before the first `before`, or a file that is made."""

    file: str
    before: str
    text: str


class Recipe(NamedTuple):
    title: str
    """How CONTRIBUTING.md begins it."""
    edits: Sequence[Edit]
    tests: Sequence[str]


STORE: Final = (
    (ROOT / "cache" / "stores" / "host.py")
    .read_text(encoding="utf-8")
    .replace("class HostStore", "class ExampleStore")
    .replace('tier = "host"', 'tier = "example"')
    .replace("        if any(slab.readonly for slab in slabs):\n", "")
    .replace('            raise ValueError("a slab of host memory must be writable")\n', "")
)
"""A store of another name: its own file, as the recipe asks for."""
RECIPES: Final[Mapping[str, Recipe]] = {
    "tool format": Recipe(
        "A tool format",
        [
            Edit(
                "server/text/formats/table.py",
                '    _row("granite3"',
                '    _row("example", (("<example>",),), _list("<example>", "</example>")),\n',
            ),
            Edit("docs/api/formats.md", "| `granite3` |", "| `example` | none | a list in `<example>` |\n"),
            Edit(
                "tests/server/text/test_formats.py",
                '    Case("granite3"',
                '    Case("example", f"<example>[{objects(*BOTH)}]</example>", [LONG, NOW]),\n',
            ),
            Edit(
                "tests/server/api/test_call_forms.py",
                '    "granite3":',
                '    "example": ("{{ tools }}<example>", listed("<example>", "</example>")),\n',
            ),
            Edit(
                "tests/server/models/test_recognition.py",
                '    "granite3": "<|tool_call|>" + LISTED',
                '    "example": f"<example>{LISTED_CALL}</example>",\n',
            ),
        ],
        [
            *("tests/server/text/test_formats.py", "tests/server/api/test_call_forms.py"),
            *("tests/server/models/test_recognition.py", "tests/server/text/test_output_parser_property.py"),
        ],
    ),
    "reasoning format": Recipe(
        "A reasoning format",
        [
            Edit(
                "server/text/formats/reasoning.py",
                "    THINK,\n",
                '    ThoughtFormat("example", ("<example_thought>",), ("</example_thought>",)),\n',
            ),
            Edit("docs/api/formats.md", "| `granite` | `Here is", "| `example` | `<example_thought>` and its end |\n"),
        ],
        ["tests/server/text/test_formats.py", "tests/server/models/test_recognition.py"],
    ),
    "metric": Recipe(
        "A metric",
        [
            Edit(
                "server/metrics.py",
                '        self.lost = metric("workers_lost"',
                '        self.examples = metric("examples", "Examples.")\n',
            ),
            Edit(
                "tools/dashboard.toml",
                '[[rows.panels]]\ntitle = "Duration of a request"\n',
                '[[rows.panels]]\ntitle = "Examples"\nunit = "short"\nmeaning = "Examples."\n'
                'queries = [["rate(headstart_examples_total)", "examples"]]\n\n',
            ),
        ],
        ["tests/tools/test_dashboard.py", "tests/server/test_metrics.py"],
    ),
    "option": Recipe(
        "An option",
        [
            Edit(
                "server/config.py",
                '    policy: str = _fleet("headstart"',
                '    example: int = _fleet(0, "an example (default 0)", least=0)\n',
            )
        ],
        ["tests/worker/test_command_line.py", "tests/worker/test_known_names.py"],
    ),
    "policy": Recipe(
        "A routing policy",
        [
            Edit(
                "server/router/policies.py",
                "class ConsistentHash(Policy):",
                'class Example(Policy):\n    """All workers are equal."""\n\n'
                "    def scores(self, request: RouteRequest, workers: Sequence[WorkerView], fleet: FleetView)"
                " -> Sequence[float]:\n        return [0.0] * len(workers)\n\n\n",
            ),
            Edit("server/router/policies.py", '    "consistent_hash": Cons', '    "example": Example,\n'),
            Edit("docs/routing.md", "| `longest_prefix` |", "| `example` | all are equal |\n"),
        ],
        ["tests/server/router/test_policies.py"],
    ),
    "store": Recipe(
        "A block store",
        [
            Edit("cache/stores/example.py", "", STORE),
            Edit("cache/types.py", '"disk"]\n', '"example", '),
            Edit(
                "worker/config.py",
                "    kv_host_memory: int = _cache(",
                '    kv_example: int = _cache(0, "an example (default: none)", "SIZE", type=num_bytes)\n',
            ),
            Edit(
                "worker/loading/engine.py",
                "from cache.stores.host import",
                "from cache.stores.example import ExampleStore\n",
            ),
            Edit(
                "worker/loading/engine.py",
                "    if config.kv_disk is not None:\n        disk = ",
                "    if num_example_blocks := config.kv_example // copier.num_bytes:\n"
                "        stores.append(ExampleStore([copier.new_payload(num_example_blocks)], copier.num_bytes))\n",
            ),
        ],
        ["tests/cache/stores/test_stores.py", "tests/cache/redis_index/test_tiers.py"],
    ),
    "field of the API": Recipe(
        "A field of the API",
        [
            Edit(
                "server/schema/requests.py",
                "    modalities: list[str] | None = None\n",
                "    example: bool | None = None\n",
            ),
            Edit(
                "server/schema/requests.py",
                "        if self.modalities is not None and",
                "        if self.example:\n"
                '            raise unsupported("example", "can only be false: nothing uses it")\n',
            ),
            Edit("docs/api.md", "| `modalities` |", "| `example` | only `false` |\n"),
        ],
        ["tests/server/test_fields.py"],
    ),
    "field on the wire": Recipe(
        "A field on the wire",
        [
            Edit(
                "worker/wire.py",
                "\n\nclass _Frame(Struct",
                '    example: str = ""\n    """An example of a newer field."""\n',
            )
        ],
        ["tests/worker/test_wire.py", "tests/server/request/test_unknown_values.py"],
    ),
    "field of the registry": Recipe(
        "A field of the registry entry",
        [
            Edit(
                "cache/records.py",
                "\n    def hit_tokens(",
                '    example: str = ""\n    """An example of a newer fact."""\n',
            ),
            Edit("worker/loading/engine.py", "    )\n    return signed(config.cluster", '        example="own",\n'),
            Edit(
                "worker/adapter/connect.py",
                "    )\n\n\nasync def probe_digests",
                '        example="engine",\n',
            ),
        ],
        ["tests/cache/redis_index/test_registry.py", "tests/server/request/test_unknown_values.py"],
    ),
}


def run(tree: Path, *command: str) -> None:
    """Run a module of Python in the copy, whose sources come before those of the environment."""
    done = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=tree,
        env={"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "PYTHONPATH": str(tree), "HOME": str(tree)},
        capture_output=True,
        text=True,
        timeout=CHECKS_S,
    )
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-6000:]}\n{done.stderr[-2000:]}"


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy what git tracks or would track, with a repository of its own, and follow all recipes there."""
    copy = tmp_path_factory.mktemp("recipes") / "headstart"
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines():
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name)
    subprocess.run(["git", "init", "-q", copy], check=True)
    for recipe in RECIPES.values():
        for file, before, text in recipe.edits:
            path = copy / file
            found = path.read_text(encoding="utf-8") if before else ""
            assert before in found, (recipe.title, file, before)
            path.write_text(found.replace(before, text + before, 1), encoding="utf-8")
    run(copy, "tools.generate")
    return copy


@pytest.mark.parametrize("name", RECIPES)
def test_the_page_has_the_recipe(name: str) -> None:
    """The files that are edited, and the tests that run, are those that the page names."""
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    (text,) = re.findall(rf"^- \*\*{RECIPES[name].title}\*\*:(.*?)(?=^- \*\*|^#)", page, re.MULTILINE | re.DOTALL)
    for file in {edit.file for edit in RECIPES[name].edits}:
        assert file in text or f"{Path(file).parent}/" in text, file


@pytest.mark.parametrize(
    "command",
    [
        ("ruff", "check", "."),
        ("ruff", "format", "--check", "."),
        ("mypy",),
        ("tools.check_docs",),
        ("tools.check_prose",),
        ("tools.check_sizes",),
        ("tools.generate", "--check"),
    ],
    ids=" ".join,
)
def test_a_check(tree: Path, command: tuple[str, ...]) -> None:
    run(tree, *command)


@pytest.mark.parametrize("name", RECIPES)
def test_the_tests_that_the_page_names(tree: Path, name: str) -> None:
    run(tree, "pytest", "-q", "-x", "-n", "0", "-p", "no:cacheprovider", "-m", "not deep", *RECIPES[name].tests)


def test_what_is_stale_is_named(tree: Path) -> None:
    """A file that is generated and was changed by hand makes `make check` fail, by its name."""
    for file in ("docs/configuration/gateway.md", "docs/api/refused.md", "helm/headstart/files/dashboard.json"):
        path = tree / file
        text = path.read_text(encoding="utf-8")
        path.write_text(text + "\n", encoding="utf-8")
        try:
            with pytest.raises(AssertionError, match=re.escape(file)):
                run(tree, "tools.generate", "--check")
        finally:
            path.write_text(text, encoding="utf-8")

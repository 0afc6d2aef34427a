"""Change the product line by line, in copies, and list the changes that no test notices: `make mutants SEED=n`.

The changes are mutmut's, and three more. Statements are sampled evenly, one change each. A change is tried against the
test files of its module's name first. The others of the folder follow, the quickest first. A test that fails or hangs
kills it, and so does the type checker. Tests of more than `MAX_TEST_S` are left out. All runs in copies below a
temporary folder.

What no test should hold is not changed: annotations, decorators, docstrings, assertions, logging, constants marked
Final, `strict=` of zip, and texts (strings with a space).
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Final

import libcst as cst
import pytest
from libcst import matchers as m
from libcst.metadata import MetadataWrapper, PositionProvider
from mutmut.mutation.mutators import mutation_operators, operator_arg_removal, operator_assignment

ROOT: Final = Path(__file__).resolve().parents[1]
TESTS: Final = {
    "cache/allocators": ("tests/cache/allocators/test_*.py", "tests/cache/test_*.py"),
    "cache/hashing.py": ("tests/cache/test_*.py",),
    "cache/redis_index": ("tests/cache/redis_index/test_*.py",),
    "server/auth": ("tests/server/auth/test_*.py", "tests/server/test_limits.py", "tests/server/test_doors.py"),
    "server/http": (
        "tests/server/http/test_*.py",
        *("tests/server/test_attacks.py", "tests/server/test_app.py", "tests/server/test_template_matrix.py"),
        "tests/server/api/test_bounds.py",
    ),
    "server/request": (
        "tests/server/request/test_*.py",
        *("tests/server/test_app.py", "tests/server/test_metrics.py", "tests/server/usage/test_accounts.py"),
    ),
    "server/router/cost.py": ("tests/server/router/test_*.py",),
    "worker/kv_transfer": ("tests/worker/kv_transfer/test_*.py",),
    "worker/scheduler": ("tests/worker/scheduler/test_*.py",),
}
"""The modules, and their tests."""
MARKS: Final = "not deep and not gpu and not k8s and not faults and not browser and not clients and not vllm"
PYTEST: Final = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--hypothesis-profile=mutants")
MYPY: Final = (sys.executable, "-m", "mypy", "--no-error-summary")
NOT_COPIED: Final = shutil.ignore_patterns(".git", ".venv*", ".*_cache", ".hypothesis", "__pycache__", "site")
NUM_COPIES: Final = 3
"""Three at once on two cores, as tests wait often."""
MAX_TEST_S: Final = 10.0
MAX_MEASURE_S: Final = 1200.0
START_S: Final = 30.0
"""The time for pytest to start; a test run may take this and `SLACK` times what it takes without a change."""
SLACK: Final = 4.0


# --- changes --------------------------------------------------------------------------------------------------------


def _swap_name(node: cst.Name) -> Iterator[cst.Name]:
    swaps = {"any": "all", "all": "any", "min": "max", "max": "min"}
    if node.value in swaps:
        yield node.with_changes(value=swaps[node.value])


def _remove_statement(node: cst.SimpleStatementLine) -> Iterator[cst.SimpleStatementLine]:
    match node.body:
        case [cst.Expr(cst.Call() | cst.Await()) | cst.Raise() | cst.Del() | cst.AugAssign()]:
            yield node.with_changes(body=[cst.Pass()])


def _negate_condition(node: cst.If | cst.IfExp) -> Iterator[cst.If | cst.IfExp]:
    if isinstance(node.test, cst.Name | cst.Attribute | cst.Call):
        negated = cst.UnaryOperation(cst.Not(), node.test)
        yield node.with_changes(test=negated, whitespace_before_test=cst.SimpleWhitespace(" "))


OPERATORS: Final[Sequence[tuple[type, Callable[[Any], Iterable[cst.CSTNode]]]]] = (
    *mutation_operators,
    (cst.Name, _swap_name),
    (cst.SimpleStatementLine, _remove_statement),
    (cst.If, _negate_condition),
)


_TYPED: Final = (operator_assignment, operator_arg_removal)
"""They write None and leave out arguments, which the type checker mostly finds: only where nothing else can change."""


def _is_left_alone(node: cst.CSTNode) -> bool:
    match node:
        case cst.Annotation() | cst.Decorator() | cst.Assert() | cst.Import() | cst.ImportFrom():
            return True
        case cst.AnnAssign(annotation=cst.Annotation(cst.Name("Final") | cst.Subscript(cst.Name("Final")))):
            return True
        case cst.Assign(targets=[cst.AssignTarget(cst.Name("__slots__" | "__all__" | "log" | "logger"))]):
            return True
        case cst.Expr(cst.SimpleString() | cst.ConcatenatedString()):
            return True
        case cst.Call(cst.Name("cast" | "NewType")) | cst.Arg(keyword=cst.Name("strict")):
            return True
        case cst.SimpleStatementLine([cst.Expr(cst.Call(cst.Attribute(cst.Name("log" | "logger"))))]):
            return True
        case cst.SimpleString(value):
            return " " in value
    return False


def _changes(node: cst.CSTNode, operator: Callable[[Any], Iterable[cst.CSTNode]]) -> list[cst.CSTNode]:
    changes = [] if isinstance(node, cst.Call) and m.matches(node.func, m.Name("zip")) else list(operator(node))
    if isinstance(node, cst.SimpleString):  # names of commands and headers are the same in any case
        changes = [changed for changed in changes if changed.value.lower() != node.value.lower()]
    return changes


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change of one statement."""

    path: str
    line: int
    before: str
    after: str
    code: str
    """The whole changed file."""

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.before}  ->  {self.after}"


_HAS_LINE: Final = (cst.BaseStatement, cst.ExceptHandler)


class _Statements(cst.CSTVisitor):
    """Collects the nodes of each statement, by its line. A compound statement has those of its head."""

    METADATA_DEPENDENCIES = (PositionProvider,)

    def __init__(self) -> None:
        self.nodes: dict[int, list[cst.CSTNode]] = defaultdict(list)
        self._lines = [0]

    def on_visit(self, node: cst.CSTNode) -> bool:
        if isinstance(node, _HAS_LINE):
            self._lines.append(self.get_metadata(PositionProvider, node).start.line)
        if _is_left_alone(node):
            return False
        self.nodes[self._lines[-1]].append(node)
        return True

    def on_leave(self, original_node: cst.CSTNode) -> None:
        if isinstance(original_node, _HAS_LINE):
            self._lines.pop()


def draws_of(path: str, source: str, chance: random.Random) -> list[Callable[[], Mutant | None]]:
    """Return a draw for each statement: one of its changes by `chance`, each kind equally likely. None: it has none."""
    wrapper = MetadataWrapper(cst.parse_module(source))
    statements = _Statements()
    wrapper.visit(statements)

    def draw(nodes: list[cst.CSTNode]) -> Mutant | None:
        for kind, operator in sorted(chance.sample(OPERATORS, len(OPERATORS)), key=lambda each: each[1] in _TYPED):
            found = [(node, new) for node in nodes if isinstance(node, kind) for new in _changes(node, operator)]
            for old, new in chance.sample(found, len(found)):
                code = wrapper.module.deep_replace(old, new).code
                if code != source and _compiles(code):
                    return _described(path, source, code)
        return None

    return [partial(draw, nodes) for nodes in statements.nodes.values()]


def _compiles(code: str) -> bool:
    try:
        compile(code, "mutant", "exec")
    except SyntaxError:
        return False
    return True


def _described(path: str, source: str, code: str) -> Mutant:
    old, new = source.splitlines(), code.splitlines()
    num_same = next((n for n, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))
    old_tail, new_tail = old[num_same:], new[num_same:]
    while old_tail and new_tail and old_tail[-1] == new_tail[-1]:
        del old_tail[-1], new_tail[-1]
    before, after = (" ".join(line.strip() for line in tail) for tail in (old_tail, new_tail))
    return Mutant(path, num_same + 1, before, after, code)


def sample(modules: Sequence[str], num: int, seed: int) -> list[Mutant]:
    """Return changes of `num` statements of the modules, every statement equally likely."""
    chance = random.Random(seed)
    draws = []
    for module in modules:
        for file in [ROOT / module] if module.endswith(".py") else sorted((ROOT / module).glob("*.py")):
            draws += draws_of(str(file.relative_to(ROOT)), file.read_text(), chance)
    chance.shuffle(draws)
    found: list[Mutant] = []
    for draw in draws:
        if len(found) == num:
            break
        if (mutant := draw()) is not None:
            found.append(mutant)
    return found


# --- tests ----------------------------------------------------------------------------------------------------------


def module_of(path: str) -> str:
    return next(module for module in TESTS if path == module or path.startswith(f"{module}/"))


def is_nearest(path: str, test: str) -> bool:
    """Return whether a test file has the module's name: of x/cost.py test_cost.py, and test_cost_of_y.py."""
    return Path(test).stem.startswith(f"test_{Path(path).stem}")


@dataclass(frozen=True, slots=True)
class ModuleTests:
    """The tests of a module that pass without a change."""

    seconds: dict[str, float]
    """By file."""
    left_out: dict[str, str]
    """Why a test is left out, by its name."""

    def parts(self, path: str) -> list[list[str]]:
        """Return the nearest test files of a changed file, then the others."""
        quickest = sorted(self.seconds, key=lambda test: self.seconds[test])
        nearest = [test for test in quickest if is_nearest(path, test)]
        return [part for part in (nearest, [test for test in quickest if test not in nearest]) if part]


class Copy:
    """A copy of the working tree, in which one change at a time is tried."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "tree"
        self._folder = folder
        shutil.copytree(ROOT, self.root, ignore=NOT_COPIED, symlinks=True)
        (folder / "tmp").mkdir()
        self._running: subprocess.Popen[bytes] | None = None
        self._env = os.environ | {"PYTHONPATH": str(self.root), "TMPDIR": str(folder / "tmp")}

    def measure(self, module: str) -> ModuleTests:
        """Run the module's tests without a change. Raises RuntimeError if that takes too long."""
        files = [str(file.relative_to(ROOT)) for pattern in TESTS[module] for file in ROOT.glob(pattern)]
        report = self._folder / "report.xml"
        if self._passes([f"--junitxml={report}", "-o", "junit_family=xunit1", *files], MAX_MEASURE_S) is None:
            raise RuntimeError(f"{module}: its tests take more than {MAX_MEASURE_S:.0f} s")
        tests = ModuleTests(dict.fromkeys(files, 0.0), {})
        for case in ET.parse(report).iter("testcase"):
            name = f"{case.attrib['file']}::{case.attrib['name']}"
            if any(child.tag in ("failure", "error") for child in case):
                tests.left_out[name] = "fails without a change"
            elif float(case.attrib["time"]) > MAX_TEST_S:
                tests.left_out[name] = f"took {float(case.attrib['time']):.0f} s"
            else:
                tests.seconds[case.attrib["file"]] += float(case.attrib["time"])
        for name, reason in tests.left_out.items():
            print(f"left out: {name} {reason}", flush=True)
        return tests

    def outcome(self, mutant: Mutant, tests: ModuleTests) -> str:
        """Return killed, timed out, mistyped, or survived."""
        file = self.root / mutant.path
        code, times = file.read_bytes(), file.stat()
        file.write_text(mutant.code)
        try:
            for part in tests.parts(mutant.path):
                skipped = [f"--deselect={name}" for name in tests.left_out if name.partition("::")[0] in part]
                limit_s = START_S + SLACK * sum(tests.seconds[test] for test in part)
                if (passed := self._passes(["-x", *skipped, *part], limit_s)) is not True:
                    return "timed out" if passed is None else "killed"
            return "mistyped" if self._run([*MYPY, mutant.path], MAX_MEASURE_S) == 1 else "survived"
        finally:
            file.write_bytes(code)
            os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))

    def _passes(self, arguments: Sequence[str], timeout_s: float) -> bool | None:
        """None: it took too long."""
        code = self._run([*PYTEST, "-m", MARKS, *arguments], timeout_s)
        return None if code is None else code in (0, pytest.ExitCode.NO_TESTS_COLLECTED)

    def _run(self, command: Sequence[str], timeout_s: float) -> int | None:
        """Return the exit code. None: it took too long."""
        with (self._folder / "output").open("w") as output:
            run = self._running = subprocess.Popen(
                command,
                cwd=self.root,
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
            try:
                return run.wait(timeout_s)
            except subprocess.TimeoutExpired:
                self.interrupt()
                return None

    def interrupt(self) -> None:
        """End a test run. The tests end what they have started."""
        if (run := self._running) is not None:
            for signal_number in (signal.SIGINT, signal.SIGKILL):
                with suppress(ProcessLookupError):
                    os.killpg(run.pid, signal_number)
                with suppress(subprocess.TimeoutExpired):
                    run.wait(10.0)


def run(mutants: Sequence[Mutant], stop_s: float) -> Iterator[tuple[Mutant, str]]:
    """Try the changes until `stop_s`, and yield the outcome of each."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder, ThreadPoolExecutor(NUM_COPIES) as pool:
        places = [Path(folder) / str(number) for number in range(NUM_COPIES)]
        copies = [Copy(place) for place in places]
        free: SimpleQueue[Copy] = SimpleQueue()
        for copy in copies:
            free.put(copy)

        def in_copy(call: Callable[[Copy], Any]) -> Any:
            copy = free.get()
            try:
                return call(copy)
            finally:
                free.put(copy)

        def outcome(mutant: Mutant) -> str | None:
            if time.monotonic() > stop_s:
                return None
            return in_copy(lambda copy: copy.outcome(mutant, tests[module_of(mutant.path)]))

        try:
            modules = sorted({module_of(mutant.path) for mutant in mutants})
            measured = pool.map(lambda module: in_copy(lambda copy: copy.measure(module)), modules)
            tests = dict(zip(modules, measured, strict=True))
            for mutant, result in zip(mutants, pool.map(outcome, mutants), strict=True):
                if result is not None:
                    yield mutant, result
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            for copy in copies:
                copy.interrupt()


# --- report ---------------------------------------------------------------------------------------------------------


def report(results: Sequence[tuple[Mutant, str]], num_asked: int) -> str:
    """Return the table of modules, the survivors, and the part that was killed."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for mutant, outcome in results:
        counts[module_of(mutant.path)][outcome] += 1
    outcomes = ("killed", "timed out", "mistyped", "survived")
    lines = [f"{'module':24}{'sampled':>10}" + "".join(f"{outcome:>11}" for outcome in outcomes)]
    for module in sorted(counts):
        count = counts[module]
        lines.append(f"{module:24}{count.total():10}" + "".join(f"{count[outcome]:11}" for outcome in outcomes))
    survivors = [str(mutant) for mutant, outcome in results if outcome == "survived"]
    lines += ["", "survived:" if survivors else "none survived", *sorted(survivors), ""]
    num_killed = len(results) - len(survivors)
    lines.append(f"killed {num_killed} of {len(results)}: {num_killed / max(1, len(results)):.3f}")
    if len(results) < num_asked:
        lines.append(f"{num_asked - len(results)} of {num_asked} were not tried, for time")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--num", type=int, default=200, help="how many changes to try")
    parser.add_argument("--minutes", type=float, default=36.0, help="begin no change after this time")
    parser.add_argument("modules", nargs="*", help=f"of {', '.join(TESTS)}; all if none is named")
    options = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM):  # a shell's background job ignores Ctrl-C
        signal.signal(number, signal.default_int_handler)
    stop_s = time.monotonic() + 60 * options.minutes
    mutants = sample(options.modules or list(TESTS), options.num, options.seed)
    results = []
    for mutant, outcome in run(mutants, stop_s):
        results.append((mutant, outcome))
        print(f"{len(results)}/{len(mutants)} {outcome}: {mutant}", flush=True)
    print(f"\nseed {options.seed}\n{report(results, len(mutants))}")


if __name__ == "__main__":
    main()

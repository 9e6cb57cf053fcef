"""How many planted faults do the tests find? Each is planted in a copy of the tree, and the tests of its room run.

    python benchmarks/mutants.py --seed 0 --count 60 --jobs 2 --out mutants.json
    python benchmarks/mutants.py --rooms cli report --count 4

A fault is a condition that is negated, a statement that is dropped, or two arguments that are exchanged. A file's tests
are those of the folder or file of tests that has its name or its room's: ``step/prove/proof.py`` has tests/step/prove.
They run once without a fault first, and must pass. With a fault they may take 30 s more than three times as long.
"""

from __future__ import annotations

import argparse
import ast
import concurrent.futures
import contextlib
import dataclasses
import json
import os
import queue
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
OTHER_NAMES = {"_torch": "torch_private"}
"""Rooms whose folder of tests has another name."""
LEFT_OUT = shutil.ignore_patterns(
    ".git", ".venv", ".matrix", ".cloud", ".*_cache", "__pycache__", "runs", "site", "results"
)
TIMES_LONGER = 3


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A fault: ``after`` in place of the source from byte ``start`` to ``end`` of a file."""

    file: str
    line: int
    kind: str
    start: int
    end: int
    before: str
    after: str

    def planted(self, source: bytes) -> bytes:
        """Return the file with the fault in it."""
        return source[: self.start] + self.after.encode() + source[self.end :]


def mutants_of(file: str, source: bytes) -> list[Mutant]:
    """List every fault that can be planted in a file, in the order of its lines."""
    begins = [0]
    for line in source.splitlines(keepends=True):
        begins.append(begins[-1] + len(line))

    def place(node):
        start = begins[node.lineno - 1] + node.col_offset
        end = begins[node.end_lineno - 1] + node.end_col_offset
        return start, end, source[start:end].decode()

    found = []

    def add(kind, node, after):
        start, end, before = place(node)
        found.append(Mutant(file, node.lineno, kind, start, end, before, after))

    for node in ast.walk(ast.parse(source)):
        for condition in conditions(node):
            add("negated", condition, f"(not ({place(condition)[2]}))")
        if is_droppable(node):
            add("dropped", node, "pass")
        if (two := exchangeable(node)) is not None:
            (start, *_, first), (begin, end, second) = place(two[0]), place(two[1])
            between = source[start + len(first.encode()) : begin].decode()
            found.append(
                Mutant(file, two[0].lineno, "swapped", start, end, source[start:end].decode(), second + between + first)
            )
    return sorted(found, key=lambda one: (one.start, one.kind))


def conditions(node):
    """Return the conditions that a node has, but not those for the type checker alone."""
    if isinstance(node, ast.comprehension):
        return node.ifs
    if isinstance(node, ast.If | ast.While | ast.IfExp) and "TYPE_CHECKING" not in ast.dump(node.test):
        return [node.test]
    return []


def is_droppable(node):
    """Return whether a statement can be left out, and names are bound as before."""
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Call | ast.Await | ast.YieldFrom)
    if isinstance(node, ast.Assign):
        return all(isinstance(target, ast.Attribute | ast.Subscript) for target in node.targets)
    return isinstance(node, ast.AugAssign | ast.Raise | ast.Delete | ast.Continue | ast.Break)


def exchangeable(node):
    """Return the first two arguments of a call if they are different and by position."""
    if not isinstance(node, ast.Call) or len(node.args) < 2:
        return None
    first, second = node.args[:2]
    if isinstance(first, ast.Starred) or isinstance(second, ast.Starred) or ast.dump(first) == ast.dump(second):
        return None
    return first, second


def choose(root: Path, seed: int, count: int, rooms: list[str]) -> list[Mutant]:
    """Choose faults at random among all that the files of some rooms can have; of all rooms where none is named."""
    package = next(one for one in sorted((root / "src").iterdir()) if (one / "__init__.py").exists())
    every = []
    for path in sorted(package.rglob("*.py")):
        room = path.relative_to(package).parts[0].removesuffix(".py")
        if not rooms or room in rooms:
            every += mutants_of(path.relative_to(root).as_posix(), path.read_bytes())
    return random.Random(seed).sample(every, min(count, len(every)))


def find_tests(root: Path, file: str) -> list[str]:
    """Return the tests of a file: the nearest folder or file of tests that is named as one of its folders or itself."""
    _, _, *parts = Path(file).with_suffix("").parts
    parts[0] = OTHER_NAMES.get(parts[0], parts[0])
    for depth in range(len(parts), 0, -1):
        folder = root.joinpath("tests", *parts[:depth])
        if folder.is_dir() and any(folder.rglob("test_*.py")):
            return [folder.relative_to(root).as_posix()]
    named = sorted((root / "tests").glob(f"test_{parts[0]}*.py"))
    return [one.relative_to(root).as_posix() for one in named] or ["tests"]


def run_tests(tree: Path, tests: list[str], seconds: float) -> tuple[str, float]:
    """Run tests in a tree: passed, failed or timed out, and the seconds that they took."""
    asked = ["-x", "-q", "-m", "not campaign", "-p", "no:cacheprovider", *tests]
    environment = {
        **os.environ,
        "PYTHONPATH": str(tree / "src"),
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
    }
    began = time.monotonic()
    with (tree / "pytest.log").open("wb") as log:
        running = subprocess.Popen(
            [sys.executable, "-m", "pytest", *asked], cwd=tree, env=environment, stdout=log, stderr=log,
            start_new_session=True,
        )  # fmt: skip
        try:
            code = running.wait(seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(running.pid, 9)  # and what the tests have started
            running.wait()
    result = "timed out" if code is None else "passed" if code == 0 else "failed"
    return result, time.monotonic() - began


class Trees:
    """Copies of the tree, one for each job; a fault is planted in a copy and taken out again."""

    def __init__(self, root: Path, place: Path, jobs: int) -> None:
        self.free: queue.Queue[Path] = queue.Queue()
        for number in range(jobs):
            shutil.copytree(root, place / str(number), ignore=LEFT_OUT, symlinks=True)
            self.free.put(place / str(number))

    def run(self, tests: list[str], seconds: float, mutant: Mutant | None = None) -> tuple[str, float]:
        """Run tests in a free copy, with a fault in it."""
        tree = self.free.get()
        try:
            if mutant is None:
                return run_tests(tree, tests, seconds)
            file = tree / mutant.file
            source = file.read_bytes()
            file.write_bytes(mutant.planted(source))
            try:
                return run_tests(tree, tests, seconds)
            finally:
                file.write_bytes(source)
        finally:
            self.free.put(tree)


def measure(root: Path, chosen: list[Mutant], jobs: int, timeout: float, tell=print) -> dict:
    """Run the tests of each fault, and return what came of it as JSON data.

    A fault is found if a test fails, or the tests do not end. Faults whose tests fail without them count as not tried.
    """
    groups = {mutant: find_tests(root, mutant.file) for mutant in chosen}
    with tempfile.TemporaryDirectory() as place, concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        trees = Trees(root, Path(place), jobs)
        apart = sorted({tuple(tests) for tests in groups.values()})
        usual = dict(zip(apart, pool.map(lambda tests: trees.run(list(tests), timeout), apart), strict=True))
        for tests, (result, seconds) in usual.items():
            tell(f"{' '.join(tests)}: {result} in {seconds:.0f} s without a fault")

        def tried(mutant):
            tests = groups[mutant]
            before, seconds = usual[tuple(tests)]
            result, took = ("not tried", 0.0)
            if before == "passed":
                result, took = trees.run(tests, 30 + TIMES_LONGER * seconds, mutant)
            tell(f"{mutant.file}:{mutant.line}: {mutant.kind}: {result}")
            return {**dataclasses.asdict(mutant), "tests": tests, "result": result, "seconds": round(took, 1)}

        rows = list(pool.map(tried, chosen))
    tries = [row for row in rows if row["result"] != "not tried"]
    found = sum(row["result"] != "passed" for row in tries)
    return {"tried": len(tries), "found": found, "share": found / len(tries) if tries else None, "mutants": rows}


def main() -> None:
    """Plant faults, and print how many are found."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=60, help="faults to plant")
    parser.add_argument("--rooms", nargs="*", default=[], help="rooms of src/hotloop; all by default")
    parser.add_argument("--jobs", type=int, default=2, help="faults that are tried at the same time")
    parser.add_argument("--timeout", type=float, default=1800, help="seconds that tests without a fault may take")
    parser.add_argument("--out", type=Path, help="a JSON file for what came of each fault")
    asked = parser.parse_args()
    chosen = choose(ROOT, asked.seed, asked.count, asked.rooms)
    told = {"seed": asked.seed, "count": asked.count, "rooms": asked.rooms}
    told |= measure(ROOT, chosen, asked.jobs, asked.timeout, lambda line: print(line, flush=True))
    print(f"{told['found']} of {told['tried']} faults were found")
    if asked.out:
        asked.out.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()

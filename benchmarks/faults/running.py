"""Runs a way in a process of its own, as a user would, in a folder of its own."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import pathlib
import signal
import subprocess
import time
from typing import TYPE_CHECKING, Any

from benchmarks.faults import judging

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from benchmarks.faults.judging import Cell, Outcome

ROOT = pathlib.Path(__file__).parents[2]
PROGRAM = pathlib.Path(__file__).with_name("program.py")
WAYS = ("compile", "loop", "train", "lightning")
LIMIT = 400
"""Seconds after which a process counts as hung, and is killed."""


UNSET = "unset"
"""As a value of an environment: the variable is not there."""


class NotHereError(Exception):
    """This machine cannot plant the fault; the text says what it needs."""


@dataclasses.dataclass(frozen=True)
class Fault:
    """A row of the table.

    Attributes:
        name: the short name, for ``--only``.
        title: the row's words.
        said: a pattern of the line that has to name it; empty where there is nothing to say.
        trait: of the program.
        preset: what is asked for.
        plant: a function of `planting`.
        environment: set for the run, not for that of eager.
        scene: plants what a process cannot plant in itself; takes a `Run`, and returns its `Cell`.
        shared: the program compiles within ``shared_compiles``, as ``hotloop train`` does by itself.
        ways: where it can happen; the others have ``elsewhere`` as their reason.
        as_eager: the fault is the user's own, so that eager is run with it as well.
        runs: what the model has to run in at the end.
        unseen: how many losses the program may not see, since it is interrupted behind steps that are done.
        raises: why the error itself, with its traceback, is what the program or its user has to get; else empty.
    """

    name: str
    title: str
    said: str
    trait: str = "plain"
    preset: str = "aot_eager"
    plant: str = ""
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    scene: Callable[[Run], Cell] | None = None
    shared: bool = False
    ways: tuple[str, ...] = WAYS
    elsewhere: str = ""
    as_eager: bool = False
    runs: str = ""
    unseen: int = 0
    raises: str = ""


class Run:
    """One fault in one way, with one torch."""

    def __init__(self, fault: Fault, way: str, bench: Bench, *, eager: bool = False) -> None:
        self.fault, self.way, self.bench, self.is_eager = fault, way, bench, eager
        # No name of the fault: a pattern that names it would find it in every path that is printed.
        self.place = bench.folder / f"{way}-{len([*bench.folder.iterdir()])}"
        self.place.mkdir(parents=True)
        self.output, self.codes = "", ()

    def environment(self, **more: str) -> dict[str, str]:
        """Return the environment of a process: nothing of this machine's caches, and the fault's own settings."""
        temporary = self.place / "tmp"
        temporary.mkdir(exist_ok=True)
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("TORCH", "HOTLOOP", "FAULTS"))}
        ours = {
            "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}",
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(temporary),
            "HOTLOOP_CACHE_DIR": str(self.place / "cache"),
            "TORCHINDUCTOR_CACHE_DIR": str(self.bench.inductor),
            "FAULTS_FOLDER": str(self.place),
            "COLUMNS": "400",
        }
        chosen = {**kept, **ours, **({} if self.is_eager else self.fault.environment), **more}
        return {name: value for name, value in chosen.items() if value != UNSET}

    def settings(self, *more: str) -> list[str]:
        """Return the settings of ``hotloop train``."""
        fault = self.fault
        compiled = ["training.optimization.use_torch_compile=true", f"compile.preset={fault.preset}"]
        return [
            f"program.trait={fault.trait}", f"training.num_epochs={3 if fault.trait == 'workers' else 1}",
            "training.early_stopping_patience=null", "training.checkpoint_every_steps=5",
            "compile.measure_eager_steps=0", f"run.folder={self.place / 'run'}",
            *([] if self.is_eager else compiled), *more,
        ]  # fmt: skip

    def command(self, *arguments: str, plant: bool = True) -> list[str]:
        """Return the command of the way; ``arguments`` replace the settings of ``hotloop train``."""
        fault, train = self.fault, self.way == "train"
        planted = fault.plant if plant and (not self.is_eager or fault.as_eager) else ""
        preset = "" if self.is_eager else fault.preset
        chosen = [f"--trait={fault.trait}", f"--preset={preset}", f"--plant={planted}", *["--shared"] * fault.shared]
        after = (arguments or self.settings()) if train else ()
        return [self.bench.python, "-W", "ignore", "-m", "benchmarks.faults.child", self.way, *after, *chosen]

    def start(self, command: list[str] | None = None, **environment: str) -> subprocess.Popen[bytes]:
        """Start a process; what it prints goes into ``log.txt``."""
        with (self.place / "log.txt").open("ab") as log:
            return subprocess.Popen(
                command or self.command(),
                env=self.environment(**environment),
                cwd=self.place,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def ended(self, process: subprocess.Popen[bytes]) -> int:
        """Wait for the end of a process, and keep its exit code; a hung one is killed."""
        try:
            code = process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            code = -1000
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        self.codes = (*self.codes, code)
        self.output = (self.place / "log.txt").read_text(encoding="utf-8", errors="replace")
        return code

    def run(self, *arguments: str, **environment: str) -> int:
        """Run one process to its end; return the exit code."""
        return self.ended(self.start(self.command(*arguments), **environment))

    def resume(self, *more: str, **environment: str) -> int:
        """Resume the run without the fault: that of ``hotloop train``, or eager from the program's own checkpoint."""
        if self.way != "train":
            return self.ended(self.start([*self.command(plant=False), "--preset=", "--resume"], **environment))
        command = self.command(f"run.resume={self.place / 'run'}", *more, plant=False)
        return self.ended(self.start(command, **environment))

    def begun(self, at: int = 7, command: list[str] | None = None, **environment: str) -> subprocess.Popen[bytes]:
        """Start a process, and return it while it waits before a step; `go` lets it go on."""
        process = self.start(command, FAULTS_STOP_AT=str(at), **environment)
        until = time.monotonic() + LIMIT
        while not (self.place / "reached").exists():
            if process.poll() is not None or time.monotonic() > until:
                break
            time.sleep(0.05)
        return process

    def go(self) -> None:
        """Let a process go on that waits before a step."""
        (self.place / "go").touch()

    def portable(self, text: str) -> str:
        """Leave out of a text what is of this machine: where the repository lies, and the run."""
        return text.replace(f"{ROOT}/", "").replace(f"{self.bench.folder}/", "")

    def judged(self, *expected: int, said: str | None = None) -> Cell:
        """Judge what the processes left, with the exit codes that are documented."""
        ours = judging.left_by(self.place, self.way)
        return judging.judge(
            ours and dataclasses.replace(ours, status=self.portable(ours.status)),
            self.bench.eager(self.fault, self.way),
            said=self.fault.said if said is None else said,
            output=self.portable(self.output),
            codes=self.codes,
            expected=expected or (0,),
            runs=self.fault.runs,
            unseen=self.fault.unseen,
            raises=self.fault.raises,
        )


def play(run: Run) -> Cell:
    """Run a fault that a process plants in itself."""
    if run.fault.scene is not None:
        return run.fault.scene(run)
    run.run()
    return run.judged()


class Bench:
    """Runs of one torch, and what eager left in each way.

    Args:
        python: the interpreter.
        folder: where the runs put what they write.
    """

    def __init__(self, python: str, folder: pathlib.Path) -> None:
        self.python, self.folder = python, folder
        self.inductor = folder / "inductor"
        self._eager: dict[tuple[str, str], Outcome] = {}

    def eager(self, fault: Fault, way: str) -> Outcome:
        """Return what the way leaves eager, without the fault (or with it, where it is the user's own)."""
        key = (fault.name if fault.as_eager else fault.trait, way)
        if key not in self._eager:
            run = Run(fault, way, self, eager=True)
            if fault.as_eager:
                play(run)
            else:
                run.run()
            found = judging.left_by(run.place, way)
            if found is None or len(found.losses) != 12:
                raise RuntimeError(f"eager did not run in the way {way}: {run.output[-3000:]}")
            self._eager[key] = found
        return self._eager[key]

    @functools.cached_property
    def versions(self) -> dict[str, Any]:
        """The versions of the interpreter's packages."""
        source = (
            "import importlib.metadata as m, json, platform, torch\n"
            "print(json.dumps({'torch': torch.__version__, 'python': platform.python_version(),"
            " 'lightning': m.version('lightning')}))"
        )
        done = subprocess.run([self.python, "-W", "ignore", "-c", source], capture_output=True, text=True, check=True)
        return dict(json.loads(done.stdout.splitlines()[-1]))


@contextlib.contextmanager
def small_disk(folder: pathlib.Path, size: str) -> Iterator[pathlib.Path]:
    """Mount a small disk while the block runs."""
    folder.mkdir(parents=True, exist_ok=True)
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], capture_output=True, text=True, check=False
    )
    if made.returncode:
        raise NotHereError("needs root, to mount a small disk")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)

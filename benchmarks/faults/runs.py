"""Faults around a run: disks, folders, kills, torn files, clocks. Mostly of ``hotloop train``, which has a folder."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import time
from typing import TYPE_CHECKING

from benchmarks.faults.judging import Cell
from benchmarks.faults.running import PROGRAM, UNSET, Fault, NotHereError, small_disk

if TYPE_CHECKING:
    import pathlib
    import subprocess
    from collections.abc import Iterator

    from benchmarks.faults.running import Run

WITHOUT_FOLDER = "has no folder of its own: checkpoints, and what is done about them, are the program's"
RECORDING = ("loop", "train", "lightning")
"""The ways that write into a folder: a run's, or that of ``record=``."""


def kill(process: subprocess.Popen[bytes]) -> None:
    os.killpg(process.pid, signal.SIGKILL)


def second_start(run: Run) -> Cell:
    """Resume a run that is still running."""
    first = run.begun()
    run.resume()
    run.go()
    run.ended(first)
    return run.judged(2, 0)


@contextlib.contextmanager
def fills(disk: pathlib.Path) -> Iterator[None]:
    """Leave no room on a disk while the block runs."""
    ballast = disk / "ballast"
    with ballast.open("wb", 0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    yield
    ballast.unlink()


def full_before(run: Run) -> Cell:
    """Begin on a full disk; then make room, and begin again."""
    with small_disk(run.place / "run", "8m") as disk:
        with fills(disk):
            run.run()
        if run.way != "train":
            return run.judged()
        run.run()
        return run.judged(2, 0)


def full_while(run: Run) -> Cell:
    """Fill the disk before the 8th step; make room once the run has ended, and resume it."""
    with small_disk(run.place / "run", "8m") as disk:
        process = run.begun()
        with fills(disk):
            run.go()
            run.ended(process)
        if run.way != "train":
            return run.judged()
        run.resume()
        return run.judged(1, 0)


def full_waits(run: Run) -> Cell:
    """Fill the disk before the 8th step, and make room while the run waits for it."""
    with small_disk(run.place / "run", "8m") as disk:
        process = run.begun(7, run.command(*run.settings("run.on_full_disk=wait")))
        log = run.place / "log.txt"
        with fills(disk):
            run.go()
            until = time.monotonic() + 60
            while b"waits for room" not in log.read_bytes() and time.monotonic() < until:
                time.sleep(0.1)
        run.ended(process)
        return run.judged()


def killed(run: Run) -> Cell:
    """Kill a run two steps behind its checkpoint, and resume it."""
    process = run.begun()
    kill(process)
    run.ended(process)
    run.resume()
    return run.judged(-signal.SIGKILL, 0)


def killed_in_a_compile(run: Run) -> Cell:
    """Kill a run while it compiles; a start some seconds later removes what it left."""
    process = run.begun(-1, TORCHINDUCTOR_CACHE_DIR=UNSET)
    left = [*(run.place / "tmp").glob("hotloop-compiled-*")]
    kill(process)
    run.ended(process)
    time.sleep(6)
    run.resume(TORCHINDUCTOR_CACHE_DIR=UNSET)
    if not left or any(one.exists() for one in left):
        return Cell(False, "", "", run.codes, trouble=f"what the kill left is still there: {left}")
    return run.judged(-signal.SIGKILL, 0)


def torn(run: Run, at: int) -> None:
    process = run.begun(at)
    kill(process)
    run.ended(process)
    path = run.place / "run" / "settings.yaml"
    text = path.read_text(encoding="utf-8")
    path.write_text(text[: len(text) // 2], encoding="utf-8")
    run.resume()


def torn_alone(run: Run) -> Cell:
    """Tear settings.yaml of a run without a checkpoint: it is refused, and begun again."""
    torn(run, 3)
    shutil.rmtree(run.place / "run")
    run.run()
    return run.judged(-signal.SIGKILL, 2, 0)


def torn_beside(run: Run) -> Cell:
    """Tear settings.yaml of a run with a checkpoint, which has them too."""
    torn(run, 7)
    return run.judged(-signal.SIGKILL, 0)


def exploding(run: Run) -> Cell:
    """Begin with a YAML file whose aliases make a billion values; then without it."""
    nine = ",".join(["x"] * 9)
    lines = [f"a: &a0 [{nine}]", *(f"b{at}: &a{at} [{','.join([f'*a{at - 1}'] * 9)}]" for at in range(1, 9))]
    path = run.place / "mine.yaml"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    run.run(*run.settings(), f"--config={path}")
    run.run()
    return run.judged(2, 0)


def _read_only(folder: pathlib.Path, *, on: bool) -> None:
    for one in (folder, *(path for path in folder.glob("*") if path.is_dir())):
        one.chmod(0o555 if on else 0o755)


def _unprivileged(command: list[str]) -> list[str]:
    """Take from root what lets it write into read-only folders."""
    if os.geteuid():
        return command
    if not (program := shutil.which("setpriv")):
        raise NotHereError("needs setpriv where the user is root, whom no folder keeps out")
    return [program, "--bounding-set=-dac_override,-dac_read_search", *command]


def read_only_before(run: Run) -> Cell:
    """Begin in a read-only folder; ``hotloop train`` needs it: make it writable, and begin again."""
    folder = run.place / "run"
    folder.mkdir()
    _read_only(folder, on=True)
    run.ended(run.start(_unprivileged(run.command())))
    _read_only(folder, on=False)
    if run.way != "train":
        return run.judged()
    run.run()
    return run.judged(2, 0)


def read_only_while(run: Run) -> Cell:
    """Make the folder read-only before the 8th step; then writable, and resume."""
    process = run.begun(7, _unprivileged(run.command()))
    _read_only(run.place / "run", on=True)
    run.go()
    run.ended(process)
    _read_only(run.place / "run", on=False)
    if run.way != "train":
        return run.judged()
    run.resume()
    return run.judged(1, 0)


def removed(run: Run) -> Cell:
    """Remove the folder before the 8th step; the record has to be whole at the end all the same."""
    process = run.begun()
    shutil.rmtree(run.place / "run")
    run.go()
    run.ended(process)
    cell = run.judged()
    return cell if (run.place / "run" / "record.json").exists() else Cell(False, "", "", run.codes, trouble="no record")


def clock(run: Run) -> Cell:
    """Set the clock back two hours in a run, or in a compile; no duration in the record may be negative."""
    from hotloop import record, report

    run.run()
    document = record.load(run.place / "run")
    durations = [value for step in document["steps"] for name, value in step.items() if name.endswith("seconds")]
    durations += [value for name, value in document["measurements"].items() if name.endswith(("seconds", "_ms"))]
    durations.append(document["idle_seconds"])
    report.write_html(document, run.place / "page.html")
    if document["status"] != "finished" or any(value is not None and value < 0 for value in durations):
        return Cell(False, "", "", run.codes, trouble=f"status {document['status']}, durations {durations}")
    if document["updated"] > document["created"]:
        return Cell(False, "", "", run.codes, trouble="the clock did not go back within the run")
    return run.judged()


def sigterm(run: Run) -> Cell:
    """Send SIGTERM at six moments, before the first step and between steps, and resume each time."""
    moments = random.Random(0)
    settings = run.settings()
    for steps in (1, None, 0, 1, None, 0):
        command = run.command(*settings)
        if steps is None:
            process = run.start(command)
            time.sleep(moments.uniform(0.0, 6.0))
        else:
            process = run.begun(steps, command, FAULTS_SECONDS="0.1")
            run.go()
            time.sleep(moments.uniform(0.0, 0.25))
        process.send_signal(signal.SIGTERM)
        run.ended(process)
        for name in ("reached", "go"):
            (run.place / name).unlink(missing_ok=True)
        if (run.place / "run" / "settings.yaml").exists():
            settings = [f"run.resume={run.place / 'run'}"]
    run.run(*settings)
    # Before a run has begun, SIGTERM ends the process as it ends any other.
    documented = {0, 130, -signal.SIGTERM}
    return run.judged(*(code if code in documented else 130 for code in run.codes[:-1]), 0)


def _hotloop(run: Run, *arguments: str) -> int:
    return run.ended(run.start([run.bench.python, "-W", "ignore", "-m", "hotloop", *arguments]))


def corrupt_study(run: Run) -> Cell:
    """Overwrite the SQLite file of a study with garbage: what was found stays readable."""
    study, space = run.place / "study", "hpo.space.program.lr={log: [1e-3, 1e-1]}"
    search = ["hpo", f"{PROGRAM}:make", "hpo.metric=loss", "hpo.direction=minimize", space, f"hpo.folder={study}"]
    search += ["hpo.n_trials=2", "hpo.workers=1", "training.num_epochs=1"]
    _hotloop(run, *search)
    _hotloop(run, "hpo", "best", str(study))
    best = (study / "best.yaml").read_bytes() if (study / "best.yaml").exists() else b""
    (study / "study.db").write_bytes(random.Random(0).randbytes(16_384))
    _hotloop(run, *search)
    _hotloop(run, "hpo", "best", str(study))
    same = bool(best) and (study / "best.yaml").read_bytes() == best
    return _by_hand(run, (0, 0, 1, 0), "bits" if same else "")


def bundle(run: Run) -> Cell:
    """Import bundles whose paths leave their folder."""
    made = (
        "import hashlib, json, sys, zipfile\n"
        "from hotloop.cache.keys import fits\n"
        "data = b'evil()'\n"
        "digest = hashlib.sha256(data).hexdigest()\n"
        "for at, name in enumerate(('../../evil', sys.argv[1] + '/evil', 'a/../../evil')):\n"
        "    files = [[name, digest, len(data)]]\n"
        "    manifest = {'schema': 1, 'fits': fits(), 'models': {'f' * 32: 'Net'}, 'made': 0.0, 'files': files}\n"
        "    text = json.dumps(manifest).encode()\n"
        "    with zipfile.ZipFile(f'{sys.argv[1]}/{at}.zip', 'w') as file:\n"
        "        file.writestr('manifest.json', text)\n"
        "        file.writestr('manifest.sha256', hashlib.sha256(text).hexdigest())\n"
        "        file.writestr(f'objects/{digest}', data)\n"
    )
    run.ended(run.start([run.bench.python, "-W", "ignore", "-c", made, str(run.place)]))
    for at in range(3):
        _hotloop(run, "cache", "import", str(run.place / f"{at}.zip"))
    outside = [path for path in run.place.rglob("evil*") if path.is_file()]
    return _by_hand(run, (0, 2, 2, 2), "" if outside else "nothing written")


def _by_hand(run: Run, expected: tuple[int, ...], equal: str) -> Cell:
    from benchmarks.faults.judging import naming

    said, line = naming(run.fault.said, run.portable(run.output), "")
    trouble = [] if run.codes == expected else [f"exit codes {run.codes} instead of {expected}"]
    trouble += ["traceback"] if "Traceback" in run.output else []
    return Cell(run.codes == expected, said, equal, run.codes, line, trouble="; ".join(trouble))


COMMAND = {"ways": ("train",), "elsewhere": WITHOUT_FOLDER}
FOLDER = {"ways": RECORDING, "elsewhere": "writes no folder"}
FULL = "No space left on device"
FAULTS = [
    Fault("second-start", "resumed while it runs", "trains there. Wait for it", scene=second_start, **COMMAND),
    Fault("full-before", "the disk is full before the start", FULL, scene=full_before, **FOLDER),
    Fault("full-while", "the disk is full from the 8th step on", FULL, scene=full_while, **FOLDER),
    Fault("full-waits", "the same, with `run.on_full_disk=wait`", "waits for room", scene=full_waits, **COMMAND),
    Fault("kill", "killed (SIGKILL), and resumed", "leaves out 2 steps", scene=killed, **COMMAND),
    Fault(
        "kill-compile", "killed while it compiles", "", plant="wait_in_compile", scene=killed_in_a_compile, **COMMAND
    ),
    Fault("sigterm", "SIGTERM at six moments, resumed each time", "SIGTERM: finishing", scene=sigterm, **COMMAND),
    Fault("torn", "a torn `settings.yaml`", "the file is torn", scene=torn_alone, **COMMAND),
    Fault(
        "torn-beside", "a torn `settings.yaml` beside a checkpoint", "the file is torn", scene=torn_beside, **COMMAND
    ),
    Fault("yaml", "YAML whose aliases explode", "more than 100,000 values", scene=exploding, **COMMAND),
    Fault("read-only", "a read-only folder", "Permission denied", scene=read_only_before, **FOLDER),
    Fault("read-only-while", "a folder that becomes read-only", "Permission denied", scene=read_only_while, **FOLDER),
    Fault(
        "removed", "the folder is removed while it runs", "was removed while the run goes on", scene=removed, **FOLDER
    ),
    Fault("clock", "a clock that goes back two hours while it runs", "", plant="clock", scene=clock, **FOLDER),
    Fault(
        "study",
        "a corrupt SQLite study (`hotloop hpo`, then `hotloop hpo best`)",
        "not a database|malformed",
        scene=corrupt_study,
        **COMMAND,
    ),
    Fault("bundle", "a bundle whose paths leave its folder", "a file that cannot be", scene=bundle, **COMMAND),
]

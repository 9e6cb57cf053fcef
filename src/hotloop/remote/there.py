"""What a cluster runs: ``python -m hotloop.remote.there check | run | find | link``.

::

    PLACE/RUN/tree/              a copy of the working folder: Ray removes its own when the job is over
    PLACE/RUN/back/RUN/          the folder of the run, the cross-validation or the search
    PLACE/RUN/back/compiled/     what was compiled, as a shared cache (`hotloop.cache.share`)
    PLACE/RUN/back/index.json    the files in ``back`` with their checksums, signed

PLACE is ``$HOTLOOP_REMOTE_DIR``, else ``~/.local/state/hotloop/there``. Ray's folder of logs has a link to ``back``,
which is how its dashboard can send these files.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import hashlib
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hotloop import host
from hotloop.errors import DataError, HotloopError, describe
from hotloop.files import whole
from hotloop.remote import environment, signed
from hotloop.remote.listed import COMPILED, INDEX, is_name
from hotloop.version import __version__

if TYPE_CHECKING:
    from collections.abc import Sequence

BACK, TREE = "back", "tree"
SENT = "hotloop_compiled"
"""The folder of each module in which compiled code travels."""
ASKED, ASKED_FILE = "hotloop_asked", "asked.json"
"""The module, and its file, that has what a job is asked for; the job removes it."""
STORED = "stored.json"
"""The file of a folder by which ``run.storage`` knows it."""
_LOOK_SECONDS = 2.0
_WRONG_USAGE = 2


@dataclasses.dataclass(frozen=True)
class Asked:
    """What a job is asked for.

    Args:
        key: signs what it says.
        command: the verb and its arguments.
        retries: how often a run is resumed after it died.
        again: the run is on this node already.
        storage: where a run is that is on no node any more; empty where it is here.
        once: makes each file another one.
    """

    key: str
    command: list[str]
    retries: int = 0
    again: bool = False
    storage: str = ""
    once: str = ""


def place() -> Path:
    """Return the folder of all runs that were submitted to this machine."""
    given = os.environ.get("HOTLOOP_REMOTE_DIR")
    return Path(given) if given else Path.home() / ".local" / "state" / "hotloop" / "there"


def link_name(name: str) -> str:
    """Return the name of a run in Ray's folder of logs."""
    return f"hotloop-{name}"


def check(command: Sequence[str]) -> dict[str, Any]:
    """Return what this machine is and has, and what a dry run of the command says."""
    from hotloop.cache.compiled import compiled_store  # noqa: PLC0415
    from hotloop.cache.keys import fits  # noqa: PLC0415 - loads torch
    from hotloop.prove.doctor import gathering, judging  # noqa: PLC0415

    machine, here, store = gathering.gather(trials=False), fits(), compiled_store()
    kept = [] if store is None else [one.name for one in store.entries() if not one.differences(here)]
    found = {
        "hotloop": __version__,
        "digest": environment.digest(),
        "versions": environment.versions(),
        "python": platform.python_version(),
        "node": platform.node(),
        "fits": here,
        "driver": machine.driver,
        "kept": kept,
        "findings": [one.to_dict() for one in judging.judge(machine)],
        **_room(),
    }
    if command:
        tried = [*_hotloop(), command[0], "--dry-run", *command[1:]]
        done = subprocess.run(tried, capture_output=True, text=True, check=False)  # noqa: S603 - hotloop itself
        found["dry_run"] = {"code": done.returncode, "said": (done.stdout + done.stderr)[-4000:]}
    return found


def _room() -> dict[str, Any]:
    """Return the free bytes where runs are kept, or why nothing can be kept."""
    folder = place()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"\0" * 2**20)
            file.flush()
        return {"place": str(folder), "free_bytes": shutil.disk_usage(folder).free}
    except OSError as error:
        return {"place": str(folder), "problem": str(error)}


class Run:
    """One run in this job.

    Args:
        name: of the run.
        asked: the key that signs the index, the command, and how it begins.
    """

    def __init__(self, name: str, asked: Asked) -> None:
        self.folder, self._key, self._command, self._asked = place() / name, asked.key, asked.command, asked
        self._out = self.folder / BACK / name
        self._back, self._began = self.folder / BACK, self.folder / "began"
        self._known: dict[str, tuple[tuple[int, int], list[Any]]] = {}
        self._stopped, self._written = False, ""
        self._state: dict[str, Any] = {"started": time.time(), "attempts": 0}

    def prepare(self) -> None:
        """Copy the working folder, and take the compiled code that came with it.

        Raises:
            DataError: the run should be here already, and is not.
        """
        if self._asked.again and not (self.folder / TREE).is_dir():
            raise self._missing()
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        tree = self.folder / TREE
        if not tree.exists():
            part = tree.with_suffix(".part")
            shutil.rmtree(part, ignore_errors=True)
            shutil.copytree(Path.cwd(), part)
            part.rename(tree)
        self._back.mkdir(exist_ok=True)
        self.show()
        if self._asked.storage:
            self._expect()
        for sent in sorted({one for one in (Path(at, SENT) for at in sys.path if at) if one.is_dir()}):
            self._move("Compiled code that came along", str(sent), give=False)
        if not self._began.exists():  # what is compiled from here on is the run's own
            self._began.touch()

    def _expect(self) -> None:
        """Let ``run.resume=URL``, which takes ``runs/NAME`` in its working folder, take the folder that goes back."""
        self._out.mkdir(exist_ok=True)
        if not (self._out / STORED).is_file():  # by which it knows a folder that it may fill
            (self._out / STORED).write_text(
                json.dumps({"url": self._asked.storage.rstrip("/"), "saves": 0}), encoding="utf-8"
            )
        link = self.folder / TREE / "runs" / self.folder.name
        link.parent.mkdir(exist_ok=True)
        if not link.is_symlink():
            link.symlink_to(self._out, target_is_directory=True)

    def _missing(self) -> DataError:
        return DataError(f"node {platform.node()} has no run {self.folder.name} in {place()}")

    def train(self) -> int:
        """Run the command, resume it where it dies, and return its exit code."""
        retries = self._asked.retries
        signal.signal(signal.SIGTERM, self._stop)
        signal.signal(signal.SIGINT, self._stop)
        while True:
            self._state["attempts"] += 1
            code = self._attempt()
            if code in (0, _WRONG_USAGE) or self._stopped or self._state["attempts"] > retries:
                break
            again = f"attempt {self._state['attempts'] + 1} of {retries + 1}"
            _say(f"The run ended with {_ending(code)}. It is resumed: {again}")
        self._move("Compiled here", str(self._back / COMPILED), give=True)
        if code not in (0, _WRONG_USAGE):
            _say(f"Go on with it: hotloop submit resume {self.folder.name}")
        _say(f"Fetch it:      hotloop submit fetch {self.folder.name}")
        self._state |= {"code": code, "ended": time.time()}
        self._write_index()
        return code if code >= 0 else 128 - code

    def show(self) -> None:
        """Make the files readable through Ray, whose folder of logs has this job's own.

        Raises:
            DataError: there is no such run on this machine, or no such folder.
        """
        if not self._back.is_dir():
            raise self._missing()
        try:
            log = Path("/proc/self/fd/1").readlink()
            at = log.with_name(link_name(self.folder.name))
            if not log.is_file():
                raise OSError(f"this process prints into {log}")  # noqa: TRY301 - said as the others
            at.unlink(missing_ok=True)
            at.symlink_to(self._back.absolute(), target_is_directory=True)
        except OSError as error:
            raise DataError(f"Ray's folder of logs cannot be used: {error}; expected Linux, a job of Ray's") from error

    def sign_again(self) -> None:
        """List the files of a run whose job was killed before it could.

        The list of a run that ended stays as it was, and so does one that this key did not sign.
        """
        with contextlib.suppress(OSError, DataError):
            self._state = signed.loads(self._key, (self._back / INDEX).read_text(encoding="utf-8"))["state"]
            if "ended" not in self._state:
                self._write_index()

    def _stop(self, *_: object) -> None:
        self._stopped = True  # Ray sends the signal to the run as well

    def _attempt(self) -> int:
        command = [*_hotloop(), *self._arguments()]
        with subprocess.Popen(command, cwd=self.folder / TREE) as child:  # noqa: S603 - hotloop itself
            while child.poll() is None:
                self._write_index()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(_LOOK_SECONDS)
            return child.returncode

    def _arguments(self) -> list[str]:
        """Return the command, or the one that goes on with what is there already."""
        from hotloop.report import folds, runs  # noqa: PLC0415
        from hotloop.train import configure  # noqa: PLC0415

        folder, verb = self._out, self._command[0]
        if verb == "hpo":
            return [*self._command, f"hpo.folder={folder}"]
        if (folder / runs.SETTINGS).is_file() or folds.SCHEMA.is_at(folder):
            return [verb, configure.resume(folder)]
        if self._asked.storage:
            return [verb, configure.resume(self._asked.storage)]
        return [*self._command, f"run.folder={folder}"]

    def _write_index(self) -> None:
        """Write which files there are, where one has changed."""
        found: dict[str, list[Any]] = {}
        for path in sorted(self._back.rglob("*")):
            name = path.relative_to(self._back).as_posix()
            if not is_name(self.folder.name, name) or not path.is_file():
                continue
            with contextlib.suppress(OSError):  # it is gone, or is replaced now: the next look finds it
                found[name] = self._entry(name, path)
        text = signed.dumps(self._key, {"files": found, "state": self._state})
        if text == self._written:
            return
        with contextlib.suppress(OSError):  # a full disk ends no run, and has room again for the next look
            with whole(self._back / INDEX, durable=False) as file:
                file.write(text.encode())
            self._written = text

    def _entry(self, name: str, path: Path) -> list[Any]:
        facts = path.stat()
        stamp = (facts.st_mtime_ns, facts.st_size)
        if name not in self._known or self._known[name][0] != stamp:
            self._known[name] = (stamp, [facts.st_size, _digest(path, facts.st_size)])
        return self._known[name][1]

    def _move(self, what: str, folder: str, *, give: bool) -> None:
        """Move compiled code to a folder, or take it from there; what fails is said, and costs the run nothing."""
        from hotloop.cache.compiled import compiled_store  # noqa: PLC0415 - loads torch
        from hotloop.cache.share import Share  # noqa: PLC0415

        store = compiled_store()
        if store is None:
            return
        try:
            share = Share(folder)
            if not give:
                _say(f"{what}: {share.pull(store)}")
                return
            began = self._began.stat().st_mtime
            others = [one.name for one in store.entries() if one.used < began]
            _say(f"{what}: {share.push(store, but=others)}")
        except (HotloopError, OSError) as error:
            _say(f"{what}: {describe(error)}. The run goes on without it.")


def _digest(path: Path, length: int) -> str:
    made = hashlib.sha256()
    with path.open("rb") as file:
        while length > 0 and (block := file.read(min(length, 2**20))):
            made.update(block)
            length -= len(block)
    return made.hexdigest()


def _hotloop() -> list[str]:
    return host.python("-m", "hotloop")


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _ending(code: int) -> str:
    return f"exit code {code}" if code >= 0 else f"signal {-code}"


def asked() -> Asked:
    """Return what this job is asked for, and remove the file that has it.

    Raises:
        DataError: the file did not come.
    """
    for at in sys.path:
        path = Path(at, ASKED, ASKED_FILE)
        if at and path.is_file():
            found = Asked(**json.loads(path.read_text(encoding="utf-8")))
            path.unlink()
            return found
    raise DataError(f"this job has no {ASKED}/{ASKED_FILE}: hotloop submit starts it, nobody else")


def main() -> None:
    """Do what the job asks for; the answer of ``check``, ``find`` and ``link`` is a signed line."""
    options = argparse.ArgumentParser()
    options.add_argument("what", choices=("check", "run", "find", "link"))
    options.add_argument("name")
    wanted = options.parse_args()
    given = asked()
    run, found = Run(wanted.name, given), dict[str, Any]()
    try:
        if wanted.what == "run":
            run.prepare()
            sys.exit(run.train())
        if wanted.what == "link":
            run.show()
            run.sign_again()
        elif wanted.what == "find":
            found = {"there": (run.folder / TREE).is_dir()}
        else:
            found = check(given.command)
    except HotloopError as error:
        if wanted.what == "run":
            sys.exit(f"hotloop: {error}")
        found = {"problem": str(error)}
    _say(f"\n{signed.dumps(given.key, found)}")


if __name__ == "__main__":
    main()

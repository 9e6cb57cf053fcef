"""The job of a run on a cluster: ``python -m hotloop.remote.there NAME [options] -- VERB [SETTING=VALUE]...``.

The run's folder is ``PLACE/NAME/back/NAME``, with PLACE ``$HOTLOOP_REMOTE_DIR``, else ``~/.local/state/hotloop/there``.
Beside it lies ``tree``, a copy of the files that travelled. Ray's folder of logs has a link to ``back``, through which
its dashboard sends the files that ``index.json`` lists.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from hotloop import host
from hotloop.errors import DataError, HotloopError
from hotloop.files import whole

INDEX = "index.json"
OWN = (".", "run.lock", "stored.json", "ui-")
"""How files of one machine begin: they say what happens there, and would be taken for what happens here."""
_LOOK_SECONDS = 2.0
_WRONG_USAGE = 2


def link_name(name: str) -> str:
    """Return the name of a run in Ray's folder of logs."""
    return f"hotloop-{name}"


class Run:
    """One run in this job.

    Args:
        name: of the run.
        command: the verb and its arguments.
        storage: where the run is kept, if it is not here; empty where it is kept nowhere else.
        again: whether the run began before.
    """

    def __init__(self, name: str, command: list[str], storage: str = "", *, again: bool = False) -> None:
        given = os.environ.get("HOTLOOP_REMOTE_DIR")
        place = Path(given) if given else Path.home() / ".local" / "state" / "hotloop" / "there"
        self.name, self._command, self._storage, self._again = name, command, storage, again
        self._tree, self._back = place / name / "tree", place / name / "back"
        self.folder = self._back / name
        self._known: dict[Path, tuple[tuple[int, int], list[object]]] = {}
        self._stopped = False

    def prepare(self) -> None:
        """Copy the working folder, and let Ray's dashboard read the folder that goes back.

        Raises:
            DataError: the run should go on, and is neither here nor stored; or Ray's folder of logs cannot be used.
        """
        if self._again and not self.folder.is_dir() and not self._storage:
            raise DataError(f"this node has no run {self.name}, and it has no run.storage: submit it anew")
        self._back.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not self._tree.exists():
            part = self._tree.with_suffix(".part")
            shutil.rmtree(part, ignore_errors=True)
            shutil.copytree(Path.cwd(), part)
            part.rename(self._tree)
        try:
            log = Path("/proc/self/fd/1").readlink()
            at = log.with_name(link_name(self.name))
            at.unlink(missing_ok=True)
            at.symlink_to(self._back.absolute(), target_is_directory=True)
        except OSError as error:
            raise DataError(f"Ray's folder of logs cannot be used: {error}; expected Linux, a job of Ray's") from error

    def train(self, retries: int) -> int:
        """Run the command, resume it where it dies, and return its exit code."""
        signal.signal(signal.SIGTERM, self._stop)
        signal.signal(signal.SIGINT, self._stop)
        for attempt in range(retries + 1):
            code = self._attempt()
            if code in (0, _WRONG_USAGE) or self._stopped:
                break
            _say(f"The run ended with exit code {code}, attempt {attempt + 1} of {retries + 1}")
        self._write_index()
        return code if code >= 0 else 128 - code

    def _stop(self, *_: object) -> None:
        self._stopped = True  # Ray sends the signal to the run as well

    def _attempt(self) -> int:
        command = host.python("-m", "hotloop", *self._arguments())
        with subprocess.Popen(command, cwd=self._tree) as child:  # noqa: S603 - hotloop itself
            while child.poll() is None:
                self._write_index()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(_LOOK_SECONDS)
            return child.returncode

    def _arguments(self) -> list[str]:
        """Return the command, or the one that goes on with what is there already."""
        from hotloop.report import folds, runs  # noqa: PLC0415
        from hotloop.train import configure  # noqa: PLC0415

        verb = self._command[0]
        if verb == "hpo":
            return [*self._command, f"hpo.folder={self.folder}"]
        if (self.folder / runs.SETTINGS).is_file() or folds.SCHEMA.is_at(self.folder):
            return [verb, configure.resume(self.folder)]
        if self._again and self._storage:
            return [verb, configure.resume(self._storage)]
        return [*self._command, f"run.folder={self.folder}"]

    def _write_index(self) -> None:
        """Write which files there are, with their sizes and checksums."""
        found = {}
        for path in sorted(self.folder.rglob("*")):
            if path.is_file() and not path.is_symlink() and not path.name.startswith(OWN):
                with contextlib.suppress(OSError):  # it is gone, or is replaced now: the next look finds it
                    found[path.relative_to(self.folder).as_posix()] = self._entry(path)
        with contextlib.suppress(OSError), whole(self._back / INDEX, durable=False) as file:  # a full disk ends no run
            file.write(json.dumps(found).encode())

    def _entry(self, path: Path) -> list[object]:
        facts = path.stat()
        stamp = (facts.st_mtime_ns, facts.st_size)
        if path not in self._known or self._known[path][0] != stamp:
            self._known[path] = (stamp, [facts.st_size, _digest(path, facts.st_size)])
        return self._known[path][1]


def _digest(path: Path, length: int) -> str:
    made = hashlib.sha256()
    with path.open("rb") as file:
        while length > 0 and (block := file.read(min(length, 2**20))):
            made.update(block)
            length -= len(block)
    return made.hexdigest()


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main() -> None:
    """Do what the job asks for, and exit as the run does."""
    options = argparse.ArgumentParser()
    options.add_argument("name")
    options.add_argument("--retries", type=int, default=0)
    options.add_argument("--storage", default="")
    options.add_argument("--again", action="store_true")
    options.add_argument("--dry-run", action="store_true")
    options.add_argument("command", nargs="+")
    asked = options.parse_args()
    if asked.dry_run:
        command = host.python("-m", "hotloop", *asked.command, "--dry-run")
        os.execv(command[0], command)  # noqa: S606 - hotloop itself
    run = Run(asked.name, asked.command, asked.storage, again=asked.again)
    try:
        run.prepare()
        sys.exit(run.train(asked.retries))
    except HotloopError as error:
        sys.exit(f"hotloop: {error}")


if __name__ == "__main__":
    main()

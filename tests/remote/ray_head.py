"""A Ray head with its dashboard on loopback, in a folder of its own, for the tests of what runs on a cluster."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

from shared import free_port

SOURCE = Path(__file__).parents[2] / "src"


class Head:
    """A head that can be killed and started anew; what it runs is in ``home``, its own files in a short folder.

    Args:
        home: of its user.
        python: of the environment that it is installed in; this one, with the hotloop of this folder, by default.
        user: the number of its user, where that is another one.
    """

    def __init__(self, home: Path, python: Path | None = None, user: int | None = None) -> None:
        self.python, self.user = python or Path(sys.executable), user
        self.source = {} if python else {"PYTHONPATH": str(SOURCE)}
        self.home, self.port, self.gcs = home, free_port(), free_port()
        self.address = f"http://127.0.0.1:{self.port}"
        self.folder = Path(tempfile.mkdtemp(prefix="hl-ray-"))  # sockets have short names
        self.place, self.cache = home / "there", home / "cache"

    def start(self, *more: str) -> None:
        """Start the head, with these arguments of ``ray start`` in place of two CPUs."""
        asked = [
            "--head", "--disable-usage-stats", f"--port={self.gcs}", f"--dashboard-port={self.port}",
            "--dashboard-host=127.0.0.1", f"--temp-dir={self.folder}",
        ]  # fmt: skip
        self._ray(self.place, [*asked, *(more or ["--num-cpus=2"])])
        self._wait()

    def join(self, place: Path, *more: str) -> None:
        """Let another node join, which keeps its runs in a folder of its own."""
        self._ray(place, [f"--address=127.0.0.1:{self.gcs}", *more])

    def _ray(self, place: Path, asked: list[str]) -> None:
        """Run ``ray start``."""
        self.home.mkdir(parents=True, exist_ok=True)
        who = {}
        if self.user is not None:
            who = {"user": self.user, "group": self.user, "extra_groups": []}
            for one in (self.home, self.folder):
                os.chown(one, self.user, self.user)
        environment = {
            **{
                name: value
                for name, value in os.environ.items()
                if not name.startswith(("RAY_", "PYTEST_", "HOTLOOP_", "XDG_", "PYTHONPATH"))
            },
            "RAY_USAGE_STATS_ENABLED": "0",
            "PATH": f"{self.python.parent}{os.pathsep}{os.environ['PATH']}",
            **self.source,
            "HOME": str(self.home),
            "HOTLOOP_REMOTE_DIR": str(place),
            "HOTLOOP_CACHE_DIR": str(self.cache),
            "OMP_NUM_THREADS": "1",
        }
        always = [
            "--node-ip-address=127.0.0.1", f"--dashboard-agent-listen-port={free_port()}",
            "--object-store-memory=100000000", "--min-worker-port=0", "--max-worker-port=0",
        ]  # fmt: skip
        with (self.home / "ray.log").open("a") as log:
            subprocess.run(
                [self.python, "-m", "ray.scripts.scripts", "start", *always, *asked],
                env=environment, cwd=self.home, check=True, timeout=900, stdout=log, stderr=log,
                **who,
            )  # fmt: skip

    def _wait(self) -> None:
        until = time.monotonic() + 300
        while True:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{self.address}/api/jobs/", timeout=30).read()
                return
            assert time.monotonic() < until, (self.home / "ray.log").read_text()
            time.sleep(0.2)

    def processes(self, of: Path | None = None) -> list[int]:
        """The processes that were started for this head: all that name its folder; or those of the node at a place."""
        named = f"HOTLOOP_REMOTE_DIR={of}\0" if of else str(self.folder)
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if named.encode() in (path / "cmdline").read_bytes() + (path / "environ").read_bytes():
                    found.append(int(path.name))
        return [one for one in found if one != os.getpid()]

    def kill(self, of: Path | None = None) -> None:
        """Kill the head, or the node at a place, as a lost machine would be: at once, with all that it runs."""
        for _ in range(3):  # some start others meanwhile
            for one in self.processes(of):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(one, signal.SIGKILL)
            time.sleep(0.2)


def git(*arguments):
    subprocess.run(["git", "-c", "user.email=a@b.c", "-c", "user.name=a", *arguments], check=True, capture_output=True)

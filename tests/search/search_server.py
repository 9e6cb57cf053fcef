"""A PostgreSQL server of one's own, on a socket in a temporary folder."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path


def find(name):
    places = [*sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True), Path("/usr/local/bin")]
    return next((str(place / name) for place in places if (place / name).is_file()), shutil.which(name))


class Server:
    """A PostgreSQL server of the tests' own, on a socket in a folder of its own."""

    def __init__(self, folder):
        self.folder, self.process = folder, None
        self.url = f"postgresql://tests@/tests?host={folder}"
        # The server refuses to run as root.
        self.user = ["setpriv", "--reuid=nobody", "--regid=nogroup", "--clear-groups"] if os.geteuid() == 0 else []

    def make(self):
        if self.user:
            shutil.chown(self.folder, "nobody", "nogroup")
        self._run(find("initdb"), "-D", self.folder / "data", "-U", "tests", "-A", "trust", "-E", "UTF8", "--no-sync")
        self.start()
        self._run(find("createdb"), "-h", self.folder, "-U", "tests", "tests")

    def start(self):
        options = f"-k {self.folder} -c listen_addresses= -c fsync=off"
        how = ["-o", options, "-l", self.folder / "log", "-w", "-t", "300"]
        self._run(find("pg_ctl"), "-D", self.folder / "data", *how, "start")

    def stop(self):
        self._run(find("pg_ctl"), "-D", self.folder / "data", "-m", "immediate", "-w", "-t", "300", "stop")

    def _run(self, *command):
        done = subprocess.run(
            [*self.user, *map(str, command)], capture_output=True, text=True, timeout=900, cwd=self.folder, check=False
        )
        if done.returncode:
            raise RuntimeError(f"{command[0]}: {done.stderr or done.stdout}")


@contextlib.contextmanager
def served():
    """Run a server; RuntimeError says why there can be none."""
    missing = [name for name in ("initdb", "pg_ctl", "createdb") if not find(name)]
    if os.geteuid() == 0 and not shutil.which("setpriv"):
        missing.append("setpriv, to run it as another user than root,")
    if missing:
        raise RuntimeError(f"{', '.join(missing)} not found")
    folder = Path(tempfile.mkdtemp(prefix="hotloop-pg-", dir="/tmp"))
    server = Server(folder)
    try:
        server.make()
        yield server
    finally:
        with contextlib.suppress(RuntimeError):
            server.stop()
        shutil.rmtree(folder, ignore_errors=True)

"""Processes of a program whose imports take most of its time: one process imports, and those of the tests are its forks.

A fork runs the program as ``python -c`` would, from its first line to the end of the interpreter, in a session of its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile

_SERVER = """
import json, os, socket, sys
_line = socket.socket(fileno=int(sys.argv[1]))
{imports}
while True:
    _asked, _given, *_ = socket.recv_fds(_line, 65_536, 1)
    if not _asked:
        sys.exit()
    if not (_pid := os.fork()):
        break
    os.close(_given[0])
    _line.sendall(b"%d\\n" % _pid)
    _line.sendall(b"%d\\n" % os.waitstatus_to_exitcode(os.waitpid(_pid, 0)[1]))
_line.close()
os.setsid()
_asked = json.loads(_asked)
for _number in (1, 2) if _asked["errors"] else (1,):
    os.dup2(_given[0], _number)
os.close(_given[0])
sys.argv[1:] = _asked["arguments"]
{program}
"""


class Forks:
    """Makes processes of a program, one at a time.

    Args:
        imports: what each of them finds imported: lines of Python.
        program: what each of them runs, with its own arguments in ``sys.argv[1:]``.
        environment: what the environment has besides.
    """

    def __init__(self, imports: str, program: str, **environment: str) -> None:
        ours, theirs = socket.socketpair()
        source = _SERVER.format(imports=imports, program=program)
        command = [sys.executable, "-W", "ignore", "-c", source, str(theirs.fileno())]
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed by `close`
        self._server = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stderr=self._errors, pass_fds=[theirs.fileno()],
            env={**os.environ, **environment},
        )  # fmt: skip
        theirs.close()
        self._line = ours
        self.said = ours.makefile("r")

    def start(self, *arguments: str, errors: bool = False) -> Process:
        """Start one; with ``errors``, what it writes to stderr is read from its ``stdout`` as well."""
        reads, writes = os.pipe()
        asked = {"arguments": arguments, "errors": errors}
        try:
            socket.send_fds(self._line, [json.dumps(asked).encode()], [writes])
            pid = int(self.said.readline())
        except (OSError, ValueError) as error:
            self._errors.seek(0)
            code = self._server.wait(900)
            raise RuntimeError(f"the process that imports ended ({code}): {self._errors.read()[-4000:]}") from error
        os.close(writes)
        return Process(self, pid, reads)

    def close(self) -> None:
        """End the process that imported."""
        self.said.close()
        self._line.close()
        self._server.wait(900)
        self._errors.close()


class Process:
    """One of them, held as a `subprocess.Popen` is."""

    def __init__(self, forks: Forks, pid: int, reads: int) -> None:
        self.pid, self.returncode, self._forks = pid, None, forks
        self.stdout = open(reads, encoding="utf-8")  # noqa: SIM115 - closed by `end`

    def poll(self) -> int | None:
        """Give its exit code, or None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float = 900) -> int:
        """Wait for its end, and give its exit code: negative for a signal."""
        if self.returncode is None:
            if not select.select([self._forks.said], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            self.returncode = int(self._forks.said.readline())
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send it a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """End it at once."""
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float = 900) -> tuple[str, None]:
        """Read all that it still writes, and wait for its end."""
        out = self.stdout.read()
        self.wait(timeout)
        return out, None

    def end(self) -> None:
        """End it and what it started, and close what is read of it."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.wait()
        self.stdout.close()

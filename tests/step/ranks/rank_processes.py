"""Starts the processes of a program of ranks, and returns what each of them tells."""

import json
import os
import subprocess
import sys
from pathlib import Path

SECONDS = 900


def processes(program, folder, *scenarios, size=2, backend=None):
    """Return exit code, output and errors of each process; none is left behind.

    Args:
        program: its path, or its name beside this file.
        folder: an empty one, in which the processes meet.
        scenarios: that each lives through.
        size: how many processes.
        backend: ``nccl`` gives each a GPU; None takes ``PEERS_BACKEND``, else gloo.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    if backend is not None:
        environment["PEERS_BACKEND"] = backend
    path = Path(__file__).parent / program
    running = [
        subprocess.Popen(
            [sys.executable, str(path), str(folder / "store"), str(rank), str(size), *scenarios],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
        )
        for rank in range(size)
    ]  # fmt: skip
    try:
        done = [one.communicate(timeout=SECONDS) for one in running]
    finally:
        for one in running:
            one.kill()
    return [(one.returncode, out, error) for one, (out, error) in zip(running, done, strict=True)]


def told_by(program, folder, *scenarios, **how):
    """Return the JSON that each process prints last; all of them have to end well."""
    done = processes(program, folder, *scenarios, **how)
    assert not any(code for code, _, _ in done), "\n".join(error[-4000:] for _, _, error in done)
    return [json.loads(out.strip().splitlines()[-1]) for _, out, _ in done]

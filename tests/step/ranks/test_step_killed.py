"""A process that is killed ends the others, which `torchrun` has started with it, within a bounded time."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.campaign  # two processes, which torchrun starts

PROGRAM = Path(__file__).parent / "killed_program.py"


@pytest.mark.parametrize("when", ["capture", "proof", "replay"])
@pytest.mark.some_of(3)
def test_a_process_that_is_killed_ends_all(when):
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        str(PROGRAM),
        when,
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, env=environment, timeout=600, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr[-3000:]
    assert "SIGKILL" in done.stderr, done.stderr[-3000:]
    assert "trained to the end" not in done.stdout

"""Lightning and Fabric under DDP and FSDP, in two processes: compiled steps train as eager ones, without a graph break."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from shared import free_port

CASES = {
    "lightning ddp", "lightning fsdp", "fabric ddp before", "fabric ddp after", "fabric ddp by setup", "fabric ddp over",
    "fabric fsdp after", "fabric fsdp by setup",
}  # fmt: skip


@pytest.mark.campaign
def test_two_processes_compile_inside_and_over_the_wrapper_and_train_as_eager():
    program = [sys.executable, "-W", "ignore", str(Path(__file__).with_name("guide_ranks.py"))]
    torchrun = {
        "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0", "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(free_port()), "TORCHELASTIC_RUN_ID": "none", "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    running = [
        subprocess.Popen(program, env={**os.environ, **torchrun, "RANK": rank, "LOCAL_RANK": rank}, **pipes)
        for rank in ("0", "1")
    ]
    try:
        done = [one.communicate(timeout=900) for one in running]
    finally:
        for one in running:
            one.kill()
    assert [one.returncode for one in running] == [0, 0], "\n".join(error[-3000:] for _, error in done)
    for out, _ in done:
        told = json.loads(out.strip().splitlines()[-1])
        assert told.keys() == CASES
        for name, (eager, ours, compiled, broken) in told.items():
            assert ours == pytest.approx(eager, rel=1e-5), name
            assert compiled > 0, name
            assert broken == 0, name

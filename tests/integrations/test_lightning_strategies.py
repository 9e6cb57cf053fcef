"""Strategies of Lightning's Trainer and of Fabric in two processes: DDP, model-parallel, and the Trainer's FSDP."""

import json
import os
import subprocess
import sys
from pathlib import Path

import lightning.pytorch as pl
import pytest
from shared import free_port

pytestmark = pytest.mark.campaign  # several processes under Lightning

PROGRAM = Path(__file__).with_name("lightning_program.py")


@pytest.mark.long
def test_two_processes_train_as_eager_with_their_steps_compiled(tmp_path):
    port = str(free_port())
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    running = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), str(tmp_path), str(rank), port],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        done = [one.communicate(timeout=900) for one in running]
    finally:
        for one in running:
            one.kill()
    assert [one.returncode for one in running] == [0, 0], "\n".join(error[-3000:] for _, error in done)
    for out, _ in done:
        told = json.loads(out.strip().splitlines()[-1])
        for how, one in told.pop("fabric").items():
            graphs = 6 if how.startswith("ddp") else 12  # one a step, or one for each of its two blocks
            assert one == {"same": True, "names": True, "state": "compiled", "graphs": graphs, "breaks": 0}, (how, one)
        for kind, one in told.items():
            assert one["same"], (kind, one)
            assert one["record"] == [1, list(range(1, 11))], (kind, one["record"])
            assert one["metrics"][0] == pytest.approx(one["metrics"][1], rel=1e-5), kind
            assert one["names"][0] == one["names"][1]
            assert (one["state"], one["compiles"], one["breaks"]) == ("compiled", 2, 0), (kind, one)
        # A step each of 12, and of validation 2 in the sanity check and 2 after each epoch; by blocks twice as many.
        assert told["ddp"]["graphs"] == 18
        assert told["model-parallel"]["graphs"] == told["fsdp"]["graphs"] == 36
        assert "DDPStrategy" in told["ddp"]["why"][0]
        for kind in ("model-parallel", "fsdp"):
            assert told["ddp"]["losses"] == pytest.approx(told[kind]["losses"], rel=1e-4), kind


def test_fsdp_of_lightning_wants_a_gpu():
    with pytest.raises(ValueError, match="FSDP"):
        pl.Trainer(accelerator="cpu", devices=2, strategy="fsdp")

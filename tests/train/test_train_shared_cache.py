"""Runs on machines that share what they compiled."""

import os
import subprocess
import sys
import textwrap

import pytest

from hotloop.cache.compiled import CompiledStore

PROGRAM = textwrap.dedent("""
    import hotloop
    import torch


    def make():
        model = torch.nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

        def step(x):
            loss = torch.nn.functional.gelu(model(x)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        return hotloop.Workload(model, optimizer, step, [(torch.ones(8, 4),)] * 12)
""")


@pytest.mark.campaign
def test_a_second_machine_takes_what_the_first_one_compiled(tmp_path):
    (tmp_path / "train.py").write_text(PROGRAM)
    said = []
    for machine in ("one", "other"):
        command = [
            sys.executable, "-m", "hotloop", "train", "train.py:make", "training.num_epochs=1",
            "training.optimization.use_torch_compile=true", "cache.share=share", f"run.folder={machine}",
        ]  # fmt: skip
        own = {**os.environ, "HOTLOOP_CACHE_DIR": str(tmp_path / f"{machine}-cache")}
        done = subprocess.run(command, cwd=tmp_path, env=own, check=True, timeout=900, capture_output=True, text=True)
        lines = [line for line in done.stdout.splitlines() if "the shared cache share" in line]
        said.append([line.partition(": ")[2].partition(",")[0] for line in lines])
    assert said == [["nothing", "1 bundle"], ["1 bundle", "nothing"]]
    assert CompiledStore(tmp_path / "other-cache" / "compiled").entries()

"""Where parts of the compiler are missing: importing works, everything runs eager, and says why."""

import json
import os
import subprocess
import sys

import pytest

TRAIN = """
import json, logging, sys
lines = []
class Keep(logging.Handler):
    def emit(self, record): lines.append(record.getMessage())
logging.getLogger("hotloop").addHandler(Keep())
import torch, hotloop
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
hotloop.compile(model, PRESET)
losses = []
for _ in range(3):
    loss = model(torch.ones(2, 4)).square().mean()
    loss.backward(); optimizer.step(); optimizer.zero_grad()
    losses.append(loss.item())
status = hotloop.status(model).components["model"]
try:
    hotloop.compile(model, PRESET, strict=True)
    strict = ""
except hotloop.errors.PresetUnavailableError as error:
    strict = str(error)
print(json.dumps({"state": status.state, "running": status.running, "why": [c.reason for c in status.causes],
                  "losses": losses, "log": lines, "strict": strict}))
"""

HIDE = """
import importlib.abc, sys
class Hide(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if any(name == part or name.startswith(part + ".") for part in {parts!r}):
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Hide())
"""
PLATFORM = "import torch, torch._dynamo, torch._inductor.compile_fx\nimport sys; sys.platform = {name!r}\n"


def run(before="", preset="default", **environment):
    program = f"{before}\nPRESET = {preset!r}\n{TRAIN}"
    env = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.strip().splitlines()[-1])


@pytest.fixture(scope="module")
def eager_losses():
    return run(preset="none")["losses"]


def assert_eager(found, why, losses):
    assert (found["state"], found["running"]) == ("eager", "none")
    assert found["losses"] == losses
    assert any(why in reason for reason in found["why"]), found["why"]
    told = [line for line in found["log"] if "cannot run here" in line]
    assert len(told) == len(set(told)) >= 1
    assert "Running eagerly" in told[0]
    assert why in found["strict"]


def test_a_torch_without_inductor(eager_losses):
    # Without all of torch._inductor torch's own optimizers do not import: what is hidden is the compiler in it.
    assert_eager(run(HIDE.format(parts=["torch._inductor.compile_fx"])), "no working Inductor", eager_losses)


@pytest.mark.parametrize("platform", ["win32", "darwin"])
def test_a_platform_without_a_compiler(platform, eager_losses, tmp_path):
    found = run(PLATFORM.format(name=platform), PATH=str(tmp_path), CXX="", CC="")
    assert_eager(found, "no C++ compiler", eager_losses)


def test_no_compiler_on_linux(eager_losses, tmp_path):
    assert_eager(run(PATH=str(tmp_path), CXX="", CC=""), "no C++ compiler", eager_losses)


def test_a_compiler_that_is_named_and_not_there(eager_losses):
    assert_eager(run(CXX="/nonexistent/g++"), "/nonexistent/g++", eager_losses)


def test_a_preset_for_a_gpu_steps_to_the_next_that_runs_here():
    found = run(preset="triton", CUDA_VISIBLE_DEVICES="")
    assert found["running"] == "inductor"
    assert found["state"] == "partial"
    assert any("no GPU" in reason for reason in found["why"])
    assert any("Running with preset inductor" in line for line in found["log"])
    assert "no GPU" in found["strict"]


def test_everything_is_eager_when_disabled(eager_losses):
    found = run(HOTLOOP_DISABLE="1")
    assert (found["state"], found["running"], found["losses"]) == ("eager", "none", eager_losses)
    assert "HOTLOOP_DISABLE=1" in found["why"][0]

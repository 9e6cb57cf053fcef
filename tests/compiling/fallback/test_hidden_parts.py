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
# From Python 3.12 on, shutil.which asks a module that Windows alone has.
PLATFORM = """
import shutil, sys, types
sys.platform = {name!r}
shutil._winapi = types.SimpleNamespace(NeedCurrentDirectoryForExePath=lambda _: False)
"""

FORKED = """
import os, sys
import torch, torch._dynamo, torch._inductor.compile_fx, hotloop
for program in PROGRAMS:
    reads, writes = os.pipe()
    child = os.fork()
    if not child:
        os.dup2(writes, 1)
        os.environ.update(program["environment"])
        exec(program["source"])
        sys.stdout.flush()
        os._exit(0)
    os.close(writes)
    with os.fdopen(reads) as said:
        print(said.read().strip().splitlines()[-1], flush=True)
    assert os.waitpid(child, 0)[1] == 0, program
"""


def told(program, **environment):
    env = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=env, timeout=900, check=False
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.strip().splitlines() if line.startswith("{")]


def source(before="", preset="default"):
    return f"{before}\nPRESET = {preset!r}\n{TRAIN}"


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """What runs tell that differ in what they find once all is imported: forked, since to import takes most of each."""
    empty = str(tmp_path_factory.mktemp("nothing"))  # what is imported finds no compiler
    nothing, all_of_it = {"PATH": empty, "CXX": "", "CC": ""}, {"PATH": os.environ["PATH"]}
    programs = {
        "eager": (source(preset="none"), all_of_it),
        "win32": (source(PLATFORM.format(name="win32")), nothing),
        "darwin": (source(PLATFORM.format(name="darwin")), nothing),
        "no compiler": (source(), nothing),
        "compiler not there": (source(), {**all_of_it, "CXX": "/nonexistent/g++"}),
        "no GPU": (source(preset="triton"), {**all_of_it, "CUDA_VISIBLE_DEVICES": ""}),
        "disabled": (source(), {**all_of_it, "HOTLOOP_DISABLE": "1"}),
    }
    given = [{"source": program, "environment": environment} for program, environment in programs.values()]
    return dict(zip(programs, told(f"PROGRAMS = {given!r}\n{FORKED}", PATH=empty), strict=True))


@pytest.fixture(scope="module")
def eager_losses(ended):
    return ended["eager"]["losses"]


def assert_eager(found, why, losses):
    assert (found["state"], found["running"]) == ("eager", "none")
    assert found["losses"] == losses
    assert any(why in reason for reason in found["why"]), found["why"]
    lines = [line for line in found["log"] if "cannot run here" in line]
    assert len(lines) == len(set(lines)) >= 1
    assert "Running eagerly" in lines[0]
    assert why in found["strict"]


@pytest.mark.campaign
def test_a_torch_without_inductor(eager_losses):
    # Without all of torch._inductor torch's own optimizers do not import: what is hidden is the compiler in it.
    found = told(source(HIDE.format(parts=["torch._inductor.compile_fx"])))[-1]
    assert_eager(found, "no working Inductor", eager_losses)


@pytest.mark.campaign
@pytest.mark.parametrize("platform", ["win32", "darwin"])
def test_a_platform_without_a_compiler(platform, ended, eager_losses):
    assert_eager(ended[platform], "no C++ compiler", eager_losses)


def test_no_compiler_on_linux(ended, eager_losses):
    assert_eager(ended["no compiler"], "no C++ compiler", eager_losses)


def test_a_compiler_that_is_named_and_not_there(ended, eager_losses):
    assert_eager(ended["compiler not there"], "/nonexistent/g++", eager_losses)


def test_a_preset_for_a_gpu_steps_to_the_next_that_runs_here(ended):
    found = ended["no GPU"]
    assert found["running"] == "inductor"
    assert found["state"] == "partial"
    assert any("no GPU" in reason for reason in found["why"])
    assert any("Running with preset inductor" in line for line in found["log"])
    assert "no GPU" in found["strict"]


def test_everything_is_eager_when_disabled(ended, eager_losses):
    found = ended["disabled"]
    assert (found["state"], found["running"], found["losses"]) == ("eager", "none", eager_losses)
    assert "HOTLOOP_DISABLE=1" in found["why"][0]

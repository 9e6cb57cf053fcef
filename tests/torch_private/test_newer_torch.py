"""A torch that is newer than all that were tested: one line says so, and what it lacks runs eager with its reason."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hotloop._torch import ledger, versions

ROOT = Path(__file__).parents[2]
PATHS = [name.path for name in ledger.LEDGER if ":" in name.path]
# What each kind of use needs most: to observe a step, to hear of a compile, to compile, to change settings, to compare.
NEEDED_MOST = (
    "torch.utils._python_dispatch:TorchDispatchMode",
    "torch._dynamo.callback:callback_handler",
    "torch._dynamo.backends.registry:lookup_backend",
    "torch._functorch:config",
    "torch._C._dynamo.guards:TensorGuards",
    "torch:_foreach_copy_",
)

# Each run is a fork of a process that has imported torch: it finds hotloop unused, and one private name hidden.
PROGRAM = """
import importlib, json, logging, os, sys
import torch, torch._dynamo, torch._inductor.compile_fx, torch._functorch.config
from hotloop._torch import ledger

def hide(path):
    real = ledger._look_up.__wrapped__
    ledger._look_up = lambda asked: (None, f"{path} is hidden") if asked == path else real(asked)

def losses_of(kind, asked):
    import hotloop
    torch.manual_seed(0)
    layers = torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6), torch.nn.ReLU(), torch.nn.Dropout(0.5), torch.nn.Linear(6, 2)
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loop = hotloop.Loop(model, optimizer, run=asked) if kind == "loop" else None
    if kind == "compile":
        hotloop.compile(model, asked)

    def step(x):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    if loop is not None:
        step = loop.step(step)
    draws = torch.Generator().manual_seed(1)
    losses = [step(torch.randn(8, 4, generator=draws)).item() for _ in range(12)]
    ran = loop.status().tier if loop else hotloop.status(model).components["model"].running if kind == "compile" else asked
    return losses, ran

def told(path):
    lines = []
    class Keep(logging.Handler):
        def emit(self, record): lines.append(record.getMessage())
    logging.getLogger("hotloop").addHandler(Keep())
    hide(path)
    torch.__version__ = "2.99.0"
    from hotloop.testing import captured_step_emulation
    found = {"eager": losses_of("eager", "eager")}
    for kind, asked in (("compile", "aot_eager"), ("loop", "aot_eager")):
        found[f"{kind} {asked}"] = losses_of(kind, asked)
    with captured_step_emulation():
        found["loop eager+graph"] = losses_of("loop", "eager+graph")
    return {"found": found, "lines": lines}

for path in sys.argv[1:]:
    sys.stdout.flush()
    child = os.fork()
    if not child:
        print(json.dumps(told(path)), flush=True)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, path
"""


def assert_lives_without(paths):
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM, *paths]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=1200, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    for path, line in zip(paths, done.stdout.splitlines(), strict=True):
        told = json.loads(line)
        eager, _ = told["found"].pop("eager")
        for what, (losses, ran) in told["found"].items():
            assert losses == pytest.approx(eager, rel=1e-5), (path, what)
            why = [one for one in told["lines"] if f"{path} is hidden" in one]
            assert ran == what.partition(" ")[2] or why, (path, what, ran, told["lines"])
        assert ["\n" in one for one in told["lines"] if "was tested on torch" in one] == [False], told["lines"]


@pytest.mark.campaign
def test_training_goes_on_without_the_names_that_it_needs_most():
    assert_lives_without(NEEDED_MOST)


@pytest.mark.campaign
@pytest.mark.long
def test_training_goes_on_without_each_name_of_the_ledger():
    assert_lives_without([path for path in PATHS if path.startswith("torch") and path not in NEEDED_MOST])


@pytest.mark.parametrize("file", ["README.md", "CONTRIBUTING.md", "docs/how-to/doctor.md"])
def test_pages_name_the_range_that_is_tested(file):
    assert versions.TESTED in " ".join((ROOT / file).read_text(encoding="utf-8").split())


def test_the_matrix_runs_the_oldest_and_the_newest():
    listed = next(line for line in (ROOT / "Makefile").read_text(encoding="utf-8").splitlines() if "MATRIX :=" in line)
    oldest, *_, newest = listed.partition(":=")[2].split()
    assert versions.parse(oldest) == versions.OLDEST
    assert versions.parse(newest) == versions.NEWEST
    assert f'"torch>={versions.OLDEST[0]}.{versions.OLDEST[1]}"' in (ROOT / "pyproject.toml").read_text(
        encoding="utf-8"
    )

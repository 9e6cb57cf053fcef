"""Real Inductor: each of its failures steps down, forward and backward, and what compiles is right."""

import copy
import json
import os
import pathlib
import subprocess
import sys

import pytest
import torch
from compiling_models import Net, Tied, broken_lowering, lowered_anew, one, rows, tokens, train

import hotloop

pytestmark = pytest.mark.inductor
STEPS = [rows(16, seed=s) for s in range(2)]


@pytest.fixture
def no_cache():
    with lowered_anew():
        yield


@pytest.mark.campaign
def test_a_model_trains_within_rounding(no_cache):
    model = Tied(layers=2)
    reference = train(copy.deepcopy(model), [(tokens(seed=s), tokens(seed=s)) for s in range(2)])
    hotloop.compile(model, "default", regions="blocks")
    mine = train(model, [(tokens(seed=s), tokens(seed=s)) for s in range(2)])
    mine.random = reference.random
    mine.assert_equal(reference, rtol=1e-4, atol=1e-5)
    status = one(model)
    assert (status.state, status.running, status.regions) == ("compiled", "default", ("Block", "rest"))


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("phase", "operator"), [("forward", torch.ops.aten.relu.default), ("backward", torch.ops.aten.sum.dim_IntList)]
)
def test_lowering_fails(phase, operator):
    model = Net()
    reference = train(copy.deepcopy(model), STEPS)
    with broken_lowering(operator):
        hotloop.compile(model, "default")
        train(model, STEPS).assert_equal(reference)
        status = one(model)
        assert (status.state, status.running, status.fallbacks) == ("partial", "aot_eager", 1)
        assert status.frames_compiled == 2
        cause = next(cause for cause in status.causes if "lowering bug" in cause.reason)
        assert cause.stage == "lower"
        assert cause.file.endswith("compiling_models.py")
        with pytest.raises(hotloop.errors.CompileFailedError, match="lowering bug"):
            hotloop.compile(Net(), "default", strict=True)(rows(16))


BROKEN = """
import copy, json, logging, sys
sys.path.insert(0, sys.argv[1])
said = []
logging.getLogger("hotloop").addHandler(type("Keep", (logging.Handler,), {"emit": lambda self, r: said.append(r.getMessage())})())
from compiling_models import Net, one, rows, train
import hotloop
model = Net()
batches = [rows(16, seed=s) for s in range(4)]
reference = train(copy.deepcopy(model), batches)
hotloop.compile(model, "default")
train(model, batches).assert_equal(reference)
print(json.dumps([one(model).to_dict(), said]))
"""


@pytest.mark.campaign
def test_a_broken_compiler_steps_down_and_the_rest_of_the_run_does_not_try_again(tmp_path):
    env = {**os.environ, "CXX": "/bin/false", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", BROKEN, str(pathlib.Path(__file__).parents[1])]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr
    status, said = json.loads(done.stdout.splitlines()[-1])
    assert (status["state"], status["running"], status["fallbacks"]) == ("partial", "aot_eager", 1)
    cause = next(cause for cause in status["causes"] if "CXX" in cause["hint"])
    assert cause["stage"] == "compile"
    failed = [line for line in said if "preset default failed" in line]
    assert ["one graph" in line for line in failed] == [True]


def test_a_compiler_that_is_not_there_is_known_before_the_first_step(monkeypatch, caplog):
    monkeypatch.setenv("CXX", "/nonexistent/g++")
    model = hotloop.compile(Net(), "default")
    status = one(model)
    assert (status.state, status.running) == ("eager", "none")
    assert "/nonexistent/g++" in status.causes[0].reason
    assert caplog.text.count("cannot run here") == 1
    reference = train(copy.deepcopy(model), STEPS)
    train(model, STEPS).assert_equal(reference)
    with pytest.raises(hotloop.errors.PresetUnavailableError, match="/nonexistent/g"):
        hotloop.compile(Net(), "default", strict=True)

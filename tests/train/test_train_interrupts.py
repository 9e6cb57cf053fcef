"""Runs that are stopped from outside, in processes of their own: what is left must be readable, and go on."""

import signal
import time

import pytest
from forked import Forks
from training_fixtures import overrides, tiny_encoder

from hotloop import record
from hotloop.train import checkpoint

pytestmark = pytest.mark.campaign  # real signals to real runs

IMPORTS = """
import lightning.fabric, torch, torch._dynamo, transformers, typer
from transformers import AutoModelForSequenceClassification, AutoTokenizer, BertForSequenceClassification
from hotloop import recipes
from hotloop.cli import app
from hotloop.recipes.criteria import encoder
from hotloop.train import compiling, configure, fit, restart, start, tracking
"""
PROGRAM = """
app(sys.argv[1:])
"""


@pytest.fixture(scope="module")
def runs():
    forks = Forks(IMPORTS, PROGRAM, OMP_NUM_THREADS="1")
    yield forks
    forks.close()


@pytest.fixture
def running(tmp_path, runs):
    """A run that would go on for long, once it has done some steps; ended with the test whatever happens."""
    tiny_encoder()
    settings = overrides(
        tmp_path, training__num_epochs=100_000, training__checkpoint_every_steps=5,
        training__early_stopping_patience="null",
    )  # fmt: skip
    process = runs.start("train", *settings, errors=True)
    try:
        until = time.monotonic() + 300
        while not (tmp_path / "run" / "checkpoints" / "last.pt").exists():
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < until, "the run does not start"
            time.sleep(0.05)
        yield process
    finally:
        process.end()


@pytest.mark.parametrize("wish", [signal.SIGINT, signal.SIGTERM])
def test_a_wish_to_stop_finishes_the_step_saves_and_says_how_to_go_on(tmp_path, running, wish):
    running.send_signal(wish)
    out, _ = running.communicate(timeout=900)
    assert running.returncode == 130, out
    assert f"{wish.name}: finishing this step" in out
    assert f"Resume with: hotloop train run.resume={tmp_path / 'run'}" in out
    document = record.load(tmp_path / "run")
    step = document["steps"][-1]["step"]
    assert (document["status"], document["error"]) == ("interrupted", f"{wish.name} at step {step}")
    assert checkpoint.load(tmp_path / "run" / "checkpoints" / "last.pt")["position"]["step"] == step
    assert (tmp_path / "run" / "report.html").is_file()

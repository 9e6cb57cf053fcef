"""A step that is lost for good: the run goes on by itself, one rung down, from its last checkpoint."""

import os
import shlex
import subprocess
import sys
import textwrap

import pytest
from training_fixtures import overrides, tiny_encoder

from hotloop import recipes, record
from hotloop.errors import ConfigError, StepLostError
from hotloop.train import checkpoint, configure, restart, start

pytestmark = pytest.mark.campaign  # lost steps in real processes

AUTO = {"training__optimization__use_torch_compile": "auto"}
LOSES_A_STEP = textwrap.dedent("""
    # Python runs this before anything else, in every process of the test.
    from hotloop.errors import StepLostError
    from hotloop.step.loop import stepping
    from hotloop.step.loop.runner import StepRunner

    stepping._UNTIMED = 0  # every step goes by the runner
    plain = StepRunner.run

    def run(self, args, kwargs, tier):
        if self.context.progress.steps + 1 == {step}:
            raise StepLostError(f"planted failure in tier {{tier.name}}, step {step}: the step cannot be undone.")
        return plain(self, args, kwargs, tier)

    StepRunner.run = run
""")


def train_in_a_process(folder, lost, settings):
    (folder / "sitecustomize.py").write_text(LOSES_A_STEP.format(step=lost))
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    return subprocess.run(
        [sys.executable, "-m", "hotloop", "train", *settings],
        capture_output=True, text=True, check=False, timeout=900, env=environment,
    )  # fmt: skip


def final(folder):
    """The validations, the best of them, and the last losses."""
    document, kept = record.load(folder), checkpoint.load(folder / "checkpoints" / "last.pt")["position"]
    metrics = [{key: value for key, value in one.items() if key != "time"} for one in document["metrics"]]
    return metrics, kept["best"], {one["step"]: one["loss"] for one in document["steps"]}


@pytest.mark.parametrize(
    ("lost", "begins"),
    [
        (11, "checkpoints/last.pt"),
        pytest.param(3, "its first step, since no checkpoint", marks=pytest.mark.long),
    ],
)
def test_a_run_that_loses_a_step_goes_on_eagerly_to_the_result_of_one_that_did_not(tmp_path, train, lost, begins):
    train(run__folder=tmp_path / "whole")
    settings = overrides(tmp_path, **AUTO, training__checkpoint_every_steps=5, run__folder=f'"{tmp_path}/it\'s, a run"')
    ended = train_in_a_process(tmp_path, lost, [*settings, "training.weight_decay=0.01"])
    assert ended.returncode == 0, ended.stdout + ended.stderr
    lines = [line for line in ended.stdout.splitlines() if "planted failure" in line]
    assert len(lines) == 1
    assert lines[0].startswith(
        f"[torch.compile] planted failure in tier eager, step {lost}: the step cannot be undone."
    )
    assert begins in lines[0]
    assert "with training.optimization.use_torch_compile=false" in lines[0]
    assert "[torch.compile] Disabled (eager execution mode)" in ended.stdout
    document = record.load(tmp_path / "it's, a run")
    assert (document["status"], document["starts"], document["error"]) == ("finished", 2, None)
    assert document["settings"]["training"]["optimization"]["use_torch_compile"] is False
    assert final(tmp_path / "it's, a run") == final(tmp_path / "whole")


def test_only_a_run_with_auto_starts_again(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "execv", lambda *_: pytest.fail("it must not start again"))
    begun = start.prepare([*overrides(tmp_path), "training.optimization.use_torch_compile=true"])
    with pytest.raises(StepLostError, match="planted"):
        restart.one_rung_down(StepLostError("planted"), begun, [])


def test_a_run_that_died_before_its_first_checkpoint_can_be_resumed(tmp_path, train, monkeypatch):
    train(run__folder=tmp_path / "whole")
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="planted"):
        patch.setattr("hotloop.train.fit._Fitting.validate", lambda _: (_ for _ in ()).throw(RuntimeError("planted")))
        train()
    again = start.prepare([f"run.resume={tmp_path / 'run'}"])
    assert (again.resume, again.folder, again.settings.run.folder) == (None, tmp_path / "run", str(tmp_path / "run"))
    assert recipes.load("criteria").train(again).status == "finished"
    assert final(tmp_path / "run") == final(tmp_path / "whole")


def test_a_folder_without_a_run_cannot_be_resumed(tmp_path):
    tiny_encoder()
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="has no checkpoint"):
        start.prepare([f"run.resume={tmp_path / 'empty'}"])


@pytest.mark.parametrize("name", ["plain-1.2", "a b,c", "it's", "back\\slash's", "ends\\", "ümlaut", "a=b", "$(x)"])
@pytest.mark.some_of(4)
def test_a_printed_command_gives_the_folder_back_whatever_its_name(tmp_path, name):
    verb, override = shlex.split(configure.again(tmp_path / name, "kfold"))[1:]
    assert verb == "kfold"
    assert configure.load([override]).run.resume == str(tmp_path / name)


def test_on_a_cluster_the_command_that_goes_on_is_one_that_works_from_afar(monkeypatch):
    monkeypatch.setenv("HOTLOOP_SUBMITTED", "20261126-120000-abcd")
    assert configure.again("/there/run") == "hotloop submit resume 20261126-120000-abcd"
    changed = configure.again("/there/run", changed="training.lr=1")
    assert changed == (
        "hotloop submit fetch --checkpoints last 20261126-120000-abcd, then hotloop train run.resume=FOLDER training.lr=1"
    )

"""``use_torch_compile=auto``: what a run decides, that it is the same training, and how it is stopped and resumed."""

import collections
import contextlib
import itertools
import signal
import threading
import time

import pytest
import torch
from training_fixtures import load

from hotloop import recipes, record
from hotloop.errors import TrainingFailedError
from hotloop.events import StepUndone, TierChanged, TierDeclined, TierProven
from hotloop.step.policy.history import forget
from hotloop.testing import captured_step_emulation
from hotloop.train import automatic, fit, start

AUTO = {"training__optimization__use_torch_compile": "auto", "training__early_stopping_patience": "null"}
OFF = {**AUTO, "training__optimization__use_torch_compile": "false"}


LONG = {"training__num_epochs": 15, "training__batch_size": 2}  # 270 steps: time enough for a capture to pay


class Clock:
    """A clock that runs on by 40 ms for each call that ran."""

    # It stands around the program as hotloop's own parts do: what it counts is no state of the step's.
    __module__ = "hotloop.testing"

    def __init__(self, ran):
        self.ran, self.began, self.reads = ran, time.perf_counter(), itertools.count()

    def read(self):
        return self.began + 0.04 * self.ran._value + 1e-6 * next(self.reads)


@contextlib.contextmanager
def launch_bound():
    """Make the encoder's Python all that takes time, however busy the machine is, and let steps be captured.

    A replay runs no Python. What has run is counted by a semaphore: a counter would be Python state of the step.
    """
    from transformers.models.bert.modeling_bert import BertEncoder

    plain = BertEncoder.forward

    with pytest.MonkeyPatch.context() as patch, captured_step_emulation():
        ran = threading.Semaphore(0)

        def slow(self, *args, **kwargs):
            ran.release()
            return plain(self, *args, **kwargs)

        patch.setattr(BertEncoder, "forward", slow)
        patch.setattr(time, "perf_counter", Clock(ran).read)
        yield


def said(capsys):
    return [line for line in capsys.readouterr().out.splitlines() if line.startswith("[torch.compile]")]


def assert_close(first, second):
    """Two folders hold the same training but for rounding: a captured AdamW corrects its bias on the device."""
    for ours, theirs in zip(history(first), history(second), strict=True):
        assert [one.keys() for one in ours.values()] == [one.keys() for one in theirs.values()]
        assert all(ours[step] == pytest.approx(theirs[step], rel=1e-3, abs=1e-6) for step in theirs)
    ours, theirs = load(first), load(second)
    # Adam turns rounding in a gradient that is nearly zero into a step of up to the learning rate: the head is robust.
    head = "net.classifier.weight"
    torch.testing.assert_close(ours["model"]["model"][head], theirs["model"]["model"][head], rtol=1e-2, atol=1e-4)
    assert torch.equal(ours["random"]["torch"], theirs["random"]["torch"])  # dropout drew the same masks


def history(folder):
    """The losses, norms and rates of the steps, and the validations, each by step."""
    document = record.load(folder)
    steps = {
        one["step"]: {key: one[key] for key in ("loss", "gradient_norm", "learning_rate")} for one in document["steps"]
    }
    return steps, {
        one["step"]: {key: one[key] for key in one if key not in ("time", "split")} for one in document["metrics"]
    }


def ran(folder):
    return [entry["running"] for entry in record.load(folder)["steps"]]


def mostly(folder, since, until=None):
    """What most steps of a stretch ran in: a step may be part of a trial at any time."""
    return collections.Counter(ran(folder)[since:until]).most_common(1)[0][0]


def at_step(monkeypatch, step, act):
    """Do something at the end of one step of the run that comes next."""
    whole = fit._Fitting.step

    def acting(self, batches):
        whole(self, batches)
        if self.position.step == step:
            act()

    monkeypatch.setattr(fit._Fitting, "step", acting)


def test_a_short_run_stays_eager_and_says_why_once_with_its_numbers(tmp_path, train, capsys):
    outcome = train(**AUTO, training__num_epochs=4)
    lines = said(capsys)
    decided = [line for line in lines if line.startswith("[torch.compile] auto at step")]
    assert lines[0].startswith("[torch.compile] auto: steps start eager and are timed; from step 9 on")
    assert len(decided) == 1
    assert "eager stays (" in decided[0]
    assert " ms a step): " in decided[0]
    assert lines[-2].startswith("[torch.compile] auto ran 36 steps eager (")
    assert "0.0 s saved, 0.0 s spent on preparing" in lines[-2]
    document = record.load(tmp_path / "run")
    assert lines[-1] == f"[torch.compile] auto decided: {document['decisions'][-1]['reason']}"
    assert set(ran(tmp_path / "run")) == {"eager"}
    assert document["components"]["model"] == {"requested": "auto", "running": "eager", "state": "eager", "causes": []}
    assert document["measurements"]["seconds_saved"] == 0
    assert document["measurements"]["eager_step_ms"] > 0
    assert "speed_up" not in document["measurements"]
    page = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert "model ran eager, as auto decided" in page
    assert "eager stays (" in page
    assert outcome.status == "finished"


@pytest.mark.campaign
def test_a_launch_bound_run_goes_on_captured_to_the_same_result(tmp_path, train, capsys):
    settings = {**LONG, "training__batch_size": 1, "training__gradient_accumulation": 2}
    train(**OFF, **settings, run__folder=tmp_path / "off")
    capsys.readouterr()
    with launch_bound():
        train(**AUTO, **settings)
    lines = said(capsys)
    assert_close(tmp_path / "run", tmp_path / "off")  # the validations between the steps as well

    assert ran(tmp_path / "run")[:8] == ["eager"] * 8
    assert mostly(tmp_path / "run", 30) == "eager+graph"
    document = record.load(tmp_path / "run")
    assert [(one["verdict"], one["tier"]) for one in document["verdicts"]] == [("proven", "eager+graph")]
    assert [one["action"] for one in document["decisions"]][:3] == ["try", "trial", "switch"]
    assert [one["kind"] for one in document["events"]].count("tier_proven") == 1  # written by the loop alone
    assert document["components"]["model"]["state"] == "captured"
    assert document["components"]["loss"]["running"] == "eager+graph"
    assert document["measurements"]["seconds_saved"] > 0
    assert "[torch.compile] Step captured as one graph (eager+graph: agrees with eager on 3 steps)" in lines
    assert any(" steps eager+graph (" in line and " s saved" in line for line in lines[-3:])
    page = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert "model ran eager+graph, as auto decided" in page
    assert "eager+graph agrees with its reference on 3 steps" in page


@pytest.mark.campaign
def test_a_captured_run_interrupted_and_resumed_is_the_run_that_was_not(tmp_path, train, monkeypatch):
    train(**OFF, **LONG, run__folder=tmp_path / "off")
    with monkeypatch.context() as patch, launch_bound():
        at_step(patch, 70, lambda: signal.raise_signal(signal.SIGINT))
        outcome = train(**AUTO, **LONG)
    assert (outcome.status, outcome.step) == ("interrupted", 70)
    assert mostly(tmp_path / "run", 30) == "eager+graph"
    kept = load(tmp_path / "run")["loop"]
    assert kept["steps"] == 70
    assert kept["account"]["saved"] > 0

    forget()  # as in another process
    with launch_bound():
        outcome = recipes.load("criteria").train(start.prepare([f"run.resume={tmp_path / 'run'}"]))
    assert outcome.status == "finished"
    assert_close(tmp_path / "run", tmp_path / "off")
    assert load(tmp_path / "run")["loop"]["steps"] == 270
    assert load(tmp_path / "run")["loop"]["account"]["saved"] > kept["account"]["saved"]
    assert ran(tmp_path / "run")[70:78] == ["eager"] * 8  # a tier is timed and proven anew in another process
    assert mostly(tmp_path / "run", 100) == "eager+graph"


def poison(monkeypatch, step):
    """Make the loss of one step NaN, through its labels."""
    plain = fit._Fitting.step

    def acting(self, batches):
        if self.position.step + 1 == step:
            for batch in batches:
                batch.labels.fill_(float("nan"))
        return plain(self, batches)

    monkeypatch.setattr(fit._Fitting, "step", acting)


@pytest.mark.parametrize(("step", "last"), [(5, 4), (75, 72)])
def test_a_loss_that_is_not_finite_ends_the_run_and_leaves_the_checkpoint_sound(
    tmp_path, train, monkeypatch, step, last
):
    poison(monkeypatch, step)
    with (
        launch_bound(),
        pytest.raises(
            TrainingFailedError, match=rf"step {step}: the loss is nan.*the step was applied, so.*no checkpoint"
        ),
    ):
        train(**AUTO, **LONG, training__checkpoint_every_steps=4)
    document = record.load(tmp_path / "run")
    assert (document["status"], len(document["steps"])) == ("failed", step)
    assert mostly(tmp_path / "run", step // 2) == ("eager" if step < 9 else "eager+graph")
    assert load(tmp_path / "run")["position"]["step"] == last
    assert all(torch.isfinite(tensor).all() for tensor in load(tmp_path / "run")["model"]["model"].values())


def test_a_model_that_cannot_be_captured_trains_on_and_says_why(tmp_path, train, capsys, monkeypatch):
    from transformers.models.bert.modeling_bert import BertPooler

    plain = BertPooler.forward

    def reads(self, hidden):
        pooled = plain(self, hidden)
        pooled.sum().item()
        return pooled

    monkeypatch.setattr(BertPooler, "forward", reads)
    with launch_bound():
        at_step(monkeypatch, 30, lambda: signal.raise_signal(signal.SIGINT))
        train(**AUTO, **LONG)
    lines = said(capsys)
    declined = [line for line in lines if line.startswith("[torch.compile] Not captured: eager+graph: ")]
    assert len(declined) == 1
    assert "test_train_auto.py:" in declined[0]
    assert any(line.startswith("[torch.compile] auto declined eager+graph: ") for line in lines[-3:])
    assert record.load(tmp_path / "run")["verdicts"][0]["verdict"] == "declined"
    assert ran(tmp_path / "run")[-1] == "eager"


@pytest.mark.parametrize(
    ("event", "line"),
    [
        (TierProven(step=9, function="f", tier="full", steps=3, worst="", seconds=0, copied_bytes=0, on_host=False),
         "[torch.compile] Model compiled with graph optimization (full: agrees with eager on 3 steps)"),
        (TierDeclined(step=9, function="f", tier="full+graph", reason="g++ is missing.", hint="install it", file="m.py", line=7),
         "[torch.compile] Compilation failed: full+graph: g++ is missing (m.py:7). install it"),
        (StepUndone(step=9, function="f", tier="full", reason="out of memory"),
         "[torch.compile] Step 10 failed in full and was done eagerly: out of memory"),
        (TierChanged(step=9, from_tier="eager", to_tier="full", reason="it pays"), ""),
    ],
)  # fmt: skip
def test_events_are_said_in_the_words_that_people_look_for(event, line):
    assert automatic._line(event) == line

"""The loop's record: written as the run goes, settled however the program ends, and readable as a report."""

import gc
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import hotloop
from hotloop import record
from hotloop.errors import ConfigError
from hotloop.report.components import components
from hotloop.report.headline import Headline
from hotloop.report.runs import row as row_of
from hotloop.report.series import Steps
from hotloop.step.loop import unclosed as unclosed_end
from hotloop.step.loop.account import TierAccount
from hotloop.step.tiers import parse

PROGRAM = """
import sys
import torch
from torch import nn
import hotloop

model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
loop = hotloop.Loop(model, optimizer, run=sys.argv[2], record=sys.argv[1])

@loop.step
def step(x):
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss

for number in range(40):
    step(torch.randn(2, 4))
print("trained", flush=True)
if sys.argv[3] == "raise":
    raise ValueError("mine")
if sys.argv[3] == "wait":
    sys.stdin.read()
"""


def program(folder, run, ending, **kwargs):
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(folder), run, ending],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **kwargs,
    )  # fmt: skip


@pytest.mark.campaign
@pytest.mark.parametrize(("ending", "status"), [("end", "finished"), ("raise", "failed")])
def test_a_program_that_never_closes_its_loop_has_a_settled_record(tmp_path, ending, status):
    running = program(tmp_path / "run", "auto", ending)
    _, errors = running.communicate(timeout=900)
    assert (running.returncode == 0) == (ending == "end"), errors
    document = record.load(tmp_path / "run")
    assert document["status"] == status
    assert 33 <= document["steps"][-1]["step"] <= 40  # while eager stays, one step in eight is timed
    assert document["decisions"]
    if ending == "raise":
        assert document["error"] == "ValueError: mine"


@pytest.mark.campaign
def test_a_killed_program_leaves_a_record_that_says_so(tmp_path):
    with program(tmp_path / "run", "auto", "wait") as running:
        assert running.stdout.readline() == "trained\n"
        running.send_signal(signal.SIGKILL)
    for _ in range(100):  # until nobody has the process any more
        if record.was_killed(record.load(tmp_path / "run")):
            break
        time.sleep(0.1)
    document = record.load(tmp_path / "run")
    assert record.was_killed(document)
    assert document["steps"]


def trained(run="eager+graph", **settings):
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    loop = hotloop.Loop(model, optimizer, run=run, **settings)

    @loop.step
    def step(x):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    for _ in range(20):
        step(torch.randn(2, 4))
    return loop


def unclosed(folder, ending=""):
    """Take 20 steps in a loop that lies in a cycle with its owner, as in a trainer's class, and is never closed."""
    owner = SimpleNamespace(model=nn.Linear(4, 1))
    owner.loop = hotloop.Loop(owner.model, run="auto", record=folder)

    def step(x):
        if x is None:
            raise ValueError("mine")
        return owner.model(x).square().mean()

    owner.step = owner.loop.step(step)
    for _ in range(20):
        owner.step(torch.ones(2, 4))
    if ending == "in a step":
        owner.step(None)
    if ending == "between steps":
        raise ValueError("mine")
    return owner


def in_a_child(folder, ending):
    unclosed.kept = unclosed(folder, ending)
    if ending == "killed":
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("ending", ["", "in a step", "between steps", "killed"])
def test_a_child_process_that_never_closes_its_loop_has_a_whole_record(tmp_path, ending):
    child = multiprocessing.get_context("fork").Process(target=in_a_child, args=(tmp_path, ending))
    child.start()
    child.join(60)
    assert child.exitcode == {"": 0, "killed": -signal.SIGKILL}.get(ending, 1)
    document = record.load(tmp_path)
    row = row_of(tmp_path, document)
    shown = Headline.of(document, Steps.read(document["steps"]), ()).sentence
    if ending == "killed":  # one step in eight is timed while eager stays, and written down
        assert (document["status"], record.was_killed(document), row.status) == ("running", True, "killed")
        assert 13 <= row.steps <= 20
        assert shown.startswith(f"Interrupted (killed): {row.steps} steps")
        return
    status = "failed" if ending else "finished"
    assert (document["status"], row.status, row.steps) == (status, status, 20)
    assert document["error"] == ("ValueError: mine" if ending else None)
    assert document["components"]["model"]["requested"] == "auto"
    assert shown.startswith(f"{status.capitalize()}: 20 steps")


@pytest.mark.parametrize("ending", ["", "in a step"])
def test_a_loop_that_is_collected_has_a_whole_record(tmp_path, ending):
    if ending:
        with pytest.raises(ValueError, match="mine"):
            unclosed(tmp_path, ending)
    else:
        unclosed(tmp_path)
    gc.collect()
    document = record.load(tmp_path)
    assert document["status"] == ("failed" if ending else "finished")
    assert document["error"] == ("ValueError: mine" if ending else None)
    assert document["measurements"]["steps_done"] == 20


def test_a_loop_that_cannot_be_made_has_a_record_that_says_so(tmp_path):
    model = nn.Linear(4, 1)
    with pytest.raises(ConfigError) as refused:
        hotloop.Loop(model, run="auto", layout="sideways", record=tmp_path)
    document = record.load(tmp_path)
    assert document["status"] == "failed"
    assert str(refused.value) in document["error"]


def test_a_run_that_ended_short_of_what_it_was_told_is_told_so(tmp_path):
    with trained("eager", total_steps=200, record=tmp_path):
        pass
    document = record.load(tmp_path)
    row = row_of(tmp_path, document)
    assert row.status == "finished"
    shown = Headline.of(document, Steps.read(document["steps"]), ()).sentence
    assert shown.startswith("Ended at step 20 of 200")


class Shown:
    """What `_ending` asks of an account."""

    def __init__(self, error=None):
        self.error = error

    def raised_last(self, error):
        return error is self.error


def test_an_error_that_a_notebook_showed_ends_the_run_only_where_no_step_came_after_it(monkeypatch):
    shown = ValueError("in another cell")
    monkeypatch.setattr(sys, "last_value", shown, raising=False)
    assert unclosed_end._ending(Shown()) is shown  # a program ends with it
    monkeypatch.setattr(sys, "ps1", "In : ", raising=False)
    assert unclosed_end._ending(Shown()) is None
    assert unclosed_end._ending(Shown(shown)) is shown


def test_an_error_that_was_shown_before_the_loop_was_made_does_not_end_it(monkeypatch):
    monkeypatch.setattr(sys, "last_value", ValueError("of another test"), raising=False)
    with trained("eager"):
        assert unclosed_end._ending(Shown()) is None


def test_the_record_and_the_report_tell_what_was_proven(tmp_path):
    with hotloop.testing.captured_step_emulation(), trained() as loop:
        document = loop.record.document
        loop.report(tmp_path / "run.html")
    assert [entry["tier"] for entry in document["verdicts"]] == ["eager+graph"]
    assert {entry.get("doing") for entry in document["steps"]} >= {"survey", "capture", "proof", None}
    page = (tmp_path / "run.html").read_text(encoding="utf-8")
    assert "eager+graph" in page
    assert "20 steps" in page
    json.dumps(loop.status().to_dict())
    assert "eager+graph at step 20" in str(loop.status())


def test_the_record_of_a_closed_loop_tells_what_was_compiled():
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    with hotloop.Loop(model, optimizer, run="aot_eager") as loop:

        @loop.step
        def train_step(x):
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        for _ in range(8):
            train_step(torch.ones(2, 4))
    found = loop.record.document["components"]["model"]
    assert (found["requested"], found["state"]) == ("aot_eager", "compiled")


@pytest.mark.parametrize(
    ("tier", "state"), [("eager", "eager"), ("eager+graph", "captured"), ("aot_eager", "compiled")]
)
def test_what_auto_decided_is_told_as_that(tier, state):
    with hotloop.testing.captured_step_emulation(), trained(run="auto") as loop:
        loop.context.compiled.install(parse(tier))
        loop.context.compiled.models["model"](torch.ones(2, 4)).sum().backward()
        loop.settle()
        loop.account.running = tier
        (found,) = components(loop.record.document["components"])
    assert (found.requested, found.running, found.state) == ("auto", tier, state)
    assert found.sentence == f"ran {tier}, as auto decided"
    assert found.as_asked


def test_a_record_of_somebody_elses_gets_no_steps(tmp_path):
    owner = record.RunRecord(tmp_path / "run")
    with hotloop.testing.captured_step_emulation(), trained(record=owner):
        pass
    assert owner.document["steps"] == []
    assert owner.document["verdicts"]
    assert owner.document["status"] == "running"
    owner.finish()


def test_state_of_the_loop_goes_through_a_checkpoint():
    with hotloop.testing.captured_step_emulation(), trained() as loop:
        state = loop.state_dict()
    fresh = trained(run="eager")
    fresh.load_state_dict(json.loads(json.dumps(state)))
    assert fresh.status().step == 20
    with pytest.raises(hotloop.errors.ConfigError, match="load_state_dict"):
        fresh.load_state_dict({})


def test_the_page_counts_the_steps_that_were_not_written_down(tmp_path):
    loop = trained(run="auto")
    loop.report(tmp_path / "run.html")
    assert len(loop.record.document["steps"]) < 20
    assert "20 steps" in (tmp_path / "run.html").read_text(encoding="utf-8")
    loop.close()


class Breaks(nn.Linear):
    factor = 1

    def forward(self, x):
        torch._dynamo.graph_break()
        return super().forward(x) * self.factor


def test_the_status_says_how_often_and_where_graphs_broke_and_code_was_compiled_anew():
    model = Breaks(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    loop = hotloop.Loop(model, optimizer, run="aot_eager")

    @loop.step
    def step(x):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    for model.factor in (1,) * 8 + (2,) * 2:
        step(torch.ones(2, 4))
    begins = Breaks.forward.__code__.co_firstlineno
    status = loop.status()
    assert status.compiled == (
        f"model: 1 graph break: {__file__}:{begins + 1}",
        f"model: 1 recompile: {__file__}:{begins + 2}: self.factor changed (it was 1)",
    )
    assert all(line in " ".join(str(status).split()) for line in status.compiled)
    loop.close()


def test_what_is_said_of_a_model_says_the_name_that_it_was_given(caplog):
    models = {"generator": nn.Linear(4, 4), "critic": nn.Linear(4, 1)}
    optimizer = torch.optim.SGD([*models["generator"].parameters(), *models["critic"].parameters()], lr=0.125)
    loop = hotloop.Loop(models, optimizer, run="aot_eager")

    @loop.step
    def step(x):
        loss = models["critic"](models["generator"](x)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    for size in (2, 2, 2, 2, 3, 3, 3, 3):
        step(torch.randn(size, 4))
    loop.close()
    assert [line.partition(" recompiled")[0] for line in caplog.messages if "recompiled" in line] == [
        "generator: Linear",
        "critic: Linear",
    ]


def test_a_tier_that_only_ran_beside_another_counts_by_its_least_time():
    """The references of a proof are among a run's first steps: by their median a compile seemed to save seconds."""
    beside = TierAccount()
    for seconds in (0.5, 0.3, 0.1):
        beside.time(seconds)
    assert beside.seconds == 0.1
    steps = TierAccount(steps=3)
    for seconds in (0.5, 0.3, 0.1):
        steps.time(seconds)
    assert steps.seconds == pytest.approx(0.2)

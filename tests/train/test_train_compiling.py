import types

import pytest
import torch

from hotloop import record
from hotloop._torch import backends
from hotloop.compiling.fallback import emulation
from hotloop.errors import ConfigError
from hotloop.events import Fallback
from hotloop.testing import cudagraph_emulation
from hotloop.train import compiling, configure, fit

ON = {"training__optimization__use_torch_compile": "true"}


def lines(capsys):
    return [line for line in capsys.readouterr().out.splitlines() if line.startswith("[torch.compile]")]


def test_strict_refuses_what_this_machine_cannot_run_before_anything_is_loaded(train, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    settings = {"training__optimization__use_torch_compile": True, "compile__preset": "triton", "compile__strict": True}
    with pytest.raises(ConfigError, match=r"compile\.strict=true.*no GPU.*compile\.strict=false"):
        train(**settings)


@pytest.mark.campaign
def test_compiled_is_said_after_the_first_compiled_step_and_again_with_the_measured_speed_up(tmp_path, train, capsys):
    train(**ON, compile__preset="aot_eager", training__num_epochs=9, training__max_steps=24)
    said = lines(capsys)
    assert said[1] == "[torch.compile] Model compiled with graph optimization (aot_eager)"
    assert said[2].startswith("[torch.compile] Model compiled with graph optimization (aot_eager: ")
    assert "times the eager speed" in said[2]
    document = record.load(tmp_path / "run")
    assert [entry["running"] for entry in document["steps"]] == ["none"] * 8 + ["aot_eager"] * 16
    assert document["components"]["model"]["state"] == "compiled"
    assert document["components"]["loss"]["state"] == "eager"
    compiled = [event for event in document["events"] if event["kind"] == "compiled"]
    assert {event["step"] for event in compiled} == {9}
    assert document["measurements"]["compile_seconds"] > 0
    assert document["measurements"]["cold_seconds"] > document["measurements"]["compile_seconds"]
    assert document["measurements"]["speed_up"] > 0


def test_disabling_everything_by_the_environment_is_said(train, capsys, monkeypatch):
    monkeypatch.setenv("HOTLOOP_DISABLE", "1")
    train(**ON, compile__preset="aot_eager", training__max_steps=5)
    assert "[torch.compile] Disabled (eager execution mode)" in lines(capsys)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("compile.preset=inducter", "compile: .*inductor"),
        ("compile.components.modell.training=none", "no such component; expected one of .*model"),
        ("compile.components.model.inference=trito", "compile: .*triton"),
        ("compile.presets.mine.base=trito", "triton"),
        ("compile.ladder=[aot_eage,none]", "compile: .*aot_eager"),
    ],
)
def test_names_that_do_not_exist_are_refused_with_the_nearest(override, message):
    with pytest.raises(ConfigError, match=message):
        compiling.plan(configure.load([override]), ("model", "loss"))


def test_a_preset_of_the_users_own_can_be_named():
    settings = configure.load(
        ["compile.presets.mine={base: inductor, options: {shape_padding: true}}", "compile.preset=mine",
         "training.optimization.use_torch_compile=true"]
    )  # fmt: skip
    training, inference = compiling.plan(settings, ("model", "loss"))["model"]
    assert (training.name, training.options["shape_padding"], inference.name) == ("mine", True, "none")


def test_an_option_that_torch_does_not_have_is_refused_before_the_first_step(tmp_path, train):
    with pytest.raises(ConfigError, match="shape_paddin"):
        train(**ON, compile__options="{shape_paddin: true}")
    assert not (tmp_path / "run").exists()


def cause(reason, stage="compile", file=None):
    return types.SimpleNamespace(reason=reason, stage=stage, file=file, line=7)


@pytest.mark.parametrize(
    ("state", "running", "causes", "expected"),
    [
        ("compiled", "inductor", [], []),
        ("pending", "inductor", [], []),
        ("eager", "none", [cause("g++ is missing.\nmore")],
         ["[torch.compile] Compilation failed: g++ is missing. Running in eager mode."]),
        ("compiled", "aot_eager", [cause("lowering failed")],
         ["[torch.compile] Compilation failed: lowering failed. Running in preset aot_eager."]),
        ("partial", "aot_eager", [cause("lowering failed", file="m.py")],
         ["[torch.compile] Compilation failed: lowering failed (m.py:7). Running in preset aot_eager."]),
        ("partial", "inductor", [cause("graph break")], ["[torch.compile] Compiled in part: graph break."]),
        ("eager", "none", [], ["[torch.compile] Compilation failed: no cause is known. Running in eager mode."]),
    ],
)  # fmt: skip
def test_what_does_not_run_as_asked_is_said_with_its_cause(state, running, causes, expected):
    status = types.SimpleNamespace(state=state, running=running, requested="inductor", causes=causes)
    assert compiling.problems("", status) == expected


def test_a_compile_that_fails_is_said_and_the_run_goes_on(tmp_path, train, capsys, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("planted failure")

    monkeypatch.setattr(backends, "inductor", lambda *_, **__: fail)
    outcome = train(**ON, compile__preset="default", compile__ladder="[none]", training__max_steps=6)
    assert outcome.status == "finished"
    said = [line for line in lines(capsys) if "failed" in line]
    assert len(said) == 1
    assert said[0].startswith("[torch.compile] Compilation failed: ")
    assert "planted failure" in said[0]
    assert said[0].endswith("Running in eager mode.")
    document = record.load(tmp_path / "run")
    assert document["components"]["model"]["state"] == "eager"
    assert any(event["kind"] == Fallback.kind and event["step"] == 4 for event in document["events"])
    assert {entry["running"] for entry in document["steps"]} == {"none"}


GRAPHS = {**ON, "compile__preset": "reduce-overhead", "compile__measure_eager_steps": 1}


@pytest.fixture
def graphs():
    """CUDA graphs, on any machine."""
    with cudagraph_emulation() as emulation:
        yield emulation


@pytest.mark.campaign
def test_cuda_graphs_are_tried_on_copies_before_they_are_turned_on(tmp_path, train, capsys, graphs):
    train(**GRAPHS, training__max_steps=4)
    assert (
        "[torch.compile] reduce-overhead: tried on copies of the model, training and inference, and safe here"
        in lines(capsys)
    )
    document = record.load(tmp_path / "run")
    assert [entry["running"] for entry in document["steps"]] == ["none"] + ["reduce-overhead"] * 3
    assert document["components"]["model"]["state"] == "compiled"
    assert not any("model[0]" in str(event.get("component")) for event in document["events"]), (
        "a rehearsal's are its own"
    )


@pytest.mark.campaign
def test_where_cuda_graphs_are_not_safe_the_run_stays_eager_with_the_reason(
    tmp_path, train, capsys, graphs, monkeypatch
):
    def broken(self, args):
        raise RuntimeError("planted")

    monkeypatch.setattr(emulation._Graph, "run", broken)
    train(**GRAPHS, training__max_steps=4)
    (said,) = [line for line in lines(capsys) if "is not safe here" in line]
    assert "Running in eager mode." in said
    document = record.load(tmp_path / "run")
    assert [entry["running"] for entry in document["steps"]] == ["none"] * 4
    model = document["components"]["model"]
    assert (model["requested"], model["running"], model["state"]) == ("reduce-overhead", "none", "eager")
    assert model["causes"][0]["stage"] == "harness"


@pytest.mark.campaign
def test_a_rehearsal_changes_nothing_of_the_run(tmp_path, train, graphs, monkeypatch):
    train(**GRAPHS, training__max_steps=4)
    tried = [entry["loss"] for entry in record.load(tmp_path / "run")["steps"]]
    monkeypatch.setattr(fit, "unsafe", lambda *_: "")
    train(**GRAPHS, training__max_steps=4, run__folder=tmp_path / "other")
    assert [entry["loss"] for entry in record.load(tmp_path / "other")["steps"]] == tried

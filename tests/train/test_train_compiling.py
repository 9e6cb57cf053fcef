import logging
import types

import pytest
import torch

from hotloop import recipes, record
from hotloop._torch import backends
from hotloop.compiling.fallback import emulation
from hotloop.compiling.observe import NOBODY, collector
from hotloop.errors import ConfigError
from hotloop.events import Fallback, Unavailable
from hotloop.prove.harness.result import Finding, Harness
from hotloop.report import view
from hotloop.testing import cudagraph_emulation
from hotloop.train import compiling, configure, fit, rehearse

ON = {"training__optimization__use_torch_compile": "true"}


def lines(capsys):
    return [line for line in capsys.readouterr().out.splitlines() if line.startswith("[torch.compile]")]


def test_strict_refuses_what_this_machine_cannot_run_before_anything_is_loaded(train, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    settings = {"training__optimization__use_torch_compile": True, "compile__preset": "triton", "compile__strict": True}
    with pytest.raises(ConfigError, match=r"compile\.strict=true.*no GPU.*compile\.strict=false"):
        train(**settings)


def test_an_unknown_option_is_refused_though_compiling_is_off(train):
    with pytest.raises(ConfigError, match="did you mean 'shape_padding'"):
        train(compile__options="{shape_paddin: true}")


def test_off_is_said(train, capsys):
    train(training__max_steps=1)
    assert lines(capsys) == ["[torch.compile] Disabled (eager execution mode)"]


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


@pytest.mark.campaign
def test_the_eager_steps_can_be_left_out(tmp_path, train, capsys):
    train(**ON, compile__preset="aot_eager", training__max_steps=2, compile__measure_eager_steps=0)
    assert [entry["running"] for entry in record.load(tmp_path / "run")["steps"]] == ["aot_eager"] * 2
    assert lines(capsys)[-1] == "[torch.compile] Model compiled with graph optimization (aot_eager)"


@pytest.mark.campaign
def test_a_short_run_is_compiled_after_half_of_its_steps(tmp_path, train, capsys):
    train(**ON, compile__preset="aot_eager", training__max_steps=2)
    assert [entry["running"] for entry in record.load(tmp_path / "run")["steps"]] == ["none", "aot_eager"]
    assert "after 1 eager steps" in lines(capsys)[0]


def test_a_run_that_ends_before_its_compile_says_that_it_ran_otherwise_than_asked(tmp_path, train, capsys, monkeypatch):
    done = fit._Fitting.step

    def update(self, *args):
        self.live.interrupt.signal = "SIGINT" if self.position.step == 1 else None
        return done(self, *args)

    monkeypatch.setattr(fit._Fitting, "step", update)
    train(**ON, compile__preset="aot_eager", training__max_steps=16)
    why = "compile.measure_eager_steps has the first steps run eager, here 8, and there were 2"
    document = record.load(tmp_path / "run")
    model, loss = document["components"]["model"], document["components"]["loss"]
    assert (model["requested"], model["running"], model["causes"][0]["reason"]) == ("aot_eager", "none", why)
    assert (loss["requested"], loss["causes"]) == ("none", [])
    assert not view.build(document).components[0].as_asked
    assert f"[torch.compile] Not compiled: {why}" in lines(capsys)


@pytest.mark.campaign
def test_components_have_presets_of_their_own_for_training_and_inference(tmp_path, train):
    train(**ON, compile__components__loss__training="aot_eager", compile__preset="none", training__max_steps=5,
          compile__components__model__inference="aot_eager")  # fmt: skip
    components = record.load(tmp_path / "run")["components"]
    assert components["loss"]["requested"] == "aot_eager"
    assert components["loss"]["state"] == "compiled"
    assert (components["model"]["requested"], components["model"]["inference"]) == ("none", "aot_eager")
    assert components["model"]["modes"]["inference"]["compiles"] == 1
    events = record.load(tmp_path / "run")["events"]
    assert {"model", "loss"} <= {event["component"] for event in events if event["kind"] == "compiled"}


def test_disabling_everything_by_the_environment_is_said(train, capsys, monkeypatch):
    monkeypatch.setenv("HOTLOOP_DISABLE", "1")
    train(**ON, compile__preset="aot_eager", training__max_steps=5)
    assert "[torch.compile] Disabled (eager execution mode)" in lines(capsys)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("compile.preset=inducter", "compile.preset: .*inductor"),
        ("compile.components.modell.training=none", "no such component; expected one of .*model"),
        ("compile.components.model.inference=trito", "compile.components.model.inference: .*triton"),
        ("compile.presets.mine.base=trito", "triton"),
        ("compile.presets.none={base: inductor}", "compile.presets.none: .*choose another name"),
        ("compile.ladder=[aot_eage,none]", "compile.ladder: .*aot_eager"),
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


def test_recipes_are_found_by_name():
    assert recipes.load("criteria").COMPONENTS == ("model", "loss")
    with pytest.raises(ConfigError, match="did you mean criteria"):
        recipes.load("criterion")


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


@pytest.mark.campaign
def test_a_rehearsal_takes_out_its_own_events_only(tmp_path, train, graphs, monkeypatch):
    planned = rehearse.rehearse

    def beside(*args):
        found = planned(*args)
        collector.emit(Unavailable(component="another", preset="triton", missing="no GPU", running="none"), NOBODY)
        return found

    monkeypatch.setattr(rehearse, "rehearse", beside)
    train(**GRAPHS, training__max_steps=4)
    components = [event.get("component") for event in record.load(tmp_path / "run")["events"]]
    assert components.count("another") == 1
    assert "model[0]" not in components


@pytest.mark.usefixtures("graphs")
def test_a_copy_that_cannot_be_made_leaves_the_run_eager(tmp_path, train, capsys, caplog, monkeypatch):
    def refuse(self, memo):
        raise RuntimeError("no copy of this")

    monkeypatch.setattr(torch.nn.Linear, "__deepcopy__", refuse, raising=False)
    with caplog.at_level(logging.WARNING, logger="hotloop"):
        train(**GRAPHS, training__max_steps=2)
    (logged,) = [one for one in caplog.records if "could not be tried on a copy" in one.message]
    assert "no copy of this" in str(logged.exc_info[1]), "the trace tells a bug of ours from the user's model"
    assert any("could not be tried on a copy of the model" in line for line in lines(capsys))
    assert [entry["running"] for entry in record.load(tmp_path / "run")["steps"]] == ["none"] * 2


def test_without_a_gpu_there_is_nothing_to_try(tmp_path, train, monkeypatch):
    monkeypatch.setattr(fit, "unsafe", lambda *_: pytest.fail("there are no CUDA graphs here"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    train(**ON, compile__preset="triton", compile__ladder="[none]", training__max_steps=4)


def test_what_a_rehearsal_says_is_what_the_harness_would(monkeypatch):
    """What is not safe comes before what only does not run as asked, in whatever order it was found."""
    findings = (
        Finding(kind="held", what="kept", fails=False),
        Finding(kind="stepped down", what="lens is eager"),
        Finding(kind="held", what="an output of the lens"),
    )
    found = Harness(preset="reduce-overhead", inference="none", emulated=True, rounds=4, calls=2, findings=findings)
    monkeypatch.setattr(rehearse, "rehearse", lambda *_, **__: found)
    said = rehearse.tried(lambda: None, {}, {}, torch.device("cpu"), [])
    assert said == "held: an output of the lens"
    assert said in found.verdict

"""Each event that the doctor gathers, out of a real program on the CPU, with the user's line."""

import types
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from hotloop import events as ev
from hotloop.diagnose.host_sync import IN_A_SCALER
from hotloop.prove.doctor import step_operations
from hotloop.prove.doctor.examining import examine
from hotloop.prove.doctor.step_operations import EagerObserver, EagerParts, busy_event, kernel_intervals

PROGRAMS = Path(__file__).with_name("doctor_programs.py")


@pytest.fixture
def events(program):
    """Return a function that examines a program and returns the events of a class."""

    def of(name, kind, preset="aot_eager"):
        document = examine(program(name), preset=preset, steps=4)
        return [entry for entry in document["events"] if entry["kind"] == kind.kind]

    return of


@pytest.fixture
def however_small(monkeypatch):
    """Have each part told: of a step that waits for a busy core, every share is small."""
    monkeypatch.setattr(step_operations, "_LEAST_SHARE", 0.0)


def test_a_clean_program_gives_compiles_and_its_loss_only(events, line_of, however_small):
    document_events = events("clean", ev.Event)
    assert document_events == []
    found = events("clean", ev.EagerPart)
    assert [(one["part"], one["file"], one["line"]) for one in found] == [("loss", str(PROGRAMS), line_of("LOSS"))]
    assert found[0]["source"].startswith("loss = F.mse_loss(model(x), y)")
    assert found[0]["operations"] >= 1
    assert 0 < found[0]["share"] <= 1
    assert found[0]["seconds"] > 0


def test_host_syncs_have_their_line_and_how_often(events, line_of):
    found = {(one["line"], one["reason"].partition(":")[0]): one for one in events("reads", ev.HostSync)}
    assert found[line_of("READ"), "a value is read on the host"]["times"] == 2
    assert found[line_of("PRINT"), "a tensor is printed or formatted"]["times"] == 1
    assert (line_of("SIZE"), "the size of a result depends on the data") in found
    assert {one["file"] for one in found.values()} == {str(PROGRAMS)}
    assert {one["seconds"] for one in found.values()} == {None}  # on a CPU nobody waits


def test_a_grad_scalers_own_read_is_told_from_the_programs(events, line_of):
    found = {one["line"]: one["reason"] for one in events("scaled", ev.HostSync)}
    assert IN_A_SCALER in found[line_of("SCALER")]
    assert IN_A_SCALER not in found[line_of("SCALE")]
    found = {one["line"]: one["reason"] for one in events("scaled_and_fused", ev.HostSync)}
    assert set(found) == {line_of("SCALE")}, "as the advice says"


def test_a_read_in_an_installed_package_has_the_programs_line(tmp_path, monkeypatch):
    home = tmp_path / "lib" / "site-packages"
    home.mkdir(parents=True)
    (home / "some_metrics.py").write_text("def update(loss):\n    return loss.item()\n")
    monkeypatch.syspath_prepend(home)
    program = tmp_path / "measured.py"
    program.write_text(
        "import torch, hotloop, some_metrics\n"
        "def make():\n"
        "    model = torch.nn.Linear(4, 1)\n"
        "    optimizer = torch.optim.SGD(model.parameters())\n"
        "    def step(x):\n"
        "        loss = model(x).sum()\n"
        "        loss.backward()\n"
        "        some_metrics.update(loss.detach())\n"
        "    return hotloop.Workload(model, optimizer, step, [torch.ones(2, 4)])\n"
    )
    (found,) = examine(f"{program}:make", preset="none", steps=4)["events"]
    assert (found["file"], found["line"]) == (str(program), 8)
    assert found["reason"].endswith("(in some_metrics.py:2, an installed package)")


def test_what_an_optimizer_keeps_on_the_host_is_no_sync(tmp_path):
    path = tmp_path / "adam.py"
    path.write_text(
        "import torch, hotloop\n"
        "def make():\n"
        "    model = torch.nn.Linear(4, 1)\n"
        "    optimizer = torch.optim.Adam(model.parameters(), foreach=False)\n"  # reads its step count on the host
        "    def step(x):\n"
        "        model(x).sum().backward()\n"
        "        optimizer.step()\n"
        "    return hotloop.Workload(model, optimizer, step, [torch.ones(2, 4)])\n"
    )
    document = examine(f"{path}:make", preset="none", steps=4)
    assert not [one for one in document["events"] if one["kind"] == "host_sync"]


def test_a_graph_break_and_recompiles_have_their_step_and_line(events, line_of):
    found = events("breaks", ev.GraphBreak)
    assert {(one["file"], one["line"]) for one in found} == {(str(PROGRAMS), line_of("BREAK"))}
    assert all(one["step"] > 0 for one in found)
    assert events("ragged", ev.Recompiled)


def test_the_odd_batch_of_a_long_epoch_is_met(program):
    document = examine(program("long_epoch"), preset="aot_eager", steps=6)
    (recompiled,) = [one for one in document["events"] if one["kind"] == "recompiled"]
    assert "size mismatch at index 0. expected 4, actual 3" in recompiled["reason"]
    census = document["measurements"]["shapes"]["plain"]
    assert census["signatures"] == 2
    assert {dim["dim"] for dim in census["varying_dims"]} == {0}


def test_the_first_compiled_step_has_the_first_batch_of_an_epoch(program):
    """The compile is for full batches, as in a run, wherever in the epoch the eager steps ended."""
    document = examine(program("short_epoch"), preset="aot_eager", steps=4)
    (recompiled,) = [one for one in document["events"] if one["kind"] == "recompiled"]
    assert "size mismatch at index 0. expected 4, actual 3" in recompiled["reason"]


def test_a_compile_that_is_passed_by_is_found(program):
    document = examine(program("bypassed"), preset="aot_eager", steps=4)
    (found,) = [one for one in document["events"] if one["kind"] == "no_effect"]
    assert "never entered" in found["reason"]
    assert document["components"]["model"]["state"] == "eager"
    assert "no_effect" in [advice["rule"] for advice in document["advice"]]


def test_checkpointing_around_the_compiled_model_is_found_at_its_call(events, line_of):
    found = events("checkpointed", ev.CheckpointOutside)
    assert [(one["function"], one["file"], one["line"]) for one in found] == [
        ("Net", str(PROGRAMS), line_of("CHECKPOINT"))
    ]
    assert "checkpoint(model, x" in found[0]["source"]
    assert not events("clean", ev.CheckpointOutside)


def test_a_buffer_that_a_checkpoint_writes_twice_is_found(events):
    found = events("counted_twice", ev.BufferRecomputed)
    assert [one["buffer"] for one in found] == ["norm.num_batches_tracked"]
    assert not events("counted_once", ev.BufferRecomputed)
    assert not events("counted_twice_in_both", ev.BufferRecomputed)


def test_a_head_that_the_program_leaves_eager_is_named(events, line_of, however_small):
    found = {one["part"]: one for one in events("head_left", ev.EagerPart, preset=None)}
    assert found["head"]["line"] == line_of("HEAD")
    assert "body" not in found
    assert found["head"]["operations"] >= 1
    assert 0 < found["head"]["share"] <= 1


def test_how_busy_a_device_is_comes_from_the_union_of_its_kernels():
    found = busy_event([(0, 100), (50, 150), (400, 450), (400, 410)], 2, 1e-3)
    assert (found.busy, found.kernels, found.step_seconds) == (pytest.approx(0.1), 2, 1e-3)
    assert busy_event([(0, 5_000)], 1, 1e-3).busy == 1.0  # a profile's clock may run ahead
    assert busy_event([], 1, 1e-3) is None
    assert busy_event([(0, 1)], 1, 0.0) is None


def test_on_a_gpu_a_read_of_what_is_on_the_host_is_no_sync():
    look = EagerObserver(torch.device("cuda"), [])
    with look.observe():
        torch.ones(3).sum().item()
        str(torch.ones(2))
    assert look.events() == []


def test_on_a_gpu_each_part_has_a_range_of_its_own_in_the_profile():
    model = torch.nn.Linear(4, 1)
    parts = EagerParts({id(model): "model"}, torch.device("cuda"))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile, parts.observe():
        loss = F.mse_loss(model(torch.ones(2, 4)), torch.ones(2, 1))  # the part
        loss.backward()
    names = {event.name for event in profile.events() if event.name.startswith("hotloop eager part ")}
    assert len(names) >= 2
    assert kernel_intervals(profile) == []
    parts.set_seconds(dict.fromkeys(names, 0.5))
    found = parts.events(4.0)
    assert "loss" in [one.part for one in found]
    assert sum(one.seconds for one in found) == pytest.approx(0.5 * len(names))  # the backward's is shared out
    assert all(0 < one.share <= 1 for one in found)


def test_annotations_of_a_profile_are_no_kernels():
    def event(start, end, kind, *, note):
        span = types.SimpleNamespace(start=start, end=end)
        device = types.SimpleNamespace(name=kind)
        return types.SimpleNamespace(time_range=span, device_type=device, is_user_annotation=note)

    entries = [event(0, 9, "CPU", note=False), event(1, 3, "CUDA", note=False), event(0, 9, "CUDA", note=True)]
    assert kernel_intervals(types.SimpleNamespace(events=lambda: entries)) == [(1, 3)]


def test_several_models_are_components_by_name(tmp_path):
    path = tmp_path / "two.py"
    path.write_text(
        "import torch, hotloop\n"
        "def make():\n"
        "    models = [torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)]\n"
        "    optimizers = [torch.optim.SGD(one.parameters()) for one in models]\n"
        "    def step(x):\n"
        "        models[1](models[0](x)).sum().backward()\n"
        "        for one in optimizers: one.step()\n"
        "    return hotloop.Workload(models, optimizers, step, [torch.ones(2, 4)])\n"
    )
    document = examine(f"{path}:make", preset="aot_eager", steps=4)
    assert {name: part["state"] for name, part in document["components"].items()} == {
        "model[0]": "compiled",
        "model[1]": "compiled",
    }

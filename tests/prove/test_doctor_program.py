"""A workload examined from its import to its ways side by side: what is found, with the user's line."""

import logging
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from hotloop import diagnose
from hotloop import events as ev
from hotloop.diagnose.host_sync import IN_A_SCALER
from hotloop.errors import CompiledRunError, ConfigError
from hotloop.prove.doctor import examining
from hotloop.prove.doctor.examining import examine, last_batch
from hotloop.prove.doctor.observers import EagerObserver
from hotloop.report import build

PROGRAMS = Path(__file__).with_name("doctor_programs.py")


@pytest.fixture
def events(program):
    """Return a function that examines a program and returns the events of a class."""

    def of(name, kind, preset="aot_eager"):
        document = examine(program(name), preset=preset, steps=4)
        return [entry for entry in document["events"] if entry["kind"] == kind.kind]

    return of


# -- what is observed --------------------------------------------------------------------------------------------------


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
        "    optimizer = torch.optim.Adam(model.parameters(), foreach=False)\n"  # reads its step count on the host
        "    def step(x):\n"
        "        loss = model(x).sum()\n"
        "        loss.backward()\n"
        "        optimizer.step()\n"
        "        some_metrics.update(loss.detach())\n"
        "    return hotloop.Workload(model, optimizer, step, [torch.ones(2, 4)])\n"
    )
    (found,) = examine(f"{program}:make", preset="none", steps=4)["events"]
    assert (found["file"], found["line"]) == (str(program), 9)
    assert found["reason"].endswith("(in some_metrics.py:2, an installed package)")


def test_on_a_gpu_a_read_of_what_is_on_the_host_is_no_sync():
    look = EagerObserver(torch.device("cuda"), [])
    with look.observe():
        torch.ones(3).sum().item()
        str(torch.ones(2))
    assert list(look.events()) == []


def test_checkpointing_around_the_compiled_model_is_found_at_its_call(events, line_of):
    (found,) = events("checkpointed", ev.CheckpointOutside)
    assert (found["function"], found["file"], found["line"]) == ("Net", str(PROGRAMS), line_of("CHECKPOINT"))
    assert not events("clean", ev.CheckpointOutside)


@pytest.mark.parametrize(("name", "steps"), [("long_epoch", 6), ("short_epoch", 4)])
def test_the_compile_is_for_full_batches_and_the_odd_one_recompiles(program, name, steps):
    document = examine(program(name), preset="aot_eager", steps=steps)
    (recompiled,) = [one for one in document["events"] if one["kind"] == "recompiled"]
    assert "size mismatch at index 0. expected 4, actual 3" in recompiled["reason"]
    census = document["measurements"]["shapes"]["plain"]
    assert (census["signatures"], next(dim["dim"] for dim in census["varying_dims"])) == (2, 0)


class Endless(IterableDataset):
    def __iter__(self):
        yield from range(10)


@pytest.mark.parametrize(
    ("batches", "within", "shapes"),
    [
        (DataLoader(TensorDataset(torch.ones(23, 1)), batch_size=4, shuffle=True), 3, [(3, 1)]),
        (DataLoader(TensorDataset(torch.ones(23, 1)), batch_size=4), 6, None),
        (DataLoader(TensorDataset(torch.ones(23, 1)), batch_size=4, drop_last=True), 3, None),
        (DataLoader(TensorDataset(torch.ones(23, 1)), batch_size=None), 3, None),
        (DataLoader(Endless(), batch_size=3), 3, None),
        ([torch.ones(2)] * 9 + [[torch.ones(1)]], 9, [(1,)]),
        ([1, 2, 3], 3, None),
        (iter([1] * 10), 3, None),
        (lambda: [1] * 10, 3, None),
    ],
)
def test_the_last_batch_of_a_long_epoch_is_known_beforehand(batches, within, shapes):
    batch = last_batch(batches, within=within)
    assert (batch and [tuple(one.shape) for one in batch]) == shapes


class Slow(Dataset):
    """Rows that take a while to make."""

    def __len__(self):
        return 64

    def __getitem__(self, index):
        threading.Event().wait(0.004)
        return torch.zeros(4)


@pytest.mark.parametrize(
    ("batches", "before", "least"),
    [
        (DataLoader(Slow(), batch_size=4), None, 16),
        ([torch.zeros(4, 4)], lambda batch: (Slow()[0], batch)[1], 4),
        ([torch.zeros(4, 4)], None, None),
    ],
)
def test_a_step_that_waits_for_its_batch_is_told(tmp_path, monkeypatch, batches, before, least):
    from hotloop.step import Workload

    model = torch.nn.Linear(4, 4)
    monkeypatch.setattr(examining, "load_factory", lambda _: lambda: Workload(model, None, model, batches, before=before))  # fmt: skip
    found = examine("program.py:make", preset="none", steps=4)["measurements"]
    if least is None:  # nobody waits for a list
        assert "data_wait_ms" not in found
        return
    assert found["data_wait_ms"] >= least
    told = {one.rule: one for one in diagnose.diagnose({"measurements": found | {"data_step_ms": 1.0}})}
    assert "num_workers" in told["data_wait"].change


# -- the ways ----------------------------------------------------------------------------------------------------------


def test_ways_are_timed_apart_and_advice_names_the_line(program, line_of):
    document = examine(program("breaks"), preset="aot_eager", steps=6, total_steps=500)
    ways = document["measurements"]["ways"]
    assert list(ways) == ["eager", "aot_eager"]
    for figures in ways.values():
        assert figures["step_ms_low"] <= figures["step_ms"] <= figures["step_ms_high"]
        assert figures["cold_seconds"] >= 0
        assert "peak_bytes" not in figures  # nobody can tell it honestly on a CPU
    settings = document["settings"]
    assert (settings["total_steps"], settings["run"], settings["preset"]) == (500, "aot_eager", "aot_eager")
    assert document["components"]["model"]["graph_breaks"] == 1
    assert document["components"]["model"]["state"] == "compiled"
    assert document["status"] == "finished"
    assert {step["running"] for step in document["steps"]} == {"eager", "aot_eager"}
    breaks = [one for one in document["events"] if one["kind"] == "graph_break"]
    assert {(one["file"], one["line"], one["step"] > 0) for one in breaks} == {(str(PROGRAMS), line_of("BREAK"), True)}
    broken = next(advice for advice in document["advice"] if advice["rule"] == "graph_break")
    assert broken["line"] == line_of("BREAK")
    assert ".item()" in broken["source"]
    assert build(document).diagnosis.startswith("aot_eager: ")


@pytest.mark.campaign
def test_a_condition_that_is_trained_is_timed_both_ways(program):
    """Run with every compile off, ``torch.cond`` raised in the first eager step: it compiles itself, in eager, too."""
    ways = examine(program("branched"), preset="aot_eager", steps=4)["measurements"]["ways"]
    assert all(ways[name]["step_ms"] > 0 for name in ("eager", "aot_eager"))


@pytest.mark.parametrize("name", ["head_left", "wrapped"])
def test_a_program_that_compiles_itself_is_looked_at_as_it_is(program, name):
    document = examine(program(name), steps=4)
    assert list(document["measurements"]["ways"]) == ["eager", "as given"]
    assert document["settings"]["run"] == "as given"
    assert document["components"] == {}
    assert [one for one in document["events"] if one["kind"] == "compiled"]


@pytest.mark.parametrize(
    ("name", "components"), [("parts", {"body", "head"}), ("two_models", {"model[0]", "model[1]"})]
)
def test_each_model_and_each_child_of_a_dictionary_is_a_component(program, name, components):
    document = examine(program(name), preset="aot_eager", steps=4)
    assert {name: part["state"] for name, part in document["components"].items()} == dict.fromkeys(components, "compiled")  # fmt: skip


def test_a_compile_that_is_passed_by_is_found(program):
    document = examine(program("bypassed"), preset="aot_eager", steps=4)
    assert document["components"]["model"]["state"] == "eager"
    assert "no_effect" in [advice["rule"] for advice in document["advice"]]


def test_a_step_that_trains_nothing_is_told_first(program):
    document = examine(program("idle"), preset="none", steps=4)
    assert list(document["measurements"]["ways"]) == ["eager"]
    done = document["measurements"]["steps_done"]
    assert document["measurements"]["trained"] == {"parameters": 4, "unchanged": 4, "steps": done}
    assert document["advice"][0]["rule"] == "not_trained"
    trained = examine(program("clean"), preset="none", steps=4)
    assert trained["measurements"]["trained"]["unchanged"] == 0
    assert not trained["advice"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="the preset can run on this machine")
def test_a_preset_that_cannot_run_here_is_on_record(program, monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", str(tmp_path / "gone"))
    document = examine(program("clean"), preset="default", steps=4)
    (first, *_) = [one for one in document["events"] if one["kind"] == "unavailable"]
    assert "no C++ compiler" in first["missing"]
    assert document["components"]["model"]["state"] == "eager"
    assert "fallback" in [advice["rule"] for advice in document["advice"]]


def test_compiled_code_that_fails_while_it_runs_leaves_eager(program, monkeypatch):
    real = examining._Examination._run

    def run(self, way, batch):
        if way.name == "aot_eager" and len(way.first) == 2:
            raise CompiledRunError("compiled code of component 'model' failed")
        real(self, way, batch)

    monkeypatch.setattr(examining._Examination, "_run", run)
    document = examine(program("clean"), preset="aot_eager", steps=4)
    ways = document["measurements"]["ways"]
    assert "CompiledRunError" in ways["aot_eager"]["failed"]
    assert "step_ms" not in ways["aot_eager"]
    assert ways["eager"]["step_ms"] > 0
    assert "aot_eager failed: CompiledRunError" in build(document).diagnosis


def test_the_users_own_exception_reaches_them_with_its_step(program):
    with pytest.raises(KeyError, match="their own") as caught:
        examine(program("fails_in_the_third"), preset="aot_eager", steps=4)
    assert caught.value.__notes__ == ["hotloop doctor: raised in step 3, which ran eager"]


@pytest.mark.parametrize(
    ("name", "settings", "said"),
    [
        ("no_model", {}, "expected a torch Module or a sequence, got str"),
        ("no_batch", {}, "expected at least one batch"),
        ("no_workload", {}, "gave a Net, expected a hotloop.Workload"),
        ("used_up", {}, "found none a second time: give a list"),
        ("nonesuch", {}, "has no function 'nonesuch'"),
        ("wrapped", {"preset": "aot_eager"}, "compiled already by torch"),
        ("raises", {"steps": 3}, "--steps 3: expected a whole number of 4 or more"),  # before the program is made
        ("raises", {"total_steps": 0}, "--total-steps 0"),
        ("raises", {"preset": "tritn"}, "did you mean 'triton'"),
    ],
)
def test_a_workload_or_setting_that_is_wrong_is_a_config_error(program, name, settings, said):
    with pytest.raises(ConfigError, match=said):
        examine(program(name), **{"steps": 4, **settings})


def test_nothing_of_the_process_stays_changed_and_the_same_seed_makes_the_same_program(program):
    def state():
        return torch.get_float32_matmul_precision(), torch.is_grad_enabled(), sys.getprofile(), logging.getLogger("hotloop").level  # fmt: skip

    before, seen = state(), []
    for seed in (1, 2):
        torch.manual_seed(seed)
        examine(program("clean"), preset="aot_eager", steps=4)
        seen.append(torch.get_rng_state())
    assert state() == before
    assert torch.equal(*seen)

"""The recipe `focus`: what it learns from, that it learns, that it is resumed and compiled, and what outlives a call."""

import signal
import types

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode

import hotloop
from hotloop import presets, record
from hotloop._torch.module import get_entry
from hotloop.errors import ConfigError, StaleOutputError
from hotloop.recipes import focus
from hotloop.recipes.focus import allocator, program, texts
from hotloop.recipes.focus.context import BLOCK
from hotloop.testing import assert_outputs_owned, cudagraph_emulation
from hotloop.train import automatic, checkpoint, compiling, configure, fit, start
from hotloop.train.search import preparing

# On the CPU, where a run computes the same bits twice; a GPU has tests of its own.
SMALL = [*focus.TINY, "run.device=cpu", "training.max_steps=6", "training.learning_rate=0.01"]
ON = ["training.optimization.use_torch_compile=true", "compile.measure_eager_steps=0"]
NETWORKS = ("model", "gist", "lens")


@pytest.fixture(autouse=True)
def _small_data(monkeypatch):
    """Texts of random tokens in which far blocks return: what is read and cut has tests of its own."""
    generator = torch.Generator().manual_seed(0)
    found = torch.randint(257, (40, 7 * BLOCK), generator=generator)
    found[:, -BLOCK:] = found[:, BLOCK : 2 * BLOCK]
    sides = texts.Sides((texts.Document("a", "one"),), (texts.Document("b", "two"),))
    monkeypatch.setattr(texts, "load", lambda _: sides)
    data = program.Data(found[:32], found[32:])
    monkeypatch.setattr(focus, "windows", lambda *_: (types.SimpleNamespace(count=257), data))


@pytest.fixture
def train(tmp_path):
    """Train a small one into ``folder``."""

    def run(*settings, folder="run"):
        return focus.train(start.prepare(["recipe=focus", *SMALL, f"run.folder={tmp_path / folder}", *settings]))

    return run


def load(folder, name="last.pt"):
    return checkpoint.load(folder / "checkpoints" / name)


def losses(folder):
    return [one["loss"] for one in record.load(folder)["steps"]]


@pytest.mark.campaign
def test_it_learns_and_a_checkpoint_is_judged_as_the_run_judged_it(tmp_path, train):
    outcome = train("training.max_steps=40", "training.num_epochs=5")
    document = record.load(tmp_path / "run")
    first, *_, last = document["steps"]
    assert last["next_token"] < first["next_token"] - 0.3
    assert last["loss"] == pytest.approx(last["next_token"] + last["preference"], rel=1e-5)
    assert 0 <= last["agreement"] <= 1
    assert last["ready_seconds"] > 0
    assert outcome.best["loss"] == min(one["loss"] for one in document["metrics"])
    assert set(outcome.best) == set(preparing.METRICS["focus"])
    assert outcome.best["loss"] < outcome.best["loss_random"] < outcome.best["loss_recency"]  # a far block returns
    assert any(line.startswith("Nats a token at equal budget") for line in outcome.remarks)
    kept = load(tmp_path / "run", "best.pt")
    assert set(kept["model"]) == set(NETWORKS)
    judged = focus.evaluate(configure.from_dict(kept["settings"]), kept["model"])
    assert judged == pytest.approx(outcome.best, rel=1e-5)


@pytest.mark.campaign
@pytest.mark.parametrize("stop", [2, 4])
def test_interrupted_and_resumed_it_is_the_run_that_was_not(tmp_path, train, monkeypatch, stop):
    more = ["training.num_epochs=2", "training.max_steps=10"]
    train(*more, folder="whole")
    whole = fit._Fitting.step

    def acting(self, batch):
        whole(self, batch)
        if self.position.step == stop:
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(fit._Fitting, "step", acting)
        assert train(*more).status == "interrupted"
    assert focus.train(start.prepare([f"run.resume={tmp_path / 'run'}"])).status == "finished"
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    rates = [[one["learning_rate"] for one in record.load(tmp_path / name)["steps"]] for name in ("run", "whole")]
    assert rates[0] == rates[1]
    ours, theirs = load(tmp_path / "run"), load(tmp_path / "whole")
    assert ours["others"]["state[0]"] == theirs["others"]["state[0]"] == {"steps": 10}
    for name in NETWORKS:
        assert all(torch.equal(one, theirs["model"][name][key]) for key, one in ours["model"][name].items())


@pytest.mark.campaign
def test_each_network_is_compiled_for_training_and_for_inference_apart(tmp_path, train, capsys):
    train(folder="eager")
    outcome = train(
        *ON, "compile.components.model.training=none", "compile.components.lens.training=aot_eager",
        "compile.components.gist.inference=aot_eager",
    )  # fmt: skip
    found = outcome.components
    assert [found[name]["state"] for name in NETWORKS] == ["eager", "compiled", "compiled"]
    assert [found["lens"]["modes"][mode]["compiles"] for mode in ("training", "inference")] == [1, 0]
    assert [found["gist"]["modes"][mode]["compiles"] for mode in ("training", "inference")] == [0, 1]
    lines = capsys.readouterr().out
    assert "Compiling gist (aot_eager, in inference alone), lens (aot_eager)" in lines
    assert "Compilation failed" not in lines
    assert found["lens"]["graph_breaks"] == found["gist"]["graph_breaks"] == 0
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "eager"), rel=1e-5)


def test_as_shipped_only_the_model_is_compiled():
    settings = configure.load(["recipe=focus", *ON])
    assert list(compiling.plan(settings, focus.COMPONENTS)) == ["model"]


@pytest.mark.campaign
@pytest.mark.long
def test_cuda_graphs_are_tried_on_a_program_made_anew_and_the_calls_are_counted(tmp_path, train):
    train(folder="eager")
    graphs = [f"compile.components.{name}.{mode}=reduce-overhead" for name in ("gist", "lens") for mode in MODES]
    with cudagraph_emulation() as emulation:
        outcome = train(*ON, "compile.components.model.training=none", *graphs)
    document = record.load(tmp_path / "run")
    assert emulation.overwritten == []
    assert losses(tmp_path / "run") == losses(tmp_path / "eager")
    lens, gist = (document["components"][name]["modes"] for name in ("lens", "gist"))
    assert (lens["training"]["calls_per_step"], gist["training"]["calls_per_step"]) == ({"1": 6}, {"1": 6})
    assert lens["training"]["shapes"] == {"4x192x32, 4x6x32, 198x32, 12x6": 6}
    assert list(lens["inference"]["shapes"]) == [
        "4x192x32, 4x6x32, 198x32, 4x6"
    ]  # the allocator's calls, for a batch at once
    assert gist["inference"]["calls"] >= 5
    assert lens["training"]["calls_in_backward"] == lens["inference"]["calls_in_backward"] == 0
    said = "\n".join(outcome.remarks)
    assert (
        "Calls of lens in training: 1 (6 times) a step, 0 inside a backward, on 4x192x32, 4x6x32, 198x32, 12x6 (6 times)"
        in said
    )
    assert "Calls of gist in inference" in said


MODES = ("training", "inference")


def test_the_program_for_the_harness_learns_for_as_long_as_it_is_run():
    torch.manual_seed(0)
    workload = focus.make()
    batches, weight = workload.endless(), workload.model["lens"].into.weight
    for _ in range(12):  # three times its texts
        batch, before = next(batches), weight.clone()
        workload.run(batch)
        assert workload.optimizer.param_groups[0]["lr"] == pytest.approx(3e-3, rel=1e-3)
        assert not torch.equal(weight, before)


@pytest.mark.campaign
@pytest.mark.long
def test_the_harness_passes_on_the_recipes_own_program():
    found = hotloop.harness("hotloop.recipes.focus:make", "reduce-overhead", rounds=3, calls=2)
    assert found.passed, found
    assert {name: sorted(one["modes"]) for name, one in found.components.items()} == {
        name: ["inference", "training"] for name in NETWORKS
    }
    assert any("gists" in str(one) for one in found.held)


def reading(emulation=None, preset=None):
    """Train three steps and read a text after each, with the small networks under plain torch.compile.

    So is the preference loss, whose value and agreement are what a run keeps of a step.
    """
    torch.manual_seed(0)
    workload = focus.make()
    with pytest.MonkeyPatch.context() as patch:
        if emulation is not None:
            for name in ("gist", "lens"):
                workload.model[name].compile(backend=emulation.backend)
            patch.setattr(
                program.losses, "preference", torch.compile(program.losses.preference, backend=emulation.backend)
            )
        if preset is not None:
            hotloop.compile({name: workload.model[name] for name in ("gist", "lens")}, preset)
        torch.manual_seed(1)
        found, kept = [], []
        for batch, _ in zip(workload.endless(), range(3), strict=False):
            found.append(workload.run(batch))
            kept.append(workload.infer(*batch))
        return [float(value) for told in found for value in told.values()] + [
            one.sum().item() for each in kept for one in each
        ]


@pytest.mark.campaign
@pytest.mark.long
def test_every_score_that_is_kept_outlives_the_calls_after_it():
    expected = reading()
    with cudagraph_emulation() as emulation:
        assert reading(emulation) == expected
    assert emulation.overwritten == []
    with cudagraph_emulation(), assert_outputs_owned():
        assert reading(preset="reduce-overhead") == expected


@pytest.mark.parametrize(
    ("where", "kind"),
    [(allocator, tuple), (program, torch.Tensor), (program, dict)],
    ids=["the scores of a context", "the allocator's cache", "the telemetry of the preference"],
)
@pytest.mark.campaign
@pytest.mark.long
def test_without_the_one_helper_the_emulation_finds_the_fault(monkeypatch, where, kind):
    """In one place alone: the others go through it as they do, and are told apart by what they hand to it."""
    left_out = []

    def own(output):
        if not isinstance(output, kind):
            return hotloop.own(output)
        left_out.append(output)
        return output

    monkeypatch.setattr(where, "own", own)
    with cudagraph_emulation() as emulation, pytest.raises(StaleOutputError, match=r"focus|test_train_focus"):
        reading(emulation)
    assert emulation.overwritten
    assert left_out


class Reads(TorchDispatchMode):
    """Counts what waits for a value on the device."""

    found = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.found += str(func).startswith(("aten._local_scalar_dense", "aten.nonzero", "aten.is_nonzero"))
        return func(*args, **(kwargs or {}))


def test_the_allocator_waits_for_no_value():
    workload = focus.make()
    batch = next(iter(workload.read()))
    with Reads() as reads:
        workload.ready(batch)
    assert reads.found == 0
    with Reads() as reads:
        bool((torch.ones(2) == 1).all())
    assert reads.found == 1


def test_a_round_of_the_allocator_is_one_graph_and_does_the_same_edits(monkeypatch):
    monkeypatch.setattr(focus.environment, "device_of", lambda _: torch.device("cpu"))
    torch.manual_seed(0)
    workload = focus.make()
    for batch in workload.read():
        workload.run(workload.ready(batch))
    (texts, *_), lens = batch, workload.model["lens"]
    controller = workload.infer.__self__
    expected = controller.focused(texts[:, :-BLOCK])
    assert expected.edits.sum() > 0
    graphs = CompileCounterWithBackend("aot_eager")
    lens.compile(backend=graphs, fullgraph=True, dynamic=False)
    found = controller.focused(texts[:, :-BLOCK])
    assert (graphs.frame_count, len(found.scores)) == (1, controller.focus.rounds)
    assert torch.equal(found.expanded, expected.expanded)
    assert all(torch.equal(*both) for both in zip(found.scores, expected.scores, strict=True))


def test_settings_that_do_not_go_together_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"focus\.documents=3: expected a divisor of focus\.blocks"):
        configure.load(["recipe=focus", "focus.blocks=6"])
    with pytest.raises(ConfigError, match=r"focus\.lens_size=66 cannot be shared by focus\.heads=4"):
        configure.load(["recipe=focus", "focus.lens_size=66"])
    with pytest.raises(ConfigError, match=r"recipe=focus has no training\.gradient_accumulation: "):
        start.prepare(["recipe=focus", "training.gradient_accumulation=2", f"run.folder={tmp_path / 'run'}"])
    begun = start.prepare(["recipe=focus", "compile.components.lense.training=none", f"run.folder={tmp_path / 'run'}"])
    with pytest.raises(ConfigError, match=r"components\.lense: no such component"):
        focus.train(begun)
    assert not (tmp_path / "run").exists()


AUTO = "training.optimization.use_torch_compile=auto"


@pytest.mark.campaign
def test_with_auto_the_allocators_networks_have_presets_of_their_own(tmp_path, train, capsys):
    train(folder="eager")
    graphs = [f"compile.components.{name}.inference=reduce-overhead" for name in ("gist", "lens")]
    with cudagraph_emulation() as emulation:
        outcome = train(AUTO, *graphs, "compile.components.lens.training=reduce-overhead")
    lines = capsys.readouterr().out
    assert (
        "Compiling gist (reduce-overhead, in inference alone), lens (reduce-overhead, in inference alone), out" in lines
    )
    assert "tried on copies of the model, training and inference, and safe here" in lines
    assert "compile.components.lens.training='reduce-overhead' has no effect while training.optimization" in lines
    found = record.load(tmp_path / "run")["components"]
    assert {name: found[name].get("inference") for name in NETWORKS} == {
        "model": None, "gist": "reduce-overhead", "lens": "reduce-overhead",
    }  # fmt: skip
    assert all(found[name]["requested"] == "auto" for name in NETWORKS)
    assert list(found["lens"]["modes"]) == ["inference"], "the steps are the loop's"
    assert found["lens"]["modes"]["inference"]["calls"] > 6
    assert any(line.startswith("Calls of lens in inference") for line in outcome.remarks)
    assert emulation.runs > 0
    assert emulation.overwritten == []
    assert losses(tmp_path / "run") == losses(tmp_path / "eager")


def test_with_auto_what_is_not_safe_for_the_allocator_stays_eager(tmp_path, train, monkeypatch):
    monkeypatch.setattr(fit, "unsafe", lambda task, plan, *_: f"held: {', '.join(plan)}")
    with cudagraph_emulation():
        train(AUTO, "compile.components.lens.inference=reduce-overhead")
    lens = record.load(tmp_path / "run")["components"]["lens"]
    assert "held: lens" in lens["causes"][0]["reason"]
    assert "modes" not in lens or not lens["modes"]


@pytest.mark.campaign
def test_with_auto_the_steps_find_nothing_of_the_code_between_them(train, monkeypatch):
    """Where it stayed on, a step with gradients would find it, and the loop's own code would be lost."""
    entries = []

    def step(self, *given):
        entries.append([get_entry(one) for one in self.lens.modules()])
        return plain(self, *given)

    plain = program.Controller.step
    monkeypatch.setattr(program.Controller, "step", step)
    outcome = train(AUTO, "compile.components.lens.inference=aot_eager")
    assert outcome.components["lens"]["modes"]["inference"]["compiles"] == 1
    assert len(entries) >= 6
    assert all(one is None for each in entries for one in each)


@pytest.mark.campaign
@pytest.mark.parametrize("tier", ["eager+graph", "aot_eager", "aot_eager+graph"])
@pytest.mark.some_of(2)
def test_a_captured_step_and_the_allocators_compiled_networks_go_together(tier):
    from hotloop.testing import captured_step_emulation

    def run(tier, plan):
        torch.manual_seed(0)
        workload, settings = focus.make(), configure.load(["recipe=focus"])
        models = dict(workload.model)
        loop = hotloop.Loop(models, workload.optimizer, state=workload.state, run=tier, sentinel=0)
        between = compiling.Compiling(plan, settings, models, print, steps=10_000)
        running, found = automatic.Automatic(settings, models, print, loop, workload.step, between=between), []
        torch.manual_seed(1)
        for batch in [one for _ in range(3) for one in workload.read()]:
            with running.validating():
                ready = workload.ready(batch)
            found.append(float(running.step(*ready)["loss"]))
        components, tiers = running.status(), {one.name: one.steps for one in loop.status().tiers}
        running.close()
        return found, components, tiers

    eager, _, _ = run("eager", {})
    plan = {name: (presets.get("none"), presets.get("aot_eager")) for name in ("gist", "lens")}
    with captured_step_emulation():
        both, components, tiers = run(tier, plan)
    assert tiers[tier] > 4, tiers
    assert [components[name]["modes"]["inference"]["compiles"] for name in ("gist", "lens")] == [1, 1]
    assert both == pytest.approx(eager, rel=1e-4)

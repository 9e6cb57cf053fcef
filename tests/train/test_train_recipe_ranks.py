"""Our recipes on several devices: as one device with as many batches in a step, and resumed as that run."""

import dataclasses

import pytest
import torch
from test_train_recipes import SMALL
from training_fixtures import hotloop_command, overrides

from hotloop import recipes, record
from hotloop.errors import ConfigError, DataError
from hotloop.train import checkpoint, configure, start
from hotloop.train.batches import Batch, Epochs, Table
from hotloop.train.ranks import Ranks, check_shares

CPU = ["run.accelerator=cpu", "run.devices=2"]


class Shaped(Table):
    """Rows of three shapes that make no batch together."""

    apart, buckets = True, 3

    def __init__(self, rows):
        super().__init__({"x": torch.arange(float(rows))[:, None]}, torch.arange(rows))
        self.bucket = torch.arange(rows) % 3


@pytest.mark.parametrize("rows", [Table({"x": torch.arange(26.0)[:, None]}, torch.arange(26)), Shaped(60)])
def test_the_processes_share_the_batches_of_each_step(rows):
    def steps(*more):
        return [[batch.labels.tolist() for batch in step] for _ in range(2) for step in Epochs(rows, 3, 1, *more)]

    first, second = steps(2, 0, 2), steps(2, 1, 2)
    alone = steps(4)
    assert len(first) == len(second) == len(alone) > 2
    for ours, theirs, both in zip(first, second, alone, strict=True):
        assert len(ours) == len(theirs) == 2
        assert sorted(ours + theirs) == sorted(both)


def test_a_process_without_a_batch_is_refused():
    with pytest.raises(DataError, match=r"training\.batch_size=4 on run\.devices=2: the 5 rows .* Lower training\."):
        Epochs(Table({}, torch.arange(5)), 4, 0, 1, 0, 2)


def test_batches_of_recipes_are_told_apart():
    class Two(Ranks):
        size = 2

        def gathered(self, value):
            return [value, other]

    other = (6.0, 1.0)
    check_shares(Two(), [Batch({"x": torch.ones(3)}, torch.ones(1))], "")
    other = (3.0, 1.0)
    with pytest.raises(ConfigError, match="all devices have the same first batch"):
        check_shares(Two(), [Batch({"x": torch.ones(3)}, torch.ones(1))], "")


@pytest.mark.parametrize(
    ("recipe", "setting", "why"),
    [
        ("focus", "run.devices=2", "its step calls methods of its networks"),
        ("diffusion", "run.strategy=fsdp2", "samples are drawn with whole networks"),
        ("digits", "run.strategy=fsdp2", "one device has the whole model"),
    ],
)
def test_what_a_recipe_cannot_do_on_several_devices_is_refused_with_the_reason(recipe, setting, why):
    with pytest.raises(ConfigError, match=why):
        start.prepare([f"recipe={recipe}", setting])


def test_devices_that_are_not_there_are_refused_before_the_data_are_read(monkeypatch):
    monkeypatch.setattr("hotloop.recipes.digits.load_images", None)
    begun = start.prepare(["recipe=digits", "run.accelerator=cpu", "run.devices=999"])
    with pytest.raises(ConfigError, match=r"run\.devices=999: on CPUs each is a process"):
        recipes.load("digits").train(begun)


def test_a_dry_run_counts_the_steps_of_all_devices(tmp_path):
    steps = []
    for more in ([], CPU):
        begun = start.prepare(["recipe=digits", *SMALL["digits"], f"run.folder={tmp_path / 'run'}", *more])
        steps.append(recipes.load("digits").train(dataclasses.replace(begun, dry=True)).measurements["steps"])
    assert steps == [10, 4]


def given(name, tmp_path):
    if name == "criteria":
        found = [one for one in overrides(tmp_path) if not one.startswith(("run.", "training.batch_size"))]
        return [*found, "training.batch_size=3", "model.dropout=0"]
    return [f"recipe={name}", *SMALL[name], "model.dropout=0", "training.batch_size=16", "training.ema_decay=0.5"]


@pytest.mark.campaign
@pytest.mark.parametrize(("name", "strategy"), [("criteria", "ddp"), ("digits", "ddp"), ("digits", "fsdp2")])
@pytest.mark.some_of(4)
def test_two_devices_are_one_with_twice_the_batches_in_a_step(tmp_path, name, strategy):
    settings, two = given(name, tmp_path), [*CPU, f"run.strategy={strategy}"] if strategy != "ddp" else CPU
    alone = ["run.device=cpu", "training.gradient_accumulation=4", f"run.folder={tmp_path / 'one'}"]
    hotloop_command("train", *settings, *alone)
    hotloop_command("train", *settings, *two, "training.gradient_accumulation=2", f"run.folder={tmp_path / 'two'}")
    one, both = (record.load(tmp_path / folder) for folder in ("one", "two"))
    for figure in ("loss", "gradient_norm"):
        assert [step[figure] for step in both["steps"]] == pytest.approx([s[figure] for s in one["steps"]], rel=1e-4)
    assert both["metrics"][-1]["loss"] == pytest.approx(one["metrics"][-1]["loss"], rel=1e-4)
    weights = [
        checkpoint.load(tmp_path / folder / "checkpoints" / "last.pt")["model"]["model"] for folder in ("one", "two")
    ]
    for key, value in weights[0].items():
        torch.testing.assert_close(weights[1][key], value, rtol=1e-3, atol=1e-4)
    kept = checkpoint.load(tmp_path / "two" / "checkpoints" / "best.pt")
    judged = recipes.load(name).evaluate(configure.from_dict(kept["settings"]), checkpoint.weights(kept))
    assert judged == pytest.approx(kept["position"]["best"], rel=1e-4)


@pytest.mark.campaign
def test_a_recipe_on_two_devices_resumed_is_the_run_that_was_not_interrupted(tmp_path):
    settings = [
        "recipe=digits", *SMALL["digits"], *CPU, "model.dropout=0.2", "training.schedule=constant", "training.warmup_fraction=0",
        "training.batch_size=16", "training.num_epochs=3",
    ]  # fmt: skip
    hotloop_command("train", *settings, f"run.folder={tmp_path / 'whole'}", "training.max_steps=15")
    hotloop_command("train", *settings, f"run.folder={tmp_path / 'run'}", "training.max_steps=7")
    hotloop_command("train", f"run.resume={tmp_path / 'run'}", "training.max_steps=15")
    losses = [[step["loss"] for step in record.load(tmp_path / name)["steps"]] for name in ("whole", "run")]
    assert losses[0] == losses[1]
    said = hotloop_command("train", f"run.resume={tmp_path / 'run'}", "run.devices=1", code=2)
    assert "run.devices cannot change while a run is resumed" in said


@pytest.mark.campaign
@pytest.mark.long
def test_a_compiled_recipe_on_two_devices_is_the_eager_one(tmp_path):
    settings = ["recipe=digits", *SMALL["digits"], *CPU, "model.dropout=0", "training.max_steps=6"]
    compiled = [
        "training.optimization.use_torch_compile=true",
        "compile.preset=aot_eager",
        "compile.measure_eager_steps=0",
    ]
    hotloop_command("train", *settings, f"run.folder={tmp_path / 'eager'}")
    hotloop_command("train", *settings, *compiled, f"run.folder={tmp_path / 'compiled'}")
    both = [record.load(tmp_path / name) for name in ("eager", "compiled")]
    model = both[1]["components"]["model"]
    assert model["compiles"] >= 1
    # On a busy machine one process may come late to the first compile, and that call runs eager in both.
    assert model["state"] == "compiled" or "rank 1" in str(model["causes"]), model
    losses = [[step["loss"] for step in one["steps"]] for one in both]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)

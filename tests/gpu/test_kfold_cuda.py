"""Folds on a GPU: what the first one compiled or captured serves the others, and each gives its memory back."""

import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
from hotloop.recipes import criteria
from hotloop.train import kfold

sys.path.append(str(Path(__file__).parents[1] / "train"))
from training_fixtures import overrides

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"),
]


def run(folder, **more):
    settings = {"kfold__n_splits": 3, "run__device": "cuda", "run__folder": folder / "study", **more}
    return kfold.run(kfold.prepare(overrides(folder, **settings)), criteria)


@pytest.mark.inductor
def test_the_second_fold_compiles_nothing(tmp_path):
    ended = run(tmp_path, training__optimization__use_torch_compile="true", compile__measure_eager_steps=1)
    made = [one["compiled"]["compiles"] for one in ended.document["folds"]]
    assert made[0] >= 1
    assert made[1:] == [0, 0]


def test_a_fold_gives_its_memory_back(tmp_path, monkeypatch):
    held = []
    whole = criteria.load_model

    def loading(begun, display):
        held.append(torch.cuda.memory_allocated())
        return whole(begun, display)

    monkeypatch.setattr(criteria, "load_model", loading)
    assert run(tmp_path, training__optimization__use_torch_compile="auto").status == "finished"
    assert held[1] == held[2]  # what a process keeps for good, the first fold has taken


def test_a_fold_that_runs_out_of_memory_costs_no_other(tmp_path, monkeypatch):
    whole = criteria.load_model

    def loading(begun, display):
        if begun.settings.kfold.fold == 0:
            torch.empty(2**50, dtype=torch.uint8, device="cuda")
        return whole(begun, display)

    monkeypatch.setattr(criteria, "load_model", loading)
    ended = run(tmp_path)
    assert [one["status"] for one in ended.document["folds"]] == ["failed", "finished", "finished"]
    assert "out of memory" in ended.document["folds"][0]["error"]

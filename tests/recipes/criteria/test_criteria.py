"""The embedded default with its real weights and data, for a few steps."""

from hotloop import recipes, record
from hotloop.train import start


def test_the_embedded_default_learns_from_its_first_steps(tmp_path):
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

"""Batches that are copied to a GPU while a step runs: they are whole when the step has them, whatever the GPU does."""

import pytest
import torch

from hotloop import recipes, record
from hotloop.train import batches, start
from hotloop.train.ahead import CopiedAhead, copy_stream

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_a_step_sees_whole_batches_and_memory_that_is_freed_is_not_written_into_early():
    device = torch.device("cuda", 0)
    stream, busy, sums = copy_stream(device), torch.randn(2048, 2048, device=device), []
    source = (torch.full((1 << 22,), float(one), pin_memory=True) for one in range(12))
    for batch in CopiedAhead(source, lambda one: one.to(device, non_blocking=True), stream):
        for _ in range(8):  # the GPU is behind: the batch is read late, and freed here before that
            busy = torch.tanh(busy @ busy)
        sums.append(batch.min() + batch.max())
    assert [float(one) for one in sums] == [2.0 * one for one in range(12)]


def test_a_recipe_is_trained_as_with_batches_that_are_copied_when_they_come(tmp_path, monkeypatch):
    pytest.importorskip("transformers")

    def losses(folder):
        settings = ["recipe=digits", "run.device=cuda", "training.max_steps=20", f"run.folder={tmp_path / folder}"]
        recipes.load("digits").train(start.prepare(settings))
        return [step["loss"] for step in record.load(tmp_path / folder)["steps"]]

    ahead = losses("ahead")
    monkeypatch.setattr(batches, "copy_stream", lambda _: None)
    assert losses("plain") == pytest.approx(ahead, rel=1e-4)

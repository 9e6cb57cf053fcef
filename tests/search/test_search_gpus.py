"""Workers of a search have GPUs of their own."""

import pytest
import torch


@pytest.mark.campaign
@pytest.mark.parametrize(("workers", "seen"), [("auto", {"0", "1"}), (1, {"all"})])
def test_each_of_several_workers_sees_its_own_gpus(search, tmp_path, monkeypatch, workers, seen):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    ended, _ = search("sees", hpo__n_trials=6, hpo__workers=workers)
    assert ended.status == "finished"
    assert {one.read_text() for one in (tmp_path / "study" / "trials").glob("*/gpus")} == seen

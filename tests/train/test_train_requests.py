"""A request to a run: it saves after its step, and trains on as if nothing was."""

import torch

from hotloop.train import checkpoint, requests, saving
from hotloop.train.account import Account


def test_save_now_writes_a_checkpoint_after_the_step_and_changes_nothing(tmp_path, train, monkeypatch):
    usual = train(run__folder=tmp_path / "usual")
    run, saved, was, keep = tmp_path / "run", [], Account.step, checkpoint.save
    monkeypatch.setattr(requests, "EVERY_SECONDS", 0.0)
    monkeypatch.setattr(
        saving.checkpoint, "save", lambda path, found: (saved.append(found["position"]["step"]), keep(path, found))
    )

    def observed(self, entry, events):
        was(self, entry, events)
        if entry["step"] == 2:
            requests.ask(run)

    monkeypatch.setattr(Account, "step", observed)
    outcome = train(run__folder=run)
    assert saved[0] == 2
    assert 3 not in saved
    assert not requests.is_asked(run)
    assert outcome.best == usual.best
    ours, theirs = (
        checkpoint.load(one / "checkpoints" / "last.pt")["model"]["model"] for one in (run, tmp_path / "usual")
    )
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())

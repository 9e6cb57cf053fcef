"""Requests to a run: it answers after its step, removes them, ignores what is none, and trains on as if nothing was."""

import json

import pytest
import torch

from hotloop.train import checkpoint, requests, saving
from hotloop.train.account import Account
from hotloop.train.requests import SAMPLE, SAVE, Requests


@pytest.fixture
def at_step(monkeypatch):
    """Do something after a step, before the run looks for requests."""
    monkeypatch.setattr(requests, "EVERY_SECONDS", 0.0)

    def plan(step, act):
        was = Account.step

        def observed(self, entry, events):
            was(self, entry, events)
            if entry["step"] == step:
                act()

        monkeypatch.setattr(Account, "step", observed)

    return plan


def test_save_now_writes_a_checkpoint_after_the_step_and_trains_on_as_if_nothing_was(
    tmp_path, train, at_step, monkeypatch
):
    usual = train(run__folder=tmp_path / "usual")
    run, saved = tmp_path / "run", []
    keep = saving.checkpoint.save
    monkeypatch.setattr(
        saving.checkpoint, "save", lambda path, found: (saved.append(found["position"]["step"]), keep(path, found))
    )
    at_step(2, lambda: requests.ask(run, SAVE))
    asked_later, answers = [], []
    at_step(3, lambda: (asked_later.append(requests.is_asked(run, SAVE)), answers.append(requests.answers_of(run))))
    outcome = train(run__folder=run)
    assert saved[0] == 2
    assert saved.count(3) == 0
    assert asked_later == [False]  # it was removed
    assert [(name, one.step, one.problem) for name, one in answers[0].items()] == [(SAVE, 2, "")]
    assert outcome.best == usual.best
    ours, theirs = (
        checkpoint.load(one / "checkpoints" / "last.pt")["model"]["model"] for one in (run, tmp_path / "usual")
    )
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())
    assert not (run / "requests").exists()


def test_what_is_not_well_formed_is_ignored_and_left(tmp_path, train, at_step, monkeypatch):
    run, saved = tmp_path / "run", []
    keep = saving.checkpoint.save
    monkeypatch.setattr(
        saving.checkpoint, "save", lambda path, found: (saved.append(found["position"]["step"]), keep(path, found))
    )

    def odd():
        folder = run / "requests"
        assert json.loads((folder / "answers.json").read_text()) == ["save"]
        (folder / "save").write_text("rm -rf /")
        (folder / "sample").touch()  # which this recipe does not
        (folder / "other").touch()

    at_step(2, odd)
    assert train(run__folder=run).status == "finished"
    assert 2 not in saved
    assert {one.name for one in (run / "requests").iterdir()} == {"sample", "other"}


def test_a_checkpoint_that_cannot_be_written_is_answered_with_the_reason(tmp_path, train, at_step, monkeypatch):
    run, answers, keep = tmp_path / "run", [], saving.checkpoint.save

    def full(path, found):
        if found["position"]["step"] == 2:
            raise OSError(28, "No space left on device")
        keep(path, found)

    monkeypatch.setattr(saving.checkpoint, "save", full)
    at_step(2, lambda: requests.ask(run, SAVE))
    at_step(3, lambda: answers.append(requests.answers_of(run)))
    train(run__folder=run)
    assert (answers[0][SAVE].step, "No space left" in answers[0][SAVE].problem) == (2, True)


@pytest.mark.parametrize(
    "content", ["[1]", "{", '{"save": 3}', '{"save": {"step": "3", "time": 1.0, "problem": ""}}', "9" * 5000]
)
def test_an_answer_that_is_none_is_ignored(tmp_path, content):
    (tmp_path / "requests").mkdir()
    (tmp_path / "requests" / "answered.json").write_text(content)
    assert requests.answers_of(tmp_path) == {}


def test_a_link_is_no_request(tmp_path):
    asked = Requests(tmp_path, (SAVE,))
    (tmp_path / "empty").touch()
    (tmp_path / "requests" / "save").symlink_to(tmp_path / "empty")
    assert not asked.asked(SAVE)
    (tmp_path / "requests" / "save").unlink()
    (tmp_path / "requests" / "save").mkdir()
    assert not requests.is_asked(tmp_path, SAVE)


def test_what_a_killed_run_did_not_answer_is_not_answered_by_the_next(tmp_path):
    Requests(tmp_path, (SAVE,))
    requests.ask(tmp_path, SAVE)
    again = Requests(tmp_path, (SAVE,))
    assert not again.asked(SAVE)
    again.close()
    assert not (tmp_path / "requests").exists()
    assert requests.answered_by(tmp_path) == ()


def test_a_second_wish_is_the_same(tmp_path):
    asked = Requests(tmp_path, (SAVE, SAMPLE))
    assert requests.answered_by(tmp_path) == (SAVE, SAMPLE)
    for _ in range(2):
        requests.ask(tmp_path, SAMPLE)
    assert asked.asked(SAMPLE)
    asked.answered(SAMPLE, 3)
    assert not asked.asked(SAMPLE)
    assert not requests.is_asked(tmp_path, SAMPLE)


def test_between_two_looks_the_folder_is_left_alone(tmp_path, monkeypatch):
    asked, looked = Requests(tmp_path, (SAVE,)), []
    monkeypatch.setattr(requests, "is_asked", lambda *_: looked.append(1))
    clock = [100.0]
    monkeypatch.setattr(requests.time, "monotonic", lambda: clock[0])
    for clock[0] in (100.0, 100.5, 100.9, 101.1):
        asked.asked(SAVE)
    assert len(looked) == 2


def test_another_process_of_the_run_answers_nothing(tmp_path):
    assert not Requests(None, (SAVE,)).asked(SAVE)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_ends_no_run(tmp_path):
    (tmp_path / "requests").write_text("a file")
    asked = Requests(tmp_path, (SAVE,))
    assert not asked.asked(SAVE)
    asked.close()


@pytest.mark.parametrize("content", ["", "{}", "3", '["rm"]', "[" * 5000])
def test_what_a_run_answers_is_read_from_a_strangers_folder(tmp_path, content):
    (tmp_path / "requests").mkdir()
    (tmp_path / "requests" / "answers.json").write_text(content)
    assert requests.answered_by(tmp_path) == ()


def test_a_folder_that_is_a_link_is_not_written_into(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "requests").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="is a link"):
        requests.ask(tmp_path, SAVE)
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_link_in_place_of_the_folder_leads_nowhere(tmp_path):
    """A folder of runs may come from a stranger: nothing of this user's is written over or removed."""
    run, other = tmp_path / "run", tmp_path / "other"
    run.mkdir()
    other.mkdir()
    for name in ("save", "answers.json"):
        (other / name).write_text("mine")
    (run / "requests").symlink_to(other)
    answering = requests.Requests(run, ("save",))
    assert not answering.asked("save")
    answering.close()
    assert {one.name: one.read_text() for one in other.iterdir()} == {"save": "mine", "answers.json": "mine"}

"""What chooses for mode auto, or writes its record, fails: the run trains as eager does, and a line says so."""

from __future__ import annotations

import pytest
from step_failures import plant
from test_step_auto import assert_same, train

import hotloop
from hotloop.record import RunRecord
from hotloop.step.loop import runner, stepping
from hotloop.step.loop.transitions import Transitions
from hotloop.step.policy import auto, history

CHOICES = {
    "before a step": (auto.Auto, "before_step"),
    "the turn of a trial": (auto.Auto, "turn"),
    "whether a turn begins on an idle device": (auto.Auto, "idle_start"),
    "whether anything is tried": (auto.Auto, "quiet"),
    "a step is watched": (auto.Auto, "watch_step"),
    "after a step": (auto.Auto, "after_step"),
    "a time comes in": (auto.Auto, "timed"),
    "a choice": (auto, "decide"),
    "a tier is proven": (auto.Auto, "proven"),
    "what a proof promises": (auto.Auto, "proof_saves"),
    "a trial is concluded": (auto.Auto, "_conclude"),
    "a tier is set": (Transitions, "set_tier"),
    "a tier is tried": (Transitions, "try_tier"),
    "the history is looked up": (history.History, "look_up"),
    "an option of the history": (history.History, "option"),
    "a trial is noted": (history.History, "note_trial"),
    "times are accounted for": (stepping.Stepping, "settle"),
    "a call is decided": (runner.StepRunner, "_decide"),
    "the end of the policy": (auto.Auto, "close"),
}
"""What decides for mode auto."""
WRITES = {
    "an entry": (RunRecord, "append"),
    "a mapping": (RunRecord, "update"),
    "a line": (RunRecord, "_write_line"),
    "the document": (RunRecord, "_pieces"),
    "the end": (RunRecord, "finish"),
}
"""What writes the record of a loop."""


@pytest.fixture(autouse=True)
def _no_store(monkeypatch):
    monkeypatch.setenv("HOTLOOP_CACHE_DIR", "")


def train_failing(monkeypatch, mode, steps, place, after, **settings):
    """Train with a plant that fails once the loop is made, and close the loop; return the training and the failures."""
    failed = []
    with hotloop.testing.captured_step_emulation():
        ours = train(
            mode,
            steps,
            total=50_000,
            prepared=lambda _: failed.append(plant(monkeypatch, *place, after=after)),
            **settings,
        )
        ours[2].close()
    ours[2].record._lines.close()
    return ours, failed[0]


@pytest.mark.parametrize("place", CHOICES)
@pytest.mark.parametrize("after", [0, 5])
def test_a_choice_of_autos_that_fails_leaves_the_run_as_eager_runs_it(monkeypatch, caplog, place, after):
    eager = train("eager", 60)
    eager[2].close()
    ours, failed = train_failing(monkeypatch, "auto", 60, CHOICES[place], after)
    assert failed or after
    assert "Planted" in caplog.text or not failed
    assert ours[2].steps == 60
    assert_same(ours, eager)


@pytest.mark.parametrize("place", WRITES)
@pytest.mark.parametrize(("mode", "after"), [("auto", 0), ("auto", 3), ("eager+graph", 0)])
def test_a_record_that_cannot_be_written_leaves_the_run_as_eager_runs_it(  # noqa: PLR0917 - a table
    monkeypatch, caplog, tmp_path, mode, place, after
):
    eager = train("eager", 40)
    eager[2].close()
    ours, failed = train_failing(monkeypatch, mode, 40, WRITES[place], after, record=tmp_path)
    assert failed or after
    assert "Planted" in caplog.text or not failed
    assert ours[2].steps == 40
    assert_same(ours, eager)

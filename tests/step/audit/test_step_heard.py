"""What a step prints and logs: told with its line where a replay will leave it out, and in nobody's way."""

from __future__ import annotations

import builtins
import logging

import pytest
import torch
from step_programs import GRAPH, PROVING, STEPS, Classifier, batches
from torch.nn import functional as F

import hotloop
from hotloop.testing import captured_step_emulation

LOGGER = logging.getLogger("my.program")


def says(what, asked=GRAPH, steps=STEPS):
    model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2**-6, fused=True)
    with captured_step_emulation(), hotloop.Loop(model, optimizer, run=asked, sentinel=0) as loop:

        @loop.step
        def train_step(x, y):
            loss = F.cross_entropy(model(x), y)
            what(loss)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        for x, y in batches("cpu", steps):
            train_step(x, y)
        return loop.status()


def printing(_loss):
    print("hello")


def logging_(_loss):
    LOGGER.info("a step")


def told(caplog):
    return [one.getMessage() for one in caplog.records if "A replay runs no Python" in one.getMessage()]


@pytest.mark.parametrize(
    ("what", "said", "line"),
    [(printing, "print", 'print("hello")'), (logging_, "a log record", 'LOGGER.info("a step")')],
)
def test_what_a_replay_leaves_out_is_told_once_with_its_line(caplog, capsys, what, said, line):
    caplog.set_level(logging.INFO)
    assert says(what).tier == GRAPH
    (message,) = told(caplog)
    number = what.__code__.co_firstlineno + 1
    assert message.startswith(f"train_step: {said} at {__file__}:{number}: {line}. A replay runs no Python")
    heard = capsys.readouterr().out.count("hello") + sum(one.name == "my.program" for one in caplog.records)
    assert heard == PROVING  # whom it reaches otherwise, as often as the step's Python runs


def value(loss):
    print(loss)


def raising(_loss):
    print("hello")
    raise KeyError("own")


def of_another(_loss):
    LOGGER.debug("not enabled")
    logging.getLogger("torch.something").warning("of torch's own")


@pytest.mark.parametrize("what", [value, of_another, lambda _loss: None])
def test_nothing_is_told_of_what_runs_anyway_or_is_not_said(caplog, what):
    caplog.set_level(logging.INFO)
    says(what)
    assert not told(caplog)


def test_nothing_is_told_where_no_step_is_captured(caplog):
    caplog.set_level(logging.INFO)
    says(printing, "aot_eager", steps=3)
    assert not told(caplog)


def test_print_and_logging_are_as_they_were_also_after_an_exception():
    before = builtins.print, logging.Logger.handle
    says(printing, steps=3)
    with pytest.raises(KeyError, match="own"):
        says(raising, steps=3)
    assert (builtins.print, logging.Logger.handle) == before

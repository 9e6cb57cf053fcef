"""Results that people read: one drawing as text and as HTML for notebooks."""

from __future__ import annotations

import html
import re

import pytest
import torch
from torch import nn

import hotloop
from hotloop.integrations.lightning.status import TrainerStatus
from hotloop.prove.bench.result import Bench
from hotloop.prove.harness.result import Harness
from hotloop.prove.verify.verdict import Verdict
from hotloop.shown import Shown


def statuses():
    model = nn.Linear(2, 2)
    yield hotloop.status({"<b>model</b>": model})
    loop = hotloop.Loop(model, torch.optim.SGD(model.parameters()))
    yield loop.status()
    loop.close()
    yield TrainerStatus(asked="<b>mine</b>", owned=False, why=("[red]a < b[/red]",))


@pytest.mark.parametrize("at", range(3))
def test_a_notebook_shows_what_a_log_says(at):
    status = list(statuses())[at]
    written = status._repr_html_()
    assert written.startswith("<pre")
    shown = html.unescape(re.sub("<[^>]*>", "", written))
    for word in str(status).split():
        assert word in shown
    assert "<b>" not in written


def test_signs_of_markup_are_text():
    status = list(statuses())[2]
    assert "[red]a < b[/red]" in str(status)
    assert "[red]a &lt; b[/red]" in status._repr_html_()


def test_every_result_is_shown():
    assert {hotloop.Status, Bench, Harness, Verdict} <= set(Shown.__subclasses__())

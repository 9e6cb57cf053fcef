"""Files that a step writes and random streams that it seeds: a replay would do neither, so none is recorded."""

from __future__ import annotations

import csv
import functools
import io
import json
import logging
import os
import pathlib
import sys
import warnings

import pytest
import torch
from step_programs import GRAPH, STEPS, Classifier, batches
from torch.nn import functional as F

import hotloop
from hotloop.testing import captured_step_emulation


def training(extra, asked, steps=STEPS):
    """Give the loop's status and the losses of a run whose step calls ``extra(logits)`` for what it adds to them."""
    torch.manual_seed(0)
    model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2**-6, fused=True)
    with captured_step_emulation(), hotloop.Loop(model, optimizer, run=asked) as loop:

        @loop.step
        def train_step(x, y):
            logits = F.dropout(model(x), 0.25)
            loss = F.cross_entropy(logits + extra(logits), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        losses = [train_step(x, y) for x, y in batches("cpu", steps)]
        return loop.status(), torch.stack(losses)


def why(status, tier=GRAPH):
    (found,) = [one for one in status.tiers if one.name == tier]
    assert found.state == "declined"
    return found.why


def writing(file):
    file.write("a step\n")


def in_rows(file):
    csv.writer(file).writerow(["a step"])


def in_json(file):
    json.dump({"a": "a step"}, file)


def printing(file):
    print("a step", file=file)


SOURCE = """
def fill(path):
    with open(path, "w") as file:
        file.write("x")
    return 0
"""
WRITES = {"write": writing, "rows": in_rows, "json": in_json, "print": printing}


@pytest.mark.parametrize("asked", [GRAPH, "aot_eager"])
@pytest.mark.parametrize("named", WRITES)
def test_a_file_gets_what_each_step_writes(tmp_path, named, asked):
    with (tmp_path / "log").open("w") as file:

        def extra(_):
            WRITES[named](file)
            return 0

        status, _ = training(extra, asked)
    assert (tmp_path / "log").read_text().count("a step") == STEPS
    told = why(status, asked)
    assert told.startswith("the step writes to a file")
    assert f"{__file__}:{WRITES[named].__code__.co_firstlineno + 1}: " in told
    assert "write it outside the step" in told


def test_a_file_that_the_step_opens_is_written_by_each(tmp_path):
    def extra(_):
        with (tmp_path / "log").open("a") as file:
            file.write("a step\n")
        (tmp_path / "last").write_text("x")
        return 0

    status, _ = training(extra, GRAPH)
    assert (tmp_path / "log").read_text().count("a step") == STEPS
    assert "writes to a file" in why(status)


def into_memory(_):
    io.StringIO().write("a step")
    io.BytesIO().write(b"a step")
    return 0


def a_warning(_):
    warnings.warn("a step", stacklevel=1)
    return 0


@pytest.mark.parametrize("extra", [into_memory, a_warning])
@pytest.mark.filterwarnings("ignore:a step")
def test_what_is_no_file_keeps_nothing_from_being_captured(extra):
    assert training(extra, GRAPH)[0].tier == GRAPH


def test_a_library_that_fills_its_cache_keeps_nothing_from_being_captured(tmp_path, monkeypatch):
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "somebodys_cache.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(folder))
    fill = functools.partial(__import__("somebodys_cache").fill, os.fspath(tmp_path / "cache"))
    assert training(lambda _: fill(), GRAPH)[0].tier == GRAPH


def test_writing_to_a_standard_stream_is_told_as_a_print_is(caplog, capsys):
    caplog.set_level(logging.INFO)

    def extra(_):
        sys.stdout.write("a step\n")
        return 0

    assert training(extra, GRAPH)[0].tier == GRAPH
    assert "a step" in capsys.readouterr().out
    told = [one.getMessage() for one in caplog.records if "A replay runs no Python" in one.getMessage()]
    assert len(told) == 1
    assert "write to a standard stream at" in told[0]


def test_a_profiler_that_runs_already_is_left_in_place():
    heard = []

    def profile(_frame, event, _called):
        heard.append(event)

    sys.setprofile(profile)
    try:
        training(lambda _: 0, GRAPH, steps=2)
        assert sys.getprofile() is profile
    finally:
        sys.setprofile(None)
    assert heard


def test_nobody_listens_after_a_step_was_looked_at():
    training(lambda _: 0, GRAPH, steps=1)
    assert sys.getprofile() is None


# -- seeds -------------------------------------------------------------------------------------------------------------


def seeding(logits):
    torch.manual_seed(7)
    return F.dropout(torch.ones_like(logits))


def of_its_own(logits):
    generator = torch.Generator().manual_seed(7)
    return torch.randn(logits.shape, generator=generator)


SEEDS = {
    seeding: "the step seeds torch's random stream (manual_seed)",
    of_its_own: "the step seeds a torch.Generator (manual_seed)",
}


@pytest.mark.parametrize("extra", SEEDS)
def test_a_step_that_seeds_draws_as_in_eager_and_is_told_to_seed_before(extra):
    _, eager = training(extra, "eager")
    status, ours = training(extra, GRAPH)
    assert torch.equal(eager, ours)
    told = why(status)
    assert told.startswith(SEEDS[extra])
    assert f"{pathlib.Path(__file__)}:{extra.__code__.co_firstlineno + 1}: " in told
    assert "seed before the loop" in told
    assert "report it" not in told

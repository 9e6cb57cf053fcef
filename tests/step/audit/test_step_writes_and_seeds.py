"""Files that a step opens, programs and threads that it starts, streams that it seeds: each is done once a step."""

from __future__ import annotations

import concurrent.futures
import json
import logging
import os
import pathlib
import pickle
import random
import socket
import subprocess
import sys
import threading
import warnings

import numpy as np
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


def written(path):
    with path.open("a") as file:
        file.write("a step\n")


def as_json(path):
    with path.open("a") as file:
        json.dump({"a": "a step"}, file)


def to_the_system(path):
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(handle, b"a step\n")
    os.close(handle)


def pickled(path):
    with path.open("ab") as file:
        pickle.dump("a step", file)


def saved_to(path):
    with path.open("ab") as file:
        torch.save({"a step": 1}, file)


def by_numpy(path):
    with path.open("ab") as file:
        np.save(file, np.frombuffer(b"a step", dtype=np.uint8))


def in_a_thread(path):
    thread = threading.Thread(target=written, args=(path,))
    thread.start()
    thread.join()


def another_program(path):
    command = f"open({str(path)!r}, 'a').write('a step')"
    subprocess.run([sys.executable, "-c", command], check=True)


def by_the_shell(path):
    os.system(f"echo a step >> {path}")


OPENS, SAVES = "the step opens a file", "the step writes to a file (torch.save)"
WRITES = {
    written: OPENS,
    as_json: OPENS,
    to_the_system: OPENS,
    pickled: OPENS,
    by_numpy: OPENS,
    saved_to: OPENS,
    in_a_thread: "the step starts a thread",
    another_program: "the step starts a program",
    by_the_shell: "the step starts a program",
}


@pytest.mark.parametrize("asked", [GRAPH, "aot_eager"])
@pytest.mark.parametrize("write", WRITES)
def test_a_file_gets_what_each_step_writes(tmp_path, write, asked):
    def extra(_):
        write(tmp_path / "log")
        return 0

    status, _ = training(extra, asked, steps=6)
    assert (tmp_path / "log").read_bytes().count(b"a step") == 6
    told = why(status, asked)
    assert told.startswith(WRITES[write])
    assert f"{__file__}:" in told
    assert "do it outside the step" in told


def test_a_step_that_saves_a_checkpoint(tmp_path):
    def extra(logits):
        torch.save(logits, tmp_path / "last.pt")
        return 0

    assert why(training(extra, GRAPH)[0]).startswith(SAVES)


def test_a_step_that_talks_to_another_program_is_declined():
    with socket.create_server(("127.0.0.1", 0)) as server:

        def extra(_):
            socket.create_connection(server.getsockname()).close()
            return 0

        assert "talks to another program" in why(training(extra, GRAPH, steps=4)[0])


def test_a_queue_and_a_pool_get_what_each_step_hands_them():
    done = []
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()

        def extra(_):
            done.append(pool.submit(int))
            return 0

        assert "changes Python state" in why(training(extra, GRAPH)[0])
    assert len(done) == STEPS


def a_warning(_):
    warnings.warn("a step", stacklevel=1)
    return 0


def a_record(_):
    logging.getLogger("my.program").warning("a step")
    return 0


def torchs_own(logits):
    return torch.randn(logits.shape, generator=torch.default_generator)


@pytest.mark.parametrize("extra", [a_warning, a_record, torchs_own])
@pytest.mark.filterwarnings("ignore:a step")
def test_what_keeps_nothing_from_being_captured(extra):
    assert training(extra, GRAPH)[0].tier == GRAPH


def test_a_library_that_fills_its_cache_keeps_nothing_from_being_captured(tmp_path, monkeypatch):
    folder = tmp_path / "site-packages"
    folder.mkdir()
    source = "def fill(path):\n    with open(path, 'w') as file:\n        file.write('x')\n    return 0\n"
    (folder / "somebodys_cache.py").write_text(source)
    monkeypatch.syspath_prepend(str(folder))
    fill = __import__("somebodys_cache").fill
    assert training(lambda _: fill(os.fspath(tmp_path / "cache")), GRAPH)[0].tier == GRAPH


def test_a_profiler_that_runs_already_is_left_in_place():
    def profile(_frame, _event, _called):
        pass

    sys.setprofile(profile)
    try:
        training(lambda _: 0, GRAPH, steps=2)
        assert sys.getprofile() is profile
    finally:
        sys.setprofile(None)


def test_nobody_listens_after_a_step_was_looked_at():
    training(lambda _: 0, GRAPH, steps=1)
    assert sys.getprofile() is None


def seeding(logits):
    torch.manual_seed(7)
    return F.dropout(torch.ones_like(logits))


def of_its_own(logits):
    return torch.randn(logits.shape, generator=torch.Generator().manual_seed(7))


def of_pythons(_):
    random.seed(7)
    return random.random()


def of_numpys(_):
    np.random.seed(7)  # noqa: NPY002 - old code
    return float(np.random.random_sample())  # noqa: NPY002


SEEDS = {
    seeding: "the step seeds torch's random stream",
    of_its_own: "the step draws from a torch.Generator of its own",
    of_pythons: "the step seeds Python's random stream",
    of_numpys: "the step seeds numpy's random stream",
}


@pytest.mark.parametrize("extra", SEEDS)
def test_a_step_that_seeds_draws_as_in_eager_and_is_told_of_it(extra):
    _, eager = training(extra, "eager")
    status, ours = training(extra, GRAPH)
    assert torch.equal(eager, ours)
    told = why(status)
    assert told.startswith(SEEDS[extra])
    assert f"{pathlib.Path(__file__)}:{extra.__code__.co_firstlineno + 1}: " in told
    assert "report it" not in told

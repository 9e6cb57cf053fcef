"""Files that a step writes or reads, streams that it seeds, clocks: a replay does none of it, so none is recorded."""

from __future__ import annotations

import concurrent.futures
import contextlib
import csv
import datetime as dt
import functools
import importlib
import io
import itertools
import json
import logging
import multiprocessing
import os
import pathlib
import pickle
import random
import sqlite3
import subprocess
import sys
import threading
import time
import warnings
from queue import Empty, SimpleQueue

import numpy as np
import pytest
import torch
from step_programs import GRAPH, STEPS, Classifier, batches
from torch.nn import functional as F
from torch.utils import tensorboard

import hotloop
from hotloop.step.audit.op_trace import trace_step
from hotloop.step.audit.side_effects import SideEffects
from hotloop.step.state.holdings import Holdings
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


def in_a_thread(write):
    thread = threading.Thread(target=write)
    thread.start()
    thread.join()


@pytest.mark.parametrize("asked", [GRAPH, "aot_eager"])
@pytest.mark.parametrize("way", ["thread", "pool", "queue"])
def test_other_threads_do_what_each_step_asks_them_for(tmp_path, way, asked):
    waiting = SimpleQueue()
    with (tmp_path / "steps").open("a") as file, concurrent.futures.ThreadPoolExecutor(1) as pool:
        write = functools.partial(file.write, "a step\n")
        pool.submit(int).result()  # its thread has begun before the first step
        ways = {
            "thread": functools.partial(in_a_thread, write),
            "pool": functools.partial(pool.submit, write),
            "queue": lambda: waiting.put(1),
        }

        def extra(_):
            ways[way]()
            return 0

        status, _ = training(extra, asked)
    assert "thread" in why(status, asked)
    assert len((tmp_path / "steps").read_text().splitlines()) + waiting.qsize() == STEPS


def test_a_profiler_that_the_step_begins_is_left_in_place():
    heard, seen = [], []

    def profile(frame, event, arg):
        seen.append(event)

    def run():
        sys.setprofile(profile)
        torch.ones(2).sum()
        seen.clear()
        torch.ones(2).sum()
        heard.append(bool(seen))

    calls = SideEffects()
    try:
        with calls.listening():
            trace_step(Holdings({}, {}), torch.device("cpu"), [], run, calls)
        assert sys.getprofile() is profile
        assert heard == [True]
    finally:
        sys.setprofile(None)


class Answers:
    """Answers to any name, but only to those that it knows."""

    def __init__(self):
        self.known = {"scale": 2}

    def __getattr__(self, name):
        return vars(self)["known"][name]

    def __call__(self, logits):
        """Scale."""
        return self.scale * logits


def test_what_a_step_calls_is_not_asked_for_its_name():
    assert training(Answers(), GRAPH)[0].tier == GRAPH


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


# -- what else a replay does not do ------------------------------------------------------------------------------------


def to_the_system(path):
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(handle, b"a step\n")
    os.close(handle)


def pickled(path):
    with path.open("ab") as file:
        pickle.dump("a step", file)


def by_a_pickler(path):
    with path.open("ab") as file:
        pickle.Pickler(file).dump("a step")


def saved_to(path):
    with path.open("ab") as file:
        torch.save({"a step": 1}, file)


@torch.library.custom_op("hotloop_tests::saved_by", mutates_args=())
def saved_by(one: torch.Tensor, path: str) -> torch.Tensor:
    to_the_system(path)
    return one.clone()


def in_an_operation(path):
    """An operation in Python is the step's doing as well, though not what is asked of it before and after."""
    saved_by(torch.zeros(1), str(path))


def by_numpy(path):
    with path.open("ab") as file:
        np.save(file, np.frombuffer(b"a step", dtype=np.uint8))


def raw(path):
    with path.open("ab") as file:
        np.frombuffer(b"a step", dtype=np.uint8).tofile(file)


SAVES = {
    to_the_system: "the step writes to a file (os.write)",
    in_an_operation: "the step writes to a file (os.write)",
    pickled: "the step writes to a file or a buffer (pickle.dump)",
    by_a_pickler: "the step writes to a file or a buffer (pickle.dump)",
    saved_to: "the step writes to a file (torch.save)",
    by_numpy: "the step writes to a file (numpy.save)",
    raw: "the step writes to a file (tofile)",
}


@pytest.mark.parametrize("asked", [GRAPH, "aot_eager"])
@pytest.mark.parametrize("save", SAVES)
def test_a_file_gets_what_each_step_saves_past_its_own_methods(tmp_path, save, asked):
    def extra(_):
        save(tmp_path / "log")
        return 0

    status, _ = training(extra, asked)
    assert (tmp_path / "log").read_bytes().count(b"a step") == STEPS
    told = why(status, asked)
    assert told.startswith(SAVES[save])
    assert f"{__file__}:" in told
    assert "write it outside the step" in told


def in_a_database(folder):
    with contextlib.closing(sqlite3.connect(folder / "log")) as database, database:
        database.execute("create table if not exists log (step)")
        database.execute("insert into log values ('a step')")


def renamed(folder):
    (folder / "step").mkdir(exist_ok=True)
    (folder / "step").replace(folder / "last")
    (folder / "last").rmdir()


def another_program(_folder):
    subprocess.run([sys.executable, "-c", ""], check=True)


def spawned(_folder):
    os.waitpid(os.posix_spawn(sys.executable, [sys.executable, "-c", ""], {}), 0)


@pytest.mark.parametrize(
    ("does", "said"),
    [
        (in_a_database, "the step asks a database (execute)"),
        (renamed, "the step changes files (os.mkdir)"),
        (another_program, "the step starts a program"),
        (spawned, "the step starts a program"),
    ],
)
def test_what_a_step_does_outside_of_python_is_done_once_a_step(tmp_path, does, said):
    def extra(_):
        does(tmp_path)
        return 0

    status, _ = training(extra, GRAPH, steps=4)
    told = why(status)
    assert told.startswith(said)
    assert "do it outside the step" in told


def saved_in_memory(_):
    torch.save({"a step": 1}, io.BytesIO())
    np.save(io.BytesIO(), np.zeros(1))
    return 0


def test_what_is_saved_in_memory_keeps_nothing_from_being_captured():
    assert training(saved_in_memory, GRAPH)[0].tier == GRAPH


def by_the_clock(_):
    return 0 if time.time() < 2**40 else 1


def by_the_date(_):
    return 0 if dt.datetime.now(tz=dt.UTC).year < 9999 else 1


@pytest.mark.parametrize(("extra", "name"), [(by_the_clock, "time"), (by_the_date, "now")])
def test_a_branch_on_the_clock_is_not_frozen(extra, name):
    told = why(training(extra, GRAPH)[0])
    assert told.startswith(f"the step reads the clock ({name}) at {__file__}:{extra.__code__.co_firstlineno + 1}: ")
    assert training(extra, "aot_eager")[0].tier == "aot_eager"  # whose steps run their Python each


def test_the_clock_that_python_reads_for_a_log_record_keeps_nothing_from_being_captured():
    def extra(_):
        logging.getLogger("my.program").warning("a step")
        return 0

    assert training(extra, GRAPH)[0].tier == GRAPH


def unseeded(logits):
    return torch.randn(logits.shape, generator=torch.Generator())


def test_a_generator_that_the_step_makes_is_told_of(caplog):
    caplog.set_level(logging.INFO)
    _, eager = training(unseeded, "eager")
    status, ours = training(unseeded, GRAPH)
    assert torch.equal(eager, ours)
    told = why(status)
    place = f"{__file__}:{unseeded.__code__.co_firstlineno + 1}: "
    assert told.startswith(f"the step draws from a torch.Generator of its own at {place}")
    assert "report it" not in told


def test_torchs_own_generator_may_be_named():
    def extra(logits):
        return torch.randn(logits.shape, generator=torch.default_generator)

    assert training(extra, GRAPH)[0].tier == GRAPH


# -- what a replay would not read again --------------------------------------------------------------------------------


def reading(path):
    return float(path.read_text())


def opening(path):
    with path.open() as file:
        return float(file.read())


def asking(path):
    return 1.0 if path.with_name("other").exists() else 0.5


def asking_python(path):
    return 1.0 if os.path.exists(path.with_name("other")) else 0.5  # noqa: PTH110 - what is tested


def loading(path):
    return torch.load(path.with_name("saved"), weights_only=True)


def loading_by_numpy(path):
    return float(np.load(path.with_name("array.npy")))


READS = {
    reading: "the step opens a file",
    opening: "the step opens a file",
    asking: "the step looks at files (os.stat)",
    asking_python: "the step looks at files (os.stat)",
    loading: "the step reads a file (torch.load)",
    loading_by_numpy: "the step reads a file (numpy.load)",
}


@pytest.mark.parametrize("read", READS)
def test_what_a_step_reads_from_files_is_not_frozen(tmp_path, read):
    """A file that somebody changes while training goes on: a weight, a flag."""

    def run(asked):
        path, calls = tmp_path / "weight", itertools.count()

        def put(value):
            path.write_text(str(value))
            torch.save(torch.tensor(value), tmp_path / "saved")
            np.save(tmp_path / "array.npy", np.array(value))
            (tmp_path / "other").touch() if value < 1 else (tmp_path / "other").unlink(missing_ok=True)

        torch.manual_seed(0)
        model = Classifier()
        optimizer = torch.optim.AdamW(model.parameters(), lr=2**-6, fused=True)
        with captured_step_emulation(), hotloop.Loop(model, optimizer, run=asked) as loop:

            @loop.step
            def train_step(x, y):
                loss = read(path) * F.cross_entropy(model(x), y)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                return loss

            losses = []
            for x, y in batches("cpu", 16):
                put(1.0 if next(calls) < 10 else 0.25)
                losses.append(train_step(x, y))
            return torch.stack(losses), loop.status()

    ours, status = run(GRAPH)
    assert torch.equal(ours, run("eager")[0])
    told = why(status)
    assert told.startswith(f"{READS[read]} at {__file__}:")
    assert "read it outside the step" in told
    assert run("aot_eager")[1].tier == "aot_eager"


def test_a_module_that_the_step_imports_keeps_nothing_from_being_captured(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    names = [f"imported_{number}" for number in range(4)]
    for name in names:
        (tmp_path / f"{name}.py").write_text("weight = 0\n")

    def extra(_):
        for name in names:
            importlib.import_module(name)
        return 0

    assert training(extra, GRAPH)[0].tier == GRAPH


def test_folders_that_a_step_makes_are_told(tmp_path):
    def extra(_):
        os.makedirs(tmp_path / "a" / "b", exist_ok=True)  # noqa: PTH103 - what is tested
        return 0

    assert "the step changes files (os.mkdir)" in why(training(extra, GRAPH)[0])


@pytest.mark.parametrize("asked", [GRAPH, "aot_eager"])
def test_a_tracker_gets_a_point_for_each_step(tmp_path, asked):
    writer = tensorboard.SummaryWriter(os.fspath(tmp_path))

    def extra(_):
        writer.add_scalar("a step", 1.0)
        return 0

    status, _ = training(extra, asked)
    writer.close()
    assert sum(file.read_bytes().count(b"a step") for file in tmp_path.iterdir()) == STEPS
    told = why(status, asked)
    assert told.startswith("the step writes to a tracker (torch's add_scalar)")
    assert f"{__file__}:" in told


@pytest.mark.parametrize("asked", [GRAPH, "aot_eager"])
def test_another_process_is_handed_what_each_step_puts(asked):
    """The queue's own thread takes it on at once, so that what the queue holds may be as it was."""
    queue = multiprocessing.Queue()

    def extra(_):
        queue.put("a step")
        time.sleep(0.01)  # till the thread has taken it
        return 0

    status, _ = training(extra, asked, steps=8)
    assert [queue.get(timeout=300) for _ in range(8)] == ["a step"] * 8
    with pytest.raises(Empty):
        queue.get(timeout=0.1)
    told = why(status, asked)
    seen = "the step changes Python state: closure variable queue"  # by its pipe, or what its thread has not taken yet
    assert told.startswith(("the step hands something to another process (put) at", seen))
    assert "outside the step" in told


LAST = None


def test_a_global_that_the_step_sets_is_set_by_each():
    """Also where no code of the step reads it: the program does, between the steps."""

    def setting(logits):
        global LAST
        LAST = logits.detach().sum()
        return 0

    status, _ = training(setting, GRAPH)
    assert why(status).startswith("the step changes Python state: global LAST")


@pytest.mark.parametrize("asked", [GRAPH, "aot_eager"])
@pytest.mark.parametrize("kind", [io.StringIO, io.BytesIO])
def test_what_a_step_writes_into_memory_is_written_once_by_each(kind, asked):
    held, text = kind(), "a step" if kind is io.StringIO else b"a step"

    def extra(_):
        held.write(text)
        return 0

    status, _ = training(extra, asked)
    assert held.getvalue().count(text) == STEPS
    assert why(status, asked).startswith("the step changes Python state: closure variable held")


def by_python(_):
    random.seed(1)
    return 0


def by_numpy(_):
    np.random.seed(1)  # noqa: NPY002 - as programs do
    return 0


@pytest.mark.parametrize(
    ("extra", "draw"), [(by_python, random.random), (by_numpy, np.random.random)], ids=["Python", "numpy"]
)
def test_a_step_that_seeds_a_stream_anew_each_time_is_not_captured(extra, draw):
    """It leaves the stream where it was found, which tells nothing: a replay would leave it where draws took it."""

    extra(None)  # as the step before has left it
    status, _ = training(extra, GRAPH)
    assert why(status).startswith("the step seeds ")
    assert f"{__file__}:{extra.__code__.co_firstlineno + 1}: " in why(status)
    first = draw()
    extra(None)
    assert first == draw()

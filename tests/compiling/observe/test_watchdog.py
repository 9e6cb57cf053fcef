"""A compiler that hangs is ended, and nothing else is: its compile fails with a reason, and the run goes on."""

import contextlib
import copy
import dataclasses
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch._inductor.config
from compiling_models import Net, Tied, one, real_aot_eager, rows, tokens, train

import hotloop
from hotloop._torch import backends
from hotloop.compiling.observe import watchdog
from hotloop.compiling.observe.watchdog import Process, Watchdog

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="processes are seen in /proc only")
ME = os.getpid()
COMPILER = Process("g++", "S", ME, 10)
WORKING = Process("cc1plus", "S", 101, 20)


def looks(*tables, pool=None, times=20):
    """Look at the last table ``times`` times, after one look at each table before it; return all that hung."""
    dog = Watchdog(600.0)
    found = [dog.hanging(table, pool) for table in (*tables[:-1], *[tables[-1]] * times)]
    return {root: set(members) for one in found for root, members in one.items()}


def more(process, ticks, **other):
    return dataclasses.replace(process, ticks=process.ticks + ticks, **other)


def test_a_compiler_that_uses_no_processor_time_hangs_with_all_that_it_started():
    table = {103: Process("as", "S", 102, 0), 101: COMPILER, 102: WORKING}
    assert looks(table, times=10) == {}
    assert looks(table, times=11) == {101: {101, 102, 103}}


@pytest.mark.parametrize(
    "later",
    [
        lambda n: {101: more(COMPILER, 100 * n), 102: WORKING},
        lambda n: {101: COMPILER, 102: more(WORKING, 100 * n)},
        lambda n: {101: more(COMPILER, 100 * n)},  # a child has ended: its time is its parent's
        lambda n: {101: COMPILER, 102: dataclasses.replace(WORKING, state="T")},
        lambda n: {101: dataclasses.replace(COMPILER, state="T"), 102: WORKING},
    ],
)
def test_a_compiler_that_computes_or_is_stopped_does_not_hang(later):
    assert looks(*[later(n) for n in range(50)], times=1) == {}


def test_what_a_timer_uses_is_no_progress():
    assert looks(*[{101: more(COMPILER, n)} for n in range(20)], times=1) == {101: {101}}


@pytest.mark.parametrize(
    "table",
    [
        {101: Process("python", "S", ME, 0), 102: Process("g++", "S", 101, 0)},  # a child of the user's own
        {101: Process("sleep", "S", ME, 0, command="sleep 1000")},
        {101: Process("make", "S", ME, 0, command="make CC=gcc")},
        {101: Process("g++", "S", 1, 0)},  # of another process
        {101: Process("g++", "Z", ME, 0)},
        {101: Process("python", "S", ME, 0, command="python torch/_inductor/compile_worker/__main__.py")},
    ],
)
def test_nothing_else_is_ended(table):
    assert looks(table) == {}


@pytest.mark.parametrize("script", [False, True])
@pytest.mark.parametrize("name", ["c++", "clang++-15", "x86_64-linux-gnu-gcc-12", "nvcc", "ptxas", "ccache"])
def test_compilers_are_known_by_name(name, script, tmp_path):
    """Linux cuts the name of a process to 15 characters."""
    path = tmp_path / name
    if script:
        path.write_text("#!/bin/sh\nread line\n")
        path.chmod(0o755)
    else:
        path.symlink_to(shutil.which("cat"))
    child = subprocess.Popen([path], stdin=subprocess.PIPE)
    try:
        assert looks({child.pid: watchdog.processes()[child.pid]}) == {child.pid: {child.pid}}
    finally:
        child.communicate()


@pytest.mark.parametrize("where", ["CXX", "CC", "torch"])
def test_a_chosen_compiler_is_known_by_its_command(where, monkeypatch):
    chosen = "python /opt/wrap.py"
    if where == "torch":
        monkeypatch.setattr(torch._inductor.config.cpp, "cxx", (None, chosen))
    else:
        monkeypatch.setenv(where, chosen)
    mine = {101: Process("python", "S", ME, 0, command="python /opt/wrap.py a.cpp -o a.so")}
    assert looks(mine) == {101: {101}}
    assert looks({101: Process("python", "S", ME, 0, command="python train.py")}) == {}


@pytest.mark.parametrize("by", ["run", "check_output", "check_call"])
@pytest.mark.parametrize(("module", "known"), [("torch._inductor.cpp_builder", True), ("my_training", False)])
def test_what_inductor_waits_for_is_a_compiler_whatever_it_has_become(module, known, by):
    """A script in the place of a compiler may ``exec`` another program: nothing of its command is left."""
    place = {"__name__": module, "call": getattr(subprocess, by)}
    exec("def build():\n    call(['sleep', '1000'])", place)

    def build():
        with contextlib.suppress(subprocess.CalledProcessError):
            place["build"]()

    waiting = threading.Thread(target=build)
    waiting.start()
    try:
        while not (mine := [n for n, it in watchdog.processes().items() if (it.parent, it.name) == (ME, "sleep")]):
            time.sleep(0.01)
        (child,) = mine
        until = time.monotonic() + 300
        while known and backends.compilers_awaited() != {child}:
            assert time.monotonic() < until
        assert backends.compilers_awaited() == ({child} if known else set())
    finally:
        os.kill(child, signal.SIGKILL)
        waiting.join()
    table = {child: Process("sleep", "S", ME, 0)}
    dog = Watchdog(600.0)
    assert [dog.hanging(table, None, {child}) for _ in range(11)][-1] == {child: table}


def test_inductors_pool_is_judged_as_one_and_stays_itself():
    idle = {101: Process("python", "S", ME, 10), 102: Process("python", "S", 101, 0), 103: WORKING}
    assert looks(idle, pool=None) == {}  # without jobs its workers are idle by right
    assert looks(idle, pool=101) == {101: {102, 103}}
    busy = [{**idle, 103: more(WORKING, 100 * n)} for n in range(50)]
    assert looks(*busy, pool=101, times=1) == {}


def test_a_process_that_got_the_number_of_another_is_left_alone(monkeypatch):
    monkeypatch.setattr(watchdog, "_GRACE_SECONDS", 0.0)
    child = subprocess.Popen(["sleep", "1000"])
    try:
        found = watchdog.processes()[child.pid]
        assert found.parent == ME
        watchdog._end({child.pid: dataclasses.replace(found, started=found.started - 1)})
        assert child.poll() is None
        watchdog._end({child.pid: found})
        assert child.wait(300) == -signal.SIGTERM
    finally:
        child.kill()
        child.wait()


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    """Plant a compiler that runs a shell script as ``g++`` before it compiles with aot_eager."""
    monkeypatch.setenv("HOTLOOP_COMPILE_TIMEOUT", "1")
    monkeypatch.setattr(watchdog, "_GRACE_SECONDS", 0.1)
    monkeypatch.delenv("CXX", raising=False)

    def plant(script):
        path = tmp_path / "g++"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)

        def compile_graph(graph, inputs):
            subprocess.run([path], check=True, stdout=subprocess.PIPE)
            return real_aot_eager()(graph, inputs)

        monkeypatch.setattr(backends, "aot_eager", lambda: compile_graph)
        return path

    yield plant
    until = time.monotonic() + 300
    while any(thread.name == "hotloop-watchdog" for thread in threading.enumerate()):
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.mark.parametrize("script", ["sleep 1000", "trap '' TERM\nwhile :; do sleep 1000; done"])
def test_a_compile_whose_compiler_hangs_fails_and_the_run_goes_on(script, compiler, caplog):
    compiler(script)
    model, steps = Net(), [rows(seed=s) for s in range(3)]
    reference = train(copy.deepcopy(model), steps)
    own = subprocess.Popen(["sleep", "1000"])
    try:
        hotloop.compile(model, "aot_eager")
        with caplog.at_level(logging.WARNING, "hotloop"):
            train(model, steps).assert_equal(reference)
        assert own.poll() is None
    finally:
        own.kill()
        own.wait()
    assert one(model).running == "none"
    (cause,) = one(model).causes
    assert cause.reason.startswith("g++ hung: no processor time for 1 s (HOTLOOP_COMPILE_TIMEOUT)")
    assert any("g++ hung" in line and "HOTLOOP_COMPILE_TIMEOUT (0: no limit)" in line for line in caplog.messages)
    compiler("exit 0")  # it failed in that compile only
    another = Net(width=16)
    hotloop.compile(another, "aot_eager")
    another(rows())
    assert one(another).running == "aot_eager"


def test_a_compile_that_hangs_within_python_is_told_once_with_its_place(compiler, monkeypatch, caplog):
    said = threading.Event()

    class Heard(logging.Handler):
        def emit(self, record):
            said.set()

    def stuck_in_a_compile(graph, inputs):
        assert said.wait(300)
        time.sleep(1.5)  # as long again
        return real_aot_eager()(graph, inputs)

    compiler("exit 0")
    monkeypatch.setattr(backends, "aot_eager", lambda: stuck_in_a_compile)
    model, handler = Net(), Heard(logging.WARNING)
    hotloop.compile(model, "aot_eager")
    logging.getLogger("hotloop").addHandler(handler)
    try:
        with caplog.at_level(logging.WARNING, "hotloop"):
            model(rows())
    finally:
        logging.getLogger("hotloop").removeHandler(handler)
    (line,) = [line for line in caplog.messages if "without a compiler at work" in line]
    assert line.startswith("model: a compile has taken 1 s (HOTLOOP_COMPILE_TIMEOUT)")
    assert f"{__file__}:{stuck_in_a_compile.__code__.co_firstlineno + 1} (stuck_in_a_compile)" in line
    assert one(model).running == "aot_eager"


@pytest.mark.campaign
def test_those_that_waited_are_ended_after_the_compile_and_sooner(compiler, monkeypatch):
    program = compiler("sleep 1000")
    monkeypatch.setenv("HOTLOOP_COMPILE_TIMEOUT", "5")
    waited = []
    run = backends.aot_eager()

    def compile_graph(graph, inputs):
        def second():
            subprocess.run([program], check=False)
            waited.append(subprocess.run([program], check=False).returncode)

        threading.Thread(target=second).start()
        return run(graph, inputs)

    monkeypatch.setattr(backends, "aot_eager", lambda: compile_graph)
    model = Net()
    hotloop.compile(model, "aot_eager")
    model(rows())
    until = time.monotonic() + 300
    while not waited:
        assert time.monotonic() < until
        time.sleep(0.01)
    assert waited == [-signal.SIGTERM]


def test_a_compiler_that_hung_is_no_reason_of_what_fails_after_it(compiler, monkeypatch):
    program, compiled = compiler("sleep 1000"), []

    def compile_graph(graph, inputs):
        compiled.append(graph)
        if len(compiled) > 1:
            raise RuntimeError("planted")
        subprocess.run([program], check=False)  # whoever asked for this one goes on without it
        return real_aot_eager()(graph, inputs)

    monkeypatch.setattr(backends, "aot_eager", lambda: compile_graph)
    model = Tied()
    hotloop.compile(model, "aot_eager", regions="blocks")
    model(tokens())
    assert {cause.reason for cause in one(model).causes} == {"RuntimeError: planted"}


def test_the_watchdog_of_an_earlier_compile_leaves_the_next_one_to_its_own(monkeypatch):
    first, looked = Watchdog(1.0), []
    monkeypatch.setattr(first, "_look", lambda: looked.append(0))
    first._patience, first._seen = 1, {101: (0, 0)}  # a compiler of its compile hung, and another one waits
    first.start()
    first.stop()
    second = Watchdog(float("inf"))
    second.start()
    before = len(looked)
    for thread in threading.enumerate():
        if thread.name == "hotloop-watchdog":
            thread.join(300)
    assert len(looked) <= before + 1


@pytest.mark.parametrize("value", ["soon", "-1", "nan"])
def test_a_wrong_limit_is_refused(value, monkeypatch):
    monkeypatch.setenv("HOTLOOP_COMPILE_TIMEOUT", value)
    with pytest.raises(hotloop.errors.ConfigError, match="HOTLOOP_COMPILE_TIMEOUT"):
        hotloop.compile(Net(), "aot_eager")


def test_without_proc_or_a_limit_nothing_is_watched(monkeypatch):
    before = set(threading.enumerate())  # one of another test may end meanwhile
    Watchdog(float("inf")).start()
    monkeypatch.setattr(watchdog.Path, "exists", lambda _: False)
    Watchdog(600.0).start()
    assert set(threading.enumerate()) <= before


PROGRAM = """
import sys, time, torch, hotloop
from hotloop._torch import backends
from torch._inductor.async_compile import AsyncCompile

def waits(graph, inputs):
    return AsyncCompile.process_pool().submit(time.sleep, 1000).result()

if __name__ == "__main__":
    preset = sys.argv[1]
    if preset == "aot_eager":
        backends.aot_eager = lambda: waits
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
    hotloop.compile(model, preset)
    model(torch.ones(2, 4)).sum().backward()
    status = hotloop.status(model).components["model"]
    print(status.running, [cause.reason for cause in status.causes])
    if preset == "aot_eager":
        print(AsyncCompile.process_pool().submit(int, "7").result())
"""


def run(tmp_path, preset, **environment):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    chosen = {**os.environ, "HOTLOOP_COMPILE_TIMEOUT": "3", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path), **environment}
    command = [sys.executable, "-W", "ignore", program, preset]
    done = subprocess.run(command, env=chosen, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def sleeping(tmp_path, how=""):
    """Make a C++ compiler that answers what it is asked about itself, and sleeps when it has to compile."""
    path = tmp_path / "my-c++"
    real = shutil.which("g++")
    path.write_text(f'#!/bin/sh\ncase "$*" in *--version*|*-print*|*-E*) exec {real} "$@";; esac\n{how} sleep 100000\n')
    path.chmod(0o755)
    return str(path)


@pytest.mark.campaign
def test_a_worker_of_inductors_that_hangs_is_ended_and_started_anew(tmp_path):
    said = run(tmp_path, "aot_eager", TORCHINDUCTOR_COMPILE_THREADS="2")
    assert said.startswith("none [\"Inductor's pool of compile workers hung: no processor time for 3 s")
    assert said.splitlines()[-1] == "7"


@pytest.mark.inductor
@pytest.mark.campaign
@pytest.mark.parametrize("threads", ["1", "2"])
@pytest.mark.some_of(2)
def test_a_cpp_compiler_that_sleeps_for_ever_is_ended(threads, tmp_path):
    said = run(tmp_path, "default", CXX=sleeping(tmp_path), TORCHINDUCTOR_COMPILE_THREADS=threads)
    assert said.startswith("aot_eager ['my-c++ hung: no processor time for 3 s")


@pytest.mark.inductor
@pytest.mark.campaign
def test_a_cpp_compiler_that_became_another_program_is_ended_too(tmp_path):
    said = run(tmp_path, "default", CXX=sleeping(tmp_path, "exec"), TORCHINDUCTOR_COMPILE_THREADS="1")
    assert said.startswith("aot_eager ['sleep hung: no processor time for 3 s")

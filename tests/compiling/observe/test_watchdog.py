"""A compiler that hangs is ended, with all that it started: its compile fails, and the run goes on."""

import logging
import subprocess
import threading
import time

import pytest
import torch
from compiling_models import Net, one, rows

import hotloop
from hotloop._torch import backends
from hotloop.errors import ConfigError


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    """Plant a program that runs a shell script before aot_eager compiles; it may hang for a second."""
    monkeypatch.setenv("HOTLOOP_COMPILE_TIMEOUT", "1")
    monkeypatch.delenv("CXX", raising=False)
    real = backends.aot_eager

    def plant(script, name="g++"):
        path = tmp_path / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)

        def compile_graph(graph, inputs):
            subprocess.run([path], check=True, stdout=subprocess.PIPE)
            return real()(graph, inputs)

        monkeypatch.setattr(backends, "aot_eager", lambda: compile_graph)

    yield plant
    until = time.monotonic() + 100
    while any(thread.name == "hotloop-watchdog" for thread in threading.enumerate()):
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.mark.parametrize("name", ["g++", "my-clang++", "chosen"])
def test_a_compile_whose_compiler_hangs_fails_and_the_run_goes_on(name, compiler, caplog, monkeypatch):
    monkeypatch.setenv("CXX", "/usr/bin/chosen -O2")
    compiler("sleep 1000", name)
    own = subprocess.Popen(["sleep", "1000"])
    try:
        model = hotloop.compile(Net(), "aot_eager")
        with caplog.at_level(logging.WARNING, "hotloop"):
            model(rows()).sum().backward()
        assert own.poll() is None
    finally:
        own.kill()
        own.wait()
    assert one(model).running == "none"
    (cause,) = one(model).causes
    assert cause.reason.startswith(f"{name} hung: it ran for 1 s (HOTLOOP_COMPILE_TIMEOUT)")
    assert any("HOTLOOP_COMPILE_TIMEOUT (0: no limit)" in line for line in caplog.messages)
    compiler("exit 0", name)  # it failed in that compile only
    another = hotloop.compile(Net(width=16), "aot_eager")
    another(rows())
    assert one(another).running == "aot_eager"


@pytest.mark.parametrize("limit", ["1", "0"])
def test_other_programs_and_quick_compilers_are_left_alone(limit, compiler, monkeypatch):
    monkeypatch.setenv("HOTLOOP_COMPILE_TIMEOUT", limit)
    compiler("sleep 1.3", "linker" if limit == "1" else "g++")
    model = hotloop.compile(Net(), "aot_eager")
    model(rows())
    assert one(model).running == "aot_eager"


@pytest.mark.parametrize("value", ["soon", "-1", "nan"])
def test_a_wrong_limit_is_refused(value, monkeypatch):
    monkeypatch.setenv("HOTLOOP_COMPILE_TIMEOUT", value)
    with pytest.raises(ConfigError, match=f"HOTLOOP_COMPILE_TIMEOUT={value}: expected seconds"):
        hotloop.compile(torch.nn.Linear(2, 2), "aot_eager")

"""Cold ways in processes of their own: caches are empty, and a process that is killed does not end the bench."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import hotloop
from hotloop.prove.bench import child
from hotloop.prove.bench.child import CannotStartError, caches_in, run_cold
from hotloop.prove.bench.way import NotRunError

pytestmark = pytest.mark.campaign  # children that compile in empty caches

FILE = Path(__file__).with_name("bench_programs.py")


@pytest.fixture
def program(tmp_path):
    """Return a function that writes a file with a function ``make``, and returns its name for a command line."""

    def write(body, head=""):
        path = tmp_path / "cold_program.py"
        path.write_text(f"import os, signal\n{head}\n\ndef make():\n    {body}\n", encoding="utf-8")
        return f"{path}:make"

    return write


def test_each_way_gets_ready_in_a_process_of_its_own(tmp_path):
    found = hotloop.bench(f"{FILE}:make", ("aot_eager",), steps=12)
    one = found.way("aot_eager")
    assert one.timed
    assert one.prepared_steps == 4
    assert 0 < one.compile_seconds < one.prepared_seconds
    assert one.warm_seconds is not None
    assert found.notes == ()
    if Path("/proc/self/clear_refs").exists():
        assert one.peak_bytes > 2**20
    assert child.INSIDE not in os.environ


def test_a_process_that_is_killed_is_a_reason(program, tmp_path):
    with pytest.raises(NotRunError, match="killed by SIGKILL"):
        run_cold("eager", program("os.kill(os.getpid(), signal.SIGKILL)"), tmp_path / "way")


def test_a_process_that_takes_too_long_is_ended(program, tmp_path):
    with pytest.raises(NotRunError, match="was not ready after 0 s"):
        run_cold("eager", program("pass"), tmp_path / "way", limit_seconds=0.2)


def test_a_file_that_cannot_be_imported_there_is_told_apart(program, tmp_path):
    name = program("pass", head="raise OSError('only once')")
    with pytest.raises(CannotStartError, match="OSError: only once"):
        run_cold("eager", name, tmp_path / "way")


def test_without_another_process_this_one_is_measured_and_says_so(monkeypatch):
    def cannot(*_):
        raise CannotStartError("planted")

    monkeypatch.setattr("hotloop.prove.bench.bench.run_cold", cannot)
    found = hotloop.bench(f"{FILE}:make", ("aot_eager",), steps=12)
    assert found.way("aot_eager").timed
    assert found.way("aot_eager").warm_seconds is None
    assert found.notes == ("cold seconds are this process's: another one cannot make the workload: planted",)


def test_a_bench_inside_a_bench_is_refused(monkeypatch):
    monkeypatch.setenv(child.INSIDE, "1")
    with pytest.raises(hotloop.errors.ConfigError, match="if __name__ == '__main__'"):
        hotloop.bench(f"{FILE}:make")


def test_compile_caches_are_put_back(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", "kept")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    with caches_in(tmp_path):
        assert os.environ["TORCHINDUCTOR_CACHE_DIR"].startswith(str(tmp_path))
    assert os.environ["TRITON_CACHE_DIR"] == "kept"
    assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ

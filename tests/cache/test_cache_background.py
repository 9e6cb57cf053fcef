"""The child process: it tells how it stands, never outlives its parent, and what goes wrong in it is a reason."""

import json
import os
import re
import sys
import textwrap
import time
from pathlib import Path

import pytest
from cache_models import make
from shared import is_gone, once

import hotloop
from hotloop.cache import BackgroundCompile, BackgroundUnavailableError, Done, Failed, child_process

FACTS = {"compile_seconds": 0.5, "graphs": 1, "cache_misses": 2, "state": "compiled", "causes": []}
MODELS = Path(__file__).parent / "cache_models.py"


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Start a child of one's own: its source gets ``given``, and ``report`` to answer with."""
    monkeypatch.syspath_prepend(tmp_path)
    head = """
        import json, os, signal, subprocess, sys, time
        given = json.loads(sys.argv[1])
        def report(facts): os.write(given["report"], json.dumps(facts).encode() + b"\\n")
    """
    started = []

    def begin(source, **settings):
        (tmp_path / "child_program.py").write_text(textwrap.dedent(head) + textwrap.dedent(source))
        child = BackgroundCompile.start("programs:make", {}, program="child_program", **settings)
        started.append(child)
        return child

    yield begin
    for child in started:
        child.stop()


def wait(child, seconds=900):  # the child gives way to all that runs beside it
    end = time.monotonic() + seconds
    while child.poll() == "running" and time.monotonic() < end:
        time.sleep(0.01)
    return child.poll()


def gone(pid):
    return once(lambda: is_gone(pid))


def test_a_report_is_the_answer_and_stays(start):
    child = start(f"report({FACTS!r})")
    outcome = wait(child)
    assert outcome == Done(seconds=outcome.seconds, **{**FACTS, "causes": ()})
    child.stop()
    assert child.poll() == outcome


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("report({'failed': 'OutOfMemoryError: too large'})", "^OutOfMemoryError: too large$"),
        ("print('first'); print('the last', file=sys.stderr); os._exit(3)", "ended with code 3.*first \\| the last$"),
        ("raise ImportError('no module')", "ended with code 1.*ImportError: no module"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "killed by SIGKILL; the machine may be out of memory"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "killed by SIGSEGV"),
        ("os.write(given['report'], b'{\"seconds\": 1')", "no report"),
    ],
)
def test_a_child_that_fails_is_a_reason_with_its_last_words(start, source, reason):
    outcome = wait(start(source))
    assert isinstance(outcome, Failed)
    assert re.search(reason, outcome.reason)


def test_stop_ends_the_child_but_no_compiler_that_writes_into_the_cache(start, tmp_path):
    child = start(f"""
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(2); open('library', 'w').write('whole')"],
                         cwd={str(tmp_path)!r})
        open({str(tmp_path / "begun")!r}, "w").close()
        time.sleep(1000)
    """)
    assert once((tmp_path / "begun").exists)
    child.stop()
    assert child.poll() == Failed("stopped")
    assert gone(child.pid)
    assert once(lambda: (tmp_path / "library").exists() and (tmp_path / "library").read_text() == "whole")


def test_the_child_gives_way_has_an_environment_and_its_files_of_its_own(start, monkeypatch, tmp_path):
    """The request is a pickle, which runs code: it has no name, and only its owner may read it."""
    monkeypatch.setenv("HOTLOOP_DISABLE", "1")
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
    with (tmp_path / "locked").open("w") as lock:
        os.set_inheritable(lock.fileno(), True)
        outcome = wait(
            start("""
            found = os.fstat(given["request"])
            opened = [os.readlink(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{n}")]
            report({"failed": json.dumps({
                "nice": os.nice(0), "disabled": os.environ.get("HOTLOOP_DISABLE"), "inside": os.environ["HOTLOOP_BACKGROUND"],
                "workers": os.environ["TORCHINDUCTOR_COMPILE_THREADS"], "own group": os.getpgid(0) == os.getpid(), "path": sys.path,
                "request": [found.st_nlink, found.st_mode & 0o777, found.st_uid == os.getuid()],
                "locked": any("locked" in name for name in opened),
            })})
        """)
        )
    assert json.loads(outcome.reason) == {
        "nice": min(19, os.nice(0) + child_process.NICENESS),
        "disabled": None,
        "inside": "1",
        "workers": "1",
        "own group": True,
        "path": [str(Path(place).absolute()) for place in sys.path],
        "request": [0, 0o600, True],
        "locked": False,
    }


@pytest.mark.parametrize(
    ("factory", "settings", "change", "reason"),
    [
        ("a:make", {}, lambda patch: patch.setenv(child_process.INSIDE, "1"), "itself compiling"),
        ("a:make", {}, lambda patch: patch.setattr(sys, "executable", "/nowhere/python"), "cannot be started"),
        ("a:make", {"dynamic": lambda: None}, lambda patch: None, "cannot be pickled"),
        ("__main__:make", {}, lambda patch: None, "can be imported by name"),
    ],
)
def test_a_child_that_cannot_be_started_is_a_reason(monkeypatch, factory, settings, change, reason):
    change(monkeypatch)
    with pytest.raises(BackgroundUnavailableError, match=reason):
        BackgroundCompile.start(factory, settings)


@pytest.mark.campaign
@pytest.mark.parametrize("factory", ["cache_models:make", f"{MODELS}:make"])
def test_a_workload_is_made_and_stepped(factory):
    outcome = wait(BackgroundCompile.start(factory, {"preset": "aot_eager"}))
    assert isinstance(outcome, Done), outcome
    assert (outcome.state, outcome.graphs, outcome.causes) == ("compiled", 1, ())
    assert 0 < outcome.compile_seconds < outcome.seconds


@pytest.mark.campaign
@pytest.mark.long
@pytest.mark.inductor
def test_the_parent_finds_all_that_the_child_compiled(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    outcome = wait(BackgroundCompile.start("cache_models:make", {"preset": "default"}))
    assert isinstance(outcome, Done), outcome
    assert outcome.cache_misses > 0
    workload = make()
    hotloop.compile(workload.model, "default")
    workload.run(next(workload.endless()))
    found = hotloop.status(workload.model).components["model"]
    assert (found.state, found.cache_misses) == ("compiled", 0)
    assert found.cache_hits == outcome.cache_misses

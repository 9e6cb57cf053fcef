"""The child process: it tells how it stands, never outlives its parent, and what goes wrong in it is a reason."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch
from cache_models import Fails, Net
from forked import Forks
from shared import is_gone, once

import hotloop
from hotloop.cache import (
    BackgroundCompile,
    BackgroundUnavailableError,
    Done,
    Failed,
    Recorder,
    Request,
    child_process,
    process_folder,
    shared_compiles,
)
from hotloop.cache.portable import StorageSpec, Tensors
from hotloop.cache.process_folder import ProcessFolder

TIMES = ("seconds", "begun_seconds", "built_seconds")
FACTS = {"seconds": 1.0, "begun_seconds": 0.2, "built_seconds": 0.4, "compile_seconds": 0.5, "graphs": 1, "cache_hits": 0, "cache_misses": 2, "state": "compiled", "causes": [], "peak_bytes": 0}  # fmt: skip


@pytest.fixture
def program(tmp_path, monkeypatch):
    """Make a child of one's own: its source gets ``given``, and ``report`` to answer with."""
    monkeypatch.syspath_prepend(tmp_path)
    head = """
        import json, os, signal, subprocess, sys, time
        given = json.loads(sys.argv[1])
        def report(facts): os.write(given["report"], json.dumps(facts).encode() + b"\\n")
    """

    def make(source):
        (tmp_path / "child_program.py").write_text(textwrap.dedent(head) + textwrap.dedent(source))
        return "child_program"

    return make


@pytest.fixture
def start(program):
    started = []

    def begin(source, **settings):
        child = BackgroundCompile.start(Request(settings={}), program=program(source), **settings)
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
    assert wait(child) == Done(**{**FACTS, "causes": ()})
    child.stop()
    assert child.poll() == Done(**{**FACTS, "causes": ()})


def test_a_failure_that_the_child_tells_is_the_reason(start):
    assert wait(start("report({'failed': 'OutOfMemoryError: too large'})")) == Failed("OutOfMemoryError: too large")


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (
            "print('first'); print('the last line', file=sys.stderr); os._exit(3)",
            "ended with code 3.*first \\| the last line",
        ),
        ("raise ImportError('no module')", "ended with code 1.*ImportError: no module"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "killed by SIGKILL; the machine may be out of memory"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "killed by SIGSEGV"),
        ("os.write(given['report'], b'{\"seconds\": 1')", "no report"),
    ],
)
def test_a_child_that_dies_is_a_reason_with_its_last_words(start, source, reason):
    outcome = wait(start(source))
    assert isinstance(outcome, Failed)
    assert re.search(reason, outcome.reason)


def test_a_child_that_takes_too_long_is_stopped(start, monkeypatch):
    monkeypatch.setattr(child_process, "_LOOK_SECONDS", 0.0)
    child = start("print('stuck here', flush=True); time.sleep(1000)", limit_seconds=1.0)
    outcome = wait(child)
    assert "longer than 1 s" in outcome.reason
    assert gone(child.pid)


def test_a_log_without_end_takes_no_room_and_its_end_is_kept(start, monkeypatch):
    monkeypatch.setattr(child_process, "_LOOK_SECONDS", 0.0)
    monkeypatch.setattr(child_process, "_LOG_BYTES", 100_000)
    child = start("""
        for _ in range(200):
            print("x" * 10_000, flush=True)
            while os.fstat(1).st_blocks * 512 > 100_000: time.sleep(0.002)  # until it was cut
        print("the end", flush=True); os._exit(1)
    """)
    largest = 0
    while child.poll() == "running":
        largest = max(largest, os.fstat(child._log.fileno()).st_blocks * 512)
    assert child.poll().reason.endswith("the end")
    assert 100_000 < largest < 1_500_000  # of two millions


def test_stop_ends_the_child_and_what_it_started(start, tmp_path):
    child = start(f"""
        inner = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
        open({str(tmp_path / "pid")!r}, "w").write(f"{{inner.pid}}\\n")
        time.sleep(1000)
    """)
    pid = read_pid(tmp_path / "pid")
    child.stop()
    assert child.poll() == Failed("stopped")
    assert gone(child.pid)
    assert gone(pid)


def read_pid(path):
    while not (path.exists() and path.read_text().endswith("\n")):
        time.sleep(0.01)
    return int(path.read_text())


def test_a_child_that_nobody_holds_any_more_is_ended(program):
    child = BackgroundCompile.start(Request(settings={}), program=program("time.sleep(1000)"))
    pid = child.pid
    del child
    assert gone(pid)


def test_the_child_gives_way_and_has_an_environment_of_its_own(start, monkeypatch):
    monkeypatch.setenv("HOTLOOP_DISABLE", "1")
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
    outcome = wait(
        start("""
        report({"failed": json.dumps([os.nice(0), os.environ.get("HOTLOOP_DISABLE"), os.environ["TORCHINDUCTOR_COMPILE_THREADS"],
            os.environ["HOTLOOP_BACKGROUND"], os.getpgid(0) == os.getpid(), sys.path])})
    """)
    )
    nice, disabled, workers, inside, own_group, path = json.loads(outcome.reason)
    assert nice == min(19, os.nice(0) + child_process.NICENESS)
    assert (disabled, workers, inside, own_group) == (None, "1", "1", True)
    assert path == [str(Path(place).absolute()) for place in sys.path]


@pytest.mark.parametrize(("cpus", "workers"), [(1, "1"), (2, "1"), (4, "3"), (16, "12"), (128, "16")])
def test_the_childs_workers_take_most_of_the_cores(monkeypatch, cpus, workers):
    monkeypatch.delenv("TORCHINDUCTOR_COMPILE_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cpus)))
    assert child_process._environment(None)["TORCHINDUCTOR_COMPILE_THREADS"] == workers


def test_the_request_is_in_a_file_without_a_name_that_only_its_owner_may_read(start):
    """A pickle runs code: whoever could write it would run code in the child."""
    outcome = wait(
        start("""
        found = os.fstat(given["request"])
        report({"failed": json.dumps([found.st_nlink, found.st_mode & 0o777, found.st_uid == os.getuid()])})
    """)
    )
    assert json.loads(outcome.reason) == [0, 0o600, True]


def test_the_child_inherits_no_files_but_its_own(start, tmp_path):
    with (tmp_path / "locked").open("w") as lock:
        os.set_inheritable(lock.fileno(), True)
        outcome = wait(
            start(
                "report({'failed': ' '.join(os.readlink(f'/proc/self/fd/{n}') for n in os.listdir('/proc/self/fd') if os.path.exists(f'/proc/self/fd/{n}'))})"
            )
        )
    assert "locked" not in outcome.reason


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A store of the test's own, and no folder of torch's."""
    monkeypatch.setenv("HOTLOOP_CACHE_DIR", str(tmp_path / "home"))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setattr(ProcessFolder, "current", None)


WRITES = """
    from pathlib import Path
    place = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
    (place / "ab").mkdir(exist_ok=True)
    (place / "ab" / "new").write_text((place / "ab" / "known").read_text() + " and more")
    (place / "triton").mkdir()
    (place / "triton" / "path").write_text(str(place))
"""


def files_of(shared):
    listed = sorted(path for path in shared.place.rglob("*") if path.is_file())
    return {path.name: path.read_text() for path in listed if path.name != "alive"}


def kept():
    return sorted(file.path for entry in process_folder.compiled_store().entries() for file in entry.manifest.files)


def test_what_a_child_compiled_is_taken_over_once_it_is_done(start, home):
    with shared_compiles() as shared:
        (shared.place / "ab").mkdir()
        (shared.place / "ab" / "known").write_text("known")
        shared.keep()
        (shared.place / "ab" / "half").write_text("not kept yet: it may be half of a file")
        child = start(textwrap.dedent(WRITES) + f"report({FACTS!r})")
        assert isinstance(wait(child), Done)
        assert set(files_of(shared)) == {"known", "new", "half"}
        assert files_of(shared)["new"] == "known and more"
    assert kept() == ["ab/half", "ab/known", "ab/new"]


def test_what_a_child_tuned_stays_where_its_kernels_look_for_it(start, home):
    with shared_compiles() as shared:
        tuned = '(Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]) / "k.best_config").write_text("fastest")'
        child = start(f"from pathlib import Path; {tuned}; report({FACTS!r})")
        assert isinstance(wait(child), Done)
        places = [path.relative_to(shared.place) for path in shared.place.rglob("k.best_config")]
        assert sorted(place.parts[0] for place in places) == ["children", "k.best_config"]
    assert kept() == ["k.best_config"]


@pytest.mark.parametrize("ending", ["time.sleep(1000)", "os._exit(1)", "report({'failed': 'no'})"])
def test_what_a_child_leaves_that_did_not_get_done_is_never_kept(start, home, tmp_path, ending):
    with shared_compiles() as shared:
        (shared.place / "ab").mkdir()
        (shared.place / "ab" / "known").write_text("known")
        shared.keep()
        child = start(textwrap.dedent(WRITES) + f"open({str(tmp_path / 'pid')!r}, 'w').write('1\\n')\n{ending}")
        read_pid(tmp_path / "pid")
        assert shared.keep() == 0  # while it lives
        if "sleep" not in ending:
            assert isinstance(wait(child), Failed)
        child.stop()
        assert files_of(shared) == {"known": "known"}
        assert not list((shared.place / "children").iterdir())
    assert kept() == ["ab/known"]


def test_without_a_shared_folder_the_child_writes_where_its_parent_does(start, home, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    outcome = wait(start("report({'failed': os.environ['TORCHINDUCTOR_CACHE_DIR']})"))
    assert outcome == Failed(str(tmp_path))


def test_a_child_of_a_child_is_refused(monkeypatch):
    monkeypatch.setenv(child_process.INSIDE, "1")
    with pytest.raises(BackgroundUnavailableError, match="itself compiling"):
        BackgroundCompile.start(Request(settings={}))


GIB = 2**30


@pytest.fixture
def on_gpu(monkeypatch):
    """A request whose tensors take 10 GiB of a GPU with 100 GiB, of which this process needed 30 and holds 25."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda name: (70 * GIB, 100 * GIB))
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda name: 30 * GIB)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda name: 25 * GIB)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda name: 28 * GIB)
    storage = StorageSpec(nbytes=10 * GIB, device="cuda:1", dtype=torch.float32, value=None, low=0, high=0)
    return lambda peak: Request(settings={}, tensors=Tensors([], [storage]), peak_bytes=peak)


@pytest.mark.parametrize(
    ("peak", "share"),
    [
        (None, 0.56),  # twice what this process has needed
        (5 * GIB, 0.40),  # twice the tensors and their gradients
        (40 * GIB, 0.59),  # all that can be spared: free, less what this process may take again, a margin and a context
    ],
)
def test_the_childs_share_of_the_gpu_is_bounded(on_gpu, peak, share):
    assert child_process._memory_limits(on_gpu(peak)) == {"1": pytest.approx(share)}


def test_a_step_that_does_not_fit_beside_this_one_is_a_reason(on_gpu):
    with pytest.raises(BackgroundUnavailableError, match=r"needs 60\.0 GiB on cuda:1, and 59\.0 GiB can be spared"):
        BackgroundCompile.start(on_gpu(60 * GIB))


def test_a_process_that_cannot_be_started_is_a_reason(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(BackgroundUnavailableError, match="cannot be started"):
        BackgroundCompile.start(Request(settings={}))


IMPORTS = """
import os, signal, sys, time
import torch, torch._dynamo
from cache_models import Net
from hotloop.cache import BackgroundCompile, Recorder
"""
PARENT = """
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's job in the background ignores it
net = Net()
with Recorder({"model": net}) as recorder:
    net(torch.randint(40, (8, 4)))
child = BackgroundCompile.start(recorder.request({"preset": "aot_eager"}))
if sys.argv[1] == "fork":
    if os.fork() == 0:
        time.sleep(1000)  # holds the pipe to the child open
print(child.pid, flush=True)
if sys.argv[1] == "wait":
    while child.poll() == "running":
        time.sleep(0.01)
    print(child.poll())
elif sys.argv[1] == "forget":
    sys.exit(0)
elif sys.argv[1] == "exit in a fork":
    if os.fork() == 0:
        sys.exit(0)
    os.wait()
    print(child.poll())
else:
    time.sleep(1000)
"""


@pytest.fixture(scope="module")
def parents():
    forks = Forks(IMPORTS, PARENT, PYTHONPATH=os.pathsep.join(sys.path), OMP_NUM_THREADS="1")
    yield forks
    forks.close()


@pytest.fixture
def parent(parents):
    running = []

    def begin(way):
        process = parents.start(way)
        running.append(process)
        return process, int(process.stdout.readline())

    yield begin
    for process in running:
        process.end()


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("way", "how"), [("sleep", signal.SIGKILL), ("sleep", signal.SIGINT), ("fork", signal.SIGKILL), ("forget", None)]
)
def test_the_child_dies_with_its_parent(parent, way, how):
    process, child = parent(way)
    if how is not None:
        time.sleep(0.5)  # somewhere between the child's start and its end
        process.send_signal(how)
    assert process.wait() is not None
    assert gone(child)


@pytest.mark.campaign
def test_a_fork_of_the_parent_that_ends_leaves_the_child_alone(parent):
    process, _ = parent("exit in a fork")
    assert re.match("running|Done", process.stdout.read())  # done, where this process was held up in between


@pytest.mark.campaign
def test_the_real_child_compiles_and_reports(parent):
    process, _ = parent("wait")
    said = process.stdout.read()
    assert "Done(" in said
    assert "state='compiled'" in said
    assert "graphs=1" in said
    whole, begun, built = (float(re.search(rf"\b{name}=([\d.]+)", said)[1]) for name in TIMES)
    assert 0 < begun < built < whole  # all from when the child was asked for, on its parent's clock


IN_MAIN = """
import math, sys, time
import torch
from torch import nn
from hotloop.cache import BackgroundCompile, Recorder

def act(x):
    return torch.relu(x) * math.pi

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        return x + act(self.inner(x))

def main(preset):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.block, self.last = Block(), lambda x: x.tanh()

        def forward(self, x):
            return self.last(self.block(x))

    model = Model()
    with Recorder({"model": model}) as recorder:
        model(torch.randn(4, 8)).sum().backward()
    child = BackgroundCompile.start(recorder.request({"preset": preset}))
    while child.poll() == "running":
        time.sleep(0.01)
    print(child.poll())
    return model

"""
COMPILED_AFTER = """
import hotloop
model = main("default")
hotloop.compile(model, preset="default")
model(torch.randn(4, 8)).sum().backward()
print("missed", hotloop.status(model).components["model"].cache_misses)
"""


def in_main(tmp_path, source):
    """Run a script whose model is made of classes and functions of the script's own; return what it prints."""
    script = tmp_path / "script.py"
    script.write_text(IN_MAIN + source)
    path = os.pathsep.join(place for place in sys.path if place)
    variables = {**os.environ, "PYTHONPATH": path, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "compiled")}
    ran = subprocess.run([sys.executable, script], env=variables, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@pytest.mark.campaign
def test_classes_of_the_main_script_are_compiled(tmp_path):
    said = in_main(tmp_path, 'main("aot_eager")')
    assert "state='compiled', causes=()" in said


CELLS = """
import sys

cells = [
    "import torch, time; from torch import nn; from hotloop.cache import BackgroundCompile, Recorder",
    "import dataclasses, types; settings = types.SimpleNamespace(times=3.0)",
    "@dataclasses.dataclass\\nclass Config:\\n    width: int = 8",
    "class Block(nn.Module):\\n"
    "    def __init__(self, config):\\n"
    "        super().__init__(); self.config = config; self.inner = nn.Linear(config.width, config.width)\\n"
    "    def forward(self, x):\\n"
    "        return self.inner(x) * settings.times",
    "model = nn.Sequential(Block(Config()), Block(Config()))",
    "with Recorder({'model': model}) as recorder: model(torch.randn(4, 8)).sum().backward()",
    "child = BackgroundCompile.start(recorder.request({'preset': 'aot_eager'}))",
    "while child.poll() == 'running': time.sleep(0.01)",
    "print(child.poll())",
]
kernel = vars(sys.modules["__main__"])
del kernel["__file__"]
for number, cell in enumerate(cells):
    exec(compile(cell, f"<ipython-input-{number}>", "exec"), kernel)
"""


@pytest.mark.campaign
def test_classes_of_a_notebooks_cells_are_compiled(tmp_path):
    """They are of `__main__`, which has no file, so that nothing could import them."""
    said = in_main(tmp_path, CELLS)
    assert "state='compiled', causes=()" in said


WITH_AN_OPERATOR = """
import time, torch, a_library
from hotloop.cache import BackgroundCompile, Recorder

@torch.library.custom_op("hotloop_test_main::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2.0

model = a_library.Twice(8, 8)
with Recorder({"model": model}) as recorder:
    model(torch.randn(4, 8))
child = BackgroundCompile.start(recorder.request({"preset": "aot_eager"}))
while child.poll() == "running":
    time.sleep(0.05)
print(child.poll())
"""


@pytest.mark.campaign
def test_an_operator_of_the_main_script_is_not_in_the_child_which_says_nothing_of_the_compile(tmp_path):
    (tmp_path / "a_library.py").write_text(
        "import torch\n\nclass Twice(torch.nn.Linear):\n"
        "    def forward(self, x):\n        return torch.ops.hotloop_test_main.twice(super().forward(x))\n"
    )
    said = in_main(tmp_path, WITH_AN_OPERATOR)
    assert "Failed(" in said
    assert "hotloop_test_main" in said
    assert "unable=True" in said


@pytest.mark.campaign
@pytest.mark.inductor
def test_the_main_script_finds_all_that_the_child_compiled(tmp_path):
    said = in_main(tmp_path, COMPILED_AFTER)
    assert "state='compiled', causes=()" in said
    assert "missed 0" in said


def recorded(net, *args, **settings):
    with Recorder({"model": net}) as recorder, contextlib.suppress(ValueError):
        net(*args)
    return recorder.request(settings)


@pytest.mark.campaign
def test_what_the_model_raises_in_the_child_is_the_reason():
    child = BackgroundCompile.start(recorded(Fails(2, 2), torch.ones(1, 2), preset="aot_eager"))
    assert wait(child) == Failed("ValueError: two lines", unable=True)


@pytest.mark.campaign
def test_caches_that_are_off_are_the_reason(monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_FORCE_DISABLE_CACHES", "1")
    outcome = wait(BackgroundCompile.start(recorded(Net(), torch.randint(40, (8, 4)))))
    assert "force_disable_caches" in outcome.reason


@pytest.mark.campaign
def test_a_preset_that_fails_in_the_child_is_a_reason_though_a_lower_one_would_do(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "/nowhere/compiler")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    outcome = wait(BackgroundCompile.start(recorded(Net(), torch.randint(40, (8, 4)))))
    assert isinstance(outcome, Failed), outcome
    assert "compiler" in outcome.reason.lower()
    assert not outcome.unable


@pytest.mark.campaign
@pytest.mark.parametrize("factory", ["cache_models:make", f"{Path(__file__).parent / 'cache_models.py'}:make"])
def test_a_workload_is_made_and_stepped(factory):
    outcome = wait(BackgroundCompile.start(Request.of_factory(factory, {"preset": "aot_eager"})))
    assert isinstance(outcome, Done), outcome
    assert (outcome.state, outcome.graphs) == ("compiled", 1)


@pytest.mark.campaign
def test_a_workload_that_is_not_there_is_a_reason():
    outcome = wait(BackgroundCompile.start(Request.of_factory("cache_models:nothing", {"preset": "aot_eager"})))
    assert "has no function 'nothing'" in outcome.reason


@pytest.mark.campaign
@pytest.mark.inductor
def test_the_parent_finds_all_that_the_child_compiled(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    net, ids = Net(), torch.randint(40, (8, 4))

    def step():
        with torch.autocast("cpu", torch.bfloat16):
            loss = net(ids)["logits"].float().logsumexp(-1).mean()
        loss.backward()
        return loss

    with Recorder({"model": net}) as recorder:
        step()
    child = BackgroundCompile.start(recorder.request({"preset": "default"}))
    outcome = wait(child)
    assert isinstance(outcome, Done), outcome
    assert outcome.cache_misses > 0
    hotloop.compile(net, "default")
    step()
    found = hotloop.status(net).components["model"]
    assert (found.state, found.cache_misses) == ("compiled", 0)
    assert found.cache_hits == outcome.cache_misses
    print(f"cold {outcome.compile_seconds:.1f} s in the child, warm {found.compile_seconds:.1f} s here")

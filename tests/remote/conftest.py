"""What the tests of remote runs share: a project in a repository, a place for what is remembered, and a Ray head."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "report")]

PROGRAM = '''
import os, signal, time
from pathlib import Path
import torch, hotloop


def make(steps: int = 12, slow: float = 0.0, die_at: int = 0, needs: str = ""):
    """A small program; it may wait in each step, kill itself once, or read a file."""
    if needs:
        Path(needs).read_text()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(0)
    data = [(torch.randn(4, 8, generator=generator), torch.randint(0, 2, (4,), generator=generator)) for _ in range(steps)]
    done = []

    def step(x, y):
        time.sleep(slow)
        done.append(1)
        if len(done) == die_at and not Path("died").exists():
            Path("died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return hotloop.Workload(model, optimizer, step, data)
'''


@pytest.fixture(autouse=True)
def _own_state(tmp_path, monkeypatch):
    """Nothing of this user's is read or changed, and Ray is not led elsewhere."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("HOTLOOP_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A repository with a program, which is the working folder."""
    from ray_head import git

    folder = tmp_path / "project"
    folder.mkdir()
    monkeypatch.chdir(folder)
    Path("train.py").write_text(PROGRAM)
    git("init", "-q")
    git("add", ".")
    return folder


@pytest.fixture(scope="module")
def head(tmp_path_factory):
    pytest.importorskip("ray.job_submission")
    from ray_head import Head

    made = Head(tmp_path_factory.mktemp("head"))
    try:
        made.start()
        yield made
    finally:
        made.kill()
        shutil.rmtree(made.folder, ignore_errors=True)


@pytest.fixture
def hotloop():
    """Run the command line in this folder; fail where the exit code is another one."""

    def run(*arguments, code=0):
        environment = {**os.environ, "PYTHONPATH": str(HERE.parents[1] / "src")}
        command = [sys.executable, "-m", "hotloop", *map(str, arguments)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, check=False)
        assert done.returncode == code, done.stdout[-3000:] + done.stderr[-3000:]
        return done

    return run


@pytest.fixture
def over():
    """Wait until a run is over on its cluster, and return how it ended."""
    from hotloop.remote import fetch

    def wait(run, seconds=600):
        until = time.monotonic() + seconds
        while (status := fetch.statuses([run])[0]) in ("waiting", "running"):
            assert time.monotonic() < until
            time.sleep(0.3)
        return status

    return wait

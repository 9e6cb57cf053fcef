"""A run elsewhere as a whole: another folder, user and cache, another environment made from the lock; and the scripts
of examples/cloud, as they stand there, against a Ray cluster of their own on this machine."""

import contextlib
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path

import pytest
import yaml
from ray_head import Head
from shared import free_port

from hotloop import record

pytest.importorskip("ray.job_submission")
pytestmark = [pytest.mark.campaign, pytest.mark.long]
ROOT = Path(__file__).parents[2]
FILES = ROOT / "examples" / "cloud"
NOBODY = 65534
SYSTEM = Path(f"/usr/bin/python{platform.python_version_tuple()[0]}.{platform.python_version_tuple()[1]}")
RUN = ["train", "train.py:make", "program.steps=20", "training.num_epochs=1"]


def _another():
    """The number of another user and a Python that this user can start; this user's own where there is none."""
    if os.getuid() == 0:
        for python in (Path(sys.base_prefix) / "bin" / SYSTEM.name, SYSTEM):
            with contextlib.suppress(OSError):
                asked = [python, "-c", "import ensurepip"]
                if not subprocess.run(
                    asked, user=NOBODY, group=NOBODY, extra_groups=[], check=False, cwd="/"
                ).returncode:
                    return NOBODY, python
    return None, Path(sys.executable)


@pytest.fixture(scope="module")
def elsewhere():
    """A head with an environment that pip made from the lock, as another user where that is possible."""
    user, python = _another()
    place = Path(tempfile.mkdtemp(prefix="hl-elsewhere-"))
    place.chmod(0o755)  # the other user starts its Python from here
    subprocess.run([python, "-m", "venv", place / "env"], check=True)
    own = place / "env" / "bin" / "python"
    lock = ["-c", ROOT / "constraints.txt", f"{ROOT}[ray]"]
    subprocess.run([own, "-m", "pip", "install", "-q", *lock], check=True, timeout=1500)
    made = Head(place / "home", own, user)
    try:
        made.start()
        yield made
    finally:
        made.kill()
        shutil.rmtree(made.folder)
        shutil.rmtree(place)


def test_a_run_elsewhere_comes_back_and_finds_compiled_code_in_the_shared_cache(
    elsewhere, project, hotloop, over, monkeypatch
):
    from hotloop.remote import runs

    share = elsewhere.home / "share"
    share.mkdir()
    if elsewhere.user is not None:
        os.chown(share, elsewhere.user, elsewhere.user)
        assert share.stat().st_uid != os.getuid()
    compiled = ["training.optimization.use_torch_compile=true", f"cache.share={share}"]
    said = []
    for cache in ("first", "second"):
        monkeypatch.setenv("HOTLOOP_CACHE_DIR", str(project.parent / cache))
        shutil.rmtree(elsewhere.cache, ignore_errors=True)
        hotloop("submit", "--address", elsewhere.address, "--", *RUN, *compiled)
        assert over(runs.find(None)) == "finished", hotloop("submit", "logs").stdout
        hotloop("submit", "fetch", "--checkpoints", "last")
        said.append(hotloop("submit", "logs").stdout)
    first, second = said
    assert f"Taken from the shared cache {share}: nothing" in first
    assert f"Given to the shared cache {share}: 1 bundle" in first
    assert f"Taken from the shared cache {share}: 1 bundle" in second
    folder = Path(runs.find(None).folder)
    assert record.load(folder)["status"] == "finished"
    assert record.load(folder)["host"] == platform.node()
    assert (folder / "report.html").is_file()
    assert (folder / "checkpoints" / "last.pt").is_file()


@contextlib.contextmanager
def _ended():
    """End all processes that a script leaves running, as a rented machine would; they are known by a variable."""
    mark = f"HOTLOOP_TEST_{uuid.uuid4().hex}"
    try:
        yield {mark: "1"}
    finally:
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if mark.encode() in (path / "environ").read_bytes():
                    os.kill(int(path.name), signal.SIGKILL)


def _script(text, tmp_path, arguments=(), **variables):
    """Run a script of examples/cloud with this Python, and give what it said."""
    with _ended() as mark:
        known = {
            **os.environ, "PATH": f"{tmp_path / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", **variables, **mark,
        }  # fmt: skip
        done = subprocess.run(
            ["bash", "-s", "--", *arguments], input=text, env=known, capture_output=True, text=True, timeout=1500,
            check=False,
        )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def _ports():
    """A Slurm job whose ports nobody uses."""
    return next(
        one for one in range(os.getpid() % 3000, 3192) if all(map(_is_free, range(20000 + 4 * one, 20004 + 4 * one)))
    )


def _is_free(port):
    import socket

    with socket.socket() as one:
        return one.connect_ex(("127.0.0.1", port)) != 0


def test_the_sbatch_file_makes_a_cluster_of_its_nodes_and_fetches_the_run(project, tmp_path):
    srun = tmp_path / "bin" / "srun"
    srun.parent.mkdir()
    # In place of Slurm's: its options are left out, and the other node is this machine.
    srun.write_text('#!/bin/sh\nwhile [ "${1#--}" != "$1" ]; do shift; done\nexec "$@"\n')
    srun.chmod(0o755)
    said = _script(
        (FILES / "slurm.sbatch").read_text(), tmp_path, RUN, SLURM_JOB_ID=str(_ports()), SLURM_JOB_NUM_NODES="2",
        SLURM_CPUS_PER_TASK="1", SLURMD_NODENAME=platform.node(),
    )  # fmt: skip
    assert "step 20/20" in said
    (folder,) = project.glob("runs/train.py-make/*")
    assert record.load(folder)["status"] == "finished"
    assert (folder / "checkpoints" / "last.pt").is_file()


def test_the_skypilot_task_starts_a_head_once_and_fetches_its_runs(project, tmp_path):
    task = yaml.safe_load((FILES / "skypilot.yaml").read_text())
    (tmp_path / "hotloop").symlink_to(Path(sys.executable).parents[1])
    text = task["run"]
    for port in ("6379", "8265", "52366"):
        assert port in text
        text = text.replace(port, str(free_port()))
    begins, submit, rest = text.partition("hotloop submit")
    said = _script(begins + begins + submit + rest, tmp_path, HOME=str(tmp_path), RUN=" ".join(RUN))
    assert said.count("Ray runtime started") == 1  # a second launch finds the head that is there
    assert len(list(project.glob("runs/train.py-make/*/checkpoints/last.pt"))) == 1

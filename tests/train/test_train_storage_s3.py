"""Runs that are kept at S3: a server of the test's own, and a Python whose s3fs our own constraints rule out."""

import contextlib
import json
import os
import subprocess
import sys
import sysconfig
import textwrap
import time
import urllib.request
from pathlib import Path

import pytest
from shared import free_port
from test_train_workers import PROGRAM

pytestmark = [pytest.mark.campaign, pytest.mark.long]


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """A Python with s3fs and moto, which sees the packages of this one behind its own."""
    place = tmp_path_factory.mktemp("s3")
    subprocess.run([sys.executable, "-m", "venv", place], check=True)
    (folder,) = place.glob("lib/python*/site-packages")
    pip = [place / "bin/python", "-m", "pip", "install", "-q", "s3fs", "moto[server]"]
    done = subprocess.run(pip, capture_output=True, text=True, check=False, timeout=900)
    if done.returncode:
        pytest.skip(f"s3fs and moto cannot be installed here: {done.stderr.strip().splitlines()[-1]}")
    source = Path(__file__).parents[2] / "src"
    (folder / "behind.pth").write_text(f"{source}\n{sysconfig.get_paths()['purelib']}\n")
    return place / "bin/python"


@pytest.fixture(scope="module")
def s3(python):
    """Run moto's server; gives the environment in which its bucket is reached."""
    port = free_port()
    server = subprocess.Popen(
        [python.parent / "moto_server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    try:
        until = time.monotonic() + 300
        while True:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(urllib.request.Request(f"{url}/bucket", method="PUT")).close()
                break
            assert time.monotonic() < until
            time.sleep(0.2)
        keys = {"AWS_ACCESS_KEY_ID": "tests", "AWS_SECRET_ACCESS_KEY": "tests", "AWS_DEFAULT_REGION": "us-east-1"}
        yield {**os.environ, **keys, "AWS_ENDPOINT_URL": url, "HOTLOOP_CACHE_DIR": "", "PYTHONPATH": ""}
    finally:
        server.kill()
        server.wait()


@pytest.fixture
def hotloop(python, s3, tmp_path):
    """Run a command in a folder that stands for a machine."""
    (tmp_path / "own.py").write_text(textwrap.dedent(PROGRAM))

    def run(machine, *arguments):
        (tmp_path / machine).mkdir(exist_ok=True)
        command = [python, "-m", "hotloop", *arguments]
        return subprocess.run(command, cwd=tmp_path / machine, env=s3, capture_output=True, text=True, check=False)

    return run


NEW = ("../own.py:make", "run.folder=run", "training.num_epochs=2", "training.checkpoint_every_steps=1")


def test_a_run_at_s3_goes_on_on_a_machine_that_has_nothing(hotloop, tmp_path):
    begun = hotloop("one", "train", *NEW, "run.storage=s3://bucket/runs", "training.max_steps=3", "--json")
    assert begun.returncode == 0, begun.stderr
    ended = hotloop("other", "train", "run.resume=s3://bucket/runs/run", "training.max_steps=7", "--json")
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout)["step"] == 7
    lines = (tmp_path / "other/runs/run/record.jsonl").read_text().splitlines()
    assert sum('"loss"' in line and '"seconds"' in line for line in lines) == 7
    taken = hotloop("third", "train", *NEW, "run.storage=s3://bucket/runs")
    assert taken.returncode == 2
    assert "holds a run run already: go on with it by run.resume=s3://bucket/runs/run" in " ".join(taken.stderr.split())


def test_a_bucket_that_cannot_be_written_is_told_before_work_starts(hotloop, tmp_path):
    ended = hotloop("one", "train", *NEW, "run.storage=s3://nobodys/runs", "--dry-run")
    assert ended.returncode == 2
    assert "run.storage=s3://nobodys/runs cannot be written: " in " ".join(ended.stderr.split())
    assert not (tmp_path / "one/run").exists()


def test_folds_at_s3_go_on_on_a_machine_that_has_nothing(hotloop, tmp_path):
    three = ("kfold.n_splits=3", "recipe.goal=max:accuracy", "training.num_epochs=1")
    begun = hotloop("one", "kfold", "../own.py:make", *three, "run.folder=folds", "run.storage=s3://bucket/runs")
    assert begun.returncode == 0, begun.stderr
    ended = hotloop("other", "kfold", "run.resume=s3://bucket/runs/folds", "--json")
    assert ended.returncode == 0, ended.stderr
    assert [one["status"] for one in json.loads(ended.stdout)["folds"]] == ["finished"] * 3
    assert (tmp_path / "other/runs/folds/fold-2/checkpoints/last.pt").is_file()

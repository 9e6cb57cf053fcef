"""Steps of frameworks that two processes capture together, under DDP or sharded by FSDP2: in force in both at once, and equal to eager."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from shared import free_port

pytestmark = pytest.mark.campaign  # two processes under each framework

HERE = Path(__file__).parent


def run(folder, program, *scenarios):
    """Return the processes of a program that have ended, and what each has printed and said."""
    port = str(free_port())
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    running = [
        subprocess.Popen(
            [sys.executable, str(HERE / program), str(folder), str(rank), port, *scenarios],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        return running, [one.communicate(timeout=900) for one in running]
    finally:
        for one in running:
            one.kill()


def told_by(folder, program, *scenarios):
    """Return what two processes tell of all that they live through: to start them takes longer than to train."""
    running, done = run(folder, program, *scenarios)
    assert [one.returncode for one in running] == [0, 0], "\n".join(error[-3000:] for _, error in done)
    first, second = (json.loads(out.strip().splitlines()[-1]) for out, _ in done)
    for name, one in first.items():
        exactly = "sharded" in name and "PEERS_BACKEND" not in os.environ  # a GPU's kernels need not repeat themselves
        for told in (one, second[name]):
            assert told["exact" if exactly else "same"], (name, told)
        assert one["replays"] == second[name]["replays"], name
    return first, second


def alike(told, name, key="replays"):
    """Return what both processes tell of a scenario, which is the same."""
    first, second = (one[name][key] for one in told)
    assert first == second, (name, first, second)
    return first


def replayed(told, name, first, least):
    """Check that a scenario's steps were replayed from the same one on in both processes."""
    replays = alike(told, name)
    assert replays[0] == first, (name, replays)
    assert len(replays) >= least, (name, replays)


def said_by_the_first(told, name, *words):
    """Check that a tier was declined in both processes, which the first alone says, with a remedy."""
    assert alike(told, name) == []
    first, second = (one[name]["log"] for one in told)
    assert any(all(word in line for word in words) for line in first), first
    assert second == []


def test_lightning_captures_in_two_processes(tmp_path):
    names = "plain", "resumed", "compiled", "auto", "unused", "accumulated", "host read"
    told = told_by(tmp_path, "lightning_captured.py", *names)
    replayed(told, "plain", 16, 31)
    replayed(told, "resumed", 16, 8)
    replayed(told, "compiled", 15, 32)
    replayed(told, "auto", 17, 28)
    ran = [alike(told, name, "running") for name in ("plain", "compiled", "auto")]
    assert ran == ["eager+graph", "aot_eager+graph", "eager+graph"]
    assert all(alike(told, name, "owned") for name in ("plain", "resumed", "auto", "compiled", "host read"))
    assert [Path(one["plain"]["folder"]).name for one in told] == ["record", "rank-1"]
    said_by_the_first(told, "unused", "find_unused_parameters=True", "DDPStrategy(...) takes the arguments")
    said_by_the_first(told, "accumulated", "gradients are accumulated")
    assert alike(told, "host read") == []
    assert "read on the host" in " ".join(alike(told, "host read", "log"))


@pytest.mark.long
def test_transformers_captures_in_two_processes(tmp_path):
    told = told_by(tmp_path, "trainer_captured.py", "plain", "resumed", "accumulated", "auto", "unused")
    replayed(told, "plain", 16, 31)
    replayed(told, "resumed", 16, 8)
    replayed(told, "accumulated", 14, 67)
    replayed(told, "auto", 17, 28)
    assert [alike(told, name, "streams") for name in ("plain", "auto")] == [[True], [True]]
    said_by_the_first(told, "unused", "TrainingArguments(ddp_find_unused_parameters=False)")


@pytest.mark.parametrize(
    ("program", "replays"),
    [("lightning", (31, 8)), pytest.param("trainer", (31, 8), marks=pytest.mark.long)],
    ids=["lightning", "trainer"],
)
def test_what_a_framework_shards_is_captured_in_two_processes(tmp_path, program, replays):
    names = "sharded", "sharded, resumed"
    told = told_by(tmp_path, f"{program}_captured.py", *names)
    for name, least in zip(names, replays, strict=True):
        replayed(told, name, 16, least)
        assert alike(told, name, "log") == []

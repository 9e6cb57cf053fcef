"""``hotloop verify``: exit codes, and the stream of each output."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from verify_programs import wrong

from hotloop.cli import main

PROGRAM = """
import dataclasses, random, torch, hotloop
from verify_programs import workload
def make():
    return workload(dropout=0.1)
class Broken(torch.nn.Linear):
    def forward(self, x):
        y = super().forward(x)
        return y * 2 if y.sum().item() > 1e9 else y
def breaks():
    model = Broken(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    def step(x):
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return hotloop.Workload(model, optimizer, step, [torch.ones(2, 4)])
def nothing():
    return None
def raises():
    raise ValueError("no data today")
def exits():
    def step(x, y):
        raise SystemExit(0)
    return dataclasses.replace(workload(), step=step)
def restless():
    made, odd = workload(), random.SystemRandom()
    return dataclasses.replace(made, step=lambda x, y: made.step(x + odd.random(), y))
"""


@pytest.fixture
def program(tmp_path):
    file = tmp_path / "verified_program.py"
    file.write_text(PROGRAM)
    return file


def run(*arguments):
    with pytest.raises(SystemExit) as ended:
        main(["verify", *map(str, arguments)])
    return ended.value.code or 0


def test_a_right_compile_exits_with_0_and_prints_the_table(program, capsys):
    assert run(f"{program}:make", "--preset", "aot_eager", "--steps", "2") == 0
    told = capsys.readouterr()
    assert "passes over 2 steps" in told.out
    assert "step 1 agrees" in told.err
    assert "step 1 agrees" not in told.out


@pytest.mark.campaign
def test_a_graph_break_is_told_once_in_hotloops_words(program):
    """The command runs in a process of its own, where torch is not loaded yet."""
    command = [sys.executable, "-m", "hotloop", "verify", f"{program}:breaks", "--preset", "aot_eager", "--steps", "1"]
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    told = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, "PYTHONPATH": path})
    assert f"graph break at {program}:9" in told.stderr
    assert "torch/_dynamo" not in told.stderr


@pytest.mark.campaign
def test_a_wrong_one_exits_with_1_and_json_names_the_region(program, capsys):
    with wrong("aten.gelu_backward", 1.001):
        assert run(f"{program}:make", "--preset", "aot_eager", "--json") == 1
    verdict = json.loads(capsys.readouterr().out)
    assert verdict["passes"] is False
    assert verdict["blamed"]["regions"][0]["path"] == "model.blocks.1.act"


@pytest.mark.parametrize("arguments", [["--preset", "none"], ["--steps", "0"], ["--reference", "half"]])
def test_wrong_usage_exits_with_2(program, capsys, arguments):
    assert run(f"{program}:make", *arguments) == 2
    assert "expected" in capsys.readouterr().err


def test_a_function_that_gives_no_workload_exits_with_2(program, capsys):
    assert run(f"{program}:nothing") == 2
    assert "expected a hotloop.Workload" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("raises", "ValueError: no data today"),
        ("exits", "SystemExit: 0"),  # whatever code the program ends with, it has not passed
        ("restless", "hotloop: the step does not repeat itself"),
    ],
)
def test_a_program_that_cannot_be_judged_exits_with_3(program, capsys, function, said):
    assert run(f"{program}:{function}", "--preset", "aot_eager") == 3
    told = capsys.readouterr()
    assert said in told.err
    assert not told.out

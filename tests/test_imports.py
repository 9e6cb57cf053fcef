"""What importing costs, counted in modules, and what the public names are."""

import json
import subprocess
import sys

import pytest

import hotloop


def modules_after(code):
    program = f"{code}\nimport json, sys; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=900)
    return set(json.loads(done.stdout.strip().splitlines()[-1]))


@pytest.fixture(scope="module")
def torch_alone():
    return modules_after("import torch")


@pytest.mark.campaign
@pytest.mark.parametrize("use", ["import hotloop", "import hotloop; hotloop.compile; hotloop.status; hotloop.watch"])
def test_importing_costs_at_most_a_fifth_of_torch(torch_alone, use):
    both = modules_after(f"import torch; {use}")
    assert len(both) <= 1.2 * len(torch_alone)
    assert not {"torch._dynamo", "torch._inductor"} & (both - torch_alone)


def test_importing_hotloop_alone_brings_no_torch():
    assert "torch" not in modules_after("import hotloop; hotloop.presets.get('triton'); hotloop.events; hotloop.errors")


@pytest.mark.parametrize("command", [["presets"], ["presets", "--json"], ["presets", "--options"]])
def test_the_presets_command_brings_no_torch(command):
    found = modules_after(
        f"import sys; sys.argv = ['hotloop', *{command!r}]\nfrom hotloop.cli import main\n"
        "try: main()\nexcept SystemExit as done: assert not done.code"
    )
    assert "torch" not in found


def test_a_search_that_trains_nothing_in_its_own_process_brings_no_torch():
    found = modules_after(
        "from pathlib import Path; from hotloop.train.search import command, trial\n"
        "trial.drop_checkpoints(Path('nowhere'))"
    )
    assert "torch" not in found


def test_every_public_name_is_there_and_listed():
    assert sorted(hotloop.__all__) == list(hotloop.__all__)
    for name in hotloop.__all__:
        assert getattr(hotloop, name) is not None
        assert name in dir(hotloop)
    with pytest.raises(AttributeError, match="nonesuch"):
        hotloop.nonesuch


@pytest.mark.campaign
def test_every_module_of_the_package_imports():
    program = (
        "import importlib, pkgutil, warnings, hotloop\n"
        "warnings.simplefilter('ignore')\n"
        "for found in pkgutil.walk_packages(hotloop.__path__, 'hotloop.'):\n"
        "    if not found.name.endswith('__main__'): importlib.import_module(found.name)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, done.stderr

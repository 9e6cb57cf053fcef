"""The machine: its facts, gathered by children that may crash or hang, and the findings about saved facts."""

import dataclasses
import json
import os
from pathlib import Path

import pytest

import hotloop
from hotloop.presets import NAMES
from hotloop.prove.doctor import gathering
from hotloop.prove.doctor.findings import LEVELS, sentence
from hotloop.prove.doctor.gathering import Folder, Gpu, Machine, TriedCompile, ask
from hotloop.prove.doctor.judging import judge

SOURCE = str(Path(hotloop.__file__).parents[1])
GB = 2**30
CACHE = Folder(path="/home/ana/.cache/inductor", free_bytes=100 * GB)
H100 = Gpu(name="H100", capability=(9, 0), memory_bytes=80 * GB, free_bytes=79 * GB)
GOOD = Machine(
    cpus=16, memory_bytes=128 * GB, available_bytes=120 * GB, driver="580.82", compiler="/usr/bin/g++", triton="3.6.0",
    torch="2.13.0+cu130", cuda="13.0", threads=16, missing={"cuda": {}, "cpu": {}}, names=34, gpus=(H100,), cache=CACHE,
    trials=(TriedCompile(device="cpu", seconds=14.0), TriedCompile(device="cuda", seconds=9.0)),
)  # fmt: skip
NO_GPU = dataclasses.replace(
    GOOD, torch="2.13.0+cpu", cuda=None, gpus=(), driver="", triton="",
    missing={"cpu": dict.fromkeys(("triton", "reduce-overhead", "max-autotune"), "no GPU that torch can use")},
)  # fmt: skip
WITHOUT_TRITON = dict.fromkeys((name for name in NAMES if name not in ("none", "aot_eager")), "Triton is not installed")


def serious(found):
    return [(one.level, one.topic) for one in judge(found) if one.level in LEVELS[:2]]


def test_a_good_machine_has_nothing_serious_and_nothing_known_is_no_crash():
    assert serious(GOOD) == serious(NO_GPU) == []
    assert sentence(judge(GOOD)) == "This machine is fit to compile: no problem, no warning."
    assert json.loads(json.dumps(GOOD.to_dict()))["gpus"][0]["name"] == "H100"
    assert judge(Machine())


def test_the_worst_comes_first_and_its_remedy_is_in_the_sentence():
    found = judge(dataclasses.replace(GOOD, threads=64, triton=""))
    assert [one.level for one in found] == sorted((one.level for one in found), key=LEVELS.index)
    assert sentence(found).startswith("1 problem and 1 warning; first: pip install triton")


@pytest.mark.parametrize(
    ("fields", "topic", "level", "said"),
    [
        ({"torch": "2.10.1"}, "torch", "problem", "older than hotloop supports (2.11 to 2.15)"),
        ({"torch": "2.99.0a0+git1"}, "torch", "warning", "newer than hotloop was tested on"),
        ({"torch": "2.11.0+cu130"}, "torch", "warning", "unfrozen"),
        ({"torch": "nonsense"}, "torch", "problem", "expected one that starts like"),
        ({"torch_error": "ImportError: libcudart.so.13"}, "torch", "problem", "libcudart"),
        ({"packages": {"torchvision 0.28.0": ""}}, "packages", "ok", "torchvision 0.28.0 imports"),
        ({"packages": {"torchvision 0.2": "nms does not exist"}}, "packages", "problem", "--upgrade torchvision for"),
        ({"gpus": (dataclasses.replace(H100, capability=(6, 1)),)}, "gpu", "problem", "Triton, which needs 7.0"),
        ({"gpus": (dataclasses.replace(H100, free_bytes=2 * GB),)}, "memory", "warning", "2 GiB of 80 GiB"),
        ({"available_bytes": GB}, "memory", "warning", "1 GiB of 128 GiB"),
        ({"triton": "", "missing": {"cuda": WITHOUT_TRITON}}, "presets", "warning", "Triton is not installed"),
        ({"compiler": ""}, "compiler", "problem", "apt install g++"),
        ({"compiler": "", "system": "Darwin"}, "compiler", "problem", "xcode-select --install"),
        ({"compiler": "", "system": "Windows"}, "compiler", "problem", "Visual Studio"),
        ({"compiler": "", "environment": {"CXX": "clang++-99"}}, "compiler", "problem", "CXX is 'clang++-99', which is not"),
        ({"trials": (TriedCompile(device="cuda", reason="gcc", hint="install dev"),)}, "compile", "problem", "gcc -> install dev"),
        ({"lost": {"torch._x:y": "no status while compiling"}}, "capabilities", "warning", "no status while compiling"),
        ({"cache": dataclasses.replace(CACHE, writable=False)}, "cache", "problem", "cannot be written"),
        ({"cache": dataclasses.replace(CACHE, executable=False)}, "cache", "problem", "noexec"),
        ({"cache": dataclasses.replace(CACHE, free_bytes=10)}, "cache", "warning", "make room"),
        ({"cpus": 4}, "threads", "warning", "OMP_NUM_THREADS=4"),
        ({"environment": {"HOTLOOP_DISABLE": "1"}}, "environment", "warning", "HOTLOOP_DISABLE is set"),
        ({"environment": {"TORCHDYNAMO_SUPPRESS_ERRORS": "yes"}}, "environment", "warning", "without a word"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_machine(fields, topic, level, said):
    (found,) = [one for one in judge(dataclasses.replace(GOOD, **fields)) if (one.topic, one.level) == (topic, level)]
    assert said in f"{found.what} -> {found.remedy}"
    assert ((level, topic) in serious(dataclasses.replace(GOOD, **fields))) == (level != "ok")


@pytest.mark.parametrize(
    ("fields", "level", "said"),
    [
        ({}, "note", "rarely pays"),
        ({"driver": "580.82"}, "problem", "built without CUDA"),
        ({"driver": "580.82", "environment": {"CUDA_VISIBLE_DEVICES": ""}}, "warning", "hidden"),
        ({"driver": "580.82", "cuda": "13.0"}, "problem", "--gpus all"),
        ({"cuda": "13.0", "gpu_error": "CUDA driver version is insufficient"}, "problem", "insufficient"),
        ({"system": "Darwin", "mps": True}, "note", "Apple GPU"),
    ],
)
def test_why_there_is_no_gpu(fields, level, said):
    (found,) = [one for one in judge(dataclasses.replace(NO_GPU, **fields)) if one.topic == "gpu"]
    assert (found.level, said in found.what + found.remedy) == (level, True)


def test_what_is_switched_off_in_the_environment_is_no_finding():
    assert serious(dataclasses.replace(GOOD, environment={"HOTLOOP_DISABLE": "0", "TORCHDYNAMO_DISABLE": ""})) == []


# -- how the facts are gathered ----------------------------------------------------------------------------------------


@pytest.mark.campaign
def test_this_machine_is_known():
    import torch

    machine = gathering.gather(trials=False)
    assert (machine.torch, machine.torch_error) == (torch.__version__, "")
    assert machine.threads == torch.get_num_threads()
    assert "cpu" in machine.missing
    version = tuple(map(int, torch.__version__.split(".")[:2]))
    lacking = set() if version >= (2, 13) else {"torch._C:_override_stale_capture_stream", "torch:_foreach_clone"}
    assert set(machine.lost) == lacking
    assert machine.cache.free_bytes > 0
    assert 0 < machine.available_bytes <= machine.memory_bytes
    assert machine.trials == ()


def test_a_torch_that_breaks_at_import_is_a_finding(tmp_path, monkeypatch):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError('libcudart.so.13: cannot open')")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), SOURCE]))
    found = gathering.gather()
    assert found.torch_error == "ImportError: libcudart.so.13: cannot open"
    assert found.trials == ()
    assert "libcudart" in judge(found)[0].what


@pytest.mark.campaign
def test_without_a_compiler_no_trial_is_made_and_the_presets_know(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    found = gathering.gather()
    assert (found.compiler, found.trials) == ("", ())
    assert "C++ compiler" in found.missing["cpu"]["default"]
    assert [one.topic for one in judge(found) if one.level == "problem"] == ["compiler"]


@pytest.mark.skipif(os.name == "nt", reason="signals of POSIX")
@pytest.mark.parametrize(
    ("program", "limit", "data", "error"),
    [
        ("import os; os.kill(os.getpid(), 11)", 300, {}, "the process crashed with signal SIGSEGV"),
        ("import time; time.sleep(600)", 0.5, {}, "no answer after 0 s"),
        ("print('hello'); print('{\"a\": 1}')", 300, {"a": 1}, ""),
        ("print('hello')", 300, {}, "it ended with exit code 0 and said nothing"),
        ("raise KeyError('x')", 300, {}, "KeyError: 'x'"),
    ],
)
def test_a_child_that_crashes_hangs_or_talks_is_an_answer(program, limit, data, error):
    assert ask(["-c", program], limit_s=limit) == (data, error)


@pytest.mark.campaign
@pytest.mark.inductor
def test_three_lines_are_compiled_in_an_empty_cache_of_their_own(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")  # judged on its own: a trial does without
    trial = gathering.try_compile("cpu")
    assert (trial.device, trial.reason) == ("cpu", "")
    assert trial.seconds > 0
    assert not any(tmp_path.iterdir())


@pytest.mark.campaign
def test_a_trial_that_fails_says_why(monkeypatch):
    monkeypatch.setenv("CXX", "a-compiler-that-is-not-there")
    trial = gathering.try_compile("cpu")
    assert "InvalidCxxCompiler" in trial.reason
    assert "C++ compiler" in trial.hint


def test_the_cache_is_where_torch_puts_it(monkeypatch, tmp_path):
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    assert str(gathering.cache_path()) == default_cache_dir()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "mine"))
    assert gathering.cache_path() == tmp_path / "mine"
    found = gathering.folder(gathering.cache_path())
    assert found.writable
    assert found.free_bytes > 0
    assert not (tmp_path / "mine").exists()

"""Findings about machines, from their saved facts."""

import dataclasses
import json

import pytest

from hotloop.presets import NAMES
from hotloop.prove.doctor.facts import Folder, Gpu, Machine, Package, Torch, TriedCompile
from hotloop.prove.doctor.findings import LEVELS, sentence
from hotloop.prove.doctor.judging import judge

GB = 2**30
CACHE = Folder(path="/home/ana/.cache/inductor", owner="ana", free_bytes=100 * GB, chosen=True)
TORCH = Torch(
    version="2.13.0+cu130", cuda="13.0", architectures=("sm_75", "sm_80", "sm_90", "sm_100", "compute_100"), threads=16,
    missing={"cuda": {}, "cpu": {}}, names=34,
)  # fmt: skip
H100 = Gpu(name="H100", capability=(9, 0), memory_bytes=80 * GB, free_bytes=79 * GB, multiprocessors=132)
T4 = Gpu(name="T4", capability=(7, 5), memory_bytes=15 * GB, free_bytes=15 * GB, multiprocessors=40)
GOOD = Machine(
    cpus=16, memory_bytes=128 * GB, available_bytes=120 * GB, driver="580.82", driver_cuda=(13, 0), compiler="/usr/bin/g++",
    compiler_version="g++ 13.2", triton="3.6.0", torch=TORCH, gpus=(H100,), cache=CACHE,
    trials=(TriedCompile(device="cpu", seconds=14.0), TriedCompile(device="cuda", seconds=9.0)),
)  # fmt: skip


def machine(torch=None, **fields):
    known = dataclasses.replace(TORCH, **torch) if torch else TORCH
    return dataclasses.replace(GOOD, **{"torch": known, **fields})


def of(found, topic, level=None):
    return [one for one in judge(found) if one.topic == topic and (level is None or one.level == level)]


def only(found, topic, level):
    (one,) = of(found, topic, level)
    return f"{one.what} -> {one.remedy}"


def serious(found):
    return [(one.level, one.topic) for one in judge(found) if one.level in LEVELS[:2]]


def test_a_good_machine_has_nothing_serious():
    assert serious(GOOD) == []
    assert sentence(judge(GOOD)) == "This machine is fit to compile: no problem, no warning."
    assert "Hopper" in only(GOOD, "gpu", "ok")
    assert "float8" in only(GOOD, "gpu", "ok")


def test_the_worst_comes_first_and_its_remedy_is_in_the_sentence():
    found = judge(machine(driver_cuda=(12, 4), driver="550.54", triton=""))
    assert [one.level for one in found] == sorted((one.level for one in found), key=LEVELS.index)
    assert sentence(found).startswith("2 problems; first: update the driver to 580.65 or newer")


@pytest.mark.parametrize(
    ("driver", "built", "level", "said"),
    [
        ((12, 4), "13.0", "problem", "too old for torch's CUDA 13.0 -> update the driver to 580.65 or newer (CUDA 13.0), or install torch for CUDA 12"),
        ((12, 4), "12.8", "note", "older than torch's CUDA 12.8"),
        ((13, 0), "12.8", "ok", "fits torch's CUDA 12.8"),
        ((11, 8), "12.6", "problem", "525.60"),
    ],
)  # fmt: skip
def test_the_driver_is_held_against_the_cuda_that_torch_was_built_with(driver, built, level, said):
    assert said in only(machine(driver_cuda=driver, torch={"cuda": built}), "driver", level)


def test_a_t4_can_do_less_and_is_told_what():
    found = machine(gpus=(T4,))
    assert "Turing" in only(found, "gpu", "ok")
    assert "GradScaler" in only(found, "gpu", "warning")
    assert "40 multiprocessors" in only(found, "gpu", "note")


@pytest.mark.parametrize(
    ("capability", "architectures", "levels"),
    [
        ((6, 1), ("sm_61",), ["problem"]),  # Triton needs 7.0
        ((6, 1), ("sm_80",), ["problem", "problem"]),  # and torch has no kernels for it either
        ((7, 0), ("sm_75", "sm_80"), ["problem", "warning", "ok"]),  # CUDA 13 has left Volta behind
        ((8, 6), ("sm_80",), ["ok"]),  # kernels of a lower minor run
        ((12, 0), ("sm_90", "compute_90"), ["ok"]),  # built at its first use
        ((12, 0), ("sm_90",), ["problem", "ok"]),
        ((9, 0), ("sm_90a",), ["ok"]),
        ((9, 0), ("something",), ["ok"]),
    ],
)
def test_generations_and_what_torch_was_built_for(capability, architectures, levels):
    gpu = dataclasses.replace(H100, capability=capability)
    assert [one.level for one in of(machine(gpus=(gpu,), torch={"architectures": architectures}), "gpu")] == levels


def test_memory_that_is_nearly_full_names_what_needs_less():
    full = dataclasses.replace(H100, free_bytes=2 * GB)
    said = only(machine(gpus=(full,)), "memory", "warning")
    for remedy in ("2 GiB of 80 GiB", "smaller batch", "aot_eager", "fewer components"):
        assert remedy in said
    said = only(machine(available_bytes=GB), "memory", "warning")
    for remedy in ("1 GiB of 128 GiB", "smaller batch", "aot_eager", "TORCHINDUCTOR_COMPILE_THREADS"):
        assert remedy in said
    assert "32 compile workers" in only(machine(cpus=64, available_bytes=12 * GB), "memory", "warning")
    few = {"TORCHINDUCTOR_COMPILE_THREADS": "4"}
    assert not of(machine(cpus=64, available_bytes=12 * GB, environment=few), "memory", "warning")
    assert not of(machine(available_bytes=None), "memory", "warning")


def no_gpu(**fields):
    lacking = dict.fromkeys(("triton", "reduce-overhead", "max-autotune"), "no GPU that torch can use")
    known = {"version": "2.13.0+cpu", "cuda": None, "missing": {"cpu": lacking}, "architectures": ()}
    return machine(**{"torch": known, "gpus": (), "driver": "", "driver_cuda": None, "triton": "", **fields})


def test_a_machine_without_a_gpu_is_no_problem_and_names_what_runs():
    assert serious(no_gpu()) == []
    assert "none, default, inductor, aot_eager" in only(no_gpu(), "presets", "ok")
    assert "triton, reduce-overhead, max-autotune (no GPU" in only(no_gpu(), "presets", "note")
    assert "rarely pays" in only(no_gpu(), "gpu", "note")


@pytest.mark.parametrize(
    ("fields", "level", "said"),
    [
        ({"driver": "580.82"}, "problem", "built without CUDA"),
        ({"driver": "580.82", "environment": {"CUDA_VISIBLE_DEVICES": ""}}, "warning", "hidden"),
        ({"driver": "580.82", "torch": {"cuda": "13.0"}}, "problem", "--gpus all"),
        ({"torch": {"cuda": "13.0", "gpu_error": "CUDA driver version is insufficient"}}, "problem", "insufficient"),
        ({"system": "Darwin", "torch": {"cuda": None, "mps": True}}, "note", "Apple GPU"),
    ],
)
def test_why_there_is_no_gpu(fields, level, said):
    assert said in only(no_gpu(**fields), "gpu", level)


def test_amd_is_said_to_be_untested():
    gpu = Gpu(name="MI300X", capability=(9, 4), architecture="gfx942", memory_bytes=GB, free_bytes=GB)
    found = machine(gpus=(gpu,), torch={"cuda": None, "hip": "6.4", "architectures": ("gfx942",)}, driver_cuda=None)
    assert "gfx942" in only(found, "gpu", "note")
    assert "hotloop verify" in only(found, "gpu", "note")
    assert serious(found) == []


def test_gpus_of_several_kinds():
    assert "H100, T4" in of(machine(gpus=(H100, T4)), "gpu", "note")[-1].what


@pytest.mark.parametrize(
    ("version", "level", "said"),
    [
        ("2.10.1", "problem", "older than hotloop supports (2.11 to 2.15)"),
        ("2.99.0a0+git1", "warning", "newer than hotloop was tested on"),
        ("2.11.0+cu130", "warning", "unfrozen"),
        ("nonsense", "problem", "expected one that starts like"),
    ],
)
def test_versions_of_torch_and_their_traps(version, level, said):
    assert said in only(machine(torch={"version": version}), "torch", level)


def test_settings_of_a_thread_are_a_note_since_2_12_only():
    for version, many in (("2.11.0", 0), ("2.12.0", 1), ("2.13.1", 1)):
        assert len(of(machine(torch={"version": version}), "torch", "note")) == many


def test_a_torch_that_does_not_import_is_the_one_problem():
    found = no_gpu(torch={"error": "ImportError: libcudart.so.13: cannot open shared object file", "missing": {}})
    assert serious(found) == [("problem", "torch")]
    assert "libcudart" in only(found, "torch", "problem")


@pytest.mark.parametrize(
    ("package", "bad"),
    [
        (Package(name="torchvision", version="0.28.0", needs="==2.13.0"), False),
        (Package(name="torchvision", version="0.28.0", needs="==2.13"), False),
        (Package(name="torchvision", version="0.26.0", needs="==2.11.0"), True),
        (Package(name="torchvision", version="0.25.0", needs="==2.10.0"), True),
        (Package(name="torchvision", version="0.28.0", needs=">=2.10"), False),
        (Package(name="torchvision", version="0.28.0", needs="==2.13.0", error="operator torchvision::nms does not exist"), True),
    ],
)  # fmt: skip
def test_a_torchvision_that_does_not_match(package, bad):
    found = of(machine(packages=(package,)), "packages")
    assert [one.level for one in found] == ["problem" if bad else "ok"]
    assert ("transformers and lightning fail with it" in found[0].what) == bad


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"system": "Linux"}, "apt install g++"),
        ({"system": "Darwin"}, "xcode-select --install"),
        ({"system": "Windows"}, "Visual Studio"),
        ({"environment": {"CXX": "clang++-99"}}, "CXX is 'clang++-99', which is not there"),
    ],
)
def test_a_missing_compiler(fields, said):
    assert said in only(machine(compiler="", **fields), "compiler", "problem")


def test_a_trial_that_failed_has_its_remedy():
    bad = TriedCompile(device="cuda", seconds=3.0, reason="CalledProcessError: gcc", hint="install python3-dev")
    assert only(machine(trials=(bad,)), "compile", "problem").endswith("gcc -> install python3-dev")


def test_what_a_preset_lacks_on_a_gpu_is_a_warning():
    lacking = dict.fromkeys((name for name in NAMES if name not in ("none", "aot_eager")), "Triton is not installed")
    found = machine(triton="", torch={"missing": {"cuda": lacking, "cpu": {}}})
    assert "Triton is not installed" in only(found, "presets", "warning")
    assert "pip install triton" in only(found, "triton", "problem")


@pytest.mark.parametrize(
    ("changes", "level", "said"),
    [
        ({"mine": False, "owner": "eve"}, "warning", "belongs to eve: a cache is code"),
        ({"open_to": "everybody"}, "warning", "can be written by everybody"),
        ({"writable": False}, "problem", "cannot be written"),
        ({"executable": False}, "problem", "noexec"),
        ({"free_bytes": 10}, "warning", "make room"),
        ({"exists": False, "chosen": False, "owner": ""}, "note", "all users share"),
        ({}, "ok", "yours"),
    ],
)
def test_a_cache_folder(changes, level, said):
    assert said in only(machine(cache=dataclasses.replace(CACHE, **changes)), "cache", level)


@pytest.mark.parametrize(
    "name",
    ["HOTLOOP_DISABLE", "TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE", "TORCHDYNAMO_SUPPRESS_ERRORS", "CUDA_LAUNCH_BLOCKING",
     "TRITON_INTERPRET", "TORCHINDUCTOR_FORCE_DISABLE_CACHES"],
)  # fmt: skip
def test_what_silently_disables_things_is_a_warning_unless_it_is_off(name):
    assert f"{name} is set" in only(machine(environment={name: "1"}), "environment", "warning")
    assert not of(machine(environment={name: "0"}), "environment")


def test_other_settings_of_the_environment():
    assert "every start compiles anew" in only(
        machine(environment={"TORCHINDUCTOR_FX_GRAPH_CACHE": "0"}), "environment", "warning"
    )
    assert not of(machine(environment={"TORCHINDUCTOR_FX_GRAPH_CACHE": "1"}), "environment")
    assert "TORCHDYNAMO_VERBOSE=1" in only(machine(environment={"TORCHDYNAMO_VERBOSE": "1"}), "environment", "note")


@pytest.mark.parametrize(
    ("threads", "cpus", "gpus", "level"),
    [(16, 16, (H100,), "ok"), (64, 4, (H100,), "warning"), (1, 8, (), "note"), (1, 8, (H100,), "ok")],
)
def test_threads(threads, cpus, gpus, level):
    assert [one.level for one in of(machine(cpus=cpus, gpus=gpus, torch={"threads": threads}), "threads")] == [level]


def test_a_name_that_torch_has_lost_says_what_is_lost():
    lost = {"torch._dynamo.callback:callback_handler": "no status while compiling"}
    assert "no status while compiling" in only(machine(torch={"capabilities": lost}), "capabilities", "warning")


def test_facts_travel_as_json():
    found = machine(packages=(Package(name="torchvision", version="1"),), driver_cuda=(13, 0))
    assert Machine.from_dict(json.loads(json.dumps(found.to_dict()))) == found
    with pytest.raises(TypeError):
        Machine.from_dict({"unheard": 1})


def test_nothing_known_is_no_crash():
    assert judge(Machine())

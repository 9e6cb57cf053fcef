"""Judges a machine from its facts: pure, so that it is tested from the facts of machines that are elsewhere."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from hotloop._torch.versions import NEWEST, OLDEST, parse
from hotloop.errors import UnsupportedTorchError
from hotloop.presets import NAMES
from hotloop.prove.doctor import judging_gpu
from hotloop.prove.doctor.findings import LEVELS, Finding, size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hotloop.prove.doctor.facts import Folder, Machine, Package

_ON = ("1", "true", "yes", "on")
_OFF = ("", "0", "false", "no", "off")
_LITTLE = 2**30
_LITTLE_SHARE = 0.05
_WORKER_BYTES = 300 * 2**20
"""What one of Inductor's compile workers holds, as they came out here with torch 2.13."""
_UNGUARDED_REQUIRES_GRAD = (2, 11)
_SETTINGS_OF_A_THREAD = (2, 12)

_SWITCHES: dict[str, tuple[Finding, tuple[str, ...]]] = {
    name: (Finding(level, "environment", f"{name} is set: {what}", remedy), unless)  # type: ignore[arg-type]
    for name, level, what, remedy, unless in (
        ("HOTLOOP_DISABLE", "warning", "hotloop compiles nothing", "unset HOTLOOP_DISABLE", _OFF),
        ("TORCH_COMPILE_DISABLE", "warning", "torch.compile does nothing", "unset TORCH_COMPILE_DISABLE", _OFF),
        ("TORCHDYNAMO_DISABLE", "warning", "torch.compile does nothing", "unset TORCHDYNAMO_DISABLE", _OFF),
        (
            "TORCHDYNAMO_SUPPRESS_ERRORS",
            "warning",
            "what fails to compile runs eager without a word",
            "unset it; hotloop steps down by itself, and says so",
            _OFF,
        ),
        (
            "TORCHINDUCTOR_FORCE_DISABLE_CACHES",
            "warning",
            "every start compiles anew",
            "unset TORCHINDUCTOR_FORCE_DISABLE_CACHES",
            _OFF,
        ),
        (
            "TRITON_INTERPRET",
            "warning",
            "kernels run in Triton's interpreter, a thousand times slower",
            "unset TRITON_INTERPRET",
            _OFF,
        ),
        (
            "CUDA_LAUNCH_BLOCKING",
            "warning",
            "Python waits for every kernel, and no CUDA graph can be captured",
            "unset CUDA_LAUNCH_BLOCKING once you have found the bug",
            _OFF,
        ),
        (
            "PYTORCH_NO_CUDA_MEMORY_CACHING",
            "warning",
            "each allocation asks the driver, and no CUDA graph can be captured",
            "unset PYTORCH_NO_CUDA_MEMORY_CACHING",
            _OFF,
        ),
        ("TORCH_LOGS", "note", "torch logs while it compiles, which takes time", "unset TORCH_LOGS", ("",)),
    )
}
_MUST_BE_ON = ("TORCHINDUCTOR_FX_GRAPH_CACHE", "TORCHINDUCTOR_AUTOGRAD_CACHE")


def judge(machine: Machine) -> list[Finding]:
    """Judge a machine from its facts, the most serious findings first."""
    parts: list[Callable[[Machine], Iterator[Finding]]] = [
        _torch,
        _packages,
        judging_gpu.gpus,
        judging_gpu.driver,
        _compiler,
        judging_gpu.triton,
        _trials,
        _presets,
        _capabilities,
        _cache,
        _memory,
        _threads,
        _environment,
    ]
    found = [finding for part in parts for finding in part(machine)]
    return sorted(found, key=lambda one: LEVELS.index(one.level))


def _torch(machine: Machine) -> Iterator[Finding]:
    known = machine.torch
    if known.error:
        yield Finding(
            "problem",
            "torch",
            f"torch does not import: {known.error}",
            f"install it anew: pip install --force-reinstall 'torch>={OLDEST[0]}.{OLDEST[1]}'",
        )
        return
    try:
        version = parse(known.version)
    except UnsupportedTorchError as error:
        yield Finding("problem", "torch", str(error), "install a release of torch")
        return
    tested = f"{OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"
    if version < OLDEST:
        remedy = f"pip install 'torch>={OLDEST[0]}.{OLDEST[1]}'"
        yield Finding("problem", "torch", f"torch {known.version} is older than hotloop supports ({tested})", remedy)
    elif version > NEWEST:
        what = f"torch {known.version} is newer than hotloop was tested on ({tested})"
        yield Finding("warning", "torch", what, "update hotloop; what this torch lacks runs eager and says so")
    else:
        yield Finding("ok", "torch", f"torch {known.version}, CUDA {known.cuda or 'none'}; tested: {tested}")
    yield from _traps(version)


def _traps(version: tuple[int, int]) -> Iterator[Finding]:
    if version == _UNGUARDED_REQUIRES_GRAD:
        yield Finding(
            "warning",
            "torch",
            "torch 2.11 does not notice a parameter that is unfrozen after the compile: its gradient stays None",
            "hotloop guards what it compiles; with torch.compile of your own set "
            "torch._dynamo.config.skip_tensor_guards_with_matching_dict_tags = False, or update torch",
        )
    if version >= _SETTINGS_OF_A_THREAD:
        yield Finding(
            "note",
            "torch",
            "torch._dynamo.config belongs to a thread since torch 2.12: what one thread sets, another does not see",
            "set it in the thread that compiles, or through TORCHDYNAMO_* in the environment",
        )


def _packages(machine: Machine) -> Iterator[Finding]:
    for package in machine.packages:
        if trouble := _package_trouble(package, machine.torch.version):
            others = " (transformers and lightning fail with it)" if package.name == "torchvision" else ""
            remedy = f"pip install --upgrade {package.name} for this torch, or pip uninstall {package.name}"
            yield Finding("problem", "packages", f"{package.name} {package.version} {trouble}{others}", remedy)
        else:
            yield Finding("ok", "packages", f"{package.name} {package.version} imports, and fits torch")


def _package_trouble(package: Package, torch: str) -> str:
    if package.error:
        return f"does not import: {package.error}"
    wanted = re.fullmatch(r"==\s*([\d.]+)(?:\+\S*)?", package.needs)
    if wanted and torch and _release(wanted[1]) != _release(torch):
        return f"was built for torch {wanted[1]}, and this is {torch}"
    return ""


def _release(version: str) -> tuple[int, ...]:
    """Give the numbers of a version without what is built in: 2.13.0+cpu and 2.13 are the same release."""
    numbers = [int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3]]
    return tuple(numbers + [0] * (3 - len(numbers)))


def _compiler(machine: Machine) -> Iterator[Finding]:
    if machine.compiler:
        yield Finding("ok", "compiler", f"C++ compiler {machine.compiler_version or machine.compiler}")
        return
    install = {
        "Darwin": "xcode-select --install",
        "Windows": "install the C++ build tools of Visual Studio, and start from their prompt",
    }
    what = "no C++ compiler: Inductor needs one on every device, so only aot_eager and none can run"
    if chosen := machine.environment.get("CXX"):
        what = f"CXX is {chosen!r}, which is not there: " + what.partition(": ")[2]
    remedy = install.get(machine.system, "install g++ (apt install g++, or conda install gxx), or set CXX")
    yield Finding("problem", "compiler", what, remedy)


def _trials(machine: Machine) -> Iterator[Finding]:
    for trial in machine.trials:
        where = "the CPU" if trial.device == "cpu" else "the GPU"
        if trial.reason:
            what = f"a compile of three lines on {where} failed: {trial.reason}"
            yield Finding("problem", "compile", what, trial.hint or "try preset aot_eager, and send us this line")
        else:
            what = f"three lines compiled on {where} in {trial.seconds:.0f} s, cold, and gave eager's result"
            yield Finding("ok", "compile", what)


def _presets(machine: Machine) -> Iterator[Finding]:
    for device, lacking in machine.torch.missing.items():
        runs = [name for name in NAMES if name not in lacking]
        where = "on the GPU" if device == "cuda" else "on the CPU"
        yield Finding("ok", "presets", f"{where} these can run: {', '.join(runs)}")
        for reason in dict.fromkeys(lacking.values()):
            names = ", ".join(name for name, each in lacking.items() if each == reason)
            expected = device == "cpu" and not machine.gpus and "GPU" in reason
            yield Finding(
                "note" if device == "cpu" and (expected or machine.gpus) else "warning",
                "presets",
                f"{where} these cannot run: {names} ({reason})",
                "none on this machine: use default or aot_eager" if expected else "",
            )


def _capabilities(machine: Machine) -> Iterator[Finding]:
    lost, known = machine.torch.capabilities, machine.torch
    if known.names and not lost:
        yield Finding("ok", "capabilities", f"all {known.names} private names of torch that hotloop uses are there")
    for path, reason in lost.items():
        yield Finding("warning", "capabilities", f"{path} is not in this torch: {reason}", "use a torch that is tested")


def _cache(machine: Machine) -> Iterator[Finding]:
    if machine.cache is None:
        return
    cache = machine.cache
    free = f"{size(cache.free_bytes)} free"
    found = list(_cache_trust(cache, own=machine.system != "Windows"))
    if not cache.writable:
        found.append(
            Finding("problem", "cache", f"{cache.path} cannot be written: every start compiles anew", _ANOTHER)
        )
    if not cache.executable:
        found.append(
            Finding("problem", "cache", f"{cache.path} is mounted noexec: compiled kernels cannot be loaded", _ANOTHER)
        )
    if cache.free_bytes < _LITTLE:
        what = f"{cache.path} has {free}: compiles fail once it is full"
        found.append(Finding("warning", "cache", what, "make room, or set TORCHINDUCTOR_CACHE_DIR to another disk"))
    yield from found
    if not found:
        state = "yours, nobody else may write it" if cache.exists else "made by the first compile"
        yield Finding("ok", "cache", f"{cache.path}: {state}, {free}")


_ANOTHER = "set TORCHINDUCTOR_CACHE_DIR to a folder of your own"


def _cache_trust(cache: Folder, *, own: bool) -> Iterator[Finding]:
    """A cache holds code that this user will run: whoever may write it may run code as this user."""
    if cache.exists and not cache.mine and own:
        what = f"{cache.path} belongs to {cache.owner or 'another user'}: a cache is code, which they can change"
        yield Finding("warning", "cache", what, _ANOTHER)
    elif cache.open_to:
        what = f"{cache.path} can be written by {cache.open_to}: a cache is code, which they can change"
        remedy = f"chmod go-w on it, or {_ANOTHER}" if cache.exists else _ANOTHER
        yield Finding("warning", "cache", what, remedy)
    elif not cache.chosen and own and not cache.exists:
        what = f"{cache.path} is made in a folder that all users share, and is lost where that is emptied at a restart"
        yield Finding("note", "cache", what, _ANOTHER)


def _memory(machine: Machine) -> Iterator[Finding]:
    free, total = machine.available_bytes, machine.memory_bytes
    if free is None or total is None:
        return
    if free < max(2 * _LITTLE, _LITTLE_SHARE * total):
        yield Finding(
            "warning",
            "memory",
            f"{size(free)} of {size(total)} of host memory are free: a compile takes gigabytes, and may be killed",
            "a smaller batch, preset aot_eager, fewer components, or TORCHINDUCTOR_COMPILE_THREADS=1",
        )
        return
    workers = _number(machine.environment.get("TORCHINDUCTOR_COMPILE_THREADS")) or min(32, machine.cpus)
    if workers * _WORKER_BYTES > free / 2:
        what = f"{workers} compile workers take some {size(workers * _WORKER_BYTES)} of the {size(free)} that are free"
        yield Finding("warning", "memory", what, "set TORCHINDUCTOR_COMPILE_THREADS to a few")
    else:
        yield Finding("ok", "memory", f"{size(free)} of {size(total)} of host memory are free")


def _threads(machine: Machine) -> Iterator[Finding]:
    threads, cpus = machine.torch.threads, machine.cpus
    if not threads:
        return
    if threads > cpus:
        what = f"torch runs {threads} threads on {cpus} usable CPUs, which wait for each other"
        yield Finding("warning", "threads", what, f"set OMP_NUM_THREADS={cpus}")
    elif threads == 1 and cpus > 1 and not machine.gpus:
        what = f"torch runs 1 thread on {cpus} usable CPUs"
        yield Finding("note", "threads", what, "unset OMP_NUM_THREADS, unless many processes share the machine")
    else:
        yield Finding("ok", "threads", f"torch runs {threads} threads on {cpus} usable CPUs")


def _environment(machine: Machine) -> Iterator[Finding]:
    given = machine.environment
    for name, (finding, unless) in _SWITCHES.items():
        if name in given and given[name].strip().lower() not in unless:
            yield finding
    for name in _MUST_BE_ON:
        if name in given and given[name].strip().lower() not in _ON:
            yield Finding("warning", "environment", f"{name}={given[name]}: every start compiles anew", f"unset {name}")
    others = [
        f"{name}={value}" for name, value in given.items() if name.startswith("TORCHDYNAMO_") and name not in _SWITCHES
    ]
    if others:
        what = f"these change what dynamo does: {', '.join(others)}"
        yield Finding("note", "environment", what, "unset what you do not need")


def _number(text: str | None) -> int:
    return int(text) if text and text.strip().isdigit() else 0

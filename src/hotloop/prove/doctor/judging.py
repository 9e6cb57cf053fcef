"""Judges a machine from its facts. The functions are pure, so that tests give them the facts of other machines."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from hotloop._torch.versions import NEWEST, OLDEST, TESTED, parse
from hotloop.errors import UnsupportedTorchError
from hotloop.presets import NAMES
from hotloop.prove.doctor.findings import LEVELS, Finding
from hotloop.prove.doctor.judging_gpu import GpuJudge
from hotloop.report.text import size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hotloop.prove.doctor.facts import Machine, Package

_OFF = ("", "0", "false", "no", "off")
_WORKER_BYTES = 300 * 2**20
"""Memory of one of Inductor's compile workers, as measured with torch 2.13."""
_OWN_FOLDER = "set TORCHINDUCTOR_CACHE_DIR to a folder of your own"
_SWITCHES = {
    "HOTLOOP_DISABLE": ("hotloop compiles nothing", "unset HOTLOOP_DISABLE"),
    "TORCH_COMPILE_DISABLE": ("torch.compile does nothing", "unset TORCH_COMPILE_DISABLE"),
    "TORCHDYNAMO_DISABLE": ("torch.compile does nothing", "unset TORCHDYNAMO_DISABLE"),
    "TORCHDYNAMO_SUPPRESS_ERRORS": (
        "code that fails to compile runs eager without a word",
        "unset it; hotloop steps down by itself, and says so",
    ),
    "TORCHINDUCTOR_FORCE_DISABLE_CACHES": ("every start compiles anew", "unset TORCHINDUCTOR_FORCE_DISABLE_CACHES"),
    "TRITON_INTERPRET": (
        "kernels run in Triton's interpreter, a thousand times slower",
        "unset TRITON_INTERPRET",
    ),
    "CUDA_LAUNCH_BLOCKING": (
        "Python waits for every kernel, and no CUDA graph can be captured",
        "unset CUDA_LAUNCH_BLOCKING once you have found the bug",
    ),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": (
        "each allocation asks the driver, and no CUDA graph can be captured",
        "unset PYTORCH_NO_CUDA_MEMORY_CACHING",
    ),
}
"""Environment variables that silently turn something off or slow it down: the effect of each, and the remedy."""


def judge(machine: Machine) -> list[Finding]:
    """Return the findings about a machine, the most serious first."""
    host, gpu = _HostJudge(machine), GpuJudge(machine)
    parts: list[Callable[[], Iterator[Finding]]] = [
        host.torch,
        host.packages,
        gpu.gpus,
        gpu.driver,
        host.compiler,
        gpu.triton,
        host.trials,
        host.presets,
        host.capabilities,
        host.cache,
        host.memory,
        host.threads,
        host.environment,
    ]
    findings = [finding for part in parts for finding in part()]
    return sorted(findings, key=lambda finding: LEVELS.index(finding.level))


class _HostJudge:
    """Judges everything but the GPUs: torch, packages, compiler, cache, memory, threads, environment."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def torch(self) -> Iterator[Finding]:
        """Judge whether torch imports, and whether its version is a tested one."""
        known = self._machine.torch
        if known.error:
            remedy = f"install it anew: pip install --force-reinstall 'torch>={OLDEST[0]}.{OLDEST[1]}'"
            yield Finding("problem", "torch", f"torch does not import: {known.error}", remedy)
            return
        try:
            version = parse(known.version)
        except UnsupportedTorchError as error:
            yield Finding("problem", "torch", str(error), "install a release of torch")
            return
        if version < OLDEST:
            what = f"torch {known.version} is older than hotloop supports ({TESTED})"
            yield Finding("problem", "torch", what, f"pip install 'torch>={OLDEST[0]}.{OLDEST[1]}'")
        elif version > NEWEST:
            what = f"torch {known.version} is newer than hotloop was tested on ({TESTED})"
            yield Finding("warning", "torch", what, "update hotloop; what this torch lacks runs eager and says so")
        else:
            yield Finding("ok", "torch", f"torch {known.version}, CUDA {known.cuda or 'none'}; tested: {TESTED}")
        if version == (2, 11):
            yield Finding(
                "warning",
                "torch",
                "torch 2.11 does not notice a parameter that is unfrozen after the compile: its gradient stays None",
                "hotloop guards what it compiles; with torch.compile of your own set "
                "torch._dynamo.config.skip_tensor_guards_with_matching_dict_tags = False, or update torch",
            )
        if version >= (2, 12):
            yield Finding(
                "note",
                "torch",
                "torch._dynamo.config belongs to a thread since torch 2.12: another thread does not see a change of it",
                "set it in the thread that compiles, or through TORCHDYNAMO_* in the environment",
            )

    def packages(self) -> Iterator[Finding]:
        """Judge the packages that are built against torch."""
        for package in self._machine.packages:
            if trouble := _package_trouble(package, self._machine.torch.version):
                others = " (transformers and lightning fail with it)" if package.name == "torchvision" else ""
                remedy = f"pip install --upgrade {package.name} for this torch, or pip uninstall {package.name}"
                yield Finding("problem", "packages", f"{package.name} {package.version} {trouble}{others}", remedy)
            else:
                yield Finding("ok", "packages", f"{package.name} {package.version} imports, and fits torch")

    def compiler(self) -> Iterator[Finding]:
        """Judge whether there is a C++ compiler."""
        machine = self._machine
        if machine.compiler:
            yield Finding("ok", "compiler", f"C++ compiler {machine.compiler_version or machine.compiler}")
            return
        install = {
            "Darwin": "xcode-select --install",
            "Windows": "install the C++ build tools of Visual Studio, and start from their prompt",
        }
        what = "Inductor needs a C++ compiler on every device, so only aot_eager and none can run"
        chosen = machine.environment.get("CXX")
        why = f"CXX is {chosen!r}, which is not there" if chosen else "no C++ compiler"
        remedy = install.get(machine.system, "install g++ (apt install g++, or conda install gxx), or set CXX")
        yield Finding("problem", "compiler", f"{why}: {what}", remedy)

    def trials(self) -> Iterator[Finding]:
        """Judge the compiles that were tried."""
        for trial in self._machine.trials:
            where = "the CPU" if trial.device == "cpu" else "the GPU"
            if trial.reason:
                what = f"a compile of three lines on {where} failed: {trial.reason}"
                yield Finding("problem", "compile", what, trial.hint or "try preset aot_eager, and send us this line")
            else:
                what = f"three lines compiled on {where} in {trial.seconds:.0f} s, cold, and gave eager's result"
                yield Finding("ok", "compile", what)

    def presets(self) -> Iterator[Finding]:
        """List the presets that can run on each device, and those that cannot with the reason."""
        gpus = self._machine.gpus
        for device, lacking in self._machine.torch.missing.items():
            runs = [name for name in NAMES if name not in lacking]
            where = "on the GPU" if device == "cuda" else "on the CPU"
            yield Finding("ok", "presets", f"{where} these can run: {', '.join(runs)}")
            for reason in dict.fromkeys(lacking.values()):
                names = ", ".join(name for name, why in lacking.items() if why == reason)
                expected = device == "cpu" and not gpus and "GPU" in reason
                yield Finding(
                    "note" if device == "cpu" and (expected or gpus) else "warning",
                    "presets",
                    f"{where} these cannot run: {names} ({reason})",
                    "none on this machine: use default or aot_eager" if expected else "",
                )

    def capabilities(self) -> Iterator[Finding]:
        """List the private names of torch that hotloop uses and this torch lacks."""
        known = self._machine.torch
        if known.names and not known.capabilities:
            yield Finding("ok", "capabilities", f"all {known.names} private names of torch that hotloop uses are there")
        for path, reason in known.capabilities.items():
            what = f"{path} is not in this torch: {reason}"
            yield Finding("warning", "capabilities", what, "use a torch that is tested")

    def cache(self) -> Iterator[Finding]:
        """Judge the folder of Inductor's cache: can it be used, is there room, who else may write into it."""
        cache = self._machine.cache
        if cache is None:
            return
        findings = list(self._cache_trust())
        if not cache.writable:
            what = f"{cache.path} cannot be written: every start compiles anew"
            findings.append(Finding("problem", "cache", what, _OWN_FOLDER))
        if not cache.executable:
            what = f"{cache.path} is mounted noexec: compiled kernels cannot be loaded"
            findings.append(Finding("problem", "cache", what, _OWN_FOLDER))
        if cache.free_bytes < 2**30:
            what = f"{cache.path} has {size(cache.free_bytes)} free: compiles fail once it is full"
            remedy = "make room, or set TORCHINDUCTOR_CACHE_DIR to another disk"
            findings.append(Finding("warning", "cache", what, remedy))
        if not findings:
            state = "yours, nobody else may write it" if cache.exists else "made by the first compile"
            findings = [Finding("ok", "cache", f"{cache.path}: {state}, {size(cache.free_bytes)} free")]
        yield from findings

    def _cache_trust(self) -> Iterator[Finding]:
        """Judge who may write into the cache: its code runs as this user, so each writer may run code as this user."""
        cache, owned = self._machine.cache, self._machine.system != "Windows"
        assert cache is not None
        if cache.exists and not cache.mine and owned:
            what = f"{cache.path} belongs to {cache.owner or 'another user'}: a cache is code, which they can change"
            yield Finding("warning", "cache", what, _OWN_FOLDER)
        elif cache.open_to:
            what = f"{cache.path} can be written by {cache.open_to}: a cache is code, which they can change"
            remedy = f"chmod go-w on it, or {_OWN_FOLDER}" if cache.exists else _OWN_FOLDER
            yield Finding("warning", "cache", what, remedy)
        elif not cache.chosen and owned and not cache.exists:
            what = f"{cache.path} is made in a folder that all users share, and is lost if a restart empties the folder"
            yield Finding("note", "cache", what, _OWN_FOLDER)

    def memory(self) -> Iterator[Finding]:
        """Judge whether compile workers fit into the free host memory."""
        machine = self._machine
        free, total = machine.available_bytes, machine.memory_bytes
        if free is None or total is None:
            return
        if free < max(2 * 2**30, 0.05 * total):
            what = (
                f"{size(free)} of {size(total)} of host memory are free: a compile takes gigabytes, and may be killed"
            )
            remedy = "a smaller batch, preset aot_eager, fewer components, or TORCHINDUCTOR_COMPILE_THREADS=1"
            yield Finding("warning", "memory", what, remedy)
            return
        chosen = machine.environment.get("TORCHINDUCTOR_COMPILE_THREADS", "").strip()
        workers = int(chosen) if chosen.isdigit() else 0
        workers = workers or min(32, machine.cpus)  # Inductor's own number
        if workers * _WORKER_BYTES > free / 2:
            needed = size(workers * _WORKER_BYTES)
            what = f"{workers} compile workers take some {needed} of the {size(free)} that are free"
            yield Finding("warning", "memory", what, "set TORCHINDUCTOR_COMPILE_THREADS to a few")
        else:
            yield Finding("ok", "memory", f"{size(free)} of {size(total)} of host memory are free")

    def threads(self) -> Iterator[Finding]:
        """Judge torch's number of threads against the usable CPUs."""
        threads, cpus = self._machine.torch.threads, self._machine.cpus
        if not threads:
            return
        if threads > cpus:
            what = f"torch runs {threads} threads on {cpus} usable CPUs, which wait for each other"
            yield Finding("warning", "threads", what, f"set OMP_NUM_THREADS={cpus}")
        elif threads == 1 and cpus > 1 and not self._machine.gpus:
            what = f"torch runs 1 thread on {cpus} usable CPUs"
            yield Finding("note", "threads", what, "unset OMP_NUM_THREADS, unless many processes share the machine")
        else:
            yield Finding("ok", "threads", f"torch runs {threads} threads on {cpus} usable CPUs")

    def environment(self) -> Iterator[Finding]:
        """Judge environment variables that turn compiles or caches off."""
        given = {name: value.strip().lower() for name, value in self._machine.environment.items()}
        for name, (effect, remedy) in _SWITCHES.items():
            if given.get(name, "") not in _OFF:
                yield Finding("warning", "environment", f"{name} is set: {effect}", remedy)
        if given.get("TORCH_LOGS"):
            what = "TORCH_LOGS is set: torch logs while it compiles, which takes time"
            yield Finding("note", "environment", what, "unset TORCH_LOGS")
        for name in ("TORCHINDUCTOR_FX_GRAPH_CACHE", "TORCHINDUCTOR_AUTOGRAD_CACHE"):
            if given.get(name, "on") not in ("1", "true", "yes", "on"):
                what = f"{name}={self._machine.environment[name]}: every start compiles anew"
                yield Finding("warning", "environment", what, f"unset {name}")
        others = [
            f"{name}={value}"
            for name, value in self._machine.environment.items()
            if name.startswith("TORCHDYNAMO_") and name not in _SWITCHES
        ]
        if others:
            what = f"these change what dynamo does: {', '.join(others)}"
            yield Finding("note", "environment", what, "unset what you do not need")


def _package_trouble(package: Package, torch: str) -> str:
    """Say why a package does not fit the version of torch; empty where it fits."""
    if package.error:
        return f"does not import: {package.error}"
    wanted = re.fullmatch(r"==\s*([\d.]+)(?:\+\S*)?", package.needs)
    if wanted and torch and _release(wanted[1]) != _release(torch):
        return f"was built for torch {wanted[1]}, and this is {torch}"
    return ""


def _release(version: str) -> tuple[int, ...]:
    """Return three numbers of a version without its build: 2.13.0+cpu and 2.13 are the same release."""
    numbers = [int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3]]
    return tuple(numbers + [0] * (3 - len(numbers)))

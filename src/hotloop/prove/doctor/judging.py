"""Judges a machine from its facts. The functions are pure, so that tests give them the facts of other machines."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hotloop._torch.versions import NEWEST, OLDEST, TESTED, parse
from hotloop.errors import UnsupportedTorchError
from hotloop.presets import NAMES
from hotloop.prove.doctor.findings import LEVELS, Finding
from hotloop.report.text import size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hotloop.prove.doctor.gathering import Machine

_OFF = ("", "0", "false", "no", "off")
_OWN_FOLDER = "set TORCHINDUCTOR_CACHE_DIR to a folder of your own"
_SWITCHES = {
    "HOTLOOP_DISABLE": "hotloop compiles nothing",
    "TORCH_COMPILE_DISABLE": "torch.compile does nothing",
    "TORCHDYNAMO_DISABLE": "torch.compile does nothing",
    "TORCHDYNAMO_SUPPRESS_ERRORS": "code that fails to compile runs eager without a word",
    "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "every start compiles anew",
    "TRITON_INTERPRET": "kernels run in Triton's interpreter, a thousand times slower",
    "CUDA_LAUNCH_BLOCKING": "Python waits for every kernel, and no CUDA graph can be captured",
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "each allocation asks the driver, and no CUDA graph can be captured",
}
"""Environment variables that silently turn something off or slow it down, and the effect of each."""
_COMPILERS = {
    "Darwin": "xcode-select --install",
    "Windows": "install the C++ build tools of Visual Studio, and start from their prompt",
}


def judge(machine: Machine) -> list[Finding]:
    """Return the findings about a machine, the most serious first."""
    parts: tuple[Callable[[Machine], Iterator[Finding]], ...] = (
        _torch,
        _packages,
        _gpus,
        _compiler,
        _triton,
        _trials,
        _presets,
        _capabilities,
        _cache,
        _memory,
        _threads,
        _environment,
    )
    findings = [finding for part in parts for finding in part(machine)]
    return sorted(findings, key=lambda finding: LEVELS.index(finding.level))


def _torch(machine: Machine) -> Iterator[Finding]:
    """Judge whether torch imports, and whether its version is a tested one."""
    oldest = f"'torch>={OLDEST[0]}.{OLDEST[1]}'"
    if machine.torch_error:
        what = f"torch does not import: {machine.torch_error}"
        yield Finding("problem", "torch", what, f"install it anew: pip install --force-reinstall {oldest}")
        return
    try:
        version = parse(machine.torch)
    except UnsupportedTorchError as error:
        yield Finding("problem", "torch", str(error), "install a release of torch")
        return
    if version < OLDEST:
        what = f"torch {machine.torch} is older than hotloop supports ({TESTED})"
        yield Finding("problem", "torch", what, f"pip install {oldest}")
    elif version > NEWEST:
        what = f"torch {machine.torch} is newer than hotloop was tested on ({TESTED})"
        yield Finding("warning", "torch", what, "update hotloop; what this torch lacks runs eager and says so")
    else:
        yield Finding("ok", "torch", f"torch {machine.torch}, CUDA {machine.cuda or 'none'}; tested: {TESTED}")
    if version == (2, 11):
        yield Finding(
            "warning",
            "torch",
            "torch 2.11 does not notice a parameter that is unfrozen after the compile: its gradient stays None",
            "hotloop guards what it compiles; with torch.compile of your own set "
            "torch._dynamo.config.skip_tensor_guards_with_matching_dict_tags = False, or update torch",
        )


def _packages(machine: Machine) -> Iterator[Finding]:
    """Judge the packages that are built against torch."""
    for package, error in machine.packages.items():
        if error:
            what = f"{package} does not import: {error} (transformers and lightning fail with it)"
            name = package.partition(" ")[0]
            remedy = f"pip install --upgrade {name} for this torch, or pip uninstall {name}"
            yield Finding("problem", "packages", what, remedy)
        else:
            yield Finding("ok", "packages", f"{package} imports")


def _gpus(machine: Machine) -> Iterator[Finding]:
    """Judge the GPUs that torch sees, or why torch sees none."""
    if not machine.gpus and not machine.torch_error:
        yield _without_gpu(machine)
    for gpu in machine.gpus:
        version = ".".join(map(str, gpu.capability))
        if gpu.capability < (7, 0):
            what = f"{gpu.name} (compute capability {version}) is too old for Triton, which needs 7.0, and for Inductor"
            remedy = "use preset aot_eager or none, or tier eager+graph: no Triton is needed"
            yield Finding("problem", "gpu", what, remedy)
        else:
            yield Finding("ok", "gpu", f"{gpu.name} (compute capability {version})")
        what = f"{gpu.name}: {size(gpu.free_bytes)} of {size(gpu.memory_bytes)} are free"
        if gpu.free_bytes < 0.1 * gpu.memory_bytes:
            remedy = (
                "end what else runs there (nvidia-smi); else a smaller batch, preset default or aot_eager (CUDA graphs "
                "hold a pool of their own), or fewer components"
            )
            yield Finding("warning", "memory", what, remedy)
        else:
            yield Finding("ok", "memory", what)


def _without_gpu(machine: Machine) -> Finding:
    hidden = machine.environment.get("CUDA_VISIBLE_DEVICES")
    if machine.driver and hidden is not None and hidden.strip() in ("", "-1"):
        return Finding("warning", "gpu", f"the GPU is hidden: CUDA_VISIBLE_DEVICES is {hidden!r}", "unset it")
    if machine.gpu_error:
        what = f"torch cannot use the GPU: {machine.gpu_error}"
        return Finding("problem", "gpu", what, "update the driver, or install a torch for the CUDA that it supports")
    if machine.driver and not machine.cuda:
        what = f"there is an NVIDIA driver ({machine.driver}), but torch {machine.torch} is built without CUDA"
        return Finding("problem", "gpu", what, "install a torch with CUDA: https://pytorch.org/get-started/locally")
    if machine.driver:
        what = f"there is an NVIDIA driver ({machine.driver}), but torch {machine.torch} sees no GPU"
        return Finding("problem", "gpu", what, "look at nvidia-smi; in a container, start it with --gpus all")
    if machine.mps:
        what = "Apple GPU (MPS): Inductor's support is new there, and hotloop captures no step on it"
        return Finding("note", "gpu", what, "stay eager, or try preset default and compare")
    what = "no GPU: on a CPU with few cores a compile rarely pays"
    return Finding("note", "gpu", what, "measure: hotloop doctor FILE.py:make")


def _compiler(machine: Machine) -> Iterator[Finding]:
    if machine.compiler:
        yield Finding("ok", "compiler", f"C++ compiler {machine.compiler}")
        return
    chosen = machine.environment.get("CXX")
    why = f"CXX is {chosen!r}, which is not there" if chosen else "no C++ compiler"
    what = f"{why}: Inductor needs a C++ compiler on every device, so only aot_eager and none can run"
    install = _COMPILERS.get(machine.system, "install g++ (apt install g++, or conda install gxx), or set CXX")
    yield Finding("problem", "compiler", what, install)


def _triton(machine: Machine) -> Iterator[Finding]:
    """Judge whether Triton is installed, which a GPU's kernels need."""
    if machine.triton:
        yield Finding("ok", "triton", f"Triton {machine.triton}")
    elif machine.gpus:
        name = "triton-windows" if machine.system == "Windows" else "triton"
        what = "Triton is not installed: on a GPU only aot_eager and none can run"
        yield Finding("problem", "triton", what, f"pip install {name}, the version that this torch asks for")


def _trials(machine: Machine) -> Iterator[Finding]:
    """Judge the compiles that were tried."""
    for trial in machine.trials:
        where = "the CPU" if trial.device == "cpu" else "the GPU"
        if trial.reason:
            what = f"a compile of three lines on {where} failed: {trial.reason}"
            yield Finding("problem", "compile", what, trial.hint or "try preset aot_eager, and send us this line")
        else:
            what = f"three lines compiled on {where} in {trial.seconds:.0f} s, cold, and gave eager's result"
            yield Finding("ok", "compile", what)


def _presets(machine: Machine) -> Iterator[Finding]:
    """List the presets that can run on each device, and those that cannot with the reason."""
    for device, lacking in machine.missing.items():
        where = "on the GPU" if device == "cuda" else "on the CPU"
        runs = ", ".join(name for name in NAMES if name not in lacking)
        yield Finding("ok", "presets", f"{where} these can run: {runs}")
        for reason in dict.fromkeys(lacking.values()):
            names = ", ".join(name for name, why in lacking.items() if why == reason)
            minor = device == "cpu" and (machine.gpus or "GPU" in reason)
            yield Finding("note" if minor else "warning", "presets", f"{where} these cannot run: {names} ({reason})")


def _capabilities(machine: Machine) -> Iterator[Finding]:
    """List the private names of torch that hotloop uses and this torch lacks."""
    if machine.names and not machine.lost:
        what = f"all {machine.names} private names of torch that hotloop uses are there"
        yield Finding("ok", "capabilities", what)
    for path, reason in machine.lost.items():
        what = f"{path} is not in this torch: {reason}"
        yield Finding("warning", "capabilities", what, "use a torch that is tested")


def _cache(machine: Machine) -> Iterator[Finding]:
    """Judge the folder of Inductor's cache: can it be used, and is there room."""
    cache = machine.cache
    if cache is None:
        return
    room = f"{cache.path} has {size(cache.free_bytes)} free"
    if not cache.writable:
        yield Finding("problem", "cache", f"{cache.path} cannot be written: every start compiles anew", _OWN_FOLDER)
    elif not cache.executable:
        what = f"{cache.path} is mounted noexec: compiled kernels cannot be loaded"
        yield Finding("problem", "cache", what, _OWN_FOLDER)
    elif cache.free_bytes < 2**30:
        yield Finding("warning", "cache", f"{room}: compiles fail once it is full", f"make room, or {_OWN_FOLDER}")
    else:
        yield Finding("ok", "cache", room)


def _memory(machine: Machine) -> Iterator[Finding]:
    """Judge whether a compile fits into the free host memory."""
    free, total = machine.available_bytes, machine.memory_bytes
    if free is None or total is None:
        return
    what = f"{size(free)} of {size(total)} of host memory are free"
    if free < max(2 * 2**30, 0.05 * total):
        remedy = "a smaller batch, preset aot_eager, fewer components, or TORCHINDUCTOR_COMPILE_THREADS=1"
        yield Finding("warning", "memory", f"{what}: a compile takes gigabytes, and may be killed", remedy)
    else:
        yield Finding("ok", "memory", what)


def _threads(machine: Machine) -> Iterator[Finding]:
    """Judge torch's number of threads against the usable CPUs."""
    what = f"torch runs {machine.threads} threads on {machine.cpus} usable CPUs"
    if machine.threads > machine.cpus:
        yield Finding("warning", "threads", f"{what}, which wait for each other", f"set OMP_NUM_THREADS={machine.cpus}")
    elif machine.threads:
        yield Finding("ok", "threads", what)


def _environment(machine: Machine) -> Iterator[Finding]:
    """Judge environment variables that turn compiles or caches off."""
    for name, effect in _SWITCHES.items():
        if machine.environment.get(name, "").strip().lower() not in _OFF:
            yield Finding("warning", "environment", f"{name} is set: {effect}", f"unset {name}")

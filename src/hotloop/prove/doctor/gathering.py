"""Gathers the facts of this machine. Every question that may crash or hang is asked in a child process."""

from __future__ import annotations

import dataclasses
import getpass
import importlib.metadata
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hotloop import host

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

PROBE_S, TRIAL_S, IMPORT_S, TOOL_S = 120.0, 240.0, 120.0, 10.0
"""Seconds that each question may take."""
_LONGEST = 400
_CHILD = "hotloop.prove.doctor.child"
_PREFIXES = ("TORCH", "HOTLOOP_", "TRITON_", "CUDA_", "PYTORCH_", "OMP_NUM_THREADS", "CXX")
_DISABLING = ("HOTLOOP_DISABLE", "TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE", "TORCHDYNAMO_SUPPRESS_ERRORS")
"""Variables that a trial runs without: the environment is judged on its own."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU. ``capability`` is CUDA's (major, minor)."""

    name: str
    capability: tuple[int, int] = (0, 0)
    memory_bytes: int = 0
    free_bytes: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class TriedCompile:
    """A compile of three lines that was tried on a device type; ``reason`` and ``hint`` are empty if it worked."""

    device: str
    seconds: float = 0.0
    reason: str = ""
    hint: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Folder:
    """A cache folder, which may not exist yet."""

    path: str
    writable: bool = True
    executable: bool = True
    free_bytes: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """A machine, as far as a compile is concerned. Memory and sizes are in bytes; None means unknown.

    ``torch`` is its version, ``torch_error`` why it cannot be imported, ``gpu_error`` why it cannot use a GPU.
    ``missing`` maps a device type to the presets that cannot run on it, each with the reason. ``lost`` maps the
    private names of torch that hotloop uses and this torch lacks to what is lost; ``names`` counts all of them.
    ``packages`` maps packages that are built for one torch, with their versions, to why they do not import.
    """

    system: str = "Linux"
    python: str = ""
    hotloop: str = ""
    cpus: int = 1
    memory_bytes: int | None = None
    available_bytes: int | None = None
    driver: str = ""
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    compiler: str = ""
    triton: str = ""
    torch: str = ""
    torch_error: str = ""
    cuda: str | None = None
    gpu_error: str = ""
    mps: bool = False
    threads: int = 0
    missing: Mapping[str, Mapping[str, str]] = dataclasses.field(default_factory=dict)
    lost: Mapping[str, str] = dataclasses.field(default_factory=dict)
    names: int = 0
    gpus: tuple[Gpu, ...] = ()
    cache: Folder | None = None
    packages: Mapping[str, str] = dataclasses.field(default_factory=dict)
    trials: tuple[TriedCompile, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the facts as plain JSON data."""
        return dataclasses.asdict(self)


def gather(*, trials: bool = True) -> Machine:
    """Gather the facts of this machine.

    Args:
        trials: try a compile as well, on the CPU and on a GPU if there is one (ten seconds to a minute each). Without a
            C++ compiler none is tried.
    """
    facts, error = ask(["-m", _CHILD, "torch"], limit_s=PROBE_S)
    gpus = tuple(Gpu(**{**gpu, "capability": tuple(gpu["capability"])}) for gpu in facts.pop("gpus", ()))
    total, available = host.memory()
    wanted = os.environ.get("CXX", "").split() or [{"win32": "cl", "darwin": "clang++"}.get(sys.platform, "g++")]
    compiler = shutil.which(wanted[0]) or ""  # the compiler that Inductor would take
    # Without the compiler no device compiles, which is a finding of its own.
    devices = ["cpu", *["cuda"] * bool(gpus)] if trials and compiler and not error else []
    return Machine(
        **{"torch": _version("torch"), **facts},
        torch_error=error,
        gpus=gpus,
        system=platform.system(),
        python=platform.python_version(),
        hotloop=_version("hotloop"),
        cpus=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory_bytes=total,
        available_bytes=available,
        driver=_driver(),
        environment={name: value for name, value in sorted(os.environ.items()) if name.startswith(_PREFIXES)},
        compiler=compiler,
        triton=_version("triton") or _version("triton-windows"),
        cache=folder(cache_path()),
        packages=_packages(),
        trials=tuple(map(try_compile, devices)),
    )


def ask(
    arguments: Sequence[str], *, limit_s: float, environment: Mapping[str, str] | None = None
) -> tuple[dict[str, Any], str]:
    """Run this Python in a child process; return the JSON object that it printed last, or else why there is none.

    Args:
        arguments: after the interpreter: ``-m module argument``.
        limit_s: seconds after which the child is killed.
        environment: of the child; None takes this process's.
    """
    with tempfile.TemporaryFile("w+", errors="replace") as out, tempfile.TemporaryFile("w+", errors="replace") as err:
        try:
            # -P: a file in the user's folder must not be taken for a module of Python's or torch's. Files, since a
            # process that the child leaves behind would keep a pipe open.
            command = host.python("-P", *arguments)
            code = subprocess.run(  # noqa: S603 - our own interpreter
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=environment, timeout=limit_s, check=False
            ).returncode
        except subprocess.TimeoutExpired:
            return {}, f"no answer after {limit_s:.0f} s"
        out.seek(0)
        err.seek(0)
        answer, lines = out.read().strip().splitlines(), err.read().strip().splitlines()
    if code < 0:
        return {}, f"the process crashed with signal {signal.Signals(-code).name}"
    try:
        data = json.loads(answer[-1])
    except (ValueError, IndexError):
        data = None
    if code == 0 and isinstance(data, dict):
        return data, ""
    lines = lines or [f"it ended with exit code {code} and said nothing"]
    return {}, lines[-1].strip()[:_LONGEST]


def try_compile(device: str) -> TriedCompile:
    """Try a compile in a child process, with an empty cache of its own."""
    with tempfile.TemporaryDirectory(prefix="hotloop-doctor-", ignore_cleanup_errors=True) as home:
        environment = {name: value for name, value in os.environ.items() if name not in _DISABLING}
        environment |= {"TORCHINDUCTOR_CACHE_DIR": home, "TRITON_CACHE_DIR": str(Path(home, "triton"))}
        environment["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # workers would outlive a child that is killed
        result, error = ask(["-m", _CHILD, device], limit_s=TRIAL_S, environment=environment)
    return TriedCompile(device=device, **(result or {"reason": error}))


def _packages() -> dict[str, str]:
    """Import the packages whose kernels are built for one torch: a wrong one breaks others that import it."""
    versions = {name: _version(name) for name in ("torchvision", "torchaudio")}
    return {
        f"{name} {version}": ask(["-c", f"import {name}; print('{{}}')"], limit_s=IMPORT_S)[1]
        for name, version in versions.items()
        if version
    }


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _driver() -> str:
    """Return the version of NVIDIA's driver; empty if there is none."""
    path = shutil.which("nvidia-smi")
    if path is None:
        return ""
    try:
        done = subprocess.run(  # noqa: S603 - a tool found on the user's own path
            [path, "--query-gpu=driver_version", "--format=csv,noheader"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TOOL_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return next(iter(done.stdout.split()), "") if done.returncode == 0 else ""


def cache_path() -> Path:
    """Return the folder of Inductor's cache, as torch chooses it, without making it."""
    if chosen := os.environ.get("TORCHINDUCTOR_CACHE_DIR"):
        return Path(chosen).absolute()
    try:
        user = getpass.getuser()
    except (KeyError, ImportError, OSError):
        user = f"uid_{os.getuid()}" if hasattr(os, "getuid") else "unknown_user"
    return Path(tempfile.gettempdir(), "torchinductor_" + re.sub(r'[\\/:*?"<>|]', "_", user))


def folder(path: Path) -> Folder:
    """Return the facts of a cache folder, or of the nearest one in which it would be made."""
    nearest = next((parent for parent in (path, *path.parents) if parent.is_dir()), Path(path.anchor))
    return Folder(
        path=str(path),
        writable=os.access(nearest, os.W_OK | os.X_OK),
        executable=not (hasattr(os, "statvfs") and os.statvfs(nearest).f_flag & getattr(os, "ST_NOEXEC", 0)),
        free_bytes=shutil.disk_usage(nearest).free,
    )

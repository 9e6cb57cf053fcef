"""Gathers the facts of this machine; whatever may crash or hang is asked in a child process."""

from __future__ import annotations

import ctypes
import dataclasses
import getpass
import importlib.metadata
import os
import platform
import re
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

from hotloop import host
from hotloop.prove.doctor.children import ask
from hotloop.prove.doctor.facts import Folder, Gpu, Machine, Package, Torch, Trial

PROBE_S, TRIAL_S, IMPORT_S, TOOL_S = 120.0, 240.0, 120.0, 10.0
"""Seconds that each question may take."""
_PREFIXES = ("TORCH", "HOTLOOP_", "TRITON_", "CUDA_", "PYTORCH_", "OMP_NUM_THREADS", "CXX")
_SILENCES = ("HOTLOOP_DISABLE", "TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE", "TORCHDYNAMO_SUPPRESS_ERRORS")
"""Settings that a trial does without: the environment is judged on its own."""
_AGAINST_TORCH = ("torchvision", "torchaudio")
_COMPILERS = {"win32": ("cl",), "darwin": ("clang++",)}


def gather(*, trials: bool = True) -> Machine:
    """Look at this machine.

    Args:
        trials: try a compile as well, on the CPU and on a GPU where there is one (ten seconds to a minute each).
    """
    asked = ask(["-m", "hotloop.prove.doctor.probe"], limit_s=PROBE_S)
    known = _torch(asked.data["torch"]) if asked.data else Torch(version=_version("torch"), error=asked.error)
    gpus = tuple(_gpu(each) for each in asked.data["gpus"]) if asked.data else ()
    total, available = host.memory()
    compiler = _compiler()
    machine = Machine(
        system=platform.system(),
        architecture=platform.machine(),
        python=platform.python_version(),
        hotloop=_version("hotloop"),
        cpus=_usable_cpus(),
        memory_bytes=total,
        available_bytes=available,
        driver=_first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        driver_cuda=_driver_cuda(),
        environment={name: value for name, value in sorted(os.environ.items()) if name.startswith(_PREFIXES)},
        compiler=compiler,
        compiler_version=_first_line(compiler, *([] if sys.platform == "win32" else ["--version"])),
        triton=_version("triton") or _version("triton-windows"),
        torch=known,
        gpus=gpus,
        cache=folder(cache_path(), chosen="TORCHINDUCTOR_CACHE_DIR" in os.environ),
        packages=tuple(_packages()),
    )
    devices = ["cpu"] * bool(compiler) + ["cuda"] * bool(gpus)
    return dataclasses.replace(machine, trials=tuple(map(_try, devices))) if trials and not known.error else machine


def _torch(data: dict[str, object]) -> Torch:
    return Machine.from_dict({"torch": data}).torch


def _gpu(data: dict[str, object]) -> Gpu:
    return Machine.from_dict({"gpus": [data]}).gpus[0]


def _try(device: str) -> Trial:
    """Try a compile in a child with an empty cache of its own."""
    with tempfile.TemporaryDirectory(prefix="hotloop-doctor-", ignore_cleanup_errors=True) as home:
        environment = {name: value for name, value in os.environ.items() if name not in _SILENCES}
        environment |= {"TORCHINDUCTOR_CACHE_DIR": home, "TRITON_CACHE_DIR": str(Path(home, "triton"))}
        environment.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
        answer = ask(["-m", "hotloop.prove.doctor.trial", device], limit_s=TRIAL_S, environment=environment)
    return Trial(device=device, reason=answer.error) if answer.data is None else Trial(device=device, **answer.data)


def _packages() -> list[Package]:
    """Look at the packages that hold kernels built for one torch: a wrong one fails at import, and others with it."""
    found = []
    for name in _AGAINST_TORCH:
        if not (version := _version(name)):
            continue
        needs = [each for each in importlib.metadata.requires(name) or () if re.match(r"torch\b(?![-\w])", each)]
        wanted = needs[0].partition(";")[0].removeprefix("torch").strip(" ()") if needs else ""
        answer = ask(["-c", f"import {name}; print('{{}}')"], limit_s=IMPORT_S)
        found.append(Package(name=name, version=version, needs=wanted, error=answer.error))
    return found


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _first_line(program: str, *arguments: str) -> str:
    """Give the first line that a program prints; empty where it is not there or fails."""
    path = shutil.which(program) if program else None
    if path is None:
        return ""
    try:
        done = subprocess.run(  # noqa: S603 - a tool of the machine's, found on the user's own path
            [path, *arguments],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TOOL_S,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    lines = (done.stdout if done.returncode == 0 else "").strip().splitlines()
    return lines[0].strip() if lines else ""


def _compiler() -> str:
    """Give the C++ compiler that Inductor would take; empty where it is not there."""
    chosen = os.environ.get("CXX", "").split()
    names = chosen[:1] or _COMPILERS.get(sys.platform, ("g++",))
    return next((path for name in names if (path := shutil.which(name))), "")


def _driver_cuda() -> tuple[int, int] | None:
    """Ask the driver for the newest CUDA that it knows; None where there is none."""
    try:
        library = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
        version = ctypes.c_int(0)
        if library.cuDriverGetVersion(ctypes.byref(version)) != 0:
            return None
    except (OSError, AttributeError):
        return None
    return (version.value // 1000, version.value % 1000 // 10) if version.value else None


def _usable_cpus() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cache_path() -> Path:
    """Give the folder of Inductor's cache, as torch chooses it, without making it."""
    if chosen := os.environ.get("TORCHINDUCTOR_CACHE_DIR"):
        return Path(chosen).absolute()
    try:
        user = getpass.getuser()
    except (KeyError, ImportError, OSError):
        user = f"uid_{os.getuid()}" if hasattr(os, "getuid") else "unknown_user"
    return Path(tempfile.gettempdir(), "torchinductor_" + re.sub(r'[\\/:*?"<>|]', "_", user))


def folder(path: Path, *, chosen: bool) -> Folder:
    """Look at a cache folder, and at the folders above it: who may write, is there room."""
    exists = path.is_dir()
    there = next((each for each in (path, *path.parents) if each.is_dir()), Path(path.anchor))
    found = there.stat()
    mine = not hasattr(os, "getuid") or found.st_uid == os.getuid()
    return Folder(
        path=str(path),
        exists=exists,
        mine=mine if exists else True,
        owner=_name_of(found.st_uid) if exists else "",
        open_to=_open_to(path, there),
        writable=os.access(there, os.W_OK | os.X_OK),
        executable=not (hasattr(os, "statvfs") and os.statvfs(there).f_flag & getattr(os, "ST_NOEXEC", 0)),
        free_bytes=shutil.disk_usage(there).free,
        chosen=chosen,
    )


def _open_to(path: Path, there: Path) -> str:
    """Say which others may write into a folder, or put another one in its place."""
    if not hasattr(os, "getuid"):
        return ""
    for each in (there, *there.parents):
        mode = each.stat().st_mode
        sticky = mode & stat.S_ISVTX and each != path  # in /tmp nobody can replace what is another's
        if mode & stat.S_IWOTH and not sticky:
            return "everybody"
        if mode & stat.S_IWGRP and not sticky and each.stat().st_gid != os.getgid():
            return "another group"
    return ""


def _name_of(uid: int) -> str:
    try:
        import pwd  # noqa: PLC0415 - not on Windows

        return pwd.getpwuid(uid).pw_name
    except (ImportError, KeyError):
        return str(uid)

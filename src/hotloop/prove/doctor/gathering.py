"""Gathers the facts of this machine. Every question that may crash or hang is asked in a child process."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import getpass
import importlib.metadata
import json
import os
import platform
import re
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hotloop import host
from hotloop.prove.doctor.facts import Folder, Machine, Package, Torch, TriedCompile

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

PROBE_S, TRIAL_S, IMPORT_S, TOOL_S = 120.0, 240.0, 120.0, 10.0
"""Seconds that each question may take."""
_LONGEST = 400
_WINDOWS = sys.platform == "win32"
_CHILD = "hotloop.prove.doctor.child"
_PREFIXES = ("TORCH", "HOTLOOP_", "TRITON_", "CUDA_", "PYTORCH_", "OMP_NUM_THREADS", "CXX")
_DISABLING = ("HOTLOOP_DISABLE", "TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE", "TORCHDYNAMO_SUPPRESS_ERRORS")
"""Variables that a trial runs without: the environment is judged on its own."""


def gather(*, trials: bool = True) -> Machine:
    """Gather the facts of this machine.

    Args:
        trials: try a compile as well, on the CPU and on a GPU if there is one (ten seconds to a minute each). Without a
            C++ compiler none is tried.
    """
    answer = ask(["-m", _CHILD, "torch"], limit_s=PROBE_S)
    if answer.data:
        probed = Machine.from_dict(answer.data)
    else:
        probed = Machine(torch=Torch(version=_version("torch"), error=answer.error))
    total, available = host.memory()
    wanted = os.environ.get("CXX", "").split() or [{"win32": "cl", "darwin": "clang++"}.get(sys.platform, "g++")]
    compiler = shutil.which(wanted[0]) or ""  # the compiler that Inductor would take
    machine = dataclasses.replace(
        probed,
        system=platform.system(),
        architecture=platform.machine(),
        python=platform.python_version(),
        hotloop=_version("hotloop"),
        cpus=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory_bytes=total,
        available_bytes=available,
        driver=_first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        driver_cuda=_driver_cuda(),
        environment={name: value for name, value in sorted(os.environ.items()) if name.startswith(_PREFIXES)},
        compiler=compiler,
        compiler_version=_first_line(compiler, *([] if _WINDOWS else ["--version"])),
        triton=_version("triton") or _version("triton-windows"),
        cache=folder(cache_path(), chosen="TORCHINDUCTOR_CACHE_DIR" in os.environ),
        packages=tuple(_packages()),
    )
    if not trials or machine.torch.error:
        return machine
    # Without the compiler no device compiles, which is a finding of its own.
    devices = ["cpu", *["cuda"] * bool(machine.gpus)] if compiler else []
    return dataclasses.replace(machine, trials=tuple(map(try_compile, devices)))


@dataclasses.dataclass(frozen=True)
class Answer:
    """The JSON object on a child's last line; without one, ``error`` says why."""

    data: Mapping[str, Any] | None
    error: str = ""


def ask(arguments: Sequence[str], *, limit_s: float, environment: Mapping[str, str] | None = None) -> Answer:
    """Run this Python in a child process, and return the JSON object that it printed last.

    Args:
        arguments: after the interpreter: ``-m module argument``.
        limit_s: seconds after which the child is killed, with the compile workers that it started.
        environment: of the child; None takes this process's.
    """
    with subprocess.Popen(  # noqa: S603 - our own interpreter and module
        # -P: a file in the user's folder must not be taken for a module of Python's or torch's.
        host.python("-P", *arguments),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=None if environment is None else dict(environment),
        start_new_session=not _WINDOWS,
    ) as child:
        try:
            out, err = child.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            return Answer(None, f"no answer after {limit_s:.0f} s")
        finally:
            if _WINDOWS:
                child.kill()
            else:  # compile workers are in the child's group, and may outlive the child
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
    try:
        data = json.loads(out.strip().splitlines()[-1])
    except (ValueError, IndexError):
        data = None
    if child.returncode == 0 and isinstance(data, dict):
        return Answer(data)
    if child.returncode < 0:
        names = {number.value: number.name for number in signal.Signals}
        return Answer(None, f"the process crashed with signal {names.get(-child.returncode, -child.returncode)}")
    lines = err.strip().splitlines() or [f"it ended with exit code {child.returncode} and said nothing"]
    return Answer(None, lines[-1].strip()[:_LONGEST])


def try_compile(device: str) -> TriedCompile:
    """Try a compile in a child process, with an empty cache of its own."""
    with tempfile.TemporaryDirectory(prefix="hotloop-doctor-", ignore_cleanup_errors=True) as home:
        environment = {name: value for name, value in os.environ.items() if name not in _DISABLING}
        environment |= {"TORCHINDUCTOR_CACHE_DIR": home, "TRITON_CACHE_DIR": str(Path(home, "triton"))}
        environment.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
        answer = ask(["-m", _CHILD, device], limit_s=TRIAL_S, environment=environment)
    result = {"reason": answer.error} if answer.data is None else answer.data
    return TriedCompile(device=device, **result)


def _packages() -> Iterator[Package]:
    """Import the packages whose kernels are built for one torch: a wrong one breaks others that import it."""
    for name in ("torchvision", "torchaudio"):
        if not (version := _version(name)):
            continue
        needs = [need for need in importlib.metadata.requires(name) or () if re.match(r"torch\b(?![-\w])", need)]
        wanted = needs[0].partition(";")[0].removeprefix("torch").strip(" ()") if needs else ""
        answer = ask(["-c", f"import {name}; print('{{}}')"], limit_s=IMPORT_S)
        yield Package(name=name, version=version, needs=wanted, error=answer.error)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _first_line(program: str, *arguments: str) -> str:
    """Return the first line that a program prints; empty if there is no such program or it fails."""
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


def _driver_cuda() -> tuple[int, int] | None:
    """Return the newest CUDA (major, minor) that the driver supports; None without a driver."""
    try:
        library = ctypes.CDLL("nvcuda.dll" if _WINDOWS else "libcuda.so.1")
        version = ctypes.c_int(0)
        if library.cuDriverGetVersion(ctypes.byref(version)) != 0:
            return None
    except (OSError, AttributeError):
        return None
    return (version.value // 1000, version.value % 1000 // 10) if version.value else None


def cache_path() -> Path:
    """Return the folder of Inductor's cache, as torch chooses it, without making it."""
    if chosen := os.environ.get("TORCHINDUCTOR_CACHE_DIR"):
        return Path(chosen).absolute()
    try:
        user = getpass.getuser()
    except (KeyError, ImportError, OSError):
        user = f"uid_{os.getuid()}" if hasattr(os, "getuid") else "unknown_user"
    return Path(tempfile.gettempdir(), "torchinductor_" + re.sub(r'[\\/:*?"<>|]', "_", user))


def folder(path: Path, *, chosen: bool) -> Folder:
    """Return the facts of a cache folder: who may write into it or replace it, and how much room there is.

    Args:
        path: of the folder, which may not exist yet.
        chosen: the user named it.
    """
    exists = path.is_dir()
    nearest = next((parent for parent in (path, *path.parents) if parent.is_dir()), Path(path.anchor))
    status = nearest.stat()
    mine = not hasattr(os, "getuid") or status.st_uid == os.getuid()
    owner = ""
    if exists:
        owner = str(status.st_uid)
        with contextlib.suppress(ImportError, KeyError):
            import pwd  # noqa: PLC0415 - not on Windows

            owner = pwd.getpwuid(status.st_uid).pw_name
    return Folder(
        path=str(path),
        exists=exists,
        mine=mine if exists else True,
        owner=owner,
        open_to=_open_to(path, nearest),
        writable=os.access(nearest, os.W_OK | os.X_OK),
        executable=not (hasattr(os, "statvfs") and os.statvfs(nearest).f_flag & getattr(os, "ST_NOEXEC", 0)),
        free_bytes=shutil.disk_usage(nearest).free,
        chosen=chosen,
    )


def _open_to(path: Path, nearest: Path) -> str:
    """Name the other users who may write into a folder, or put another folder in its place."""
    if not hasattr(os, "getuid"):
        return ""
    for parent in (nearest, *nearest.parents):
        mode = parent.stat().st_mode
        sticky = mode & stat.S_ISVTX and parent != path  # in /tmp nobody can replace another user's folder
        if mode & stat.S_IWOTH and not sticky:
            return "everybody"
        if mode & stat.S_IWGRP and not sticky and parent.stat().st_gid != os.getgid():
            return "another group"
    return ""

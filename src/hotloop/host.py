"""The host's memory, and what is left of it: of the machine, or of the container where that has a limit; no torch."""

from __future__ import annotations

import os
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator


class Memory(NamedTuple):
    """Bytes of host memory, all and what programs may still take; None where the system does not tell."""

    total: int | None
    available: int | None


class _Version(NamedTuple):
    """How a version of control groups names what it counts."""

    limit: str
    used: str
    cached: str
    """Read from files and used least: the kernel takes it back before it ends a program, as docker and Kubernetes
    count as well. Of a group with those inside it."""


_FIRST = _Version("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_SECOND = _Version("memory.max", "memory.current", "inactive_file")


def memory(root: Path = Path("/")) -> Memory:
    """Give the memory of the machine, or the least that a control group around this process leaves.

    A program that takes more than its control group may have (version 1 or 2 of the Linux kernel's, which containers
    and job schedulers use) is killed, whatever the machine has left.

    Args:
        root: where the system's ``proc`` and ``sys`` are.
    """
    found = _table(root / "proc/meminfo")
    if "MemTotal" not in found:
        return Memory(_without_proc() if root == Path("/") else None, None)
    total, available = 1024 * found["MemTotal"], 1024 * found.get("MemAvailable", found["MemTotal"])
    for folder, version in _groups(root):
        limit, used = (_number(folder / name) for name in (version.limit, version.used))
        if limit is None or used is None:
            continue
        held = used - _table(folder / "memory.stat").get(version.cached, 0)
        total, available = min(total, limit), min(available, max(0, limit - held))
    return Memory(total, available)


def _groups(root: Path) -> Iterator[tuple[Path, _Version]]:
    """Give the folders of the groups that this process is in, innermost first: each one's limit counts."""
    paths = dict(_memberships(root / "proc/self/cgroup"))
    for line in _lines(root / "proc/self/mountinfo"):
        mount, _, system = (part.split() for part in line.partition(" - "))
        version = _version(system)
        if version is None or version not in paths or len(mount) <= _POINT:
            continue
        top = root / mount[_POINT].lstrip("/")
        inside, shown = PurePosixPath(paths[version]), PurePosixPath(mount[_ROOT])
        # A container may show its own group alone as the top, or another's path that leads nowhere from in here.
        below = inside.relative_to(shown) if inside.is_relative_to(shown) and ".." not in inside.parts else None
        folder = top / below if below is not None else top
        for each in (folder, *folder.parents):
            yield each, version
            if each == top:
                break


_ROOT, _POINT = 3, 4
"""Fields of a line of ``/proc/self/mountinfo``: what of the file system is mounted, and where."""


def _memberships(file: Path) -> Iterator[tuple[_Version, str]]:
    for line in _lines(file):
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if "memory" in controllers.split(","):
            yield _FIRST, path
        elif number == "0" and not controllers:
            yield _SECOND, path


def _version(system: list[str]) -> _Version | None:
    """Tell of a mount's type, source and options whether it counts memory, and how it is read."""
    if system[:1] == ["cgroup2"]:
        return _SECOND
    return _FIRST if system[:1] == ["cgroup"] and "memory" in system[-1].split(",") else None


def _table(file: Path) -> dict[str, int]:
    """Read lines of a name and a number."""
    words = [line.replace(":", " ").split() for line in _lines(file)]
    return {word[0]: int(word[1]) for word in words if len(word) > 1 and word[1].isdigit()}


def _number(file: Path) -> int | None:
    """Read a file of one number; None where it is not there, or says ``max``."""
    text = "".join(_lines(file)).strip()
    return int(text) if text.isdigit() else None


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def _without_proc() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None

"""The host: its memory, of the machine or of the container if that has a limit, and how to start a Python; no torch."""

from __future__ import annotations

import os
import sys
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator


def python(*arguments: str) -> list[str]:
    """Return the command of a child that runs this Python, and imports what this process does.

    A child would look into the current folder first. With ``-P`` it does not, which this process was started with or,
    as a script such as the command ``hotloop``, did not need.

    Args:
        arguments: after the interpreter, such as ``-m hotloop``.
    """
    main = sys.modules["__main__"]
    is_script = getattr(main, "__spec__", None) is None and hasattr(main, "__file__")  # a module, -m, has a spec
    return [sys.executable, *(["-P"] if sys.flags.safe_path or is_script else []), *arguments]


class Memory(NamedTuple):
    """Bytes of host memory, in total and what programs may still take; None if the system does not say."""

    total: int | None
    available: int | None


def memory(root: Path = Path("/")) -> Memory:
    """Return the memory of the machine, or the least that a control group around this process leaves.

    A program that takes more than its control group may have (version 1 or 2 of the Linux kernel's, which containers
    and job schedulers use) is killed, whatever the machine has left.

    Args:
        root: the folder that holds the system's ``proc`` and ``sys``.
    """
    machine = _table(root / "proc/meminfo")
    if "MemTotal" not in machine:
        try:
            return Memory(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if root == Path("/") else None, None)
        except (AttributeError, ValueError, OSError):
            return Memory(None, None)
    total, available = 1024 * machine["MemTotal"], 1024 * machine.get("MemAvailable", machine["MemTotal"])
    for folder, (limit_file, used_file, cached_name) in _groups(root):
        limit, used = ("".join(_lines(folder / name)).strip() for name in (limit_file, used_file))
        if not limit.isdigit() or not used.isdigit():  # no such file, or the limit is ``max``
            continue
        # The kernel takes the cache of files back before it ends a program; docker and Kubernetes subtract it as well.
        held = int(used) - _table(folder / "memory.stat").get(cached_name, 0)
        total, available = min(total, int(limit)), min(available, max(0, int(limit) - held))
    return Memory(total, available)


_NAMES = {
    "cgroup": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    "cgroup2": ("memory.max", "memory.current", "inactive_file"),
}
"""For each version of control groups: the files of its limit and its use, and the name of the cache in memory.stat."""


def _groups(root: Path) -> Iterator[tuple[Path, tuple[str, str, str]]]:
    """Yield the folders of the groups that this process is in, innermost first, with the version's `_NAMES`.

    The limit of every group counts.
    """
    paths = {}
    for line in _lines(root / "proc/self/cgroup"):
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if "memory" in controllers.split(","):
            paths["cgroup"] = path
        elif number == "0" and not controllers:
            paths["cgroup2"] = path
    for line in _lines(root / "proc/self/mountinfo"):
        mount, _, system = (part.split() for part in line.partition(" - "))
        version = system[0] if system else ""
        if version not in paths or len(mount) < 5:  # noqa: PLR2004 - the fields that are read below
            continue
        if version == "cgroup" and "memory" not in system[-1].split(","):  # version 1 mounts each resource apart
            continue
        shown, top = PurePosixPath(mount[3]), root / mount[4].lstrip("/")
        inside = PurePosixPath(paths[version])
        # A container may show its own group alone as the top, or another's path that leads nowhere from in here.
        reachable = inside.is_relative_to(shown) and ".." not in inside.parts
        folder = top / inside.relative_to(shown) if reachable else top
        for group in (folder, *folder.parents):
            yield group, _NAMES[version]
            if group == top:
                break


def _table(file: Path) -> dict[str, int]:
    """Read lines of a name and a number."""
    words = [line.replace(":", " ").split() for line in _lines(file)]
    return {word[0]: int(word[1]) for word in words if len(word) > 1 and word[1].isdigit()}


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []

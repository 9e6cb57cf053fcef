"""The facts of a machine as plain data: gathered on this machine, or saved from another."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU. ``capability`` is CUDA's (major, minor); ``architecture`` is AMD's name, such as ``gfx942``."""

    name: str
    capability: tuple[int, int] = (0, 0)
    architecture: str = ""
    memory_bytes: int = 0
    free_bytes: int = 0
    multiprocessors: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Torch:
    """The installed torch; ``error`` says why it cannot be imported.

    ``missing`` maps a device type to the presets that cannot run on it, each with the reason. ``capabilities`` maps
    the private names of torch that hotloop uses and this torch lacks to what is lost; ``names`` counts all of them.
    """

    version: str = ""
    cuda: str | None = None
    hip: str | None = None
    architectures: tuple[str, ...] = ()
    error: str = ""
    gpu_error: str = ""
    mps: bool = False
    threads: int = 0
    missing: Mapping[str, Mapping[str, str]] = dataclasses.field(default_factory=dict)
    capabilities: Mapping[str, str] = dataclasses.field(default_factory=dict)
    names: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class TriedCompile:
    """A compile of three lines that was tried on a device type; ``reason`` and ``hint`` are empty if it worked."""

    device: str
    seconds: float = 0.0
    reason: str = ""
    hint: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Folder:
    """A cache folder. ``owner`` is empty if it does not exist yet; ``open_to`` names others who may write into it."""

    path: str
    exists: bool = True
    mine: bool = True
    owner: str = ""
    open_to: str = ""
    writable: bool = True
    executable: bool = True
    free_bytes: int = 0
    chosen: bool = False
    """The user named the folder; otherwise it is torch's own choice."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Package:
    """A package that is built against torch. ``needs`` is its requirement of torch; ``error`` says why it fails."""

    name: str
    version: str
    needs: str = ""
    error: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """A machine, as far as a compile is concerned. Memory and sizes are in bytes; None means unknown."""

    system: str = "Linux"
    architecture: str = "x86_64"
    python: str = ""
    hotloop: str = ""
    cpus: int = 1
    memory_bytes: int | None = None
    available_bytes: int | None = None
    driver: str = ""
    driver_cuda: tuple[int, int] | None = None
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    compiler: str = ""
    compiler_version: str = ""
    triton: str = ""
    torch: Torch = dataclasses.field(default_factory=Torch)
    gpus: tuple[Gpu, ...] = ()
    cache: Folder | None = None
    packages: tuple[Package, ...] = ()
    trials: tuple[TriedCompile, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the facts as plain JSON data."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Machine:
        """Rebuild the facts from `to_dict`'s data.

        Raises:
            TypeError: this version knows no fact of such a name.
        """
        fields = dict(data)
        if isinstance(torch := fields.get("torch"), Mapping):
            fields["torch"] = Torch(**_tuples(torch))
        if isinstance(cache := fields.get("cache"), Mapping):
            fields["cache"] = Folder(**cache)
        for name, kind in (("gpus", Gpu), ("packages", Package), ("trials", TriedCompile)):
            fields[name] = tuple(kind(**_tuples(entry)) for entry in fields.get(name, ()))
        return cls(**_tuples(fields))


def _tuples(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Turn lists, as JSON has them, into tuples."""
    return {key: tuple(value) if isinstance(value, list) else value for key, value in fields.items()}

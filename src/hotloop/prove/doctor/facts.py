"""What is known of a machine, as plain data: gathered here, or saved from elsewhere."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU. ``capability`` is CUDA's (major, minor); ``architecture`` AMD's name of it, such as ``gfx942``."""

    name: str
    capability: tuple[int, int] = (0, 0)
    architecture: str = ""
    memory_bytes: int = 0
    free_bytes: int = 0
    multiprocessors: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Torch:
    """The installed torch. ``error`` is why it cannot be imported; ``missing`` has why each preset cannot run.

    ``missing`` maps a device type to the presets that cannot run on it, each with the reason. ``capabilities`` maps the
    private names of torch that hotloop uses and that are not there to what is lost without them; ``names`` counts all.
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
class Trial:
    """A compile of three lines that was tried on a device type; ``reason`` and ``hint`` are empty where it worked."""

    device: str
    seconds: float = 0.0
    reason: str = ""
    hint: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Folder:
    """A cache folder. ``owner`` is empty where it does not exist yet; ``open_to`` says which others may write there."""

    path: str
    exists: bool = True
    mine: bool = True
    owner: str = ""
    open_to: str = ""
    writable: bool = True
    executable: bool = True
    free_bytes: int = 0
    chosen: bool = False
    """The user named it; otherwise it is torch's own choice."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Package:
    """A package that is built against torch. ``needs`` is the torch that it asks for; ``error`` its import's."""

    name: str
    version: str
    needs: str = ""
    error: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """A machine, as far as a compile is concerned. Memory and sizes are in bytes; None is what is not known."""

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
    trials: tuple[Trial, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Give the facts as plain JSON data."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Machine:
        """Rebuild the facts from `to_dict`'s data.

        Raises:
            TypeError: a fact is not one of this version's.
        """
        fields = dict(data)
        if isinstance(found := fields.get("torch"), Mapping):
            fields["torch"] = Torch(**_tuples(found))
        if isinstance(found := fields.get("cache"), Mapping):
            fields["cache"] = Folder(**found)
        for name, kind in (("gpus", Gpu), ("packages", Package), ("trials", Trial)):
            fields[name] = tuple(kind(**_tuples(each)) for each in fields.get(name, ()))
        return cls(**_tuples(fields))


def _tuples(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in fields.items()}

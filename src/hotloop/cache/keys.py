"""Keys of runs that cost alike, fingerprints of models, and the versions and hardware that compiled code fits to."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import itertools
import json
import platform
import re
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from types import CodeType
from typing import TYPE_CHECKING, Any

import torch

from hotloop._torch.module import class_forward, settings_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator


def key_of(  # noqa: PLR0913 - each is a part of the key
    models: Iterable[torch.nn.Module],
    inputs: Any,
    *,
    optimizers: Iterable[torch.optim.Optimizer],
    step: Callable[..., Any],
    autocast: torch.dtype | None,
    device: torch.device,
) -> str:
    """Return the key under which the costs of a training step are stored.

    The model counts by its classes, the code of their ``forward``, their settings as printed (``extra_repr``), dropout
    probabilities, and its parameters' and buffers' names, shapes and dtypes; the optimizer by its class; ``step`` by
    its code. Training flags, weights and learning rates do not count.

    Args:
        models: all models of the step.
        inputs: the step's arguments, nested as you like: tensors count by shape, dtype and device, plain values by
            their text, anything else by its class.
        optimizers: all optimizers of the step.
        step: the user's step function.
        autocast: the dtype of the step's autocast; None without one.
        device: where the step runs.
    """
    parts = (
        *map(fingerprint, models),
        _signature(inputs),
        *map(_class_name, optimizers),
        _code_text(step),
        _hardware(device),
        str(_versions()),
        _precision(autocast),
    )
    return _digest(json.dumps(parts))


def _structure(module: torch.nn.Module) -> Iterator[str]:
    """Name every module with its class, code and settings, and every tensor with shape and dtype."""
    for name, part in module.named_modules(remove_duplicate=False):
        # The default repr of an object has its address, which differs from process to process.
        settings = re.sub(r" at 0x[0-9a-fA-F]+", "", str(settings_of(part)))
        yield f"{name}: {_class_name(part)} {_code_text(class_forward(type(part)))} {settings}"
    for name, tensor in itertools.chain(
        module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False)
    ):
        lazy = torch.nn.parameter.is_lazy(tensor)
        yield f"{name}: {'lazy' if lazy else tuple(tensor.shape)} {tensor.dtype} {tensor.device.type}"


@functools.lru_cache(maxsize=4096)
def _code_of(code: CodeType) -> str:
    """Return a digest of a function's code without its place in the file, so that moving it keeps the key."""
    constants = [_code_of(item) if isinstance(item, CodeType) else _signature(item) for item in code.co_consts]
    return _digest(repr((code.co_code.hex(), code.co_names, code.co_varnames, constants)))


def _code_text(function: Any) -> str:
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    return _code_of(code) if isinstance(code, CodeType) else type(function).__name__


def _signature(value: Any) -> str:
    """Describe nested values by everything that makes a step take longer or shorter."""
    match value:
        case torch.Tensor():
            return f"{tuple(value.shape)} {value.dtype} {value.device.type}"
        case Mapping():
            return "{" + ", ".join(f"{key}: {_signature(item)}" for key, item in value.items()) + "}"
        case str() | bytes() | int() | float() | complex() | None:
            return repr(value)
        case Sequence() | AbstractSet():
            items = [_signature(item) for item in value]
            return "[" + ", ".join(sorted(items) if isinstance(value, AbstractSet) else items) + "]"
        case _:
            return str(value) if isinstance(value, torch.dtype | torch.device) else _class_name(value)


def _class_name(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _hardware(device: torch.device) -> str:
    host = f"{_cpu()}, {torch.get_num_threads()} threads"
    if device.type != "cuda":
        return f"{host}, {device.type}"
    facts = torch.cuda.get_device_properties(device)
    return f"{host}, {facts.name} {facts.major}.{facts.minor} {facts.multi_processor_count} SMs {facts.total_memory} B"


@functools.cache
def _cpu() -> str:
    """Return the processor's model; Python's own `platform.processor` is empty on most Linux systems."""
    found = re.search(r"^model name\s*:\s*(.+)$", _text("/proc/cpuinfo"), re.MULTILINE)
    return found[1].strip() if found else platform.processor() or platform.machine()


@functools.cache
def _versions() -> dict[str, str]:
    driver = re.search(r"Kernel Module\D*([\d.]+)", _text("/proc/driver/nvidia/version"))
    installed = {}
    for package in ("triton", "hotloop"):
        try:
            installed[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            installed[package] = "none"
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": installed["triton"],
        "cuda": torch.version.cuda or torch.version.hip or "none",
        "driver": driver[1] if driver else "unknown",
        "hotloop": installed["hotloop"],
    }


def _text(path: str) -> str:
    """Read one of Linux's files of facts; where there is none, that part of the key is less exact."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _precision(autocast: torch.dtype | None) -> str:
    backends: Any = torch.backends  # the types that torch ships do not know these settings
    parts = {
        "default": torch.get_default_dtype(),
        "autocast": autocast,
        "matmul": backends.cuda.matmul.fp32_precision,
        "conv": backends.cudnn.conv.fp32_precision,
        "onednn": backends.mkldnn.matmul.fp32_precision,
        "deterministic": torch.are_deterministic_algorithms_enabled() or backends.cudnn.deterministic,
        "benchmark": backends.cudnn.benchmark,
    }
    return ", ".join(f"{name} {value}" for name, value in parts.items())


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()[:32]


def fingerprint(model: torch.nn.Module) -> str:
    """Return a digest of everything that compiled code depends on: classes, code, settings, and tensors' shapes."""
    return _digest("\n".join(_structure(model)))


def fits() -> dict[str, str]:
    """Return what compiled code fits to, by name: versions and hardware. Code of another torch or GPU is never used."""
    versions = _versions()
    gpu = torch.cuda.get_device_properties(torch.cuda.current_device()) if torch.cuda.is_available() else None
    return {
        **{name: versions[name] for name in ("torch", "triton", "cuda", "python", "hotloop")},
        "platform": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu(),
        "gpu": f"{gpu.name} {gpu.major}.{gpu.minor}" if gpu is not None else "none",
    }

"""The child's program that looks at torch: one JSON object on its last line (`hotloop.prove.doctor.facts.Torch`)."""

from __future__ import annotations

import dataclasses
import functools
import json
from typing import Any

import torch

from hotloop._torch.ledger import LEDGER, PrivateName, capability
from hotloop.compiling.fallback import missing
from hotloop.presets import PRESETS
from hotloop.prove.doctor.facts import Gpu, Torch


def main() -> None:
    """Print what torch and its GPUs are."""
    gpu_error, found = "", []
    if torch.cuda.is_available():
        try:
            found = [_gpu(index) for index in range(torch.cuda.device_count())]
        except RuntimeError as error:
            gpu_error = str(error).strip().partition("\n")[0]
    elif torch.version.cuda or torch.version.hip:
        gpu_error = _why_not()
    known = Torch(
        version=str(torch.__version__),
        cuda=torch.version.cuda,
        hip=torch.version.hip,
        architectures=tuple(torch.cuda.get_arch_list()),
        gpu_error=gpu_error,
        mps=torch.backends.mps.is_available(),
        threads=torch.get_num_threads(),
        missing={device: _missing(device) for device in (["cuda", "cpu"] if found else ["cpu"])},
        capabilities=_lost(),
        names=len(_looked_for()),
    )
    print(json.dumps({"torch": dataclasses.asdict(known), "gpus": [dataclasses.asdict(each) for each in found]}))  # noqa: T201 - the answer


def _gpu(index: int) -> Gpu:
    facts = torch.cuda.get_device_properties(index)
    free, total = torch.cuda.mem_get_info(index)
    return Gpu(
        name=facts.name,
        capability=(facts.major, facts.minor),
        architecture=str(getattr(facts, "gcnArchName", "")) if torch.version.hip else "",
        memory_bytes=total,
        free_bytes=free,
        multiprocessors=facts.multi_processor_count,
    )


def _why_not() -> str:
    """Give why CUDA does not start; empty where there is simply no GPU."""
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:
        text = str(error).strip().partition("\n")[0]
        nothing = ("no NVIDIA driver", "No CUDA GPUs", "no CUDA-capable device", "No HIP GPUs")
        return "" if any(phrase in text for phrase in nothing) else text
    return ""


def _missing(device: str) -> dict[str, str]:
    lacking = {name: missing(preset, device) for name, preset in PRESETS.items()}
    return {name: reason for name, reason in lacking.items() if reason}


def _lost() -> dict[str, str]:
    """Give the private names that this torch does not have, each with what is lost without it."""
    return {name.path: name.without or "a part of hotloop" for name in _looked_for() if not _is_there(name.path)}


def _looked_for() -> list[PrivateName]:
    """Give the names that can be looked for: not those that torch sets on objects while it traces."""
    return [name for name in LEDGER if ":" in name.path or name.path.partition(".")[0] in _objects()]


def _is_there(path: str) -> bool:
    if ":" in path:
        return capability(path, path).available
    kind, _, attribute = path.partition(".")
    return hasattr(_objects()[kind], attribute)


@functools.cache
def _objects() -> dict[str, Any]:
    module = torch.nn.Linear(1, 1)
    return {"Module": module, "Tensor": module.weight, "Optimizer": torch.optim.SGD(module.parameters())}


if __name__ == "__main__":
    main()

"""Ways to run an eager step that a user can have by a line: another precision, attention or layout, no checks.

Each is offered only where a step was seen to have what it changes, and timed by turns beside the step as it is.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F  # noqa: N812 - torch's own custom
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from hotloop._torch.checks import checks_left_out
from hotloop.diagnose.argument_checks import OF_DISTRIBUTIONS, UNCHECKED
from hotloop.diagnose.autocast_off import AUTOCAST
from hotloop.diagnose.slower_attention import ALL_KERNELS, NO_WEIGHTS
from hotloop.diagnose.tf32_off import TF32
from hotloop.prove.doctor.ways import Way
from hotloop.step import layout
from hotloop.step.tiers import CHANNELS_LAST

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from hotloop.events import HostSync
    from hotloop.prove.doctor.step_calls import StepCalls

_AMPERE = (8, 0)
"""The first compute capability with TF32 and bfloat16."""
_KERNELS = (
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.MATH,
)


def variants(
    calls: StepCalls,
    reads: Sequence[HostSync],
    modules: Sequence[torch.nn.Module],
    device: torch.device,
    eagerly: Callable[[], contextlib.AbstractContextManager[Any]],
) -> list[Way]:
    """Return the ways that may be faster for a step, by what was seen of it.

    Args:
        calls: of the step.
        reads: where Python waited for the device in the step.
        modules: of the models.
        device: where they are.
        eagerly: makes the context in which the program runs without any compile.
    """
    offered: dict[str, tuple[Callable[[], contextlib.AbstractContextManager[Any]], tuple[str, int] | None]] = {}
    if device.type == "cuda" and not layout.why_not(modules):
        offered[CHANNELS_LAST] = lambda: layout.channels_last(modules), None
    if has_tensor_cores(device) and torch.float32 in calls.products:
        if _matmul_precision() == "highest":
            offered[TF32] = tf32, None
        if not calls.products & {torch.bfloat16, torch.float16}:
            offered[AUTOCAST] = lambda: torch.autocast(device.type, torch.bfloat16), None
    if "backends" in calls.places:
        offered[ALL_KERNELS] = lambda: _Attention(all_kernels=True), calls.places["backends"]
    if "weights" in calls.places:
        offered[NO_WEIGHTS] = lambda: _Attention(weights=False), calls.places["weights"]
    if checked := next((read for read in reads if OF_DISTRIBUTIONS in read.reason), None):
        offered[UNCHECKED] = checks_left_out, _place(checked)
    return [_way(name, eagerly, change, place) for name, (change, place) in offered.items()]


def _way(
    name: str,
    eagerly: Callable[[], contextlib.AbstractContextManager[Any]],
    change: Callable[[], contextlib.AbstractContextManager[Any]],
    place: tuple[str, int] | None,
) -> Way:
    @contextlib.contextmanager
    def running() -> Iterator[None]:
        with eagerly(), change():
            yield

    return Way(name, running, suggested=True, place=place)


def _place(read: HostSync) -> tuple[str, int] | None:
    return None if read.file is None or read.line is None else (read.file, read.line)


def has_tensor_cores(device: torch.device) -> bool:
    """Return whether a device multiplies in TF32 and bfloat16 faster than in float32."""
    if device.type != "cuda" or torch.version.hip:
        return False
    return torch.cuda.get_device_capability(device) >= _AMPERE


def _matmul_precision() -> str | None:
    """Return torch's precision of float32 products; None where the program sets it by the newer names, and means it."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return None


@contextlib.contextmanager
def tf32() -> Iterator[None]:
    """Multiply float32 matrices in TF32 while the block runs."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


class _Attention(TorchFunctionMode):
    """Runs torch's attention with all of its kernels, or without returning weights, whatever surrounds the call."""

    def __init__(self, *, all_kernels: bool = False, weights: bool = True) -> None:
        super().__init__()
        self._all_kernels, self._weights = all_kernels, weights

    def __torch_function__(
        self, function: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        if function is F.multi_head_attention_forward and not self._weights:
            given["need_weights"] = False
        if self._all_kernels and function in (F.scaled_dot_product_attention, F.multi_head_attention_forward):
            with sdpa_kernel(list(_KERNELS)):
                return function(*args, **given)
        return function(*args, **given)

"""A step's operations as comparable lines. As long as eager's lines stay the same, a recording of them is right.

A line holds an operation, its plain arguments, and for each tensor where it comes from: an argument of the step, the
result of an earlier operation, a gradient, or memory from outside. No Python state is looked at.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from typing import TYPE_CHECKING, Any

import torch

from hotloop._torch.dispatch import name_of, observing, tensors_in
from hotloop._torch.frames import stack_of
from hotloop._torch.hooks import first_after_step
from hotloop._torch.places import address_of
from hotloop._torch.scaler import scaled_steps
from hotloop._torch.sharded import Sharded
from hotloop.errors import describe

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from hotloop.step.state.holdings import Holdings

Line = tuple[Any, ...]
_NUMBERS = (bool, int)
_PAIR = 2
_PLAIN = (str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
_FEW = 4096
"""Elements of a constant that is compared by content."""


@dataclasses.dataclass(frozen=True)
class Difference:
    """The first operation in which a step differs from its recording, with the line of the user's that runs it."""

    operation: str
    file: str | None = None
    line: int | None = None

    def __str__(self) -> str:
        return self.operation + (f" at {self.file}:{self.line}" if self.file is not None else "")


class OpStream:
    """Notes the operations of one step, or compares them with those of an earlier one.

    Args:
        holdings: what the step is known to change.
        inputs: the tensors among its arguments, in order.
        expected: the lines of an earlier step; None to note them.

    Attributes:
        lines: what was noted.
        difference: the first operation that differs.
    """

    def __init__(
        self, holdings: Holdings, inputs: Sequence[torch.Tensor], expected: Sequence[Line] | None = None
    ) -> None:
        self.lines: list[Line] = []
        self.difference: Difference | None = None
        self._holdings, self._expected = holdings, expected
        self._origins: dict[int, Any] = {}
        """Where memory comes from, by address."""
        for name, one in holdings.gradients().items():
            if one is not None:
                self._origins[address_of(one)] = f"the gradient of {name}"
        for name, one in holdings.buffers().items():
            if name.endswith("n_averaged"):  # of an average: it is on the host, or moved to the device by a recording
                self._origins[address_of(one)] = f"buffer {name}"
        for place, one in enumerate(inputs):
            self._origins[address_of(one)] = f"argument {place}"
        self._optimizers = {id(one): name for name, one in holdings.optimizers.items()}
        self._sharded = Sharded(holdings.modules.values())
        self._given: set[int] = set()
        self._number = self._stepping = 0

    def run(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation and note it."""
        line = self._ours(self.before, operation, args, kwargs)
        result = operation(*args, **kwargs)
        self._ours(self.after, line, result)
        return result

    def _ours(self, note: Callable[..., Any], *args: Any) -> Any:
        """Call what is ours amid the user's step: where it fails, the step goes on, and its recording is dropped."""
        try:
            return note(*args)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is none of the user's
            self.difference = Difference(f"hotloop failed as it looked at an operation ({describe(error)})")
            return None

    def before(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Line | None:
        """Describe an operation that is about to run; None where its details do not matter."""
        if self.difference is not None:
            return None
        self._given.clear()
        described = self._described(args)
        if self._stepping:  # an optimizer's kernels: `Frozen` looks at its settings and state
            return None
        if operation is torch.ops.aten.lift_fresh.default:
            return operation, _content(args[0])
        return operation, described, tuple((name, self._part(value)) for name, value in kwargs.items())

    def after(self, line: Line | None, result: Any) -> None:
        """Note the operation that has run, and where its results come from."""
        if self.difference is not None:
            return
        fresh = line is not None and line[0] is torch.ops.aten.lift_fresh.default
        number = -1 if line is None else self._number
        for place, one in enumerate(tensors_in(result)):
            address = address_of(one)
            if address and (fresh or address not in self._given):
                self._origins[address] = number, place
        if line is not None:
            self._take(line)

    def _take(self, line: Line) -> None:
        place, self._number = self._number, self._number + 1
        if self._expected is None:
            self.lines.append(line)
        elif place >= len(self._expected):
            self._differs(f"{_name(line)}, which the recording does not have")
        elif line != self._expected[place]:
            self._differs(_change(self._expected[place], line))

    def finish(self) -> Difference | None:
        """Return what differs, once the step has ended."""
        if self._expected is not None and self.difference is None and self._number < len(self._expected):
            self.difference = Difference(f"{_name(self._expected[self._number])} is left out")
        return self.difference

    def _differs(self, what: str) -> None:
        self.difference = Difference(what, *(stack_of(inspect.currentframe()).own or (None, None)))

    def _described(self, values: Any) -> tuple[Any, ...]:
        return tuple([self._part(value) for value in values])

    def _part(self, value: Any) -> Any:
        """Describe an argument of an operation."""
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        kind = type(value)
        if kind is float:
            return repr(value)
        if kind in _NUMBERS:
            return kind, value
        if kind is list or kind is tuple:
            return self._described(value)
        return value if isinstance(value, _PLAIN) else kind.__name__

    def _tensor(self, tensor: torch.Tensor) -> tuple[Any, ...]:
        if tensor.layout != torch.strided:
            return tensor.layout, tensor.dtype, tensor.shape
        address = address_of(tensor)
        self._given.add(address)
        geometry = tensor.shape, tensor.stride(), tensor.storage_offset()
        return self._origin(address), tensor.dtype, *geometry, tensor.requires_grad

    def _origin(self, address: int) -> Any:
        """Say where memory comes from.

        FSDP2 takes and gives back memory beside all operations, which may lie where a result has lain: with it, only
        arguments and gradients are told apart.
        """
        origin = self._origins.get(address, address)
        return origin if not self._sharded or isinstance(origin, str) else "other memory"

    def begins(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Note that an optimizer steps; its operations are not compared."""
        if not self._stepping and self.difference is None:
            self._take((f"the step of {self._optimizers.get(id(optimizer), type(optimizer).__name__)}",))
        self._stepping += 1

    def ends(self, *_: Any) -> None:
        """Note that an optimizer has stepped."""
        self._stepping -= 1

    @contextlib.contextmanager
    def stepping(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """Note that a GradScaler takes or skips an optimizer's step: a recording decides that on the device."""
        self.begins(optimizer)
        try:
            yield
        finally:
            self.ends()

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        """Note the operations of the block, and which optimizers step in it."""

        def scaled(optimizer: torch.optim.Optimizer, step: Callable[[], Any], found: torch.Tensor) -> Any:
            with self.stepping(optimizer):
                return None if found.item() > 0 else step()

        with contextlib.ExitStack() as stack:
            for one in self._holdings.optimizers.values():
                stack.callback(one.register_step_pre_hook(self.begins).remove)
                stack.callback(first_after_step(one, self.ends).remove)
            stack.enter_context(scaled_steps(scaled))
            stack.enter_context(observing(self.run))
            yield


def _content(constant: torch.Tensor) -> Any:
    """Return what a constant holds; of a large one its kind."""
    kind = constant.dtype, constant.shape
    if constant.numel() > _FEW or constant.is_meta:
        return kind
    held = constant.detach().reshape(-1).contiguous().view(torch.uint8)
    return *kind, bytes(held.tolist())


def _name(line: Line) -> str:
    return line[0] if isinstance(line[0], str) else name_of(line[0])


def _change(before: Line, now: Line) -> str:
    """Say how two lines differ."""
    name = _name(now)
    if before[0] != now[0]:
        return f"{name} in place of {_name(before)}"
    pairs = zip(_flat(before[1:]), _flat(now[1:]), strict=False)
    one, other = next(((one, other) for one, other in pairs if one != other), (None, None))
    if isinstance(one, str | float) and isinstance(other, str | float):
        return f"{name}: {one} became {other}"
    return f"{name} computes with other tensors or numbers"


def _flat(parts: Any) -> Iterator[Any]:
    for part in parts:
        if isinstance(part, tuple) and len(part) == _PAIR and part[0] in _NUMBERS:
            yield str(part[1])
        elif isinstance(part, tuple):
            yield from _flat(part)
        else:
            yield part

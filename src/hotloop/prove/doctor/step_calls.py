"""Observes which linear layers and which attention an eager step calls, and in which dtype it multiplies matrices.

torch's modes for functions and for operations see the calls, so layers of any class are found. Nothing is timed here.
"""

from __future__ import annotations

import collections
import contextlib
import inspect
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn import functional as F  # noqa: N812 - torch's own custom
from torch.overrides import TorchFunctionMode

from hotloop._torch.autograd import in_backward
from hotloop._torch.dispatch import name_of, observing, tensors_in
from hotloop._torch.frames import stack_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    Place = tuple[str, int]

_PRODUCTS = ("aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm")
_MATMULS = (torch.matmul, torch.mm, torch.Tensor.matmul, torch.Tensor.mm, torch.Tensor.__matmul__)
_SCORES, _WEIGHTS = "scores", "weights"
_KEEPING = ("mul", "div", "add", "sub", "masked_fill", "where", "_to_copy", "clone", "native_dropout")
"""Operations that scale, mask, convert or drop what they take: scores of attention remain scores."""
_HEADS = 3
"""Dimensions that attention's weights have at least: heads, queries, keys."""


class Layer(NamedTuple):
    """A call of `F.linear`, or a product with a parameter's transpose, by everything that its time depends on.

    ``weight`` is the parameter's ``id``.
    """

    weight: int
    rows: int
    inner: int
    outer: int
    bias: bool
    dtype: torch.dtype
    weight_dtype: torch.dtype
    autocast: torch.dtype | None
    backward: bool


class Attention(NamedTuple):
    """Attention that a step computes by products and a softmax, by everything that its time depends on."""

    heads: int
    queries: int
    keys: int
    width: int
    dtype: torch.dtype
    backward: bool


class StepCalls(TorchFunctionMode):
    """The calls of one step.

    Args:
        device: where the models are.

    Attributes:
        linears: how often each call of a linear layer was made.
        manual: how often attention was computed by products and a softmax.
        products: the dtypes in which matrices were multiplied on the device.
        places: the first line of the program for each kind of attention that was found: ``manual``; ``backends``,
            where a kernel of `F.scaled_dot_product_attention` was switched off; ``weights``, where
            `nn.MultiheadAttention` returned its weights.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self.linears: collections.Counter[Layer] = collections.Counter()
        self.manual: collections.Counter[Attention] = collections.Counter()
        self.products: set[torch.dtype] = set()
        self.places: dict[str, Place | None] = {}
        self._in_attention = False
        self._stages: dict[int, str] = {}

    @contextlib.contextmanager
    def observe(self) -> Iterator[None]:
        """Observe the step that the block runs."""
        with observing(self._operation), self:
            yield

    def __torch_function__(
        self, function: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function is F.linear:
            self._note_linear(*args, **kwargs)
        elif function in _MATMULS and len(args) > 1 and (weight := _transposed_parameter(args[1])) is not None:
            self._note_linear(args[0], weight)
        elif function in (F.scaled_dot_product_attention, F.multi_head_attention_forward):
            return self._attend(function, args, kwargs)
        return function(*args, **kwargs)

    def _note_linear(self, input: torch.Tensor, weight: torch.Tensor, bias: Any = None) -> None:  # noqa: A002 - torch's
        kind = input.device.type
        layer = Layer(
            weight=id(weight),
            rows=input.numel() // max(1, input.shape[-1]),
            inner=input.shape[-1],
            outer=weight.shape[0],
            bias=bias is not None,
            dtype=input.dtype,
            weight_dtype=weight.dtype,
            autocast=torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None,
            backward=torch.is_grad_enabled() and weight.requires_grad,
        )
        self.linears[layer] += 1

    def _attend(self, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run attention of torch's own; what it is made of is not the program's."""
        if function is F.multi_head_attention_forward and kwargs.get("need_weights", True):
            self._note_place("weights")
        elif kernels_off(self._device):
            self._note_place("backends")
        before, self._in_attention = self._in_attention, True
        try:
            return function(*args, **kwargs)
        finally:
            self._in_attention = before

    def _note_place(self, kind: str) -> None:
        if kind not in self.places:
            self.places[kind] = stack_of(inspect.currentframe()).own

    def _operation(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = operation(*args, **kwargs)
        name = name_of(operation)
        if name in _PRODUCTS and args[-1].device.type == self._device.type:
            self.products.add(args[-1].dtype)
        if not self._in_attention and not in_backward():
            self._follow(name, args, result)
        return result

    def _follow(self, name: str, args: tuple[Any, ...], result: Any) -> None:
        """Follow a product of queries and keys by its memory, through the softmax into the product with values."""
        made = next(tensors_in(result), None)
        if made is None or made.layout is not torch.strided:
            return
        stage = next((self._stages[one.data_ptr()] for one in tensors_in(*args) if self._is_known(one, made)), None)
        if name == "aten._softmax":
            whole = made.dim() >= _HEADS and args[1] in (-1, made.dim() - 1)
            self._stages = {} if stage != _SCORES or not whole else {made.data_ptr(): _WEIGHTS}
        elif name == "aten.bmm" and self._stages.get(args[0].data_ptr()) == _WEIGHTS:
            weights, values = args[:2]
            heads, queries, keys = weights.shape
            found = Attention(heads, queries, keys, values.shape[-1], weights.dtype, torch.is_grad_enabled())
            self.manual[found] += 1
            self._note_place("manual")
        elif name in ("aten.bmm", "aten.baddbmm"):
            self._stages[made.data_ptr()] = _SCORES
        elif stage is not None and name.removeprefix("aten.").rstrip("_") in _KEEPING:
            self._stages[made.data_ptr()] = stage

    def _is_known(self, tensor: torch.Tensor, made: torch.Tensor) -> bool:
        alike = tensor.layout is torch.strided and tensor.numel() == made.numel()
        return alike and tensor.data_ptr() in self._stages


def _transposed_parameter(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the parameter of two dimensions that a tensor is the transpose of; None where it is another tensor.

    A head that shares the weight of its embedding is often written ``x @ embedding.weight.T``.
    """
    above = tensor.grad_fn.next_functions if tensor.grad_fn is not None else ()
    weight = getattr(above[0][0], "variable", None) if above else None
    if weight is None or weight.dim() != 2 or weight.data_ptr() != tensor.data_ptr():  # noqa: PLR2004 - a matrix
        return None
    flipped = (tensor.shape, tensor.stride()) == (weight.shape[::-1], weight.stride()[::-1])
    return weight if flipped else None


def kernels_off(device: torch.device) -> bool:
    """Return whether a fused kernel of `F.scaled_dot_product_attention` is switched off that a device has."""
    cuda: Any = torch.backends.cuda  # its functions have no types
    if device.type == "cpu":
        return not cuda.flash_sdp_enabled()  # the flag is the CPU's as well
    return not (cuda.flash_sdp_enabled() and cuda.mem_efficient_sdp_enabled() and cuda.cudnn_sdp_enabled())

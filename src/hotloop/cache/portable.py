"""Pickles a module or its arguments without their tensors' contents, for a child process of our own to build anew.

Parameters get small random values there. Every other tensor of up to 64 KiB travels by value, since a forward may
branch on it (a mask, a table of positions, a counter); larger ones are random within the range they had.
"""

from __future__ import annotations

import dataclasses
import io
import pickle
import types
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

BY_VALUE_BYTES = 64 * 1024
_PICKLE_BYTES = 64 * 2**20
"""Of one pickle, beyond which a module holds data of its own."""
_SPREAD = 0.02
"""The standard deviation of random values: they neither vanish nor overflow in half precision."""
_SLICE_OF = 4
"""A tensor that uses less than this part of its storage gets one of its own: a batch sliced out of a whole data set."""
_ALIGNMENT = 64
_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)
_MARKS = ("dynamo", "specialize_on")
"""What torch.compile's mark functions (`mark_dynamic`, ...) leave on a tensor."""


class BackgroundUnavailableError(Exception):
    """A background compile is not possible; the message is the reason, for people."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StorageSpec:
    """Memory that one or several tensors share: its size, and its contents or the range of them."""

    nbytes: int
    device: str
    dtype: torch.dtype
    value: torch.Tensor | None
    low: int
    high: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """A tensor without contents; ``storage`` is the index of its `StorageSpec`, ``offset`` in elements."""

    storage: int
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    leaf: bool
    parameter: bool
    inference: bool
    marks: Mapping[str, Any]


@dataclasses.dataclass
class Tensors:
    """All tensors of one request, each once, so that what was tied stays tied."""

    specs: list[TensorSpec] = dataclasses.field(default_factory=list)
    storages: list[StorageSpec] = dataclasses.field(default_factory=list)

    def bytes_on(self, device: str) -> int:
        """Give the memory that the tensors take on a device (``"cuda:0"``)."""
        return sum(storage.nbytes for storage in self.storages if storage.device == device)


class Packer:
    """Pickles several objects that share tensors.

    Raises:
        BackgroundUnavailableError: from `pack`, where the object cannot be built anew in another process.
    """

    def __init__(self) -> None:
        self.tensors = Tensors()
        self._numbers: dict[int, int] = {}
        self._storages: dict[tuple[str, int], int] = {}
        self._alive: list[torch.Tensor] = []  # an identity counts only while its object lives

    def pack(self, value: Any, what: str) -> bytes:
        """Give the pickle of a value; ``what`` names it in the reason."""
        return _pickled(value, what, self._number)

    def release(self) -> None:
        """Let go of the tensors: what is packed later shares none with what was packed before."""
        self._alive.clear()
        self._numbers.clear()
        self._storages.clear()

    def _number(self, tensor: torch.Tensor) -> int:
        """Give a tensor's place in the list."""
        if (number := self._numbers.get(id(tensor))) is not None:
            return number
        if lacking := _unlike_a_plain_tensor(tensor):
            raise BackgroundUnavailableError(f"a tensor of the model or its arguments {lacking}")
        storage, offset = self._storage(tensor)
        self._alive.append(tensor)
        self._numbers[id(tensor)] = number = len(self.tensors.specs)
        self.tensors.specs.append(
            TensorSpec(
                storage=storage,
                offset=offset,
                shape=tuple(tensor.shape),
                stride=tensor.stride(),
                dtype=tensor.dtype,
                requires_grad=tensor.requires_grad,
                leaf=tensor.is_leaf,
                parameter=isinstance(tensor, torch.nn.Parameter),
                inference=tensor.is_inference(),
                marks={name: value for name, value in vars(tensor).items() if any(mark in name for mark in _MARKS)},
            )
        )
        return number

    def _storage(self, tensor: torch.Tensor) -> tuple[int, int]:
        """Give the storage's number and the tensor's offset in it."""
        memory = tensor.untyped_storage()
        used = _extent(tensor) * tensor.element_size()
        alone = memory.nbytes() > _SLICE_OF * max(used, BY_VALUE_BYTES)
        key = (str(tensor.device), memory.data_ptr())
        if not alone and key[1] and key in self._storages:
            return self._storages[key], int(tensor.storage_offset())
        number = len(self.tensors.storages)
        if alone:  # as far off the start of an aligned block as it was
            offset = int(tensor.storage_offset()) % _ALIGNMENT
            flat = tensor.detach().as_strided((_extent(tensor),), (1,))
            nbytes = used + offset * tensor.element_size()
            value = None
        else:
            offset, nbytes = int(tensor.storage_offset()), memory.nbytes()
            flat = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(memory)
            small = nbytes <= BY_VALUE_BYTES and not isinstance(tensor, torch.nn.Parameter)
            value = flat.cpu().clone() if small and tensor.device.type != "meta" else None
            self._storages[key] = number
            flat = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(memory)
        low, high = (0, 0) if value is not None else _range(flat)
        self.tensors.storages.append(
            StorageSpec(nbytes=nbytes, device=str(tensor.device), dtype=tensor.dtype, value=value, low=low, high=high)
        )
        return number, offset


def outline(value: Any, what: str) -> bytes:
    """Give what two values have in common that compile alike: all but their tensors' contents.

    Raises:
        BackgroundUnavailableError: as `Packer.pack`.
    """
    return _pickled(value, what, _described)


def unpack(pickled: bytes, built: list[torch.Tensor]) -> Any:
    """Load what `Packer.pack` gave, with the tensors that `build` made."""
    return _Unpickler(io.BytesIO(pickled), built).load()


def build(tensors: Tensors) -> list[torch.Tensor]:
    """Make all tensors, with the layout and ties they had."""
    memories = [_filled(storage) for storage in tensors.storages]
    return [_built(spec, memories[spec.storage]) for spec in tensors.specs]


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, name: Callable[[torch.Tensor], Any]) -> None:
        super().__init__(file, protocol=5)
        self._name = name

    def persistent_id(self, obj: Any) -> Any:
        return self._name(obj) if isinstance(obj, torch.Tensor) else None

    def reducer_override(self, obj: Any) -> Any:
        """Refuse what is pickled by a name that the child would look for in vain."""
        if isinstance(obj, type | types.FunctionType):
            _check_home(obj)
        return NotImplemented


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, built: list[torch.Tensor]) -> None:
        super().__init__(file)
        self._built = built

    def persistent_load(self, pid: int) -> torch.Tensor:
        return self._built[pid]


def _pickled(value: Any, what: str, name: Callable[[torch.Tensor], Any]) -> bytes:
    file = io.BytesIO()
    try:
        _Pickler(file, name).dump(value)
    except BackgroundUnavailableError:
        raise
    except Exception as error:  # whatever a class's own __reduce__ raises is a reason as well
        said = " ".join(str(error).split())
        raise BackgroundUnavailableError(
            f"{what} cannot be pickled: {type(error).__name__}: {said}; {_FACTORY}"
        ) from error
    if file.tell() > _PICKLE_BYTES:
        raise BackgroundUnavailableError(
            f"{what} takes {file.tell() >> 20} MiB without its tensors: it holds data besides its weights; {_FACTORY}"
        )
    return file.getvalue()


def _described(tensor: torch.Tensor) -> tuple[Any, ...]:
    stride = tensor.stride() if tensor.layout == torch.strided else ()
    return (tuple(tensor.shape), stride, str(tensor.dtype), str(tensor.device), tensor.requires_grad)


def _check_home(named: type | types.FunctionType) -> None:
    kind = "class" if isinstance(named, type) else "function"
    name = named.__qualname__
    if "<lambda>" in name:
        raise BackgroundUnavailableError(f"the model holds a lambda of {named.__module__}; {_WAY_OUT}")
    if "<locals>" in name:
        raise BackgroundUnavailableError(
            f"{kind} {name.rpartition('.')[2]} is defined inside {name.partition('.<locals>')[0]}() of "
            f"{named.__module__}; move it to the top of its module, or {_FACTORY}"
        )
    if named.__module__ in {"__main__", "__mp_main__"}:
        raise BackgroundUnavailableError(f"{kind} {name} lives in __main__; {_WAY_OUT}")


_FACTORY = "give Loop(workload='file.py:make')"
_WAY_OUT = f"move it to a module of its own, or {_FACTORY}"


def _unlike_a_plain_tensor(tensor: torch.Tensor) -> str:
    """Give what about a tensor cannot be built anew here, or nothing."""
    if torch.nn.parameter.is_lazy(tensor):
        return "is not initialised yet: run a step first"
    if type(tensor) not in _PLAIN_TYPES:
        return f"is a {type(tensor).__module__}.{type(tensor).__qualname__}, which cannot be made without its contents"
    if tensor.layout != torch.strided or tensor.is_quantized:
        return f"has layout {tensor.layout}, quantized {tensor.is_quantized}: only plain strided tensors can be made"
    return "is a lazy conjugate or negative" if tensor.is_conj() or tensor.is_neg() else ""


def _extent(tensor: torch.Tensor) -> int:
    """Give how many elements a tensor reaches over, from its first to its last."""
    if tensor.numel() == 0:
        return 0
    return 1 + sum(int(size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _range(flat: torch.Tensor) -> tuple[int, int]:
    """Give the least and largest of whole numbers, so that a lookup by random ones stays inside its table."""
    if flat.is_floating_point() or flat.is_complex() or flat.numel() == 0 or flat.device.type == "meta":
        return 0, 0
    if flat.dtype in {torch.uint16, torch.uint32, torch.uint64}:  # torch cannot order these
        flat = flat.to(torch.int64)
    return int(flat.min()), int(flat.max())


def _filled(spec: StorageSpec) -> torch.UntypedStorage:
    memory = torch.empty(spec.nbytes, dtype=torch.uint8, device=spec.device)
    if spec.value is not None:
        memory.copy_(spec.value)
    elif spec.device != "meta":
        size = spec.nbytes // spec.dtype.itemsize
        _randomise(torch.empty(0, dtype=spec.dtype, device=spec.device).set_(memory.untyped_storage())[:size], spec)
    return memory.untyped_storage()


def _randomise(flat: torch.Tensor, spec: StorageSpec) -> None:
    if not (flat.is_floating_point() or flat.is_complex()):
        values = torch.randint(spec.low, spec.high + 1, flat.shape, device=flat.device)
        flat.copy_(values)
    elif flat.element_size() > 1:
        flat.normal_(0, _SPREAD)
    else:  # torch draws no random numbers of 8 bits
        flat.copy_(torch.randn(flat.shape, device=flat.device).mul_(_SPREAD))


def _built(spec: TensorSpec, memory: torch.UntypedStorage) -> torch.Tensor:
    with torch.inference_mode(spec.inference):
        tensor = torch.empty(0, dtype=spec.dtype, device=memory.device)
        tensor.set_(memory, spec.offset, spec.shape, spec.stride)
    if spec.parameter:
        tensor = torch.nn.Parameter(tensor, requires_grad=spec.requires_grad)
    elif spec.requires_grad:
        tensor.requires_grad_()
        if not spec.leaf:  # a forward may write into what is no leaf
            copied = tensor.clone()
            tensor = copied if copied.stride() == tensor.stride() else tensor.view_as(tensor)
    for name, value in spec.marks.items():
        setattr(tensor, name, value)
    return tensor

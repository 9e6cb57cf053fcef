"""Pickles a module or its arguments without their tensors' contents, for a child process of our own to build anew.

Classes and functions that the child cannot import travel by value, with the globals that their code names: those of the
main script or a notebook, those defined inside a function, and lambdas.

Parameters get small random values in the child. Every other tensor of up to 64 KiB travels by value, since a forward
may branch on it (a mask, a table of positions, a counter); larger tensors are random within the range they had.
"""

from __future__ import annotations

import dataclasses
import dis
import importlib
import io
import pickle
import sys
import types
from typing import TYPE_CHECKING, Any

import cloudpickle  # type: ignore[import-untyped]
import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

BY_VALUE_BYTES = 64 * 1024
MAX_BYTES = 64 * 2**20
"""The most that a module, or the arguments of a call, may take without their tensors."""
_USE_FACTORY = "or give Loop(workload='file.py:make')"


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

    def make(self) -> torch.UntypedStorage:
        """Make the memory, with its contents or random ones."""
        memory = torch.empty(self.nbytes, dtype=torch.uint8, device=self.device)
        if self.value is not None:
            memory.copy_(self.value)
        elif self.device != "meta":
            size = self.nbytes // self.dtype.itemsize
            flat = torch.empty(0, dtype=self.dtype, device=self.device).set_(memory.untyped_storage())[:size]
            spread = 0.02  # such values neither vanish nor overflow in half precision
            if not (flat.is_floating_point() or flat.is_complex()):
                flat.copy_(torch.randint(self.low, self.high + 1, flat.shape, device=flat.device))
            elif flat.element_size() > 1:
                flat.normal_(0, spread)
            else:  # torch draws no random numbers of 8 bits
                flat.copy_(torch.randn(flat.shape, device=flat.device).mul_(spread))
        return memory.untyped_storage()


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

    def make(self, memory: torch.UntypedStorage) -> torch.Tensor:
        """Make the tensor on its memory."""
        with torch.inference_mode(self.inference):
            tensor = torch.empty(0, dtype=self.dtype, device=memory.device)
            tensor.set_(memory, self.offset, self.shape, self.stride)
        if self.parameter:
            tensor = torch.nn.Parameter(tensor, requires_grad=self.requires_grad)
        elif self.requires_grad:
            tensor.requires_grad_()
            if not self.leaf:  # a forward may write into a tensor that is no leaf
                copied = tensor.clone()
                tensor = copied if copied.stride() == tensor.stride() else tensor.view_as(tensor)
        for name, value in self.marks.items():
            setattr(tensor, name, value)
        return tensor


@dataclasses.dataclass
class Tensors:
    """All tensors of one request, each once, so that tied tensors stay tied."""

    specs: list[TensorSpec] = dataclasses.field(default_factory=list)
    storages: list[StorageSpec] = dataclasses.field(default_factory=list)

    def bytes_on(self, device: str) -> int:
        """Return the bytes that the tensors take on a device (``"cuda:0"``)."""
        return sum(storage.nbytes for storage in self.storages if storage.device == device)


class Packer:
    """A pickler of several objects that share tensors.

    Raises:
        BackgroundUnavailableError: from `pack`, where the object cannot be built anew in another process.
    """

    def __init__(self) -> None:
        self.tensors = Tensors()
        self._numbers: dict[int, int] = {}
        self._storages: dict[tuple[str, int], int] = {}
        self._alive: list[torch.Tensor] = []  # an identity counts only while its object lives

    def pack(self, value: Any, what: str) -> bytes:
        """Return the pickle of a value; ``what`` names the value in the reason."""
        return _Pickler.dumps(value, what, self._number)

    def release(self) -> None:
        """Drop the tensors: objects that are packed later share none with those packed before."""
        self._alive.clear()
        self._numbers.clear()
        self._storages.clear()

    def _number(self, tensor: torch.Tensor) -> int:
        """Return a tensor's place in the list."""
        if (number := self._numbers.get(id(tensor))) is not None:
            return number
        if obstacle := _obstacle(tensor):
            raise BackgroundUnavailableError(f"a tensor of the model or its arguments {obstacle}")
        storage, offset = self._storage(tensor)
        # What torch.compile's mark functions (`mark_dynamic`, ...) leave on a tensor is part of it.
        marks = {name: value for name, value in vars(tensor).items() if "dynamo" in name or "specialize_on" in name}
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
                marks=marks,
            )
        )
        return number

    def _storage(self, tensor: torch.Tensor) -> tuple[int, int]:
        """Return the storage's number and the tensor's offset in it."""
        memory = tensor.untyped_storage()
        used = _extent(tensor) * tensor.element_size()
        # A batch that is sliced out of a whole data set, say, gets a storage of its own.
        alone = memory.nbytes() > 4 * max(used, BY_VALUE_BYTES)
        key = (str(tensor.device), memory.data_ptr())
        if not alone and key[1] and key in self._storages:
            return self._storages[key], int(tensor.storage_offset())
        number = len(self.tensors.storages)
        if alone:
            offset = int(tensor.storage_offset()) % 64  # as far off the start of an aligned block as it was
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
    """Return a pickle that is equal for values that compile alike: everything but their tensors' contents.

    Raises:
        BackgroundUnavailableError: as `Packer.pack`.
    """

    def describe(tensor: torch.Tensor) -> tuple[Any, ...]:
        stride = tensor.stride() if tensor.layout == torch.strided else ()
        return (tuple(tensor.shape), stride, str(tensor.dtype), str(tensor.device), tensor.requires_grad)

    return _Pickler.dumps(value, what, describe)


def unpack(pickled: bytes, built: list[torch.Tensor]) -> Any:
    """Load a pickle of `Packer.pack`, with the tensors that `build` made."""
    return _Unpickler(io.BytesIO(pickled), built).load()


def build(tensors: Tensors) -> list[torch.Tensor]:
    """Make all tensors, with the layout and ties they had."""
    memories = [storage.make() for storage in tensors.storages]
    return [spec.make(memories[spec.storage]) for spec in tensors.specs]


class _Bounded(io.BytesIO):
    """A file in memory that refuses to grow: a class of the main script may name a whole data set.

    Tensors that such code names count too, though they travel without their contents: the child makes them anew.
    """

    left = MAX_BYTES

    def take(self, nbytes: int) -> None:
        """Count bytes; raise OverflowError where they are too many."""
        self.left -= nbytes
        if self.left < 0:
            raise OverflowError

    def write(self, data: Any, /) -> int:
        self.take(memoryview(data).nbytes)
        return super().write(data)


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    def __init__(self, file: _Bounded, name: Callable[[torch.Tensor], Any]) -> None:
        super().__init__(file, protocol=5)
        self._file, self._name = file, name
        self._counted: set[int] = set()

    @classmethod
    def dumps(cls, value: Any, what: str, name: Callable[[torch.Tensor], Any]) -> bytes:
        """Return the pickle of a value, with ``name(tensor)`` in the place of each tensor."""
        file = _Bounded()
        try:
            cls(file, name).dump(value)
        except BackgroundUnavailableError:
            raise
        except OverflowError as error:
            raise BackgroundUnavailableError(
                f"{what} takes more than {MAX_BYTES >> 20} MiB without its tensors: it holds data besides its weights, "
                f"or its code names them as a global. Keep the data elsewhere, {_USE_FACTORY}"
            ) from error
        except Exception as error:  # whatever a class's own __reduce__ raises is a reason as well
            said = " ".join(str(error).split())
            raise BackgroundUnavailableError(
                f"{what} cannot be pickled: {type(error).__name__}: {said}; keep it out of the model, {_USE_FACTORY}"
            ) from error
        return file.getvalue()

    def persistent_id(self, obj: Any) -> Any:
        return self._name(obj) if isinstance(obj, torch.Tensor) else None

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, types.FunctionType):  # dynamo looks a function's globals up in its module, by name
            known = obj.__globals__
            self.globals_ref.setdefault(id(known), _Globals(known.get("__name__", "__main__")))
        reduced = super().reducer_override(obj)
        if reduced is not NotImplemented and isinstance(obj, types.FunctionType):  # it travels by value
            for name in _global_names(obj.__code__):
                self._file.take(self._data_in(obj.__globals__.get(name)))
        return reduced

    def _data_in(self, value: Any) -> int:
        """Return the bytes of tensors that a global holds and that were not counted yet; weights are no data."""
        if id(value) in self._counted or isinstance(value, torch.nn.Module | type | types.ModuleType):
            return 0
        if isinstance(value, torch.Tensor):
            self._counted.add(id(value))
            return value.numel() * value.element_size()
        if isinstance(value, dict):
            inside: Any = value.values()
        elif isinstance(value, list | tuple | set):
            inside = value
        else:
            inside = getattr(value, "__dict__", {}).values()
        self._counted.add(id(value))
        return sum(map(self._data_in, list(inside)))


def _global_names(code: types.CodeType) -> set[str]:
    """Return the globals that a function's code reads, the functions in it included."""
    inner = (_global_names(one) for one in code.co_consts if isinstance(one, types.CodeType))
    return {one.argval for one in dis.get_instructions(code) if one.opname == "LOAD_GLOBAL"}.union(*inner)


class _Globals(dict[str, Any]):
    """Stands for the globals of a module, of which only those travel that code names."""

    def __init__(self, module: str) -> None:
        super().__init__()
        self._module = module

    def __reduce__(self) -> tuple[Callable[[str], dict[str, Any]], tuple[str]]:
        return globals_of, (self._module,)


def globals_of(name: str) -> dict[str, Any]:
    """Return the globals of a module; of one that cannot be imported, those of an empty module in its place."""
    try:
        return vars(importlib.import_module(name))
    except ImportError:
        module = sys.modules[name] = types.ModuleType(name)
        return vars(module)


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, built: list[torch.Tensor]) -> None:
        super().__init__(file)
        self._built = built

    def persistent_load(self, pid: int) -> torch.Tensor:
        return self._built[pid]


def _obstacle(tensor: torch.Tensor) -> str:
    """Return why a tensor cannot be built anew in another process; empty where it can."""
    if torch.nn.parameter.is_lazy(tensor):
        return "is not initialised yet: run a step first"
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return f"is a {type(tensor).__module__}.{type(tensor).__qualname__}, which cannot be made without its contents"
    if tensor.layout != torch.strided or tensor.is_quantized:
        return f"has layout {tensor.layout}, quantized {tensor.is_quantized}: only plain strided tensors can be made"
    return "is a lazy conjugate or negative" if tensor.is_conj() or tensor.is_neg() else ""


def _extent(tensor: torch.Tensor) -> int:
    """Return how many elements a tensor reaches over in memory, from its first to its last."""
    if tensor.numel() == 0:
        return 0
    return 1 + sum(int(size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _range(flat: torch.Tensor) -> tuple[int, int]:
    """Return the least and largest whole number, so that a lookup by random numbers stays inside its table."""
    if flat.is_floating_point() or flat.is_complex() or flat.numel() == 0 or flat.device.type == "meta":
        return 0, 0
    if flat.dtype in {torch.uint16, torch.uint32, torch.uint64}:  # torch cannot order these
        flat = flat.to(torch.int64)
    return int(flat.min()), int(flat.max())

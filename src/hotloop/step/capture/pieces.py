"""Pieces: the repeated blocks of a loop's models, each captured alone, in a step that cannot be captured whole."""

from __future__ import annotations

import collections
import contextlib
import functools
from typing import TYPE_CHECKING, Any

import torch

from hotloop._torch.module import eager_call, get_entry, set_entry
from hotloop.compiling.apply import block_classes
from hotloop.errors import describe
from hotloop.measure import flatten, signature
from hotloop.step.capture.block_recording import PLAIN, BlockRecording
from hotloop.step.capture.engines import engine_for
from hotloop.step.capture.invariants import Frozen
from hotloop.step.guard.compare import differences

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Iterator

    from hotloop.step.context import Context
    from hotloop.step.guard.compare import Watch

RECORDINGS = 4
"""Recordings of one block, at most: each holds memory."""


def blocks_of(models: Iterable[torch.nn.Module]) -> list[torch.nn.Module]:
    """Return the outermost repeated blocks of models, in order, each once."""
    found: dict[int, torch.nn.Module] = {}
    for model in models:
        classes, inside = block_classes(model), set[int]()
        for part in model.modules():
            name = f"{type(part).__module__}.{type(part).__qualname__}"
            if name in classes and id(part) not in inside:
                found[id(part)] = part
                inside |= {id(child) for child in part.modules()}
    return list(found.values())


class Pieces:
    """The blocks of a loop's models, and their recordings. `in_force` routes the calls of the blocks to them."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._blocks: list[_Block] = []
        self._frozen: Frozen | None = None

    @property
    def recordings(self) -> int:
        """How many recordings there are, of all blocks."""
        return sum(one is not None for block in self._blocks for one in block.recordings.values())

    def __str__(self) -> str:
        """Say how many blocks are captured, and why the others are not."""
        captured = sum(any(block.recordings.values()) for block in self._blocks)
        why = f"; others run as written: {'; '.join(self.left_eager)}" if self.left_eager else ""
        return f"{captured} of {len(self._blocks)} blocks are captured{why}"

    @property
    def left_eager(self) -> list[str]:
        """Why calls of blocks were not recorded, each reason once."""
        return list(dict.fromkeys(why for block in self._blocks for why in block.left_eager))

    def changed(self) -> bool:
        """Return whether parameters or buffers have other memory, or are trained otherwise, than in the recordings."""
        return self._frozen is not None and self._frozen.changed() is not None

    def forget(self) -> None:
        """Let go of everything that was recorded."""
        self._blocks, self._frozen = [], None

    @contextlib.contextmanager
    def in_force(self, kind: Hashable, read: Watch) -> Iterator[None]:
        """Replay the blocks while a step of a kind runs; a call that is new is recorded beside.

        Args:
            kind: the key of the step's call: settings of torch's are in it, which recordings have frozen.
            read: what the step reads in Python, as it is now. The step's own Python may change it between two blocks.
        """
        if self._frozen is None:
            known = [*self._context.holdings.parameters().values(), *self._context.holdings.buffers().values()]
            blocks = blocks_of(self._context.compiled.models.values())
            counts = collections.Counter(id(part) for one in blocks for part in one.modules())
            self._blocks = [_Block(one, self._context.device, known) for one in blocks if get_entry(one) is None]
            for block in self._blocks:
                block.inside = {id(part) for part in block.module.modules() if counts[id(part)] == 1}
                block.inside.discard(id(block.module))
            self._frozen = Frozen(self._context.holdings, {})
        try:
            for block in self._blocks:
                set_entry(block.module, block)
            stands = _Stands(read)  # with the entries, which are attributes too
            owners = {id(holder.owner) for holder in read.reads.holders.values()}
            for block in self._blocks:
                block.begin_step(kind, stands, heard=not owners.isdisjoint(block.inside))
            yield
        finally:
            for block in self._blocks:
                set_entry(block.module, None)


class _Stands:
    """Returns, when it is called, whether what a step reads in Python is what it was when this was made."""

    def __init__(self, read: Watch) -> None:
        self._read = read
        self._found = self._last = read.now()
        self._same = True

    def __call__(self) -> bool:
        if (now := self._read.now()) is not self._last:
            self._last, self._same = now, not differences(self._found, now)
        return self._same


class _Block:
    """One block: runs its calls by their recordings, or eagerly.

    Attributes:
        recordings: by key; None for a call that cannot be recorded.
        left_eager: why calls were not recorded.
        inside: the modules in it that are in no other block, by identity.
    """

    def __init__(self, module: torch.nn.Module, device: torch.device, known: list[torch.Tensor]) -> None:
        self.module, self._device, self._known = module, device, known
        self.recordings: dict[Hashable, BlockRecording | None] = {}
        self.left_eager: list[str] = []
        self.inside: set[int] = set()
        self._kind: Hashable = None
        self._heard = False
        """Whether it ran in the audit, so that what it reads in Python is watched."""
        self._stands: Callable[[], bool] = bool
        """Whether what the step reads in Python is what it was when the step began."""

    def begin_step(self, kind: Hashable, stands: Callable[[], bool], *, heard: bool) -> None:
        """Note that a step begins: what the last one left without a backward will get none."""
        self._kind, self._stands, self._heard = kind, stands, heard
        for recording in self.recordings.values():
            if recording is not None:
                recording.waits = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block; a call that is new is recorded beside, and runs eagerly."""
        eagerly = functools.partial(eager_call, self.module, *args, **kwargs)
        leaves, structure = flatten((args, kwargs))
        if not torch.is_grad_enabled() or not self._stands():
            return eagerly()
        if (other := next((leaf for leaf in leaves if not self._takes(leaf)), None)) is not None:
            self._leave(f"it takes an argument of type {type(other).__name__} that no recording can hold")
            return eagerly()
        if not self._heard:
            self._leave("it did not run in the step that was observed")
            return eagerly()
        key = (self._kind, signature(args, kwargs), *self._modes())
        if key not in self.recordings:
            if len(self.recordings) < RECORDINGS:
                self.recordings[key] = self._record(leaves, structure)
            return eagerly()
        recording = self.recordings[key]
        return eagerly() if recording is None or recording.waits else recording.run(leaves)

    def _takes(self, leaf: Any) -> bool:
        """Return whether a recording can take an argument: a plain value, or a tensor on its device."""
        if isinstance(leaf, torch.Tensor):
            return leaf.device == self._device and leaf.layout == torch.strided and type(leaf) is torch.Tensor
        return isinstance(leaf, PLAIN)

    def _modes(self) -> tuple[Any, ...]:
        kind = self._device.type
        autocast = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        return *autocast, tuple(part.training for part in self.module.modules())

    def _record(self, leaves: list[Any], structure: Any) -> BlockRecording | None:
        engine = engine_for(self._device)  # one for each recording: see `BlockRecording`
        assert engine is not None
        try:
            return BlockRecording(self.module, engine, self._device, (leaves, structure), self._known)
        except Exception as error:  # noqa: BLE001 - whatever it is, the block runs eagerly, and raises it if it is its own
            self._leave(describe(error))
            return None

    def _leave(self, why: str) -> None:
        if why not in self.left_eager:
            self.left_eager.append(why)

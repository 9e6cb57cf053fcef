"""The trace of an audit: one real eager step, observed operation by operation before it is captured for the first time.

The trace finds what a capture does not allow, with the user's line; tensors that the step writes and nobody named;
whether the step reads the gradients that exist at its start; and which optimizers it steps.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import inspect
import linecache
from typing import TYPE_CHECKING, Any

import torch

from hotloop._torch.autograd import in_backward
from hotloop._torch.checks import checks_left_out
from hotloop._torch.dispatch import (
    draws_elsewhere,
    draws_random,
    drops_in_rnn,
    is_higher_order,
    name_of,
    observing,
    tensors_in,
    user_place,
    written_by,
)
from hotloop._torch.fake import version_of
from hotloop._torch.frames import shown, stack_of
from hotloop._torch.graphs import is_own_file
from hotloop._torch.hooks import first_after_step
from hotloop._torch.host_constants import FEW, MOST_BYTES, room_for
from hotloop._torch.host_reads import host_read
from hotloop._torch.places import Stretches, address_of, whole_memory
from hotloop._torch.scaler import scaled_steps
from hotloop._torch.scripted import is_scripted
from hotloop._torch.sharded import Sharded, shard_of
from hotloop._torch.thread_patch import replaced
from hotloop.diagnose.host_sync import IN_A_SCALER, SCALED, spared_by
from hotloop.diagnose.sized_results import remedy_of
from hotloop.interrupts import interruptible
from hotloop.step.audit.averaged_model import answered
from hotloop.step.audit.findings import Look
from hotloop.step.audit.host_side import is_apart, lies_on_host, made_of, moved_by_copies
from hotloop.step.audit.values import not_strided, sparse_gradients
from hotloop.step.naming import with_article
from hotloop.step.obstacle import DRAW_FROM_TORCH, INTO_IT, Obstacle
from hotloop.step.state.holdings import Holdings, Memory
from hotloop.step.state.rng_usage import drawn_by
from hotloop.step.state.streams import Streams
from hotloop.step.watch.stream import OpStream

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch.optim.swa_utils import AveragedModel

    from hotloop.step.audit.findings import AuditFindings
    from hotloop.step.watch.stream import Line

_MATRIX_PRODUCTS = frozenset(
    f"aten.{name}"
    for name in (
        "mm",
        "addmm",
        "bmm",
        "baddbmm",
        "convolution",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
    )
)
_MOVE_IT_OUT = "move it out of the step: return the tensor, and read it outside the step, every so many steps"
_COPY_IT_OUT = "return the tensor, and copy it outside the step"
_MAKE_IT = "make it on the device (torch.full, arange, zeros with device=...), or before the first step"
_NO_MEMORY = ", whose class does not tell which tensors it holds, so that no copy of it can be put back"
_KNOWN_PARTS = "give its class __tensor_flatten__, as torch.compile asks of it too; or write into a plain tensor"
_COPIES = ("aten._to_copy", "aten.copy_")
_CALLS_FUNCTIONS = "an operator of torch's that calls functions runs uncompiled, and no recording is sure of it"
_COMPILE_IT = (
    "compile the function that calls it (flex_attention = torch.compile(flex_attention)), or train in a compiled tier "
    'without a graph: run="full"'
)
_STRANGE_STATE = "the step sets the random state to one that it did not read itself, which a replay would do again"
_READ_IT = "read the state in the step (torch.random.fork_rng), or draw these numbers before the step and pass them"
_MOVE_IT = (
    "move it to the device before the first step (register_buffer moves with its module), or pass it as an argument"
)


def trace_step(
    holdings: Holdings,
    device: torch.device,
    inputs: list[torch.Tensor],
    run: Callable[[], Any],
    look: Look | None = None,
) -> tuple[Any, AuditFindings]:
    """Run a step eagerly and observe it; return its result and what was found. The step is real: its changes stay.

    Args:
        holdings: what the step is known to change.
        device: where it would be captured; operations that leave it are obstacles there.
        inputs: its tensor arguments.
        run: the step.
        look: what is seen goes there, also of a step that raises.
    """
    look = look or Look()
    # First: a count that it brings to the device is one of the tensors that the step is known to change.
    with as_audited(holdings, device) as waiting:
        with holdings.still():
            trace = OpTrace(holdings, device, inputs, look)
        with observing(trace.operation), trace.following():
            result = interruptible(run)
        look.seen.begins = any(int(average.n_averaged) for average in waiting)
    seen = look.seen
    if seen.stopped:
        return result, seen
    seen.updated, seen.altered, seen.stream = trace.updated(), trace.altered(), trace.stream.lines
    seen.obstacles += [*trace.moved(), *not_strided(holdings), *sparse_gradients(holdings, trace.sparse)]
    return result, seen


@contextlib.contextmanager
def as_audited(holdings: Holdings, device: torch.device) -> Iterator[list[AveragedModel]]:
    """Let the block take the path of an audit, so that its operations can be compared with an audit's.

    Yields:
        the averages of weights that have not begun yet.
    """
    multithreading = torch.autograd.set_multithreading_enabled(mode=False)  # in the order in which they are launched
    with multithreading, checks_left_out(), answered(holdings.modules, device) as waiting, moved_by_copies(device):
        yield waiting


class OpTrace:
    """Watches the operations of one step as they run, and writes down what matters to a capture."""

    def __init__(self, holdings: Holdings, device: torch.device, inputs: list[torch.Tensor], look: Look) -> None:
        self.seen, self.stream = look.seen, OpStream(holdings, inputs)
        self._holdings, self._device, self._look = holdings, device, look
        self._gradients: dict[int, set[str]] = {}
        """By memory: the gradients in it. FSDP2 lays those of a group into one."""
        for name, one in holdings.gradients().items():
            if one is not None:
                self._gradients.setdefault(_memory(one), set()).add(name)
        known = [*holdings.tensors().values(), *(one for one in holdings.gradients().values() if one is not None)]
        self._kept = Stretches(map(shard_of, known))
        self._known = {_memory(one) for one in known if one.layout != torch.strided}
        """Memory that proofs copy: of sparse tensors, and what this step was found to write."""
        self._inputs = {_memory(one) for one in inputs}
        self._buffers = {_memory(one): name for name, one in holdings.buffers().items()}
        self._counted: set[int] = set()
        """Memory of buffers that the forward has written."""
        self._made: set[int] = set()
        self._parameters = {id(one): name for name, one in holdings.parameters().items()}
        self._updates: dict[str, int] = {}
        self._sharded = Sharded(holdings.modules.values())
        self._places_of = collections.Counter(shard_of(one).data_ptr() for one in holdings.parameters().values())
        """How many parameters begin at one place in memory."""
        self._versions: dict[int, int] = {}
        """How often each parameter had been written when it was last known to be the optimizers' alone."""
        self._untouched = {id(one): version_of(one) for one in holdings.parameters().values()}
        self._written_besides: set[int] = set()
        """Memory that was written while no optimizer stepped."""
        self._altered: set[int] = set()
        """Memory of gradients that was written after an optimizer had found them."""
        self._found: set[int] = set()
        self._stepped_already: set[int] = set()
        """Memory of parameters that an optimizer has stepped."""
        self._gradient_found: dict[int, torch.Tensor] = {}
        self.sparse: set[str] = set()
        """Parameters whose sparse gradient SGD has used: of optimizers that are recorded fused, it alone takes one."""
        self._stepping_now = 0
        self._named = holdings.objects()
        self._had = Memory(list(self._named.values()))
        self._of_arguments = {_memory(one) for one in inputs if self._hosts(one)}
        """Memory on the host that a capture has on the device: arguments, and what was made of them."""
        self._of_outside: set[int] = set()
        """Memory on the host that was made of tensors from outside the step."""
        self._held: list[torch.Tensor] = []
        """Tensors that the step made on the host: let go, another would get their memory, and look like them."""
        self._given_to_script: set[int] | None = None
        """Memory that the TorchScript function which runs was given; None while none runs."""

    def operation(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation, and look at what it reads and writes before and after."""
        if self.seen.stopped:
            return operation(*args, **kwargs)
        ours = self._look.ours
        before = ours(self._before, operation, args, kwargs)
        result = operation(*args, **kwargs)
        ours(self._after, before, (operation, args, kwargs), result)
        return result

    def _before(
        self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Line | None, str, list[torch.Tensor], list[torch.Tensor]]:
        """Look at an operation that comes; gives its line, its name, its tensors, and what it will write into."""
        line = self.stream.before(operation, args, kwargs)
        name, found = name_of(operation), list(tensors_in(*args, *kwargs.values()))
        self.seen.operations += 1
        self.seen.sparse |= any(one.is_sparse or one.is_sparse_csr for one in found)
        if draws_elsewhere(kwargs):
            self._obstacle("the step draws from a torch.Generator of its own", DRAW_FROM_TORCH, not_repeatable=True)
        if name in _MATRIX_PRODUCTS:
            self.seen.matrix_dtypes |= {one.dtype for one in tensors_in(*args) if one.is_floating_point()}
        self._look_before(operation, name, args, kwargs)
        if self._gradients:
            for memory in map(_memory, found):
                self.seen.read_gradients |= self._gradients.get(memory, set())
        if self._stepped_already and not self._stepping_now and torch.is_grad_enabled():
            self.seen.computes_on |= any(one.requires_grad and _memory(one) in self._stepped_already for one in found)
        return line, name, found, list(written_by(operation, args, kwargs))

    def _after(
        self,
        before: tuple[Line | None, str, list[torch.Tensor], list[torch.Tensor]],
        called: tuple[Any, tuple[Any, ...], dict[str, Any]],
        result: Any,
    ) -> None:
        """Look at an operation that has run; the rest of the step may run unobserved."""
        line, name, found, written = before
        self.seen.drawn |= drawn_by(*called, result)
        self.stream.after(line, result)
        self._look_after(name, found, written, result)
        self.seen.stopped |= self._look.ends(self.seen)

    def _look_after(self, name: str, found: list[torch.Tensor], written: list[torch.Tensor], result: Any) -> None:
        given, made = set(map(_memory, found)), list(tensors_in(result))
        fresh = name == "aten.lift_fresh"  # torch.tensor(...) shows only here
        if is_apart(self._device) and (
            (fresh and self._device.type != "cpu") or any(map(self._hosts, (*found, *made)))
        ):
            made_of(found, made, self._device)
            self._look_at_host(name, found, [*made, *written])
            self._held += [one.detach() for one in made if self._hosts(one)]
        self._made |= {memory for one in made if (memory := _memory(one)) not in given or fresh}
        unscales = name.startswith("aten._fused_")  # for a GradScaler: before it uses them
        for one in written:
            memory = _memory(one)
            if not self._stepping_now:
                self._written_besides.add(memory)
            if memory in self._buffers:
                self._note_recount(memory)
            if memory in self._found and not unscales:
                self._altered.add(memory)
            self._wrote(one)

    def _note_recount(self, memory: int) -> None:
        """Note a buffer that the forward has written, and that a checkpoint's recomputation writes once more."""
        if not in_backward():
            self._counted.add(memory)
        elif memory in self._counted and stack_of(inspect.currentframe()).in_checkpoint:
            self.seen.recounted.add(self._buffers[memory])

    def altered(self) -> bool:
        """Return whether a gradient was written after an optimizer had found it."""
        return bool(self._altered)

    def updated(self) -> set[str]:
        """Name the parameters that `AuditFindings.updated` is about, and let go of their gradients: they are large."""
        found = set()
        for optimizer in self._holdings.optimizers.values():
            for one in (one for group in optimizer.param_groups for one in group["params"]):
                held = [one, *tensors_in(*optimizer.state.get(one, {}).values())]
                gradient = self._gradient_found.pop(id(one), None)
                alone = not any(_memory(each) in self._written_besides for each in held)
                alone = (
                    alone
                    and self._places_of[shard_of(one).data_ptr()] == 1
                    and self._versions.get(id(one)) == version_of(one)
                )
                if gradient is not None and alone and _memory(gradient) not in self._altered:
                    found.add(self._parameters[id(one)])  # one that `_finds` knew
        return {name for name in found if self._updates.get(name) == 1}

    def moved(self) -> list[Obstacle]:
        """Name what was given other memory: a recording keeps writing and reading the old one."""
        places = self._had.moved()
        if not places:
            return []
        first = list(self._named)[places[0]]
        others = f", and {len(places) - 1} more tensors" if len(places) > 1 else ""
        return [Obstacle(f"`.data = ` in the step gives {first} other memory{others}", INTO_IT)]

    def _look_before(self, operation: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._stepping_now:  # a captured optimizer is told to stay on the device, another runs outside
            return
        if why := host_read(operation, args, kwargs):
            self._obstacle(why, _MOVE_IT_OUT)
        elif is_higher_order(operation):
            writes = name.endswith("_mutation")  # into its arguments; it has no schema that says into which
            self._obstacle(f"{_CALLS_FUNCTIONS}: {operation.name()}", _COMPILE_IT, not_repeatable=writes)
        elif is_apart(self._device) and name in _COPIES and self._leaves(name, args, kwargs):
            self._obstacle("a tensor is copied to the host", _COPY_IT_OUT)
        if draws_random(operation, args, kwargs):
            self.seen.random_operations += 1
            if drops_in_rnn(operation, args, kwargs):
                self.seen.drops_in_rnn = own_place()

    def _look_at_host(self, name: str, found: Sequence[torch.Tensor], result: Sequence[torch.Tensor]) -> None:
        """Find tensors on the host whose value a capture would read once, for good.

        One without elements has no value. Where it gets some at another step, what fills it is Python state that is
        looked at before a replay, or an argument's shape; a proof sees the rest.
        """
        given = [one for one in found if one.numel()]
        host = {_memory(one) for one in given if self._hosts(one)}
        if self._given_to_script is not None:
            unheard = host - self._given_to_script - self._made
            self._made, self._of_outside = self._made | unheard, self._of_outside - unheard
            self._held += [one.detach() for one in given if _memory(one) in unheard]
        arguments, made = host & self._of_arguments, [one for one in result if one.numel()]
        outside = {one for one in host - arguments if one not in self._made or one in self._of_outside}
        on_device = any(one.device.type == self._device.type and not self._hosts(one) for one in (*given, *made))
        if name == "aten.lift_fresh" and on_device and not self._stepping_now:
            few = all(one.numel() <= FEW for one in made)
            copied = "Python numbers are copied to the device: torch.tensor(..., device=...)"
            self._obstacle(copied, _MAKE_IT, among=self._constants(made) if few else None)
        elif not self._stepping_now and (on_device or arguments):
            if outside:
                self._obstacle(
                    "a tensor on the host that is no argument meets the device: its value is frozen", _MOVE_IT
                )
            elif host - arguments and name in _COPIES:
                kept = name == "aten._to_copy" and not any(one.requires_grad for one in given)
                among = self._constants((*given, *made)) if kept else None
                self._obstacle("a tensor made on the host is copied to the device", _MAKE_IT, among=among)
        fresh = {_memory(one) for one in made if self._hosts(one)}
        self._of_arguments = self._of_arguments - fresh | (fresh if arguments else set())
        self._of_outside = self._of_outside - fresh | (fresh if outside and not arguments else set())
        if name == "aten.lift_fresh":  # of an array, or of a long list: its values are somebody's data
            self._of_outside -= host
            self._of_outside |= {_memory(one) for one in made if self._hosts(one) and one.numel() > FEW}

    def _hosts(self, tensor: torch.Tensor) -> bool:
        return lies_on_host(tensor, self._device)

    def _constants(self, copied: Sequence[torch.Tensor]) -> list[Obstacle] | None:
        """Return what notes that a constant is copied to the device; None where they become too large to be kept.

        Args:
            copied: the constant, in each of its dtypes.
        """
        self.seen.constant_bytes += room_for(max(one.nbytes for one in copied))
        return self.seen.constants if self.seen.constant_bytes <= MOST_BYTES else None

    def _leaves(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if name == "aten.copy_":
            return self._hosts(args[0]) and not self._hosts(args[1])
        target = kwargs.get("device")
        return bool(target is not None and torch.device(target).type == "cpu" and args[0].device.type != "cpu")

    def _wrote(self, tensor: torch.Tensor) -> None:
        memory = _memory(tensor)
        if not tensor.numel():  # a shard of which another process holds all has no memory to know it by
            return
        if memory in self._inputs:
            self._obstacle(
                "the step writes into its own argument", "work on a copy: x = x.clone()", not_repeatable=True
            )
        elif tensor.layout == torch.strided and not (tensor.is_meta or address_of(tensor)):
            self._obstacle(
                f"the step writes into {with_article(type(tensor).__name__)}{_NO_MEMORY}",
                _KNOWN_PARTS,
                not_repeatable=True,
            )
        elif not (memory in self._made or memory in self._known or self._sharded.is_temporary(memory)):
            if tensor.layout == torch.strided and self._kept.hold(tensor):
                return
            self._known.add(memory)
            self.seen.written_found.append(whole_memory(tensor.detach()))

    def _obstacle(
        self, reason: str, hint: str, *, not_repeatable: bool = False, among: list[Obstacle] | None = None
    ) -> None:
        if self.seen.stopped:
            return
        place = user_place()
        if (stack := stack_of(inspect.currentframe())).scaling:
            # A trainer's line that calls the scaler tells its user nothing: the program's own is named.
            reason, hint, place = f"{reason} ({IN_A_SCALER}, as the optimizer is not fused)", SCALED, stack.own
        elif stack.reader is not None and (own := own_place()) not in (None, stack.reader):
            # Nobody can move a library's line: its argument is named, and the line of the program that calls it.
            reason, place = f"{reason} (in {(library := shown(stack.reader))}, which it calls)", own
            hint = spared_by(library) if hint in (_MOVE_IT_OUT, _COPY_IT_OUT) else hint
        elif place is not None:
            hint = remedy_of(reason, linecache.getline(*place)) or hint
        found = self.seen.obstacles if among is None else among
        file, line = place or (None, None)
        if all((one.file, one.line) != (file, line) for one in found):
            found.append(Obstacle(reason, hint, file, line, not_repeatable))

    @contextlib.contextmanager
    def following(self) -> Iterator[None]:
        """Note which optimizers step, and whether the random state is set to one that the step has not read."""
        handles = [
            handle
            for name, optimizer in self._holdings.optimizers.items()
            for handle in (
                optimizer.register_step_pre_hook(self._stepping(name)),
                # what other hooks write is not the optimizer's own
                first_after_step(optimizer, functools.partial(self._look.ours, self._stepped)),
            )
        ]
        try:
            streams = Streams(self._device, lambda: self._obstacle(_STRANGE_STATE, _READ_IT))
            script = (torch.jit.ScriptFunction, "__call__")
            with (
                streams.watching(),
                replaced(*script, self._scripting),
                scaled_steps(self._scaled),
            ):
                yield
        finally:
            for handle in handles:
                handle.remove()

    def _scaled(self, optimizer: torch.optim.Optimizer, step: Callable[[], Any], found: torch.Tensor) -> Any:
        """Take a GradScaler's step or skip it. A recording does not ask the host."""
        self._stepping_now += 1
        try:
            skips = found.item() > 0
        finally:
            self._stepping_now -= 1
        self.seen.skipped |= skips
        with self.stream.stepping(optimizer):
            return None if skips else step()

    def _scripting(self, real: Callable[..., Any]) -> Callable[..., Any]:
        """Note what a TorchScript function is given: what else it meets on the host, it has made."""

        def called(function: Any, *args: Any, **kwargs: Any) -> Any:
            before = self._given_to_script
            self._look.ours(self._gives_to_script, function, tensors_in(*args, *kwargs.values()))
            try:
                return real(function, *args, **kwargs)
            finally:
                self._given_to_script = before

        return called

    def _gives_to_script(self, function: Any, given: Iterator[torch.Tensor]) -> None:
        self._given_to_script = set(map(_memory, given)) if is_scripted(function) else None

    def _stepping(self, name: str) -> Callable[..., None]:
        def stepping(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            self.seen.stepped.append(name)
            self.stream.begins(optimizer)
            self._finds(optimizer)
            if any(callable(one) for one in (*args[1:], *kwargs.values())):
                self._obstacle(
                    "the optimizer runs the model itself, through a closure",
                    "run forward and backward before it, and call optimizer.step() without a closure; one that needs "
                    "it (LBFGS) decides on the host how often it runs the model, and trains with run='eager'",
                )
            self._stepping_now += 1

        return functools.partial(self._look.ours, stepping)

    def _finds(self, optimizer: torch.optim.Optimizer) -> None:
        """Note the gradients that an optimizer is about to use: kept, so that no other tensor gets their memory."""
        for one in (one for group in optimizer.param_groups for one in group["params"] if one.grad is not None):
            # Compiled code writes past the dispatcher.
            name = self._parameters.get(id(one))
            if name is None:  # the step has added it to the optimizer
                continue
            self._updates[name] = self._updates.get(name, 0) + (1 if self._untouched[id(one)] == version_of(one) else 2)
            self._gradient_found[id(one)] = one.grad
            if one.grad.layout != torch.strided and type(optimizer) is torch.optim.SGD:
                self.sparse.add(name)
            self._found.add(_memory(one.grad))

    def _stepped(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._stepping_now -= 1
        self.stream.ends()
        for one in (one for group in optimizer.param_groups for one in group["params"]):
            self._versions[id(one)] = version_of(one)
            self._stepped_already.add(_memory(one))


def own_place() -> tuple[str, int] | None:
    """Return file and line of the innermost frame of the program's own code in the step that is audited."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not trace_step.__code__:
        if is_own_file(frame.f_code.co_filename):
            return frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back
    return None


def _memory(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's memory, which tells tensors apart."""
    tensor = shard_of(tensor)
    return (address_of(tensor) if tensor.layout == torch.strided else 0) or id(tensor)

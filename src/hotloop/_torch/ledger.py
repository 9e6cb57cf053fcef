"""The ledger of private torch names: where each stands, why it is used, what is lost without it, what would replace it.

`private` is the only way to reach one, so a test can hold the ledger against the code, both ways. Attributes of torch's
objects that have no module path are listed as ``Class.attribute`` and used in this room by that attribute alone.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from typing import Any


@dataclasses.dataclass(frozen=True)
class PrivateName:
    """One private name of torch. ``path`` is ``module:attribute``, or ``Class.attribute`` for an object's own."""

    path: str
    why: str
    without: str
    replacement: str = "none"


@dataclasses.dataclass(frozen=True)
class Capability:
    """Something hotloop can do on this torch, or the reason why it cannot."""

    name: str
    available: bool
    reason: str = ""


class CapabilityMissingError(Exception):
    """A private name is not where the ledger says. Callers turn it into a capability that is missing."""


LEDGER: tuple[PrivateName, ...] = (
    PrivateName(
        "torch.distributed.distributed_c10d:_world",
        "the process groups of this process: collectives in any of them must stay paired",
        "a loop does not run in several processes",
    ),
    PrivateName(
        "ProcessGroup._get_sequence_number_for_group",
        "how many collectives were begun: a step that has begun one cannot be repeated by one process alone",
        "a failed step of several processes is never repeated",
    ),
    PrivateName(
        "Backend._set_default_timeout",
        "collectives may wait longer while a process compiles",
        "a process that compiles longer than the group's timeout ends the run",
    ),
    PrivateName("ProcessGroup._get_backend", "what its timeout was, to restore it", "as above"),
    PrivateName("Options._timeout", "what its timeout was, to restore it", "as above"),
    PrivateName(
        "torch.distributed.distributed_c10d:_get_default_store",
        "where a process says why it ends, what a vote came to, and that it is about to compile",
        "a loop does not run in several processes, and a compile there asks nobody",
    ),
    PrivateName(
        "Module._compiled_call_impl",
        "the slot that nn.Module.compile fills; ours is filled with an entry that counts and falls back",
        "nothing can be compiled in place",
        "nn.Module.compile sets it, but only with torch's own callable, and offers no way to take it off",
    ),
    PrivateName(
        "Module._call_impl",
        "the module's call with its hooks, as eager runs it; traced from a root function of our own",
        "nothing can be compiled in place",
    ),
    PrivateName(
        "Node._dynamo_source",
        "where a graph input comes from; kept on the copies of a graph that lower rungs compile",
        "AOTAutograd cannot tell aliased inputs apart on lower rungs",
    ),
    PrivateName(
        "GraphModule._param_name_to_source",
        "the same, for parameters that are attributes of the graph",
        "as above",
    ),
    PrivateName(
        "Tensor._version",
        "how often a tensor was changed in place: a graph is not cut where one piece changes what another made",
        "graphs are not cut into blocks",
    ),
    PrivateName(
        "torch.autograd:_unsafe_preserve_version_counter",
        "a tensor that is put back as it was is no other one: graphs of the program that lead through it stay good",
        "a graph through a weight that a proof has written and put back raises in its backward",
    ),
    PrivateName(
        "Tensor._is_view",
        "whether a gradient is a part of other memory: a step that is undone has to find that part, and no copy of it",
        "gradients are held while a step runs that drops them, beside their copies",
        "Tensor._base, which is as private",
    ),
    PrivateName(
        "torch._guards:detect_fake_mode",
        "the fake values that the compilers of a trace use, for what passes between the pieces of a cut graph",
        "graphs are not cut into blocks",
    ),
    PrivateName(
        "torch._dispatch.python:enable_python_dispatcher",
        "runs operations on fake values without fixing their symbolic sizes, as AOTAutograd does",
        "graphs are not cut into blocks",
    ),
    PrivateName(
        "torch._dynamo.utils:to_fake_tensor",
        "the fake of an input with the dynamic sizes that dynamo chose, as torch's own splitting for DDP makes it",
        "graphs are not cut into blocks",
    ),
    PrivateName(
        "BackwardCFunction._forward_cls",
        "the autograd function whose backward runs the compiled backward graph; it knows what that may write over",
        "a failure while a compiled backward runs is raised raw, without cause and remedy",
    ),
    PrivateName(
        "torch._C._autograd:_get_current_graph_task_keep_graph",
        "tells a backward with retain_graph=True, which compiled code allows on copies of what was saved only",
        "every compiled backward runs on such copies",
    ),
    PrivateName(
        "torch._C:_get_obj_in_tls",
        "the copy of the caller's context, torch's settings among it, that a backward runs in",
        "a compiled backward refuses retain_graph=True, which eager allows",
    ),
    PrivateName(
        "torch._C:_current_graph_task_id",
        "tells a thread that runs a backward, where that context is missing (torch 2.11)",
        "activation checkpointing asks for the random state in a capture there, which fails",
    ),
    PrivateName(
        "torch._C:_len_torch_function_stack",
        "tells how many TorchFunctionModes are in force around a step (torch.device as a context is one)",
        "a replay goes on without a mode, or hooks for saved tensors, that the program enters around a later step",
    ),
    PrivateName(
        "torch._C:_get_function_stack_at",
        "tells which they are",
        "a replay goes on without a mode, or hooks for saved tensors, that the program enters around a later step",
    ),
    PrivateName(
        "torch._C._autograd:_top_saved_tensors_default_hooks",
        "tells which hooks saved tensors pass (save_on_cpu)",
        "a replay goes on without a mode, or hooks for saved tensors, that the program enters around a later step",
    ),
    PrivateName(
        "torch._C._dynamo.guards:TensorGuards",
        "compares shapes, strides and dtypes of all parameters and optimizer state in one call before each replay",
        "each is asked for them, which takes longer",
    ),
    PrivateName(
        "torch._C._functorch:peek_interpreter_stack",
        "tells a call under a transform of torch.func, which dynamo gives up for good: it runs eager, that call alone",
        "one such call leaves the component eager",
    ),
    PrivateName(
        "torch._dynamo.callback:callback_handler",
        "told when a compile starts and ends, in the thread that compiles",
        "no status while compiling; failures of tracing reach the user",
        "torch.compiler has no public callback",
    ),
    PrivateName(
        "torch._dynamo.utils:get_compilation_metrics",
        "typed facts of each compile: file, line, seconds, cache hits, recompile reason, failure",
        "status knows executions only",
    ),
    PrivateName("torch._dynamo.utils:graph_break_reasons", "each graph break with the user's stack", "as above"),
    PrivateName(
        "torch._dynamo.utils:counters",
        "frames seen so far, which moves when the recompile limit is hit, where no callback fires",
        "a recompile limit is only seen by its effect",
    ),
    PrivateName(
        "torch._dynamo:config", "suppress_errors and guards' settings, for the time of a compile only", "as above"
    ),
    PrivateName(
        "torch._dynamo.backends.registry:lookup_backend",
        "the aot_eager backend as a function",
        "no aot_eager rung",
    ),
    PrivateName(
        "torch._dynamo:maybe_mark_dynamic",
        "batches of further sizes, and lengths that vary, are compiled for any size from the first one on",
        "the first further size costs one more compile, as torch's automatic kind does",
        "torch documents torch._dynamo.mark_dynamic, which raises where the code fixes the size",
    ),
    PrivateName(
        "torch._dynamo.eval_frame:reset_code",
        "lets a function be traced again that was given up because the user's own code raised",
        "such a function stays eager",
        "torch.compiler.reset, which throws away everything",
    ),
    PrivateName(
        "torch._dynamo.exc:UncapturedHigherOrderOpError",
        "raised as a compile begins that no graph would come of, and passed on by dynamo: the call runs eager instead",
        "each function of a model that was offloaded after its compile is tried once",
    ),
    PrivateName(
        "torch._dynamo.exc:RestartAnalysis",
        "dynamo's own signal to trace again, which passes through a backend and is no failure",
        "such a graph runs eager",
    ),
    PrivateName("torch._dynamo.exc:SkipFrame", "the same, for a frame that dynamo leaves alone", "as above"),
    PrivateName(
        "torch._dynamo.exc:TorchDynamoException", "tells compile failures from the user's own under fullgraph", ""
    ),
    PrivateName(
        "torch._dynamo.types:FrameExecStrategy",
        "a frame whose compile is put off runs eager once, and is asked about again",
        "in several processes a compile cannot wait until the others wait for it",
    ),
    PrivateName("torch._dynamo.types:FrameAction", "as above", "as above"),
    PrivateName("torch._dynamo.exc:Unsupported", "tells a graph break from a failure under fullgraph", ""),
    PrivateName("torch._dynamo.exc:UserError", "the same, for .item() and data-dependent branches", ""),
    PrivateName("torch._dynamo.exc:TorchRuntimeError", "an error of the user's own operators met while tracing", ""),
    PrivateName(
        "torch._functorch:config",
        "force_non_lazy_backward_lowering: the backward is compiled with the forward, so that it can step down",
        "a backward that fails to compile kills the step",
    ),
    PrivateName(
        "torch:_TorchCompileInductorWrapper",
        "Inductor with a mode and options, checked as torch checks them",
        "no Inductor rung",
        "torch.compile(backend='inductor'), which cannot be one rung among several",
    ),
    PrivateName(
        "torch._dynamo", "looked for before anything is compiled: not every build has it", "everything is eager"
    ),
    PrivateName(
        "torch._inductor.compile_fx:compile_fx",
        "Inductor with a compiler of single graphs that is ours: see the next",
        "no Inductor rung",
    ),
    PrivateName(
        "torch._inductor.compile_fx:compile_fx_inner",
        "its cache hands out backwards that write over what another forward's caller holds: they are told apart",
        "no Inductor rung",
    ),
    PrivateName(
        "torch.compiler:config",
        "the tag of entries in torch's caches; public, and loaded by name like the private ones",
        "as above",
    ),
    PrivateName("torch._inductor.compile_fx", "imported to see whether Inductor works here", "no Inductor rung"),
    PrivateName(
        "torch._dynamo.convert_frame",
        "a module's name in a traceback: the exception passed through tracing, not through code that ran",
        "a bug in dynamo reaches the user under fullgraph and strict",
    ),
    PrivateName(
        "torch.utils._python_dispatch:TorchDispatchMode",
        "sees every operation of one step: what waits on the host, what it writes into, where it draws random numbers",
        "whole steps are not captured",
        "none that also sees what compiled code and backward run",
    ),
    PrivateName(
        "torch:_foreach_copy_",
        "copies the buffers of a model in few launches: 53 BatchNorms in 48 µs, one by one in 700",
        "saving the state of a step costs more",
    ),
    PrivateName(
        "torch:_foreach_clone",
        "copies the gradients that a CUDA graph hands out in few launches, its memory included (torch 2.13)",
        "the memory of each copy is asked for from Python",
    ),
    PrivateName(
        "torch:_foreach_sub",
        "finds which of thousands of tensors differ in few launches: a proof step of InceptionV3 took twice as long",
        "proofs take longer",
    ),
    PrivateName("torch:_foreach_norm", "as torch:_foreach_sub", "proofs take longer"),
    PrivateName("torch:_foreach_mul", "as torch:_foreach_sub", "proofs take longer"),
    PrivateName(
        "torch._C:_cuda_endAllocateToPool",
        "tells the allocator that a capture is over which failed half-way",
        "after a failed capture, memory that crosses streams is kept back",
        "torch.cuda.CUDAGraph.capture_end, which raises before it does so",
    ),
    PrivateName(
        "torch._C:_cuda_releasePool",
        "gives back the use of its memory pool that such a capture has counted",
        "a failed capture keeps its memory for good",
        "torch.cuda.CUDAGraph.reset, which does so only after a capture that ended",
    ),
    PrivateName(
        "torch._C:_override_stale_capture_stream",
        "what torch.autograd.graph.set_override_stale_capture_stream was set to, to restore it (torch 2.13)",
        "the setting of a user is lost after a capture",
    ),
    PrivateName("OpOverload._schema", "which arguments an operation writes into", "as above"),
    PrivateName(
        "torch._inductor.codecache:CppCodeCache",
        "forgets libraries that failed on a broken precompiled header, so that they are compiled again without it",
        "the process that meets such a header runs eagerly; the next one finds it removed",
    ),
    PrivateName("torch._inductor.codecache:CppPythonBindingsCodeCache", "as above", "as above"),
    PrivateName(
        "torch._inductor:config",
        "a user's own changes to it, which a child that fills the compile cache must have as well; whether it caches",
        "no compile in the background",
    ),
    PrivateName(
        "torch._inductor.config",
        "read as source, never imported: the options that this torch knows, for the table and for 'did you mean'",
        "options are checked by torch alone",
        "torch._inductor.list_options, which must import torch",
    ),
    PrivateName(
        "torch._inductor.cudagraph_trees:MarkStepBox",
        "the counter of marked steps: a mark between a forward and its backward loses what the forward saved",
        "CUDA graphs inside torch.compile are neither emulated nor safe",
        "torch.compiler.cudagraph_mark_step_begin moves it, and nothing reads it",
    ),
    PrivateName(
        "torch._dynamo.mutation_guard:GenerationTracker",
        "counts calls of compiled code, which begin a generation where nobody marks steps",
        "CUDA graphs are not emulated",
    ),
    PrivateName(
        "torch._inductor.cudagraph_trees:get_obj",
        "the CUDA graphs of a thread: which memory is theirs, what of it is held, whether a forward waits",
        "CUDA graphs inside torch.compile are neither emulated nor safe",
    ),
    PrivateName("torch._inductor.cudagraph_trees:local", "where a thread's are kept", "as above"),
    PrivateName(
        "torch._inductor.config:triton",
        "the sizes that CUDA graphs are used for: none while a backward runs that keeps its graph, where they raise",
        "a backward with retain_graph=True raises under CUDA graphs, and leaves the process unsound",
        "torch._inductor.config.triton.cudagraph_capture_sizes is documented for whole runs",
    ),
    PrivateName(
        "torch._inductor.cudagraph_trees:reset_cudagraph_trees",
        "frees the CUDA graphs where torch forgets what it compiled, which it asks its own backend for only",
        "torch.compiler.reset keeps the memory of CUDA graphs",
    ),
    PrivateName(
        "CUDAGraphNode._is_cuda_graph_recorded_tensor", "tells whether a tensor lies in their memory", "as above"
    ),
    PrivateName("CUDAGraphNode._path_from_root", "the graphs that ran in this generation, in order", "as above"),
    PrivateName(
        "UntypedStorage._cdata",
        "identifies the memory of a tensor while it is alive",
        "an output that is an input cannot be told from a new one",
    ),
    PrivateName(
        "Generator._cdata",
        "tells torch's own generators, which an operation names by another object each time",
        "a step that draws from a generator of its own is declined without its line",
    ),
    PrivateName(
        "torch.multiprocessing.reductions:StorageWeakRef",
        "tells whether memory is alive without keeping it so; no private name, but documented nowhere",
        "CUDA graphs are not emulated, and what is held of them is not listed",
    ),
    PrivateName(
        "UntypedStorage._new_with_weak_ptr",
        "overwrites what a CUDA graph would have overwritten, without keeping it alive until then",
        "CUDA graphs are not emulated",
    ),
    PrivateName(
        "torch._C:_will_engine_execute_node",
        "tells a backward that hands the gradient of a leaf to its caller, who may hold it",
        "gradients that are added to existing ones are copied first",
    ),
    PrivateName(
        "torch._subclasses.fake_tensor:FakeTensor", "a tensor without memory has nothing to be held", "as above"
    ),
    PrivateName(
        "torch._dynamo.backends.common:aot_autograd",
        "forward, backward and inference as graphs of their own, as Inductor gets them",
        "CUDA graphs are not emulated",
    ),
    PrivateName("Callable._boxed_call", "says that a compiled graph takes its inputs as a list", "as above"),
    PrivateName(
        "torch._guards:TracingContext",
        "which inputs of a graph are parameters and buffers (writing into those does not prevent a capture), and what "
        "a backward that is compiled may write over",
        "the emulation takes a graph that updates buffers for one that is not captured",
    ),
    PrivateName(
        "Module._parameters",
        "another parameter, buffer or child under a name is not the one that a recording holds",
        "a hook or a parameter that is set after a capture is not noticed",
    ),
    PrivateName(
        "Module._buffers",
        "as above",
        "as above",
    ),
    PrivateName(
        "Module._modules",
        "as above",
        "as above",
    ),
    PrivateName(
        "Module._forward_hooks",
        "a hook runs Python: one that is added after a capture is in no replay",
        "as above",
    ),
    PrivateName(
        "Module._forward_pre_hooks",
        "as above",
        "as above",
    ),
    PrivateName(
        "Module._backward_hooks",
        "as above, and those of a tensor's",
        "as above",
    ),
    PrivateName(
        "Module._backward_pre_hooks",
        "as above",
        "as above",
    ),
    PrivateName(
        "Tensor._post_accumulate_grad_hooks",
        "the hooks that run once a gradient is there, which a recording holds as they were",
        "as above",
    ),
    PrivateName(
        "Optimizer._optimizer_step_pre_hooks",
        "the hooks of one optimizer's steps, which a recording holds as they were",
        "as above",
    ),
    PrivateName(
        "Optimizer._optimizer_step_post_hooks",
        "as above",
        "as above",
    ),
    PrivateName(
        "torch.nn.modules.module:_global_forward_hooks",
        "the hooks of every module, which a recording holds as they were",
        "as above",
    ),
    PrivateName(
        "torch.nn.modules.module:_global_forward_pre_hooks",
        "as above",
        "as above",
    ),
    PrivateName(
        "torch.nn.modules.module:_global_backward_hooks",
        "as above",
        "as above",
    ),
    PrivateName(
        "torch.nn.modules.module:_global_backward_pre_hooks",
        "as above",
        "as above",
    ),
    PrivateName(
        "torch.optim.optimizer:_global_optimizer_pre_hooks",
        "the hooks of every optimizer's steps, which a recording holds as they were",
        "as above",
    ),
    PrivateName(
        "torch.optim.optimizer:_global_optimizer_post_hooks",
        "as above",
        "as above",
    ),
)
_PATHS = frozenset(name.path for name in LEDGER)


@functools.cache
def private(path: str) -> Any:
    """Give the object behind a ``module:attribute`` of the ledger.

    Raises:
        CapabilityMissingError: this torch does not have it; the message says what is lost.
    """
    if path not in _PATHS:
        raise KeyError(f"{path} is not in the ledger of private torch names")
    module, _, attribute = path.partition(":")
    try:
        home = importlib.import_module(module)
        if not hasattr(home, attribute):  # perhaps a module that nobody has imported yet
            importlib.import_module(f"{module}.{attribute}")
        return getattr(home, attribute)
    except (ImportError, AttributeError) as error:
        entry = next(name for name in LEDGER if name.path == path)
        raise CapabilityMissingError(
            f"{path} is missing in this torch ({error}); without it: {entry.without}"
        ) from error


def capability(name: str, *paths: str) -> Capability:
    """Tell whether all these private names are there, under one name for people."""
    for path in paths:
        try:
            private(path)
        except CapabilityMissingError as error:
            return Capability(name, available=False, reason=str(error))
    return Capability(name, available=True)

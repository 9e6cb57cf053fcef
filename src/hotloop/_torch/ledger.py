"""The ledger of private torch names: where each is, and why hotloop uses it.

`private` is the only way to reach a private name, so that a test can hold the ledger against the code, both ways. Where
newer torch has the same under a public name (`_PUBLIC`), `private` returns that.
Attributes of torch's objects have no module path. They are listed as ``Class.attribute``, and used in this room only.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from typing import Any


@dataclasses.dataclass(frozen=True)
class PrivateName:
    """A private name of torch. ``path`` is ``module:attribute``, or ``Class.attribute`` for an object's own."""

    path: str
    why: str


@dataclasses.dataclass(frozen=True)
class Capability:
    """Something that hotloop can do on this torch, or the reason why it cannot."""

    name: str
    available: bool
    reason: str = ""


class CapabilityMissingError(Exception):
    """A private name is not where the ledger says. Callers turn it into a capability that is missing."""


_LEDGER = """
torch.distributed.distributed_c10d:_world
    the process groups of this process: collectives in any of them must stay paired
ProcessGroup._get_sequence_number_for_group
    how many collectives have begun: after one, a process alone cannot repeat a step
ProcessGroup._get_backend Options._timeout
    collectives may wait longer while a process compiles; afterwards their timeout is restored
torch.distributed.distributed_c10d:_get_default_store
    where a process says why it ends, and what a vote came to
DistributedDataParallel._join_config DistributedDataParallel._comm_hooks DistributedDataParallel._get_ddp_logging_data
    a step whose wrapper has a communication hook, or is in Join, is not captured
DistributedDataParallel._set_ddp_runtime_logging_sample_rate
    a wrapper times each hundredth step by events, which no capture allows
Reducer._reset_state DistributedDataParallel._has_rebuilt_buckets
    after a capture that failed within a backward the wrapper begins anew, as where its process group changes
DTensor._local_tensor
    the part of a tensor that this process holds: what a step of sharded parameters changes, and a proof compares
FSDPModule._get_fsdp_state FSDPState._fsdp_param_groups FSDPState._fsdp_param_group
    which parameters fully_shard gathers together, and what it keeps of a forward and a backward
FSDPState._is_root FSDPState._state_ctx FSDPState._comm_ctx FSDPState._training_state
FSDPState._modules_to_run_forward FSDPParamGroup._training_state FSDPParamGroup._post_forward_indices
FSDPParamGroup._all_gather_result FSDPParamGroup._post_reduce_event FSDPParamGroup._all_reduce_state
FSDPParamGroup._partial_reduce_output FSDPParam._unsharded_param
    a step that ended half-way, or that a failed capture has only recorded, is forgotten by fully_shard
FSDPParamGroup._to_sharded FSDPParamGroup._reshard_after_forward_event
    whole parameters that an evaluation left are freed before a recorded step, which gathers its own
FSDPParamGroup._all_gather_comm FSDPParamGroup._reduce_scatter_comm FSDPParamGroup._all_reduce_hook
FSDPParamGroup._reshard_after_forward
    settings of a sharded model that decline its captures, or that a recording freezes
torch.distributed._functional_collectives:wait_tensor
    the function that waits for a collective of DTensor's, which the emulation of captured steps replays
torch._C:_get_dispatch_mode torch._C:_TorchDispatchModeKey
    operations on fake tensors, by which DTensor finds the shapes of results, are no work of the step
Module._compiled_call_impl
    the slot that nn.Module.compile fills; hotloop puts an entry there that counts and falls back
Function._torchdynamo_orig_callable
    tells what torch.compile() made of a function: it has no wrapper with `_orig_mod` as a module has
Module._call_impl
    the module's call with its hooks, as eager runs it; traced from a root function of our own
torch._dynamo
    looked for before anything is compiled: not every build has it
Node._dynamo_source GraphModule._param_name_to_source
    the origin of a graph's inputs and parameters; kept on the copies of a graph that lower rungs compile
Tensor._version
    how often a tensor was changed in place: a graph is not cut where one piece changes what another made
torch._guards:detect_fake_mode torch._dispatch.python:enable_python_dispatcher torch._dynamo.utils:to_fake_tensor
    fake values with dynamo's dynamic sizes, for what passes between the pieces of a cut graph
torch._C._functorch:peek_interpreter_stack
    shows a call under a transform of torch.func, which dynamo gives up for good: only that call runs eager
torch._C._autograd:_top_saved_tensors_default_hooks
    gives the hooks of the checkpointed forward, or of its recomputation, that a call is in
torch.utils.checkpoint:_checkpoint_hook torch.utils.checkpoint:_recomputation_hook
    tells which checkpointed forward a call recomputes: the recomputation must run as that forward did
torch._dynamo.callback:callback_handler
    called when a compile starts and ends, in the thread that compiles
torch._dynamo.utils:get_compilation_metrics torch._dynamo.utils:graph_break_reasons
    typed facts of each compile (line, seconds, cache hits, recompile reason, failure), and each graph break
torch._dynamo.utils:counters
    frames seen so far, which moves when the recompile limit is hit, where no callback fires
torch._dynamo:config
    suppress_errors, guards, and weak references that a trace leaves: set only while something compiles
torch._dynamo:maybe_mark_dynamic
    batches of further sizes, and lengths that vary, are compiled for any size from the first one on
torch._C._dynamo.eval_frame:set_eval_frame torch._C._dynamo.eval_frame:set_code_exec_strategy
    what hears the calls of a step is not traced where the step's own compiled code runs
torch._dynamo.eval_frame:_set_stance torch._dynamo.eval_frame:_stance
    a thread runs a step uncompiled while others run their compiled code
torch._dynamo.exc:RestartAnalysis torch._dynamo.exc:SkipFrame
    dynamo's own signals, which pass through a backend and are no failures
torch._dynamo.exc:TorchDynamoException torch._dynamo.exc:Unsupported torch._dynamo.exc:UserError
torch._dynamo.exc:TorchRuntimeError
    tell graph breaks, failures of the compiler, and errors of the user's own operators apart under fullgraph
torch._dynamo.types:FrameExecStrategy torch._dynamo.types:FrameAction
    a frame whose compile is put off runs eager once, and is asked about again
torch._dynamo.convert_frame
    a module's name in a traceback: the exception passed through tracing, not through code that ran
torch._dynamo.backends.registry:lookup_backend
    the aot_eager backend as a function
torch._functorch:config
    force_non_lazy_backward_lowering: the backward is compiled with the forward, so that it can step down
torch._functorch:compile_utils torch._functorch.compile_utils:rand_ops
    the random operations that a compile must not merge: torch's list lacks many, and is completed for the time
torch:_TorchCompileInductorWrapper
    Inductor with a mode and options, checked as torch checks them
torch._inductor.compile_fx torch._inductor.compile_fx:compile_fx torch._inductor.compile_fx:compile_fx_inner
torch.compiler:config
    Inductor with cache entries of our own: its cache mixes up backwards that write over different tensors
torch._inductor.runtime.cache_dir_utils:default_cache_dir
    where torch keeps precompiled headers for every process: another user may have made that folder first
torch._inductor:config
    a user's own changes to it, which a child that fills the compile cache must have as well; whether it caches; the
    C++ compiler that it names
torch._inductor.config
    read as source, never imported: the options that this torch knows, for the table and for 'did you mean'
BackwardCFunction._forward_cls
    the autograd function whose backward runs the compiled backward graph; it knows what that may write over
torch._C._autograd:_get_current_graph_task_keep_graph
    shows a backward with retain_graph=True, which compiled code allows only on copies of saved tensors
torch._C:_get_obj_in_tls
    the copy of the caller's context, torch's settings among it, that a backward runs in
torch._C:_current_graph_task_id
    shows whether a thread runs a backward, where that context is missing (torch 2.11)
torch._inductor.cudagraph_trees:MarkStepBox
    the counter of marked steps: a mark between a forward and its backward loses what the forward saved
torch._inductor.cudagraph_trees:get_obj torch._inductor.cudagraph_trees:local
CUDAGraphNode._is_cuda_graph_recorded_tensor CUDAGraphNode._path_from_root
    the CUDA graphs of a thread: which memory is theirs, who holds parts of it, whether a forward waits
torch._inductor.config:triton
    the sizes that CUDA graphs are used for: none while a backward runs that keeps its graph, where they raise
torch._inductor.cudagraph_trees:reset_cudagraph_trees
    frees the CUDA graphs where torch forgets its compiled code; torch asks only its own backend to do so
torch._dynamo.mutation_guard:GenerationTracker torch._subclasses.fake_tensor:FakeTensor
torch._dynamo.backends.common:aot_autograd Callable._boxed_call UntypedStorage._new_with_weak_ptr
    emulate CUDA graphs without a GPU: generations, forward and backward as graphs, overwritten memory
torch.multiprocessing.reductions:StorageWeakRef
    shows whether memory is alive without keeping it alive; no private name, but documented nowhere
torch._guards:TracingContext
    inputs of a graph that are parameters or buffers, which a capture may write; what a backward overwrites
UntypedStorage._cdata
    identifies the memory of a tensor while it is alive
torch.autograd:_unsafe_preserve_version_counter
    writes that leave a tensor as it was do not count: graphs of the program that lead through it stay good
Tensor._is_view
    whether a gradient is a part of other memory: a step that is undone has to find that part, and no copy of it
torch._C._dynamo.guards:TensorGuards
    compares shapes, strides and dtypes of all parameters and optimizer state in one call before each replay
torch:_foreach_lerp_
    an average with equal weights takes its weight as a tensor, where torch would read a number on the host
torch:_foreach_copy_ torch:_foreach_clone torch:_foreach_norm
    copy and compare thousands of tensors in few launches: 53 BatchNorms in 48 µs, one by one in 700
torch.utils._python_dispatch:TorchDispatchMode
    sees every operation of a step: where the host waits, what is written, where random numbers are drawn
OpOverload._schema
    which arguments an operation writes into
Generator._cdata
    identifies torch's own generators, which an operation names by another object each time
torch._C:_len_torch_function_stack torch._C:_get_function_stack_at torch._C._autograd:_top_saved_tensors_default_hooks
    which TorchFunctionModes (torch.device as a context) and saved-tensor hooks (save_on_cpu) surround a step
Distribution._validate_args
    torch.distributions' checks of arguments and samples, which read a value on the host only to raise
GradScaler._maybe_opt_step
    where a GradScaler asks the host whether to skip the step of an optimizer that is not fused
Step._wrapped_by_lr_sched
    tells an optimizer's step that a scheduler counts from one that somebody wrapped to learn whether it runs
torch:_check_tensor_all_with
    torch's check of a condition on a tensor, which transformers calls
ScriptFunction._torchdynamo_inline
    the Python that a TorchScript function was made of, which audits and recordings run
torch._C:_cuda_beginAllocateToPool
    a step beside a recording takes its memory from the recording's, in the threads of its backward too
torch._C:_cuda_endAllocateToPool
    tells the allocator that a capture which failed half-way, or a step in a recording's memory, is over
torch._C:_cuda_releasePool
    gives back the use of its memory pool that such a capture has counted
torch._C:_override_stale_capture_stream
    what torch.autograd.graph.set_override_stale_capture_stream was set to, to restore it (torch 2.13)
Module._parameters Module._buffers Module._modules
    another parameter, buffer or child under a name is not the one that a recording holds
Module._forward_hooks Module._forward_pre_hooks Module._backward_hooks Module._backward_pre_hooks
Tensor._post_accumulate_grad_hooks Optimizer._optimizer_step_pre_hooks Optimizer._optimizer_step_post_hooks
torch.nn.modules.module:_global_forward_hooks torch.nn.modules.module:_global_forward_pre_hooks
torch.nn.modules.module:_global_backward_hooks torch.nn.modules.module:_global_backward_pre_hooks
torch.optim.optimizer:_global_optimizer_pre_hooks torch.optim.optimizer:_global_optimizer_post_hooks
    a hook runs Python: a hook that is added after a capture is in no replay
"""
"""Paths, each group with the reason why hotloop uses it indented below it."""


def _read(text: str) -> tuple[PrivateName, ...]:
    found, paths, why = list[PrivateName](), list[str](), ""
    for line in [*text.strip().splitlines(), ""]:
        if line.startswith(" "):
            why = f"{why} {line.strip()}".strip()
            continue
        if why:
            found += [PrivateName(path, why) for path in paths]
            paths, why = [], ""
        paths += line.split()
    return tuple(found)


LEDGER = _read(_LEDGER)
_PATHS = frozenset(name.path for name in LEDGER)
_PUBLIC = {f"torch:_foreach_{name}": f"torch.foreach:{name}" for name in ("copy_", "clone", "norm")}
"""What newer torch made public, by private name: the public name is taken where it is there."""


def private(path: str) -> Any:
    """Return the object behind a ``module:attribute`` of the ledger.

    Raises:
        CapabilityMissingError: this torch does not have it; the message says what is lost.
    """
    found, missing = _look_up(path)
    if missing:
        raise CapabilityMissingError(missing)
    return found


def private_or(path: str, default: Any) -> Any:
    """Return the object behind a path of the ledger, or a default where this torch does not have it."""
    found, missing = _look_up(path)
    return default if missing else found


@functools.cache
def _look_up(path: str) -> tuple[Any, str]:
    """Return the object behind a path, and why it is missing; empty where it is there."""
    if path not in _PATHS:
        raise KeyError(f"{path} is not in the ledger of private torch names")
    missing = ""
    for place in [path] if path not in _PUBLIC else [_PUBLIC[path], path]:
        module, _, attribute = place.partition(":")
        try:
            home = importlib.import_module(module)
            if not hasattr(home, attribute):  # perhaps a module that nobody has imported yet
                importlib.import_module(f"{module}.{attribute}")
            return getattr(home, attribute), ""
        except (ImportError, AttributeError) as error:
            missing = str(error)  # the exception would keep this frame, and all callers' tensors, till a collection
    entry = next(name for name in LEDGER if name.path == path)
    return None, f"{path} is missing in this torch ({missing}); hotloop uses it: {entry.why}"


def capability(name: str, *paths: str) -> Capability:
    """Return whether all these private names are there, under a name for people."""
    for path in paths:
        try:
            private(path)
        except CapabilityMissingError as error:
            return Capability(name, available=False, reason=str(error))
    return Capability(name, available=True)

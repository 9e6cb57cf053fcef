"""What breaks in the process itself. Each function plants one fault, before anything is compiled; it takes the way."""

from __future__ import annotations

import signal
from unittest import mock

PLANTED = "planted"


def _raises(error):
    def bad(*_, **__):
        raise error

    return bad


def _replace(owner, name, value):
    """Replace for the rest of the process."""
    mock.patch.object(owner, name, value).start()


def _lowered_anew():
    """Let Inductor answer no graph from its cache; the same C++ as before is not compiled again."""
    import torch._functorch.config
    import torch._inductor.config

    torch._inductor.config.fx_graph_cache = False
    torch._functorch.config.enable_autograd_cache = False


def as_eager_draws():
    """Let Inductor draw the random numbers of eager, and not try for long what the processor can do: no fault."""
    import torch._inductor.config
    from torch._inductor import cpu_vec_isa

    torch._inductor.config.fallback_random = True
    _replace(cpu_vec_isa, "valid_vec_isa_list", list)


def lowering(_):
    import torch
    from torch._inductor import lowering as torch_lowering

    _lowered_anew()
    torch_lowering.lowerings[torch.ops.aten.relu.default] = _raises(RuntimeError(f"{PLANTED}: no lowering for relu"))


def backward(_):
    import torch
    from torch._inductor import lowering as torch_lowering

    _lowered_anew()
    torch_lowering.lowerings[torch.ops.aten.sum.dim_IntList] = _raises(
        RuntimeError(f"{PLANTED}: no lowering for the backward's sum")
    )


def codegen(_):
    from torch._inductor.graph import GraphLowering

    _lowered_anew()
    _replace(GraphLowering, "codegen", _raises(AssertionError(f"{PLANTED}: no code for this kernel")))


def memory(_):
    import torch
    from torch._inductor.graph import GraphLowering

    _lowered_anew()
    _replace(GraphLowering, "run", _raises(torch.OutOfMemoryError(f"{PLANTED}: out of memory in the compiler")))


def autotune(_):
    from torch._inductor.select_algorithm import AlgorithmSelectorCache

    _lowered_anew()
    _replace(AlgorithmSelectorCache, "__call__", _raises(RuntimeError(f"{PLANTED}: no choice to autotune")))


def dynamo(_):
    from torch._dynamo.variables.tensor import TensorVariable

    real = TensorVariable.call_method

    def bug(self, tx, name, *args, **more):
        if name == "sigmoid":
            raise AssertionError(f"{PLANTED}: a bug in dynamo")
        return real(self, tx, name, *args, **more)

    _replace(TensorVariable, "call_method", bug)


def limit(_):
    import torch._dynamo

    torch._dynamo.config.recompile_limit = 1


def _as_kernel(after, message):
    """Make compiled forward code fail once it has run so many times, from a file that is nobody's own."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func

    from hotloop._torch import backends

    space = {"runs": 0, "after": after, "message": message}
    source = (
        "def kernel(args):\n    global runs\n    runs += 1\n"
        "    if runs > after:\n        raise RuntimeError(message)\n    return run(*args)\n"
    )

    def compiler(graph, _):
        space["run"] = graph.forward
        exec(compile(source, "/tmp/torchinductor_planted/kernel.py", "exec"), space)
        space["kernel"]._boxed_call = True
        return space["kernel"]

    made = aot_autograd(fw_compiler=compiler, bw_compiler=lambda graph, _: make_boxed_func(graph.forward))
    _replace(backends, "aot_eager", lambda: made)


def kernel(_):
    _as_kernel(8, f"{PLANTED}: a kernel died")


def interrupt(way):
    """Raise SIGINT while a proof compares, its state exchanged; in a compile where nothing is proven."""
    from hotloop._torch import backends
    from hotloop.step.prove import proof

    owner, name = (proof, "compare_kinds") if way in ("loop", "lightning") else (backends, "aot_eager")
    real, raised = getattr(owner, name), []

    def interrupted(*args, **more):
        if not raised:
            raised.append(True)
            signal.raise_signal(signal.SIGINT)
        return real(*args, **more)

    _replace(owner, name, interrupted)


def clock(_):
    """Set the clock back two hours with its 40th reading."""
    import datetime as dt
    import time

    readings, real, began = [0], time.time, time.time()
    shown = dt.datetime

    def back():
        return 7200 if readings[0] > 40 else 0

    def now():
        readings[0] += 1
        return real() - back()

    class Shown(shown):
        @classmethod
        def now(cls, tz=None):
            return shown.fromtimestamp(now(), tz)

    _replace(time, "time", now)
    _replace(time, "time_ns", lambda: int(now() * 1e9))
    _replace(dt, "datetime", Shown)
    assert began <= real()


def wait_in_compile(_):
    """Make the compiler wait until the process is killed."""
    import time

    from benchmarks.faults.program import PLACE
    from hotloop._torch import backends

    def waits():
        (PLACE / "reached").touch()
        time.sleep(600)

    _replace(backends, "aot_eager", waits)

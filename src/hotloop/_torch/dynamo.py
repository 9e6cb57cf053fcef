"""What dynamo tells: its callbacks, its typed metrics, its graph breaks, its frame counter."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

from hotloop._torch.graphs import is_own_file, is_user_file
from hotloop._torch.ledger import CapabilityMissingError, private

if TYPE_CHECKING:
    import types
    from collections.abc import Callable

_TRACING = "torch._dynamo.convert_frame"
_OF_A_FRAME = "DYNAMO"
_PUT_OFF = "CompilePutOff"


@dataclasses.dataclass(frozen=True)
class Metric:
    """One entry of torch's compilation metrics, in our own words; None where this torch does not say."""

    frame: str
    function: str | None
    file: str | None
    line: int | None
    is_forward: bool
    seconds: float
    ops: int | None
    guards: int | None
    cache_hits: int
    cache_misses: int
    recompile_reason: str | None
    fail_type: str | None
    fail_reason: str | None
    fail_file: str | None
    fail_line: int | None
    has_code: bool
    cudagraphs_skipped: str | None


@dataclasses.dataclass(frozen=True)
class Break:
    """One graph break, with the innermost line of the user's code, and the program's own line that led there.

    ``by_*`` are None and empty where the line itself is the program's own, or no line of it is known.
    """

    reason: str
    file: str | None
    line: int | None
    source: str
    by_file: str | None = None
    by_line: int | None = None
    by_source: str = ""


class Callbacks:
    """Our functions on dynamo's compile callbacks. ``torch.compiler.reset`` takes them off: look before each call.

    What begins is told whether it is a frame that is compiled, which may be put off (`put_off`), or a backward.
    """

    def __init__(self, on_start: Callable[[str, bool], None], on_end: Callable[[], None]) -> None:
        self._start: Callable[[Any], None] = lambda compiling: on_start(
            str(compiling.compile_id), compiling.callback_trigger.name == _OF_A_FRAME
        )
        self._end: Callable[[Any], None] = lambda _: on_end()
        self._registered: list[Callable[[Any], None]] = []

    def installed(self) -> bool:
        """Tell whether dynamo will call us."""
        return self._start in self._registered

    def install(self) -> None:
        """Register with dynamo; it may be repeated."""
        if not self.installed():
            handler = private("torch._dynamo.callback:callback_handler")
            handler.register_start_callback(self._start)
            handler.register_end_callback(self._end)
            self._registered = handler.start_callbacks


class Reader:
    """Reads what is new since the last read. torch keeps its last 64 metrics only, so read at every compile."""

    def __init__(self) -> None:
        self._metrics = private("torch._dynamo.utils:get_compilation_metrics")
        self._breaks = private("torch._dynamo.utils:graph_break_reasons")
        self._counters = private("torch._dynamo.utils:counters")
        self._names: dict[str, tuple[str, str | None, int | None]] = {}
        self.skip()

    def skip(self) -> None:
        """Forget what happened so far."""
        entries = self._metrics()
        self._last = entries[-1] if entries else None
        self._break_count = len(self._breaks)

    def frames(self) -> int:
        """Give how often dynamo was asked about a frame; it also moves when a recompile limit is hit."""
        frames: int = self._counters["frames"].get("total", 0)
        return frames

    def metrics(self) -> list[Metric]:
        """Give the compilation metrics since the last call, oldest first."""
        fresh: list[Any] = []
        entries = self._metrics()
        for entry in reversed(entries):
            if entry is self._last:
                break
            fresh.append(entry)
        if entries:
            self._last = entries[-1]
        told = (one for one in reversed(fresh) if not getattr(one, "is_runtime", False))
        return [self._metric(one) for one in told if getattr(one, "fail_type", None) != _PUT_OFF]

    def breaks(self) -> list[Break]:
        """Give the graph breaks since the last call; a reset of dynamo starts anew."""
        if len(self._breaks) < self._break_count:
            self._break_count = 0
        fresh = self._breaks[self._break_count :]
        self._break_count = len(self._breaks)
        return [_break(entry.reason, entry.user_stack) for entry in fresh]

    def _metric(self, entry: Any) -> Metric:
        def get(name: str) -> Any:
            return getattr(entry, name, None)  # a field that this torch does not have is not known, no failure

        # A backward's entry has the frame's id but not its name: remember who it was.
        frame = get("compile_id") or "?"
        key = frame.split("/")[0]
        if get("co_name"):
            self._names[key] = (get("co_name"), get("co_filename"), get("co_firstlineno"))
        function, file, line = self._names.get(key, (None, None, None))
        backward = get("is_forward") is False
        micros = get("backward_cumulative_compile_time_us") if backward else get("dynamo_cumulative_compile_time_us")
        return Metric(
            frame=frame,
            function=function,
            file=file,
            line=line,
            is_forward=not backward,
            seconds=(micros or get("duration_us") or 0) / 1e6,
            ops=get("graph_op_count"),
            guards=get("guard_count"),
            # A hit in AOTAutograd's cache answers for the graphs below it, which are then not asked.
            cache_hits=(get("inductor_fx_local_cache_hit_count") or 0)
            or (get("aotautograd_local_cache_hit_count") or 0),
            cache_misses=get("inductor_fx_local_cache_miss_count") or 0,
            recompile_reason=get("recompile_reason"),
            fail_type=get("fail_type"),
            fail_reason=get("fail_reason"),
            fail_file=get("fail_user_frame_filename"),
            fail_line=get("fail_user_frame_lineno"),
            has_code=bool(get("has_guarded_code")),
            cudagraphs_skipped=get("cudagraph_skip_reason"),
        )


def _break(reason: str, stack: Any) -> Break:
    frames = list(stack or ())
    frame = next((one for one in reversed(frames) if is_user_file(one.filename)), frames[-1] if frames else None)
    if frame is None:
        return Break(reason, None, None, "")
    place = frame.filename, frame.lineno, (frame.line or "").strip()
    own = next((one for one in reversed(frames) if is_own_file(one.filename)), None)
    if own is None or own is frame:
        return Break(reason, *place)
    return Break(reason, *place, own.filename, own.lineno, (own.line or "").strip())


def forget_code(code: types.CodeType) -> bool:
    """Let dynamo look at a code object anew; False where this torch cannot."""
    try:
        private("torch._dynamo.eval_frame:reset_code")(code)
    except CapabilityMissingError:
        return False
    return True


def mark_dynamic(tensor: Any, dim: int) -> None:
    """Have a size compiled for any value, where the code does not fix it; it stays static where this torch cannot."""
    try:
        private("torch._dynamo:maybe_mark_dynamic")(tensor, dim)
    except CapabilityMissingError:
        return


def is_mark(name: str) -> bool:
    """Tell whether an attribute of a tensor is what torch's compiler has noted on it (``_dynamo_dynamic_indices``)."""
    return name.startswith(("_dynamo_", "_has_dynamo_"))


def transform_probe() -> Callable[[], Any]:
    """Give the function that tells whether a transform of torch.func (grad, vmap, ...) is in force in this thread."""
    try:
        found: Callable[[], Any] = private("torch._C._functorch:peek_interpreter_stack")
    except CapabilityMissingError:
        return lambda: None
    return found


def is_graph_break(error: BaseException) -> bool:
    """Tell whether fullgraph's refusal is a graph break, rather than a failure of the compiler."""
    return isinstance(
        error, (private("torch._dynamo.exc:Unsupported"), private("torch._dynamo.exc:UserError"))
    ) and not isinstance(error, private("torch._dynamo.exc:TorchRuntimeError"))


def is_compile_error(error: BaseException) -> bool:
    """Tell whether dynamo, a backend or a shape constraint raised this, rather than the user's code."""
    if isinstance(error, private("torch._dynamo.exc:TorchDynamoException")):
        return True
    return is_limit(error) or type(error).__name__ == "ConstraintViolationError"


def in_tracing(error: BaseException) -> bool:
    """Tell whether an exception passed through dynamo's tracing, rather than through code that ran."""
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_globals.get("__name__") == _TRACING:
            return True
        trace = trace.tb_next
    return False


def is_other_tracer(error: BaseException) -> bool:
    """Tell whether dynamo refused since ``torch.jit.trace`` or ``make_fx`` traces the call."""
    return type(error) is RuntimeError and str(error).startswith("Detected that you are using FX to")


def is_limit(error: BaseException) -> bool:
    """Tell whether a recompile limit was raised, as under fullgraph.

    It and the violated constraint are plain exceptions, told by name since their homes have moved between versions.
    """
    return type(error).__name__ == "FailOnRecompileLimitHit"


def is_limit_flag(error: BaseException) -> bool:
    """Tell whether the limit was raised since the user set torch's own flag for that."""
    return is_limit(error) and "fail_on_recompile_limit_hit" in str(error)


def put_off(why: str) -> Exception:
    """Give what to raise as a frame's compile begins: the frame runs eager this time, and may be compiled another.

    Under ``fullgraph`` it leaves the compiled function, before anything of that has run.
    """
    error: Any = _put_off_kind()(why)
    action = private("torch._dynamo.types:FrameAction").DEFAULT
    error.frame_exec_strategy = private("torch._dynamo.types:FrameExecStrategy")(action, action)
    error.logged = True  # it is no graph break
    found: Exception = error
    return found


def left(why: str) -> Exception:
    """Give what to raise as a frame's compile begins, before anything of a call has run: it leaves the call."""
    try:
        found: Exception = _left_kind()(why)
    except CapabilityMissingError:
        return put_off(why)
    return found


def is_put_off(error: BaseException) -> bool:
    """Tell whether a compile was put off."""
    return type(error).__name__ == _PUT_OFF


@functools.cache
def _put_off_kind() -> Any:
    return type(_PUT_OFF, (private("torch._dynamo.exc:Unsupported"),), {})


@functools.cache
def _left_kind() -> Any:
    return type(_PUT_OFF, (private("torch._dynamo.exc:UncapturedHigherOrderOpError"),), {})


def is_signal(error: BaseException) -> bool:
    """Tell whether an exception that passes through a backend is dynamo talking to itself, not a failure."""
    return isinstance(error, (private("torch._dynamo.exc:RestartAnalysis"), private("torch._dynamo.exc:SkipFrame")))

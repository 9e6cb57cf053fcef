"""Dynamo's reports: its callbacks, typed metrics, graph breaks, frame counter and exceptions."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING, Any

from hotloop._torch.graphs import is_own_file, is_user_file
from hotloop._torch.ledger import CapabilityMissingError, private, private_or
from hotloop._torch.settings import patched

if TYPE_CHECKING:
    import types
    from collections.abc import Callable, Iterator

    import torch

_NO_LIMIT = 2**31


@dataclasses.dataclass(frozen=True)
class Metric:
    """An entry of torch's compilation metrics, under names of our own; None where this torch does not say."""

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
    """A graph break, with the innermost line of the user's code, and the program's own line that led there.

    ``by_*`` are None and empty where the line itself is the program's own, or no line of the program is known.
    """

    reason: str
    file: str | None
    line: int | None
    source: str
    by_file: str | None = None
    by_line: int | None = None
    by_source: str = ""


class Callbacks:
    """Our functions on dynamo's compile callbacks. ``torch.compiler.reset`` removes them: check before each call.

    ``on_start`` gets the compile's id, and whether it is a frame's or a backward's.
    """

    def __init__(self, on_start: Callable[[str, bool], None], on_end: Callable[[], None]) -> None:
        self._start: Callable[[Any], None] = lambda compiling: on_start(
            str(compiling.compile_id), compiling.callback_trigger.name == "DYNAMO"
        )
        self._end: Callable[[Any], None] = lambda _: on_end()
        self._registered: list[Callable[[Any], None]] = []

    def installed(self) -> bool:
        """Return whether dynamo will call us."""
        return self._start in self._registered

    def install(self) -> None:
        """Register with dynamo, if not registered yet."""
        if not self.installed():
            handler = private("torch._dynamo.callback:callback_handler")
            handler.register_start_callback(self._start)
            handler.register_end_callback(self._end)
            self._registered = handler.start_callbacks


class Reader:
    """Reader of reports since the last read. torch keeps only its last 64 metrics, so read at every compile."""

    def __init__(self) -> None:
        self._metrics = private("torch._dynamo.utils:get_compilation_metrics")
        self._breaks = private("torch._dynamo.utils:graph_break_reasons")
        self._counters = private("torch._dynamo.utils:counters")
        self._names: dict[str, tuple[str, str | None, int | None]] = {}
        self.skip()

    def skip(self) -> None:
        """Skip the reports so far."""
        entries = self._metrics()
        self._last = entries[-1] if entries else None
        self._break_count = len(self._breaks)

    def frames(self) -> int:
        """Return how often dynamo was asked about a frame; the number also moves when a recompile limit is hit."""
        frames: int = self._counters["frames"].get("total", 0)
        return frames

    def metrics(self) -> list[Metric]:
        """Return the compilation metrics since the last call, oldest first."""
        fresh: list[Any] = []
        entries = self._metrics()
        for entry in reversed(entries):
            if entry is self._last:
                break
            fresh.append(entry)
        if entries:
            self._last = entries[-1]
        compiles = (entry for entry in reversed(fresh) if not getattr(entry, "is_runtime", False))
        return [self._metric(entry) for entry in compiles]

    def breaks(self) -> list[Break]:
        """Return the graph breaks since the last call; a reset of dynamo starts anew."""
        if len(self._breaks) < self._break_count:
            self._break_count = 0
        fresh = self._breaks[self._break_count :]
        self._break_count = len(self._breaks)
        return [self._break(entry.reason, entry.user_stack) for entry in fresh]

    def _metric(self, entry: Any) -> Metric:
        def get(name: str) -> Any:
            return getattr(entry, name, None)  # a field that this torch does not have is unknown, and no failure

        # A backward's entry has the frame's id but not its name, so the name is remembered.
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
            seconds=max(0.0, (micros or get("duration_us") or 0) / 1e6),  # by the wall clock, which may go back
            ops=get("graph_op_count"),
            guards=get("guard_count"),
            # After a hit in AOTAutograd's cache the graphs below it are not looked up.
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

    @staticmethod
    def _break(reason: str, stack: Any) -> Break:
        frames = list(stack or ())[::-1]  # the innermost first
        frame = next((frame for frame in frames if is_user_file(frame.filename)), frames[0] if frames else None)
        if frame is None:
            return Break(reason, None, None, "")
        place = frame.filename, frame.lineno, (frame.line or "").strip()
        own = next((frame for frame in frames if is_own_file(frame.filename)), None)
        if own is None or own is frame:
            return Break(reason, *place)
        return Break(reason, *place, own.filename, own.lineno, (own.line or "").strip())


def never_trace(function: Callable[..., Any]) -> None:
    """Keep dynamo from tracing a function, but not what it calls: `set_tracer` does."""
    try:
        action = private("torch._dynamo.types:FrameAction")
        strategy = private("torch._dynamo.types:FrameExecStrategy")(action.SKIP, action.DEFAULT)
        private("torch._C._dynamo.eval_frame:set_code_exec_strategy")(function.__code__, strategy)
    except CapabilityMissingError:  # then it is traced, as anybody's is
        return


def recompile_limit() -> int:
    """Return how often torch compiles one code object."""
    limit: int = private("torch._dynamo:config").recompile_limit
    return limit


@contextlib.contextmanager
def unlimited(code: types.CodeType, *, again: bool) -> Iterator[None]:
    """Compile a code object in the block even past torch's recompile limit.

    Args:
        code: the code object.
        again: it has reached the limit, which is in force again after the block.
    """
    try:
        action = private("torch._dynamo.types:FrameAction")
        strategy = private("torch._dynamo.types:FrameExecStrategy")
        put = private("torch._C._dynamo.eval_frame:set_code_exec_strategy")
    except CapabilityMissingError:
        yield
        return
    if again:
        put(code, strategy(action.DEFAULT, action.DEFAULT))
    try:
        with patched("torch._dynamo:config", recompile_limit=_NO_LIMIT, accumulated_recompile_limit=_NO_LIMIT):
            yield
    finally:
        if again:
            put(code, strategy(action.RUN_ONLY, action.RUN_ONLY))


set_tracer: Callable[[Any], Any] = private_or("torch._C._dynamo.eval_frame:set_eval_frame", lambda _: None)
"""Puts in place what traces frames in this thread, None for nothing; returns what was there."""


def mark_dynamic(tensor: Any, dim: int) -> None:
    """Let a size be compiled for any value, where the code does not fix it; it stays static where this torch cannot."""
    private_or("torch._dynamo:maybe_mark_dynamic", lambda *_: None)(tensor, dim)


def is_mark(name: str) -> bool:
    """Return whether an attribute of a tensor is a note of torch's compiler (``_dynamo_dynamic_indices``)."""
    return name.startswith(("_dynamo_", "_has_dynamo_"))


def attributes_of(tensor: torch.Tensor) -> dict[str, Any]:
    """Return the attributes that a program put on a tensor, without those of hotloop and of torch's compiler."""
    return {name: value for name, value in tensor.__dict__.items() if not is_mark(name)}


def transform_probe() -> Callable[[], Any]:
    """Return the function that says whether a transform of torch.func (grad, vmap, ...) is in force in this thread."""
    probe: Callable[[], Any] = private_or("torch._C._functorch:peek_interpreter_stack", lambda: None)
    return probe


class RaisedError:
    """An exception that came out of a call of compiled code, and dynamo's part in it.

    The recompile limit and the violated constraint are plain exceptions. They are recognised by name, since their homes
    have moved between versions.
    """

    def __init__(self, error: BaseException) -> None:
        self._error, self._kind = error, type(error).__name__

    @property
    def is_graph_break(self) -> bool:
        """Whether fullgraph's refusal is a graph break, rather than a failure of the compiler."""
        breaks = private("torch._dynamo.exc:Unsupported"), private("torch._dynamo.exc:UserError")
        failure = private("torch._dynamo.exc:TorchRuntimeError")
        return isinstance(self._error, breaks) and not isinstance(self._error, failure)

    @property
    def is_compile_error(self) -> bool:
        """Whether dynamo, a backend or a shape constraint raised this, rather than the user's code."""
        if isinstance(self._error, private("torch._dynamo.exc:TorchDynamoException")):
            return True
        return self.is_limit or self._kind == "ConstraintViolationError"

    @property
    def in_tracing(self) -> bool:
        """Whether the exception passed through dynamo's tracing, rather than through code that ran."""
        trace = self._error.__traceback__
        while trace is not None:
            if trace.tb_frame.f_globals.get("__name__") == "torch._dynamo.convert_frame":
                return True
            trace = trace.tb_next
        return False

    @property
    def is_other_tracer(self) -> bool:
        """Whether dynamo refused because ``torch.jit.trace`` or ``make_fx`` traces the call."""
        return type(self._error) is RuntimeError and str(self._error).startswith("Detected that you are using FX to")

    @property
    def is_limit(self) -> bool:
        """Whether a recompile limit was raised, as under fullgraph."""
        return self._kind == "FailOnRecompileLimitHit"

    @property
    def is_limit_flag(self) -> bool:
        """Whether the limit was raised because the user set torch's own flag for that."""
        return self.is_limit and "fail_on_recompile_limit_hit" in str(self._error)

    @property
    def is_no_failure(self) -> bool:
        """Whether torch ends a recomputation by it, or memory ran out: nothing that eager would do otherwise."""
        checkpoints = type(self._error).__module__ == "torch.utils.checkpoint"
        return checkpoints or self._kind in ("OutOfMemoryError", "StaleOutputError")

    @property
    def is_signal(self) -> bool:
        """Whether an exception that passes through a backend is dynamo's own signal, and no failure."""
        signals = private("torch._dynamo.exc:RestartAnalysis"), private("torch._dynamo.exc:SkipFrame")
        return isinstance(self._error, signals)

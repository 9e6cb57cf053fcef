"""Assertions for test suites: what is compiled, how often it compiled again, and how CUDA graphs are used."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from hotloop import events as ev
from hotloop.compiling.control import status
from hotloop.compiling.fallback.emulation import running
from hotloop.compiling.observe import watch
from hotloop.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hotloop.compiling.fallback.emulation import Emulation


def assert_compiled(model: Any) -> None:
    """Assert that every component of a model that was asked to compile has run, and ran as it was asked to.

    Args:
        model: the model that `hotloop.compile` took or returned.

    Raises:
        AssertionError: nothing was asked to compile; or a component was not called, or ran eager or on a lower preset,
            with the causes.
    """
    components = {name: part for name, part in status(model).components.items() if part.requested != "none"}
    if not components:
        raise AssertionError(f"{type(model).__name__} was not compiled: every component was asked for preset none")
    wrong = []
    for name, part in components.items():
        if part.state == "compiled":
            continue
        why = "; ".join(f"{_at(cause.file, cause.line)}{cause.reason}" for cause in part.causes) or "it was not called"
        wrong.append(f"{name} is {part.state}, running {part.running}, not {part.requested}: {why}")
    if wrong:
        raise AssertionError("\n".join(wrong))


@contextlib.contextmanager
def assert_max_recompiles(n: int) -> Iterator[None]:
    """Assert that the block recompiles functions at most ``n`` times in all.

    The first compile of a function does not count. Reaching torch's recompile limit fails too: from then on unseen
    inputs run eager, and nothing is compiled again.

    Raises:
        ConfigError: ``n`` is no whole number, or negative.
        AssertionError: there were more recompiles; each is listed with its function and torch's reason.
    """
    if isinstance(n, bool) or not isinstance(n, int) or n < 0:
        raise ConfigError(f"assert_max_recompiles({n!r}): expected a whole number, 0 or more")
    with watch() as seen:
        yield
    again = [event for event in seen if isinstance(event, ev.Recompiled)]
    limits = [event for event in seen if isinstance(event, ev.RecompileLimit)]
    if len(again) <= n and not limits:
        return
    lines = [f"{_at(event.file, event.line)}{event.function} (no. {event.nth}): {event.reason}" for event in again]
    lines += [f"{_at(event.file, event.line)}{event.reason}" for event in limits]
    listed = "\n  ".join(lines)
    raise AssertionError(f"{len(again)} recompiles, at most {n} were expected:\n  {listed}")


@contextlib.contextmanager
def assert_steps_marked() -> Iterator[None]:
    """Assert that each step of compiled code begins with a marked step, inside `cudagraph_emulation`.

    Without a mark, torch begins a new generation of CUDA graph outputs at any call while no backward is pending. Code
    that `hotloop.compile` compiled marks its steps itself; for other compiled code `hotloop.own` does.

    Raises:
        ConfigError: no emulation is in force.
        AssertionError: a generation began without a mark, with the calls; or no CUDA graph ran.
    """
    with _emulation("assert_steps_marked()") as emulation:
        before = len(emulation.unmarked)
        yield
    if unmarked := emulation.unmarked[before:]:
        places = sorted({f"{place[0]}:{place[1]}" if place else "an unknown place" for place in unmarked})
        raise AssertionError(
            f"{len(unmarked)} calls of compiled code began a new generation without a marked step: "
            f"{', '.join(places)}. Pass what they return through hotloop.own(), or compile with hotloop.compile"
        )


@contextlib.contextmanager
def assert_outputs_owned() -> Iterator[None]:
    """Assert that no output of a CUDA graph is held when its memory is reused, inside `cudagraph_emulation`.

    A held output fails even if no code reads it afterwards. The outputs that are left at the end of the block are held
    too, unless a forward waits for its backward, which needs them.

    Raises:
        ConfigError: no emulation is in force.
        AssertionError: an output was held, with each output and where it was made; or no CUDA graph ran.
    """
    with _emulation("assert_outputs_owned()") as emulation:
        before = len(emulation.overwritten)
        yield
    held = [str(output) for output in emulation.overwritten[before:]]
    if not emulation.forward_waits():
        held += [f"{output}, still held at the end" for output in emulation.alive()]
    if held:
        listed = "\n  ".join(held)
        raise AssertionError(
            f"{len(held)} outputs of CUDA graphs were held past their step. Consume them before the next call, pass "
            f"them through hotloop.own(), or make them again:\n  {listed}"
        )


@contextlib.contextmanager
def _emulation(what: str) -> Iterator[Emulation]:
    """Yield the emulation that is in force, and check at the end that a CUDA graph ran in the block."""
    emulation = running()
    if emulation is None:
        raise ConfigError(f"{what} needs an emulation in force: with hotloop.testing.cudagraph_emulation(): ...")
    before = emulation.runs
    yield emulation
    if emulation.runs == before:
        raise AssertionError(
            "no CUDA graph ran in the block: compile inside cudagraph_emulation(), with a preset that has CUDA graphs "
            "or with backend=emulation.backend"
        )


def _at(file: str | None, line: int | None) -> str:
    return f"{file}:{line}: " if file else ""

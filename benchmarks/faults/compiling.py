"""Faults of the compiler, and of a step that is compiled: each in every way to train."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from benchmarks.faults.running import UNSET, Fault, NotHereError, small_disk

if TYPE_CHECKING:
    from benchmarks.faults.judging import Cell
    from benchmarks.faults.running import Run


def full_cache(run: Run) -> Cell:
    """Compile with a cache folder of 64 kB."""
    with small_disk(run.place / "cache", "64k"):
        run.run(TORCHINDUCTOR_CACHE_DIR=UNSET)
        return run.judged()


def full_temporary(run: Run) -> Cell:
    """Compile with a TMPDIR of 16 kB."""
    with small_disk(run.place / "small", "16k") as small:
        run.run(TMPDIR=str(small), TORCHINDUCTOR_CACHE_DIR=str(run.place / "inductor"))
        return run.judged()


def with_compiler(run: Run, does: str, **environment: str) -> Cell:
    """Compile with a C++ compiler that answers what it is asked about itself, and does this when it has to compile."""
    program = run.place / "g++"
    asked = 'case "$*" in *--version*|*-print*|*-E*) exec g++ "$@";; esac'
    program.write_text(f"#!/bin/sh\n{asked}\n{does}\n", encoding="utf-8")
    program.chmod(0o755)
    run.run(CXX=str(program), TORCHINDUCTOR_CACHE_DIR=str(run.place / "inductor"), **environment)
    return run.judged()


def killed_compiler(run: Run) -> Cell:
    """Compile with a C++ compiler that is killed, as the system does that runs out of memory."""
    return with_compiler(run, "kill -9 $$")


def hung_compiler(run: Run) -> Cell:
    """Compile with a C++ compiler that sleeps for ever; the limit of ten minutes is five seconds here."""
    return with_compiler(run, "sleep 100000", HOTLOOP_COMPILE_TIMEOUT="5")


def foreign_headers(run: Run) -> Cell:
    """Let another user own torch's folder of precompiled headers."""
    import getpass

    temporary = run.place / "tmp"
    folder = temporary / f"torchinductor_{getpass.getuser()}" / "precompiled_headers"
    folder.mkdir(parents=True)
    if os.geteuid():
        raise NotHereError("needs root, to make a folder of another user's")
    for one in (folder, folder.parent):
        os.chown(one, 65534, 65534)
        one.chmod(0o777)
    run.run(TORCHINDUCTOR_CACHE_DIR=UNSET)
    return run.judged()


def raising_hook(run: Run) -> Cell:
    """Raise in the user's own hook once, which ends a run of ``hotloop train`` as it ends an eager one."""
    if run.way != "train":
        run.run()
        return run.judged() if not run.is_eager else None
    run.run()
    run.resume()
    return run.judged(1, 0) if not run.is_eager else None


def interrupted(run: Run) -> Cell:
    """Interrupt; ``hotloop train`` finishes its step, saves, and is resumed."""
    run.run()
    if run.way != "train":
        return run.judged()
    run.resume()
    return run.judged(130, 0)


def dead(run: Run) -> Cell:
    """Fail once a part of the step has run: what cannot be undone ends, and goes on from its checkpoint, eager."""
    ended = run.run()
    if run.way in ("loop", "lightning") or ended == 0:  # all that the call had changed could be put back
        return run.judged()
    run.resume("training.optimization.use_torch_compile=false")
    return run.judged(1, 0)


INDUCTOR = {"preset": "default"}
SHARED = {
    **INDUCTOR,
    "shared": True,
    "ways": ("compile", "train"),
    "elsewhere": "as in place: the program's own `shared_compiles` is all that differs from `hotloop train`",
}
NEVER = "/bin/false"
HALF_DONE = "a part of the call has run, so it cannot be repeated: the program gets the error, with its traceback"
OFTEN = "recompile limit|changes Python state: .*calls"
"""A loop finds the counter before the limit is reached."""
FAULTS = [
    Fault("none", "no fault: compiled as asked (`aot_eager`)", "", runs="aot_eager"),
    Fault("none-inductor", "no fault: compiled as asked (Inductor)", "", runs="default", **INDUCTOR),
    Fault(
        "lowering", "Inductor cannot lower an operator", "planted: no lowering for relu", plant="lowering", **INDUCTOR
    ),
    Fault(
        "backward",
        "the backward of a graph does not compile",
        "planted: no lowering for the backward",
        plant="backward",
        **INDUCTOR,
    ),
    Fault("codegen", "Inductor cannot write the code", "planted: no code for this kernel", plant="codegen", **INDUCTOR),
    Fault("memory", "out of memory in the compiler", "planted: out of memory", plant="memory", **INDUCTOR),
    Fault("autotune", "autotuning fails", "planted: no choice to autotune", plant="autotune", preset="inductor"),
    Fault("dynamo", "a bug in dynamo, while it traces", "planted: a bug in dynamo", plant="dynamo"),
    Fault("breaks", "a graph break", "graph break", trait="breaks"),
    Fault("storm", "recompiles without end: a number changes with each call", OFTEN, trait="counts"),
    Fault(
        "checkpoint",
        "recompile limit reached between a checkpointed forward and its recompute",
        "recompile limit allows, in recomputations",
        trait="checkpointed",
        plant="limit",
        ways=("compile", "loop", "train"),
        elsewhere="compiles the module as a whole, in which dynamo leaves a checkpointed forward that counts eager",
    ),
    Fault(
        "stand-in", "dynamo's stand-in for a torch function differs from the function", "TypeError", trait="stand-in"
    ),
    Fault(
        "stand-in-late",
        "the same, after a graph of the call has run",
        "TypeError",
        trait="stand-in late",
        scene=dead,
        raises=HALF_DONE,
    ),
    Fault("no-rate", "an optimizer without a learning rate", "", trait="no rate", runs="aot_eager"),
    Fault("deep", "a model that calls itself 400 deep", "RecursionError", trait="deep"),
    Fault(
        "kernel",
        "compiled code fails while it runs",
        "planted: a kernel died",
        plant="kernel",
        scene=dead,
        raises=HALF_DONE,
    ),
    Fault("interrupt", "Ctrl-C in a proof, or in a compile", "", plant="interrupt", scene=interrupted, unseen=1),
    Fault(
        "hook",
        "a hook of the user's raises, while a proof or compiled code runs",
        "the user's own hook raised|PlantedError",
        trait="hook",
        scene=raising_hook,
        as_eager=True,
        raises="the error is the user's own, and ends the run as it ends an eager one, with its traceback",
    ),
    Fault(
        "no-compiler",
        "a C++ compiler that is not there (`CXX=/nonexistent/g++`)",
        "/nonexistent/g",
        environment={"CXX": "/nonexistent/g++"},
        **INDUCTOR,
    ),
    Fault(
        "broken-compiler", "a C++ compiler that fails (`CXX=/bin/false`)", NEVER, environment={"CXX": NEVER}, **INDUCTOR
    ),
    Fault(
        "killed-compiler",
        "a C++ compiler that the system kills (SIGKILL)",
        r"g\+\+ was ended by SIGKILL|SIGKILL",
        scene=killed_compiler,
        **INDUCTOR,
    ),
    Fault(
        "hung-compiler",
        "a C++ compiler that hangs",
        r"g\+\+ hung: no processor time",
        scene=hung_compiler,
        **INDUCTOR,
    ),
    Fault(
        "full-cache",
        "the compile cache's folder is full",
        "No space left on device",
        scene=full_cache,
        **SHARED,
    ),
    Fault(
        "full-tmpdir", "`TMPDIR` is full while compiling", "No space left on device", scene=full_temporary, **INDUCTOR
    ),
    Fault(
        "headers",
        "another user owns torch's folder of precompiled headers",
        "precompiled_headers|precompiled headers",
        scene=foreign_headers,
        **SHARED,
    ),
    Fault("workers", "DataLoader workers forked after a compile", "", trait="workers", runs="default", **INDUCTOR),
]

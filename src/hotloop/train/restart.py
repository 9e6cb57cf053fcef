"""Starting a run again by itself, one rung down, after a step of its hot loop that could not be undone."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, NoReturn

from hotloop import host
from hotloop.train import checkpoint, configure
from hotloop.train.compiling import PREFIX

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hotloop.errors import StepLostError
    from hotloop.train.start import Start

_COMPILE = "training.optimization.use_torch_compile"


def command(start: Start, overrides: Sequence[str], verb: str = "train", options: Sequence[str] = ()) -> list[str]:
    """Return the command that goes on eagerly with a run, or with a cross-validation (``kfold``), where it was saved.

    The run keeps its settings, so only what a resumed run was told on top of them is said again.
    """
    ours = (_COMPILE, "run.folder", "run.resume")
    kept = [one for one in overrides if one.split("=", 1)[0].strip().lstrip("+") not in ours] if start.resume else []
    again = [configure.resume(start.folder), f"{_COMPILE}=false"]
    return host.python("-m", "hotloop", verb, *options, *kept, *again)


def one_rung_down(
    error: StepLostError, start: Start, overrides: Sequence[str], verb: str = "train", options: Sequence[str] = ()
) -> NoReturn:
    """Replace this process by one that goes on eagerly, since the GPU's context may be lost with the step.

    It happens once at most: without a hot loop no step is lost in this way.

    Raises:
        StepLostError: the run was not automatic.
    """
    if start.settings.training.optimization.use_torch_compile != "auto":
        raise error
    last = start.folder / checkpoint.FOLDER / checkpoint.LAST
    where = f"from {last}" if last.is_file() else "from its first step, since no checkpoint was written yet"
    if verb == "kfold":
        where = "at the fold and the checkpoint that it had come to"
    cause = " ".join(str(error).split()).rstrip(".")
    apart = sys.stderr if options else sys.stdout  # with --json or --quiet, stdout is the result's
    print(f"{PREFIX} {cause}. Restarting {where}, with {_COMPILE}=false", file=apart, flush=True)
    sys.stderr.flush()
    arguments = command(start, overrides, verb, options)
    os.execv(arguments[0], arguments)  # noqa: S606 - this very program

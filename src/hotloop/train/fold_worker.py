"""A process that runs folds of a cross-validation one after another: ``python -m hotloop.train.fold_worker``.

The first line of its stdin is the cross-validation, and each line after it a fold.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import tempfile
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hotloop.errors import HotloopError, StepLostError
from hotloop.train import configure, kfold_state, run_storage
from hotloop.train.child import DONE, INTERRUPTED, REPLACE, Parent
from hotloop.train.interrupt import wished
from hotloop.train.one_fold import OneFold, words
from hotloop.train.turn import folder_held

if TYPE_CHECKING:
    from collections.abc import Mapping

_PATIENCE_SECONDS = 120.0
"""How long a fold waits for another process that trains in its folder: one whose parent was killed is about to stop."""


def main() -> int:
    """Run folds until there is none left, and give the process's exit code."""
    parent = Parent()
    try:
        whole = parent.hear()
        if whole is None:
            return DONE
        settings, folder = configure.from_dict(whole["settings"]), Path(whole["folder"])
        recipe = importlib.import_module("hotloop.recipes").load(settings.recipe.name)
        with contextlib.ExitStack() as stack:
            if whole["away"] and settings.run.storage:  # what there is of a fold comes from the storage
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hotloop-")), folder.name)
            one = OneFold(settings, folder, whole["again"], recipe)
            while (job := parent.hear()) is not None:
                _run(one, job, parent)
    except KeyboardInterrupt:
        return INTERRUPTED
    except StepLostError:
        return REPLACE
    return DONE


def _run(one: OneFold, job: Mapping[str, Any], parent: Parent) -> None:
    """Run a fold and tell how it ended."""
    fold: int = job["fold"]
    folder = one.folder / f"fold-{fold}"
    try:
        run_storage.check(one.settings.run.storage)
        with folder_held(folder, _PATIENCE_SECONDS):
            outcome = one.train(fold, job["runs"], job["chosen"], lambda chosen: parent.tell(chosen=chosen))
    except KeyboardInterrupt:
        parent.tell(status="interrupted", note={"status": "interrupted", **kfold_state.facts(folder)})
        raise
    except Exception as error:  # whatever ends a fold is told, and whoever hears it decides
        if not isinstance(error, HotloopError):
            traceback.print_exception(error)
        note = {"status": "failed", "error": words(error), **kfold_state.facts(folder)}
        parent.tell(status="failed", note=note, kind=type(error).__name__, stop=wished(error))
        if isinstance(error, StepLostError):
            raise
    else:
        parent.tell(status=outcome.status, note=kfold_state.ended(outcome, folder), stop=outcome.stop)


if __name__ == "__main__":
    sys.exit(main())

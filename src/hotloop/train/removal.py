"""Runs are deleted: what may be, and how; nothing of several where one of them may not."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from hotloop.errors import ConfigError
from hotloop.report import runs
from hotloop.train.turn import LOCK, folder_held

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def remove(folders: Sequence[Path], confirm: Callable[[], object] = lambda: None, *, on_cluster: bool = False) -> None:
    """Delete the folders of runs with all that is in them.

    Args:
        folders: of the runs.
        confirm: called once all may be deleted; what it raises keeps them.
        on_cluster: also those that were on a cluster when they were fetched.

    Raises:
        ConfigError: one of them is no run, is used now, or is part of something larger; nothing was deleted.
    """
    with contextlib.ExitStack() as held:
        for folder in folders:
            _check(folder, held, on_cluster=on_cluster)
        confirm()
        if os.name == "nt":  # which deletes no file that is open
            held.close()
        for folder in folders:
            shutil.rmtree(folder)


def forgetting(folder: Path) -> str:
    """Return the command that deletes a run whose cluster never answers again."""
    return f"hotloop runs rm --forget {shlex.quote(str(folder))}"


def files(folder: Path) -> int:
    """Return how many files are in a folder, at any depth."""
    return sum(1 for path in folder.rglob("*") if not path.is_dir())


def _check(folder: Path, held: contextlib.ExitStack, *, on_cluster: bool) -> None:
    """Refuse a folder that must not be deleted; hold the locks of its runs."""
    row = runs.known(folder)
    here = folder.resolve()
    above = [here.parent, here.parent.parent]
    reasons = {
        "it is a link": folder.is_symlink(),
        "it is the current folder, or has it inside": Path.cwd().resolve().is_relative_to(here),
        "it is part of a search or a cross-validation": any(
            runs.kind_of(one) in (runs.FOLDS, runs.SEARCH) for one in above
        ),
        f"it is {row.place}. Fetch it first, or if the cluster is gone: {forgetting(folder)}": (
            row.status == runs.ON_CLUSTER and not on_cluster
        ),
        "its search runs now. Stop it first": row.status == "running" and row.kind == runs.SEARCH,
    }
    if why := next((why for why, holds in reasons.items() if holds), ""):
        raise ConfigError(f"{folder} is not deleted: {why}")
    locks = {path.parent for path in folder.rglob(f"{LOCK}*") if path.is_file() and not path.is_symlink()}
    for place in sorted(locks):
        held.enter_context(folder_held(place))

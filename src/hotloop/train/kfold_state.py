"""What is known of a cross-validation on its way: ``kfold.json``, always a whole file, and the page made of it."""

from __future__ import annotations

import math
import statistics
import time
from typing import TYPE_CHECKING, Any

from hotloop import record
from hotloop.errors import HotloopError
from hotloop.report import folds as report
from hotloop.report.page import write_view
from hotloop.train import configure, mirror
from hotloop.train.kept import Kept
from hotloop.train.start import SETTINGS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from hotloop.train.folds import Sides
    from hotloop.train.outcome import Outcome
    from hotloop.train.settings import Settings

PAGE = "report.html"
_NOT_METRICS = ("step", "epoch", "split", "time")


class State:
    """The document of a cross-validation, on disk after each change.

    A disk that fails is told once and stops nothing, since all that a resumed cross-validation needs besides is in the
    folders of its folds.

    Args:
        folder: the cross-validation's.
        document: what there is of it.
        say: prints a line.
    """

    def __init__(self, folder: Path, document: dict[str, Any], say: Callable[[str], None]) -> None:
        self.folder, self.document, self._say = folder, document, say
        self._kept = Kept(mirror.of(document["settings"]["run"].get("storage"), folder))
        self._warned = False

    def fold(self, fold: int) -> dict[str, Any]:
        """Return what is known of one fold."""
        found: dict[str, Any] = next(one for one in self.document["folds"] if one["fold"] == fold)
        return found

    def note(self, fold: int, **values: Any) -> None:
        """Set values of a fold, and write the document."""
        self.fold(fold).update(values)
        self.document["metrics"] = summed(self.document["folds"])
        self.save()

    def settle(self, status: str, error: str | None = None) -> None:
        """Say how the whole ended, and write its page."""
        self.document.update(status=status, error=error, finished=time.time())
        self.save()
        written = self.write_page()
        self._kept.push_last(self._say, (SETTINGS, report.DOCUMENT, PAGE))
        if written:
            self._say(f"Report of the folds: {self.folder / PAGE}")

    def write_page(self) -> bool:
        """Write the page of what is known by now; where that fails, say so and go on."""
        try:
            write_view(report.build(self.document), self.folder / PAGE)
        except OSError as error:
            self._say(f"The report of the folds cannot be written ({error}); try: hotloop report {self.folder}")
            return False
        return True

    def save(self) -> None:
        """Write the document; where that fails, say so once and go on."""
        self.document["updated"] = time.time()
        try:
            report.SCHEMA.write(self.folder, self.document)
        except OSError as error:
            if not self._warned:
                self._warned = True
                self._say(f"{self.folder / report.DOCUMENT} cannot be written: {error}. The folds go on")
        self._kept.push(self._say, (SETTINGS, report.DOCUMENT, PAGE))


def begin(settings: Settings, contents: Sequence[Sides], which: Iterable[int]) -> dict[str, Any]:
    """Return the document of a cross-validation that begins.

    Args:
        settings: of the whole.
        contents: what is in each fold.
        which: the folds that are run.
    """
    return {
        "schema": report.SCHEMA.version,
        "recipe": settings.recipe.name,
        "created": time.time(),
        "starts": 0,
        "settings": configure.to_dict(settings),
        "contents": contents_of(contents),
        "folds": [{"fold": fold, "folder": f"fold-{fold}", "status": "pending"} for fold in which],
        "metrics": {},
    }


def contents_of(found: Sequence[Sides]) -> list[dict[str, Any]]:
    """Return what is in each fold as plain data, with its fingerprint."""
    return [
        {"train": one.train.to_dict(), "validation": one.validation.to_dict(), "fingerprint": one.fingerprint}
        if one.fingerprint
        else {}
        for one in found
    ]


def ended(outcome: Outcome, folder: Path) -> dict[str, Any]:
    """Return what a summary keeps of a fold that ended by itself or was interrupted."""
    return {
        "status": outcome.status,
        "error": None,
        "step": outcome.step,
        "best_step": outcome.best_step,
        "best": dict(outcome.best),
        **facts(folder),
    }


def facts(folder: Path) -> dict[str, Any]:
    """Read from a fold's record, all its starts together: the last validation, its step, seconds, what was compiled.

    Empty where there is no record that can be read.
    """
    try:
        document = record.load(folder)
    except HotloopError:
        return {}
    validations = [one for one in document["metrics"] if one.get("split") == "validation"]
    latest = validations[-1] if validations else {}
    return {
        "last": {key: value for key, value in latest.items() if key not in _NOT_METRICS},
        "last_step": latest.get("step"),
        "seconds": _sum(document["steps"], "seconds"),
        "compiled": _compiled(document),
    }


def _compiled(document: Mapping[str, Any]) -> dict[str, Any]:
    events = document["events"]
    compiles = [one for one in events if one.get("kind") == "compiled"]
    captures = [one for one in events if one.get("kind") == "captured"]
    # A hot loop has measured all that it took, proofs included; else the compiles are all that there was.
    whole = document["measurements"].get("prepare_seconds")
    running = next((one.get("running") for one in document["components"].values()), None)
    return {
        "running": "eager" if running == "none" else running,
        "compiles": len(compiles),
        "captured": len(captures),
        "seconds": whole if isinstance(whole, int | float) else _sum(compiles, "seconds"),
    }


def _sum(entries: Iterable[Mapping[str, Any]], key: str) -> float:
    return math.fsum(one[key] for one in entries if isinstance(one.get(key), int | float))


def summed(folds: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, dict[str, float | None]]]:
    """Return mean and standard deviation of each metric over the folds that finished, of the best and the last one.

    The standard deviation is that of a sample (divided by the number of folds less one); None of fewer than two folds.
    """
    done = [one for one in folds if one.get("status") == "finished"]
    return {kind: spread([one.get(kind) or {} for one in done]) for kind in ("best", "last")}


def spread(metrics: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float | None]]:
    """Return mean and sample standard deviation of each metric that all of several mappings have."""
    names = [name for name in (metrics[0] if metrics else ()) if all(name in one for one in metrics)]
    found: dict[str, dict[str, float | None]] = {}
    for name in names:
        values = [float(one[name]) for one in metrics]  # "nan" is read as well: a fold that has it must be seen
        finite = all(map(math.isfinite, values))
        std = statistics.stdev(values) if finite and len(values) > 1 else math.nan
        found[name] = {"mean": statistics.fmean(values), "std": std if len(values) > 1 else None}
    return found

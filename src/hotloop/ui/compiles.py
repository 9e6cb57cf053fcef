"""How far a run's compiles are: graphs and seconds so far, beside what an earlier run of the same settings took."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from hotloop import record
from hotloop.errors import RecordError
from hotloop.report.text import number

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from hotloop.report.runs import Row

_NO_MATTER = ("run.", "hpo.", "kfold.", "engine.", "data.", "training.")
_MATTER = (
    "training.batch_size",
    "training.eval_batch_size",
    "training.gradient_accumulation",
    "training.optimization.",
)
"""Of the settings of training, the ones that a graph depends on; a learning rate is none."""


@dataclasses.dataclass(frozen=True)
class Compiles:
    """The compiles of a run.

    Args:
        graphs, seconds: so far.
        earlier: those of an earlier run that made the same graphs; None where there is none.
    """

    graphs: int
    seconds: float
    earlier: Compiles | None = None

    @property
    def under_way(self) -> bool:
        """Whether more is to come, as far as the earlier run tells."""
        return self.earlier is not None and self.graphs < self.earlier.graphs


def of(document: Mapping[str, Any]) -> Compiles:
    """Return the compiles of a record; its events come at the end of each compiled call."""
    found = [one for one in document.get("events", ()) if one.get("kind") == "compiled"]
    return Compiles(len(found), sum(number(one.get("seconds")) or 0.0 for one in found))


def earlier(settings: Mapping[str, Any], others: Iterable[tuple[Path, Row]]) -> Compiles | None:
    """Return the compiles of the first finished run among others whose settings make the same graphs.

    Args:
        settings: by dotted names.
        others: runs, the newest first.
    """
    wanted = _relevant(settings)
    path = next((path for path, row in others if row.status == "finished" and _relevant(row.settings) == wanted), None)
    try:
        return of(record.load(path)) if path else None
    except RecordError:
        return None


def _relevant(settings: Mapping[str, Any]) -> dict[str, Any]:
    kept = (name for name in settings if not name.startswith(_NO_MATTER) or name.startswith(_MATTER))
    return {name: settings[name] for name in kept}

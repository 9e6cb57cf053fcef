"""The store of earlier costs: what each tier cost in earlier runs of the same model, inputs, hardware and versions.

Each key has a small JSON file of numbers and words. It is trusted only where it is this user's own and makes sense;
anything else is a miss, and is replaced. The store never stops a run: where it cannot be read or written, a line on the
log says so.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import statistics
import time
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, cast

from hotloop.cache import files

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    from hotloop.cache.keys import Key

Verdict = Literal["proven", "declined"]

SCHEMA_VERSION = 2
MAX_ENTRIES = 500
MAX_BYTES = 64 * 1024
"""Of each file: hotloop writes no larger file."""
KEPT = 9
"""Values kept of each figure; their median is what `CostStore.get` returns, so that one noisy run does not decide."""
_MAX_TIERS = 64
_MAX_RUNS = 10**9
_REASON_LENGTH = 300
_CLOCK_BACK = 86_400.0
"""Seconds that the clock may have gone back since costs were put; later ones are not believed."""
_TORN_AFTER = 3600.0
"""Seconds after which a temporary file was left by a killed process."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TierCosts:
    """The costs of a tier; None is what was not measured.

    Args:
        cold_seconds: from the decision to the first fast step, compile caches empty.
        warm_seconds: the same with full compile caches.
        step_seconds: of one step in this tier.
        eager_seconds: of one eager step in the same run, so that both felt the same machine.
        verdict: ``proven`` or ``declined``, with the ``reason``.
        runs: how many runs this comes from.
        when: the time of the last run, in seconds since 1970.
    """

    cold_seconds: float | None = None
    warm_seconds: float | None = None
    step_seconds: float | None = None
    eager_seconds: float | None = None
    verdict: Verdict | None = None
    reason: str = ""
    runs: int = 1
    when: float = 0.0

    @classmethod
    def of_entry(cls, entry: dict[str, Any]) -> TierCosts:
        """Summarise an entry of a file."""
        figures = {name: statistics.median(values) for name, values in entry["figures"].items()}
        told = {name: entry[name] for name in ("verdict", "reason", "runs", "when") if name in entry}
        return cls(**figures, **told)

    def to_entry(self) -> dict[str, Any]:
        """Return the costs of one run as an entry of a file, with lists of one value.

        Raises:
            ValueError: a figure is negative, not finite, or too large to be true.
        """
        figures = {}
        for name, limit in _LIMITS.items():
            value = getattr(self, name)
            if value is None:
                continue
            if not _is_figure(value, limit):
                raise ValueError(f"{name} {value!r}: expected a number from 0 to {limit:g}")
            figures[name] = [value]
        entry: dict[str, Any] = {"figures": figures, "runs": 1, "when": time.time()}
        if self.verdict is not None:
            entry |= {"verdict": self.verdict, "reason": self.reason[:_REASON_LENGTH]}
        return entry


_LIMITS: Mapping[str, float] = {
    "cold_seconds": 1e6,
    "warm_seconds": 1e6,
    "step_seconds": 1e6,
    "eager_seconds": 1e6,
}
"""The figures of which several values are kept, and the largest value of each that is believed."""


class CostStore:
    """Costs of earlier runs on this machine, by key and tier. Every method is safe in several processes at once.

    Args:
        folder: where the files are; unset takes ``$HOTLOOP_CACHE_DIR``, else ``$XDG_CACHE_HOME/hotloop``, else
            ``~/.cache/hotloop``. It is made when the first costs are put. With an empty ``$HOTLOOP_CACHE_DIR`` nothing
            is kept.
    """

    def __init__(self, folder: str | os.PathLike[str] | None = None) -> None:
        self._say = files.WarnOnce("The run goes on without.")
        self.folder: Path | None = Path(folder) if folder is not None else None
        if folder is None:
            try:
                self.folder = files.default_folder()
            except RuntimeError as error:
                self._say(f"earlier costs are not kept: {error}")

    def get(self, key: Key) -> Mapping[str, TierCosts] | None:
        """Return the known costs by tier; None where none are known, or none that can be believed."""
        if self.folder is None or (stored := self._load(self.folder / f"costs-{key}.json")) is None:
            return None
        return MappingProxyType({tier: TierCosts.of_entry(entry) for tier, entry in stored.items()})

    def put(self, key: Key, tier: str, costs: TierCosts) -> None:
        """Add what a run found out about a tier: figures join the earlier ones, a verdict replaces the earlier verdict.

        ``runs`` and ``when`` are set by the store. Where two processes put at once, the costs of one may be lost.

        Raises:
            ValueError: a figure is negative, not finite, or too large to be true.
        """
        added = costs.to_entry()
        if self.folder is None:
            return
        path = self.folder / f"costs-{key}.json"
        tiers = self._load(path) or {}
        known = tiers.pop(tier, {})
        figures = dict(known.get("figures", {}))
        for name, values in added["figures"].items():
            figures[name] = [*figures.get(name, []), *values][-KEPT:]
        tiers[tier] = {**known, **added, "figures": figures, "runs": min(known.get("runs", 0) + 1, _MAX_RUNS)}
        while len(tiers) > _MAX_TIERS:
            tiers.pop(next(iter(tiers)))
        document = {"schema": SCHEMA_VERSION, "key": dict(key.parts), "tiers": tiers}
        text = json.dumps(document, allow_nan=False).encode("ascii")
        if len(text) > MAX_BYTES:
            self._say(f"earlier costs cannot be kept in {self.folder}: they take {len(text)} bytes, above {MAX_BYTES}")
            return
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            files.replace(path, text)
            self._prune(self.folder)
        except OSError as error:
            self._say(f"earlier costs cannot be kept in {self.folder}: {error}")

    def _load(self, path: Path) -> dict[str, dict[str, Any]] | None:
        """Return the entries of a file by tier; None where it cannot be used."""
        try:
            return _valid_tiers(json.loads(files.read_own(path, MAX_BYTES)))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, RecursionError) as error:
            self._say(f"earlier costs in {path} are not used: {error}")
            return None

    @staticmethod
    def _prune(folder: Path) -> None:
        """Remove the oldest entries beyond the limit, and what killed processes left half written."""
        ages: list[tuple[float, Path]] = []
        for path in folder.glob("costs-*"):
            with contextlib.suppress(FileNotFoundError):  # another process prunes too
                age = path.stat().st_mtime
                if path.suffix == ".json":
                    ages.append((age, path))
                elif time.time() - age > _TORN_AFTER:
                    path.unlink()
        for _, path in sorted(ages)[: max(0, len(ages) - MAX_ENTRIES)]:
            path.unlink(missing_ok=True)


def _is_figure(value: object, limit: float) -> bool:
    """Return whether a value is a plain, finite number in range; JSON can hold NaN, and true is an int in Python."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= limit


def _valid_tiers(document: Any) -> dict[str, dict[str, Any]]:
    """Return the entries of a file's document by tier, built anew from known values in range.

    Raises:
        ValueError: it is no document of hotloop's, or holds a value that cannot be.
    """
    if not isinstance(document, dict) or document.get("schema") != SCHEMA_VERSION:
        raise ValueError(f"no costs of schema {SCHEMA_VERSION}")
    tiers = document.get("tiers")
    if not isinstance(tiers, dict) or len(tiers) > _MAX_TIERS:
        raise ValueError("no table of tiers")
    return {tier: _valid_entry(tier, entry) for tier, entry in tiers.items()}


def _valid_entry(tier: str, entry: Any) -> dict[str, Any]:
    figures = entry.get("figures") if isinstance(entry, dict) else None
    if not isinstance(figures, dict) or not figures.keys() <= _LIMITS.keys():
        raise ValueError(f"tier {tier!r} has figures that cannot be")
    for name, values in figures.items():
        listed = isinstance(values, list) and 1 <= len(values) <= KEPT
        if not listed or not all(_is_figure(value, _LIMITS[name]) for value in values):
            raise ValueError(f"tier {tier!r} has figures that cannot be")
    runs, when = entry.get("runs"), entry.get("when")
    if type(runs) is not int or not 1 <= runs <= _MAX_RUNS or not _is_figure(when, time.time() + _CLOCK_BACK):
        raise ValueError(f"tier {tier!r} has runs {runs!r} at {when!r}")
    valid = {"figures": figures, "runs": runs, "when": float(cast("float", when))}
    if (verdict := entry.get("verdict")) is None:
        return valid
    reason = entry.get("reason")
    if verdict not in ("proven", "declined") or not isinstance(reason, str) or len(reason) > _REASON_LENGTH:
        raise ValueError(f"tier {tier!r} has a verdict that cannot be")
    return {**valid, "verdict": verdict, "reason": "".join(c if c.isprintable() else " " for c in reason)}

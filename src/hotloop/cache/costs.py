"""The store of earlier costs: what each tier cost in earlier runs of the same model, inputs, hardware and versions.

One small JSON file a key. It holds numbers and words only, and is believed only where it is this user's own and makes
sense; anything else is a miss, and is replaced. The store is never worth a run: where it cannot be read or written, one
line on the log says so.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
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
"""Of one file: a larger one is none of ours."""
KEPT = 9
"""Values kept of each figure; their median is what `CostStore.get` gives, so that one noisy run does not decide."""
_MAX_TIERS = 64
_REASON_LENGTH = 300
_MAX_SECONDS = 1e6
_MAX_MEMORY = 2**50
_MAX_RUNS = 10**9
_TORN_AFTER = 3600.0
"""Seconds after which a temporary file was left by a killed process."""

_log = logging.getLogger("hotloop")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TierCosts:
    """What one tier costs; None is what was not measured.

    Args:
        cold_seconds: from the decision to the first fast step, compile caches empty.
        warm_seconds: the same with full compile caches.
        step_seconds: of one step in this tier.
        eager_seconds: of one eager step in the same run, so that both felt the same machine.
        peak_bytes: of device memory in a step of this tier.
        verdict: ``proven`` or ``declined``, with the ``reason``.
        runs: how many runs this comes from.
        when: of the last one, in seconds since 1970.
    """

    cold_seconds: float | None = None
    warm_seconds: float | None = None
    step_seconds: float | None = None
    eager_seconds: float | None = None
    peak_bytes: int | None = None
    verdict: Verdict | None = None
    reason: str = ""
    runs: int = 1
    when: float = 0.0


_SECONDS = ("cold_seconds", "warm_seconds", "step_seconds", "eager_seconds")
_LIMITS: Mapping[str, float] = {**dict.fromkeys(_SECONDS, _MAX_SECONDS), "peak_bytes": _MAX_MEMORY}
"""The figures that are kept several times over, and the largest value of each that is believed."""


class CostStore:
    """Costs of earlier runs on this machine, by key and tier. Every method is safe in several processes at once.

    Args:
        folder: where the files are; unset takes ``$HOTLOOP_CACHE_DIR``, else ``$XDG_CACHE_HOME/hotloop``, else
            ``~/.cache/hotloop``. It is made when the first costs are put. With an empty ``$HOTLOOP_CACHE_DIR`` nothing
            is kept.
    """

    def __init__(self, folder: str | os.PathLike[str] | None = None) -> None:
        self._said = False
        self.folder: Path | None = Path(folder) if folder is not None else self._default_folder()

    def get(self, key: Key) -> Mapping[str, TierCosts] | None:
        """Give what is known of each tier, by its name; None where nothing is, or nothing that can be believed."""
        if self.folder is None or (stored := self._load(self._path(self.folder, key))) is None:
            return None
        return MappingProxyType({tier: _summary(entry) for tier, entry in stored.items()})

    def put(self, key: Key, tier: str, costs: TierCosts) -> None:
        """Add what a run found out about a tier: figures join the earlier ones, a verdict replaces the earlier one.

        ``runs`` and ``when`` are set by the store. Where two processes put at once, one of the two may be lost.

        Raises:
            ValueError: a figure is negative, not finite, or beyond belief.
        """
        added = _checked(costs)
        if self.folder is None:
            return
        path = self._path(self.folder, key)
        tiers = self._load(path) or {}
        tiers[tier] = _merged(tiers.pop(tier, {}), added)
        while len(tiers) > _MAX_TIERS:
            tiers.pop(next(iter(tiers)))
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            _replace(path, {"schema": SCHEMA_VERSION, "key": dict(key.parts), "tiers": tiers})
            _prune(self.folder)
        except OSError as error:
            self._say(f"earlier costs cannot be kept in {self.folder}: {error}")

    def _default_folder(self) -> Path | None:
        try:
            return files.default_folder()
        except RuntimeError as error:
            self._say(f"earlier costs are not kept: {error}")
            return None

    @staticmethod
    def _path(folder: Path, key: Key) -> Path:
        return folder / f"costs-{key}.json"

    def _load(self, path: Path) -> dict[str, dict[str, Any]] | None:
        try:
            text = files.read_own(path, MAX_BYTES)
        except FileNotFoundError:
            return None
        except OSError as error:
            self._say(f"earlier costs in {path} are not used: {error}")
            return None
        try:
            return _validated(json.loads(text))
        except (ValueError, RecursionError) as error:
            self._say(f"earlier costs in {path} are not used: {error}")
            return None

    def _say(self, line: str) -> None:
        """Say the first trouble on the log; more of it would tell nothing new."""
        if not self._said:
            self._said = True
            _log.warning("%s. The run goes on without.", line)


def _checked(costs: TierCosts) -> dict[str, Any]:
    """Give the costs as an entry of the file, with lists of one value."""
    figures = {}
    for name, limit in _LIMITS.items():
        value = getattr(costs, name)
        if value is None:
            continue
        if not _is_figure(value, limit):
            raise ValueError(f"{name} {value!r}: expected a number from 0 to {limit:g}")
        figures[name] = [value]
    entry: dict[str, Any] = {"figures": figures, "runs": 1, "when": time.time()}
    if costs.verdict is not None:
        entry |= {"verdict": costs.verdict, "reason": costs.reason[:_REASON_LENGTH]}
    return entry


def _merged(known: dict[str, Any], added: dict[str, Any]) -> dict[str, Any]:
    before = known.get("figures", {})
    figures = {
        name: [*before.get(name, []), *added["figures"].get(name, [])][-KEPT:]
        for name in _LIMITS
        if name in before or name in added["figures"]
    }
    return {**known, **added, "figures": figures, "runs": min(known.get("runs", 0) + 1, _MAX_RUNS)}


def _summary(entry: dict[str, Any]) -> TierCosts:
    figures = {name: statistics.median(values) for name, values in entry["figures"].items()}
    if "peak_bytes" in figures:
        figures["peak_bytes"] = max(entry["figures"]["peak_bytes"])  # what has been needed once may be needed again
    return TierCosts(
        **figures,
        verdict=entry.get("verdict"),
        reason=entry.get("reason", ""),
        runs=entry["runs"],
        when=entry["when"],
    )


def _is_figure(value: object, limit: float) -> bool:
    """Tell whether a value is a plain, finite number in range; JSON can hold NaN, and true is an int in Python."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= limit


def _validated(document: Any) -> dict[str, dict[str, Any]]:
    """Give the tiers of a file's document, built anew from what is known and in range.

    Raises:
        ValueError: it is no document of ours, or holds a value that cannot be.
    """
    if not isinstance(document, dict) or document.get("schema") != SCHEMA_VERSION:
        raise ValueError(f"no costs of schema {SCHEMA_VERSION}")
    tiers = document.get("tiers")
    if not isinstance(tiers, dict) or len(tiers) > _MAX_TIERS:
        raise ValueError("no table of tiers")
    return {tier: _valid_entry(tier, entry) for tier, entry in tiers.items()}


def _valid_entry(tier: str, entry: Any) -> dict[str, Any]:
    figures = entry.get("figures") if isinstance(entry, dict) else None
    if not isinstance(figures, dict) or not all(_are_figures(name, values) for name, values in figures.items()):
        raise ValueError(f"tier {tier!r} has figures that cannot be")
    runs, when = entry.get("runs"), entry.get("when")
    if type(runs) is not int or not 1 <= runs <= _MAX_RUNS or not _is_figure(when, time.time() + _TORN_AFTER):
        raise ValueError(f"tier {tier!r} has runs {runs!r} at {when!r}")
    valid = {"figures": figures, "runs": runs, "when": float(cast("float", when))}
    if (verdict := entry.get("verdict")) is None:
        return valid
    reason = entry.get("reason")
    if verdict not in ("proven", "declined") or not isinstance(reason, str) or len(reason) > _REASON_LENGTH:
        raise ValueError(f"tier {tier!r} has a verdict that cannot be")
    return {**valid, "verdict": verdict, "reason": "".join(c if c.isprintable() else " " for c in reason)}


def _are_figures(name: str, values: Any) -> bool:
    limit = _LIMITS.get(name)
    known = limit is not None and isinstance(values, list) and 1 <= len(values) <= KEPT
    return known and all(_is_figure(value, cast("float", limit)) for value in values)


def _replace(path: Path, document: dict[str, Any]) -> None:
    text = json.dumps(document, allow_nan=False).encode("ascii")
    if len(text) > MAX_BYTES:
        raise OSError(f"the costs take {len(text)} bytes, more than {MAX_BYTES}")
    files.replace(path, text)


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

"""The figures of earlier runs: what each tier cost and saved for the same model, inputs, hardware and versions.

One small JSON file holds numbers alone. It is trusted only where it is this user's own and makes sense; anything else
is a miss, and is replaced. The store never stops a run: where it cannot be read or written, a line on the log says so.
"""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

from hotloop.cache import files

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

SCHEMA_VERSION = 1
MOST_PROGRAMS = 500
_MAX_BYTES = 2**20
_LARGEST = 1e6
"""The largest figure that is believed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TierCosts:
    """The costs of a tier, in the last run that timed it; None is what was not measured.

    Args:
        ratio: a step's time over that of an eager step in the same run, so that both felt the same machine.
        cold_seconds: from the decision to the first fast step, compile caches empty.
        warm_seconds: the same with full compile caches.
    """

    ratio: float
    cold_seconds: float | None = None
    warm_seconds: float | None = None

    @property
    def sensible(self) -> bool:
        """Whether all figures are numbers that can be; JSON can hold NaN and texts."""
        given = [value for value in (self.ratio, self.cold_seconds, self.warm_seconds) if value is not None]
        numbers = [value for value in given if isinstance(value, int | float) and not isinstance(value, bool)]
        return len(numbers) == len(given) > 0 and all(0 <= value <= _LARGEST for value in numbers)


class CostStore:
    """Costs of earlier runs on this machine, by program and tier.

    Args:
        folder: where the file is; unset takes `files.default_folder`. With an empty ``$HOTLOOP_CACHE_DIR`` nothing is
            kept.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._say = files.WarnOnce("The run goes on without.")
        try:
            folder = folder or files.default_folder()
        except RuntimeError as error:
            self._say(f"earlier costs are not kept: {error}")
        self.path = None if folder is None else folder / "costs.json"

    def get(self, program: str) -> dict[str, TierCosts]:
        """Return the known costs of a program (`hotloop.cache.key_of`) by tier."""
        return self._programs().get(program, {})

    def put(self, program: str, tier: str, costs: TierCosts) -> None:
        """Note what a run found out about a tier; of two processes that do so at once, one may lose its figures."""
        if self.path is None or not costs.sensible:
            return
        programs = self._programs()
        known = programs.pop(program, {})
        earlier = known.get(tier, costs)
        known[tier] = dataclasses.replace(
            costs,
            cold_seconds=earlier.cold_seconds if costs.cold_seconds is None else costs.cold_seconds,
            warm_seconds=earlier.warm_seconds if costs.warm_seconds is None else costs.warm_seconds,
        )
        programs[program] = known
        last = dict(list(programs.items())[-MOST_PROGRAMS:])
        rows = {key: {name: dataclasses.asdict(one) for name, one in tiers.items()} for key, tiers in last.items()}
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            files.replace(self.path, json.dumps({"schema": SCHEMA_VERSION, "programs": rows}).encode())
        except OSError as error:
            self._say(f"earlier costs cannot be kept in {self.path}: {error}")

    def _programs(self) -> dict[str, dict[str, TierCosts]]:
        """Return what is kept; nothing where the file cannot be used."""
        if self.path is None:
            return {}
        try:
            return _read(json.loads(files.read_own(self.path, _MAX_BYTES)))
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, TypeError, AttributeError, LookupError, RecursionError) as error:
            self._say(f"earlier costs in {self.path} are not used: {error}")
            return {}


def _read(document: Mapping[str, Any]) -> dict[str, dict[str, TierCosts]]:
    if document["schema"] != SCHEMA_VERSION:
        raise ValueError(f"expected schema {SCHEMA_VERSION}")
    programs = {
        program: {tier: TierCosts(**figures) for tier, figures in tiers.items()}
        for program, tiers in document["programs"].items()
    }
    if not all(costs.sensible for tiers in programs.values() for costs in tiers.values()):
        raise ValueError("it has figures that cannot be")
    return programs

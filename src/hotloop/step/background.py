"""The background compile of one loop: what can be compiled by a child, which tier is under way, which are ready."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hotloop.cache import BackgroundCompile, BackgroundUnavailableError, Done, Recorder, Request

if TYPE_CHECKING:
    from hotloop.step.loop import Loop
    from hotloop.step.tiers import Tier

_LIMIT_SECONDS = 1800.0


class Background:
    """Looks after at most one child at a time."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._recorder: Recorder | None = None
        self._child: BackgroundCompile | None = None
        self._bases: set[str] = set()
        self.tier: str | None = None
        """The tier that a child compiles for just now."""
        self.failed: tuple[str, str] | None = None
        """The tier that could not be compiled, and why."""
        self.unavailable = ""
        """Why no child can compile for this program; empty as long as one can."""

    def record(self) -> Recorder | None:
        """Give the recorder for one eager step, the first time; its calls are what a child will compile."""
        if self._recorder is not None or self._loop.workload or self._loop.given == "as-given":
            return None
        self._recorder = Recorder(self._loop.compiled.models)
        return self._recorder

    def possible(self, name: str) -> bool:
        """Tell whether a child could compile for a tier."""
        base = name.removesuffix("+graph")
        if base in ("eager", "as-given") or base in self._bases or self.unavailable or self.tier is not None:
            return False
        if self._loop.workload:
            return True
        if self._recorder is None:
            return False
        if self._recorder.reason:
            self._refuse(self._recorder.reason)
        return not self._recorder.reason

    def ready(self, name: str) -> bool:
        """Tell whether a child has filled the cache for a tier."""
        return name.removesuffix("+graph") in self._bases

    def start(self, tier: Tier, limit_seconds: float | None) -> None:
        """Start a child for a tier's code; where that is not possible, `unavailable` says why."""
        settings = self._loop.compiled.settings(tier, draws_random=self._loop.draws_random)
        try:
            if self._loop.workload:
                request = Request.of_factory(self._loop.workload, settings)
            else:
                assert self._recorder is not None
                request = self._recorder.request(settings)
            limit = _LIMIT_SECONDS if limit_seconds is None else max(60.0, min(_LIMIT_SECONDS, limit_seconds))
            self._child = BackgroundCompile.start(request, limit_seconds=limit)
        except BackgroundUnavailableError as error:
            self._refuse(str(error))
            return
        self.tier = tier.name

    def _refuse(self, reason: str) -> None:
        self.unavailable = reason
        self._loop.say_once(f"background unavailable: {reason}")

    def ended(self) -> bool:
        """Tell whether the child has ended since this was last asked."""
        if self._child is None or (outcome := self._child.poll()) == "running":
            return False
        name, self._child, self.tier = self.tier, None, None
        assert name is not None
        self.failed = None
        if isinstance(outcome, Done):
            self._bases.add(name.removesuffix("+graph"))
            self._loop.say_once(f"{name}: compiled in the background in {outcome.seconds:.0f} s")
        else:
            self.failed = name, outcome.reason
            self._loop.say_once(f"{name}: the background compile failed: {outcome.reason}")
        return True

    def stop(self) -> None:
        """Stop the child."""
        if self._child is not None:
            self._child.stop()
            self._child, self.tier = None, None

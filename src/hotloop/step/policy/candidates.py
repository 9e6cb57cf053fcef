"""The tiers that a program could run in, each with what is known of its cost and its speed, for `decide` to choose."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch

from hotloop.decide import Facts, Option
from hotloop.measure import machine
from hotloop.step.tiers import NAMED, Tier, parse

if TYPE_CHECKING:
    from collections.abc import Collection

    from hotloop.decide import Speeds
    from hotloop.step.loop.loop import Loop
    from hotloop.step.policy.background import Background
    from hotloop.step.policy.history import Earlier


class Offers:
    """Offers tiers for one loop.

    Args:
        loop: whose.
        speeds: what this run timed.
        earlier: what earlier runs found out.
        background: what a child has compiled, or could.

    Attributes:
        waiting: of eager steps that began on an idle device, the share that the host was at them.
    """

    def __init__(self, loop: Loop, speeds: Speeds, earlier: Earlier, background: Background) -> None:
        self._loop, self._speeds, self._earlier, self._background = loop, speeds, earlier, background
        self.waiting: list[float] = []

    def options(
        self, in_force: str, *, proven: Collection[str], declined: Collection[str], paired: str | None
    ) -> list[Option]:
        """Give the tiers that there are beside the one in force, but for those that were declined.

        Args:
            in_force: the tier that steps run in.
            proven: tiers that steps can run in at once.
            declined: tiers that cannot run.
            paired: the tier that was just timed by turns with the one in force.
        """
        base = self._speeds.seconds(self._loop.given)
        assert base is not None
        facts = Facts(
            device="cpu" if self._loop.engine is None else "cuda",  # the stand-in stands for a GPU here as well
            eager_seconds=base,
            launch_bound=self._launch_bound(),
            measured=self._speeds.measured(),
            state_bytes=sum(
                one.nbytes for one in self._loop.holdings.tensors().values() if one.layout == torch.strided
            ),
            slower=self._background.slower,
        )
        left_alone = {*declined} | {name for name in self.names() if self._earlier.program.hopeless(name)}
        names = [name for name in self.names() if name != in_force and name not in left_alone]
        needed = self._graph_bytes()
        return [
            dataclasses.replace(option, memory_bytes=needed)
            if name.endswith("+graph") and name not in proven
            else option
            for name in names
            for option in self._offers(name, facts, proven, paired)
        ]

    def names(self) -> list[str]:
        """Name the tiers that this program could run in."""
        given = self._loop.given
        names = ["as-given", "as-given+graph"] if given == "as-given" else list(NAMED)
        if not self._loop.compiled.in_blocks:
            names = [name for name in names if not name.startswith("regional")]
        return [name for name in names if not (tier := parse(name)).graph or self._records(tier)]

    def _records(self, tier: Tier) -> bool:
        engine = self._loop.engine
        return engine is not None and (engine.kernels or not tier.makes_kernels)

    def _offers(self, name: str, facts: Facts, proven: Collection[str], paired: str | None) -> list[Option]:
        rejected = self._speeds.rejected_at(name)
        if name in proven:
            seconds = self._speeds.seconds(name)
            if seconds is None:
                return []
            return [
                Option(
                    tier=name,
                    step_seconds=seconds,
                    prepare_seconds=0.0,
                    source="measured",
                    paired=name == paired,
                    recalled=name not in self._earlier.timed_here,
                    rejected_at=rejected,
                )
            ]
        known = self._earlier.recalled(name, facts, rejected) or self._earlier.option(name, facts, rejected)
        if known is not None:
            return [known]
        return self._background.offers(name, facts, rejected)

    def _launch_bound(self) -> float | None:
        """Give the share of an eager step that the device waits for the host, as far as times tell.

        A host that is done long before the device keeps it busy. One that takes as long as the step may hold it up, or
        may have been waiting for it: then nothing is known. Steps that began on an idle device tell: a device holds
        about a thousand launches, and where the step before has filled them up, a host waits in each step.
        """
        if self._loop.device.type != "cuda" or not self.waiting:
            return None
        return 0.0 if max(self.waiting) < 0.8 else None  # noqa: PLR2004 - well before

    def free_bytes(self) -> int | None:
        """Give the GPU memory that nobody holds, what torch has cached included."""
        device = self._loop.device
        return machine.free_bytes(device) if device.type == "cuda" else None

    def _graph_bytes(self) -> int | None:
        """Give what a recording of the eager step would hold: what a step needs beside model and optimizer."""
        device = self._loop.device
        if device.type != "cuda":
            return None
        return torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device)

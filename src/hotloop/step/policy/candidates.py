"""The tiers that a program could run in, each with what is known of its cost and its speed, for `decide` to choose."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch

from hotloop.decide import Facts, Option, expect
from hotloop.measure import machine
from hotloop.step import layout
from hotloop.step.tiers import CHANNELS_LAST, NAMED, parse

if TYPE_CHECKING:
    from hotloop.decide import Speeds
    from hotloop.step.context import Context
    from hotloop.step.policy.background_tiers import Background
    from hotloop.step.policy.history import History

_EARLY = 0.8
"""Share of an eager step within which a host is done well before the device; chosen, not measured."""


class Candidates:
    """The tiers that a loop may choose among, from its own trials, earlier runs and what a child process compiled.

    Attributes:
        proven: names of the tiers that steps can run in at once.
        declined: names of the tiers that cannot run, or were given up.
        host_shares: of eager steps that began on an idle device, the share of its time that the host worked.
    """

    def __init__(self, context: Context, speeds: Speeds, history: History, background: Background) -> None:
        self._context, self._speeds, self._history, self._background = context, speeds, history, background
        self.proven: set[str] = {context.base_tier.name}
        self.declined: set[str] = set()
        self.host_shares: list[float] = []

    def decline(self, name: str) -> None:
        """Leave a tier out for the rest of the run."""
        self.declined.add(name)
        self.proven.discard(name)

    def options(self, in_force: str, paired: str | None = None) -> list[Option]:
        """Return the tiers other than ``in_force`` that were not declined.

        A trial has just found ``paired`` faster than the tier in force.
        """
        base = self._speeds.seconds(self._context.base_tier.name)
        assert base is not None
        facts = Facts(
            device="cpu" if self._context.engine is None else "cuda",  # an emulated engine stands for a GPU here
            eager_seconds=base,
            launch_bound=self._launch_bound(),
            measured=self._speeds.measured(),
            state_bytes=self.state_bytes(),
            slower=self._background.slower,
        )
        graph_bytes = self.graph_bytes()
        options: list[Option] = []
        for name in self.names():
            if name == in_force or name in self.declined:
                continue
            for option in self._options_of(name, facts, paired):
                needs_graph = name.endswith("+graph") and name not in self.proven
                options.append(dataclasses.replace(option, memory_bytes=graph_bytes) if needs_graph else option)
        return options

    def names(self) -> list[str]:
        """Name the tiers that this program could run in."""
        as_given = self._context.base_tier.base == "as-given"
        names = ["as-given", "as-given+graph"] if as_given else list(NAMED)
        if not self._context.compiled.in_blocks:
            names = [name for name in names if not name.startswith("regional")]
        engine, wanted = self._context.engine, self._context.layout
        if self._context.parts.sharded():
            names = [name for name in names if not parse(name).other_kernels]
        if engine is None or wanted == "as-given" or layout.why_not(self._context.parts.modules()):
            names = [name for name in names if not parse(name).channels_last]
        elif wanted == CHANNELS_LAST:
            names = [name for name in names if parse(name).channels_last or name == self._context.base_tier.name]
        if engine is None:
            return [name for name in names if not parse(name).graph]
        return [name for name in names if engine.kernels or not (parse(name).graph and parse(name).makes_kernels)]

    def _options_of(self, name: str, facts: Facts, paired: str | None) -> list[Option]:
        rejected = self._speeds.rejected_at(name)
        if name not in self.proven:
            known = self._history.option(name, facts, rejected)
            return [known] if known is not None else self._background.options(name, facts, rejected)
        seconds = self._speeds.seconds(name)
        if seconds is None:  # proven on the way to a graph that was declined, and never timed
            found = expect(name, facts)
            untimed = found and dataclasses.replace(
                found, prepare_seconds=0.0, prepare_worst_seconds=0.0, proof_seconds=0.0, rejected_at=rejected
            )
            return [untimed] if untimed else []
        ready = Option(
            tier=name,
            step_seconds=seconds,
            prepare_seconds=0.0,
            source="measured",
            paired=name == paired,
            recalled=name not in self._history.timed_here,
            rejected_at=rejected,
        )
        return [ready]

    def _launch_bound(self) -> float | None:
        """Return the share of an eager step that the device waits for the host: 0, or None where it is not known.

        A host that is done long before the device keeps it busy. A host that takes as long as the step may hold the
        device up, or may have waited for it. Only steps that began on an idle device count: a device holds about a
        thousand launches, and once the step before has filled them up, the host waits in each step.
        """
        if self._context.device.type != "cuda" or not self.host_shares:
            return None
        return 0.0 if max(self.host_shares) < _EARLY else None

    def state_bytes(self) -> int:
        """Return the bytes of parameters and optimizer state, which a proof copies."""
        tensors = self._context.holdings.tensors().values()
        return sum(tensor.nbytes for tensor in tensors if tensor.layout == torch.strided)

    def free_bytes(self) -> int | None:
        """Return the GPU memory in bytes that nobody holds, torch's cache included; None on a CPU."""
        device = self._context.device
        return machine.free_bytes(device) if device.type == "cuda" else None

    def graph_bytes(self) -> int | None:
        """Return the bytes that a recording of the eager step would hold: what a step needs beside its state."""
        device = self._context.device
        if device.type != "cuda":
            return None
        return torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device)

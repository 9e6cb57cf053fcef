"""What is expected of a tier before anything is measured for the program: a table, and its use.

A tier with a graph has no launch overhead, so its step is expected from the *captured* eager step: eager times the
share in which the device works, or ``eager+graph`` itself once it is measured. A tier without a graph is expected from
the eager step. Once tiers are measured, the nearest of them is the reference: ``full+graph`` is expected from
``regional+graph`` if that is known.

Figures: measured on 2026-11-20 (one H200, torch 2.11; tiny, xlmr, inception, gpt, unet), in the order low, expected,
high; the preparation is ``cold`` less eager's own first three steps. The swap after a background compile took for a
whole model 4.7 s (xlmr), 6.7 s (inception), 7.9 s (gpt); by block 1.3-1.7 s (xlmr, warm cache), and 6 s (gpt) and 7 s
(xlmr) before Inductor was imported. That import takes up to 4 s from a disk without bytecode, which no figure here
contains. Expected figures lie between the rows, not at their mean. Figures of a CPU are rough, from Inductor's usual
gain of 1.0 to 1.2 there.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from hotloop.decide.options import Option, number

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class Range:
    """A figure as it may turn out: at least, as expected, at most."""

    low: float
    expected: float
    high: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prior:
    """What is expected of one tier.

    Args:
        gain: how many times faster a step is than the captured eager step (a tier with a graph) or the eager step.
        prepare: seconds in the foreground, from an empty cache.
        swap: seconds that training stands still after a background compile; None if it cannot be compiled there.
        chance: chance that it can be prepared, proves right and is faster.
        rows: the measured workloads and ways behind the figures.
    """

    gain: Range
    prepare: Range
    swap: Range | None
    chance: float
    rows: str


CAPTURED = Range(0.0, 0.3, 0.9)
"""Share of the eager step in which the device waits for launches; measured 0.89, 0.61, 0.03, 0.01, 0.05."""

CHANNELS_LAST = "channels_last"

CUDA: Mapping[str, Prior] = {
    "eager+graph": Prior(
        gain=Range(0.98, 1.0, 1.02), prepare=Range(0.1, 0.3, 0.9), swap=None, chance=0.95, rows="eager + graph"
    ),
    # Measured on 2026-11-25 (one H100, torch 2.11, bfloat16): 1.63 and 1.67 times faster than the captured step. With
    # the audit the proofs took ResNet-18 2.3 s (steps of 4 ms), ResNet-50 3.0 s (31 ms), and InceptionV3 in float32 on
    # an H200 more than 16 s (66 ms), where the normal limits do not decide.
    CHANNELS_LAST: Prior(
        gain=Range(0.9, 1.4, 1.7), prepare=Range(1.0, 2.0, 6.0), swap=None, chance=0.8, rows="inception, resnet-50"
    ),
    f"{CHANNELS_LAST}+graph": Prior(
        gain=Range(0.9, 1.5, 1.7), prepare=Range(1.0, 2.0, 6.0), swap=None, chance=0.8, rows="inception, resnet-50"
    ),
    "regional": Prior(
        gain=Range(0.84, 1.15, 1.66),
        prepare=Range(5.6, 10.0, 77.0),
        swap=Range(1.0, 1.5, 2.0),
        chance=0.7,
        rows="xlmr, gpt, unet: regional",
    ),
    "regional+graph": Prior(
        gain=Range(1.0, 1.2, 1.45),
        prepare=Range(10.0, 13.0, 80.0),
        swap=Range(1.1, 1.6, 2.2),
        chance=0.8,
        rows="xlmr, unet: regional + graph; gpt: regional, head and loss too",
    ),
    "full": Prior(
        gain=Range(1.05, 1.2, 1.58),
        prepare=Range(17.0, 30.0, 126.0),
        swap=Range(1.5, 5.0, 7.0),
        chance=0.7,
        rows="all: default",
    ),
    "full+graph": Prior(
        gain=Range(1.0, 1.3, 2.6),
        prepare=Range(18.0, 30.0, 132.0),
        swap=Range(2.0, 5.2, 8.0),
        chance=0.8,
        rows="xlmr, unet: default + graph; inception, gpt: reduce-overhead",
    ),
    "autotune+graph": Prior(
        gain=Range(0.95, 1.35, 2.7),
        prepare=Range(150.0, 200.0, 400.0),
        swap=Range(3.0, 8.0, 15.0),
        chance=0.5,
        rows="tiny: Inductor + CUDA graphs, shape padding, max_autotune, dynamic; xlmr: over 200 s",
    ),
}

CPU: Mapping[str, Prior] = {
    "regional": Prior(
        gain=Range(0.95, 1.05, 1.15),
        prepare=Range(5.0, 15.0, 40.0),
        swap=Range(2.0, 5.0, 15.0),
        chance=0.5,
        rows="none: a CPU's usual gain",
    ),
    "full": Prior(
        gain=Range(0.95, 1.1, 1.2),
        prepare=Range(10.0, 30.0, 60.0),
        swap=Range(3.0, 10.0, 25.0),
        chance=0.5,
        rows="none: a CPU's usual gain",
    ),
}

_PROOF_STEPS = 4
_PROOF_STEPS_OF_LAYOUT = 50
"""An audit, and three steps that are rehearsed, run so, run eagerly and in more bits: in steps of the program."""
_SECONDS_A_BYTE = 0.2e-9
"""What copying and comparing adds to the proofs of a captured step, for each byte of parameters and optimizer state.
On an H200, XLM-R base (3.3 GB) took 0.9 to 1.0 s to prepare, and 1.4 s when its noise had to be measured twice."""
_CHILD_START_SECONDS = 5.0
"""Seconds until a child process has imported torch and rebuilt the component; a guess."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Facts:
    """What is known of the program.

    Args:
        device: ``cuda`` or ``cpu``.
        eager_seconds: seconds of an eager step.
        launch_bound: share (0 to 1) of the eager step in which the device waits for the host, or None if unknown.
        measured: seconds of a step of each tier that was timed in this run.
        state_bytes: bytes of parameters and optimizer state, which a proof copies and compares.
        slower: how many times longer than the table expects a compile of this program took; 1 before any compile.
    """

    device: str
    eager_seconds: float
    launch_bound: float | None = None
    measured: Mapping[str, float] = dataclasses.field(default_factory=dict)
    state_bytes: int = 0
    slower: float = 1.0

    @property
    def priors(self) -> Mapping[str, Prior]:
        """The table of the kind of device; the CPU's for any that is not CUDA."""
        return CUDA if self.device == "cuda" else CPU


def step_range(tier: str, facts: Facts) -> Range:
    """Return the seconds that a step of ``tier`` is expected to take, from the nearest tier that was measured."""
    priors, eager = facts.priors, facts.eager_seconds
    gain, graph = priors[tier].gain, tier.endswith("+graph")
    measured = [name for name in priors if name in facts.measured and name.endswith("+graph") == graph]
    if tier.startswith("eager"):  # how much the layout gave away is not known
        measured = [name for name in measured if not name.startswith(CHANNELS_LAST)]
    if measured:
        place = list(priors).index(tier)
        nearest = min(measured, key=lambda name: abs(list(priors).index(name) - place))
        base, known = facts.measured[nearest], priors[nearest].gain.expected
        # Inductor lays convolutions out channels last itself: beside what it compiles, the layout gives nothing.
        if tier.startswith(CHANNELS_LAST) and not nearest.startswith("eager"):
            gain = Range(1.0, 1.0, 1.0)
        elif nearest.startswith(CHANNELS_LAST):
            known = 1.0
        # The nearest tier's own gain is known now, so only the difference between the two is an expectation.
        return Range(
            base * known / max(known, gain.high), base * known / gain.expected, base * known / min(known, gain.low)
        )
    waiting = Range(0.0, 0.0, 0.0)
    if graph:
        share = number(facts.launch_bound)
        waiting = CAPTURED if share is None else Range(*(min(0.95, share + slack) for slack in (-0.05, 0.0, 0.05)))
    return Range(
        eager * (1 - waiting.high) / gain.high,
        eager * (1 - waiting.expected) / gain.expected,
        eager * (1 - max(0.0, waiting.low)) / gain.low,
    )


def expect(tier: str, facts: Facts, *, background: bool = False) -> Option | None:
    """Return the option that ``tier`` is expected to be, or None if the table has no such tier or no such way.

    Args:
        tier: its name.
        facts: what is known of the program.
        background: whether a child can compile it.
    """
    prior = facts.priors.get(tier)
    if prior is None or (background and prior.swap is None):
        return None
    # The tiers compile the same code: how long one compile of the program took tells how long the others will take.
    layout = tier.startswith(CHANNELS_LAST)
    nothing_compiled = layout or tier == "eager+graph"
    slower = 1.0 if nothing_compiled else max(1.0, number(facts.slower) or 1.0)
    expected = slower * prior.prepare.expected
    prepare = Range(prior.prepare.low, expected, max(prior.prepare.high, expected))
    stall = prior.swap if background and prior.swap is not None else prepare
    proof = (_PROOF_STEPS_OF_LAYOUT if layout else _PROOF_STEPS) * facts.eager_seconds
    step = step_range(tier, facts)
    copies, again = 0.0, proof
    if tier.endswith("+graph"):
        copies = _SECONDS_A_BYTE * facts.state_bytes
        capture = facts.priors.get("eager+graph")
        again += copies + (capture.prepare.expected if capture is not None else 0.0)
    return Option(
        tier=tier,
        step_seconds=step.expected,
        step_worst_seconds=step.high,
        prepare_seconds=stall.expected + copies,
        prepare_worst_seconds=stall.high + copies,
        source="prior",
        background_seconds=_CHILD_START_SECONDS + prepare.expected if background else None,
        proof_seconds=proof,
        again_seconds=None if nothing_compiled else again,
        chance=prior.chance,
        by_steps=nothing_compiled,
    )

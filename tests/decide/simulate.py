"""Plays whole runs in simulated seconds: a loop like `hotloop.Loop`, which asks `decide` and does what it says.

Run as a script, it prints the totals as a table: ``python tests/decide/simulate.py``.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import functools
import math
import statistics

from worlds import WORLDS, World, best_fixed, each, fixed, noise, steady

from hotloop.decide import EAGER_STEPS, Facts, Option, Speeds, Standing, Trial, decide, expect, remaining
from hotloop.decide.guard import CERTAIN

STEPS = (50, 200, 1_000, 10_000, 100_000)
PARTS, RECORDED = (0.2, 0.4, 0.6, 0.8, 1.0), 0.6
"""Share of a preparation by steps after which the recording can be replayed (XLM-R on an H200)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setup:
    """How a run is started. ``stored``: the costs are known from earlier runs. ``knows_bound``: device-busy is known."""

    total: int
    told: bool = True
    background: bool = True
    stored: bool = False
    knows_bound: bool = True
    seed: int | None = None


class Run:
    """One run, played to its end."""

    def __init__(self, world: World, setup: Setup) -> None:
        self.world, self.setup = world, setup
        self.noise = noise(setup.total, setup.seed)
        self.step, self.seconds = 0, 0.0
        self.tier = "eager"
        self.trial_seconds = self.prepare_seconds = self.saved = 0.0
        self.recent: collections.deque[float] = collections.deque(maxlen=100)
        self.speeds = Speeds()
        self.ready: dict[str, float] = {}
        self.proven: set[str] = set()
        self.child: tuple[str, float, float] | None = None
        self.began, self.expected, self.slower = 0.0, math.inf, 1.0
        self.paired: str | None = None
        self.decisions = []
        self.excess = -math.inf
        """Most seconds, at any step, above 1.02 x eager + 1 s of the steps done."""
        self.wasted: list[float] = []
        self.given_up: set[str] = set()
        self.asked = 0

    def play(self) -> Run:
        warm = min(3, self.setup.total)
        self.seconds, self.step = self.world.cold * warm / 3, warm
        self.forward(EAGER_STEPS - warm)
        while self.step < self.setup.total:
            decision = self.ask()
            if decision.action == "prepare":
                self.start_child(decision)
            elif decision.action == "try":
                self.attempt(decision)
            elif decision.action == "switch":
                self.speeds.switch(self.tier, decision.tier, self.left)
                self.tier, self.paired = decision.tier, None
                self.decisions.append((self.step, decision))
            else:
                self.paired = None
                self.forward(decision.ask_again_in_steps, decision.ask_again_in_seconds)
        return self

    def spend(self, seconds: float) -> None:
        self.seconds += seconds
        self.check()

    def check(self) -> None:
        eager = fixed(self.world, self.noise, "eager", self.step)
        self.excess = max(self.excess, self.seconds - 1.02 * eager - 1.0)

    def one(self, tier: str) -> float:
        took = self.world.ms(tier, self.step) / 1e3 * self.noise.at(self.step)
        self.step, self.seconds = self.step + 1, self.seconds + took
        return took

    def forward(self, steps: int, seconds: float = math.inf) -> None:
        """Steps in the tier in force, up to when the child is done at the latest."""
        end, start, began = min(self.step + max(0, steps), self.setup.total), self.step, self.seconds
        until = min([self.seconds + seconds, *(self.child or ())[1:]])
        while self.step < end and (self.step == start or self.seconds < until):
            # In portions, so that a clock is seldom read: as exact as the question needs to be.
            portion = min(end, self.step + max(1, (end - start) // 32))
            self.seconds += steady(self.world, self.noise, self.tier, self.step, portion)
            self.step = portion
        self.recent.extend(each(self.world, self.noise, self.tier, max(start, self.step - 100), self.step))
        if self.recent:
            self.speeds.see(self.tier, statistics.median(self.recent))
        self.saved += self.speeds.saved(self.tier, self.seconds - began)
        self.check()
        if self.child is not None and self.seconds >= self.child[1]:
            self.ready[self.child[0]] = self.world.tiers[self.child[0]].swap(self.child[0])
            self.slower, self.child = self.late, None
        elif self.child is not None and self.seconds >= self.child[2]:
            self.speeds.reject(self.child[0], self.left)
            self.child = None

    @property
    def late(self) -> float:
        """How many times longer than expected a child took, or has taken so far."""
        return self.slower if self.child is None else max(self.slower, (self.seconds - self.began) / self.expected)

    @property
    def left(self) -> int:
        return remaining(self.step, self.setup.total if self.setup.told else None).steps

    def ask(self):
        self.asked += 1
        eager = self.speeds.seconds("eager")
        standing = Standing(
            step=self.step,
            total_steps=self.setup.total if self.setup.told else None,
            tier=self.tier,
            step_seconds=self.speeds.seconds(self.tier),
            step_high_seconds=self.speeds.high_seconds(self.tier),
            recent_seconds=statistics.median(self.recent) if len(self.recent) >= 20 else None,
            eager_seconds=eager,
            eager_low_seconds=self.speeds.base_low_seconds,
            trial_seconds=self.trial_seconds,
            prepare_seconds=self.prepare_seconds,
            saved_seconds=self.saved,
            preparing=self.child and self.child[0],
        )
        return decide(standing, self.options() if eager else [])

    def options(self) -> list[Option]:
        eager = self.speeds.seconds("eager")
        facts = Facts(
            device=self.world.device,
            eager_seconds=eager,
            launch_bound=self.world.launch_bound if self.setup.knows_bound else None,
            measured=self.speeds.measured(),
            slower=self.late,
        )
        options = []
        for tier in ("eager", *(name for name in self.world.tiers if name not in self.given_up)):
            if tier == "eager" or tier in self.proven:
                options.append(self.proven_option(tier))
                continue
            for background in (False, True):
                option = self.stored_option(tier, background) if self.setup.stored else None
                option = option or expect(tier, facts, background=background)
                if option is None or (background and not self.setup.background):
                    continue
                if background and tier in self.ready:
                    swap = self.ready[tier]
                    # The child has compiled twice, the second time warm: what the swap will take is known from it.
                    option = dataclasses.replace(
                        option, background_seconds=None, prepare_seconds=swap, prepare_worst_seconds=1.1 * swap
                    )
                if background and self.child and self.child[0] == tier:
                    spent = self.seconds - self.began
                    option = dataclasses.replace(
                        option, background_seconds=max(option.background_seconds - spent, spent)
                    )
                rejected = self.speeds.rejected_at(tier)
                options.append(option if rejected is None else dataclasses.replace(option, rejected_at=rejected))
        return options

    def proven_option(self, tier: str) -> Option:
        return Option(
            tier=tier,
            step_seconds=self.speeds.seconds(tier) or math.nan,
            prepare_seconds=0.0,
            source="measured",
            paired=self.paired == tier,
            rejected_at=self.speeds.rejected_at(tier),
        )

    def stored_option(self, tier: str, background: bool) -> Option:
        truth = self.world.tiers[tier]
        return Option(
            tier=tier,
            step_seconds=truth.ms / self.world.eager_ms * self.speeds.seconds("eager"),
            prepare_seconds=truth.swap(tier) if background else truth.prepare,
            background_seconds=5.0 + truth.prepare if background else None,
            proof_seconds=4 * self.world.eager_ms / 1e3,
            source="stored",
        )

    def start_child(self, decision) -> None:
        self.began, self.expected = self.seconds, decision.numbers["background_seconds"] / self.slower
        done = self.seconds + 5.0 + 1.1 * self.world.tiers[decision.tier].prepare
        self.child = (decision.tier, done, self.seconds + decision.limit_seconds)
        self.decisions.append((self.step, decision))

    def attempt(self, decision) -> None:
        """Prepare, prove on four steps, then time by turns."""
        tier, prepared = decision.tier, 0.0
        self.decisions.append((self.step, decision))
        if tier not in self.proven and tier != "eager":
            prepared = self.ready.pop(tier, self.world.tiers[tier].prepare)
            eager_low = self.speeds.base_low_seconds or 0.0
            by_steps = tier == "eager+graph" and self.setup.told
            limit = decision.limit_seconds if by_steps else math.inf
            saving = max(0.0, eager_low - self.world.ms(tier, self.step) / 1e3) * self.left
            for part in PARTS:  # given up between two steps; once it was replayed, what it saves is known
                room = limit + (CERTAIN * saving if part >= RECORDED else 0.0)
                if part < 1.0 and part * prepared > room:
                    self.spend(part * prepared)
                    self.trial_seconds += part * prepared
                    self.wasted.append(part * prepared)
                    self.given_up.add(tier)
                    return
            self.spend(prepared)
            for _ in range(min(4, self.setup.total - self.step)):
                # A step of the proof runs in both; what it takes beyond a step in force is preparation.
                both = self.one("eager") + self.world.ms(tier, self.step - 1) / 1e3
                self.seconds += self.world.ms(tier, self.step - 1) / 1e3
                prepared += max(0.0, both - (self.speeds.seconds(self.tier) or 0.0))
            self.proven.add(tier)
        trial = Trial(self.tier, tier)
        while self.step < self.setup.total and trial.verdict().outcome == "undecided":
            turn = trial.turn()
            trial.add(turn, self.one(turn.tier))
            self.check()
        self.speeds.record(trial, self.left)
        self.recent.clear()
        self.trial_seconds += trial.extra_seconds
        if trial.verdict().outcome == "faster":
            self.paired = tier
            self.prepare_seconds += prepared
        else:
            self.trial_seconds += prepared
            self.wasted.append(prepared)


def play(name: str | World, **setup) -> Run:
    """Play a run. The run of a named workload is played once and shared: change nothing in it."""
    return _played(name, Setup(**setup)) if isinstance(name, str) else Run(name, Setup(**setup)).play()


@functools.cache
def _played(name: str, setup: Setup) -> Run:
    return Run(WORLDS[name], setup).play()


def table(setups: dict[str, dict], steps=STEPS) -> str:
    """Totals in seconds, the times faster than eager, and the geometric mean over the five, a line each."""
    lines = [f"{'':22}{'steps':>8}  " + "".join(f"{name:>20}" for name in WORLDS) + f"{'geometric mean':>18}"]
    for total in steps:
        rows = {"eager": [], "best fixed": []}
        for world in WORLDS.values():
            quiet = noise(total, None)
            rows["eager"].append((fixed(world, quiet, "eager", total), "eager"))
            rows["best fixed"].append(best_fixed(world, quiet, total))
        for title, setup in setups.items():
            runs = [play(name, total=total, **setup) for name in WORLDS]
            rows[title] = [(run.seconds, run.tier) for run in runs]
        for title, found in rows.items():
            gains = [eager[0] / seconds for eager, (seconds, _) in zip(rows["eager"], found, strict=True)]
            cells = "".join(
                f"{seconds:8.1f} {_SHORT[tier]:>5}{gain:5.2f}x"
                for (seconds, tier), gain in zip(found, gains, strict=True)
            )
            lines.append(f"{title:22}{total:8,}  {cells}{statistics.geometric_mean(gains):17.2f}x")
        lines.append("")
    return "\n".join(lines)


_SHORT = {
    "eager": "e", "eager+graph": "e+g", "regional": "r", "regional+graph": "r+g", "full": "f", "full+graph": "f+g",
    "autotune+graph": "a+g",
}  # fmt: skip

SETUPS = {
    "auto, background": {},
    "auto, foreground": {"background": False},
    "auto, earlier runs": {"stored": True},
    "auto, earlier, fore": {"stored": True, "background": False},
    "auto, bound unknown": {"knows_bound": False},
    "auto, length unknown": {"told": False},
    "auto, unknown, fore": {"told": False, "background": False},
}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workload", choices=WORLDS, help="show one run's decisions instead")
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--foreground", action="store_true")
    parser.add_argument("--stored", action="store_true", help="costs and gains are known from earlier runs")
    parser.add_argument("--unknown", action="store_true", help="the run's length is not told")
    asked = parser.parse_args()
    if asked.workload:
        run = play(
            asked.workload,
            total=asked.steps,
            told=not asked.unknown,
            background=not asked.foreground,
            stored=asked.stored,
        )
        for step, decision in run.decisions:
            print(f"{step:8,}  {decision.action:8}{decision.reason}")
        print(f"{run.seconds:.1f} s in all, {run.trial_seconds:.2f} s of it on trials; asked {run.asked} times")
    else:
        print(table(SETUPS))

"""The goals of the suite, each with its figures and whether it is met, missed or open.

Met: the whole interval meets it. Missed: the whole interval misses it. Open: the interval holds the goal, or something
has not been measured. Step times carry their 95% interval; totals come from too few runs for one, so theirs is the
range of the runs.
"""

from __future__ import annotations

import math
import random

from . import totals
from .plan import FIRST_FIVE, HARD, TIERS, WORKLOADS
from .totals import LONG

STEADY = {"tiny": 9.0, "xlmr": 3.3, "inception": 2.7, "gpt": 1.5, "unet": 1.45}
LENGTHS = {"eager": 3.0, "eager+buckets": 2.0}
NEVER_SLOWER = (1.02, 1.0)
NEAR_BEST = {1_000: (1.10, 0.5), 10_000: (1.03, 0.0), 100_000: (1.03, 0.0)}
MEAN = {1_000: 1.6, 10_000: 2.3}
PREPARED_SECONDS = 3.0
CHOSEN = (*WORKLOADS, *HARD)
CHOICE_MEAN = {1_000: 2.0, 10_000: 2.5}
CHOICE_WORST, LESS_SECONDS = 0.98, 1.0
"""These hold on any one GPU."""
GPU = "H200"
_RESAMPLES = 2_000


def all_goals(document):
    """Judge every goal from the rows of a document."""
    rows = document["rows"]
    found = [*steady(rows), *lengths(rows), *never_slower(rows), *near_best(rows), *means(rows), *soon(rows)]
    on_any_gpu = list(choice(rows))
    gpu = (document.get("machine") or {}).get("gpu")
    if GPU not in (gpu or ""):
        for one in found:
            one |= {"status": "open", "why": f"the goals are set for one {GPU}, this is {gpu or 'a CPU'}"}
    for one in on_any_gpu if gpu is None else ():
        one |= {"status": "open", "why": "the goals are set for a GPU, this is a CPU"}
    return found + on_any_gpu


def judged(goal, target, measured, *, at_least=True, **more):
    """Make a goal's entry: (figure, low, high), or None where there is none, against ``target``."""
    entry = {"goal": goal, "target": f"{'>=' if at_least else '<='} {target}", **more}
    if measured is None:
        return entry | {"status": "open", "why": more.get("why") or "not measured"}
    figure, low, high = measured
    low, high = -math.inf if low is None else low, math.inf if high is None else high
    if not at_least:
        status = "met" if high <= target else "missed" if low > target else "open"
    else:
        status = "met" if low >= target else "missed" if high < target else "open"
    bounds = {"low": None if math.isinf(low) else low, "high": None if math.isinf(high) else high}
    return entry | {"figure": figure, **bounds, "status": status}


def steady(rows):
    """Judge the step of hotloop's fastest tier against eager's beside it."""
    for workload, target in STEADY.items():
        ways = {way: row["steady"] for way, row in totals.fixed(rows, workload).items() if way in TIERS}
        ratios = {way: one for way, one in ways.items() if "ratio" in one}
        goal = f"{workload}: steady step against eager"
        if not ratios:
            yield judged(goal, target, None)
            continue
        way = max(ratios, key=lambda name: ratios[name]["ratio"])
        best, row = ratios[way], totals.fixed(rows, workload)[way]
        measured = best["ratio"], best["ratio_low"], best["ratio_high"]
        yield judged(goal, target, measured, way=way, ms=best["ms"], of_busy=row.get("of_busy"))


def lengths(rows):
    """Judge varying lengths over 1,000 steps with buckets declared, by real runs over the same batches."""
    fixed = totals.fixed(rows, "xlmr-lengths")
    done = {way: row["real"]["1000"] for way, row in fixed.items() if "1000" in (row.get("real") or {})}
    ours = {way: seconds for way, seconds in done.items() if way in TIERS}
    for way, target in LENGTHS.items():
        words = "as written" if way == "eager" else "with the same buckets"
        goal = f"xlmr, lengths 64 to 256, 1,000 steps: total against eager {words}"
        if way not in done or not ours:
            yield judged(goal, target, None)
            continue
        best = min(ours, key=ours.get)
        yield judged(goal, target, (done[way] / ours[best], *resampled(fixed[way], fixed[best])), way=best)


def resampled(slow, fast):
    """Return a 95% interval of the ratio of two totals: the same blocks of batches, drawn anew in pairs (a bootstrap).

    The first steps count in whole, since they happen once. Efron and Tibshirani, 1993, "An Introduction to the
    Bootstrap", section 13.3 (percentiles).
    """
    pairs = list(zip(slow["block_seconds"], fast["block_seconds"], strict=True))
    begins = slow["first_seconds"][-1], fast["first_seconds"][-1]
    draws, ratios = random.Random(0), []
    for _ in range(_RESAMPLES):
        chosen = draws.choices(pairs, k=len(pairs))
        a, b = (begin + sum(pair[side][1] for pair in chosen) for side, begin in enumerate(begins))
        ratios.append(a / b)
    ratios.sort()
    return ratios[int(0.025 * _RESAMPLES)], ratios[int(0.975 * _RESAMPLES) - 1]


def over_runs(goal, target, figures, **more):
    """Judge by the range of the runs; the figure is the middle one."""
    figures = sorted(figures)
    measured = (figures[len(figures) // 2], figures[0], figures[-1]) if figures else None
    return judged(goal, target, measured, at_least=False, runs=len(figures), **more)


def never_slower(rows):
    """Judge `auto` against 1.02 times eager plus a second, by the share of this allowance that it took."""
    for workload in _workloads(rows):
        for steps in totals.STEPS if workload not in HARD else CHOICE_MEAN:  # `auto` is told no other length there
            shares, computed = [], False
            for run in totals.auto_runs(rows, workload, steps):
                eager = (
                    totals.eager_total(rows, workload, steps, totals.beside(run)) if "steady" in run["row"] else None
                )
                if eager is not None:
                    shares.append(run["seconds"] / (NEVER_SLOWER[0] * eager + NEVER_SLOWER[1]))
                    computed |= run["computed"]
            goal = f"{workload}: auto at {steps:,} steps, as a share of 1.02 x eager + 1 s"
            yield over_runs(goal, 1.0, shares, computed=computed)


def near_best(rows):
    """Judge `auto` against the best of all fixed ways in hindsight."""
    for workload in _workloads(rows):
        for steps, (factor, seconds) in NEAR_BEST.items():
            shares, ways, computed = [], set(), False
            for run in totals.auto_runs(rows, workload, steps):
                best = (
                    totals.best_fixed(rows, workload, steps, eager_ms=totals.beside(run))
                    if "steady" in run["row"]
                    else None
                )
                if best is not None:
                    shares.append(run["seconds"] / (factor * best["seconds"] + seconds))
                    ways.add(best["way"])
                    computed |= run["computed"]
            words = f"{factor:.2f} x the best fixed way" + (f" + {seconds} s" if seconds else "")
            goal = f"{workload}: auto at {steps:,} steps, as a share of {words}"
            yield over_runs(goal, 1.0, shares, best=sorted(ways), computed=computed)


def means(rows):
    """Judge the geometric mean of eager over `auto`, over the first five workloads."""
    for steps, target in MEAN.items():
        goal = f"geometric mean over {', '.join(FIRST_FIVE)}: eager over auto at {steps:,} steps"
        yield mean(rows, FIRST_FIVE, steps, goal, target)


def mean(rows, workloads, steps, goal, target):
    """Judge the geometric mean of eager over `auto`, over some workloads, each of which has to be measured."""
    gains = {name: totals.gains(rows, name, steps) for name in workloads}
    if lacking := [name for name, known in gains.items() if not known]:
        return judged(goal, target, None, why=f"no run of {', '.join(lacking)}")
    low, middle, high = (
        math.prod(known[place(len(known))] for known in gains.values()) ** (1 / len(gains))
        for place in (lambda _: 0, lambda number: number // 2, lambda number: number - 1)
    )
    return judged(goal, target, (middle, low, high), computed=steps >= LONG)


def choice(rows):
    """Judge `auto` against eager over all workloads: their geometric mean, and the worst of them less a second."""
    for steps, target in CHOICE_MEAN.items():
        goal = f"geometric mean over all {len(CHOSEN)} workloads: eager over auto at {steps:,} steps"
        yield mean(rows, CHOSEN, steps, goal, target)
        shares = {name: least_share(rows, name, steps) for name in CHOSEN}
        lacking = [name for name, share in shares.items() if share is None]
        worst = None if lacking else min(shares, key=shares.get)
        goal = f"the worst of all {len(CHOSEN)} workloads: eager over auto less {LESS_SECONDS:.0f} s at {steps:,} steps"
        measured = None if lacking else (shares[worst],) * 3
        more = {"why": f"no run of {', '.join(lacking)}"} if lacking else {"best": [worst]}
        yield judged(goal, CHOICE_WORST, measured, computed=steps >= LONG, **more)


def least_share(rows, workload, steps):
    """Return the least of eager's total over `auto`'s less a second, of the runs that tell of so many steps."""
    shares = []
    for run in totals.auto_runs(rows, workload, steps):
        eager = totals.eager_total(rows, workload, steps, totals.beside(run)) if "steady" in run["row"] else None
        if eager is not None:
            spent = run["seconds"] - LESS_SECONDS
            shares.append(eager / spent if spent > 0 else math.inf)
    return min(shares, default=None)


def soon(rows):
    """Judge the seconds from the first step until ``eager+graph`` is in force."""
    for workload in FIRST_FIVE:
        known = [
            row["after_first_seconds"]
            for row in rows
            if (row["workload"], row["way"]) == (workload, "eager+graph")
            and row["kind"] in ("ways", "cold")
            and not row.get("emulated")
            and not row.get("declined")
            and row.get("after_first_seconds") is not None
        ]
        goal = f"{workload}: eager+graph in force, seconds after the first step"
        yield over_runs(goal, PREPARED_SECONDS, known)


def _workloads(rows):
    return dict.fromkeys(row["workload"] for row in rows if row["kind"] == "auto")

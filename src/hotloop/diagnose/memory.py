"""A way to run steps needs more memory than eager, or nearly all of the device's."""

from __future__ import annotations

from hotloop.diagnose.rule import Case, Found, Problem, Rule, number
from hotloop.diagnose.words import size


class Memory(Rule):
    problems = (
        Problem(
            rule="memory",
            kind="more",
            symptom="compiled or captured steps need more memory than eager",
            cause="CUDA graphs keep memory of their own for each shape, and compiled code may keep more for its "
            "backward",
            cost="memory, until a run fails for lack of it",
            change="fewer shapes (buckets), a preset without CUDA graphs (default, aot_eager), or fewer components",
            remedy="tier",
        ),
        Problem(
            rule="memory",
            kind="near_limit",
            symptom="the device's memory is nearly full",
            cause="what a step needs and what is kept between steps nearly fill the device",
            cost="the run, at the first batch that needs more",
            change="a smaller batch, activation checkpointing, preset aot_eager, or fewer compiled components",
        ),
    )
    least_ratio = 1.1  # to eager's peak; smaller changes are the allocator's
    least_bytes = 32 * 2**20  # a smaller difference matters to nobody
    near_limit = 0.9  # of the device's memory: beyond it the next longer batch may not fit

    def find(self, case: Case) -> Found:
        """Yield one advice per way that needs more than eager, and one for a device that is nearly full."""
        eager = number(case.way("eager").get("peak_bytes"))
        peaks = {name: number(figures.get("peak_bytes")) or 0.0 for name, figures in case.measured_ways().items()}
        for name, peak in peaks.items():
            if eager is not None and peak > max(eager * self.least_ratio, eager + self.least_bytes):
                what = f"{name} needs {size(peak)} at its peak, eager {size(eager)}"
                yield self.problem("more").advice(what, nbytes=round(peak - eager))
        peaks["eager"] = eager or 0.0
        available = number(case.environment.get("device_memory_bytes"))
        highest = max(peaks, key=peaks.__getitem__)
        if available is not None and peaks[highest] > self.near_limit * available:
            used = f"{peaks[highest] / available:.0%} of the device's {size(available)}"
            yield self.problem("near_limit").advice(f"{highest} needs {used}")

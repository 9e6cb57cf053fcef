"""Total seconds of a run by its number of steps: measured if such a run was made, else computed from its parts.

Pure arithmetic over the rows of a result file. A row's ``first_seconds`` are the moments, from the begin of the first
step, at which each of the first steps was done; ``prepared_steps`` of them were spent on getting ready.
"""

from __future__ import annotations

import statistics

STEPS = (50, 200, 1_000, 10_000, 100_000)
SHORT, MEDIUM, LONG, LONGEST = 200, 1_000, 10_000, 100_000
"""Steps that `auto` is told: the first two are really run."""


def fixed(rows, workload):
    """Return the complete rows of a workload's fixed ways by name, without failed, declined or emulated rows."""
    found = {}
    for row in rows:
        if (row["kind"], row["workload"]) != ("ways", workload) or row.get("emulated"):
            continue
        if usable(row):
            found[row["way"]] = row
    return found


def usable(row):
    """Return whether a row ran as asked, to its end."""
    return not row.get("error") and not row.get("skipped") and not row.get("declined") and "steady" in row


def prepared(rows, row):
    """Return (steps, seconds) until a way is in force; of several cold runs the median seconds."""
    others = [
        other
        for other in rows
        if other["kind"] == "cold" and (other["workload"], other["way"]) == (row["workload"], row["way"])
    ]
    known = [one for one in (row, *others) if one.get("prepared_seconds") is not None]
    if not known:
        return None
    return row["prepared_steps"], statistics.median(one["prepared_seconds"] for one in known)


def total(rows, row, steps, *, eager_ms=None, real=True):
    """Return the total seconds of a fixed way over so many steps; None where they cannot be known.

    Args:
        rows: of the result file, for repeats of the cold run.
        row: of the way.
        steps: of the run.
        eager_ms: the eager step beside which the total is wanted: the way then keeps its ratio to eager. A captured
            step keeps its own time, since it does not wait for the host, whose speed differs between eager steps. None
            takes the way's own step time.
        real: return the seconds of a real run, if there is one.

    Returns:
        ``{"seconds": float, "computed": bool}`` or None.
    """
    run = row.get("real") or {}
    if real and str(steps) in run:
        return {"seconds": run[str(steps)], "computed": False}
    steady = row["steady"]
    if row.get("varying"):
        if not run or steps < max(map(int, run)):
            return None
        done = max(map(int, run))
        return {"seconds": run[str(done)] + (steps - done) * row["tail_ms"] / 1e3, "computed": True}
    start = prepared(rows, row)
    if start is None or steps < start[0]:
        return None
    ms = steady["ms"]
    if eager_ms is not None and not (row["way"].endswith("+graph") or row["way"] == "reduce-overhead"):
        ms = eager_ms / steady["ratio"] if "ratio" in steady else eager_ms
    first, seconds = start
    return {"seconds": seconds + (steps - first) * ms / 1e3, "computed": True}


def best_fixed(rows, workload, steps, *, eager_ms=None):
    """Return the best of all fixed ways at so many steps: its total, and ``way``; None where none is known."""
    found = []
    for way, row in fixed(rows, workload).items():
        seconds = total(rows, row, steps, eager_ms=eager_ms, real=row.get("varying", False))
        if seconds is not None:
            found.append({**seconds, "way": way})
    return min(found, key=lambda one: one["seconds"]) if found else None


def auto_runs(rows, workload, steps):
    """Return the runs of `auto` that tell of so many steps, each as ``{"seconds", "computed", "row"}``.

    50 steps are read off the runs told 200; 10,000 and 100,000 are computed from the runs that were told so many and
    had settled, those of 100,000 from the runs told 10,000 where there is no other.
    """
    found = []
    usable = [
        row
        for row in rows
        if (row["kind"], row["workload"]) == ("auto", workload) and not row.get("error") and not row.get("emulated")
    ]
    settled = [row for row in usable if row.get("settled") and "steady" in row and LONG <= row["told"] <= steps]
    long = max((row["told"] for row in settled), default=None)
    for row in usable:
        real = row.get("real") or {}
        if steps <= 1_000 and row["told"] == max(steps, 200) and str(steps) in real:
            found.append({"seconds": real[str(steps)], "computed": False, "row": row})
        elif row in settled and row["told"] == long:
            done = max(map(int, real))
            seconds = real[str(done)] + (steps - done) * row["steady"]["ms"] / 1e3
            found.append({"seconds": seconds, "computed": True, "row": row})
    return found


def eager_total(rows, workload, steps, eager_ms=None):
    """Return eager's total seconds over so many steps, at the step time that was measured beside another way."""
    row = fixed(rows, workload).get("eager")
    if row is None:
        return None
    varying = row.get("varying", False)
    found = total(rows, row, steps, eager_ms=None if varying else eager_ms, real=varying or eager_ms is None)
    return None if found is None else found["seconds"]


def beside(run):
    """Return the eager step in ms that was measured in a run of `auto`; None where sizes vary."""
    return None if run["row"].get("varying") else run["row"]["steady"]["eager_ms"]


def gains(rows, workload, steps):
    """Return eager's total over `auto`'s for each run that tells of so many steps, the smallest first."""
    runs = [run for run in auto_runs(rows, workload, steps) if "steady" in run["row"]]
    eager = [eager_total(rows, workload, steps, beside(run)) for run in runs]
    return sorted(e / run["seconds"] for e, run in zip(eager, runs, strict=True) if e is not None)


def checks(rows):
    """Compare each real run with the total that is computed from its parts."""
    found = []
    for row in rows:
        if row["kind"] != "ways" or row.get("varying") or not usable(row):
            continue
        for steps, seconds in (row.get("real") or {}).items():
            computed = total(rows, row, int(steps), real=False)
            if computed is not None and int(steps) >= 200:
                found.append(
                    {
                        "workload": row["workload"],
                        "way": row["way"],
                        "steps": int(steps),
                        "real_seconds": seconds,
                        "computed_seconds": computed["seconds"],
                        "real_over_computed": seconds / computed["seconds"],
                    }
                )
    return found


def table(rows, workloads):
    """Return all totals as rows of plain data: workload, way, and per number of steps the seconds or None."""
    found = []
    for workload in workloads:
        for way, row in fixed(rows, workload).items():
            found.append({"workload": workload, "way": way, "totals": {str(n): total(rows, row, n) for n in STEPS}})
        runs = {n: auto_runs(rows, workload, n) for n in STEPS}
        if any(runs.values()):
            totals = {str(n): _median(those) for n, those in runs.items()}
            found.append({"workload": workload, "way": "auto", "totals": totals})
    return found


def _median(runs):
    if not runs:
        return None
    seconds = [run["seconds"] for run in runs]
    return {"seconds": statistics.median(seconds), "computed": runs[0]["computed"], "runs": len(runs)}

"""Results as tables and totals: arithmetic over the jobs of a result file."""

from __future__ import annotations

import math
import re

from .plan import EAGER, ROWS, STAGES, THEIRS

STEPS = (200, 1_000, 10_000)
_WHOLE = 1_000
"""Figures from here on are shown without a fraction."""
_HEAD = (
    "| {} | ms a step | over eager | over theirs | cold s | 200 | 1,000 | 10,000 steps, s | MB | recompiles | leaked "
    "keys |"
)


def in_short(found):
    """Return one line of a job's result."""
    if why := found.get("error") or found.get("skipped"):
        return why.strip().splitlines()[-1][:160]
    if "outcome" in found:
        return found["outcome"]
    if "ways" in found:
        return ", ".join(f"{way} {one['ms']:.3g} ms" for way, one in found["ways"].items())
    if "real" in found:
        return ", ".join(f"{steps} steps {seconds:.4g} s" for steps, seconds in found["real"].items())
    return f"cold {found['cold_seconds']:.3g} s, {found['compiles']} compiles, {found['leaked_keys']} leaked keys"


def ran_eager(compiled, status):
    """Return whether a way that should be compiled ran eager.

    Args:
        compiled: whether something was compiled in its own fits: not where another way has compiled the same code.
        status: the status of ours; empty for another way.
    """
    if compiled or not status:
        return not compiled
    # A loop names its tier first; of what is compiled in place the status has a row for each component.
    return status.startswith("hotloop: eager at") or re.search(r"│ (eager|pending) +│", status) is not None


def total(jobs, row, way, steps):
    """Return the seconds of a run of so many steps; None where they are not known."""
    cold = jobs.get(f"{row}:cold:{way}", {})
    if str(steps) in cold.get("real", {}):
        return cold["real"][str(steps)]
    steady = next((one for key, one in jobs.items() if key.startswith(f"{row}:steady:")), {}).get("ways", {}).get(way)
    if steady is None or "cold_seconds" not in cold:
        return None
    return cold["cold_seconds"] + (steps - cold["cold_steps"]) * steady["ms"] / 1e3


def totals(jobs):
    """Return totals by row, way and steps, and the best of ours against theirs: geometric mean at 1,000 steps."""
    found, gains = {}, []
    for row in ROWS:
        ways = dict.fromkeys(key.split(":", 2)[2] for key in jobs if key.startswith(f"{row.name}:cold:"))
        table = {way: {str(n): total(jobs, row.name, way, n) for n in STEPS} for way in ways}
        if table:
            found[row.name] = table
        mine = [one["1000"] for way, one in table.items() if way not in (EAGER, THEIRS) and one["1000"] is not None]
        if mine and table.get(THEIRS, {}).get("1000") is not None:
            gains.append(table[THEIRS]["1000"] / min(mine))
    if gains:
        mean = math.exp(sum(map(math.log, gains)) / len(gains))
        found["geometric mean of theirs over the best of ours, 1,000 steps"] = mean
    return found


def tables(document):
    """Return the result file as Markdown."""
    jobs, lines = document["jobs"], []
    for row in ROWS:
        if any(key.startswith(f"{row.name}:") for key in jobs):
            lines += [f"### {row.name}: {row.theirs}", "", *_row(jobs, row), *([row.why, ""] if row.why else [])]
            lines += _guide(jobs, row) if row.name == "lightning-inception" else []
    return "\n".join(lines)


def _guide(jobs, row):
    """Return the lines of Lightning's own guide, for its compile and for ours."""
    steady = next((one for key, one in jobs.items() if key.startswith(f"{row.name}:steady:")), {}).get("ways", {})
    lines = []
    for way, found in steady.items():
        if way != EAGER:
            eager, compiled = steady[EAGER]["ms"] / 1e3, found["ms"] / 1e3
            lines += [f"{way}:", "", "```", f"Eager median time: {eager:.4f} seconds"]
            lines += [f"Compile median time: {compiled:.4f} seconds", f"Speedup: {eager / compiled:.1f}x", "```", ""]
    return lines


def _row(jobs, row):
    lines = [_HEAD.format("way"), "|" + "---|" * 11, *_ways(jobs, row), *_failures(jobs, row)]
    return [*lines, ""]


def together(document):
    """Return all rows of the result file as one Markdown table, without injected failures."""
    rows = [row for row in ROWS if any(key.startswith(f"{row.name}:cold:") for key in document["jobs"])]
    lines = [_HEAD.format(""), "|" + "---|" * 11]
    for row in rows:
        first, *others = _ways(document["jobs"], row)
        lines += [first.replace("| ", f"| **{row.name}** ", 1), *others]
    return "\n".join(lines)


def _ways(jobs, row):
    timed = next((one for key, one in jobs.items() if key.startswith(f"{row.name}:steady:")), {})
    steady, said = timed.get("ways", {}), timed.get("status", {})
    idle = [way for way, yes in timed.get("compiled", {}).items() if ran_eager(yes, said.get(way))]
    known = dict.fromkeys(key.split(":", 2)[2] for key in jobs if key.startswith(f"{row.name}:cold:"))
    lines = []
    for way in sorted(known, key=lambda way: (EAGER, THEIRS, *row.gpu, *row.cpu, way).index(way)):
        cold, step = jobs[f"{row.name}:cold:{way}"], steady.get(way, {})
        memory, in_force = ((cold.get(key) or {}).get("allocated_mb") for key in ("memory", "memory_in_force"))
        cells = [
            f"{way} (ran eager)" if way in idle and way != EAGER else way, _span(step, "ms", "ms_low", "ms_high"),
            _span(step.get("over_eager", {})), _span(step.get("over_theirs", {})),
            _number(cold.get("cold_seconds")), *(_number(total(jobs, row.name, way, n)) for n in STEPS),
            _number(memory) + (f" ({_number(in_force)} in force)" if in_force else ""),
            cold.get("recompiles", ""), cold.get("leaked_keys", ""),
        ]  # fmt: skip
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return lines


def _failures(jobs, row):
    lines = ["", "| injected failure | way | what becomes of the run |", "|---|---|---|"]
    for stage in STAGES:
        for way in (THEIRS, "ours:aot_eager"):
            if one := jobs.get(f"{row.name}:failure:{way}:{stage}"):
                off = f", parameters off by {one['off_by']:.1e}" if "off_by" in one else ""
                off += f" (two eager runs by {one['eager_off_by']:.1e})" if "eager_off_by" in one else ""
                lines.append(f"| {stage} | {way} | {in_short(one)}{off} |")
    return lines


def _span(one, middle="ratio", low="low", high="high"):
    if one.get(middle) is None:
        return ""
    return f"{one[middle]:.3g} ({_number(one[low])}-{_number(one[high])})"


def _number(value):
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= _WHOLE else f"{value:.4g}"

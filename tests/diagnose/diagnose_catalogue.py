"""Makes the site's page of every problem: the rules' own words, the programs, and what the rules say of the saved documents."""

from __future__ import annotations

import json

from diagnose_documents import PROGRAMS, SAVED, WRITTEN

from hotloop.diagnose import CATALOGUE, REMEDIES, RULES, diagnose

HEAD = """# Catalogue of advice

What `hotloop doctor` can find, rule by rule: symptom, cause, cost, remedy, the shortest program that shows it, and the
advice as it is printed.

```python
from hotloop import diagnose, record

for advice in diagnose.diagnose(record.load("runs/mine")):  # worst first, by what it costs over the steps planned
    print(advice)
```

- A rule is named `rule`, or `rule: kind` where it tells several things apart (`Advice.rule`, `Advice.kind`).
- Costs are what was measured in that run, and none is named where nothing was. Seconds below come from two CPU cores and
  models of one layer: read them as an example.
- One problem is one advice, whatever the number of events; `Advice.times` says how often it was observed.
- The line that ends in `# here` is the one that the advice has to name.
- "By itself" names what `hotloop.Loop` can do about it without a change to your code.
- The advice of a problem says its cause and remedy as well, where here they stand above it. A cost that all problems of a
  rule share stands at the first.
- Problems without a program need a GPU, several processes, diffusers or what the doctor measures; their advice comes from
  events written by hand.
"""


def render():
    """Return the whole page."""
    rules = "\n".join(f"- [`{name}`](#{name}): {_about(name)}" for name in RULES)
    parts = [HEAD, "## Rules\n", rules]
    for name in RULES:
        parts.append(f"\n## {name}\n")
        told = ""
        for problem in (one for one in CATALOGUE if one.rule == name):
            parts.append(_problem(problem, told))
            told = problem.cost
    return "\n".join(parts)


def _about(rule):
    found = [problem for problem in CATALOGUE if problem.rule == rule]
    return found[0].symptom if len(found) == 1 else ", ".join(problem.kind for problem in found)


def _problem(problem, told_cost):
    """Return the part of a problem, whose cost is left out where the problem before it has the same."""
    name = problem.rule if problem.kind == problem.rule else f"{problem.rule}-{problem.kind}"
    title = problem.symptom if problem.kind == problem.rule else f"{problem.kind}: {problem.symptom}"
    rows = [f"### {title}\n", f"- Cause: {problem.cause}."]
    if problem.cost != told_cost:
        rows.append(f"- Cost: {problem.cost}.")
    rows.append(f"- Remedy: {problem.change}.")
    if problem.remedy is not None:
        rows.append(f"- By itself (`{problem.remedy}`): `hotloop.Loop` {REMEDIES[problem.remedy]}.")
    program = PROGRAMS / f"{name}.py"
    if program.exists():
        rows.append(f"\n```python\n{program.read_text(encoding='utf-8').rstrip()}\n```")
    folder = SAVED if program.exists() else WRITTEN
    document = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
    told = [str(one) for one in diagnose(document) if (one.rule, one.kind) == (problem.rule, problem.kind)]
    said = {f"  cause: {problem.cause}", f"  change: {problem.change}"}
    lines = [line for line in "\n".join(told).splitlines() if line not in said]
    rows.append("\n```\n" + "\n".join(lines) + "\n```\n")
    return "\n".join(rows)

"""Writes the tables of docs/evidence/faults.md from the results of the oldest and the newest torch."""

from __future__ import annotations

import json
import pathlib

BEGIN, END = "<!-- made by python -m benchmarks.faults -->", "<!-- end of what is made -->"
WAYS = {"compile": "in place", "loop": "`Loop`", "train": "`hotloop train`", "lightning": "Lightning"}
PARTS = {"compiling": "The compiler, and compiled steps", "runs": "Runs, disks and folders"}
CODES = {-9: "killed", 2: "refused (exit code 2)"}
LONGEST = 100
"""Characters of a line that the table shows."""


def outcome(row):
    """Say what became of a fault in one way with one torch."""
    trouble = [
        word
        for word, right in (("died", row["as_documented"]), ("silent", row["said"]), ("differs", row["equal"]))
        if not right
    ]
    if trouble:
        return f"**{', '.join(trouble)}**"
    words = [{"bits": "equal", "rounding": "rounding"}.get(row["equal"], row["equal"])]
    words += {"printed": ["said"], "status": ["status"]}.get(row["said"], [])
    codes = [CODES.get(code, f"ended (exit code {code})") for code in row["codes"] if code]
    if len(codes) > 2 and not row["codes"][-1]:
        codes = ["stopped and resumed"]
    elif codes:
        codes = [*dict.fromkeys(codes), *["then 0"] * (not row["codes"][-1])]
    words += codes
    return ", ".join(words)


def cell(rows, notes):
    """Say it for every torch; ``rows`` maps a torch's version to its row."""
    said = {}
    for version, row in rows.items():
        reason = f"n/a: {row['not_here']}" if "not_here" in row else row.get("raised", "")
        if reason and reason not in notes:
            notes.append(reason)
        mark = f" ({notes.index(reason) + 1})" if reason else ""
        said[version] = ("n/a" if "not_here" in row else outcome(row)) + mark
    if len(set(said.values())) == 1:
        return next(iter(said.values()))
    return "; ".join(f"{version}: {words}" for version, words in said.items())


def line(rows):
    """Return the line that names the fault, of the first way that prints it, cut to what a table can hold."""
    found = [row["line"] for row in rows if row.get("said") == "printed" and row["line"]]
    if not found:
        return ""
    text = min(found, key=len).replace("|", "/").replace("`", "'")
    return f"`{text if len(text) <= LONGEST else text[: LONGEST - 4] + ' ...'}`"


def tables(documents):
    """Return the lines of the tables."""
    torches = {document["versions"]["torch"].split("+")[0]: document for document in documents}
    rows = {
        (row["fault"], row["way"], version): row for version, document in torches.items() for row in document["rows"]
    }
    faults = {row["fault"]: row for document in documents for row in document["rows"]}
    tried = sum("not_here" not in row for row in rows.values())
    dates = " and ".join(dict.fromkeys(document["date"] for document in documents))
    made = [f"{tried} cells, run on {dates} with torch {' and '.join(torches)} on a CPU:", ""]
    notes = []
    for part, title in PARTS.items():
        made += [f"## {title}", "", f"| fault | {' | '.join(WAYS.values())} | what is said |", "|---" * 6 + "|"]
        for fault in (name for name, row in faults.items() if row["part"] == part):
            by_way = {
                way: {version: rows[fault, way, version] for version in torches if (fault, way, version) in rows}
                for way in WAYS
            }
            cells = [cell(of, notes) if of else "not run" for of in by_way.values()]
            every = [row for of in by_way.values() for row in of.values()]
            made.append(f"| {faults[fault]['title']} | {' | '.join(cells)} | {line(every)} |")
        made.append("")
    made += [f"{number}. {reason}." for number, reason in enumerate(notes, 1)]
    return made


def write(page, results):
    """Replace what stands between the two marks of a page."""
    documents = [json.loads(pathlib.Path(result).read_text(encoding="utf-8")) for result in results]
    before, rest = page.read_text(encoding="utf-8").split(BEGIN)
    after = rest.split(END)[1]
    text = "\n".join(tables(documents))
    page.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}", encoding="utf-8")

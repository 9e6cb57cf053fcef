"""The plan and the results of the suite as tables for people."""

from __future__ import annotations

import itertools

from rich.console import Console
from rich.table import Table

from . import totals
from .plan import LEFT_OUT, PARTS

WIDTH = 170


def console():
    """Return a console; what is piped gets the full width."""
    found = Console(highlight=False)
    return found if found.is_terminal else Console(width=WIDTH, highlight=False)


def table(title, *columns):
    """Begin a table; columns are words, those of figures end in ``>``."""
    found = Table(title=title, title_justify="left", show_edge=False, min_width=len(title))
    for column in columns:
        found.add_column(column.removesuffix(">"), justify="right" if column.endswith(">") else "left", overflow="fold")
    return found


def plan(rows, held):
    """Print rows that would run, part by part, with estimates of their time."""
    out = console()
    for part, words in PARTS.items():
        those = [row for row in rows if row.part == part]
        if not those:
            continue
        found = table(f"{part}: {words}", "workload", "rows (estimate in s)", "minutes>")
        for workload, group in itertools.groupby(those, key=lambda row: row.workload):
            names = []
            group_rows = list(group)
            for row in group_rows:
                what = row.name + (f", really {row.steps}" if row.steps and row.kind == "ways" else "")
                names.append(f"{what} ({row.seconds})")
            found.add_row(workload, "; ".join(names), f"{sum(row.seconds for row in group_rows) / 60:.1f}")
        found.add_section()
        found.add_row("", "", f"{sum(row.seconds for row in those) / 60:.1f}")
        out.print(found)
        out.print()
    for ways, why in LEFT_OUT.items():
        out.print(f"left out: {ways}: {why}")
    out.print(
        f"{len(rows)} rows, about {sum(row.seconds for row in rows) / 60:.0f} minutes, each an estimate; "
        f"{held} rows are measured already."
    )


def in_short(result):
    """Return a result in a few words."""
    way = result["way"]
    for word in ("error", "skipped", "declined"):
        if result.get(word):
            return f"{way} {word}: {' '.join(str(result[word]).split())[-160:]}"
    words = [way]
    if "told" in result:
        words += [f"{steps} steps in {seconds:.1f} s" for steps, seconds in result["real"].items()]
        words.append(f"in {result.get('ran')}")
    elif result.get("prepared_seconds") is not None:
        words.append(f"cold {result['prepared_seconds']:.1f} s")
    if "steady" in result:
        words.append(f"{result['steady']['ms']:.2f} ms{ratio(result)}")
    return ", ".join(words) + (" (emulated)" if result.get("emulated") else "")


def ratio(result):
    """Return the ratio of a step to eager's beside it, as text."""
    steady = result["steady"]
    if "ratio" not in steady:
        return ""
    return f", {steady['ratio']:.2f}x [{steady['ratio_low']:.2f}, {steady['ratio_high']:.2f}] of {result['beside']}"


def tables(document):
    """Print the tables of a result file: ways and totals."""
    out = console()
    machine = document.get("machine") or {}
    out.print(
        f"{document.get('date')}: {machine.get('gpu') or machine.get('processor')}, torch {machine.get('torch')}, "
        f"hotloop at {machine.get('commit')}"
    )
    out.print(ways(document))
    out.print()
    out.print(total_table(document))
    out.print()
    for found in filter(None, (memory(document), check_table(document))):
        out.print(found)
        out.print()


def ways(document):
    """Print each way's step beside eager's, cold seconds and memory."""
    found = table(
        "steps: medians of blocks in turns with eager",
        *("workload", "way", "ms>", "eager ms>", "eager / way, 95%>", "x busy>", "waits>"),
        *("cold s>", "steps>", "peak MB>", "reserved MB>", "loss off by>", "note"),
    )
    previous = None
    names = list(dict.fromkeys(row["workload"] for row in document["rows"]))
    for row in sorted(document["rows"], key=lambda row: names.index(row["workload"])):
        if row["kind"] != "ways":
            continue
        if previous not in (None, row["workload"]):
            found.add_section()
        previous = row["workload"]
        found.add_row(row["workload"], row["way"], *figures(row), note(row))
    return found


def memory(document):
    """Print the peak memory of each way, and of `auto`: while it gets ready, proofs among that, and in force."""
    rows = [row for row in document["rows"] if row.get("memory")]
    if not rows:
        return None
    columns = ("preparing MB>", "reserved MB>", "in force MB>", "reserved MB>", "ran")
    found = table("memory at its peak, allocated and reserved", "workload", "way", *columns)
    for row in sorted(rows, key=lambda row: row["workload"]):
        way = row["way"] if row["kind"] == "ways" else row["row"].partition(":")[2]
        keys = ("preparing_mb", "preparing_reserved_mb", "peak_mb", "reserved_mb")
        found.add_row(row["workload"], way, *(number(row["memory"].get(key), 0) for key in keys), row.get("ran") or "")
    return found


def figures(row):
    """Return the figures of a row as text."""
    steady, memory = row.get("steady") or {}, row.get("memory") or {}
    cold = row.get("prepared_seconds")
    interval = ""
    if "ratio" in steady and not row.get("emulated"):
        interval = f"{steady['ratio']:.2f} [{steady['ratio_low']:.2f}, {steady['ratio_high']:.2f}]"
    share = row.get("waiting_share")
    return (
        number(steady.get("ms"), 2),
        number(steady.get("eager_ms"), 2),
        interval,
        number(row.get("of_busy"), 2),
        "" if share is None else f"{share:.0%}",
        number(cold, 2) + ("*" if row.get("prepared_from") else ""),
        number(row.get("prepared_steps"), 0),
        number(memory.get("peak_mb"), 0),
        number(memory.get("reserved_mb"), 0),
        "" if row.get("loss_difference") is None else f"{row['loss_difference']:.1e}",
    )


def note(row):
    """Return a remark about a row."""
    words = [
        f"{word}: {' '.join(str(row[word]).split())[:90]}" for word in ("error", "skipped", "declined") if row.get(word)
    ]
    if row.get("emulated"):
        words.append("emulated: right, no speed")
    if row.get("prepared_from"):
        words.append(f"* from the cold run of {row['prepared_from']}")
    return "; ".join(words)


def number(value, digits):
    """Write a figure, or nothing."""
    return "" if value is None else f"{value:,.{digits}f}"


def total_table(document):
    """Print total seconds over steps; computed figures are marked."""
    columns = [f"{n:,} steps>" for n in totals.STEPS]
    found = table("total seconds (~: computed from cold seconds and steady step)", "workload", "way", *columns)
    previous = None
    for row in document["totals"]:
        if previous not in (None, row["workload"]):
            found.add_section()
        previous = row["workload"]
        cells = []
        for one in row["totals"].values():
            runs = f" ({one['runs']})" if one and one.get("runs", 1) > 1 else ""
            cells.append("" if one is None else ("~" if one["computed"] else "") + f"{one['seconds']:,.2f}{runs}")
        found.add_row(row["workload"], row["way"], *cells)
    return found


def check_table(document):
    """Print real runs against computed totals."""
    if not document["checks"]:
        return None
    found = table(
        "computed totals, checked by real runs",
        "workload",
        "way",
        "steps>",
        "real s>",
        "computed s>",
        "real / computed>",
    )
    for one in document["checks"]:
        cells = (number(one[key], 2) for key in ("real_seconds", "computed_seconds", "real_over_computed"))
        found.add_row(one["workload"], one["way"], f"{one['steps']:,}", *cells)
    return found

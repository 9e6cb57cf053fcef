"""Total time over steps of every way, as a self-contained SVG: one panel a workload, eager's own time as the measure.

Both axes are logarithmic. A way's line is its total divided by eager's at the same number of steps, so eager is the
line at 1 and lower is better; `auto` is drawn last and bold, each real run a filled dot, computed points hollow.
"""

from __future__ import annotations

import html
import math

from . import totals

_PANEL = (430, 300)
_MARGIN = (52, 34, 150, 40)  # left, top, right (for the names), bottom
_COLUMNS = 2
_COLOURS = {
    "default": "#d1603d",
    "reduce-overhead": "#8f5fa8",
    "max-autotune-no-cudagraphs": "#a3713c",
    "eager+graph": "#2f8f5b",
    "regional": "#6aa9d8",
    "regional+graph": "#2a6fb0",
    "full": "#c9a227",
    "full+graph": "#b3261e",
    "autotune+graph": "#5b6770",
    "eager+buckets": "#4fa3a5",
}
_POINTS = sorted({*totals.STEPS, *(round(10 ** (e / 8)) for e in range(14, 41))})
_LABEL_HEIGHT = 12
_LEGEND = "lower is better; filled dots: real runs; the rest is computed from cold seconds and steady step"


def write(document, path):
    """Draw a document's totals into a file."""
    path.write_text(svg(document), encoding="utf-8")


def svg(document):
    """Return the picture as text."""
    rows = document["rows"]
    names = [name for name in dict.fromkeys(row["workload"] for row in rows) if series(rows, name)]
    width, height = (_PANEL[0] + _MARGIN[0] + _MARGIN[2], _PANEL[1] + _MARGIN[1] + _MARGIN[3])
    lines = math.ceil(len(names) / _COLUMNS)
    whole = (width * min(_COLUMNS, max(1, len(names))), 46 + height * max(1, lines))
    machine = document.get("machine") or {}
    title = (
        f"Total time over steps, as a share of eager's: {machine.get('gpu') or machine.get('processor') or ''}, "
        f"torch {machine.get('torch', '')}, {document.get('date', '')}"
    )
    size = f'width="{whole[0]}" height="{whole[1]}" viewBox="0 0 {whole[0]} {whole[1]}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="system-ui, sans-serif" font-size="11">',
        f'<rect width="{whole[0]}" height="{whole[1]}" fill="#fff"/>',
        f'<text x="{_MARGIN[0]}" y="20" font-size="15" font-weight="600">{html.escape(title)}</text>',
        f'<text x="{_MARGIN[0]}" y="36" fill="#555">{_LEGEND}</text>',
    ]
    for place, name in enumerate(names):
        x, y = place % _COLUMNS * width + _MARGIN[0], 46 + place // _COLUMNS * height + _MARGIN[1]
        parts += [f'<g transform="translate({x} {y})">', *panel(rows, name), "</g>"]
    return "\n".join([*parts, "</svg>"]) + "\n"


def series(rows, workload):
    """Return by way its points (steps, total over eager's total, computed), eager left out."""
    found = {}
    fixed = totals.fixed(rows, workload)
    for way, row in fixed.items():
        if way == "eager":
            continue
        steady = row["steady"]
        beside = steady.get("eager_ms") if row.get("beside") == "eager" else None
        points = []
        for steps in _POINTS:
            ours, eager = totals.total(rows, row, steps), totals.eager_total(rows, workload, steps, beside)
            if ours is not None and eager is not None:
                points.append((steps, ours["seconds"] / eager, ours["computed"]))
        if points:
            found[way] = points
    auto = []
    for steps in totals.STEPS:
        for run in totals.auto_runs(rows, workload, steps):
            beside = None if run["row"].get("varying") else (run["row"].get("steady") or {}).get("eager_ms")
            eager = totals.eager_total(rows, workload, steps, beside)
            if eager is not None:
                auto.append((steps, run["seconds"] / eager, run["computed"]))
    if auto:
        found["auto"] = auto
    return found


def panel(rows, workload):
    """Draw one workload."""
    lines = series(rows, workload)
    values = [value for points in lines.values() for _, value, _ in points] + [0.5, 2.0]
    low, high = min(values) * 0.9, max(values) * 1.1
    width, height = _PANEL

    def x(steps):
        return width * (math.log10(steps) - 1.7) / 3.3

    def y(share):
        return height * (math.log(high) - math.log(share)) / (math.log(high) - math.log(low))

    yield f'<text y="-8" font-size="13" font-weight="600">{html.escape(workload)}</text>'
    yield f'<rect width="{width}" height="{height}" fill="none" stroke="#ccc"/>'
    for steps in totals.STEPS:
        at = x(steps)
        yield f'<line x1="{at:.1f}" x2="{at:.1f}" y2="{height}" stroke="#eee"/>'
        yield f'<text x="{at:.1f}" y="{height + 15}" text-anchor="middle" fill="#555">{steps:,}</text>'
    for share in ticks(low, high):
        at = y(share)
        yield f'<line x2="{width}" y1="{at:.1f}" y2="{at:.1f}" stroke="{"#999" if share == 1 else "#eee"}"/>'
        yield f'<text x="-6" y="{at + 4:.1f}" text-anchor="end" fill="#555">{share:g}</text>'
    yield f'<text x="{width / 2}" y="{height + 31}" text-anchor="middle" fill="#555">steps</text>'
    labels = [(y(1.0), "eager", "#777")]
    for way, points in lines.items():
        colour = _COLOURS.get(way, "#111" if way == "auto" else "#888")
        yield from line(way, [(x(steps), y(share), computed) for steps, share, computed in points], colour)
        labels.append((y(points[-1][1]), way, colour))
    for at, name, colour in apart(labels, height):
        yield f'<text x="{width + 6}" y="{at + 4:.1f}" fill="{colour}">{html.escape(name)}</text>'


def line(way, points, colour):
    """Draw one way: a line through its computed points; `auto` through the middle of its runs, with a dot a run."""
    auto = way == "auto"
    path = middles(points) if auto else [(at, height) for at, height, _ in points]
    text = " ".join(f"{at:.1f},{height:.1f}" for at, height in path)
    yield f'<polyline points="{text}" fill="none" stroke="{colour}" stroke-width="{3 if auto else 1.6}"/>'
    for at, height, computed in points if auto else ():
        fill = "#fff" if computed else colour
        yield f'<circle cx="{at:.1f}" cy="{height:.1f}" r="3.5" fill="{fill}" stroke="{colour}"/>'


def middles(points):
    """Return one point for all runs of the same number of steps: the middle one."""
    by_place = {}
    for at, height, _ in points:
        by_place.setdefault(at, []).append(height)
    return [(at, sorted(heights)[len(heights) // 2]) for at, heights in sorted(by_place.items())]


def ticks(low, high):
    """Return round shares between two bounds."""
    every = [digit * 10.0**power for power in range(-3, 5) for digit in (1, 2, 5)]
    return [share for share in every if low <= share <= high]


def apart(labels, lowest):
    """Move labels (height, name, colour) down until none covers another, and up again where that is past the panel."""
    placed, last = [], -math.inf
    for at, name, colour in sorted(labels):
        last = max(at, last + _LABEL_HEIGHT)
        placed.append((last, name, colour))
    room = lowest
    for index in reversed(range(len(placed))):
        at, name, colour = placed[index]
        placed[index] = (min(at, room), name, colour)
        room = placed[index][0] - _LABEL_HEIGHT
    return placed

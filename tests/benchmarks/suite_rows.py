"""Rows of a result file with figures that are easy to reckon with."""

from __future__ import annotations

FIVE = ("tiny", "xlmr", "inception", "gpt", "unet")


def ways(workload, way, *, cold=2.0, ms=10.0, ratio=None, steps=3, **more):
    """A measured fixed way; without a ratio it is eager."""
    steady = {"ms": ms, "ms_low": ms, "ms_high": ms, "blocks": [], "steps": [15]}
    if ratio is not None:
        steady |= {"eager_ms": ms * ratio, "ratio": ratio, "ratio_low": 0.98 * ratio, "ratio_high": 1.02 * ratio}
    first = [cold * (i + 1) / steps for i in range(steps)]
    return {
        "row": f"{workload}:{way}",
        "kind": "ways",
        "workload": workload,
        "way": way,
        "prepared_steps": steps,
        "prepared_seconds": cold,
        "after_first_seconds": first[-1] - first[0],
        "first_seconds": first,
        "beside": None if ratio is None else "eager",
        "steady": steady,
        **more,
    }


def cold(workload, way, seconds):
    """Cold seconds a second time."""
    return {
        "row": f"{workload}:{way}, cold 2",
        "kind": "cold",
        "workload": workload,
        "way": way,
        "prepared_seconds": seconds,
        "after_first_seconds": seconds - 1,
    }


def auto(workload, told, real, *, number=1, ms=2.0, eager_ms=10.0, **more):
    """A real run of `auto`: ``real`` gives seconds by steps."""
    steady = {"ms": ms, "eager_ms": eager_ms, "ratio": eager_ms / ms, "ratio_low": 1.0, "ratio_high": 9.0}
    return {
        "row": f"{workload}:auto told {told} (run {number})",
        "kind": "auto",
        "workload": workload,
        "way": "auto",
        "told": told,
        "real": {str(steps): seconds for steps, seconds in real.items()},
        "steady": steady,
        **more,
    }


def document(rows, gpu="NVIDIA H200"):
    return {"date": "2026-11-20", "machine": {"gpu": gpu, "processor": "P", "torch": "2.11.0"}, "rows": rows}


def whole():
    """A document in which the five workloads are fast: ratio 5, and `auto` a little behind the best."""
    rows = []
    for name in FIVE:
        rows += [ways(name, "eager"), ways(name, "default", cold=20.0, ms=8.0, ratio=1.25)]
        rows += [ways(name, "full+graph", cold=10.0, ms=2.0, ratio=5.0, steps=8)]
        rows += [ways(name, "eager+graph", cold=3.0, ms=5.0, ratio=2.0, steps=6), cold(name, "eager+graph", 3.4)]
        rows += [auto(name, 1_000, {50: 2.5, 200: 4.0, 1_000: 8.0 + number}, number=number) for number in (0, 0.2)]
        rows += [auto(name, 10_000, {50: 2.5, 200: 4.0, 1_000: 12.0, 1_500: 13.0}, settled=True)]
        rows += [auto(name, 200, {50: 2.5, 200: 4.0 + number / 10}, number=number) for number in range(1, 6)]
    return document(rows)
